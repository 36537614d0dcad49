//! The exponential function, in operations that the compiler vectorizes.

/// `ln 2` in two terms; the first has few enough bits that its product with an exponent is exact
/// (Cody and Waite).
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Adding this to a float of magnitude below 2^22 leaves its nearest integer in the low mantissa
/// bits.
const ROUNDER: f32 = 12_582_912.0;
/// Taylor coefficients 1/k! of exp, highest first. On |r| <= ln 2 / 2 the first omitted term is
/// less than 0.3466^8 / 8! = 5.2e-9, a tenth of a rounding.
const TERMS: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// Returns `exp(x)` for x of magnitude up to 87, within 3 roundings; beyond, the value at 87. NaN
/// stays NaN.
///
/// Plain operations without branches, so that a loop over it vectorizes at any width with equal
/// results.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = if x > 87.0 { 87.0 } else { x };
    let x = if x < -87.0 { -87.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let series = TERMS.iter().fold(0.0, |sum, term| sum * r + term);
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32);
    series * f32::from_bits((exponent.wrapping_add(127) as u32) << 23)
}

/// Returns `tanh(x / 2)`, off by 6 roundings of 1 at most. NaN stays NaN.
#[inline(always)]
pub(crate) fn tanh_of_half(x: f32) -> f32 {
    let e = exp(x);
    (e - 1.0) / (e + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_three_roundings() {
        for i in -8700..=8700 {
            let x = i as f32 / 100.0 + 0.001;
            let x = x.clamp(-87.0, 87.0);
            let want = f64::from(x).exp();
            let err = (f64::from(exp(x)) - want).abs() / want;
            assert!(err <= 3.0 * f64::from(f32::EPSILON), "{x}: {} for {want}", exp(x));
        }
        assert!(exp(f32::NAN).is_nan());
    }
}
