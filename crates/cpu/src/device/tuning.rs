//! Tunes the machine-dependent numbers of matmul: [`autotune`](kvant_backend::autotune) decides
//! when a candidate replaces one.

use std::time::Instant;

use kvant_backend::autotune::{fastest, median};
use kvant_backend::{Backend, Input, Output, Result, SharedBytes, WeightSource};
use kvant_codec::DType;
use kvant_codec::random::Random;

use crate::device::CpuDevice;
use crate::ops::matmul::CpuMatrix;
use crate::ops::matmul::tuning::Tuning;
use crate::simd::isa::Isa;

/// One candidate and its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trial {
    /// The number that was varied; the others were the best so far.
    pub name: &'static str,
    /// Its value.
    pub value: usize,
    /// Seconds of the work: the median of the rounds.
    pub seconds: f64,
    /// Whether it was taken.
    pub is_taken: bool,
}

/// A tunable number: its name, its field, its candidates, and the rows of the work that it affects.
struct Tunable {
    name: &'static str,
    place: fn(&mut Tuning) -> &mut usize,
    candidates: &'static [usize],
    rows: usize,
}

const KNOBS: [Tunable; 3] = [
    Tunable {
        name: "prefetch",
        place: |tuning| &mut tuning.prefetch,
        candidates: &[0, 512, 1024, 2048, 4096, 8192, 16384],
        rows: 1,
    },
    Tunable {
        name: "items_per_thread",
        place: |tuning| &mut tuning.items_per_thread,
        candidates: &[1, 2, 4, 8, 16, 32],
        rows: 1,
    },
    Tunable {
        name: "row_block",
        place: |tuning| &mut tuning.row_block,
        candidates: &[96, 192, 264, 512],
        rows: 512,
    },
];

/// Rounds in which the candidates of a number alternate.
const ROUNDS: usize = 31;
/// The work: matrices of the shape of a feed-forward layer, more of them than caches hold.
const SHAPE: (usize, usize) = (8960, 1536);
const MATRICES: usize = 24;

impl Tuning {
    /// Times the candidates of every number on this machine; takes some ten seconds and 200 MB.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn find(isa: Isa, n_threads: usize) -> Result<(Self, Vec<Trial>)> {
        let mut work = Work::new(isa, n_threads)?;
        let (mut best, mut trials) = (Self::of(isa), Vec::new());
        for knob in &KNOBS {
            let mut rounds = vec![Vec::with_capacity(ROUNDS); knob.candidates.len()];
            for _ in 0..ROUNDS {
                for (&candidate, rounds) in knob.candidates.iter().zip(&mut rounds) {
                    let mut tuning = best;
                    *(knob.place)(&mut tuning) = candidate;
                    rounds.push(work.seconds(tuning, knob.rows)?);
                }
            }
            let default = *(knob.place)(&mut best);
            let default = knob.candidates.iter().position(|&value| value == default);
            let selected =
                knob.candidates[fastest(&rounds, default.expect("a default among the candidates"))];
            let seconds = rounds.into_iter().map(median);
            *(knob.place)(&mut best) = selected;
            trials.extend(knob.candidates.iter().zip(seconds).map(|(&value, seconds)| Trial {
                name: knob.name,
                value,
                seconds,
                is_taken: value == selected,
            }));
        }
        Ok((best, trials))
    }

    /// Returns whether [`Tuning::find`] can have produced these numbers: those of a file may be
    /// arbitrary.
    pub fn is_plausible(mut self) -> bool {
        KNOBS.iter().all(|knob| knob.candidates.contains((knob.place)(&mut self)))
    }
}

/// Products with q4_0 weights, as in decode and in prefill.
struct Work {
    device: CpuDevice,
    weights: Vec<CpuMatrix>,
}

impl Work {
    fn new(isa: Isa, n_threads: usize) -> Result<Self> {
        let device = CpuDevice::new(isa, n_threads)?;
        let (n_out, n_in) = SHAPE;
        let row_bytes = DType::Q4_0.row_bytes(n_in).expect("whole blocks");
        // Zero scales everywhere: the time of a product does not depend on its numbers.
        let bytes = SharedBytes::from(vec![0; n_out * row_bytes]);
        let source = || WeightSource { dtype: DType::Q4_0, n_out, n_in, bytes: bytes.clone() };
        let weights = (0..MATRICES).map(|_| device.upload_matrix(source())).collect::<Result<_>>()?;
        Ok(Self { device, weights })
    }

    /// Returns the seconds of one pass: over every matrix for one row, over one matrix for many.
    fn seconds(&mut self, tuning: Tuning, rows: usize) -> Result<f64> {
        self.device.set_tuning(tuning);
        let (n_out, n_in) = SHAPE;
        let mut values = vec![0.0; rows * n_in];
        Random::new(1).fill_gaussian(&mut values, 1.0);
        let mut x = self.device.buffer(values.len())?;
        self.device.write(&mut x, &values)?;
        let mut y = self.device.buffer(rows * n_out)?;
        let used = if rows == 1 { &self.weights[..] } else { &self.weights[..1] };
        let started = Instant::now();
        for w in used {
            let input = Input { x: &x, norm: None, first_row: 0, rows };
            self.device.project(input, &mut [Output { w, bias: None, y: &mut y, accumulate: false }])?;
        }
        Ok(started.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_among_the_candidates() {
        for knob in &KNOBS {
            assert!(knob.candidates.contains((knob.place)(&mut Tuning::default())), "{}", knob.name);
        }
        assert!(Tuning::default().is_plausible());
        assert!(!Tuning { items_per_thread: usize::MAX, ..Default::default() }.is_plausible());
    }
}
