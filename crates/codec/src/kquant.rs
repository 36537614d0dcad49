//! GGML's super-blocks of 256 values: q2_K, q3_K, q4_K, q5_K, q6_K. Layouts match GGML bit for bit.
//!
//! A super-block consists of sub-blocks whose scales are themselves small integers, in units of an
//! f16.
//!
//! | format | bytes | bits per value | sub-blocks | value |
//! |---|---|---|---|---|
//! | q2_K | 84 | 2.625 | 16 of 16 | d·sc·code - dmin·m, code 2 bits, sc and m 4 bits |
//! | q3_K | 110 | 3.4375 | 16 of 16 | d·sc·code, code -4..=3, sc -32..=31 |
//! | q4_K | 144 | 4.5 | 8 of 32 | d·sc·code - dmin·m, code 4 bits, sc and m 6 bits |
//! | q5_K | 176 | 5.5 | 8 of 32 | d·sc·code - dmin·m, code 5 bits, sc and m 6 bits |
//! | q6_K | 210 | 6.5625 | 16 of 16 | d·sc·code, code -32..=31, sc -128..=127 |
//!
//! Byte order within a block, with v the index of the value, h = v / 128, r = v mod 128, l = v mod
//! 32:
//!
//! ```text
//! q2_K   16 bytes (sc | m << 4), 64 bytes codes, d f16, dmin f16
//!        code: byte 32h + l, bits 2·(r / 32)
//! q3_K   32 bytes high bits, 64 bytes low two bits as q2_K, 12 bytes scales, d f16
//!        high bit: byte l, bit v / 32; code = (low | high << 2) - 4
//! q4_K   d f16, dmin f16, 12 bytes scales, 128 bytes codes
//!        code: byte 32·(v / 64) + l, low nibble when v mod 64 < 32
//! q5_K   d f16, dmin f16, 12 bytes scales, 32 bytes fifth bits, 128 bytes codes as q4_K
//!        fifth bit: byte l, bit v / 32
//! q6_K   128 bytes low nibbles, 64 bytes high pairs, 16 signed bytes sc, d f16
//!        low: byte 64h + r mod 64, low nibble when r < 64; high: byte 32h + l, bits 2·(r / 32);
//!        code = value - 32
//! ```
//!
//! Seek unit: one super-block. The decoder is exact; the encoder searches for the scales
//! (`kfit.rs`) and is this crate's own, so its bytes differ from another quantizer's while its
//! error is about the same (tests below).
//!
//! Zero and non-finite numbers: NaN counts as 0, values are clamped to ±65,504; a block too small
//! for an f16 scale decodes to zeros.

use half::f16;

use crate::finite::{F16_MAX, clamp};
use crate::kfit::{Importance, MinBlock, SymBlock};

/// Values per super-block.
pub const LEN: usize = 256;

/// Low two bits of q2_K and q3_K, high pairs of q6_K: `(byte, shift)` of value `v` in a plane of 64
/// bytes.
fn pair_at(v: usize) -> (usize, usize) {
    (32 * (v / 128) + v % 32, 2 * (v % 128 / 32))
}

/// Nibbles of q4_K and q5_K: `(byte, shift)` of value `v` in a plane of 128 bytes.
fn nibble_at(v: usize) -> (usize, usize) {
    (32 * (v / 64) + v % 32, 4 * (v % 64 / 32))
}

/// Low nibbles of q6_K: `(byte, shift)` of value `v` in a plane of 128 bytes.
fn wide_nibble_at(v: usize) -> (usize, usize) {
    (64 * (v / 128) + v % 64, 4 * (v % 128 / 64))
}

/// High bits of q3_K and fifth bits of q5_K: `(byte, shift)` of value `v` in a plane of 32 bytes.
fn bit_at(v: usize) -> (usize, usize) {
    (v % 32, v / 32)
}

/// Stores bits `from..` of each code in a zeroed plane.
fn put(plane: &mut [u8], codes: &[u8; LEN], from: usize, mask: u8, at: impl Fn(usize) -> (usize, usize)) {
    for (v, &code) in codes.iter().enumerate() {
        let (byte, shift) = at(v);
        plane[byte] |= (code >> from & mask) << shift;
    }
}

/// Adds the bits that [`put`] stored to the codes, moved back to bit `from`. In every plane, 32
/// consecutive values occupy 32 consecutive bytes, under one shift.
fn get(plane: &[u8], codes: &mut [u8; LEN], from: usize, mask: u8, at: impl Fn(usize) -> (usize, usize)) {
    for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
        let (byte, shift) = at(32 * run);
        for (code, byte) in codes.iter_mut().zip(&plane[byte..byte + 32]) {
            *code |= (byte >> shift & mask) << from;
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([block[at], block[at + 1]])
}

fn put_half(block: &mut [u8], at: usize, value: f16) {
    block[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

/// Packs the 12 bytes of q4_K and q5_K: eight 6-bit scales and eight 6-bit minima.
///
/// Bytes 0..4 hold scales 0..4 and bytes 4..8 minima 0..4 in their low six bits; bytes 8..12 hold
/// the low nibbles of scale (low) and minimum (high) 4..8, whose upper two bits are the top bits of
/// bytes 0..4 and 4..8.
fn put_scales_6(scales: &[u8; 8], mins: &[u8; 8], out: &mut [u8]) {
    for j in 0..4 {
        out[j] = scales[j] | scales[j + 4] >> 4 << 6;
        out[j + 4] = mins[j] | mins[j + 4] >> 4 << 6;
        out[j + 8] = (scales[j + 4] & 15) | mins[j + 4] << 4;
    }
}

fn scales_6(packed: &[u8]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut mins) = ([0; 8], [0; 8]);
    for j in 0..4 {
        scales[j] = packed[j] & 63;
        mins[j] = packed[j + 4] & 63;
        scales[j + 4] = (packed[j + 8] & 15) | packed[j] >> 6 << 4;
        mins[j + 4] = packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4;
    }
    (scales, mins)
}

/// Packs the 12 bytes of q3_K: sixteen 6-bit scales, stored + 32. Low nibbles in bytes 0..8 (scale
/// j < 8 low, j >= 8 high half), upper pairs in bytes 8..12 (scale j in byte 8 + j mod 4, bits 2·(j
/// / 4)).
fn put_scales_3(scales: &[i8; 16], out: &mut [u8]) {
    for (j, &scale) in scales.iter().enumerate() {
        let stored = (scale + 32) as u8;
        out[j % 8] |= (stored & 15) << (4 * (j / 8));
        out[8 + j % 4] |= stored >> 4 << (2 * (j / 4));
    }
}

fn scales_3(packed: &[u8]) -> [i8; 16] {
    std::array::from_fn(|j| {
        let low = packed[j % 8] >> (4 * (j / 8)) & 15;
        let high = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
        (low | high << 4) as i8 - 32
    })
}

/// Clamps values to the range of the super-block formats.
pub(crate) fn in_range(x: &[f32; LEN]) -> [f32; LEN] {
    x.map(|v| clamp(v, F16_MAX))
}

pub(crate) fn pack_q2(x: &[f32; LEN], importance: Importance<'_, LEN>, block: &mut [u8; 84]) {
    let coded = MinBlock::<16>::fit::<16>(&in_range(x), importance, 3, 15);
    block.fill(0);
    for (byte, (scale, min)) in block.iter_mut().zip(coded.scales.into_iter().zip(coded.mins)) {
        *byte = scale | min << 4;
    }
    put(&mut block[16..80], &coded.codes, 0, 3, pair_at);
    put_half(block, 80, coded.d);
    put_half(block, 82, coded.dmin);
}

pub(crate) fn read_q2(block: &[u8; 84]) -> MinBlock<16> {
    let mut codes = [0; LEN];
    get(&block[16..80], &mut codes, 0, 3, pair_at);
    MinBlock {
        d: half_at(block, 80),
        dmin: half_at(block, 82),
        scales: std::array::from_fn(|j| block[j] & 15),
        mins: std::array::from_fn(|j| block[j] >> 4),
        codes,
    }
}

pub(crate) fn unpack_q2(block: &[u8; 84]) -> [f32; LEN] {
    read_q2(block).decode()
}

pub(crate) fn pack_q3(x: &[f32; LEN], importance: Importance<'_, LEN>, block: &mut [u8; 110]) {
    let coded = SymBlock::fit(&in_range(x), importance, 4, 32);
    put_q3(coded.d, &coded.scales, &coded.codes.map(|c| (c + 4) as u8), block);
}

/// Writes a block of q3_K from codes as stored.
pub(crate) fn put_q3(d: f16, scales: &[i8; 16], codes: &[u8; LEN], block: &mut [u8; 110]) {
    block.fill(0);
    put(&mut block[..32], codes, 2, 1, bit_at);
    put(&mut block[32..96], codes, 0, 3, pair_at);
    put_scales_3(scales, &mut block[96..108]);
    put_half(block, 108, d);
}

/// Inverse of [`put_q3`].
pub(crate) fn get_q3(block: &[u8; 110]) -> (f16, [i8; 16], [u8; LEN]) {
    let mut codes = [0; LEN];
    get(&block[..32], &mut codes, 2, 1, bit_at);
    get(&block[32..96], &mut codes, 0, 3, pair_at);
    (half_at(block, 108), scales_3(&block[96..]), codes)
}

pub(crate) fn read_q3(block: &[u8; 110]) -> SymBlock {
    let (d, scales, codes) = get_q3(block);
    SymBlock { d, scales, codes: codes.map(|code| code as i8 - 4) }
}

pub(crate) fn unpack_q3(block: &[u8; 110]) -> [f32; LEN] {
    read_q3(block).decode()
}

pub(crate) fn pack_q4(x: &[f32; LEN], importance: Importance<'_, LEN>, block: &mut [u8; 144]) {
    let coded = MinBlock::<8>::fit::<32>(&in_range(x), importance, 15, 63);
    block.fill(0);
    put_half(block, 0, coded.d);
    put_half(block, 2, coded.dmin);
    put_scales_6(&coded.scales, &coded.mins, &mut block[4..16]);
    put(&mut block[16..], &coded.codes, 0, 15, nibble_at);
}

pub(crate) fn read_q4(block: &[u8; 144]) -> MinBlock<8> {
    let (scales, mins) = scales_6(&block[4..]);
    let mut codes = [0; LEN];
    get(&block[16..], &mut codes, 0, 15, nibble_at);
    MinBlock { d: half_at(block, 0), dmin: half_at(block, 2), scales, mins, codes }
}

pub(crate) fn unpack_q4(block: &[u8; 144]) -> [f32; LEN] {
    read_q4(block).decode()
}

pub(crate) fn pack_q5(x: &[f32; LEN], importance: Importance<'_, LEN>, block: &mut [u8; 176]) {
    let coded = MinBlock::<8>::fit::<32>(&in_range(x), importance, 31, 63);
    block.fill(0);
    put_half(block, 0, coded.d);
    put_half(block, 2, coded.dmin);
    put_scales_6(&coded.scales, &coded.mins, &mut block[4..16]);
    put(&mut block[16..48], &coded.codes, 4, 1, bit_at);
    put(&mut block[48..], &coded.codes, 0, 15, nibble_at);
}

pub(crate) fn read_q5(block: &[u8; 176]) -> MinBlock<8> {
    let (scales, mins) = scales_6(&block[4..]);
    let mut codes = [0; LEN];
    get(&block[16..48], &mut codes, 4, 1, bit_at);
    get(&block[48..], &mut codes, 0, 15, nibble_at);
    MinBlock { d: half_at(block, 0), dmin: half_at(block, 2), scales, mins, codes }
}

pub(crate) fn unpack_q5(block: &[u8; 176]) -> [f32; LEN] {
    read_q5(block).decode()
}

pub(crate) fn pack_q6(x: &[f32; LEN], importance: Importance<'_, LEN>, block: &mut [u8; 210]) {
    let coded = SymBlock::fit(&in_range(x), importance, 32, 128);
    let stored = coded.codes.map(|c| (c + 32) as u8);
    block.fill(0);
    put(&mut block[..128], &stored, 0, 15, wide_nibble_at);
    put(&mut block[128..192], &stored, 4, 3, pair_at);
    for (byte, scale) in block[192..208].iter_mut().zip(coded.scales) {
        *byte = scale as u8;
    }
    put_half(block, 208, coded.d);
}

pub(crate) fn read_q6(block: &[u8; 210]) -> SymBlock {
    let mut codes = [0; LEN];
    get(&block[..128], &mut codes, 0, 15, wide_nibble_at);
    get(&block[128..192], &mut codes, 4, 3, pair_at);
    SymBlock {
        d: half_at(block, 208),
        scales: std::array::from_fn(|j| block[192 + j] as i8),
        codes: codes.map(|code| code as i8 - 32),
    }
}

pub(crate) fn unpack_q6(block: &[u8; 210]) -> [f32; LEN] {
    read_q6(block).decode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_scales_round_trip() {
        let scales = [0, 63, 15, 16, 33, 48, 7, 62];
        let mins = [63, 0, 31, 47, 1, 63, 32, 21];
        let mut packed = [0; 12];
        put_scales_6(&scales, &mins, &mut packed);
        assert_eq!(scales_6(&packed), (scales, mins));

        let scales = std::array::from_fn(|j| [-32, 31, 0, -1, 17][j % 5]);
        let mut packed = [0; 12];
        put_scales_3(&scales, &mut packed);
        assert_eq!(scales_3(&packed), scales);
    }

    #[test]
    fn planes_cover_every_bit_once() {
        let check = |at: fn(usize) -> (usize, usize), bytes: usize, width: usize| {
            let mut seen = vec![0u8; bytes];
            for v in 0..LEN {
                let (byte, shift) = at(v);
                let mask = (((1u16 << width) - 1) << shift) as u8;
                assert_eq!(seen[byte] & mask, 0);
                seen[byte] |= mask;
            }
            assert!(seen.iter().all(|&b| b == 0xff));
        };
        check(pair_at, 64, 2);
        check(nibble_at, 128, 4);
        check(wide_nibble_at, 128, 4);
        check(bit_at, 32, 1);
    }
}
