//! Activations in 8 bits, for products with coded weights.
//!
//! ```text
//! scale = max|x| / 127,  q = round(x / scale), -127 ..= 127        per row and 32 columns
//! ```
//!
//! Each q is off by at most half a step, so a product with weights w is off by at most `scale / 2 · Σ|w|` per block.
//! The row is quantised once per projection, with its norm applied on the way, and read by every output.
//!
//! For the rotated weight formats each block of 32 columns is rotated before it is quantised.
//!
//! Rows are grouped into *tiles* of T rows, interleaved so that a kernel reads them strictly in order: four columns of
//! row 0, the same of row 1, ... of row T - 1, then the next four columns. A tile that is not full ends in zeros.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use std::ops::Range;

use kvant_codec::Rotation;

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

/// Below this a block counts as zero; the quotient 127 / max would overflow.
const TINY: f32 = 1e-30;

/// `(1 / scale, scale)` of a block whose largest magnitude is `max`. A block with NaN or an infinity gets a NaN scale
/// and no codes: what is wrong stays visible.
#[inline(always)]
fn steps(max: f32) -> (f32, f32) {
    if max <= TINY {
        (0.0, 0.0)
    } else if max.is_finite() {
        (127.0 / max, max / 127.0)
    } else {
        (0.0, f32::NAN)
    }
}

/// A row, cut into blocks.
type Blocks<'a> = &'a [[f32; BLOCK]];

/// Where the values of a tile come from.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    /// `[rows, n_in]`, `n_in` a multiple of 32.
    pub x: &'a [f32],
    pub n_in: usize,
    /// Weight `[n_in]` and eps.
    pub norm: Option<(&'a [f32], f32)>,
    /// Whether each block is rotated as the weights of the rotated formats are, after the norm.
    pub rotates: bool,
}

impl<'a> Source<'a> {
    /// The values of row `t` in blocks, and the norm's weight in blocks with the factor of this row. No blocks when
    /// there is no such row.
    #[inline(always)]
    fn row(&self, t: usize) -> (Blocks<'a>, Option<(Blocks<'a>, f32)>) {
        let Some(row) = self.x.chunks_exact(self.n_in).nth(t) else { return (&[], None) };
        let norm = self.norm.map(|(weight, eps)| (weight.as_chunks().0, inverse_rms(row, eps)));
        (row.as_chunks().0, norm)
    }
}

/// A tile that is being written, as [`Tile`].
struct TileMut<'a, const T: usize> {
    codes: &'a mut [[[i32; T]; GROUPS]],
    scales: &'a mut [[f32; T]],
    neg_sums: &'a mut [[[i32; T]; SUMS]],
    weighted: &'a mut [[[f32; T]; SUMS]],
}

impl<const T: usize> TileMut<'_, T> {
    /// Writes a block of row `t`: its codes, and the sums of its halves.
    #[inline(always)]
    fn put(&mut self, block: usize, t: usize, codes: &[i32; GROUPS], scale: f32, halves: [i32; 2]) {
        let out = &mut self.codes[block];
        for g in 0..GROUPS {
            out[g][t] = codes[g];
        }
        self.scales[block][t] = scale;
        for (s, sum) in [halves[0], halves[1], halves[0] + halves[1]].into_iter().enumerate() {
            self.neg_sums[block][s][t] = -sum;
            self.weighted[block][s][t] = sum as f32 * scale;
        }
    }

    /// Writes zeros for row `t`.
    fn clear(&mut self, t: usize) {
        (0..self.codes.len()).for_each(|block| self.put(block, t, &[0; GROUPS], 0.0, [0; 2]));
    }
}

/// `Rotation::tq().forward` of one block, operation by operation, in a form that compilers make vectors of.
#[inline(always)]
fn rotate(values: &mut [f32; BLOCK]) {
    const ROTATION: Rotation = Rotation::tq();
    const NORM: f32 = 0.176_776_695_296_636_9_f64 as f32;
    #[inline(always)]
    fn butterflies<const H: usize>(values: &mut [f32; BLOCK]) {
        let old = *values;
        for i in 0..BLOCK {
            values[i] = if i & H == 0 { old[i] + old[i + H] } else { old[i - H] - old[i] };
        }
    }
    for (i, value) in values.iter_mut().enumerate() {
        let sign = (ROTATION.before() >> i & 1) as u32;
        *value = f32::from_bits(value.to_bits() ^ sign << 31);
    }
    butterflies::<1>(values);
    butterflies::<2>(values);
    butterflies::<4>(values);
    butterflies::<8>(values);
    butterflies::<16>(values);
    values.iter_mut().for_each(|v| *v *= NORM);
}

/// Quantises the rows of `source` (at most `T`) into a tile. The other kernel sets do the same arithmetic and agree
/// with this one bit for bit.
fn quantise_tile<const T: usize>(source: Source<'_>, mut tile: TileMut<'_, T>) {
    for t in 0..T {
        let (row, norm) = source.row(t);
        if row.is_empty() {
            tile.clear(t);
        }
        for (b, block) in row.iter().enumerate() {
            let mut values = *block;
            if let Some((weight, factor)) = norm {
                values.iter_mut().zip(&weight[b]).for_each(|(v, w)| *v = *v * factor * w);
            }
            if source.rotates {
                Rotation::tq().forward(&mut values);
            }
            // Magnitudes compare as integers; NaN is above infinity.
            let max = values.iter().fold(0, |max, v| max.max(v.to_bits() & 0x7fff_ffff));
            let (inverse, scale) = steps(f32::from_bits(max));
            let round = |v: f32| if scale.is_nan() { 0 } else { (v * inverse).round_ties_even() as i32 };
            let rounded = values.map(round);
            let bytes = rounded.map(|q| q as u8);
            let codes = std::array::from_fn(|g| i32::from_le_bytes(bytes.as_chunks().0[g]));
            let (first, second) = rounded.split_at(BLOCK / 2);
            tile.put(b, t, &codes, scale, [first.iter().sum(), second.iter().sum()]);
        }
    }
}

impl Quantised {
    /// Quantises the rows of `source` into tiles of `tile_rows`: 1, 2, 4, 6 or 8.
    pub fn fill(&mut self, isa: Isa, pool: &Pool, source: Source<'_>, tile_rows: usize) {
        match tile_rows {
            1 => self.fill_tiles::<1>(isa, pool, source),
            2 => self.fill_tiles::<2>(isa, pool, source),
            4 => self.fill_tiles::<4>(isa, pool, source),
            6 => self.fill_tiles::<6>(isa, pool, source),
            8 => self.fill_tiles::<8>(isa, pool, source),
            _ => unreachable!("no kernel takes tiles of {tile_rows} rows"),
        }
    }

    fn fill_tiles<const T: usize>(&mut self, isa: Isa, pool: &Pool, source: Source<'_>) {
        let (n_in, rows) = (source.n_in, source.x.len() / source.n_in);
        let (n_tiles, n_blocks) = (rows.div_ceil(T), n_in / BLOCK);
        (self.tile_rows, self.n_blocks) = (T, n_blocks);
        let len = n_tiles * n_blocks * T;
        grow(&mut self.codes, len * GROUPS);
        grow(&mut self.scales, len);
        grow(&mut self.neg_sums, len * SUMS);
        grow(&mut self.weighted, len * SUMS);
        let codes = Shards::new(self.codes.as_chunks_mut().0.as_chunks_mut().0);
        let scales = Shards::new(self.scales.as_chunks_mut().0);
        let neg_sums = Shards::new(self.neg_sums.as_chunks_mut().0.as_chunks_mut().0);
        let weighted = Shards::new(self.weighted.as_chunks_mut().0.as_chunks_mut().0);
        let job = |tile: usize| {
            let blocks = tile * n_blocks..(tile + 1) * n_blocks;
            // SAFETY: every tile is taken by one call of this job, and tiles share no value.
            let out = unsafe {
                TileMut::<T> {
                    codes: codes.part(blocks.clone()),
                    scales: scales.part(blocks.clone()),
                    neg_sums: neg_sums.part(blocks.clone()),
                    weighted: weighted.part(blocks),
                }
            };
            let x = &source.x[tile * T * n_in..rows.min((tile + 1) * T) * n_in];
            let source = Source { x, ..source };
            match isa.of_products() {
                Isa::Scalar => quantise_tile(source, out),
                // SAFETY: either token proves AVX2.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2(_) | Isa::AvxVnni(_) => unsafe { avx2::quantise_tile(source, out) },
                // SAFETY: the token proves AVX-512 F, VL and VNNI.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512(_) => unsafe { avx512::quantise_tile(source, out) },
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Vbmi(_) => unreachable!("products have no such set"),
                #[cfg(not(target_arch = "x86_64"))]
                _ => quantise_tile(source, out),
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
