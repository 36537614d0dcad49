//! fp8_g128: E4M3 bytes with a scale for 128 values, as FP8 checkpoints store them.
//!
//! | bytes | values | bits per value | value |
//! |---|---|---|---|
//! | 132 | 128 | 8.25 | float(code) · d |
//!
//! ```text
//! d f32, then 128 bytes: a sign, four bits of exponent biased by 7, three of mantissa
//! ```
//!
//! The scale is an f32 because checkpoints store one, of a tensor, a row or a block of 128x128,
//! that no f16 holds. Values are the f32 product of code and scale, rounded once. 0x7f and 0xff are
//! NaN; there is no infinity.
//!
//! E4M3: Micikevicius et al. 2022 (arXiv 2209.05433).
//!
//! Seek unit: one block. The encoder divides by d = max / 448 and rounds to the nearest E4M3, ties
//! to even. Zero and non-finite numbers: NaN counts as 0, values are clamped to ±65,504; when d
//! underflows in f32, every code is 0.

use crate::finite::{F16_MAX, clamp};
use crate::fp4::ByteFloat;

/// Values per block.
pub const LEN: usize = 128;
/// Bytes per block.
pub const BYTES: usize = 132;
/// Bytes before the codes.
pub const HEADER: usize = 4;
/// The largest E4M3.
pub const MAX: f32 = 448.0;
/// Bits of exponent and mantissa.
const MAGNITUDE: u8 = 0x7f;

/// Returns the value of a signed E4M3 byte.
pub fn to_f32(code: u8) -> f32 {
    let magnitude = ByteFloat::E4M3.to_f32(code);
    if code & !MAGNITUDE == 0 { magnitude } else { -magnitude }
}

/// Returns the nearest E4M3 (ties to even), saturating at ±448; NaN becomes 0.
pub fn from_f32(x: f32) -> u8 {
    /// Exponent of the smallest normal number, whose spacing smaller ones share.
    const MIN_EXPONENT: i32 = -6;
    let magnitude = clamp(x, MAX).abs();
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(MIN_EXPONENT);
    // Eighths of the power of two: 8 to 16 of normal numbers, of which 16 begin the next one.
    let eighths = (magnitude * 2f32.powi(3 - exponent)).round_ties_even() as i32;
    let code = (8 * (exponent - MIN_EXPONENT) + eighths) as u8;
    if x.is_sign_negative() && code > 0 { code | !MAGNITUDE } else { code }
}

/// Returns the scale of a block.
pub fn scale(block: &[u8; BYTES]) -> f32 {
    f32::from_le_bytes([block[0], block[1], block[2], block[3]])
}

/// Returns whether a block decodes to a non-finite value: a code is NaN, or the scale is not finite
/// or so large that a value overflows.
pub(crate) fn is_broken(block: &[u8; BYTES]) -> bool {
    // No early exit, so that the loop vectorizes.
    let has_nan = block[HEADER..].iter().fold(false, |any, code| any | (code & MAGNITUDE == MAGNITUDE));
    let is_safe = scale(block).abs() <= f32::MAX / MAX;
    has_nan || !is_safe && unpack(block).iter().any(|v| !v.is_finite())
}

pub(crate) fn pack(x: &[f32; LEN], block: &mut [u8; BYTES]) {
    let x = x.map(|v| clamp(v, F16_MAX));
    let scale = x.iter().fold(0.0f32, |max, v| max.max(v.abs())) / MAX;
    let (header, codes) = block.split_at_mut(HEADER);
    header.copy_from_slice(&scale.to_le_bytes());
    for (code, v) in codes.iter_mut().zip(x) {
        *code = if scale == 0.0 { 0 } else { from_f32(v / scale) };
    }
}

pub(crate) fn unpack(block: &[u8; BYTES]) -> [f32; LEN] {
    let scale = scale(block);
    std::array::from_fn(|j| to_f32(block[HEADER + j]) * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signed_bytes_have_the_values_of_their_fields() {
        for (code, value) in [(0x00, 0.0), (0x38, 1.0), (0xb8, -1.0), (0x7e, 448.0), (0x81, -0.001_953_125)] {
            assert_eq!(to_f32(code), value, "{code:#x}");
        }
        assert!(to_f32(0x7f).is_nan() && to_f32(0xff).is_nan());
    }

    #[test]
    fn every_value_has_its_code_and_others_the_nearest() {
        for code in (0..=254u8).filter(|code| code & MAGNITUDE != MAGNITUDE) {
            // Zero has no sign here.
            let want = if code == 0x80 { 0 } else { code };
            assert_eq!(from_f32(to_f32(code)), want, "{code:#x}");
        }
        for code in 0..126u8 {
            let (low, high) = (to_f32(code), to_f32(code + 1));
            let even = code + code % 2;
            let middle = (low + high) / 2.0;
            assert_eq!(from_f32(middle), even, "{middle}");
            assert_eq!(from_f32(middle.next_up()), code + 1, "above {middle}");
            assert_eq!(from_f32(middle.next_down()), code, "below {middle}");
        }
        for (x, want) in [(1e9, 0x7e), (f32::NEG_INFINITY, 0xfe), (f32::NAN, 0), (1e-30, 0)] {
            assert_eq!(from_f32(x), want, "{x}");
        }
    }

    #[test]
    fn blocks_of_e4m3_round_trip_exactly() {
        // The largest value of each block is ±448 times the scale.
        let x: [f32; LEN] = std::array::from_fn(|j| to_f32([0x7e, 0xfe, (j as u8) % 0x7f][j % 3]) * 0.125);
        let mut block = [0; BYTES];
        pack(&x, &mut block);
        assert_eq!((scale(&block), unpack(&block)), (0.125, x));
        pack(&[0.0; LEN], &mut block);
        assert_eq!(block, [0; BYTES]);
    }
}
