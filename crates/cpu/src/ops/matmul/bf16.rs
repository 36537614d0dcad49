//! Activations in bf16 for GEMMs, see
//! [`PrefillPrecision::Bf16`](super::prefill_precision::PrefillPrecision::Bf16).

use super::panel::Line;
use super::partition::MIN_PARALLEL_VALUES;
use super::quantize::rotate;
use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::simd::matmul::format::BLOCK;
use crate::simd::matmul::{Kernel, Simd};
use crate::simd::matrix_unit::ROWS;

/// A block of 32 columns of sixteen rows, a line for each row: what a matrix unit loads as a tile.
pub(super) type Block = [Line; ROWS];

/// Rows in tiles of sixteen, `[tile][block]`. Missing rows and columns are zeros.
#[derive(Default)]
pub(crate) struct Bf16Rows {
    n_blocks: usize,
    blocks: Vec<Block>,
}

/// Returns the bits of the bf16 nearest to `x`, ties to even; NaN stays NaN.
#[inline(always)]
pub(super) fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { 0x7fc0 } else { rounded }
}

impl Bf16Rows {
    /// Rounds the rows of `x` `[rows, n_in]`, each block rotated first if the weights are.
    pub fn fill(&mut self, simd: impl Simd, pool: &Pool, x: &[f32], n_in: usize, rotates: bool) {
        let rows = x.len() / n_in;
        let (n_tiles, n_blocks) = (rows.div_ceil(ROWS), n_in.div_ceil(BLOCK));
        self.n_blocks = n_blocks;
        if self.blocks.len() < n_tiles * n_blocks {
            self.blocks.resize(n_tiles * n_blocks, [Line::ZERO; ROWS]);
        }
        let blocks = DisjointMut::new(&mut self.blocks);
        let job = |tile: usize| {
            // SAFETY: one call of this job writes each tile.
            let blocks = unsafe { blocks.part(tile * n_blocks..(tile + 1) * n_blocks) };
            let x = &x[tile * ROWS * n_in..x.len().min((tile + 1) * ROWS * n_in)];
            simd.run(RoundTile { x, n_in, rotates, blocks });
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

/// Rounds at most sixteen rows of `x`, and pads with zeros.
struct RoundTile<'a> {
    x: &'a [f32],
    n_in: usize,
    rotates: bool,
    blocks: &'a mut [Block],
}

impl Kernel for RoundTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { x, n_in, rotates, blocks } = self;
        let mut rows = x.chunks_exact(n_in);
        for t in 0..ROWS {
            let (whole, rest) = rows.next().unwrap_or_default().as_chunks::<BLOCK>();
            let mut last = [0.0; BLOCK];
            last[..rest.len()].copy_from_slice(rest);
            let columns = whole.iter().chain([&last]).chain(std::iter::repeat(&[0.0; BLOCK]));
            for (block, values) in blocks.iter_mut().zip(columns) {
                block[t] = round(values, rotates);
            }
        }
    }
}

/// Returns 32 values as bf16.
#[inline(always)]
fn round(values: &[f32; BLOCK], rotates: bool) -> Line {
    let mut values = *values;
    if rotates {
        rotate(&mut values);
    }
    let mut rounded = [0u16; BLOCK];
    for (to, value) in rounded.iter_mut().zip(values) {
        *to = bf16_bits(value) as u16;
    }
    Line(bytemuck::cast(rounded))
}

/// Tiles of sixteen rows.
#[derive(Clone, Copy)]
pub(crate) struct HalvesTiles<'a>(&'a Bf16Rows);

impl<'a> HalvesTiles<'a> {
    /// Returns tile `index`, block by block.
    pub fn tile(self, index: usize) -> &'a [Block] {
        let Bf16Rows { n_blocks, blocks } = self.0;
        &blocks[index * n_blocks..][..*n_blocks]
    }
}
