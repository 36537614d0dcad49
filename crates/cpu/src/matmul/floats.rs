//! Activations in f32 for products with float weights, in tiles as [`Quantised`](super::quantise::Quantised) ones.

use super::MIN_PARALLEL_VALUES;
use crate::pool::Pool;
use crate::shards::Shards;

/// f32 rows in tiles of T rows: one column of each row, then the next column. A tile that is not full ends in zeros.
#[derive(Default)]
pub(crate) struct Floats {
    tile_rows: usize,
    n_in: usize,
    values: Vec<f32>,
}

impl Floats {
    /// Interleaves the rows of `x` `[rows, n_in]`.
    pub fn fill(&mut self, pool: &Pool, x: &[f32], n_in: usize, tile_rows: usize) {
        let rows = x.len() / n_in;
        let n_tiles = rows.div_ceil(tile_rows);
        let per_tile = n_in * tile_rows;
        (self.tile_rows, self.n_in) = (tile_rows, n_in);
        if self.values.len() < n_tiles * per_tile {
            self.values.resize(n_tiles * per_tile, 0.0);
        }
        let values = Shards::new(&mut self.values);
        let job = |tile: usize| {
            // SAFETY: every tile is taken by one call of this job, and tiles share no value.
            let out = unsafe { values.part(tile * per_tile..(tile + 1) * per_tile) };
            for t in 0..tile_rows {
                let column = out[t..].iter_mut().step_by(tile_rows);
                match x.chunks_exact(n_in).nth(tile * tile_rows + t) {
                    Some(row) => column.zip(row).for_each(|(out, &v)| *out = v),
                    None => column.for_each(|out| *out = 0.0),
                }
            }
        };
        if rows * n_in < MIN_PARALLEL_VALUES {
            (0..n_tiles).for_each(job);
        } else {
            pool.for_each(n_tiles, &job);
        }
    }

    /// Tile `index`, `[n_in]` columns of `T` rows.
    ///
    /// # Panics
    /// Unless the rows were interleaved in tiles of `T`.
    pub fn tile<const T: usize>(&self, index: usize) -> &[[f32; T]] {
        assert_eq!(self.tile_rows, T, "tiles of another size");
        &self.values.as_chunks().0[index * self.n_in..(index + 1) * self.n_in]
    }
}
