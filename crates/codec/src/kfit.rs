//! The search for k-quant scales.
//!
//! Two shapes of super-block, each found in three steps: a float scale (and minimum) for every sub-block by trying
//! slightly different step sizes, each followed by weighted least squares; these floats rounded to integers in units
//! of one f16; codes chosen anew under the rounded scales. Larger values weigh more, because they matter more to a
//! dot product. Sums are in f64 and loops in fixed order: the same input gives the same bytes everywhere.

use half::f16;

use crate::finite::to_f16;
use crate::kquant::LEN;

/// Step sizes tried around the one that just spans the sub-block, in tenths of a code. That one comes first, and others have to
/// be better: values that were codes times a step before are the same codes again.
fn tenths() -> impl Iterator<Item = i32> {
    std::iter::once(0).chain(-10..=-1).chain(1..=10)
}

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
    /// Fits codes of 0..=`top` and scales and minima of 0..=`scale_top` to values that are in range.
    pub fn fit(x: &[f32; LEN], top: u8, scale_top: u8) -> Self {
        let (mut scales, mut mins) = ([0.0; S], [0.0; S]);
        for (j, sub) in x.chunks_exact(LEN / S).enumerate() {
            (scales[j], mins[j]) = fit_with_min(sub, top);
        }
        let (d, scales) = round_unsigned(&scales, scale_top);
        let (dmin, mins) = round_unsigned(&mins, scale_top);
        let mut coded = Self { d, dmin, scales, mins, codes: [0; LEN] };
        for (v, code) in coded.codes.iter_mut().enumerate() {
            let sub = v / (LEN / S);
            let step = d.to_f32() * f32::from(scales[sub]);
            let min = dmin.to_f32() * f32::from(mins[sub]);
            if step > 0.0 {
                *code = ((x[v] + min) / step).round().clamp(0.0, f32::from(top)) as u8;
            }
        }
        coded
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
    /// Fits codes of -`n`..`n` and scales of -`scale_n`..`scale_n` to values that are in range.
    pub fn fit(x: &[f32; LEN], n: i32, scale_n: i32) -> Self {
        let mut scales = [0.0; 16];
        for (scale, sub) in scales.iter_mut().zip(x.chunks_exact(16)) {
            *scale = fit_symmetric(sub, n);
        }
        let (d, scales) = round_signed(&scales, scale_n);
        let mut coded = Self { d, scales, codes: [0; LEN] };
        for (v, code) in coded.codes.iter_mut().enumerate() {
            let step = d.to_f32() * f32::from(scales[v / 16]);
            if step != 0.0 {
                *code = (x[v] / step).round().clamp(-n as f32, (n - 1) as f32) as i8;
            }
        }
        coded
    }

    pub fn decode(&self) -> [f32; LEN] {
        let d = self.d.to_f32();
        std::array::from_fn(|v| d * f32::from(self.scales[v / 16]) * f32::from(self.codes[v]))
    }
}

/// The scale and the minimum (as what is subtracted, >= 0) that best fit `x` with codes 0..=`top`.
fn fit_with_min(x: &[f32], top: u8) -> (f64, f64) {
    let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    let lo = x.iter().copied().fold(0.0, f64::min);
    // Codes begin at the least value, if that is below 0, and need not reach 0 where no value does.
    let hi = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if hi == lo {
        return (0.0, -lo);
    }
    let top = f64::from(top);
    let rms = (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64).sqrt();
    let weight = |v: f64| rms + v.abs();
    let span = |tenths: i32| (top + f64::from(tenths) / 10.0) / (hi - lo);
    let code = |v: f64, inverse: f64| ((v - lo) * inverse).round().clamp(0.0, top);
    let error = |scale: f64, min: f64, inverse: f64| -> f64 {
        x.iter().map(|&v| weight(v) * (scale * code(v, inverse) + min - v).powi(2)).sum()
    };
    // Spanning exactly is the candidate that always exists: least squares has none when all codes are equal.
    let mut best = ((hi - lo) / top, lo);
    let mut least = error(best.0, best.1, span(0));
    for inverse in tenths().map(span) {
        // Weighted least squares of x against scale · code + min.
        let (mut w0, mut c1, mut c2, mut x1, mut xc) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for &v in &x {
            let (w, c) = (weight(v), code(v, inverse));
            w0 += w;
            c1 += w * c;
            c2 += w * c * c;
            x1 += w * v;
            xc += w * v * c;
        }
        let det = w0 * c2 - c1 * c1;
        let (mut scale, mut min) = ((w0 * xc - c1 * x1) / det, (c2 * x1 - c1 * xc) / det);
        if min > 0.0 {
            (scale, min) = (xc / c2, 0.0);
        }
        let squared = error(scale, min, inverse);
        // NaN, from a vanishing determinant, fails both.
        if scale > 0.0 && squared < least {
            (best, least) = ((scale, min), squared);
        }
    }
    (best.0, -best.1)
}

/// The scale, of either sign, that best fits `x` with codes -`n`..`n`. The value of largest magnitude falls near
/// code -`n`, which has no positive twin.
fn fit_symmetric(x: &[f32], n: i32) -> f64 {
    let extreme = x.iter().fold(0.0f32, |best, &v| if v.abs() > best.abs() { v } else { best });
    if extreme == 0.0 {
        return 0.0;
    }
    let rms = (x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64).sqrt();
    let (mut best, mut most) = (0.0, 0.0);
    for tenths in tenths() {
        let inverse = -(f64::from(n) + f64::from(tenths) / 10.0) / f64::from(extreme);
        let (mut xc, mut cc) = (0.0, 0.0);
        for &v in x {
            let v = f64::from(v);
            let c = (v * inverse).round().clamp(f64::from(-n), f64::from(n - 1));
            let weight = rms + v.abs();
            xc += weight * v * c;
            cc += weight * c * c;
        }
        // The weighted error of the best scale xc / cc is a constant minus xc² / cc.
        if xc * xc > most * cc {
            (best, most) = (xc / cc, xc * xc / cc);
        }
    }
    best
}

/// Non-negative floats as integers 0..=`top` in units of one f16.
fn round_unsigned<const S: usize>(floats: &[f64; S], top: u8) -> (f16, [u8; S]) {
    let unit = unit(floats.iter().copied().fold(0.0, f64::max) / f64::from(top));
    if unit == f16::ZERO {
        return (unit, [0; S]);
    }
    (unit, floats.map(|f| (f / unit.to_f64()).round().clamp(0.0, f64::from(top)) as u8))
}

/// Floats of either sign as integers -`n`..`n` in units of one f16, the one of largest magnitude at -`n`.
pub(crate) fn round_signed<const S: usize>(floats: &[f64; S], n: i32) -> (f16, [i8; S]) {
    let extreme = floats.iter().fold(0.0f64, |best, &f| if f.abs() > best.abs() { f } else { best });
    let unit = unit(extreme / f64::from(-n));
    if unit == f16::ZERO {
        return (unit, [0; S]);
    }
    (unit, floats.map(|f| (f / unit.to_f64()).round().clamp(f64::from(-n), f64::from(n - 1)) as i8))
}

/// The unit that is nearest to `x`. Where f16 has few digits left or none, away from zero: smaller ones would leave the largest of what
/// they are to measure out of range, by as much as half of it, or nothing of it at all.
fn unit(x: f64) -> f16 {
    const LEAST: f64 = 1.0 / 16_777_216.0;
    let is_subnormal = x.abs() < 1024.0 * LEAST;
    let x = if is_subnormal { ((x / LEAST).abs().ceil() * LEAST).copysign(x) } else { x };
    to_f16(x as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// The root of the mean squared error of `blocks` Gaussian blocks, in units of σ.
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
        MinBlock::<16>::fit(x, 3, 15).decode()
    }

    fn q3(x: &[f32; LEN]) -> [f32; LEN] {
        SymBlock::fit(x, 4, 32).decode()
    }

    fn q4(x: &[f32; LEN]) -> [f32; LEN] {
        MinBlock::<8>::fit(x, 15, 63).decode()
    }

    fn q5(x: &[f32; LEN]) -> [f32; LEN] {
        MinBlock::<8>::fit(x, 31, 63).decode()
    }

    fn q6(x: &[f32; LEN]) -> [f32; LEN] {
        SymBlock::fit(x, 32, 128).decode()
    }

    #[test]
    fn codes_without_a_minimum_lose_less_than_those_that_ggml_finds() {
        // GGML's reference quantisers lose 0.1511 and 0.0178 (docs/formats.md).
        for (trip, ggml) in [(q3 as Trip, 0.1511), (q6, 0.0178)] {
            let got = rmse(256, 0.0, 0.02, trip);
            assert!(got < ggml, "{got}, GGML {ggml}");
        }
    }

    #[test]
    fn values_far_below_zero_lose_what_their_own_range_costs() {
        // How far the largest and the least of 16 and of 32 Gaussians lie apart on average, and how far below the mean the least of
        // 256 does: of a step they lose a √12th, as of a step of the minima.
        let (of_16, of_32, least) = (3.53, 4.07, 2.8);
        for (trip, top, scale_top, range) in
            [(q2 as Trip, 3.0, 15.0, of_16), (q4, 15.0, 63.0, of_32), (q5, 31.0, 63.0, of_32)]
        {
            let (step, min_step): (f64, f64) = (range / top, (5.0 + least) / scale_top);
            let bound = ((step.powi(2) + min_step.powi(2)) / 12.0).sqrt();
            let got = rmse(256, -5.0, 0.02, trip);
            assert!(got <= bound, "{top}: {got}, {bound}");
        }
    }

    #[test]
    fn one_negative_value_throughout_is_a_minimum() {
        for trip in [q2, q4, q5] {
            let back = trip(&[-3.0; LEN]);
            // A half of the last digit of an f16.
            assert!(back.iter().all(|v| (v + 3.0).abs() <= 3.0 / 2048.0), "{}", back[0]);
        }
    }

    #[test]
    fn small_weights_lose_what_larger_ones_do_and_the_steps_of_their_scales() {
        let least = 2f64.powi(-24);
        // Each with the codes that a wrong scale may leave out of range, and a half of a minimum.
        for (trip, codes) in [(q2 as Trip, 3.5), (q3, 4.0), (q4, 15.5), (q5, 31.5), (q6, 32.0)] {
            let large = rmse(64, 0.0, 0.02, trip);
            for sigma in [1e-3, 1e-4, 5e-5, 3e-5, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6] {
                let got = rmse(64, 0.0, sigma, trip);
                let bound = 1.02 * large + codes * least / 2.0 / sigma;
                assert!(got <= bound.min(1.0), "{codes} {sigma}: {got}, {bound}");
            }
        }
    }

    #[test]
    fn values_that_are_codes_times_a_step_come_back_as_they_are() {
        let mut random = Random::new(3);
        for _ in 0..64 {
            // Scales are all the largest, so that their unit is the step.
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
}
