//! Activations in f32 for products with float weights, in tiles like
//! [`Quantized`](super::quantize::Quantized) ones.

use std::ops::Range;

use super::partition::MIN_PARALLEL_VALUES;
use super::quantize::GroupTiles;
use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;

/// f32 rows in tiles of T rows: one column of each row, then the next column. A partial tile is
/// padded with zeros.
#[derive(Default)]
pub(crate) struct Floats {
    n_in: usize,
    values: Vec<f32>,
}

impl Floats {
    /// Interleaves the rows of `x` `[rows, n_in]`.
    pub fn fill(&mut self, pool: &Pool, x: &[f32], n_in: usize, tile_rows: usize) {
        let rows = x.len() / n_in;
        let values = self.room(rows.next_multiple_of(tile_rows), n_in);
        let job = |tile: usize| {
            let first = tile * tile_rows;
            // SAFETY: one call of this job writes each tile, and tiles share no value.
            let out = unsafe { values.part(first * n_in..(first + tile_rows) * n_in) };
            interleave(x, first..rows.min(first + tile_rows), n_in, tile_rows, out);
        };
        let n_tiles = rows.div_ceil(tile_rows);
        if rows * n_in < MIN_PARALLEL_VALUES {
            (0..n_tiles).for_each(job);
        } else {
            pool.for_each(n_tiles, &job);
        }
    }

    /// Interleaves each group of rows of `x` `[rows, n_in]` in tiles of its own.
    pub fn fill_groups(&mut self, pool: &Pool, x: &[f32], n_in: usize, groups: &[GroupTiles]) {
        let values = self.room(groups.iter().map(GroupTiles::end).max().unwrap_or(0), n_in);
        let job = |group: usize| {
            let GroupTiles { rows, at, tile_rows } = groups[group].clone();
            for (i, first) in rows.clone().step_by(tile_rows).enumerate() {
                let to = at + i * tile_rows;
                // SAFETY: one call of this job writes each group, and tiles of groups do not
                // overlap.
                let out = unsafe { values.part(to * n_in..(to + tile_rows) * n_in) };
                interleave(x, first..rows.end.min(first + tile_rows), n_in, tile_rows, out);
            }
        };
        if x.len() < MIN_PARALLEL_VALUES {
            (0..groups.len()).for_each(job);
        } else {
            pool.for_each(groups.len(), &job);
        }
    }

    /// Returns space for tiles with `rows` rows in total.
    fn room(&mut self, rows: usize, n_in: usize) -> DisjointMut<'_, f32> {
        self.n_in = n_in;
        if self.values.len() < rows * n_in {
            self.values.resize(rows * n_in, 0.0);
        }
        DisjointMut::new(&mut self.values)
    }

    /// Returns the tiles of `tile_rows` rows each that begin after `at` rows of tiles.
    pub fn tiles(&self, at: usize, tile_rows: usize) -> FloatTiles<'_> {
        FloatTiles { of: self, at, tile_rows }
    }
}

/// Writes some rows of `x` `[.., n_in]` to a tile.
fn interleave(x: &[f32], rows: Range<usize>, n_in: usize, tile_rows: usize, out: &mut [f32]) {
    for t in 0..tile_rows {
        let column = out[t..].iter_mut().step_by(tile_rows);
        match rows.clone().nth(t) {
            Some(row) => column.zip(&x[row * n_in..][..n_in]).for_each(|(out, &v)| *out = v),
            None => column.for_each(|out| *out = 0.0),
        }
    }
}

/// Some tiles of one size.
#[derive(Clone, Copy)]
pub(crate) struct FloatTiles<'a> {
    of: &'a Floats,
    at: usize,
    tile_rows: usize,
}

impl<'a> FloatTiles<'a> {
    /// Returns tile `index`, `[n_in]` columns of `T` rows.
    ///
    /// # Panics
    /// Unless these are tiles of `T`.
    pub fn tile<const T: usize>(self, index: usize) -> &'a [[f32; T]] {
        assert_eq!(self.tile_rows, T, "tiles of another size");
        let first = (self.at + index * T) * self.of.n_in;
        self.of.values[first..first + T * self.of.n_in].as_chunks().0
    }
}
