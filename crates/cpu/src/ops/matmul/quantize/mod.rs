//! Activations in 8 bits, for products with coded weights.
//!
//! ```text
//! scale = max|x| / 127,  q = round(x / scale), -127 ..= 127        per row and 32 columns
//! ```
//!
//! Each q is off by at most half a step, so a product with weights w is off by at most
//! `scale / 2 · Σ|w|` per block. The row is quantized once per projection, with its norm applied in
//! the same pass, and every output reads it.
//!
//! For the rotated weight formats each block of 32 columns is rotated before it is quantized.
//!
//! Rows are grouped into *tiles* of T rows, so that a kernel reads them nearly in order: 32 columns
//! of row 0, the same of row 1, ... of row T - 1, then the next 32 columns. A partial tile is
//! padded with zeros.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(not(target_arch = "x86_64"))]
mod quads;
mod source;
mod tile;

use std::ops::Range;

use kvant_codec::Rotation;

use super::partition::MIN_PARALLEL_VALUES;
use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::simd::isa::Isa;
use crate::simd::matmul::format::BLOCK;

pub(super) use source::Source;
pub(super) use tile::rotate;
pub(crate) use tile::{Codes, Tile};
use tile::{SUMS, TileMut, steps};

/// Quantized rows in tiles.
#[derive(Default)]
pub(crate) struct Quantized {
    n_blocks: usize,
    codes: Vec<Codes>,
    scales: Vec<f32>,
    neg_sums: Vec<i32>,
    weighted: Vec<f32>,
}

/// Quantizes the rows of `source` (at most `T`) into a tile. The other kernel sets do the same
/// arithmetic and agree with this one bit for bit.
fn quantize_tile<const T: usize>(source: Source<'_>, mut tile: TileMut<'_, T>) {
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

impl Quantized {
    /// Quantizes the rows of `source` into tiles of `tile_rows`: 1, 2, 4, 6, 8 or 16.
    pub fn fill(&mut self, isa: Isa, pool: &Pool, source: Source<'_>, tile_rows: usize) {
        let rows = source.rows();
        let planes = self.planes(rows.next_multiple_of(tile_rows), source.n_in);
        let job = |tile: usize| {
            let part = source.part(tile * tile_rows..rows.min((tile + 1) * tile_rows));
            // SAFETY: one call of this job writes each tile.
            unsafe { planes.fill_tile(isa, part, tile * tile_rows, tile_rows) };
        };
        let n_tiles = rows.div_ceil(tile_rows);
        if rows * source.n_in < MIN_PARALLEL_VALUES {
            (0..n_tiles).for_each(job);
        } else {
            pool.for_each(n_tiles, &job);
        }
    }

    /// Quantizes each group of rows of `source` into tiles of its own.
    pub fn fill_groups(&mut self, isa: Isa, pool: &Pool, source: Source<'_>, groups: &[GroupTiles]) {
        let len = groups.iter().map(GroupTiles::end).max().unwrap_or(0);
        let planes = self.planes(len, source.n_in);
        let job = |group: usize| {
            let GroupTiles { rows, at, tile_rows } = groups[group].clone();
            for (i, first) in rows.clone().step_by(tile_rows).enumerate() {
                let part = source.part(first..rows.end.min(first + tile_rows));
                // SAFETY: one call of this job writes each group, and tiles of groups do not
                // overlap.
                unsafe { planes.fill_tile(isa, part, at + i * tile_rows, tile_rows) };
            }
        };
        if source.rows() * source.n_in < MIN_PARALLEL_VALUES {
            (0..groups.len()).for_each(job);
        } else {
            pool.for_each(groups.len(), &job);
        }
    }

    /// Returns space for tiles with `rows` rows in total.
    fn planes(&mut self, rows: usize, n_in: usize) -> Planes<'_> {
        self.n_blocks = n_in / BLOCK;
        let len = rows * self.n_blocks;
        grow(&mut self.codes, len);
        grow(&mut self.scales, len);
        grow(&mut self.neg_sums, len * SUMS);
        grow(&mut self.weighted, len * SUMS);
        Planes {
            n_blocks: self.n_blocks,
            codes: DisjointMut::new(&mut self.codes),
            scales: DisjointMut::new(&mut self.scales),
            neg_sums: DisjointMut::new(&mut self.neg_sums),
            weighted: DisjointMut::new(&mut self.weighted),
        }
    }

    /// Returns the tiles of `tile_rows` rows each that begin after `at` rows of tiles.
    pub fn tiles(&self, at: usize, tile_rows: usize) -> QuantizedTiles<'_> {
        QuantizedTiles { of: self, at, tile_rows }
    }

    /// Returns everything as bits, for comparisons; sums of pairs are added.
    #[cfg(test)]
    pub fn bits(&self, has_pairs: bool) -> [Vec<u32>; 4] {
        let floats = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect();
        let ints = |values: &[i32]| values.iter().map(|&v| v as u32).collect();
        let added = |&pairs: &i32| bytemuck::cast::<_, [i16; 2]>(pairs).map(i32::from).iter().sum();
        let codes: Vec<i32> = self.codes.iter().flat_map(|codes| codes.0).collect();
        let neg_sums =
            if has_pairs { self.neg_sums.iter().map(added).collect() } else { self.neg_sums.clone() };
        [ints(&codes), floats(&self.scales), ints(&neg_sums), floats(&self.weighted)]
    }
}

/// Rows that are multiplied with the same weights, and the position of their tiles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupTiles {
    /// The rows of the source.
    pub rows: Range<usize>,
    /// Rows of tiles before them.
    pub at: usize,
    /// Rows of each tile; the last may be partial.
    pub tile_rows: usize,
}

impl GroupTiles {
    /// Returns the rows of tiles up to their end.
    pub fn end(&self) -> usize {
        self.at + self.rows.len().next_multiple_of(self.tile_rows)
    }
}

/// The buffers of a [`Quantized`] that several threads write.
struct Planes<'a> {
    n_blocks: usize,
    codes: DisjointMut<'a, Codes>,
    scales: DisjointMut<'a, f32>,
    neg_sums: DisjointMut<'a, i32>,
    weighted: DisjointMut<'a, f32>,
}

impl Planes<'_> {
    /// Quantizes the rows of `source` into the tile that begins after `at` rows of tiles.
    ///
    /// # Safety
    /// No tile that overlaps this one is being filled.
    unsafe fn fill_tile(&self, isa: Isa, source: Source<'_>, at: usize, tile_rows: usize) {
        // SAFETY: by the contract of this function.
        unsafe {
            match tile_rows {
                1 => self.fill::<1>(isa, source, at),
                2 => self.fill::<2>(isa, source, at),
                4 => self.fill::<4>(isa, source, at),
                6 => self.fill::<6>(isa, source, at),
                8 => self.fill::<8>(isa, source, at),
                16 => self.fill::<16>(isa, source, at),
                _ => unreachable!("no kernel takes tiles of {tile_rows} rows"),
            }
        }
    }

    /// Does the work of [`Planes::fill_tile`] for tiles of `T` rows.
    ///
    /// # Safety
    /// As [`Planes::fill_tile`].
    unsafe fn fill<const T: usize>(&self, isa: Isa, source: Source<'_>, at: usize) {
        let values = |each: usize| at * self.n_blocks * each..(at + T) * self.n_blocks * each;
        // SAFETY: the planes hold the values of a tile contiguously, and by the caller's promise no
        // other thread has those.
        let out = unsafe {
            TileMut::<T> {
                codes: self.codes.part(values(1)).as_chunks_mut().0,
                scales: self.scales.part(values(1)).as_chunks_mut().0,
                neg_sums: self.neg_sums.part(values(SUMS)).as_chunks_mut().0.as_chunks_mut().0,
                weighted: self.weighted.part(values(SUMS)).as_chunks_mut().0.as_chunks_mut().0,
            }
        };
        match isa.of_vectors() {
            Isa::Scalar => quantize_tile(source, out),
            // SAFETY: the token proves AVX2.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => unsafe { avx2::quantize_tile::<T, true>(source, out) },
            // SAFETY: the token proves AVX2.
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni(_) => unsafe { avx2::quantize_tile::<T, false>(source, out) },
            // SAFETY: the token proves AVX-512 F, VL and VNNI.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) | Isa::Avx512Vbmi(_) => unsafe { avx512::quantize_tile(source, out) },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(token) => quads::quantize_tile(crate::simd::vec128::Quads(token), source, out),
            #[cfg(target_arch = "aarch64")]
            Isa::I8mm(token) => {
                quads::quantize_tile(
                    crate::simd::vec128::Quads(crate::simd::tokens::Neon::from(token)),
                    source,
                    out,
                );
            }
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            Isa::Simd128(token) => quads::quantize_tile(crate::simd::vec128::Quads(token), source, out),
            isa => unreachable!("{} quantizes with other vectors", isa.name()),
        }
    }
}

/// Some tiles of one size.
#[derive(Clone, Copy)]
pub(crate) struct QuantizedTiles<'a> {
    of: &'a Quantized,
    at: usize,
    tile_rows: usize,
}

impl<'a> QuantizedTiles<'a> {
    /// Returns tile `index`, of `T` rows.
    ///
    /// # Panics
    /// Unless these are tiles of `T`.
    pub fn tile<const T: usize>(self, index: usize) -> Tile<'a, T> {
        assert_eq!(self.tile_rows, T, "tiles of another size");
        let Quantized { n_blocks, codes, scales, neg_sums, weighted } = self.of;
        let first = (self.at + index * T) * n_blocks;
        let values = |each: usize| first * each..(first + n_blocks * T) * each;
        Tile {
            codes: codes[values(1)].as_chunks().0,
            scales: scales[first..first + n_blocks * T].as_chunks().0,
            neg_sums: neg_sums[values(SUMS)].as_chunks::<T>().0.as_chunks().0,
            weighted: weighted[values(SUMS)].as_chunks::<T>().0.as_chunks().0,
        }
    }
}

/// Grows `values` to at least `len`. Memory is reused between steps.
fn grow<V: Clone + Default>(values: &mut Vec<V>, len: usize) {
    if values.len() < len {
        values.resize(len, V::default());
    }
}

#[cfg(test)]
mod tests {
    use kvant_conformance::weights::gaussian;

    use super::*;

    #[test]
    fn all_kernel_sets_quantize_alike_and_propagate_nan() {
        let mut x = gaussian(30, 3 * 96, 5.0);
        let gain = gaussian(31, 96, 1.0);
        x[..32].fill(0.0);
        x[32..64].fill(1e-35);
        x[100] = f32::INFINITY;
        x[200] = f32::NAN;
        let pool = Pool::new(1).unwrap();
        let norms = [None, Some((&gain[..], 1e-5))];
        for (norm, rotates) in norms.into_iter().flat_map(|norm| [(norm, false), (norm, true)]) {
            for tile_rows in [1, 2, 4, 6, 8] {
                let source = Source { x: &x, row_indices: None, n_in: 96, norm, rotates };
                let fill = |isa| {
                    let mut quantized = Quantized::default();
                    quantized.fill(isa, &pool, source, tile_rows);
                    quantized.bits(isa.of_vectors().name() == "avx2")
                };
                let want = fill(Isa::Scalar);
                for isa in Isa::available() {
                    assert_eq!(fill(isa), want, "{}, {tile_rows} rows to a tile", isa.name());
                }
            }
        }
        let mut quantized = Quantized::default();
        let source = Source { x: &x, row_indices: None, n_in: 96, norm: None, rotates: false };
        quantized.fill(Isa::Scalar, &pool, source, 1);
        let steps = |row| quantized.tiles(0, 1).tile::<1>(row).scales;
        assert_eq!(steps(0)[..2], [[0.0], [0.0]]);
        assert!(steps(1)[0][0].is_nan() && steps(2)[0][0].is_nan(), "{:?} {:?}", steps(1), steps(2));
    }
}
