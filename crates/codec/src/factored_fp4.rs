//! nvfp4_g256: blocks of nvfp4 with a factor, as NVIDIA's checkpoints store one for each tensor.
//!
//! | bytes | values | bits per value | value |
//! |---|---|---|---|
//! | 148 | 256 | 4.625 | float(scale) · f · level(code) |
//!
//! ```text
//! f f32, 16 scales, then 8 bytes for each 16 values: value j (j < 8) in the low nibble and value
//! j + 8 in the high nibble of byte j
//! ```
//!
//! Levels (E2M1) and scales (E4M3 without its sign) are those of nvfp4 ([`fp4`](crate::fp4)), four
//! of whose blocks these are. Scale and factor are multiplied in f32 first, as libraries do; their
//! product with a level is rounded too.
//!
//! Seek unit: one block. The encoder's factor maps the largest value to 2,688, the largest of
//! nvfp4; scales are chosen as there. Zero and non-finite numbers: NaN counts as 0, values are
//! clamped to ±65,504; when f underflows in f32, values are 0.

use crate::finite::{F16_MAX, clamp};
use crate::fp4::{ByteFloat, NVFP4_MAX};
use crate::table::LevelTable;

/// Values per block.
pub const LEN: usize = 256;
/// Bytes per block.
pub const BYTES: usize = 148;
/// Bytes of the factor.
pub const FACTOR: usize = 4;
/// Bytes before the codes.
pub const HEADER: usize = FACTOR + SUBS;
/// Values per scale.
pub const SUB: usize = 16;
/// Scales per block.
pub const SUBS: usize = LEN / SUB;

/// A block of codes under scales and a factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FactoredBlock {
    /// f of the table above.
    pub factor: f32,
    /// E4M3; bit 7 is ignored.
    pub scales: [u8; SUBS],
    /// `[256]`.
    pub codes: [u8; LEN],
}

impl FactoredBlock {
    fn encode(x: &[f32; LEN]) -> Self {
        let x = x.map(|v| clamp(v, F16_MAX));
        let factor = x.iter().fold(0.0f32, |max, v| max.max(v.abs())) / NVFP4_MAX;
        let mut block = Self { factor, scales: [0; SUBS], codes: [0; LEN] };
        if factor == 0.0 {
            return block;
        }
        let subs = x.as_chunks::<SUB>().0.iter().zip(block.codes.as_chunks_mut::<SUB>().0);
        for ((sub, codes), scale) in subs.zip(&mut block.scales) {
            let sub = sub.map(|v| v / factor);
            *scale = ByteFloat::E4M3.fit(&sub, -2..=2);
            *codes = LevelTable::E2M1.encode(&sub, ByteFloat::E4M3.to_f32(*scale) * LevelTable::E2M1.unit());
        }
        block
    }

    /// Returns the values.
    pub fn decode(&self) -> [f32; LEN] {
        std::array::from_fn(|j| {
            let scale = ByteFloat::E4M3.to_f32(self.scales[j / SUB]) * self.factor;
            scale * (LevelTable::E2M1.level(self.codes[j]) * LevelTable::E2M1.unit())
        })
    }

    /// Returns the bytes.
    pub fn to_bytes(&self) -> [u8; BYTES] {
        let mut block = [0; BYTES];
        block[..FACTOR].copy_from_slice(&self.factor.to_le_bytes());
        block[FACTOR..HEADER].copy_from_slice(&self.scales);
        let subs = self.codes.as_chunks::<SUB>().0.iter();
        for (codes, out) in subs.zip(block[HEADER..].chunks_exact_mut(SUB / 2)) {
            out.iter_mut().enumerate().for_each(|(j, byte)| *byte = codes[j] | codes[j + SUB / 2] << 4);
        }
        block
    }

    /// Reads a block.
    pub fn from_bytes(block: &[u8; BYTES]) -> Self {
        let code = |v: usize| {
            let (sub, j) = (v / SUB, v % SUB);
            block[HEADER + SUB / 2 * sub + j % 8] >> (4 * (j / 8)) & 15
        };
        Self {
            factor: f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            scales: std::array::from_fn(|s| block[FACTOR + s] & 0x7f),
            codes: std::array::from_fn(code),
        }
    }

    /// Returns four blocks of nvfp4 times a factor, as bytes.
    pub fn of_nvfp4(factor: f32, blocks: &[[u8; 36]; 4]) -> [u8; BYTES] {
        let mut block = [0; BYTES];
        block[..FACTOR].copy_from_slice(&factor.to_le_bytes());
        for (i, part) in blocks.iter().enumerate() {
            block[FACTOR + 4 * i..][..4].copy_from_slice(&part[..4]);
            block[HEADER + 32 * i..][..32].copy_from_slice(&part[4..]);
        }
        block
    }
}

/// Returns whether a block decodes to a non-finite value: a scale is NaN, or the factor is not
/// finite or so large that a value overflows.
pub(crate) fn is_broken(block: &[u8; BYTES]) -> bool {
    let block = FactoredBlock::from_bytes(block);
    let has_nan = block.scales.iter().any(|scale| ByteFloat::E4M3.to_f32(*scale).is_nan());
    let is_safe = block.factor.abs() <= f32::MAX / NVFP4_MAX;
    has_nan || !is_safe && block.decode().iter().any(|v| !v.is_finite())
}

pub(crate) fn pack(x: &[f32; LEN], block: &mut [u8; BYTES]) {
    *block = FactoredBlock::encode(x).to_bytes();
}

pub(crate) fn unpack(block: &[u8; BYTES]) -> [f32; LEN] {
    FactoredBlock::from_bytes(block).decode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::{DType, decode};

    #[test]
    fn four_blocks_of_nvfp4_keep_their_values_times_the_factor() {
        let mut random = Random::new(5);
        // Without the bits of a scale that is NaN.
        let bits = |random: &mut Random, j: usize| random.bits() as u8 & if j < 4 { 0x77 } else { 0xff };
        let blocks: [[u8; 36]; 4] = std::array::from_fn(|_| std::array::from_fn(|j| bits(&mut random, j)));
        let factor = 0.001_371;
        let mut plain = [0.0; LEN];
        decode(DType::NVFP4, blocks.as_flattened(), &mut plain).unwrap();
        let bytes = FactoredBlock::of_nvfp4(factor, &blocks);
        for (got, plain) in unpack(&bytes).into_iter().zip(plain) {
            // Each is rounded once or twice.
            let want = f64::from(plain) * f64::from(factor);
            assert!((f64::from(got) - want).abs() <= want.abs() * 1.5 / f64::from(1 << 23), "{got}, {want}");
        }
        assert_eq!(FactoredBlock::from_bytes(&bytes).to_bytes()[..HEADER], bytes[..HEADER]);
        assert_eq!(FactoredBlock::from_bytes(&bytes).to_bytes()[HEADER..], bytes[HEADER..]);
    }

    #[test]
    fn representable_values_round_trip_exactly() {
        let levels: [f32; 16] =
            std::array::from_fn(|j| LevelTable::E2M1.level(j as u8) * LevelTable::E2M1.unit());
        // The largest is 6 times 448 times the factor.
        let x: [f32; LEN] = std::array::from_fn(|j| {
            let scale = if j < SUB { 448.0 } else { 1.0 + (j / SUB % 8) as f32 / 8.0 };
            levels[j % 16] * scale * 0.125
        });
        let block = FactoredBlock::encode(&x);
        assert_eq!((block.factor, block.decode()), (0.125, x));
        assert_eq!(unpack(&FactoredBlock::encode(&[0.0; LEN]).to_bytes()), [0.0; LEN]);
    }
}
