//! What becomes of numbers that a format cannot hold.
//!
//! NaN becomes 0. A value beyond the range is clamped to it, infinities included. A scale beyond f16 saturates at
//! 65,504. Values too small for a scale in f16 become 0.

use half::f16;

/// The largest finite f16: the range of every format whose scale is an f16.
pub const F16_MAX: f32 = 65504.0;

/// `x` brought into `[-max, max]`; NaN becomes 0.
#[inline]
pub fn clamp(x: f32, max: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(-max, max) }
}

/// `x` rounded to the nearest f16 (ties to even), saturated at ±65,504; NaN becomes 0.
#[inline]
pub fn to_f16(x: f32) -> f16 {
    f16::from_f32(clamp(x, F16_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_numbers_have_a_defined_result() {
        for (x, want) in [
            (f32::NAN, 0.0),
            (f32::INFINITY, 65504.0),
            (f32::NEG_INFINITY, -65504.0),
            (1e30, 65504.0),
            (-65520.0, -65504.0),
            (f32::from_bits(1), 0.0),
            (1.0, 1.0),
        ] {
            assert_eq!(to_f16(x).to_f32(), want, "{x}");
        }
        assert_eq!(clamp(f32::INFINITY, f32::MAX), f32::MAX);
        assert_eq!(clamp(f32::from_bits(1), F16_MAX), f32::from_bits(1));
    }
}
