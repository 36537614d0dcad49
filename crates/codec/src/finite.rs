//! Numbers that a format cannot represent: how encoders replace them, and how the blocks of a file
//! are checked for them.
//!
//! NaN becomes 0. A value beyond the range is clamped to it, infinities included. A scale beyond
//! f16 saturates at 65,504. Values too small for an f16 scale become 0.

use half::{bf16, f16};

use crate::fp4::{self, ByteFloat};
use crate::{DType, decode, factored_fp4, fp8, nf4};

/// The largest finite f16: the range of every format whose scale is an f16.
pub const F16_MAX: f32 = 65504.0;

/// Clamps `x` to `[-max, max]`; NaN becomes 0.
#[inline]
pub fn clamp(x: f32, max: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(-max, max) }
}

/// Rounds `x` to the nearest f16 (ties to even), saturating at ±65,504; NaN becomes 0.
#[inline]
pub fn to_f16(x: f32) -> f16 {
    f16::from_f32(clamp(x, F16_MAX))
}

/// Returns the index of the first block of `bytes` (blocks of `dtype`) that decodes to a non-finite
/// number.
///
/// This crate's encoder writes no such block. A file may contain some: float values, f16 scales
/// that are NaN or infinite, NaN scales of nvfp4 and mxfp4, NaN codes of fp8_g128, and
/// scales and factors that are not finite or with which a value overflows f32.
pub fn find_non_finite_block(dtype: DType, bytes: &[u8]) -> Option<usize> {
    match dtype {
        DType::F32 => find_value::<4>(bytes, |v| !f32::from_le_bytes(*v).is_finite()),
        DType::F16 => find_value::<2>(bytes, |v| !f16::from_le_bytes(*v).is_finite()),
        DType::BF16 => find_value::<2>(bytes, |v| !bf16::from_le_bytes(*v).is_finite()),
        DType::MXFP4 => bytes.chunks_exact(dtype.block_bytes()).position(is_broken_mx),
        DType::NVFP4 => {
            let is_nan = |scale: &u8| ByteFloat::E4M3.to_f32(*scale).is_nan();
            bytes.chunks_exact(dtype.block_bytes()).position(|block| block[..4].iter().any(is_nan))
        }
        DType::FP8G128 => bytes.as_chunks().0.iter().position(fp8::is_broken),
        DType::NVFP4G256 => bytes.as_chunks().0.iter().position(factored_fp4::is_broken),
        // No level is above 1.
        DType::NF4G64 | DType::FP4G64 => {
            bytes.as_chunks().0.iter().position(|block| !nf4::scale(block).is_finite())
        }
        dtype => {
            let is_broken =
                |at| move |block: &[u8]| !f16::from_le_bytes([block[at], block[at + 1]]).is_finite();
            let mut blocks = bytes.chunks_exact(dtype.block_bytes());
            match *f16_scale_offsets(dtype) {
                [at] => blocks.position(is_broken(at)),
                [a, b] => blocks.position(|block| is_broken(a)(block) | is_broken(b)(block)),
                _ => None,
            }
        }
    }
}

/// Returns whether a block of mxfp4 decodes to a non-finite value: its scale is NaN, or so large
/// that one of its values overflows.
fn is_broken_mx(block: &[u8]) -> bool {
    const LARGEST_SAFE_SCALE: u8 = 252;
    let mut values = [0.0; fp4::MXFP4_LEN];
    block[0] > LARGEST_SAFE_SCALE && {
        decode(DType::MXFP4, block, &mut values).expect("a block");
        values.iter().any(|v| !v.is_finite())
    }
}

/// Returns the byte offsets of a block's f16 scales.
const fn f16_scale_offsets(dtype: DType) -> &'static [usize] {
    match dtype.layout() {
        DType::F32 | DType::F16 | DType::BF16 => &[],
        DType::MXFP4 | DType::NVFP4 | DType::FP8G128 | DType::NVFP4G256 => &[],
        DType::NF4G64 | DType::FP4G64 => &[],
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 | DType::Q4G128 | DType::IQ4NL | DType::IQ4XS => &[0],
        DType::TQ3T => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K | DType::TQ3_1S | DType::TQ4_1S => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        DType::Turbo2 | DType::Turbo3 | DType::Turbo4 | DType::Turbo2T | DType::Turbo3T => &[0],
        DType::IQ1 | DType::IQ2 | DType::IQ3 | DType::IQ3X => unreachable!(),
    }
}

/// Returns the index of the first value for which `is_broken` holds.
fn find_value<const N: usize>(bytes: &[u8], is_broken: impl Fn(&[u8; N]) -> bool) -> Option<usize> {
    const TOGETHER: usize = 1024;
    // No early exit within a chunk, so that the loop vectorizes.
    let any = |values: &&[[u8; N]]| values.iter().fold(false, |any, value| any | is_broken(value));
    let (first, values) = bytes.as_chunks().0.chunks(TOGETHER).enumerate().find(|(_, values)| any(values))?;
    Some(first * TOGETHER + values.iter().position(is_broken)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn non_finite_numbers_have_a_defined_result() {
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

    /// Compared with the decoder on random bits, many of them NaN, and with one broken block among
    /// many.
    #[test]
    fn a_block_is_broken_iff_it_decodes_to_a_non_finite_value() {
        let mut random = Random::new(3);
        for dtype in DType::ALL {
            let (len, size) = (dtype.block_len(), dtype.block_bytes());
            let is_sound = |block: &[u8]| {
                let mut values = vec![0.0; len];
                crate::decode(dtype, block, &mut values).unwrap();
                values.iter().all(|v| v.is_finite())
            };
            let mut n_broken = 0;
            for _ in 0..2000 {
                let mut block: Vec<u8> = (0..size).map(|_| random.bits() as u8).collect();
                // Every other block has the largest exponent in most bytes.
                if random.bits().is_multiple_of(2) {
                    block.iter_mut().for_each(|byte| *byte |= 0x7f);
                }
                let found = find_non_finite_block(dtype, &block);
                assert_eq!(found.is_none(), is_sound(&block), "{dtype} {block:02x?}");
                n_broken += usize::from(found.is_some());
            }
            assert!(n_broken > 100, "{dtype}: {n_broken} of 2000");

            let mut bytes = vec![0; 3000 * size];
            assert_eq!(find_non_finite_block(dtype, &bytes), None);
            bytes[2500 * size..][..size].fill(0xff);
            bytes[2999 * size..][..size].fill(0xff);
            assert_eq!(find_non_finite_block(dtype, &bytes), Some(2500), "{dtype}");
        }
    }
}
