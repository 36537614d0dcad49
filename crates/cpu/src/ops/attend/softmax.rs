//! Softmax of scores, and the merge of partial softmax states: see the method in [`super`].

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::shape::{BLOCK_TILES, Lane, Scores};
use crate::simd::vec16::{Lanes, Op, exp2};

/// Applies the soft cap to the scores of some tiles of a block: `cap tanh(score / cap)`, both times
/// log2 e. Values that are not finite become NaN.
///
/// `tanh(y) = (a - b) / (a + b)`, `a = exp(min(2 y, 0))`, `b = exp(min(-2 y, 0))`: off by 2 ·
/// 2.5e-7 and three roundings of 1.
pub(super) struct SoftCap<'a> {
    pub(super) scores: &'a mut [Scores],
    pub(super) tiles: Range<usize>,
    pub(super) cap: f32,
}

impl Op for SoftCap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (zero, cap) = (lanes.splat(0.0), lanes.splat(self.cap));
        // exp(2 y) as a power of two.
        let rate = lanes.splat(2.0 * LOG2_E / self.cap);
        for scores in self.scores.iter_mut() {
            for tile in &mut scores.0[self.tiles.clone()] {
                let x = lanes.load(tile);
                let y = lanes.mul(x, rate);
                let a = exp2(lanes, lanes.sub(zero, lanes.max(lanes.sub(zero, y), zero)));
                let b = exp2(lanes, lanes.sub(zero, lanes.max(y, zero)));
                let tanh = lanes.div(lanes.sub(a, b), lanes.add(a, b));
                lanes.store(lanes.mul_add(x, zero, lanes.mul(tanh, cap)), tile);
            }
        }
    }
}

/// Replaces the scores of some tiles of a block by 2^(score - max); sets the maxima and the sums,
/// `[queries]`.
pub(super) struct Softmax<'a> {
    pub(super) scores: &'a mut [Scores],
    pub(super) tiles: Range<usize>,
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
}

impl Op for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        if L::WIDE == 2 && self.tiles == (0..BLOCK_TILES) {
            self.softmax::<L, true>(lanes)
        } else {
            self.softmax::<L, false>(lanes)
        }
    }
}

impl Softmax<'_> {
    /// Processes the tiles; with `WHOLE`, all tiles of a block, which is faster with many
    /// registers.
    #[inline(always)]
    fn softmax<L: Lanes, const WHOLE: bool>(self, lanes: L) {
        let tiles = if WHOLE { 0..BLOCK_TILES } else { self.tiles };
        let (sixteens, rest) = self.scores.as_chunks_mut::<16>();
        let (maxima, max) = self.max.split_at_mut(16 * sixteens.len());
        let (sums, sum) = self.sum.split_at_mut(16 * sixteens.len());
        let results = maxima.as_chunks_mut().0.iter_mut().zip(sums.as_chunks_mut().0);
        for (scores, (max, sum)) in sixteens.iter_mut().zip(results) {
            let mut lane = [lanes.splat(f32::NEG_INFINITY); 16];
            for (lane, scores) in lane.iter_mut().zip(&*scores) {
                *lane = max_of(lanes, &scores.0[tiles.clone()]);
            }
            lanes.store(lanes.largest_of_each(lane), max);
            for ((lane, scores), &max) in lane.iter_mut().zip(scores).zip(&*max) {
                *lane = powers(lanes, &mut scores.0[tiles.clone()], max);
            }
            lanes.store(lanes.sum_of_each(lane), sum);
        }
        // Two loops, so that the latency of one query's maximum does not stall the next query.
        for (scores, max) in rest.iter().zip(&mut *max) {
            *max = lanes.largest(max_of(lanes, &scores.0[tiles.clone()]));
        }
        for ((scores, &mut max), sum) in rest.iter_mut().zip(max).zip(sum) {
            *sum = lanes.sum(powers(lanes, &mut scores.0[tiles.clone()], max));
        }
    }
}

/// Returns the largest scores of a query, lane by lane.
#[inline(always)]
fn max_of<L: Lanes>(lanes: L, scores: &[[f32; 16]]) -> L::Floats {
    let mut max = lanes.splat(f32::NEG_INFINITY);
    for tile in scores {
        max = lanes.max(lanes.load(tile), max);
    }
    max
}

/// Replaces the scores of a query by 2^(score - max); returns their sums, lane by lane.
#[inline(always)]
fn powers<L: Lanes>(lanes: L, scores: &mut [[f32; 16]], max: f32) -> L::Floats {
    let (mut all, max) = (lanes.splat(0.0), lanes.splat(max));
    for tile in scores {
        let p = exp2(lanes, lanes.sub(lanes.load(tile), max));
        all = lanes.add(all, p);
        lanes.store(p, tile);
    }
    all
}

/// Merges the softmax of more tokens into that of earlier ones, for 16 queries at a time: raises
/// the maxima and adds the sums. Sets the factors on the earlier outputs and on the new weights.
pub(super) struct MergeSoftmax<'a> {
    pub(super) max: &'a mut [[f32; 16]],
    pub(super) sum: &'a mut [[f32; 16]],
    pub(super) more_max: &'a [[f32; 16]],
    pub(super) more_sum: &'a [[f32; 16]],
    pub(super) rescale_old: &'a mut [[f32; 16]],
    pub(super) rescale_new: &'a mut [[f32; 16]],
}

impl Op for MergeSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for i in 0..self.max.len() {
            let (before, more) = (lanes.load(&self.max[i]), lanes.load(&self.more_max[i]));
            let max = lanes.max(before, more);
            let (rescale_old, rescale_new) =
                (exp2(lanes, lanes.sub(before, max)), exp2(lanes, lanes.sub(more, max)));
            let sum = lanes.mul(lanes.load(&self.sum[i]), rescale_old);
            let sum = lanes.mul_add(lanes.load(&self.more_sum[i]), rescale_new, sum);
            lanes.store(max, &mut self.max[i]);
            lanes.store(sum, &mut self.sum[i]);
            lanes.store(rescale_old, &mut self.rescale_old[i]);
            lanes.store(rescale_new, &mut self.rescale_new[i]);
        }
    }
}

/// Rescales outputs to new maxima.
pub(super) struct RescaleOutputs<'a> {
    /// `[queries][width]`
    pub(super) out: &'a mut [Lane],
    pub(super) width: usize,
    /// `[queries]` or more.
    pub(super) rescale_old: &'a [f32],
}

impl Op for RescaleOutputs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for (out, &rescale_old) in self.out.chunks_exact_mut(self.width).zip(self.rescale_old) {
            // Maxima seldom rise after the first blocks. A NaN is not 1.
            if rescale_old != 1.0 {
                for lane in out {
                    lanes.store(lanes.mul(lanes.load(&lane.0), lanes.splat(rescale_old)), &mut lane.0);
                }
            }
        }
    }
}

/// Adds the outputs of another KV split.
pub(super) struct AddSplit<'a> {
    /// `[queries][width]`
    pub(super) out: &'a mut [Lane],
    pub(super) more: &'a [Lane],
    pub(super) width: usize,
    /// Factors on `more`, `[queries]` or more.
    pub(super) rescale_new: &'a [f32],
}

impl Op for AddSplit<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let outs = self.out.chunks_exact_mut(self.width).zip(self.more.chunks_exact(self.width));
        for ((out, more), &rescale_new) in outs.zip(self.rescale_new) {
            for (lane, more) in out.iter_mut().zip(more) {
                let more = lanes.mul(lanes.load(&more.0), lanes.splat(rescale_new));
                lanes.store(lanes.add(lanes.load(&lane.0), more), &mut lane.0);
            }
        }
    }
}
