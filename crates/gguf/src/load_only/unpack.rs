//! Conversion of low-bit load-only blocks.

use std::ops::Range;

use half::f16;
use kvant_codec::fields::FieldSpec;
use kvant_codec::iq;

use super::{BLOCK, LoadOnlyType};

/// The level indices of all grids, concatenated: a row is 16 bits, of 8 or 4 levels.
static GRIDS: &[u8; 9216] = include_bytes!("grids.bin");

/// Rows of eight levels: three distinct levels of two bits each.
const IQ2_XXS: Grid = Grid(0..512);
const IQ2_XS: Grid = Grid(512..1536);
const IQ2_S: Grid = Grid(1536..3584);
const IQ1: Grid = Grid(3584..7680);
/// Rows of four levels: eight distinct levels of four bits each.
const IQ3_XXS: Grid = Grid(7680..8192);
const IQ3_S: Grid = Grid(8192..9216);

/// A table of rows: a byte range of [`GRIDS`].
struct Grid(Range<usize>);

impl Grid {
    /// Returns the codes of eight values: a row's levels, with the bits of `signs` above them.
    fn codes_of_row(&self, row: usize, signs: u32) -> [u8; 8] {
        let levels = u32::from(word(&GRIDS[self.0.clone()], row));
        std::array::from_fn(|i| (levels >> (2 * i) & 3 | (signs >> i & 1) << 2) as u8)
    }

    /// Returns the codes of eight values from two rows of four.
    fn codes_of_two_rows(&self, rows: [usize; 2], signs: u32) -> [u8; 8] {
        let [low, high] = rows.map(|row| u32::from(word(&GRIDS[self.0.clone()], row)));
        let levels = low | high << 16;
        std::array::from_fn(|i| (levels >> (4 * i) & 7 | (signs >> i & 1) << 3) as u8)
    }
}

/// Returns the codes of a row of iq3_s: the indices of its levels 1, 3 ... 15.
pub(super) fn iq3_s_row(row: usize) -> [u8; 4] {
    let levels = word(&GRIDS[IQ3_S.0], row);
    std::array::from_fn(|i| (levels >> (4 * i) & 7) as u8)
}

/// Returns bit `at`.
fn bit(bytes: &[u8], at: usize) -> usize {
    usize::from(bytes[at / 8] >> (at % 8) & 1)
}

/// Returns nibble `at`, the low one of a byte first.
fn nibble(bytes: &[u8], at: usize) -> u8 {
    bytes[at / 2] >> (4 * (at % 2)) & 15
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])
}

fn double(bytes: &[u8], at: usize) -> u32 {
    u32::from(word(bytes, 2 * at)) | u32::from(word(bytes, 2 * at + 1)) << 16
}

/// Expands seven sign bits to eight: the eighth makes the parity even.
fn expand_signs(signs: u32) -> u32 {
    let signs = signs & 127;
    signs | (signs.count_ones() & 1) << 7
}

/// Returns the factor of a stored scale: 2s + 1.
fn scale_factor(scale: u8) -> i8 {
    2 * scale as i8 + 1
}

/// The scale and the codes of eight values.
type CodedEight = (i8, [u8; 8]);

impl LoadOnlyType {
    /// Converts a block to [`Packed::unpacked`].
    pub(super) fn convert(self, block: &[u8], out: &mut [u8]) {
        let rest = &block[2..];
        match self {
            Self::Iq2Xxs => self.write_codes(first(block), |i| iq2_xxs(rest, i), out),
            Self::Iq2Xs => self.write_codes(first(block), |i| iq2_xs(rest, i), out),
            Self::Iq2S => self.write_codes(first(block), |i| iq2_s(rest, i), out),
            Self::Iq3Xxs => self.write_codes(first(block), |i| iq3_xxs(rest, i), out),
            Self::Iq3S => self.write_codes(first(block), |i| iq3_s(rest, i), out),
            Self::Iq1S => self.write_codes(first(block), |i| iq1_s(rest, i), out),
            Self::Iq1M => {
                // The f16 is spread over the upper four bits of four words.
                let bits = (0..4).fold(0, |bits, at| bits | (word(&block[48..], at) >> 12) << (4 * at));
                self.write_codes(f16::from_bits(bits), |i| iq1_m(block, i), out);
            }
            Self::Tq1_0 => write_ternary(tq1_0(block), &block[52..], out),
            // The code layout is that of q2_K.
            Self::Tq2_0 => write_ternary(*block.first_chunk().expect("a block"), &block[64..], out),
            Self::ScaledNvfp4 => unreachable!("the model has its scales"),
            Self::I8 | Self::I16 | Self::I32 | Self::I64 | Self::F64 => {
                unreachable!("plain numbers have no codes")
            }
        }
    }

    /// Writes all groups of eight values, with their scales.
    fn write_codes(self, d: f16, eight: impl Fn(usize) -> CodedEight, out: &mut [u8]) {
        let (mut scales, mut codes) = ([0; BLOCK / 16], [0; BLOCK]);
        let as_type = self.loaded_type();
        let sub_len = FieldSpec::of(as_type).expect("codes").sub_len;
        for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            (scales[8 * i / sub_len], *codes) = eight(i);
        }
        iq::put(as_type, d, &scales, &codes, out);
    }
}

/// Writes three-level codes as q2_K: 0, 1 and 2 times d, less d.
fn write_ternary(codes: [u8; BLOCK / 4], d: &[u8], out: &mut [u8]) {
    /// Scales and minima of 1.
    const ONES: [u8; BLOCK / 16] = [0x11; BLOCK / 16];
    out.copy_from_slice(&[&ONES, &codes[..], d, d].concat());
}

/// Returns the f16 at the start of a block.
fn first(block: &[u8]) -> f16 {
    f16::from_bits(word(block, 0))
}

/// Per 32 values: four rows of one byte each, then seven sign bits for each row and a 4-bit scale.
fn iq2_xxs(codes: &[u8], i: usize) -> CodedEight {
    let (group, part) = (i / 4, i % 4);
    let signs = double(codes, 2 * group + 1);
    (
        scale_factor((signs >> 28) as u8),
        IQ2_XXS.codes_of_row(codes[8 * group + part].into(), expand_signs(signs >> (7 * part))),
    )
}

/// Per 8 values: nine bits of row and seven of signs; then a 4-bit scale per 16 values.
fn iq2_xs(codes: &[u8], i: usize) -> CodedEight {
    let code = word(codes, i);
    (
        scale_factor(nibble(&codes[64..], i / 2)),
        IQ2_XS.codes_of_row((code & 511).into(), expand_signs((code >> 9).into())),
    )
}

/// Per 8 values: a byte of row, then a byte of signs, then the upper two bits of row; then a 4-bit
/// scale per 16 values.
fn iq2_s(codes: &[u8], i: usize) -> CodedEight {
    let upper = codes[64 + i / 4] >> (2 * (i % 4)) & 3;
    let row = usize::from(codes[i]) | usize::from(upper) << 8;
    (scale_factor(nibble(&codes[72..], i / 2)), IQ2_S.codes_of_row(row, codes[32 + i].into()))
}

/// Per 4 values: a byte of row; then per 32 values seven sign bits for each 8 and a 4-bit scale.
fn iq3_xxs(codes: &[u8], i: usize) -> CodedEight {
    let signs = double(&codes[64..], i / 4);
    let rows = [codes[2 * i], codes[2 * i + 1]].map(usize::from);
    (scale_factor((signs >> 28) as u8), IQ3_XXS.codes_of_two_rows(rows, expand_signs(signs >> (7 * (i % 4)))))
}

/// Per 4 values: a byte of row, then its upper bit, then signs; then a 4-bit scale per 32 values.
fn iq3_s(codes: &[u8], i: usize) -> CodedEight {
    let rows = [2 * i, 2 * i + 1].map(|at| usize::from(codes[at]) | bit(&codes[64..], at) << 8);
    (scale_factor(nibble(&codes[104..], i / 4)), IQ3_S.codes_of_two_rows(rows, codes[72 + i].into()))
}

/// Per 8 values: a byte of row; then per 32 values the upper three bits of four rows, a 3-bit scale
/// and the sign of the offset.
fn iq1_s(codes: &[u8], i: usize) -> CodedEight {
    let high = word(&codes[32..], i / 4);
    let row = usize::from(codes[i]) | usize::from(high >> (3 * (i % 4)) & 7) << 8;
    (scale_factor((high >> 12 & 7) as u8), IQ1.codes_of_row(row, repeat_sign(high >> 15)))
}

/// Per 8 values: a byte of row, then a nibble of its upper three bits and the sign of the offset;
/// then a 3-bit scale per 16 values, in words whose upper four bits belong to the block.
fn iq1_m(codes: &[u8], i: usize) -> CodedEight {
    let high = nibble(&codes[32..], i);
    let row = usize::from(codes[i]) | usize::from(high & 7) << 8;
    let scale = word(&codes[48..], i / 8) >> (3 * (i % 8 / 2)) & 7;
    (scale_factor(scale as u8), IQ1.codes_of_row(row, repeat_sign(u16::from(high >> 3))))
}

/// Repeats one sign for eight values.
fn repeat_sign(sign: u16) -> u32 {
    u32::from(sign & 1) * 0xff
}

/// Returns the codes in the layout of tq2_0. The source has base-3 digits, most significant first:
/// five in each of 48 bytes and four in each of four. A byte encodes digits/243 as a fraction of
/// 256, rounded up.
fn tq1_0(codes: &[u8]) -> [u8; BLOCK / 4] {
    let code = |i: usize| {
        let (byte, digit) = match i {
            0..160 => (i % 32, i / 32),
            160..240 => (32 + (i - 160) % 16, (i - 160) / 16),
            _ => (48 + (i - 240) % 4, (i - 240) / 4),
        };
        let shifted = codes[byte].wrapping_mul([1, 3, 9, 27, 81][digit]);
        ((u16::from(shifted) * 3) >> 8) as u8
    };
    std::array::from_fn(|at| {
        let first = at / 32 * 128 + at % 32;
        (0..4).fold(0, |codes, i| codes | code(first + 32 * i) << (2 * i))
    })
}
