//! Transcendental functions built from correctly rounded operations alone, so that results are
//! identical on every platform. The functions of platforms differ in the last bit.

/// Returns e to the `x`, for x ≤ 0, within 2 units in the last place: x = k ln 2 + r with |r| ≤ ln
/// 2 / 2, and the Taylor series of e to the r up to the 13th power, whose remainder is below 2^-57.
pub(super) fn exp(x: f64) -> f64 {
    if x < -700.0 {
        return 0.0; // below 1e-304: negligible beside the likeliest token's 1
    }
    // The exponent of x ≤ 0 is in [-1010, 0], that of a normal number.
    exp_of_any(x)
}

/// Works as [`exp`], for |x| ≤ 700.
fn exp_of_any(x: f64) -> f64 {
    // ln 2 as a sum of two constants, the first with trailing zeros so that its product with k is
    // exact.
    const LN2_HI: f64 = 6.931_471_803_691_238e-1;
    const LN2_LO: f64 = 1.908_214_929_270_587_7e-10;
    let k = (x * std::f64::consts::LOG2_E).round();
    let r = (x - k * LN2_HI) - k * LN2_LO;
    let series = (1..=13).rev().fold(1.0, |sum, n| 1.0 + sum * r / f64::from(n));
    series * f64::from_bits(((1023 + k as i64) as u64) << 52)
}

/// Returns the natural logarithm of a positive normal `x`, within a few units in the last place: x
/// = m 2^k with m from √½ to √2, and ln m = 2 artanh s with s = (m - 1) / (m + 1), whose series has
/// a remainder below 2^-58 after the 21st power.
pub(super) fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut k = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits(bits & ((1 << 52) - 1) | (1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        m /= 2.0;
        k += 1;
    }
    let s = (m - 1.0) / (m + 1.0);
    let series = (0..=10).rev().fold(0.0, |sum, n| sum * s * s + 1.0 / f64::from(2 * n + 1));
    k as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

/// Returns the logarithm to base 2 of a positive normal `x`.
pub(super) fn log2(x: f64) -> f64 {
    ln(x) * std::f64::consts::LOG2_E
}

/// Returns `x` to the `y`, for x ≥ 0; 0 or infinity beyond e to the ∓700.
pub(super) fn pow(x: f64, y: f64) -> f64 {
    if y == 0.0 {
        return 1.0;
    }
    let exponent = if x < f64::MIN_POSITIVE { f64::NEG_INFINITY * y } else { ln(x) * y };
    if exponent > 700.0 {
        f64::INFINITY
    } else if exponent < -700.0 {
        0.0
    } else {
        exp_of_any(exponent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exact_to_two_units_in_the_last_place() {
        for i in 0..=70_000 {
            let x = -f64::from(i) / 100.0;
            let (got, want) = (exp(x), x.exp());
            // The platform's own is within one unit; ours within two.
            assert!((got - want).abs() <= 3.0 * f64::EPSILON * want, "{x}: {got} {want}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
    }

    #[test]
    fn logarithms_and_powers_match_the_platform_within_tolerance() {
        let close = |got: f64, want: f64| (got - want).abs() <= 1e-14 * want.abs().max(1.0);
        for i in -3000..=3000 {
            let x = 1.01f64.powi(i * 7);
            if x.is_normal() {
                assert!(close(ln(x), x.ln()) && close(log2(x), x.log2()), "{x}: {} {}", ln(x), log2(x));
                let y = f64::from(i.abs() % 40) / 8.0;
                let want = x.powf(y);
                let is_small_or_large = y * x.ln().abs() > 700.0;
                let is_close = is_small_or_large || (pow(x, y) - want).abs() <= 1e-11 * want;
                assert!(is_close, "{x} to the {y}: {} {want}", pow(x, y));
            }
        }
        assert_eq!((ln(1.0), log2(1.0), pow(0.0, 0.0)), (0.0, 0.0, 1.0));
        assert_eq!((pow(0.0, 2.0), pow(0.0, -1.0), pow(7.0, 1e9)), (0.0, f64::INFINITY, f64::INFINITY));
    }
}
