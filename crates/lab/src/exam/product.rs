//! Products of Gaussian rows with a Gaussian matrix.

use kvant_codec::encode;
use kvant_codec::random::Random;
use kvant_conformance::weights::{Activations, Weights, gaussian};

use super::{Answers, Exam, Picks};
use crate::case::Product;
use crate::device::DeviceArithmetic;

/// Values of either kind that the reference judges in a timed request.
const N_EACH: usize = 16;
/// Standard deviation of weights: that of a layer of about 2,500 inputs.
const SIGMA: f64 = 0.02;

/// Products with a matrix.
pub(super) struct ProductExam {
    case: Product,
    state: Vec<u8>,
    weights: Weights,
}

impl ProductExam {
    pub(super) fn new(case: Product, seed: u64) -> Self {
        let Product { dtype, n_out, n_in, .. } = case;
        let row_bytes = dtype.row_bytes(n_in).expect("rows of a target are whole blocks");
        let mut state = vec![0; n_out * row_bytes];
        encode(dtype, &gaussian(seed, n_out * n_in, SIGMA), &mut state).expect("sizes agree");
        let weights = Weights::from_bytes(dtype, n_in, state.clone());
        Self { case, state, weights }
    }
}

impl Exam for ProductExam {
    fn state(&self) -> &[u8] {
        &self.state
    }

    fn inputs(&self, n: usize, random: &mut Random) -> Vec<f32> {
        (0..n * self.case.rows * self.case.n_in).map(|_| random.gaussian() as f32).collect()
    }

    fn check(
        &self,
        arithmetic: &DeviceArithmetic,
        inputs: &[f32],
        answers: Answers<'_>,
        random: &mut Random,
    ) -> Result<(), String> {
        let Product { n_out, n_in, rows, .. } = self.case;
        let picks = Picks { width: 1, n: inputs.len() / n_in * n_out, n_each: N_EACH };
        let (got, mut picked) = picks.take(answers, random)?;
        picked.sort_unstable();
        for of_row in picked.chunk_by(|a, b| a / n_out == b / n_out) {
            let row = of_row[0] / n_out;
            let x = Activations::new(&inputs[row * n_in..][..n_in]);
            for &index in of_row {
                let want = self.weights.product(index % n_out, &x, rows, arithmetic.products);
                if !want.admits(got[index]) {
                    let (row, out, got) = (row % rows, index % n_out, got[index]);
                    let (value, tolerance) = (want.value, want.tolerance);
                    return Err(format!(
                        "row {row}, output {out} is {got}, want {value} within {tolerance:e}"
                    ));
                }
            }
        }
        Ok(())
    }
}
