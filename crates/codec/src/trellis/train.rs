//! Training of the trellis tables: Lloyd's method on samples.
//!
//! Alternates two steps: encodes a long sequence of Gaussian samples with the cheapest path, then
//! moves each level to the mean of the samples that it encodes. The result depends on the initial
//! levels. Ascending levels are a poor start (they end at 0.0271 and 0.096); permuted with a
//! stride, so that successive windows have levels far apart, they end at 0.0218 and 0.0788. 15 is
//! the best of all odd strides.

use std::array::from_fn;

use super::{LEVELS, MAX_STATES, Trellis, WINDOW};
use crate::random::Random;

/// Window w starts with the level of rank `w · STRIDE + SHIFT` mod 64; the shift makes the table
/// odd.
const STRIDE: usize = 15;
const SHIFT: usize = (STRIDE - 1) / 2 + LEVELS / 2;

/// Levels during training, in standard deviations.
pub type Levels = [f64; LEVELS];

/// The result of a training round.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// The means of the samples encoded by each level; levels without samples are unchanged.
    pub levels: Levels,
    /// The mean squared error of the previous levels.
    pub mse: f64,
}

/// Returns independent samples of N(0, 1).
pub fn samples(n: usize, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    (0..n).map(|_| random.gaussian()).collect()
}

/// Returns the initial levels: quantiles of the samples, stretched by 1.2, as optimal levels are
/// further out.
pub fn initial_levels(samples: &[f64]) -> Levels {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half: Levels = from_fn(|w| {
        let rank = (w * STRIDE + SHIFT) % LEVELS;
        1.2 * sorted[(2 * rank + 1) * sorted.len() / (2 * LEVELS)]
    });
    odd(|w| (half[w] - half[LEVELS - 1 - w]) / 2.0)
}

/// Runs one round for indices of `bits` bits.
pub fn round(bits: u32, levels: &Levels, samples: &[f64]) -> Round {
    let windows = cheapest_path(bits, levels, samples);
    let (mut sums, mut counts, mut error) = ([0.0; LEVELS], [0.0; LEVELS], 0.0);
    for (&w, &x) in windows.iter().zip(samples) {
        sums[w] += x;
        counts[w] += 1.0;
        error += (x - levels[w]).powi(2);
    }
    let mean = |w: usize| {
        let (mirror, n) = (LEVELS - 1 - w, counts[w] + counts[LEVELS - 1 - w]);
        if n == 0.0 { levels[w] } else { (sums[w] - sums[mirror]) / n }
    };
    Round { levels: odd(mean), mse: error / samples.len() as f64 }
}

/// Runs `rounds` rounds from the [`initial_levels`].
pub fn train(bits: u32, rounds: usize, samples: &[f64]) -> Levels {
    (0..rounds).fold(initial_levels(samples), |levels, _| round(bits, &levels, samples).levels)
}

/// Returns the first half of a table in units of [`Trellis::STEP`].
pub fn to_steps(levels: &Levels) -> [i8; LEVELS / 2] {
    from_fn(|w| (levels[w] / f64::from(Trellis::STEP)).round() as i8)
}

/// Builds a table whose second half is the first reversed and negated.
fn odd(level: impl Fn(usize) -> f64) -> Levels {
    from_fn(|w| if w < LEVELS / 2 { level(w) } else { -level(LEVELS - 1 - w) })
}

/// Returns the windows of the path of least squared error, from any state to any state.
fn cheapest_path(bits: u32, levels: &Levels, samples: &[f64]) -> Vec<usize> {
    let (states, oldest_at) = (1 << (WINDOW as u32 - bits), WINDOW as u32 - bits);
    let mut costs = [0.0; MAX_STATES];
    let mut backpointers = Vec::with_capacity(samples.len());
    for &x in samples {
        let (before, mut windows) = (costs, [0; MAX_STATES]);
        for state in 0..states {
            let ways = (0..1 << bits).map(|oldest| state | oldest << oldest_at);
            let way = ways.map(|w: usize| (before[w >> bits] + (x - levels[w]).powi(2), w));
            (costs[state], windows[state]) =
                way.reduce(|a, b| if b.0 < a.0 { b } else { a }).expect("several ways");
        }
        backpointers.push(windows);
    }
    let mut state = (0..states).min_by(|&a, &b| costs[a].total_cmp(&costs[b])).expect("several states");
    let mut path: Vec<usize> = backpointers
        .iter()
        .rev()
        .map(|windows| {
            let window = windows[state];
            state = window >> bits;
            window
        })
        .collect();
    path.reverse();
    path
}
