//! Statistics of the inputs of a model's matrices, while it runs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kvant_backend::InputSquares;

/// Sums of squared inputs of the matrices in a model's layers, by tensor: see
/// [`LayerRange::with_input_statistics`](crate::LayerRange::with_input_statistics).
#[derive(Debug, Default)]
pub struct InputStatistics {
    tensors: Mutex<BTreeMap<String, Arc<InputSquares>>>,
}

impl InputStatistics {
    /// Returns the sums of a tensor with `n_in` columns and `n_matrices` matrices, created on first
    /// use; `None` for a tensor outside the layers.
    pub(crate) fn of(&self, tensor: &str, n_in: usize, n_matrices: usize) -> Option<Arc<InputSquares>> {
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        tensor.starts_with("blk.").then(|| {
            let new = || Arc::new(InputSquares::new(n_in, n_matrices));
            Arc::clone(tensors.entry(tensor.to_owned()).or_insert_with(new))
        })
    }

    /// Returns the sums of each tensor, by name.
    pub fn tensors(&self) -> Vec<(String, Arc<InputSquares>)> {
        let tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        tensors.iter().map(|(name, sums)| (name.clone(), Arc::clone(sums))).collect()
    }
}
