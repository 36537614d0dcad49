//! Tiles of quantized activations, and the arithmetic of one block that every instruction set
//! shares.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use kvant_codec::Rotation;

use crate::simd::matmul::format::{BLOCK, GROUPS};

/// Sums of a block's q: columns 0..16, 16..32, and all.
pub(super) const SUMS: usize = 3;

/// The codes of a block, four to a word: what a vector kernel broadcasts. No block crosses a cache
/// line, as a matrix unit loads it whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(32))]
pub(crate) struct Codes(pub [i32; GROUPS]);

/// One tile of T rows; every slice is `[n_blocks]`.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a, const T: usize> {
    /// The codes of each row.
    pub codes: &'a [[Codes; T]],
    /// The step of each row.
    pub scales: &'a [[f32; T]],
    /// Minus the sums of the codes: compensates a weight code that is 1 too large. For AVX2, which
    /// adds products in 16 bits, two sums of 16 bits: that of the first two codes of each group,
    /// and that of its last two.
    pub neg_sums: &'a [[[i32; T]; SUMS]],
    /// The sums of the codes times the scale: the contribution of a weight minimum of 1.
    pub weighted: &'a [[[f32; T]; SUMS]],
}

impl<const T: usize> Tile<'_, T> {
    /// Returns some of its blocks.
    pub fn blocks(self, blocks: Range<usize>) -> Self {
        Self {
            codes: &self.codes[blocks.clone()],
            scales: &self.scales[blocks.clone()],
            neg_sums: &self.neg_sums[blocks.clone()],
            weighted: &self.weighted[blocks],
        }
    }
}

/// A tile that is being written, see [`Tile`].
pub(super) struct TileMut<'a, const T: usize> {
    pub codes: &'a mut [[Codes; T]],
    pub scales: &'a mut [[f32; T]],
    pub neg_sums: &'a mut [[[i32; T]; SUMS]],
    pub weighted: &'a mut [[[f32; T]; SUMS]],
}

impl<const T: usize> TileMut<'_, T> {
    /// Writes a block of row `t`: its codes, and the sums of its halves.
    #[inline(always)]
    pub fn put(&mut self, block: usize, t: usize, codes: &[i32; GROUPS], scale: f32, halves: [i32; 2]) {
        self.codes[block][t] = Codes(*codes);
        self.scales[block][t] = scale;
        for (s, sum) in [halves[0], halves[1], halves[0] + halves[1]].into_iter().enumerate() {
            self.neg_sums[block][s][t] = -sum;
            self.weighted[block][s][t] = sum as f32 * scale;
        }
    }

    /// Replaces the sums of a block of row `t` by those of pairs; `halves` has them for its halves.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn put_pairs(&mut self, block: usize, t: usize, halves: [i32; 2]) {
        let [first, second]: [[i16; 2]; 2] = bytemuck::cast(halves);
        let whole = [first[0] + second[0], first[1] + second[1]];
        for (s, sums) in [first, second, whole].into_iter().enumerate() {
            self.neg_sums[block][s][t] = bytemuck::cast([-sums[0], -sums[1]]);
        }
    }

    /// Writes zeros for row `t`.
    pub fn clear(&mut self, t: usize) {
        (0..self.codes.len()).for_each(|block| self.put(block, t, &[0; GROUPS], 0.0, [0; 2]));
    }
}

/// Below this a block counts as zero; the quotient 127 / max would overflow.
const TINY: f32 = 1e-30;

/// Returns `(1 / scale, scale)` of a block whose largest magnitude is `max`. A block with NaN or an
/// infinity gets a NaN scale and no codes, so that the error propagates.
#[inline(always)]
pub(super) fn steps(max: f32) -> (f32, f32) {
    if max <= TINY {
        (0.0, 0.0)
    } else if max.is_finite() {
        (127.0 / max, max / 127.0)
    } else {
        (0.0, f32::NAN)
    }
}

/// Computes `Rotation::tq().forward` of one block, operation by operation, in a form that compilers
/// vectorize.
#[inline(always)]
pub(in crate::ops::matmul) fn rotate(values: &mut [f32; BLOCK]) {
    const ROTATION: Rotation = Rotation::tq();
    const NORM: f32 = 0.176_776_695_296_636_9_f64 as f32;
    #[inline(always)]
    fn butterflies<const H: usize>(values: &mut [f32; BLOCK]) {
        let old = *values;
        for i in 0..BLOCK {
            values[i] = if i & H == 0 { old[i] + old[i + H] } else { old[i - H] - old[i] };
        }
    }
    for (i, value) in values.iter_mut().enumerate() {
        let sign = (ROTATION.before() >> i & 1) as u32;
        *value = f32::from_bits(value.to_bits() ^ sign << 31);
    }
    butterflies::<1>(values);
    butterflies::<2>(values);
    butterflies::<4>(values);
    butterflies::<8>(values);
    butterflies::<16>(values);
    values.iter_mut().for_each(|v| *v *= NORM);
}
