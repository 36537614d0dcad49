//! Models whose layers run several times (looped language models, arXiv 2510.25741): each run has
//! keys and values of its own, so that the cache has more layers than the file.

use super::{Keys, LayerSpec, LayerState};
use crate::ModelError;

/// How often the layers run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loops {
    /// Number of runs.
    pub n: usize,
    /// Number of layers in the file.
    pub n_layers: usize,
    /// Whether the final norm follows each run, not only the last.
    pub are_normed: bool,
}

impl Loops {
    /// Returns a single run of layers.
    pub fn once(n_layers: usize) -> Self {
        Self { n: 1, n_layers, are_normed: false }
    }

    /// Returns the layer in the file of layer `index`, counted over all runs.
    pub fn in_file(self, index: usize) -> usize {
        index % self.n_layers.max(1)
    }

    /// Returns whether another run follows layer `index` and begins with its norm.
    pub fn is_normed_after(self, index: usize) -> bool {
        self.are_normed && self.in_file(index + 1) == 0 && index + 1 < self.n * self.n_layers
    }
}

/// Reads how often the layers of the file run, and repeats them.
pub(super) fn read(keys: &Keys, layers: &mut Vec<LayerSpec>) -> Result<Loops, ModelError> {
    const RUNS: &str = "num_loops";
    const MAX_RUNS: usize = 64;
    let (n, n_layers) = (keys.size_or(RUNS, 1)?, layers.len());
    if n > MAX_RUNS {
        return Err(keys.bad(RUNS, &format!("at most {MAX_RUNS}"), n));
    }
    if n > 1 && layers.iter().any(|layer| layer.state != LayerState::Own || layer.index.is_some()) {
        let what = format!("several runs of layers without keys of their own ({})", keys.key(RUNS));
        return Err(ModelError::Unsupported { what });
    }
    let are_normed = !keys.flag_or("skip_loop_final_norm", false)?;
    *layers = layers.repeat(n);
    Ok(Loops { n, n_layers, are_normed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_follows_each_run_but_the_last() {
        let loops = Loops { n: 3, n_layers: 2, are_normed: true };
        let normed: Vec<usize> = (0..6).filter(|&index| loops.is_normed_after(index)).collect();
        assert_eq!(normed, [1, 3]);
        assert_eq!((0..6).map(|index| loops.in_file(index)).collect::<Vec<_>>(), [0, 1, 0, 1, 0, 1]);
        assert!((0..6).all(|index| !Loops { are_normed: false, ..loops }.is_normed_after(index)));
        assert!((0..4).all(|index| !Loops::once(4).is_normed_after(index)));
    }
}
