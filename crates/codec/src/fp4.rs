//! mxfp4 and nvfp4: 4-bit E2M1 floats under a one-byte float scale. Layouts match GGML bit for bit.
//!
//! | format | bytes | values | bits per value | scale of |
//! |---|---|---|---|---|
//! | mxfp4 | 17 | 32 | 4.25 | 32 values, E8M0: 2^(e - 127) |
//! | nvfp4 | 36 | 64 | 4.5 | 16 values, E4M3 without its sign |
//!
//! ```text
//! value = scale · level(code)               levels are E2M1 (Table::E2M1)
//!
//! mxfp4   e, 16 bytes: value j low nibble, value j + 16 high nibble of byte j
//! nvfp4   4 scales, 32 bytes: value 16s + j (j < 8) low nibble,
//!         value 16s + j + 8 high nibble of byte 8s + j
//! ```
//!
//! mxfp4 is from the OCP Microscaling Formats (MX) specification 1.0, 5.3; nvfp4 is NVIDIA's,
//! without the per-tensor scale, which is not part of GGML's block. E8M0 255 and E4M3 127 are NaN;
//! bit 7 of an nvfp4 scale is ignored.
//!
//! Seek unit: one block. The encoder tries the smallest scale that keeps the largest value in range
//! and its neighbours, and selects the one of least squared error. Zero and non-finite numbers: NaN
//! counts as 0; values are clamped to ±49,152 in mxfp4, its largest value within f16, and to ±2,688
//! in nvfp4, its largest value. The smallest scale of nvfp4 is 2^-9 and nearby scales are that far
//! apart: without a per-tensor scale, weights below 0.1 are coded coarsely.

use std::ops::RangeInclusive;

use crate::block32::{nibble, put_nibbles};
use crate::finite::clamp;
use crate::table::LevelTable;

/// The largest value that the mxfp4 encoder writes: 2^13 · 6. Files may contain larger ones.
pub const MXFP4_MAX: f32 = 49_152.0;
/// The largest value of nvfp4: 448 · 6.
pub const NVFP4_MAX: f32 = 2688.0;
/// Values per block of mxfp4.
pub const MXFP4_LEN: usize = 32;
/// Values per block of nvfp4, then values per scale.
pub const NVFP4_LEN: usize = 64;
const NVFP4_SUB: usize = 16;
const NVFP4_SUBS: usize = NVFP4_LEN / NVFP4_SUB;

/// The largest E2M1.
const E2M1_MAX: f32 = 6.0;

/// A one-byte float, used for block scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByteFloat {
    /// 2^(bits - 127); 255 is NaN.
    E8M0,
    /// Four bits of exponent, biased by 7, and three of mantissa; 127 is NaN, bit 7 is ignored.
    E4M3,
}

impl ByteFloat {
    /// Converts to f32.
    pub fn to_f32(self, bits: u8) -> f32 {
        match (self, bits & 0x7f) {
            (Self::E8M0, _) if bits == u8::MAX => f32::NAN,
            // 2^-127 is subnormal.
            (Self::E8M0, _) => f32::from_bits((u32::from(bits) << 23).max(1 << 22)),
            (Self::E4M3, 0x7f) => f32::NAN,
            // Puts mantissa and exponent at their f32 bits; the f32 exponent bias is larger by 120.
            (Self::E4M3, bits) => f32::from_bits(u32::from(bits) << 20) * 120f32.exp2(),
        }
    }

    /// Returns the bits of the largest number.
    const fn top(self) -> u8 {
        match self {
            Self::E8M0 => 254,
            Self::E4M3 => 126,
        }
    }

    /// Returns the bits of the smallest number `>= x`, or of the largest.
    fn at_least(self, x: f32) -> u8 {
        let (mut low, mut high) = (0, self.top());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.to_f32(middle) >= x { high = middle } else { low = middle + 1 }
        }
        high
    }

    /// Returns the scale of least squared error for `x`, at one of `offsets` from the
    /// smallest scale under which every value is in range.
    pub(crate) fn fit<const N: usize>(self, x: &[f32; N], offsets: RangeInclusive<i16>) -> u8 {
        let largest = x.iter().fold(0.0f32, |max, v| max.max(v.abs()));
        let base = i16::from(self.at_least(largest / E2M1_MAX));
        let (mut best, mut min_loss) = (0, f64::INFINITY);
        for bits in offsets.filter_map(|by| u8::try_from(base + by).ok().filter(|&bits| bits <= self.top())) {
            let loss = LevelTable::E2M1.loss(x, self.to_f32(bits) * LevelTable::E2M1.unit());
            if loss < min_loss {
                (best, min_loss) = (bits, loss);
            }
        }
        best
    }
}

/// Decodes `codes`; each of `scales` applies to an equal run of codes.
fn decode<const N: usize>(of: ByteFloat, scales: &[u8], codes: &[u8; N]) -> [f32; N] {
    let run = N / scales.len();
    std::array::from_fn(|j| {
        of.to_f32(scales[j / run]) * (LevelTable::E2M1.level(codes[j]) * LevelTable::E2M1.unit())
    })
}

/// Decodes a block of mxfp4.
pub(crate) fn decode_mx(scale: u8, codes: &[u8; MXFP4_LEN]) -> [f32; MXFP4_LEN] {
    decode(ByteFloat::E8M0, &[scale], codes)
}

/// Decodes a block of nvfp4.
pub(crate) fn decode_nv(scales: &[u8; NVFP4_SUBS], codes: &[u8; NVFP4_LEN]) -> [f32; NVFP4_LEN] {
    decode(ByteFloat::E4M3, scales, codes)
}

pub(crate) fn pack_mx(x: &[f32; MXFP4_LEN], block: &mut [u8; 17]) {
    let x = x.map(|v| clamp(v, MXFP4_MAX));
    block[0] = ByteFloat::E8M0.fit(&x, -1..=0);
    put_nibbles(
        &LevelTable::E2M1.encode(&x, ByteFloat::E8M0.to_f32(block[0]) * LevelTable::E2M1.unit()),
        &mut block[1..],
    );
}

pub(crate) fn read_mx(block: &[u8; 17]) -> (u8, [u8; MXFP4_LEN]) {
    (block[0], std::array::from_fn(|j| nibble(&block[1..], j)))
}

pub(crate) fn unpack_mx(block: &[u8; 17]) -> [f32; MXFP4_LEN] {
    let (scale, codes) = read_mx(block);
    decode_mx(scale, &codes)
}

pub(crate) fn pack_nv(x: &[f32; NVFP4_LEN], block: &mut [u8; 36]) {
    let x = x.map(|v| clamp(v, NVFP4_MAX));
    let (scales, nibbles) = block.split_at_mut(NVFP4_SUBS);
    let (subs, _) = x.as_chunks::<NVFP4_SUB>();
    for ((sub, scale), out) in subs.iter().zip(scales).zip(nibbles.chunks_exact_mut(NVFP4_SUB / 2)) {
        *scale = ByteFloat::E4M3.fit(sub, -2..=2);
        let codes = LevelTable::E2M1.encode(sub, ByteFloat::E4M3.to_f32(*scale) * LevelTable::E2M1.unit());
        for (j, byte) in out.iter_mut().enumerate() {
            *byte = codes[j] | codes[j + NVFP4_SUB / 2] << 4;
        }
    }
}

pub(crate) fn read_nv(block: &[u8; 36]) -> ([u8; NVFP4_SUBS], [u8; NVFP4_LEN]) {
    let code = |v: usize| {
        let (sub, j) = (v / NVFP4_SUB, v % NVFP4_SUB);
        block[NVFP4_SUBS + NVFP4_SUB / 2 * sub + j % 8] >> (4 * (j / 8)) & 15
    };
    (std::array::from_fn(|s| block[s] & 0x7f), std::array::from_fn(code))
}

pub(crate) fn unpack_nv(block: &[u8; 36]) -> [f32; NVFP4_LEN] {
    let (scales, codes) = read_nv(block);
    decode_nv(&scales, &codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_floats_match_their_definitions() {
        for bits in 0..=254u8 {
            assert_eq!(f64::from(ByteFloat::E8M0.to_f32(bits)), (f64::from(bits) - 127.0).exp2(), "{bits}");
        }
        for bits in 0..=126u8 {
            let (exponent, mantissa) = (f64::from(bits >> 3), f64::from(bits & 7) / 8.0);
            let want =
                if bits < 8 { mantissa * (-6f64).exp2() } else { (1.0 + mantissa) * (exponent - 7.0).exp2() };
            assert_eq!(f64::from(ByteFloat::E4M3.to_f32(bits)), want, "{bits}");
            assert_eq!(ByteFloat::E4M3.to_f32(bits | 128), ByteFloat::E4M3.to_f32(bits), "{bits}");
        }
        assert_eq!(ByteFloat::E4M3.to_f32(126) * E2M1_MAX, NVFP4_MAX);
        for (float, bits) in [(ByteFloat::E8M0, 255), (ByteFloat::E4M3, 127), (ByteFloat::E4M3, 255)] {
            assert!(float.to_f32(bits).is_nan());
        }
    }

    #[test]
    fn representable_values_round_trip_exactly() {
        let values: [f32; 16] =
            std::array::from_fn(|j| LevelTable::E2M1.level(j as u8) * LevelTable::E2M1.unit());
        for scale in [2f32.powi(-9), 0.25, 1.0, 64.0] {
            let x: [f32; NVFP4_LEN] = std::array::from_fn(|j| values[j % 16] * scale);
            let mut block = [0; 36];
            pack_nv(&x, &mut block);
            assert_eq!(unpack_nv(&block), x, "nvfp4 {scale}");
            let x: [f32; MXFP4_LEN] = std::array::from_fn(|j| x[j]);
            let mut block = [0; 17];
            pack_mx(&x, &mut block);
            assert_eq!(unpack_mx(&block), x, "mxfp4 {scale}");
        }
    }
}
