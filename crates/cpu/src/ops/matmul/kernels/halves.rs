//! Panels in bf16 with activations in bf16, by a matrix unit.

use std::marker::PhantomData;

use super::codes::subs;
use super::{CHUNK_BLOCKS, CHUNK_COLS, Chunk, FloatChunk, Sums};
use crate::ops::matmul::bf16::{Block, bf16_bits};
use crate::ops::matmul::panel::Line;
use crate::ops::matmul::partition::PAIR;
use crate::simd::matmul::format::{BLOCK, GROUPS, WeightFormat};
use crate::simd::matmul::{Kernel, Simd};
use crate::simd::matrix_unit::{ROWS, Tiles};

/// Columns that share a word.
const TWO: usize = 2;

/// Weights of a block of columns of two panels in bf16, scales and minima applied, `[panel]`: a
/// line for two columns, a word of it for each row of weights.
pub(in crate::ops::matmul) type HalvesPanels = [[Line; BLOCK / TWO]; PAIR];

/// The panels of a chunk of columns.
pub(in crate::ops::matmul) type HalvesChunk = [HalvesPanels; HALVES_BLOCKS];
/// Blocks of a chunk in bf16: whole units of every format, and 16 KiB, which leaves room for
/// activations in the L1 cache.
pub(in crate::ops::matmul) const HALVES_BLOCKS: usize = CHUNK_BLOCKS / 2;

/// Rounds sixteen pairs of values to bf16.
#[inline(always)]
fn pack(first: &[f32; 16], second: &[f32; 16]) -> Line {
    let mut words = [0u32; 16];
    for n in 0..16 {
        words[n] = bf16_bits(first[n]) | bf16_bits(second[n]) << 16;
    }
    Line(bytemuck::cast(words))
}

/// Decodes the centred codes of a chunk to bf16.
pub(in crate::ops::matmul) struct CodesToHalves<'a, F> {
    pub chunk: &'a Chunk,
    pub halves: &'a mut [HalvesPanels],
    pub format: PhantomData<F>,
}

impl<F: WeightFormat> Kernel for CodesToHalves<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { chunk, halves, .. } = self;
        for (b, block) in halves.iter_mut().enumerate() {
            for (p, lines) in block.iter_mut().enumerate() {
                for (i, line) in lines.iter_mut().enumerate() {
                    let g = i / TWO;
                    let sub = g * subs::<F>() / GROUPS;
                    let words: &[u32; 16] = bytemuck::cast_ref(&chunk.codes[b][g][p]);
                    let (scale, min) = (&chunk.scales[b][sub][p].0, &chunk.mins[b][sub][p].0);
                    let mut values = [[0.0; 16]; TWO];
                    for (j, values) in values.iter_mut().enumerate() {
                        let above = 24 - 8 * (TWO * (i % TWO) + j);
                        for n in 0..16 {
                            values[n] = ((words[n] << above) as i32 >> 24) as f32 * scale[n];
                            if F::SPEC.has_min {
                                values[n] += min[n];
                            }
                        }
                    }
                    *line = pack(&values[0], &values[1]);
                }
            }
        }
    }
}

/// Rounds the columns of a chunk of floats.
pub(in crate::ops::matmul) struct FloatsToHalves<'a> {
    pub chunk: &'a FloatChunk,
    pub halves: &'a mut [HalvesPanels],
}

impl Kernel for FloatsToHalves<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { chunk, halves } = self;
        assert!(halves.len() * BLOCK <= CHUNK_COLS);
        for (columns, block) in chunk.chunks_exact(BLOCK).zip(halves) {
            for (p, lines) in block.iter_mut().enumerate() {
                for (columns, line) in columns.as_chunks::<TWO>().0.iter().zip(lines) {
                    *line = pack(&columns[0][p].0, &columns[1][p].0);
                }
            }
        }
    }
}

/// Adds the products of a chunk with as many blocks of some tiles of activations to the sums of
/// each. The unit is configured for whole tiles.
///
/// Multiplies two tiles of activations with two panels: four loads for four products, and sums stay
/// in the unit over the chunk.
pub(in crate::ops::matmul) fn multiply_bf16<'a, T: Tiles>(
    unit: &mut T,
    chunk: &[HalvesPanels],
    mut tiles: impl Iterator<Item = (&'a mut Sums<ROWS>, &'a [Block])>,
) {
    while let Some((sums, blocks)) = tiles.next() {
        match tiles.next() {
            Some((more_sums, more_blocks)) => {
                load::<T, 0, 1>(unit, sums);
                load::<T, 2, 3>(unit, more_sums);
                for (panels, (rows, more_rows)) in chunk.iter().zip(blocks.iter().zip(more_blocks)) {
                    load_panels(unit, panels);
                    unit.load_rows::<4>(bytemuck::cast_slice(rows), size_of::<Line>());
                    unit.load_rows::<5>(bytemuck::cast_slice(more_rows), size_of::<Line>());
                    unit.dot_halves::<0, 4, 6>();
                    unit.dot_halves::<1, 4, 7>();
                    unit.dot_halves::<2, 5, 6>();
                    unit.dot_halves::<3, 5, 7>();
                }
                store::<T, 0, 1>(unit, sums);
                store::<T, 2, 3>(unit, more_sums);
            }
            None => {
                load::<T, 0, 1>(unit, sums);
                for (panels, rows) in chunk.iter().zip(blocks) {
                    load_panels(unit, panels);
                    unit.load_rows::<4>(bytemuck::cast_slice(rows), size_of::<Line>());
                    unit.dot_halves::<0, 4, 6>();
                    unit.dot_halves::<1, 4, 7>();
                }
                store::<T, 0, 1>(unit, sums);
            }
        }
    }
}

#[inline(always)]
fn load_panels<T: Tiles>(unit: &mut T, panels: &HalvesPanels) {
    unit.load_lines::<6>(bytemuck::cast_slice(&panels[0]), size_of::<Line>());
    unit.load_lines::<7>(bytemuck::cast_slice(&panels[1]), size_of::<Line>());
}

#[inline(always)]
fn load<T: Tiles, const A: usize, const B: usize>(unit: &mut T, sums: &Sums<ROWS>) {
    unit.load_sums::<A>(bytemuck::cast_ref(&sums[0]));
    unit.load_sums::<B>(bytemuck::cast_ref(&sums[1]));
}

#[inline(always)]
fn store<T: Tiles, const A: usize, const B: usize>(unit: &mut T, sums: &mut Sums<ROWS>) {
    unit.store_sums::<A>(bytemuck::cast_mut(&mut sums[0]));
    unit.store_sums::<B>(bytemuck::cast_mut(&mut sums[1]));
}
