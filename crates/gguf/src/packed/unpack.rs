//! What the bytes of a packed block stand for.

use std::ops::Range;

use half::f16;

use super::{BLOCK, Packed};

/// The numbers of levels of all grids, one grid after the other.
static GRIDS: &[u8; 9216] = include_bytes!("grids.bin");

/// A block: whole numbers, and what they are multiplied with.
pub(super) struct Numbers {
    pub unit: f32,
    pub values: [i16; BLOCK],
}

/// A table of rows of levels.
struct Grid {
    /// Its part of [`GRIDS`].
    at: Range<usize>,
    /// Levels of a row.
    row: usize,
    /// What numbers of levels stand for; as many bits each as it takes.
    levels: &'static [i16],
}

const TWOS: &[i16] = &[8, 25, 43];
const ONES: &[i16] = &[-1, 0, 1];
const IQ2_XXS: Grid = Grid { at: 0..512, row: 8, levels: TWOS };
const IQ2_XS: Grid = Grid { at: 512..1536, row: 8, levels: TWOS };
const IQ2_S: Grid = Grid { at: 1536..3584, row: 8, levels: TWOS };
const IQ1: Grid = Grid { at: 3584..7680, row: 8, levels: ONES };
const IQ3_XXS: Grid = Grid { at: 7680..8192, row: 4, levels: &[4, 12, 20, 28, 36, 44, 52, 62] };
const IQ3_S: Grid = Grid { at: 8192..9216, row: 4, levels: &[1, 3, 5, 7, 9, 11, 13, 15] };

impl Grid {
    /// Level `i` of row `row`.
    fn level(&self, row: usize, i: usize) -> i16 {
        let bits = if self.levels.len() > 4 { 4 } else { 2 };
        let at = (row * self.row + i) * bits;
        let number = GRIDS[self.at.clone()][at / 8] >> (at % 8) & ((1 << bits) - 1);
        self.levels[usize::from(number)]
    }
}

/// Bit `at` of bytes.
fn bit(bytes: &[u8], at: usize) -> bool {
    bytes[at / 8] >> (at % 8) & 1 == 1
}

/// Four bits, the lower ones of a byte first.
fn nibble(bytes: &[u8], at: usize) -> u8 {
    bytes[at / 2] >> (4 * (at % 2)) & 15
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])
}

fn double(bytes: &[u8], at: usize) -> u32 {
    u32::from(word(bytes, 2 * at)) | u32::from(word(bytes, 2 * at + 1)) << 16
}

/// Whether value `i` of eight is negative, by seven bits: the eighth makes their number even.
fn is_negative(signs: u32, i: usize) -> bool {
    let signs = signs & 127;
    if i == 7 { signs.count_ones() % 2 == 1 } else { signs >> i & 1 == 1 }
}

fn signed(level: i16, is_negative: bool) -> i16 {
    if is_negative { -level } else { level }
}

/// The factor that a scale of some bits stands for.
fn odd(scale: u32) -> i16 {
    2 * scale as i16 + 1
}

impl Packed {
    /// The numbers of a block.
    pub(super) fn numbers(self, block: &[u8]) -> Numbers {
        let scale = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        let all =
            |unit: f32, value: &dyn Fn(usize) -> i16| Numbers { unit, values: std::array::from_fn(value) };
        let rest = &block[2..];
        match self {
            Self::Iq2Xxs => all(scale(0) / 8.0, &|i| iq2_xxs(rest, i)),
            Self::Iq2Xs => all(scale(0) / 8.0, &|i| iq2_xs(rest, i)),
            Self::Iq2S => all(scale(0) / 8.0, &|i| iq2_s(rest, i)),
            Self::Iq3Xxs => all(scale(0) / 4.0, &|i| iq3_xxs(rest, i)),
            Self::Iq3S => all(scale(0), &|i| iq3_s(rest, i)),
            Self::Iq1S => all(scale(0) / 8.0, &|i| iq1_s(rest, i)),
            Self::Iq1M => {
                // The f16 lies in the upper four bits of four words.
                let bits = (0..4).fold(0, |bits, at| bits | (word(&block[48..], at) >> 12) << (4 * at));
                all(f16::from_bits(bits).to_f32() / 8.0, &|i| iq1_m(block, i))
            }
            Self::Tq1_0 => all(scale(52), &|i| tq1_0(block, i)),
            Self::Tq2_0 => all(scale(64), &|i| {
                let (byte, shift) = (i / 128 * 32 + i % 32, i % 128 / 32 * 2);
                i16::from(block[byte] >> shift & 3) - 1
            }),
            Self::ScaledNvfp4 => unreachable!("the model has its scales"),
            Self::I8 | Self::I16 | Self::I32 | Self::I64 | Self::F64 => {
                unreachable!("plain numbers have no codes")
            }
        }
    }
}

/// For 32 values four rows of a byte each, and then seven bits of signs for each and four of the scale.
fn iq2_xxs(codes: &[u8], i: usize) -> i16 {
    let (group, part) = (i / 32, i % 32 / 8);
    let signs = double(codes, 2 * group + 1);
    let level = IQ2_XXS.level(codes[8 * group + part].into(), i % 8);
    signed(odd(signs >> 28) * level, is_negative(signs >> (7 * part), i % 8))
}

/// For 8 values nine bits of a row and seven of signs; then a nibble of scale for 16 values.
fn iq2_xs(codes: &[u8], i: usize) -> i16 {
    let code = word(codes, i / 8);
    let level = IQ2_XS.level((code & 511).into(), i % 8);
    signed(odd(nibble(&codes[64..], i / 16).into()) * level, is_negative((code >> 9).into(), i % 8))
}

/// For 8 values a byte of a row, then a byte of signs, then the upper two bits of the row, then a nibble of scale for 16 values.
fn iq2_s(codes: &[u8], i: usize) -> i16 {
    let upper = codes[64 + i / 32] >> (2 * (i % 32 / 8)) & 3;
    let row = usize::from(codes[i / 8]) | usize::from(upper) << 8;
    let scale = odd(nibble(&codes[72..], i / 16).into());
    signed(scale * IQ2_S.level(row, i % 8), bit(&codes[32..], i))
}

/// For 4 values a byte of a row; then for 32 seven bits of signs for each 8 and four of the scale.
fn iq3_xxs(codes: &[u8], i: usize) -> i16 {
    let signs = double(&codes[64..], i / 32);
    let level = IQ3_XXS.level(codes[i / 4].into(), i % 4);
    signed(odd(signs >> 28) * level, is_negative(signs >> (7 * (i % 32 / 8)), i % 8))
}

/// For 4 values a byte of a row, then its upper bit, then signs, then a nibble of scale for 32 values.
fn iq3_s(codes: &[u8], i: usize) -> i16 {
    let row = usize::from(codes[i / 4]) | usize::from(bit(&codes[64..], i / 4)) << 8;
    let scale = odd(nibble(&codes[104..], i / 32).into());
    signed(scale * IQ3_S.level(row, i % 4), bit(&codes[72..], i))
}

/// For 8 values a byte of a row; then for 32 the upper three bits of four rows, three of the scale and the sign of what is added.
fn iq1_s(codes: &[u8], i: usize) -> i16 {
    let high = word(&codes[32..], i / 32);
    let row = usize::from(codes[i / 8]) | usize::from(high >> (3 * (i % 32 / 8)) & 7) << 8;
    let added = if high & 0x8000 == 0 { 1 } else { -1 };
    odd((high >> 12 & 7).into()) * (8 * IQ1.level(row, i % 8) + added)
}

/// For 8 values a byte of a row, then a nibble of its upper three bits and the sign of what is added; then three bits of scale for 16
/// values, in words whose upper four bits are the block's.
fn iq1_m(codes: &[u8], i: usize) -> i16 {
    let high = nibble(&codes[32..], i / 8);
    let row = usize::from(codes[i / 8]) | usize::from(high & 7) << 8;
    let added = if high & 8 == 0 { 1 } else { -1 };
    let scale = word(&codes[48..], i / 64) >> (3 * (i % 64 / 16)) & 7;
    odd(scale.into()) * (8 * IQ1.level(row, i % 8) + added)
}

/// Digits of base 3, the first the uppermost: five in each of 48 bytes and four in each of four; a byte is the fraction of 256 that they
/// are of 243, rounded up.
fn tq1_0(codes: &[u8], i: usize) -> i16 {
    let (byte, digit) = match i {
        0..160 => (i % 32, i / 32),
        160..240 => (32 + (i - 160) % 16, (i - 160) / 16),
        _ => (48 + (i - 240) % 4, (i - 240) / 4),
    };
    let shifted = codes[byte].wrapping_mul([1, 3, 9, 27, 81][digit]);
    ((u16::from(shifted) * 3) >> 8) as i16 - 1
}
