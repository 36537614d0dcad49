//! Statistics of the inputs of products.

use std::sync::{Mutex, PoisonError};

/// Sums of squares of the inputs that matrices are multiplied with, column by column: what an
/// importance matrix is computed from.
#[derive(Debug)]
pub struct InputSquares {
    n_in: usize,
    sums: Mutex<Vec<ColumnSquares>>,
}

/// The sums of one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct ColumnSquares {
    /// The squares of all inputs, summed by column, `[n_in]`.
    pub sums: Vec<f64>,
    /// Number of inputs.
    pub n_rows: u64,
}

impl InputSquares {
    /// Creates empty sums of `n_matrices` matrices with `n_in` columns: the experts of a layer, or
    /// one.
    pub fn new(n_in: usize, n_matrices: usize) -> Self {
        let empty = ColumnSquares { sums: vec![0.0; n_in], n_rows: 0 };
        Self { n_in, sums: Mutex::new(vec![empty; n_matrices]) }
    }

    /// Returns the number of columns.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// Returns the number of matrices.
    pub fn n_matrices(&self) -> usize {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Adds inputs of matrix `index`, each `[n_in]`.
    ///
    /// # Panics
    /// When there is no such matrix.
    pub fn add<'a>(&self, index: usize, rows: impl Iterator<Item = &'a [f32]>) {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let of = &mut sums[index];
        for row in rows {
            of.sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
            of.n_rows += 1;
        }
    }

    /// Returns the sums of each matrix.
    pub fn matrices(&self) -> Vec<ColumnSquares> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
