//! tq3t: weights in 3 bits by trellis coding, after a 32-wide rotation.
//!
//! Purpose: models as good as in q3_K and iq3_s in a tenth fewer bytes, that run at the speed of
//! these bytes. Method: that of turbo3t ([`crate::trellis`]), as QTIP applies it to weights ([arXiv
//! 2406.11235](https://arxiv.org/abs/2406.11235)): the level of an index depends on the index
//! before it too.
//!
//! | format | bytes | values | bits per value |
//! |---|---|---|---|
//! | tq3t | 50 | 128 | 3.125 |
//!
//! ```text
//! y     = Rotation::tq().forward(w)                      four runs of 32
//! ŷ_p   = T[i_p | i_(p-1) << 3] · d / 16                 p: position in the sequence of a run
//! ```
//!
//! **Order.** The sequence runs through the 32 values of a run by columns: 0, 4, .. 28, then 1, 5,
//! .. 29, and so on, and is a ring: value 0 follows value 31. So the four indices of a register's
//! 32-bit lane have their predecessors in one other register, and each run is decoded alone.
//!
//! **Levels** are those of turbo3t in twentieths of a standard deviation instead of fortieths: a
//! byte of seven bits does not saturate products of bytes. `T[63 - w] = -T[w]`, and no level is 0.
//!
//! **Layout.** d f16, then 12 bytes for each run. With `P_m[k] = i[8m + 4 + k] | i[8m + k] << 3`,
//! byte `4t + k` is `P_t[k] | (P_3[k] >> 2t & 3) << 6` for t of 0..3: three words, of which each
//! holds the windows of four values as they are looked up.
//!
//! Encoder: the cheapest path through the trellis of each run (Viterbi), closed to a ring as
//! turbo3t's; d by least squares, twice. Errors of inputs of unequal size are balanced before, by
//! scaling columns (`kvant_quantize`).
//!
//! Zero and non-finite numbers: NaN counts as 0, values are clamped to ±65,504; a block without
//! energy gets d = 0. Seek unit: one block.

use half::f16;

use crate::finite::{F16_MAX, clamp, to_f16};
use crate::trellis::{LEVELS, SEAM_OVERLAP, mirrored};
use crate::{Rotation, tq};

/// Values per block.
pub const LEN: usize = 128;
/// Bytes per block.
pub const BYTES: usize = 50;
/// Bytes before the codes.
pub const HEADER: usize = 2;
/// Values of a run, which have a rotation and a ring of their own.
pub const RUN: usize = tq::LEN;
/// Runs of a block.
pub const RUNS: usize = LEN / RUN;
/// Bytes of a run.
pub const RUN_BYTES: usize = 12;
/// The value of one unit of the levels, in units of d.
pub const UNIT: f32 = 1.0 / 16.0;

/// Levels by window, an index and, above it, its predecessor.
pub const TABLE: [i8; LEVELS] = mirrored(&[
    11, 31, -33, -9, 1, 20, -48, -20, 3, 18, 43, -19, -7, 10, 27, -36, -6, 9, 26, -31, -15, 2, 16, -59, -14,
    1, 15, 39, -24, -6, 7, 25,
]);

/// Units of the levels per standard deviation.
const STEPS_PER_SIGMA: f32 = 20.0;
/// Values of an index, which are also the states of the trellis.
const STATES: usize = 8;
/// Values of a column of the sequence.
const COLUMN: usize = RUN / 4;
/// Rounds of encoding and fitting the scale.
const ROUNDS: usize = 2;

/// The scale and the indices of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Coded {
    pub scale: f16,
    pub indices: [u8; LEN],
}

/// Returns the value at position `p` of the sequence of a run.
const fn value_at(p: usize) -> usize {
    4 * (p % COLUMN) + p / COLUMN
}

/// Returns the value before `value` in the sequence of a run.
const fn previous(value: usize) -> usize {
    if value < 4 { RUN - 4 + (value + 3) % 4 } else { value - 4 }
}

/// Returns the level of each value of a run.
pub fn levels(indices: &[u8; RUN]) -> [i8; RUN] {
    std::array::from_fn(|value| {
        TABLE[usize::from(indices[value]) | usize::from(indices[previous(value)]) << 3]
    })
}

/// A cost that no path reaches.
const FORBIDDEN: f32 = 1e9;

/// Last bits of a cost, which name the predecessor: among costs that differ by more, the smallest
/// wins.
const TAG: u32 = STATES as u32 - 1;

/// The branch metric `(level - x)²` without `x²`, which all paths share: a constant, and a factor
/// of x, `[predecessor][state]`.
const SQUARES: [[f32; STATES]; STATES] = branches(false);
const SLOPES: [[f32; STATES]; STATES] = branches(true);

const fn branches(is_slope: bool) -> [[f32; STATES]; STATES] {
    let (mut branches, mut w) = ([[0.0; STATES]; STATES], 0);
    while w < LEVELS {
        let level = TABLE[w] as f32;
        branches[w >> 3][w & 7] = if is_slope { -2.0 * level } else { level * level };
        w += 1;
    }
    branches
}

/// Advances the costs of all states by a value, in units of the levels. Returns the cheapest
/// predecessor of each.
fn step(costs: &mut [f32; STATES], x: f32) -> [u8; STATES] {
    let before = std::mem::replace(costs, [f32::INFINITY; STATES]);
    // The state is the inner index, so that the loop vectorizes.
    for (predecessor, so_far) in before.into_iter().enumerate() {
        let branches = SQUARES[predecessor].iter().zip(&SLOPES[predecessor]);
        for (cost, (square, slope)) in costs.iter_mut().zip(branches) {
            let sum = so_far + (square + slope * x);
            let way = f32::from_bits(sum.to_bits() & !TAG | predecessor as u32);
            *cost = if way < *cost { way } else { *cost };
        }
    }
    costs.map(|cost| (cost.to_bits() & TAG) as u8)
}

/// A run in the order of its sequence.
type Sequence = [f32; RUN];

/// Returns the state at the seam of a run: that of the cheapest path across it.
fn state_at_seam(x: &Sequence) -> u8 {
    let mut costs = [0.0; STATES];
    for x in &x[RUN - SEAM_OVERLAP..] {
        step(&mut costs, *x);
    }
    let behind: [_; SEAM_OVERLAP] = std::array::from_fn(|p| step(&mut costs, x[p]));
    let cost = |state: &u8| costs[usize::from(*state)];
    let best = (0..STATES as u8).min_by(|a, b| cost(a).total_cmp(&cost(b))).expect("some states");
    behind.iter().rev().fold(best, |state, backpointers| backpointers[usize::from(state)])
}

/// Returns the indices of the cheapest ring through a run that has state `seam` at its seam.
fn encode_ring(x: &Sequence, seam: u8) -> [u8; RUN] {
    let mut costs = [FORBIDDEN; STATES];
    costs[usize::from(seam)] = 0.0;
    let backpointers = x.map(|x| step(&mut costs, x));
    let (mut state, mut indices) = (seam, [0; RUN]);
    for (p, backpointers) in backpointers.iter().enumerate().rev() {
        indices[value_at(p)] = state;
        state = backpointers[usize::from(state)];
    }
    indices
}

/// Returns the levels of a block.
fn block_levels(indices: &[u8; LEN]) -> [i8; LEN] {
    let runs: [_; RUNS] = std::array::from_fn(|run| levels(&indices.as_chunks().0[run]));
    std::array::from_fn(|j| runs[j / RUN][j % RUN])
}

/// Returns the scale and the indices that represent `y`, rotated, best.
fn fit(y: &[f32; LEN]) -> Coded {
    let squares: f64 = y.iter().map(|&v| f64::from(v).powi(2)).sum();
    let unit = (squares / LEN as f64).sqrt() / f64::from(STEPS_PER_SIGMA);
    let mut best = Coded { scale: f16::ZERO, indices: [0; LEN] };
    let (mut best_error, mut scale) = (squares, to_f16(unit as f32 / UNIT));
    // A little more or less of the scale leaves the state at a seam as it is.
    let mut seams = None;
    for _ in 0..ROUNDS {
        let unit = scale.to_f32() * UNIT;
        if unit <= 0.0 {
            break;
        }
        let runs: [Sequence; RUNS] =
            std::array::from_fn(|run| std::array::from_fn(|p| y[RUN * run + value_at(p)] / unit));
        let seams = *seams.get_or_insert_with(|| runs.map(|x| state_at_seam(&x)));
        let mut indices = [0; LEN];
        for ((x, seam), indices) in runs.iter().zip(seams).zip(indices.as_chunks_mut::<RUN>().0) {
            *indices = encode_ring(x, seam);
        }
        let (mut yc, mut cc) = (0.0, 0.0);
        for (&v, level) in y.iter().zip(block_levels(&indices)) {
            yc += f64::from(v) * f64::from(level);
            cc += f64::from(level).powi(2);
        }
        scale = to_f16((yc / cc) as f32 / UNIT);
        let unit = f64::from(scale.to_f32() * UNIT);
        let error = squares - 2.0 * unit * yc + unit * unit * cc;
        if error < best_error {
            (best, best_error) = (Coded { scale, indices }, error);
        }
    }
    best
}

impl Coded {
    /// Decodes the block.
    pub(crate) fn decode(&self) -> [f32; LEN] {
        let unit = self.scale.to_f32() * UNIT;
        let mut y = block_levels(&self.indices).map(|level| f32::from(level) * unit);
        Rotation::tq().inverse(&mut y);
        y
    }
}

/// Returns `P_m` of the layout, `[4]` for each m.
fn pairs(run: &[u8; RUN]) -> [[u8; 4]; 4] {
    std::array::from_fn(|m| std::array::from_fn(|k| run[8 * m + 4 + k] | run[8 * m + k] << 3))
}

pub(crate) fn pack(w: &[f32; LEN], block: &mut [u8; BYTES]) {
    let mut y = w.map(|v| clamp(v, F16_MAX));
    Rotation::tq().forward(&mut y);
    let Coded { scale, indices } = fit(&y);
    let (header, codes) = block.split_at_mut(HEADER);
    header.copy_from_slice(&scale.to_le_bytes());
    for (run, bytes) in indices.as_chunks().0.iter().zip(codes.chunks_exact_mut(RUN_BYTES)) {
        let [low @ .., last] = pairs(run);
        for (t, pair) in low.iter().enumerate() {
            for k in 0..4 {
                bytes[4 * t + k] = pair[k] | (last[k] >> (2 * t) & 3) << 6;
            }
        }
    }
}

pub(crate) fn read(block: &[u8; BYTES]) -> Coded {
    let mut indices = [0; LEN];
    let runs = indices.as_chunks_mut::<RUN>().0.iter_mut();
    for (run, bytes) in runs.zip(block[HEADER..].as_chunks::<RUN_BYTES>().0) {
        for k in 0..4 {
            let last = (0..3).fold(0, |last, t| last | bytes[4 * t + k] >> 6 << (2 * t));
            for (m, pair) in [bytes[k], bytes[4 + k], bytes[8 + k], last].into_iter().enumerate() {
                (run[8 * m + 4 + k], run[8 * m + k]) = (pair & 7, pair >> 3 & 7);
            }
        }
    }
    Coded { scale: f16::from_le_bytes([block[0], block[1]]), indices }
}

pub(crate) fn unpack(block: &[u8; BYTES]) -> [f32; LEN] {
    read(block).decode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn sequence_is_a_ring_through_a_run() {
        for p in 0..RUN {
            assert_eq!(previous(value_at((p + 1) % RUN)), value_at(p), "{p}");
        }
        let mut values: Vec<usize> = (0..RUN).map(value_at).collect();
        assert_eq!(values[..9], [0, 4, 8, 12, 16, 20, 24, 28, 1]);
        values.sort_unstable();
        assert!(values.into_iter().eq(0..RUN));
    }

    /// What kernels rely on: a byte that cannot saturate, a sign of its own, mirrored.
    #[test]
    fn levels_have_seven_bits_and_a_sign() {
        for (w, &level) in TABLE.iter().enumerate() {
            assert!(level != 0 && level.unsigned_abs() < 64, "{level}");
            assert_eq!(TABLE[LEVELS - 1 - w], -level);
        }
    }

    /// Decodes by the documented layout, bit by bit, and with the dense Hadamard matrix.
    #[test]
    fn blocks_decode_as_documented() {
        let mut random = Random::new(1);
        let mut block = [0; BYTES];
        block.fill_with(|| random.bits() as u8);
        block[..2].copy_from_slice(&f16::from_f32(0.75).to_le_bytes());
        let got = unpack(&block);
        for run in 0..RUNS {
            let bytes = &block[HEADER + RUN_BYTES * run..][..RUN_BYTES];
            let pair = |m: usize, k: usize| match m {
                3 => bytes[k] >> 6 | bytes[4 + k] >> 6 << 2 | bytes[8 + k] >> 6 << 4,
                m => bytes[4 * m + k] & 63,
            };
            let index = |j: usize| {
                let pair = pair(j / 8, j % 4);
                usize::from(if j / 4 % 2 == 1 { pair & 7 } else { pair >> 3 })
            };
            let before = |j: usize| if j >= 4 { j - 4 } else { [31, 28, 29, 30][j] };
            let y: [f64; RUN] =
                std::array::from_fn(|j| f64::from(TABLE[index(j) | index(before(j)) << 3]) * 0.75 / 16.0);
            for i in 0..RUN {
                let h = |j: usize| if (i & j).count_ones() % 2 == 1 { -y[j] } else { y[j] };
                let sign = if Rotation::tq().before() >> i & 1 == 1 { -1.0 } else { 1.0 };
                let want = sign * (0..RUN).map(h).sum::<f64>() / 32f64.sqrt();
                // Five butterflies of 32 values below 3: 5 · 2^-24 · 3 · √32 = 5e-6.
                assert!((f64::from(got[RUN * run + i]) - want).abs() <= 5e-6, "{run} {i}");
            }
        }
    }

    #[test]
    fn packing_keeps_scale_and_indices() {
        let (mut w, mut block) = ([0.0; LEN], [0xff; BYTES]);
        Random::new(2).fill_gaussian(&mut w, 0.02);
        pack(&w, &mut block);
        let mut y = w;
        Rotation::tq().forward(&mut y);
        assert_eq!(read(&block), fit(&y));
    }

    /// The best ring of all, found by trying every state at the seam, loses 1.3 % less.
    #[test]
    fn rings_are_nearly_the_best_of_all_seams() {
        let (mut random, mut got, mut best) = (Random::new(3), 0.0, 0.0);
        let squares = |y: &[f32], levels: &[i8]| -> f64 {
            y.iter().zip(levels).map(|(&y, &level)| (f64::from(y) - f64::from(level)).powi(2)).sum()
        };
        for _ in 0..50 {
            let mut y = [0.0; LEN];
            random.fill_gaussian(&mut y, f64::from(STEPS_PER_SIGMA));
            for run in y.as_chunks::<RUN>().0 {
                let x = std::array::from_fn(|p| run[value_at(p)]);
                got += squares(run, &levels(&encode_ring(&x, state_at_seam(&x))));
                best += (0..STATES).map(|seam| cheapest(run, seam)).fold(f64::INFINITY, f64::min);
            }
        }
        assert!(best <= got && got <= 1.02 * best, "{got}, best {best}");
    }

    /// Returns the squared error of the cheapest ring with state `seam` at its seam.
    fn cheapest(run: &[f32], seam: usize) -> f64 {
        let mut costs = [f64::INFINITY; STATES];
        costs[seam] = 0.0;
        for p in 0..RUN {
            let x = f64::from(run[value_at(p)]);
            costs = std::array::from_fn(|state| {
                let way = |from: usize| costs[from] + (f64::from(TABLE[state | from << 3]) - x).powi(2);
                (0..STATES).map(way).fold(f64::INFINITY, f64::min)
            });
        }
        costs[seam]
    }
}
