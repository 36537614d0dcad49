//! Activations in bf16 for blocked products, see [`PromptMath::Bf16`](crate::PromptMath::Bf16).

use super::MIN_PARALLEL_VALUES;
use super::panel::{BLOCK, Line};
use super::quantise::rotate;
use crate::pool::Pool;
use crate::shards::Shards;
use crate::unit::ROWS;

/// A block of 32 columns of sixteen rows, a line for each row: what a unit loads as a tile.
pub(super) type Block = [Line; ROWS];

/// Rows in tiles of sixteen, `[tile][block]`. What is not there, rows and columns, is zeros.
#[derive(Default)]
pub(crate) struct Halves {
    n_blocks: usize,
    blocks: Vec<Block>,
}

/// The bits of a bf16 that is nearest to `x`, ties to even; NaN stays NaN.
#[inline(always)]
pub(super) fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { 0x7fc0 } else { rounded }
}

impl Halves {
    /// Rounds the rows of `x` `[rows, n_in]`, each block rotated first where the weights are.
    pub fn fill(&mut self, pool: &Pool, x: &[f32], n_in: usize, rotates: bool) {
        let rows = x.len() / n_in;
        let (n_tiles, n_blocks) = (rows.div_ceil(ROWS), n_in.div_ceil(BLOCK));
        self.n_blocks = n_blocks;
        if self.blocks.len() < n_tiles * n_blocks {
            self.blocks.resize(n_tiles * n_blocks, [Line::ZERO; ROWS]);
        }
        let blocks = Shards::new(&mut self.blocks);
        let job = |tile: usize| {
            // SAFETY: every tile is taken by one call of this job.
            let blocks = unsafe { blocks.part(tile * n_blocks..(tile + 1) * n_blocks) };
            let mut rows = x.chunks_exact(n_in).skip(tile * ROWS);
            for t in 0..ROWS {
                let mut columns = rows.next().unwrap_or_default().chunks(BLOCK);
                for block in &mut *blocks {
                    block[t] = round(columns.next().unwrap_or_default(), rotates);
                }
            }
        };
        if rows * n_in < MIN_PARALLEL_VALUES {
            (0..n_tiles).for_each(job);
        } else {
            pool.for_each(n_tiles, &job);
        }
    }

    pub fn tiles(&self) -> HalvesTiles<'_> {
        HalvesTiles(self)
    }
}

/// At most 32 values as bf16, and zeros.
fn round(values: &[f32], rotates: bool) -> Line {
    let mut block = [0.0; BLOCK];
    block[..values.len()].copy_from_slice(values);
    if rotates {
        rotate(&mut block);
    }
    Line(bytemuck::cast(block.map(|x| bf16_bits(x) as u16)))
}

/// Tiles of sixteen rows.
#[derive(Clone, Copy)]
pub(crate) struct HalvesTiles<'a>(&'a Halves);

impl<'a> HalvesTiles<'a> {
    /// Tile `index`, block by block.
    pub fn tile(self, index: usize) -> &'a [Block] {
        let Halves { n_blocks, blocks } = self.0;
        &blocks[index * n_blocks..][..*n_blocks]
    }
}
