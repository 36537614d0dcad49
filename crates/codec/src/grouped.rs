//! q4_g128: 4-bit codes with a scale and an integer zero for 128 values, as AWQ and GPTQ store
//! them.
//!
//! | bytes | values | bits per value | value |
//! |---|---|---|---|
//! | 68 | 128 | 4.25 | (code - zero) · d |
//!
//! ```text
//! d f16, zero u8, 0, then 16 bytes of nibbles for each 32 values: value j in the low nibble and
//! value j + 16 in the high nibble of byte j
//! ```
//!
//! No GGML type holds such numbers: the minimum of q4_1, an f16, is not a multiple of its scale.
//! Products of d and a difference of codes have at most 16 significant bits, so values are exact in
//! f32. Zero is 0 to 16: GPTQ adds 1 to a stored nibble.
//!
//! AWQ: Lin et al. 2023 (arXiv 2306.00978); GPTQ: Frantar et al. 2022 (arXiv 2210.17323).
//!
//! Seek unit: one block. The encoder spans the values and 0, and rounds the zero. Zero and
//! non-finite numbers: NaN counts as 0, values are clamped to ±65,504; when d underflows in f16,
//! every code is the code of zero.

use half::f16;

use crate::block32::{half_at, nibble, put_nibbles};
use crate::finite::{F16_MAX, clamp, to_f16};

/// Values per block.
pub const LEN: usize = 128;
/// Bytes per block.
pub const BYTES: usize = 68;
/// Bytes before the codes.
const HEADER: usize = 4;
/// Values whose codes lie together.
const RUN: usize = 32;
const TOP: f32 = 15.0;

/// A block of codes under one scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupBlock {
    /// d of the table above.
    pub scale: f16,
    /// The code of zero.
    pub zero: u8,
    /// `[128]`.
    pub codes: [u8; LEN],
}

impl GroupBlock {
    fn encode(x: &[f32; LEN]) -> Self {
        let x = x.map(|v| clamp(v, F16_MAX));
        let (min, max) = x.iter().fold((0.0f32, 0.0f32), |(lo, hi), &v| (lo.min(v), hi.max(v)));
        let scale = to_f16((max - min) / TOP);
        let inverse = if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
        let zero = (-min * inverse).round().min(TOP);
        let codes = x.map(|v| (v * inverse + zero).round().clamp(0.0, TOP) as u8);
        Self { scale, zero: zero as u8, codes }
    }

    /// Returns the values.
    pub fn decode(&self) -> [f32; LEN] {
        let (d, zero) = (self.scale.to_f32(), f32::from(self.zero));
        self.codes.map(|code| (f32::from(code) - zero) * d)
    }

    /// Returns the bytes.
    pub fn to_bytes(&self) -> [u8; BYTES] {
        let mut block = [0; BYTES];
        block[..2].copy_from_slice(&self.scale.to_le_bytes());
        block[2] = self.zero;
        let runs = self.codes.as_chunks::<RUN>().0.iter();
        for (codes, out) in runs.zip(block[HEADER..].chunks_exact_mut(RUN / 2)) {
            put_nibbles(codes, out);
        }
        block
    }

    /// Reads a block.
    pub fn from_bytes(block: &[u8; BYTES]) -> Self {
        let run = |j: usize| &block[HEADER + j / RUN * (RUN / 2)..][..RUN / 2];
        Self {
            scale: half_at(block, 0),
            zero: block[2],
            codes: std::array::from_fn(|j| nibble(run(j), j % RUN)),
        }
    }
}

pub(crate) fn pack(x: &[f32; LEN], block: &mut [u8; BYTES]) {
    *block = GroupBlock::encode(x).to_bytes();
}

pub(crate) fn unpack(block: &[u8; BYTES]) -> [f32; LEN] {
    GroupBlock::from_bytes(block).decode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_and_zero_survives_bytes() {
        for zero in 0..=16 {
            let codes = std::array::from_fn(|j| (j * 7 % 16) as u8);
            let block = GroupBlock { scale: f16::from_f32(0.013), zero, codes };
            assert_eq!(GroupBlock::from_bytes(&block.to_bytes()), block);
            let d = f64::from(block.scale.to_f32());
            for (value, code) in block.decode().into_iter().zip(codes) {
                assert_eq!(f64::from(value), (f64::from(code) - f64::from(zero)) * d);
            }
        }
    }

    #[test]
    fn values_of_a_grid_round_trip_exactly() {
        let x: [f32; LEN] = std::array::from_fn(|j| (j % 16) as f32 * 0.25 - 1.0);
        assert_eq!(unpack(&GroupBlock::encode(&x).to_bytes()), x);
        assert_eq!(unpack(&GroupBlock::encode(&[0.0; LEN]).to_bytes()), [0.0; LEN]);
    }
}
