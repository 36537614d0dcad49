//! iq4_nl and iq4_xs: GGML's 4-bit codes of a table. Layouts match GGML bit for bit.
//!
//! | format | bytes | bits per value | value |
//! |---|---|---|---|
//! | iq4_nl | 18 | 4.5 | d · level(code), 32 values |
//! | iq4_xs | 136 | 4.25 | d · sc · level(code), 256 values in 8 sub-blocks of 32, sc -32..=31 |
//!
//! Levels: [`LevelTable::IQ4`]. Layouts (little endian), with v the index of the value:
//!
//! ```text
//! iq4_nl   d f16, 16 bytes: value j low nibble, value j + 16 high nibble of byte j
//! iq4_xs   d f16, u16 of upper pairs of sc + 32 (bits 2j = sub-block j),
//!          4 bytes of their low nibbles (sub-block j in byte j / 2, low nibble for even j),
//!          128 bytes of codes: sub-block j in bytes 16j .. 16j + 16, each as iq4_nl
//! ```
//!
//! Seek unit: one block. The encoder searches for scales (`Table::fit`) and is this crate's own.
//! Zero and non-finite numbers: NaN counts as 0, values are clamped to ±65,504, and so are decoded
//! values; when d underflows in f16, the block decodes to 0.

use half::f16;

use crate::block32::{Q8_0_MAX_SCALE, half_at, nibble, put_nibbles};
use crate::finite::{F16_MAX, clamp, to_f16};
use crate::kfit::{Importance, best_unit, part, refine, round_signed};
use crate::kquant;
use crate::table::LevelTable;

/// Values per sub-block of iq4_xs, and per block of iq4_nl.
pub const LEN: usize = 32;
/// Sub-blocks per block of iq4_xs.
pub(crate) const SUBS: usize = kquant::LEN / LEN;
/// The stored scale that represents 0.
pub(crate) const SCALE_ZERO: u8 = 32;

/// A super-block of `S` sub-blocks of `N` values, whose codes are those of a table.
pub(crate) struct Block<const S: usize, const N: usize> {
    pub d: f16,
    pub scales: [i8; S],
    pub codes: [u8; kquant::LEN],
}

impl<const S: usize, const N: usize> Block<S, N> {
    pub fn fit(
        table: LevelTable,
        x: &[f32; kquant::LEN],
        importance: Importance<'_, { kquant::LEN }>,
    ) -> Self {
        const { assert!(S * N == kquant::LEN) };
        let (subs, _) = x.as_chunks::<N>();
        let unit = f64::from(table.unit());
        let scales: [f64; S] = std::array::from_fn(|j| fit(table, &subs[j], part(importance, j)) / unit);
        let (d, scales) = round_signed(&scales, i32::from(SCALE_ZERO));
        let coded = Self { d, scales, codes: [0; kquant::LEN] }.with_codes(table, x);
        refine(
            coded,
            x,
            importance,
            |coded| coded.decode(table),
            |coded, weights| {
                let level =
                    |v: usize| f32::from(coded.scales[v / N]) * table.level(coded.codes[v]) * table.unit();
                Some(Self { d: best_unit(x, weights, level)?, ..*coded }.with_codes(table, x))
            },
        )
    }

    /// Chooses the nearest codes.
    fn with_codes(mut self, table: LevelTable, x: &[f32; kquant::LEN]) -> Self {
        let (codes, subs) = (self.codes.as_chunks_mut::<N>().0, x.as_chunks::<N>().0);
        for ((codes, sub), scale) in codes.iter_mut().zip(subs).zip(self.scales) {
            *codes = table.encode(sub, self.d.to_f32() * f32::from(scale) * table.unit());
        }
        self
    }

    pub fn decode(&self, table: LevelTable) -> [f32; kquant::LEN] {
        let d = self.d.to_f32() * table.unit();
        std::array::from_fn(|v| d * f32::from(self.scales[v / N]) * table.level(self.codes[v]))
    }
}

/// Returns the value of level 1 for values in range, limited so that every level fits f16.
fn fit<const N: usize>(table: LevelTable, x: &[f32; N], importance: Importance<'_, N>) -> f64 {
    // The scale at which level 127 fits.
    let max = f64::from(Q8_0_MAX_SCALE) * 127.0 / f64::from(table.largest());
    table.fit(x, importance).clamp(-max, max)
}

/// Decodes a block of iq4_nl.
pub(crate) fn decode_nl(d: f16, codes: &[u8; LEN]) -> [f32; LEN] {
    let d = d.to_f32();
    codes.map(|code| d * LevelTable::IQ4.level(code))
}

pub(crate) fn pack_nl(x: &[f32; LEN], importance: Importance<'_, LEN>, block: &mut [u8; 18]) {
    let x = x.map(|v| clamp(v, F16_MAX));
    let d = to_f16(fit(LevelTable::IQ4, &x, importance) as f32);
    block[..2].copy_from_slice(&d.to_le_bytes());
    put_nibbles(&LevelTable::IQ4.encode(&x, d.to_f32()), &mut block[2..]);
}

pub(crate) fn read_nl(block: &[u8; 18]) -> (f16, [u8; LEN]) {
    (half_at(block, 0), std::array::from_fn(|j| nibble(&block[2..], j)))
}

pub(crate) fn unpack_nl(block: &[u8; 18]) -> [f32; LEN] {
    let (d, codes) = read_nl(block);
    decode_nl(d, &codes)
}

pub(crate) fn pack_xs(
    table: LevelTable,
    x: &[f32; kquant::LEN],
    importance: Importance<'_, { kquant::LEN }>,
    block: &mut [u8; 136],
) {
    put_xs(&Block::fit(table, &kquant::in_range(x), importance), block);
}

/// Writes a block of iq4_xs.
pub(crate) fn put_xs(coded: &Block<SUBS, LEN>, block: &mut [u8; 136]) {
    block.fill(0);
    block[..2].copy_from_slice(&coded.d.to_le_bytes());
    let mut upper = 0u16;
    for (j, &scale) in coded.scales.iter().enumerate() {
        let stored = (scale as u8).wrapping_add(SCALE_ZERO);
        upper |= u16::from(stored >> 4) << (2 * j);
        block[4 + j / 2] |= (stored & 15) << (4 * (j % 2));
    }
    block[2..4].copy_from_slice(&upper.to_le_bytes());
    let (codes, _) = coded.codes.as_chunks::<LEN>();
    for (codes, out) in codes.iter().zip(block[8..].chunks_exact_mut(LEN / 2)) {
        put_nibbles(codes, out);
    }
}

pub(crate) fn read_xs(block: &[u8; 136]) -> Block<SUBS, LEN> {
    let upper = u16::from_le_bytes([block[2], block[3]]);
    let scale = |j: usize| {
        let lower = block[4 + j / 2] >> (4 * (j % 2)) & 15;
        (lower | ((upper >> (2 * j) & 3) as u8) << 4).wrapping_sub(SCALE_ZERO) as i8
    };
    Block {
        d: half_at(block, 0),
        scales: std::array::from_fn(scale),
        codes: std::array::from_fn(|v| nibble(&block[8 + v / LEN * (LEN / 2)..], v % LEN)),
    }
}
