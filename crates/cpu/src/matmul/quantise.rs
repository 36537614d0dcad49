//! Activations in 8 bits, for products with coded weights.
//!
//! ```text
//! scale = max|x| / 127,  q = round(x / scale), -127 ..= 127        per row and 32 columns
//! ```
//!
//! Each q is off by at most half a step, so a product with weights w is off by at most `scale / 2 · Σ|w|` per block.
//! The row is quantised once per projection, with its norm applied on the way, and read by every output.
//!
//! Rows are grouped into *tiles* of T rows, interleaved so that a kernel reads them strictly in order: four columns of
//! row 0, the same of row 1, ... of row T - 1, then the next four columns. A tile that is not full ends in zeros.

use std::ops::Range;

use crate::Isa;
use crate::norm::inverse_rms;
use crate::pool::Pool;
use crate::shards::Shards;

use super::MIN_PARALLEL_VALUES;
use super::panel::{BLOCK, GROUPS};

/// Sums of a block's q: columns 0..16, 16..32, and all.
const SUMS: usize = 3;

/// Quantised rows in tiles.
#[derive(Default)]
pub(crate) struct Quantised {
    tile_rows: usize,
    n_blocks: usize,
    codes: Vec<i32>,
    scales: Vec<f32>,
    neg_sums: Vec<i32>,
    weighted: Vec<f32>,
}

/// One tile of T rows; every slice is `[n_blocks]`.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a, const T: usize> {
    /// Four codes of each row, for each group of four columns.
    pub codes: &'a [[[i32; T]; GROUPS]],
    /// One step of each row.
    pub scales: &'a [[f32; T]],
    /// Minus the sums of the codes: what a weight code of 1 too many adds, taken back.
    pub neg_sums: &'a [[[i32; T]; SUMS]],
    /// The sums of the codes times the scale: what a weight minimum of 1 adds.
    pub weighted: &'a [[[f32; T]; SUMS]],
}

impl<const T: usize> Tile<'_, T> {
    /// Some of its blocks.
    pub fn blocks(self, blocks: Range<usize>) -> Self {
        Self {
            codes: &self.codes[blocks.clone()],
            scales: &self.scales[blocks.clone()],
            neg_sums: &self.neg_sums[blocks.clone()],
            weighted: &self.weighted[blocks],
        }
    }
}

/// A block of 32 quantised values.
struct Block {
    codes: [i32; GROUPS],
    scale: f32,
    neg_sums: [i32; SUMS],
}

/// Adding this to a float of magnitude below 2^22 leaves its nearest integer (ties to even) in the low mantissa bits.
const ROUNDER: f32 = 12_582_912.0;

/// Below this a block counts as zero; the quotient 127 / max would overflow.
const TINY: f32 = 1e-30;

/// The same arithmetic in every kernel set, so that they agree bit for bit. A block with NaN or an infinity gets a NaN
/// scale: what is wrong stays visible.
#[inline(always)]
fn quantise_block(x: &[f32; BLOCK]) -> Block {
    // Magnitudes compare as integers; NaN is above infinity.
    let max = f32::from_bits(x.iter().fold(0, |max, v| max.max(v.to_bits() & 0x7fff_ffff)));
    let (inverse, scale) = match max {
        _ if max <= TINY => (0.0, 0.0),
        _ if max.is_finite() => (127.0 / max, max / 127.0),
        _ => (0.0, f32::NAN),
    };
    let mut rounded = [0i32; BLOCK];
    for (q, v) in rounded.iter_mut().zip(x) {
        let v = if scale.is_nan() { 0.0 } else { *v };
        *q = (v * inverse + ROUNDER).to_bits() as i32 - ROUNDER.to_bits() as i32;
    }
    let bytes = rounded.map(|q| q as i8 as u8);
    let codes = std::array::from_fn(|g| i32::from_le_bytes(*bytes[4 * g..].first_chunk().expect("4 of 32")));
    let (first, second) = rounded.split_at(BLOCK / 2);
    let halves = [-first.iter().sum::<i32>(), -second.iter().sum::<i32>()];
    Block { codes, scale, neg_sums: [halves[0], halves[1], halves[0] + halves[1]] }
}

/// Where the values of a tile come from.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    /// `[rows, n_in]`, `n_in` a multiple of 32.
    pub x: &'a [f32],
    pub n_in: usize,
    /// Weight `[n_in]` and eps.
    pub norm: Option<(&'a [f32], f32)>,
}

/// The parts of a tile that is being written.
struct TileMut<'a> {
    codes: &'a mut [i32],
    scales: &'a mut [f32],
    neg_sums: &'a mut [i32],
    weighted: &'a mut [f32],
}

/// Quantises the rows of `source` (at most `tile_rows`) into a tile.
#[inline(always)]
fn quantise_tile(source: Source<'_>, tile_rows: usize, tile: TileMut<'_>) {
    let n_rows = source.x.len() / source.n_in;
    for t in 0..tile_rows {
        let row = if t < n_rows { &source.x[t * source.n_in..][..source.n_in] } else { &[] };
        let factor = source.norm.map(|(weight, eps)| (weight, inverse_rms(row, eps)));
        for b in 0..source.n_in / BLOCK {
            let mut values = [0.0; BLOCK];
            if t < n_rows {
                values = row.as_chunks().0[b];
                if let Some((weight, factor)) = factor {
                    let weight: &[f32; BLOCK] = &weight.as_chunks().0[b];
                    values.iter_mut().zip(weight).for_each(|(v, w)| *v = *v * factor * w);
                }
            }
            let block = quantise_block(&values);
            tile.scales[b * tile_rows + t] = block.scale;
            for (g, code) in block.codes.into_iter().enumerate() {
                tile.codes[(b * GROUPS + g) * tile_rows + t] = code;
            }
            for (s, neg_sum) in block.neg_sums.into_iter().enumerate() {
                tile.neg_sums[(b * SUMS + s) * tile_rows + t] = neg_sum;
                tile.weighted[(b * SUMS + s) * tile_rows + t] = -neg_sum as f32 * block.scale;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantise_tile_avx2(source: Source<'_>, tile_rows: usize, tile: TileMut<'_>) {
    quantise_tile(source, tile_rows, tile);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn quantise_tile_avx512(source: Source<'_>, tile_rows: usize, tile: TileMut<'_>) {
    quantise_tile(source, tile_rows, tile);
}

impl Quantised {
    /// Quantises the rows of `source` into tiles of `tile_rows`.
    pub fn fill(&mut self, isa: Isa, pool: &Pool, source: Source<'_>, tile_rows: usize) {
        let (n_in, rows) = (source.n_in, source.x.len() / source.n_in);
        let n_tiles = rows.div_ceil(tile_rows);
        let n_blocks = n_in / BLOCK;
        (self.tile_rows, self.n_blocks) = (tile_rows, n_blocks);
        let per_tile = n_blocks * tile_rows;
        grow(&mut self.codes, n_tiles * per_tile * GROUPS);
        grow(&mut self.scales, n_tiles * per_tile);
        grow(&mut self.neg_sums, n_tiles * per_tile * SUMS);
        grow(&mut self.weighted, n_tiles * per_tile * SUMS);
        let (codes, scales) = (Shards::new(&mut self.codes), Shards::new(&mut self.scales));
        let (neg_sums, weighted) = (Shards::new(&mut self.neg_sums), Shards::new(&mut self.weighted));
        let job = |tile: usize| {
            let part = |n: usize| tile * per_tile * n..(tile + 1) * per_tile * n;
            // SAFETY: every tile is taken by one call of this job, and tiles share no value.
            let out = unsafe {
                TileMut {
                    codes: codes.part(part(GROUPS)),
                    scales: scales.part(part(1)),
                    neg_sums: neg_sums.part(part(SUMS)),
                    weighted: weighted.part(part(SUMS)),
                }
            };
            let x = &source.x[tile * tile_rows * n_in..rows.min((tile + 1) * tile_rows) * n_in];
            let source = Source { x, ..source };
            match isa {
                Isa::Scalar => quantise_tile(source, tile_rows, out),
                // SAFETY: the token proves AVX2.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2(_) => unsafe { quantise_tile_avx2(source, tile_rows, out) },
                // SAFETY: the token proves AVX-512 F, BW, DQ and VL.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512(_) => unsafe { quantise_tile_avx512(source, tile_rows, out) },
                #[cfg(not(target_arch = "x86_64"))]
                _ => quantise_tile(source, tile_rows, out),
            }
        };
        if rows * n_in < MIN_PARALLEL_VALUES {
            (0..n_tiles).for_each(job);
        } else {
            pool.for_each(n_tiles, &job);
        }
    }

    /// Everything, as bits, for comparisons.
    #[cfg(test)]
    pub fn bits(&self) -> [Vec<u32>; 4] {
        let floats = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect();
        let ints = |values: &[i32]| values.iter().map(|&v| v as u32).collect();
        [ints(&self.codes), floats(&self.scales), ints(&self.neg_sums), floats(&self.weighted)]
    }

    /// Tile `index`, of `T` rows.
    ///
    /// # Panics
    /// Unless the rows were quantised in tiles of `T`.
    pub fn tile<const T: usize>(&self, index: usize) -> Tile<'_, T> {
        assert_eq!(self.tile_rows, T, "tiles of another size");
        let blocks = index * self.n_blocks..(index + 1) * self.n_blocks;
        Tile {
            codes: &self.codes.as_chunks::<T>().0.as_chunks().0[blocks.clone()],
            scales: &self.scales.as_chunks().0[blocks.clone()],
            neg_sums: &self.neg_sums.as_chunks::<T>().0.as_chunks().0[blocks.clone()],
            weighted: &self.weighted.as_chunks::<T>().0.as_chunks().0[blocks],
        }
    }
}

/// Makes `values` at least `len` long. Memory is kept from step to step.
fn grow<V: Clone + Default>(values: &mut Vec<V>, len: usize) {
    if values.len() < len {
        values.resize(len, V::default());
    }
}
