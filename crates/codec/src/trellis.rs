//! turbo3t, turbo2t: the trellis-coded formats of the KV cache.
//!
//! Purpose: a third less error than turbo3 and turbo2 at the same number of bits. Method:
//! trellis-coded quantization (Marcellin and Fischer 1990, [doi](https://doi.org/10.1109/26.46532))
//! with the bit-shift trellis of QTIP ([arXiv 2406.11235](https://arxiv.org/abs/2406.11235)): an
//! index has 3 or 2 bits and the same position as in turbo3 or turbo2, but its level is looked up
//! by the last 6 bits of the sequence. Each index thus selects its own level and the set of levels
//! available to the next.
//!
//! ```text
//! turbo3t   level_p = T[i_p | i_(p-1) << 3]                          8 states
//! turbo2t   level_p = T[i_p | i_(p-1) << 2 | i_(p-2) << 4]          16 states
//! scale     = f16(|y| / |c|), ŷ = c · scale                          c = level / √128, as in turbo
//! ```
//!
//! **Order.** The sequence runs through the N dims of a slice by columns: dims 0, 16, 32, .. , then
//! 1, 17, 33, .. . The predecessor of dim d is d - 16; that of one of the first sixteen is the dim
//! of the last sixteen one to the left. Kernels hold 64 codes of a tile in a register; in this
//! order their predecessors are another such register, unshuffled, for keys and for values. The
//! sequence is a ring: dim 0 follows the last one (tail-biting). No bits are spent on an initial
//! state, and every slice is decoded alone.
//!
//! **Levels** are signed bytes times [`Trellis::STEP`], so that kernels that multiply bytes
//! represent them exactly, and `T[63 - w] = -T[w]`. [`train`] computes them from Gaussian samples.
//!
//! **Encoder.** The cheapest path through the trellis (Viterbi), in integers, so that every device
//! finds the same one. Two passes close the ring: one from [`SEAM_OVERLAP`] values before the seam
//! to as many behind it finds the state at the seam, the other runs around from that state to
//! itself. The best ring of all, found by trying every state, loses 0.3 % (turbo3t) and 1 %
//! (turbo2t) less.

use crate::codebook::SIGMA_128;
use crate::turbo::Book;

pub mod train;

/// Bits that select a level.
pub const WINDOW: usize = 6;

/// Levels per table.
pub const LEVELS: usize = 1 << WINDOW;

/// States of the larger trellis.
const MAX_STATES: usize = 16;

/// Distance in dims between neighbours of a column of the sequence.
pub const STRIDE: usize = 16;

/// Values on either side of the seam that decide its state.
pub const SEAM_OVERLAP: usize = 16;

/// Encoder units per [`Trellis::STEP`].
const UNITS_PER_STEP: f32 = 4.0;

/// The largest magnitude of an encoder value: 16 times it fits `i16`. Slices of unit variance stay
/// below, at 11.4 · 160.
pub const MAX_VALUE: f32 = 2047.0;

/// Factors of [`Trellis::branch`]'s terms; they leave the low bits of all costs free for the
/// predecessor state.
pub const BRANCH_FACTORS: [i16; 2] = [16, 64];

/// The cost of a state that a path may not start in: more than two steps, which reach any state,
/// can save.
pub const FORBIDDEN_COST: i32 = 1 << 28;

/// A codebook with memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trellis {
    bits: u32,
    levels: &'static [i8; LEVELS],
}

impl Trellis {
    /// turbo2t: MSE 0.0802 on slices of 128 from N(0, 1); Lloyd-Max has 0.1185.
    pub const TURBO2T: Self = Self { bits: 2, levels: &mirrored(&TURBO2T) };
    /// turbo3t: MSE 0.0216, Lloyd-Max 0.0338.
    pub const TURBO3T: Self = Self { bits: 3, levels: &mirrored(&TURBO3T) };

    /// The unit of levels, in standard deviations.
    pub const STEP: f32 = 1.0 / 40.0;

    /// The unit of levels, in units of the scale of a slice.
    pub const CENTROID_STEP: f32 = (SIGMA_128 / 40.0) as f32;

    /// Returns the bits per index.
    pub const fn bits(&self) -> u32 {
        self.bits
    }

    /// Returns the levels by the last six bits of the sequence, in units of [`Trellis::STEP`].
    pub const fn levels(&self) -> &'static [i8; LEVELS] {
        self.levels
    }

    /// Returns the branch metric of a step that ends in `window`: the factors of the
    /// [`Trellis::quantize`]d value times `UNIT[0]`, and of `UNIT[1]`. The metric is 64 (level -
    /// value)², less a term common to all steps.
    pub const fn branch(&self, window: usize) -> [i16; 2] {
        let level = self.levels[window] as i16;
        [-2 * level, level * level]
    }

    /// Converts a value of unit variance to encoder units, quarters of a step.
    pub fn quantize(z: f32) -> i32 {
        (z * Self::PER_UNIT).clamp(-MAX_VALUE, MAX_VALUE).round_ties_even() as i32
    }

    /// The factor of [`Trellis::quantize`].
    pub const PER_UNIT: f32 = 40.0 * UNITS_PER_STEP;

    /// Returns the norm of a slice, in units of its scale, from the sum of its squared levels. The
    /// sum is an integer, so that every order of summation gives the same result.
    pub fn norm(squares: u32) -> f64 {
        f64::from(squares).sqrt() * (SIGMA_128 / 40.0)
    }

    /// Returns the number of states: combinations of the remembered index bits.
    pub const fn states(&self) -> usize {
        1 << (WINDOW - self.bits as usize)
    }

    /// Returns the predecessor of `state` whose oldest bits are `oldest`.
    pub const fn before(&self, state: usize, oldest: usize) -> usize {
        self.window(state, oldest) >> self.bits
    }

    /// Returns the six bits that end in `state` and start with `oldest`.
    const fn window(&self, state: usize, oldest: usize) -> usize {
        state | oldest << (WINDOW - self.bits as usize)
    }

    /// Returns the level of dim `dim` of a slice with these indices.
    fn level(&self, indices: &[u8], dim: usize) -> i8 {
        let (bits, mut dim, mut window) = (self.bits as usize, dim, 0);
        for at in (0..WINDOW).step_by(bits) {
            window |= usize::from(indices[dim]) << at;
            dim = previous_dim(indices.len(), dim);
        }
        self.levels[window]
    }

    /// Advances the `costs` of all states by value `x`, and returns the oldest bits of the cheapest
    /// predecessor of each state. Among equal costs the smallest bits win.
    fn step(&self, costs: &mut [i32; MAX_STATES], x: i32) -> [u8; MAX_STATES] {
        let tags = 1 << self.bits;
        let (before, mut backpointers) = (*costs, [0; MAX_STATES]);
        for (state, cost) in costs.iter_mut().enumerate().take(self.states()) {
            let ways = (0..tags).map(|oldest| {
                let [slope, square] = self.branch(self.window(state, oldest)).map(i32::from);
                let so_far = before[self.before(state, oldest)] & !COST_TAG_MASK | oldest as i32;
                so_far + slope * (i32::from(BRANCH_FACTORS[0]) * x) + square * i32::from(BRANCH_FACTORS[1])
            });
            *cost = ways.min().expect("several ways");
            backpointers[state] = (*cost & (tags as i32 - 1)) as u8;
        }
        backpointers
    }

    /// Returns the cheapest state, the lowest among equals.
    fn cheapest(&self, costs: &[i32; MAX_STATES]) -> usize {
        let tagged = costs
            .iter()
            .enumerate()
            .take(self.states())
            .map(|(state, cost)| cost & !COST_TAG_MASK | state as i32);
        (tagged.min().expect("several states") & COST_TAG_MASK) as usize
    }

    /// Returns the state at the seam of the ring `x`, in sequence order: that of the cheapest path
    /// across the seam.
    fn state_at_seam(&self, x: &[i32]) -> usize {
        let mut costs = [0; MAX_STATES];
        for &x in &x[x.len() - SEAM_OVERLAP..] {
            self.step(&mut costs, x);
        }
        let behind: [_; SEAM_OVERLAP] = std::array::from_fn(|p| self.step(&mut costs, x[p]));
        let back = |state, backpointers: &[u8; MAX_STATES]| self.before(state, backpointers[state].into());
        behind.iter().rev().fold(self.cheapest(&costs), back)
    }
}

/// Low bits of a cost, free for a tag.
pub const COST_TAG_MASK: i32 = MAX_STATES as i32 - 1;

impl Book for Trellis {
    fn bits(&self) -> u32 {
        self.bits
    }

    fn indices<const N: usize>(&self, z: &[f32; N]) -> [u8; N] {
        let x: [i32; N] = std::array::from_fn(|p| Self::quantize(z[dim_at(N, p)]));
        self.encode_ring(&x, self.state_at_seam(&x))
    }

    fn values<const N: usize>(&self, indices: &[u8; N]) -> [f32; N] {
        std::array::from_fn(|dim| f32::from(self.level(indices, dim)) * Self::CENTROID_STEP)
    }

    fn norm<const N: usize>(&self, indices: &[u8; N]) -> f64 {
        let squares = (0..N).map(|dim| u32::from(self.level(indices, dim).unsigned_abs()).pow(2));
        Self::norm(squares.sum())
    }
}

impl Trellis {
    /// Returns the indices of the cheapest ring through `x`, in sequence order, that has state
    /// `seam` at its seam.
    fn encode_ring<const N: usize>(&self, x: &[i32; N], seam: usize) -> [u8; N] {
        let mut costs = [FORBIDDEN_COST; MAX_STATES];
        costs[seam] = 0;
        let backpointers = x.map(|x| self.step(&mut costs, x));
        let (mut state, mut indices) = (seam, [0; N]);
        for (p, backpointers) in backpointers.iter().enumerate().rev() {
            indices[dim_at(N, p)] = (state & ((1 << self.bits) - 1)) as u8;
            state = self.before(state, backpointers[state].into());
        }
        indices
    }
}

/// Returns the dim at position `p` of the sequence through a slice of `n`.
pub const fn dim_at(n: usize, p: usize) -> usize {
    let column = n / STRIDE;
    STRIDE * (p % column) + p / column
}

/// Returns the dim that precedes `dim` in the sequence of a slice of `n`.
pub const fn previous_dim(n: usize, dim: usize) -> usize {
    if dim < STRIDE { n - STRIDE + (dim + STRIDE - 1) % STRIDE } else { dim - STRIDE }
}

/// Builds a table from its first half: the second half is the first reversed and negated.
pub(crate) const fn mirrored(half: &[i8; LEVELS / 2]) -> [i8; LEVELS] {
    let mut all = [0; LEVELS];
    let mut i = 0;
    while i < LEVELS / 2 {
        (all[i], all[LEVELS - 1 - i]) = (half[i], -half[i]);
        i += 1;
    }
    all
}

const TURBO2T: [i8; LEVELS / 2] = [
    20, 72, -42, -9, 6, 40, -79, -27, -3, 27, 71, -37, -20, 8, 40, -60, -10, 20, 56, -47, -24, 6, 36, -103,
    -39, -4, 24, 68, -61, -20, 9, 42,
];
const TURBO3T: [i8; LEVELS / 2] = [
    21, 61, -65, -18, 2, 39, -95, -40, 5, 35, 86, -37, -13, 20, 53, -71, -11, 17, 51, -62, -29, 4, 31, -117,
    -28, 1, 29, 77, -48, -12, 14, 49,
];

#[cfg(test)]
mod tests;
