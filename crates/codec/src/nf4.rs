//! nf4_g64 and fp4_g64: codes into a table of 16 floats with a scale for 64 values, as bitsandbytes
//! stores them.
//!
//! | bytes | values | bits per value | value |
//! |---|---|---|---|
//! | 36 | 64 | 4.5 | level(code) · d |
//!
//! ```text
//! d f32, then 32 bytes: value 2 j in the high nibble and value 2 j + 1 in the low nibble of byte j
//! ```
//!
//! Levels are between -1 and 1, so d is the largest magnitude. Those of NF4 are quantiles of the
//! normal distribution; those of FP4 have a sign, two bits of exponent and one of mantissa, in an
//! order of its own and divided by the largest. No integers hold either, so values are the f32
//! product of level and scale, rounded once.
//!
//! NF4: Dettmers et al. 2023 (arXiv 2305.14314).
//!
//! Seek unit: one block. The encoder's d is the largest magnitude; codes are those of the nearest
//! levels. Zero and non-finite numbers: NaN counts as 0, values are clamped to ±65,504; where d is
//! no normal f32, values are 0.

use crate::DType;
use crate::finite::{F16_MAX, clamp};

/// Values per block.
pub const LEN: usize = 64;
/// Bytes per block.
pub const BYTES: usize = 36;
/// Bytes before the codes.
pub const HEADER: usize = 4;

/// Levels by code.
pub type Levels = [f32; 16];

/// The levels of nf4_g64.
pub const NF4: Levels = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The levels of fp4_g64.
pub const FP4: Levels = {
    let (magnitudes, mut levels, mut code) = ([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0], [0.0; 16], 1);
    while code < magnitudes.len() {
        levels[code] = magnitudes[code] / 12.0;
        levels[code + magnitudes.len()] = -levels[code];
        code += 1;
    }
    levels
};

/// Returns the levels of `dtype`, if its codes are indices of such a table.
#[inline]
pub const fn levels(dtype: DType) -> Option<&'static Levels> {
    match dtype {
        DType::NF4G64 => Some(&NF4),
        DType::FP4G64 => Some(&FP4),
        _ => None,
    }
}

/// Returns the scale of a block.
pub fn scale(block: &[u8; BYTES]) -> f32 {
    f32::from_le_bytes([block[0], block[1], block[2], block[3]])
}

/// Returns the code of value `j` of a block.
fn code(block: &[u8; BYTES], j: usize) -> u8 {
    block[HEADER + j / 2] >> (4 * (1 - j % 2)) & 15
}

/// Returns the code of the level nearest to `x`; of equally near ones the first.
fn nearest(levels: &Levels, x: f32) -> u8 {
    let (mut best, mut least) = (0, f32::INFINITY);
    for (code, level) in (0..).zip(levels) {
        let far = (x - level).abs();
        (best, least) = if far < least { (code, far) } else { (best, least) };
    }
    best
}

pub(crate) fn pack(levels: &Levels, x: &[f32; LEN], block: &mut [u8; BYTES]) {
    let x = x.map(|v| clamp(v, F16_MAX));
    let largest = x.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    let scale = if largest.is_normal() { largest } else { 0.0 };
    let (header, codes) = block.split_at_mut(HEADER);
    header.copy_from_slice(&scale.to_le_bytes());
    let code = |v: f32| nearest(levels, if scale == 0.0 { 0.0 } else { v / scale });
    for (byte, pair) in codes.iter_mut().zip(x.as_chunks::<2>().0) {
        *byte = code(pair[0]) << 4 | code(pair[1]);
    }
}

pub(crate) fn unpack(levels: &Levels, block: &[u8; BYTES]) -> [f32; LEN] {
    let scale = scale(block);
    std::array::from_fn(|j| levels[usize::from(code(block, j))] * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `bitsandbytes.functional.get_4bit_type`.
    #[test]
    fn levels_have_the_bits_of_the_library() {
        let nf4 = [
            0xbf80_0000_u32,
            0xbf32_39b1,
            0xbf06_6b30,
            0xbeca_32a0,
            0xbe91_a24d,
            0xbe3d_353f,
            0xbdba_7871,
            0,
            0x3da2_faff,
            0x3e24_cae3,
            0x3e7c_04dd,
            0x3ead_033a,
            0x3ee1_a4b8,
            0x3f10_07ab,
            0x3f39_13b3,
            0x3f80_0000,
        ];
        assert_eq!(NF4.map(f32::to_bits), nf4);
        let fp4 = [
            0,
            0x3baa_aaab,
            0x3f2a_aaab,
            0x3f80_0000,
            0x3eaa_aaab,
            0x3f00_0000,
            0x3e2a_aaab,
            0x3e80_0000_u32,
        ];
        assert_eq!(FP4[..8].iter().map(|level| level.to_bits()).collect::<Vec<_>>(), fp4);
        assert_eq!(FP4[8].to_bits(), 0);
        (1..8).for_each(|code| assert_eq!(FP4[8 + code], -FP4[code]));
    }

    #[test]
    fn first_value_of_a_byte_is_in_its_high_nibble() {
        let mut block = [0; BYTES];
        block[..HEADER].copy_from_slice(&2.0f32.to_le_bytes());
        block[HEADER] = 0xf0;
        assert_eq!(unpack(&NF4, &block)[..3], [2.0, -2.0, -2.0]);
        assert_eq!(unpack(&FP4, &block)[..3], [-0.5, 0.0, 0.0]);
    }

    #[test]
    fn every_level_has_its_code_and_others_the_nearest() {
        for levels in [&NF4, &FP4] {
            for (code, level) in (0..).zip(levels) {
                let zero_of_fp4 = *level == 0.0 && code == 8;
                assert_eq!(nearest(levels, *level), if zero_of_fp4 { 0 } else { code });
            }
            let mut sorted = *levels;
            sorted.sort_by(f32::total_cmp);
            for pair in sorted.windows(2).filter(|pair| pair[0] < pair[1]) {
                let at =
                    |share: f32| levels[usize::from(nearest(levels, pair[0] + share * (pair[1] - pair[0])))];
                assert_eq!([at(0.49), at(0.51)], [pair[0], pair[1]]);
            }
        }
    }

    #[test]
    fn blocks_of_levels_round_trip_exactly() {
        for levels in [&NF4, &FP4] {
            let x: [f32; LEN] = std::array::from_fn(|j| levels[(j * 5 + 3) % 16] * 0.125);
            let mut block = [0; BYTES];
            pack(levels, &x, &mut block);
            assert_eq!((scale(&block), unpack(levels, &block)), (0.125, x));
            pack(levels, &[0.0; LEN], &mut block);
            assert_eq!(unpack(levels, &block), [0.0; LEN]);
        }
    }
}
