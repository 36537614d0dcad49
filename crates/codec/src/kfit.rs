//! The search for k-quant scales.
//!
//! Two shapes of super-block, each solved in three steps: a float scale (and minimum) for every
//! sub-block by trying slightly different step sizes, each followed by weighted least squares;
//! these floats rounded to integers in units of one f16; codes chosen anew under the rounded
//! scales. Larger values weigh more, because they contribute more to a dot product, and so do
//! values of columns with large inputs, where these are known ([`weights`]).
//!
//! The search dominates the encoding time, with 21 steps per value, and is therefore written to
//! vectorize on any instruction set: f32, sums in [`LANES`] lanes, rounding without a call. Loops
//! have a fixed order: the same input gives the same bytes everywhere.

use half::f16;

use crate::finite::to_f16;
use crate::kquant::LEN;

/// Number of partial sums.
const LANES: usize = 8;

/// Sub-blocks with a range below this are constant: their steps are far below half of the smallest
/// scale, 2^-24.
const FLAT_RANGE: f32 = 1.0 / (1u32 << 30) as f32;

/// Step sizes tried around the one that spans the sub-block exactly, in codes.
///
/// The exact one comes first, and others must be better: values that already are codes times a step
/// give the same codes again. At half a code less, the largest value would lie between two codes;
/// the higher one is tried.
const OFFSETS: [f32; 21] = [
    0.0, -1.0, -0.9, -0.8, -0.7, -0.6, -0.49, -0.4, -0.3, -0.2, -0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8,
    0.9, 1.0,
];

/// value = d · scale · code - dmin · min, `S` sub-blocks, unsigned codes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MinBlock<const S: usize> {
    pub d: f16,
    pub dmin: f16,
    pub scales: [u8; S],
    pub mins: [u8; S],
    pub codes: [u8; LEN],
}

/// value = d · scale · code, 16 sub-blocks, signed codes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SymBlock {
    pub d: f16,
    pub scales: [i8; 16],
    pub codes: [i8; LEN],
}

impl<const S: usize> MinBlock<S> {
    /// Fits codes of 0..=`top` and scales and minima of 0..=`scale_top` to values in range; `N`
    /// values share a scale.
    pub fn fit<const N: usize>(
        x: &[f32; LEN],
        importance: Importance<'_, LEN>,
        top: u8,
        scale_top: u8,
    ) -> Self {
        const { assert!(N * S == LEN) };
        let (subs, _) = x.as_chunks::<N>();
        let (mut scales, mut mins) = ([0.0; S], [0.0; S]);
        for (j, sub) in subs.iter().enumerate() {
            (scales[j], mins[j]) = fit_with_min(sub, part(importance, j), top);
        }
        let totals = importance.map(|_| totals::<N, S>(x, importance));
        let (d, scales) = round_unsigned(&scales, totals.as_ref(), scale_top);
        let (dmin, mins) = round_unsigned(&mins, totals.as_ref(), scale_top);
        let coded = Self { d, dmin, scales, mins, codes: [0; LEN] }.with_codes::<N>(x, top);
        refine(coded, x, importance, Self::decode, |coded, weights| {
            Some(coded.with_best_units(x, weights)?.with_codes::<N>(x, top))
        })
    }

    /// Chooses the nearest codes.
    fn with_codes<const N: usize>(mut self, x: &[f32; LEN], top: u8) -> Self {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        let (codes, subs) = (self.codes.as_chunks_mut::<N>().0, x.as_chunks::<N>().0);
        for (((codes, sub), scale), min) in codes.iter_mut().zip(subs).zip(self.scales).zip(self.mins) {
            let (step, min) = (d * f32::from(scale), dmin * f32::from(min));
            if step > 0.0 {
                *codes = sub.map(|v| round_to_int_bytes(clamp_f32((v + min) / step, 0.0, f32::from(top)))[0]);
            }
        }
        self
    }

    /// Returns the block with the units that fit its integers best: weighted least squares of x
    /// against d · scale · code - dmin · min. `None` without a positive solution.
    fn with_best_units(&self, x: &[f32; LEN], weights: &[f32; LEN]) -> Option<Self> {
        let sub = |v: usize| v / (LEN / S);
        let [aa, ab, bb, xa, xb] = sums::<LEN, 5>(|v| {
            let a = f32::from(self.scales[sub(v)]) * f32::from(self.codes[v]);
            let b = f32::from(self.mins[sub(v)]);
            [
                weights[v] * a * a,
                weights[v] * a * b,
                weights[v] * b * b,
                weights[v] * x[v] * a,
                weights[v] * x[v] * b,
            ]
        });
        let det = aa * bb - ab * ab;
        let (d, dmin) =
            if bb == 0.0 { (xa / aa, 0.0) } else { ((xa * bb - xb * ab) / det, (xa * ab - xb * aa) / det) };
        // NaN, from a vanishing determinant, is none.
        (d > 0.0 && dmin >= 0.0).then(|| Self {
            d: to_f16(d as f32),
            dmin: to_f16(dmin as f32),
            ..self.clone()
        })
    }

    pub fn decode(&self) -> [f32; LEN] {
        let (d, dmin) = (self.d.to_f32(), self.dmin.to_f32());
        std::array::from_fn(|v| {
            let sub = v / (LEN / S);
            d * f32::from(self.scales[sub]) * f32::from(self.codes[v]) - dmin * f32::from(self.mins[sub])
        })
    }
}

impl SymBlock {
    /// Fits codes of -`n`..`n` and scales of -`scale_n`..`scale_n` to values in range.
    pub fn fit(x: &[f32; LEN], importance: Importance<'_, LEN>, n: u8, scale_n: i32) -> Self {
        let (subs, _) = x.as_chunks::<16>();
        let scales: [f64; 16] = std::array::from_fn(|j| fit_symmetric(&subs[j], part(importance, j), n));
        let (d, scales) = round_signed(&scales, scale_n);
        let coded = Self { d, scales, codes: [0; LEN] }.with_codes(x, n);
        refine(coded, x, importance, Self::decode, |coded, weights| {
            let level = |v: usize| f32::from(coded.scales[v / 16]) * f32::from(coded.codes[v]);
            Some(Self { d: best_unit(x, weights, level)?, ..coded.clone() }.with_codes(x, n))
        })
    }

    /// Chooses the nearest codes.
    fn with_codes(mut self, x: &[f32; LEN], n: u8) -> Self {
        let (codes, subs) = (self.codes.as_chunks_mut::<16>().0, x.as_chunks::<16>().0);
        for ((codes, sub), scale) in codes.iter_mut().zip(subs).zip(self.scales) {
            let step = self.d.to_f32() * f32::from(scale);
            if step != 0.0 {
                *codes = sub.map(|v| round_to_int_bytes(symmetric(v / step, f32::from(n)))[0] as i8);
            }
        }
        self
    }

    pub fn decode(&self) -> [f32; LEN] {
        let d = self.d.to_f32();
        std::array::from_fn(|v| d * f32::from(self.scales[v / 16]) * f32::from(self.codes[v]))
    }
}

/// Improves a super-block whose values differ in importance, while `better` finds one with a
/// smaller error: rounded to integers of one unit, the scale of an important part may be far from
/// its best.
pub(crate) fn refine<B>(
    mut coded: B,
    x: &[f32; LEN],
    importance: Importance<'_, LEN>,
    decode: impl Fn(&B) -> [f32; LEN],
    better: impl Fn(&B, &[f32; LEN]) -> Option<B>,
) -> B {
    const ROUNDS: usize = 4;
    if importance.is_none() {
        return coded;
    }
    let weights = weights(x, importance);
    let error = |coded: &B| {
        let decoded = decode(coded);
        let [error] = sums::<LEN, 1>(|v| [weights[v] * (x[v] - decoded[v]) * (x[v] - decoded[v])]);
        error
    };
    let mut min_error = error(&coded);
    for _ in 0..ROUNDS {
        let Some(next) = better(&coded, &weights) else { break };
        let next_error = error(&next);
        // NaN is no improvement.
        let is_better = next_error < min_error;
        if !is_better {
            break;
        }
        (coded, min_error) = (next, next_error);
    }
    coded
}

/// Returns the unit d that best fits x to d · level; `None` without a solution.
pub(crate) fn best_unit(x: &[f32; LEN], weights: &[f32; LEN], level: impl Fn(usize) -> f32) -> Option<f16> {
    let [xc, cc] = sums::<LEN, 2>(|v| {
        let level = level(v);
        [weights[v] * x[v] * level, weights[v] * level * level]
    });
    let unit = to_f16((xc / cc) as f32);
    (cc > 0.0 && unit != f16::ZERO).then_some(unit)
}

/// Returns the scale and the minimum (as a subtrahend, >= 0) that best fit `x` with codes
/// 0..=`top`.
pub(crate) fn fit_with_min<const N: usize>(
    x: &[f32; N],
    importance: Importance<'_, N>,
    top: u8,
) -> (f64, f64) {
    // Codes start at the smallest value, if that is below 0, and need not reach 0 where no value
    // does.
    let lo = x.iter().fold(0.0f32, |min, &v| if v < min { v } else { min });
    let hi = x.iter().fold(f32::NEG_INFINITY, |max, &v| if v > max { v } else { max });
    if hi - lo < FLAT_RANGE {
        return (0.0, f64::from(-lo));
    }
    let (top, weights) = (f32::from(top), weights(x, importance));
    let error = |scale: f64, min: f64, codes: &[f32; N]| {
        let (scale, min) = (scale as f32, min as f32);
        let [error] = sums::<N, 1>(|i| {
            let off = scale * codes[i] + min - x[i];
            [weights[i] * off * off]
        });
        error
    };
    let [w0, x1] = sums::<N, 2>(|i| [weights[i], weights[i] * x[i]]);
    let (mut best, mut min_error) = ((0.0, 0.0), f64::INFINITY);
    for (at, offset) in OFFSETS.into_iter().enumerate() {
        let inverse = (top + offset) / (hi - lo);
        let codes = x.map(|v| round_ties_even(clamp_f32((v - lo) * inverse, 0.0, top)));
        if at == 0 {
            // The exact span is the fallback: least squares has no solution when all codes are
            // equal.
            best = (f64::from((hi - lo) / top), f64::from(lo));
            min_error = error(best.0, best.1, &codes);
        }
        // Equal codes do not determine the scale: any scale fits with a matching minimum, and both
        // are rounded later.
        if codes.iter().all(|&code| code == codes[0]) {
            continue;
        }
        // Weighted least squares of x against scale · code + min.
        let [c1, c2, xc] = sums::<N, 3>(|i| {
            let weighted = weights[i] * codes[i];
            [weighted, weighted * codes[i], weighted * x[i]]
        });
        let det = w0 * c2 - c1 * c1;
        let (mut scale, mut min) = ((w0 * xc - c1 * x1) / det, (c2 * x1 - c1 * xc) / det);
        if min > 0.0 {
            (scale, min) = (xc / c2, 0.0);
        }
        let squared = error(scale, min, &codes);
        // NaN, from a vanishing determinant, fails both.
        if scale > 0.0 && squared < min_error {
            (best, min_error) = ((scale, min), squared);
        }
    }
    (best.0, -best.1)
}

/// Returns the scale, of either sign, that best fits `x` with codes -`n`..`n`. The value of largest
/// magnitude maps near code -`n`, which has no positive twin.
pub(crate) fn fit_symmetric<const N: usize>(x: &[f32; N], importance: Importance<'_, N>, n: u8) -> f64 {
    let extreme = x.iter().fold(0.0f32, |best, &v| if v.abs() > best.abs() { v } else { best });
    if extreme.abs() < FLAT_RANGE {
        return 0.0;
    }
    let (n, weights) = (f32::from(n), weights(x, importance));
    let (mut best, mut max_gain) = (0.0, 0.0);
    for offset in OFFSETS {
        let inverse = -(n + offset) / extreme;
        let codes = x.map(|v| round_ties_even(symmetric(v * inverse, n)));
        let [xc, cc] = sums::<N, 2>(|i| {
            let weighted = weights[i] * codes[i];
            [weighted * x[i], weighted * codes[i]]
        });
        // The weighted error of the best scale xc / cc is a constant minus xc² / cc.
        if xc * xc > max_gain * cc {
            (best, max_gain) = (xc / cc, xc * xc / cc);
        }
    }
    best
}

/// Mean squares of the inputs that the values of a block are multiplied with, if known.
pub type Importance<'a, const N: usize> = Option<&'a [f32; N]>;

/// Returns the importance of part `j` of a block.
pub(crate) fn part<const N: usize, const M: usize>(of: Importance<'_, N>, j: usize) -> Importance<'_, M> {
    of.map(|of| &of.as_chunks::<M>().0[j])
}

/// Returns the weight of each of `x` in the squared error: its importance times `sqrt(mean square +
/// x^2)`, the weight of `llama-quantize`; without importance `rms + |x|`. Importance that is 0 for
/// all of `x`, or overflows, says nothing about them.
pub fn weights<const N: usize>(x: &[f32; N], importance: Importance<'_, N>) -> [f32; N] {
    let [squares] = sums::<N, 1>(|i| [x[i] * x[i]]);
    let mean_square = squares / N as f64;
    if let Some(importance) = importance {
        let weights = std::array::from_fn(|i| importance[i] * (mean_square as f32 + x[i] * x[i]).sqrt());
        let [total] = sums::<N, 1>(|i| [weights[i]]);
        if total > 0.0 && total.is_finite() {
            return weights.map(|weight: f32| (f64::from(weight) / total) as f32);
        }
    }
    let rms = mean_square.sqrt() as f32;
    x.map(|v| rms + v.abs())
}

/// Sums `K` terms over 0..`N`, a multiple of [`LANES`].
#[inline(always)]
fn sums<const N: usize, const K: usize>(terms: impl Fn(usize) -> [f32; K]) -> [f64; K] {
    const { assert!(N.is_multiple_of(LANES)) };
    let mut sums = [[0.0f32; LANES]; K];
    for at in (0..N).step_by(LANES) {
        for lane in 0..LANES {
            let terms = terms(at + lane);
            sums.iter_mut().zip(terms).for_each(|(sum, term)| sum[lane] += term);
        }
    }
    sums.map(|lanes| f64::from(lanes.iter().sum::<f32>()))
}

/// Clamps `v` to `low..=high`.
fn clamp_f32(v: f32, low: f32, high: f32) -> f32 {
    let v = if v < low { low } else { v };
    if v > high { high } else { v }
}

/// Clamps `v` to the codes -`n`..`n`.
fn symmetric(v: f32, n: f32) -> f32 {
    clamp_f32(v, -n, n - 1.0)
}

/// 1.5 · 2^23: adding it to a number up to 2^22 rounds that number to an integer in its last
/// digits.
const ROUNDING_MAGIC: f32 = 12_582_912.0;

/// Rounds `v` to the nearest integer, ties to even.
fn round_ties_even(v: f32) -> f32 {
    (v + ROUNDING_MAGIC) - ROUNDING_MAGIC
}

/// As [`nearest`], in two's complement, low byte first.
fn round_to_int_bytes(v: f32) -> [u8; 4] {
    (v + ROUNDING_MAGIC).to_bits().to_le_bytes()
}

/// Returns the total weight of each sub-block.
fn totals<const N: usize, const S: usize>(x: &[f32; LEN], importance: Importance<'_, LEN>) -> [f64; S] {
    let weights = weights(x, importance);
    std::array::from_fn(|j| weights[j * N..(j + 1) * N].iter().copied().map(f64::from).sum())
}

/// Rounds non-negative floats to integers 0..=`top` in units of one f16: the unit of the largest,
/// or with `weights`, the one of least weighted error.
fn round_unsigned<const S: usize>(floats: &[f64; S], weights: Option<&[f64; S]>, top: u8) -> (f16, [u8; S]) {
    let (max, top_f) = (floats.iter().copied().fold(0.0, f64::max), f64::from(top));
    let mut best = max / top_f;
    if let Some(weights) = weights {
        let mut max_gain = 0.0;
        for offset in OFFSETS {
            let inverse = (top_f + f64::from(offset)) / max;
            let (mut xc, mut cc) = (0.0, 0.0);
            for (float, weight) in floats.iter().zip(weights) {
                let code = (float * inverse).round().min(top_f);
                xc += weight * float * code;
                cc += weight * code * code;
            }
            if xc * xc > max_gain * cc {
                (best, max_gain) = (xc / cc, xc * xc / cc);
            }
        }
    }
    let unit = unit(best);
    if unit == f16::ZERO {
        return (unit, [0; S]);
    }
    (unit, floats.map(|f| (f / unit.to_f64()).round().clamp(0.0, f64::from(top)) as u8))
}

/// Rounds floats of either sign to integers -`n`..`n` in units of one f16, the one of largest
/// magnitude to -`n`.
pub(crate) fn round_signed<const S: usize>(floats: &[f64; S], n: i32) -> (f16, [i8; S]) {
    let extreme = floats.iter().fold(0.0f64, |best, &f| if f.abs() > best.abs() { f } else { best });
    let unit = unit(extreme / f64::from(-n));
    if unit == f16::ZERO {
        return (unit, [0; S]);
    }
    (unit, floats.map(|f| (f / unit.to_f64()).round().clamp(f64::from(-n), f64::from(n - 1)) as i8))
}

/// Rounds `x` to the nearest f16 unit, and subnormal ones away from zero: a smaller unit would
/// leave the largest multiple out of range, by up to half of it, or vanish altogether.
fn unit(x: f64) -> f16 {
    const SUM_EPSILON: f64 = 1.0 / 16_777_216.0;
    let is_subnormal = x.abs() < 1024.0 * SUM_EPSILON;
    let x = if is_subnormal { ((x / SUM_EPSILON).abs().ceil() * SUM_EPSILON).copysign(x) } else { x };
    to_f16(x as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Returns the root mean squared error of `blocks` Gaussian blocks, in units of σ.
    fn rmse(blocks: usize, mean: f64, sigma: f64, trip: impl Fn(&[f32; LEN]) -> [f32; LEN]) -> f64 {
        let (mut random, mut squares) = (Random::new(7), 0.0);
        for _ in 0..blocks {
            let x: [f32; LEN] = std::array::from_fn(|_| ((random.gaussian() + mean) * sigma) as f32);
            let back = trip(&x);
            squares += x.iter().zip(back).map(|(&x, y)| f64::from(x - y).powi(2)).sum::<f64>();
        }
        (squares / (blocks * LEN) as f64).sqrt() / sigma
    }

    type Trip = fn(&[f32; LEN]) -> [f32; LEN];

    fn q2(x: &[f32; LEN]) -> [f32; LEN] {
        MinBlock::<16>::fit::<16>(x, None, 3, 15).decode()
    }

    fn q3(x: &[f32; LEN]) -> [f32; LEN] {
        SymBlock::fit(x, None, 4, 32).decode()
    }

    fn q4(x: &[f32; LEN]) -> [f32; LEN] {
        MinBlock::<8>::fit::<32>(x, None, 15, 63).decode()
    }

    fn q5(x: &[f32; LEN]) -> [f32; LEN] {
        MinBlock::<8>::fit::<32>(x, None, 31, 63).decode()
    }

    fn q6(x: &[f32; LEN]) -> [f32; LEN] {
        SymBlock::fit(x, None, 32, 128).decode()
    }

    #[test]
    fn codes_without_a_minimum_lose_less_than_ggmls() {
        // GGML's reference quantizers lose 0.1511 and 0.0178 (docs/formats.md).
        for (trip, ggml) in [(q3 as Trip, 0.1511), (q6, 0.0178)] {
            let got = rmse(256, 0.0, 0.02, trip);
            assert!(got < ggml, "{got}, GGML {ggml}");
        }
    }

    #[test]
    fn error_far_below_zero_depends_on_the_range_only() {
        // The mean range of 16 and of 32 Gaussians, and the mean distance of the minimum of 256
        // below their mean. The error is step / √12, for the value step and for the step of the
        // minima.
        let (of_16, of_32, min_distance) = (3.53, 4.07, 2.8);
        for (trip, top, scale_top, range) in
            [(q2 as Trip, 3.0, 15.0, of_16), (q4, 15.0, 63.0, of_32), (q5, 31.0, 63.0, of_32)]
        {
            let (step, min_step): (f64, f64) = (range / top, (5.0 + min_distance) / scale_top);
            let bound = ((step.powi(2) + min_step.powi(2)) / 12.0).sqrt();
            let got = rmse(256, -5.0, 0.02, trip);
            assert!(got <= bound, "{top}: {got}, {bound}");
        }
    }

    #[test]
    fn one_negative_value_throughout_is_a_minimum() {
        for trip in [q2, q4, q5] {
            let back = trip(&[-3.0; LEN]);
            // Half of the last digit of an f16.
            assert!(back.iter().all(|v| (v + 3.0).abs() <= 3.0 / 2048.0), "{}", back[0]);
        }
    }

    #[test]
    fn error_of_small_weights_grows_by_the_step_of_their_scales() {
        let unit = 2f64.powi(-24);
        // Each with the codes that a wrong scale may leave out of range, and half of a minimum.
        for (trip, codes) in [(q2 as Trip, 3.5), (q3, 4.0), (q4, 15.5), (q5, 31.5), (q6, 32.0)] {
            let large = rmse(64, 0.0, 0.02, trip);
            for sigma in [1e-3, 1e-4, 5e-5, 3e-5, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6] {
                let got = rmse(64, 0.0, sigma, trip);
                let bound = 1.02 * large + codes * unit / 2.0 / sigma;
                assert!(got <= bound.min(1.0), "{codes} {sigma}: {got}, {bound}");
            }
        }
    }

    #[test]
    fn codes_times_a_step_round_trip_exactly() {
        let mut random = Random::new(3);
        for _ in 0..64 {
            // Every scale is the largest, so that the unit is the step.
            let mut of = |low: i32, high: i32, at: usize| {
                let code = low + (random.bits() % (high - low + 1) as u64) as i32;
                (if at.is_multiple_of(16) { low } else { code }) as f32 / 64.0
            };
            let (three, six) =
                (std::array::from_fn(|v| of(-4, 3, v)), std::array::from_fn(|v| of(-32, 31, v)));
            assert_eq!(q3(&three), three);
            assert_eq!(q6(&six), six);
        }
    }

    /// Sub-blocks that are flat except for the last digit of their values, far from 0 and of any
    /// sign, next to others of any size: the fit is never further off than zeros would be.
    #[test]
    fn flat_sub_blocks_far_from_zero_are_no_worse_than_zeros() {
        let mut random = crate::random::Random::new(3);
        for _ in 0..3000 {
            let mut x = [0.0f32; LEN];
            for sub in x.chunks_exact_mut(16) {
                let level = f32::from(i16::from_le_bytes([random.bits() as u8, (random.bits() >> 8) as u8]));
                let level = level * [2.0, 1.0, 1e-3, 1e-6][(random.bits() % 4) as usize];
                let digits = random.bits() % 3;
                sub.iter_mut().for_each(|v| {
                    *v = if random.bits() % 3 < digits { f32::from_bits(level.to_bits() ^ 1) } else { level }
                });
            }
            // Every other block has flat sub-blocks of 32 as well.
            if random.bits().is_multiple_of(2) {
                x.chunks_exact_mut(32).for_each(|sub| sub.copy_within(..16, 16));
            }
            let whole: f64 = x.iter().map(|&v| f64::from(v).powi(2)).sum();
            let off = |coded: [f32; LEN]| -> f64 {
                x.iter().zip(coded).map(|(&v, c)| (f64::from(v) - f64::from(c)).powi(2)).sum()
            };
            for (name, coded) in [
                ("q2_K", MinBlock::<16>::fit::<16>(&x, None, 3, 15).decode()),
                ("q4_K", MinBlock::<8>::fit::<32>(&x, None, 15, 63).decode()),
                ("q5_K", MinBlock::<8>::fit::<32>(&x, None, 31, 63).decode()),
                ("q3_K", SymBlock::fit(&x, None, 4, 32).decode()),
                ("q6_K", SymBlock::fit(&x, None, 32, 128).decode()),
            ] {
                let error = off(coded);
                assert!(error <= whole, "{name}: {error:e} of {whole:e}: {x:?}");
            }
        }
    }
}
