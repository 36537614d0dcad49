//! Single rounding, in every direction, to every float type.
//!
//! Results are computed in f64 and rounded "to odd": when bits are lost, the last remaining bit is
//! set. Such a value lies on the same side of every float of fewer bits, and of every tie between
//! two, as the exact one, so rounding it again to a type of at most 51 bits gives the correctly
//! rounded exact value (Boldo and Melquiond, 2008).

use crate::inst::Round;

/// A float type narrower than f64: bits of its significand, and its least normal exponent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Format {
    precision: i32,
    min_exponent: i32,
}

pub(crate) const F32: Format = Format { precision: 24, min_exponent: -126 };
pub(crate) const F16: Format = Format { precision: 11, min_exponent: -14 };
pub(crate) const BF16: Format = Format { precision: 8, min_exponent: -126 };

/// Rounds `value` to `format`; the result is representable there or infinite.
pub(crate) fn to(format: Format, value: f64, round: Round) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let exponent = (value.to_bits() >> 52 & 0x7ff) as i32 - 1023;
    let quantum = power(exponent.max(format.min_exponent) - format.precision + 1);
    // Both scalings are by a power of two, so exact.
    let steps = value / quantum;
    let rounded = quantum
        * match round {
            Round::Nearest => steps.round_ties_even(),
            Round::Zero => steps.trunc(),
            Round::Down => steps.floor(),
            Round::Up => steps.ceil(),
        };
    let largest_finite = (2.0 - power(1 - format.precision)) * power(1 - format.min_exponent);
    let past = match round {
        Round::Nearest => f64::INFINITY,
        Round::Zero => largest_finite,
        Round::Down => {
            if value > 0.0 {
                largest_finite
            } else {
                f64::INFINITY
            }
        }
        Round::Up => {
            if value > 0.0 {
                f64::INFINITY
            } else {
                largest_finite
            }
        }
    };
    if rounded.abs() > largest_finite { past.copysign(value) } else { rounded.copysign(value) }
}

fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Rounds to odd: `near` is the nearest f64, and the exact value lies in the direction of `error`'s
/// sign from it.
fn odd(near: f64, error: f64) -> f64 {
    let is_exact = !near.is_finite() || error == 0.0 || error.is_nan();
    match is_exact || near.to_bits() & 1 == 1 {
        true => near,
        false if error > 0.0 => near.next_up(),
        false => near.next_down(),
    }
}

/// Returns `x + y`, rounded to odd.
pub(crate) fn add(x: f64, y: f64) -> f64 {
    // Knuth's TwoSum: the rounding error is a float itself.
    let sum = x + y;
    let second = sum - x;
    odd(sum, (x - (sum - second)) + (y - second))
}

/// Returns `x / y`, rounded to odd, of floats of at most 32 bits.
pub(crate) fn divide(x: f64, y: f64) -> f64 {
    let quotient = x / y;
    odd(quotient, (-quotient).mul_add(y, x) * y.signum())
}

/// Returns the square root, rounded to odd, of a float of at most 32 bits.
pub(crate) fn root(x: f64) -> f64 {
    let root = x.sqrt();
    odd(root, (-root).mul_add(root, x))
}

/// Returns an integer of 64 bits, rounded to odd.
pub(crate) fn integer(x: i128) -> f64 {
    let near = x as f64;
    odd(near, (x - near as i128) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Round::{Down, Nearest, Up, Zero};

    #[test]
    fn rounding_to_nearest_is_that_of_the_hardware() {
        let mut bits = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..200_000 {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value =
                f64::from_bits((bits & !(0x7ff << 52)) | (bits >> 54 & 0x1ff).wrapping_add(768) << 52);
            assert_eq!(to(F32, value, Nearest), f64::from(value as f32), "{value:e}");
            let (a, b) = (value as f32, f32::from_bits(bits as u32));
            if a.is_finite() && b.is_finite() {
                let (x, y) = (f64::from(a), f64::from(b));
                assert_eq!(to(F32, add(x, y), Nearest) as f32, a + b, "{a:e} + {b:e}");
                assert_eq!(to(F32, divide(x, y), Nearest) as f32, a / b, "{a:e} / {b:e}");
                assert_eq!(to(F32, add(x * y, x), Nearest) as f32, a.mul_add(b, a), "{a:e} * {b:e} + {a:e}");
            }
        }
    }

    #[test]
    fn directions_bracket_the_exact_value() {
        let tiny = power(-100);
        assert_eq!(to(F32, add(1.0, -tiny), Down), 1.0 - power(-24));
        assert_eq!(to(F32, add(1.0, -tiny), Zero), 1.0 - power(-24));
        assert_eq!(to(F32, add(1.0, tiny), Up), 1.0 + power(-23));
        assert_eq!(to(F32, add(1.0, tiny), Nearest), 1.0);
        // A tie that a far smaller term breaks.
        assert_eq!(to(F16, add(1.0 + power(-11), tiny), Nearest), 1.0 + power(-10));
        assert_eq!(to(F16, 1.0 + power(-11), Nearest), 1.0);
        assert_eq!(to(F16, 65519.0, Nearest), 65504.0);
        assert_eq!(to(F16, 65520.0, Nearest), f64::INFINITY);
        assert_eq!(to(F16, -1e9, Zero), -65504.0);
        assert_eq!(to(F16, -1e9, Down), f64::NEG_INFINITY);
        assert_eq!(to(F16, power(-25), Nearest), 0.0);
        assert_eq!(to(F16, power(-25) * 1.001, Nearest), power(-24));
        assert_eq!(to(BF16, 1.0 + power(-8), Up), 1.0 + power(-7));
        assert_eq!(to(F32, integer((1 << 62) + 1), Up), power(62) + power(39));
    }
}
