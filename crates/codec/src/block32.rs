//! GGML's blocks of 32 values: q8_0, q4_0, q4_1, q5_0, q5_1. Layouts and rounding match GGML bit
//! for bit.
//!
//! | format | bytes | bits per value | value | layout (little endian) |
//! |---|---|---|---|---|
//! | q8_0 | 34 | 8.5 | code · d, code -127..=127 | d f16, 32 signed bytes |
//! | q4_0 | 18 | 4.5 | (code - 8) · d | d f16, 16 bytes of nibbles |
//! | q4_1 | 20 | 5.0 | code · d + m | d f16, m f16, nibbles |
//! | q5_0 | 22 | 5.5 | (code - 16) · d | d f16, u32 of high bits (bit j = value j), nibbles |
//! | q5_1 | 24 | 6.0 | code · d + m | d f16, m f16, u32 of high bits, nibbles |
//!
//! Nibbles: byte j holds value j in its low nibble and value j + 16 in its high nibble.
//!
//! q8_0 uses d = max|x| / 127. q4_0 and q5_0 map the value of largest magnitude (the first of
//! equals) to the lowest code, which has no positive twin. q4_1 and q5_1 span min to max. Codes are
//! computed with the unrounded f32 d.
//!
//! Seek unit: one block. Zero and non-finite numbers: NaN counts as 0, values are clamped to
//! ±65,504; when d underflows in f16, every code is the code of zero, so the block decodes to 0 (or
//! to m). Decoded values of q8_0, q4_0 and q5_0 are within ±65,504 too, so that a device may
//! multiply in f16: the d of q8_0 is at most 515.5, as 127 times the next one, 516, is 65,532.

use half::f16;

use crate::DType;
use crate::finite::{F16_MAX, clamp, to_f16};
use crate::kfit::{Importance, fit_symmetric, fit_with_min};

/// Values per block.
pub const LEN: usize = 32;

/// The largest d of q8_0: 127 · d still fits f16.
pub const Q8_0_MAX_SCALE: f32 = 515.5;

/// The offset that makes the signed q8_0 code of a cache tile unsigned.
pub const Q8_0_ZERO: u8 = 128;
/// The q4_0 code of zero.
pub const Q4_0_ZERO: u8 = 8;
/// The q5_0 code of zero.
pub const Q5_0_ZERO: u8 = 16;

/// A block of unsigned codes with a scale: value = (code - zero) · scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaledBlock {
    /// d of the table above.
    pub scale: f16,
    /// `[32]`.
    pub codes: [u8; LEN],
}

/// A block of unsigned codes with a scale and a minimum: value = code · scale + min.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AffineBlock {
    /// d of the table above.
    pub scale: f16,
    /// m of the table above.
    pub min: f16,
    /// `[32]`.
    pub codes: [u8; LEN],
}

/// Returns 1 / d, or 0 when d underflows in f16: every code is then the code of zero.
fn inverse(d: f32) -> f32 {
    if to_f16(d) == f16::ZERO { 0.0 } else { 1.0 / d }
}

/// Returns the value of largest magnitude, the first of equals.
fn extreme(x: &[f32; LEN]) -> f32 {
    x.iter().fold(0.0f32, |best, &v| if v.abs() > best.abs() { v } else { best })
}

/// Encodes a q8_0 block; codes are offset by [`Q8_0_ZERO`].
pub fn encode_q8_0(x: &[f32; LEN]) -> ScaledBlock {
    let x = x.map(|v| clamp(v, F16_MAX));
    let d = extreme(&x).abs() / 127.0;
    let id = inverse(d);
    let scale = to_f16(d.min(Q8_0_MAX_SCALE));
    ScaledBlock { scale, codes: x.map(|v| ((v * id).round() as i32 + i32::from(Q8_0_ZERO)) as u8) }
}

/// Encodes a block of q4_0 (`zero` = [`Q4_0_ZERO`]) or q5_0 (`zero` = [`Q5_0_ZERO`]).
pub fn encode_centred(x: &[f32; LEN], zero: u8) -> ScaledBlock {
    let x = x.map(|v| clamp(v, F16_MAX));
    let d = extreme(&x) / -f32::from(zero);
    let id = inverse(d);
    let top = 2 * zero - 1;
    ScaledBlock { scale: to_f16(d), codes: x.map(|v| ((v * id + f32::from(zero) + 0.5) as u8).min(top)) }
}

/// Encodes a block of q4_1 (`top` = 15) or q5_1 (`top` = 31).
pub fn encode_min(x: &[f32; LEN], top: u8) -> AffineBlock {
    let x = x.map(|v| clamp(v, F16_MAX));
    let (min, max) = x.iter().fold((f32::MAX, f32::MIN), |(lo, hi), &v| (lo.min(v), hi.max(v)));
    let d = (max - min) / f32::from(top);
    let id = inverse(d);
    let codes = x.map(|v| (((v - min) * id + 0.5) as u8).min(top));
    AffineBlock { scale: to_f16(d), min: to_f16(min), codes }
}

/// Encodes a block of q4_0 or q5_0 with the scale of least error, weighted by `importance`.
fn fit_centred(x: &[f32; LEN], importance: &[f32; LEN], zero: u8) -> ScaledBlock {
    let x = x.map(|v| clamp(v, F16_MAX));
    let scale = to_f16(fit_symmetric(&x, Some(importance), zero) as f32);
    let (id, top) = (inverse(scale.to_f32()), f32::from(2 * zero - 1));
    ScaledBlock { scale, codes: x.map(|v| (v * id + f32::from(zero)).round().clamp(0.0, top) as u8) }
}

/// Encodes a block of q4_1 or q5_1 with the scale and the minimum of least error, weighted by
/// `importance`.
fn fit_min(x: &[f32; LEN], importance: &[f32; LEN], top: u8) -> AffineBlock {
    let x = x.map(|v| clamp(v, F16_MAX));
    let (scale, min) = fit_with_min(&x, Some(importance), top);
    let (scale, min) = (to_f16(scale as f32), to_f16(-min as f32));
    let (id, m) = (inverse(scale.to_f32()), min.to_f32());
    let codes = x.map(|v| ((v - m) * id).round().clamp(0.0, f32::from(top)) as u8);
    AffineBlock { scale, min, codes }
}

impl ScaledBlock {
    /// Returns the values: (code - zero) · scale.
    pub fn decode(&self, zero: u8) -> [f32; LEN] {
        let d = self.scale.to_f32();
        self.codes.map(|c| (f32::from(c) - f32::from(zero)) * d)
    }

    /// Writes the block as q4_0, q5_0 or q8_0.
    ///
    /// # Panics
    /// When `dtype` is another, or `out` does not have the bytes of its block.
    pub fn write(&self, dtype: DType, out: &mut [u8]) {
        let (scale, rest) = out.split_at_mut(2);
        scale.copy_from_slice(&self.scale.to_le_bytes());
        match dtype {
            DType::Q4_0 => put_nibbles(&self.codes, rest),
            DType::Q5_0 => {
                put_fifth_bits(&self.codes, &mut rest[..4]);
                put_nibbles(&self.codes, &mut rest[4..]);
            }
            DType::Q8_0 => {
                rest.copy_from_slice(&self.codes.map(|code| code.wrapping_sub(Q8_0_ZERO)));
            }
            other => panic!("{other} has no such block"),
        }
    }
}

impl AffineBlock {
    /// Returns the values: code · scale + min.
    pub fn decode(&self) -> [f32; LEN] {
        let (d, m) = (self.scale.to_f32(), self.min.to_f32());
        self.codes.map(|c| f32::from(c) * d + m)
    }
}

/// Packs low nibbles: value j in the low half of byte j, value j + 16 in the high half.
pub(crate) fn put_nibbles(codes: &[u8; LEN], out: &mut [u8]) {
    for (j, byte) in out.iter_mut().enumerate() {
        *byte = (codes[j] & 15) | (codes[j + 16] & 15) << 4;
    }
}

pub(crate) fn nibble(bytes: &[u8], j: usize) -> u8 {
    bytes[j % 16] >> (4 * (j / 16)) & 15
}

/// Packs fifth bits: bit j of a little-endian u32 belongs to value j.
fn put_fifth_bits(codes: &[u8; LEN], out: &mut [u8]) {
    let bits = codes.iter().enumerate().fold(0u32, |bits, (j, &c)| bits | u32::from(c >> 4) << j);
    out.copy_from_slice(&bits.to_le_bytes());
}

fn fifth_bit(bytes: &[u8], j: usize) -> u8 {
    (bytes[j / 8] >> (j % 8) & 1) << 4
}

pub(crate) fn half_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn pack_q8_0(x: &[f32; LEN], block: &mut [u8; 34]) {
    encode_q8_0(x).write(DType::Q8_0, block);
}

pub(crate) fn read_q8_0(block: &[u8; 34]) -> ScaledBlock {
    let codes = std::array::from_fn(|j| block[2 + j].wrapping_add(Q8_0_ZERO));
    ScaledBlock { scale: half_at(block, 0), codes }
}

pub(crate) fn unpack_q8_0(block: &[u8; 34]) -> [f32; LEN] {
    read_q8_0(block).decode(Q8_0_ZERO)
}

/// Encodes as GGML does, or for least error if importance is known.
fn centred(x: &[f32; LEN], importance: Importance<'_, LEN>, zero: u8) -> ScaledBlock {
    importance.map_or_else(|| encode_centred(x, zero), |importance| fit_centred(x, importance, zero))
}

/// See [`centred`].
fn with_min(x: &[f32; LEN], importance: Importance<'_, LEN>, top: u8) -> AffineBlock {
    importance.map_or_else(|| encode_min(x, top), |importance| fit_min(x, importance, top))
}

pub(crate) fn pack_q4_0(x: &[f32; LEN], importance: Importance<'_, LEN>, block: &mut [u8; 18]) {
    centred(x, importance, Q4_0_ZERO).write(DType::Q4_0, block);
}

pub(crate) fn read_q4_0(block: &[u8; 18]) -> ScaledBlock {
    let codes = std::array::from_fn(|j| nibble(&block[2..], j));
    ScaledBlock { scale: half_at(block, 0), codes }
}

pub(crate) fn unpack_q4_0(block: &[u8; 18]) -> [f32; LEN] {
    read_q4_0(block).decode(Q4_0_ZERO)
}

pub(crate) fn pack_q5_0(x: &[f32; LEN], importance: Importance<'_, LEN>, block: &mut [u8; 22]) {
    centred(x, importance, Q5_0_ZERO).write(DType::Q5_0, block);
}

pub(crate) fn read_q5_0(block: &[u8; 22]) -> ScaledBlock {
    let codes = std::array::from_fn(|j| nibble(&block[6..], j) | fifth_bit(&block[2..], j));
    ScaledBlock { scale: half_at(block, 0), codes }
}

pub(crate) fn unpack_q5_0(block: &[u8; 22]) -> [f32; LEN] {
    read_q5_0(block).decode(Q5_0_ZERO)
}

pub(crate) fn pack_q4_1(x: &[f32; LEN], importance: Importance<'_, LEN>, block: &mut [u8; 20]) {
    let coded = with_min(x, importance, 15);
    block[..2].copy_from_slice(&coded.scale.to_le_bytes());
    block[2..4].copy_from_slice(&coded.min.to_le_bytes());
    put_nibbles(&coded.codes, &mut block[4..]);
}

pub(crate) fn read_q4_1(block: &[u8; 20]) -> AffineBlock {
    let codes = std::array::from_fn(|j| nibble(&block[4..], j));
    AffineBlock { scale: half_at(block, 0), min: half_at(block, 2), codes }
}

pub(crate) fn unpack_q4_1(block: &[u8; 20]) -> [f32; LEN] {
    read_q4_1(block).decode()
}

pub(crate) fn pack_q5_1(x: &[f32; LEN], importance: Importance<'_, LEN>, block: &mut [u8; 24]) {
    let coded = with_min(x, importance, 31);
    block[..2].copy_from_slice(&coded.scale.to_le_bytes());
    block[2..4].copy_from_slice(&coded.min.to_le_bytes());
    put_fifth_bits(&coded.codes, &mut block[4..8]);
    put_nibbles(&coded.codes, &mut block[8..]);
}

pub(crate) fn read_q5_1(block: &[u8; 24]) -> AffineBlock {
    let codes = std::array::from_fn(|j| nibble(&block[8..], j) | fifth_bit(&block[4..], j));
    AffineBlock { scale: half_at(block, 0), min: half_at(block, 2), codes }
}

pub(crate) fn unpack_q5_1(block: &[u8; 24]) -> [f32; LEN] {
    read_q5_1(block).decode()
}
