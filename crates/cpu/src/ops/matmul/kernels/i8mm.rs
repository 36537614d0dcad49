//! Coded panels with activations in 8 bits, by 2x2 matrix instructions (`smmla`):
//!
//! ```text
//! sums [2, 2] += activations [2 rows, 8 columns] · weights [2 rows, 8 columns]ᵀ
//! ```
//!
//! They take half the instructions of a dot product in every lane. Sums stay in the 2x2 layout of
//! the instruction, and scales are arranged to match. Sums of bytes are exact in any order, and the
//! float operations are those of [`Multiply`](super::Multiply), one by one: so the bits are the
//! same.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use std::marker::PhantomData;

use super::codes::{subs, which};
use super::{BlockCodes, CHUNK_BLOCKS, Chunk, Register, Sums};
use crate::ops::matmul::panel::Line;
use crate::ops::matmul::partition::PAIR;
use crate::ops::matmul::quantize::Tile;
use crate::simd::matmul::format::{GROUPS, WeightFormat};
use crate::simd::vec128::{MatrixProducts, Quad, Task};

/// Rows of a tile of activations: with four pairs of rows of weights, as many sums as 32 registers
/// hold beside the operands.
pub(in crate::ops::matmul) const SQUARES_TILE: usize = 6;
/// Pairs of rows of a tile of activations.
pub(super) const X_PAIRS: usize = SQUARES_TILE / 2;
/// Pairs of rows of weights that are multiplied at once.
pub(super) const W_PAIRS: usize = 4;
/// Panels hold so many times these rows.
pub(super) const PARTS: usize = 2;
/// Pairs of groups, eight columns, of a block.
const STEPS: usize = GROUPS / 2;

/// Arranges the two groups of each step (a word of each row in either) for the instruction: both
/// words row by row, eight rows in the first line and eight in the second.
pub(in crate::ops::matmul) struct ArrangeI8mm<'a, Q> {
    pub quad: Q,
    pub codes: &'a mut [BlockCodes],
}

impl<Q: MatrixProducts> Task for ArrangeI8mm<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let q = self.quad;
        for [first, second] in self.codes.iter_mut().flat_map(|block| block.as_chunks_mut().0) {
            for p in 0..PAIR {
                [first[p], second[p]] = to_squares(q, [&first[p], &second[p]]);
            }
        }
    }
}

/// Arranges two words of each row, contiguous within a line, for the instruction.
#[inline(always)]
pub(super) fn to_squares<Q: MatrixProducts>(q: Q, [first, second]: [&Line; 2]) -> [Line; 2] {
    let mut squares = [[0; 16]; 2 * W_PAIRS];
    for i in 0..W_PAIRS {
        let [low, high] =
            q.interleave(q.load_i(&first.0.as_chunks().0[i]), q.load_i(&second.0.as_chunks().0[i]));
        q.store_i(low, &mut squares[2 * i]);
        q.store_i(high, &mut squares[2 * i + 1]);
    }
    bytemuck::cast(squares)
}

/// Adds the products of a chunk, centred and [arranged](ArrangeI8mm), with a tile of as many
/// blocks to `sums`.
pub(in crate::ops::matmul) struct MultiplyI8mm<'a, Q, F> {
    pub quad: Q,
    pub chunk: &'a Chunk,
    pub tile: Tile<'a, SQUARES_TILE>,
    pub sums: &'a mut Sums<SQUARES_TILE>,
    pub format: PhantomData<F>,
}

/// Arranged codes of a tile of activations, `[block][step][pair of rows]`.
type TileSquares<Q> = [[[<Q as Quad>::Ints; X_PAIRS]; STEPS]; CHUNK_BLOCKS];
/// Sums of a tile with eight rows of weights, `[pair of rows][pair of rows of weights]`.
pub(super) type Totals<Q> = [[<Q as Quad>::Floats; W_PAIRS]; X_PAIRS];

impl<Q: MatrixProducts, F: WeightFormat> Task for MultiplyI8mm<'_, Q, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let x = self.tile_squares();
        for p in 0..PAIR {
            for part in 0..PARTS {
                let mut totals = fetch(self.quad, &self.sums[p], part);
                self.multiply(&x, p, part, &mut totals);
                put(self.quad, &mut self.sums[p], part, totals);
            }
        }
    }
}

impl<Q: MatrixProducts, F: WeightFormat> MultiplyI8mm<'_, Q, F> {
    #[inline(always)]
    fn tile_squares(&self) -> TileSquares<Q> {
        let q = self.quad;
        let mut squares = [[[q.splat_i(0); X_PAIRS]; STEPS]; CHUNK_BLOCKS];
        for (block, squares) in self.tile.codes.iter().zip(&mut squares) {
            for (pair, rows) in block.as_chunks::<2>().0.iter().enumerate() {
                let [a, b]: &[[[u8; 16]; STEPS / 2]; 2] = bytemuck::cast_ref(rows);
                for two in 0..STEPS / 2 {
                    let [low, high] = q.halves(q.load_i(&a[two]), q.load_i(&b[two]));
                    squares[2 * two][pair] = low;
                    squares[2 * two + 1][pair] = high;
                }
            }
        }
        squares
    }

    /// Adds the products of part `part` of panel `p`.
    #[inline(always)]
    fn multiply(&self, x: &TileSquares<Q>, p: usize, part: usize, totals: &mut Totals<Q>) {
        let (q, subs) = (self.quad, subs::<F>());
        let blocks = self.chunk.codes.iter().zip(&self.chunk.scales).zip(&self.chunk.mins);
        let rows = x.iter().zip(self.tile.scales).zip(self.tile.weighted);
        for (((codes, scales), mins), ((x, steps), weighted)) in blocks.zip(rows) {
            for sub in 0..subs {
                let mut sums = [[q.splat_i(0); W_PAIRS]; X_PAIRS];
                for step in sub * STEPS / subs..(sub + 1) * STEPS / subs {
                    let line: &[[u8; 16]; W_PAIRS] = bytemuck::cast_ref(&codes[2 * step + part][p]);
                    for i in 0..W_PAIRS {
                        let w = q.load_i(&line[i]);
                        for pair in 0..X_PAIRS {
                            sums[pair][i] = q.dot_square(sums[pair][i], x[step][pair], w);
                        }
                    }
                }
                let (scale, steps) = (of_part(q, &scales[sub][p], part), in_pairs(q, steps));
                for pair in 0..X_PAIRS {
                    for i in 0..W_PAIRS {
                        let scaled = q.mul(q.to_floats(sums[pair][i]), scale[i]);
                        totals[pair][i] = q.mul_add(scaled, steps[pair], totals[pair][i]);
                    }
                }
                if F::SPEC.has_min {
                    let min = of_part(q, &mins[sub][p], part);
                    let weighted = in_pairs(q, &weighted[which::<F>(sub)]);
                    for pair in 0..X_PAIRS {
                        for i in 0..W_PAIRS {
                            totals[pair][i] = q.mul_add(min[i], weighted[pair], totals[pair][i]);
                        }
                    }
                }
            }
        }
    }
}

/// Loads the sums of a panel that its part `part` adds to.
#[inline(always)]
pub(super) fn fetch<Q: MatrixProducts>(q: Q, sums: &[Register; SQUARES_TILE], part: usize) -> Totals<Q> {
    let mut totals = [[q.splat(0.0); W_PAIRS]; X_PAIRS];
    for (rows, totals) in sums.as_chunks::<2>().0.iter().zip(&mut totals) {
        for two in 0..W_PAIRS / 2 {
            let [a, b] = rows.each_ref().map(|row| q.load(&row.0.as_chunks().0[2 * part + two]));
            [totals[2 * two], totals[2 * two + 1]] = halves(q, a, b);
        }
    }
    totals
}

/// Stores these sums.
#[inline(always)]
pub(super) fn put<Q: MatrixProducts>(
    q: Q,
    sums: &mut [Register; SQUARES_TILE],
    part: usize,
    totals: Totals<Q>,
) {
    for ([first, second], totals) in sums.as_chunks_mut().0.iter_mut().zip(totals) {
        for two in 0..W_PAIRS / 2 {
            let [a, b] = halves(q, totals[2 * two], totals[2 * two + 1]);
            q.store(a, &mut first.0.as_chunks_mut().0[2 * part + two]);
            q.store(b, &mut second.0.as_chunks_mut().0[2 * part + two]);
        }
    }
}

/// Returns the halves as [`MatrixProducts::halves`] does.
#[inline(always)]
fn halves<Q: MatrixProducts>(q: Q, a: Q::Floats, b: Q::Floats) -> [Q::Floats; 2] {
    q.halves(q.bits(a), q.bits(b)).map(|x| q.of_bits(x))
}

/// Returns the values of part `part` of a panel's rows in the 2x2 layout: those of two rows, twice.
#[inline(always)]
fn of_part<Q: MatrixProducts>(q: Q, values: &Register, part: usize) -> [Q::Floats; W_PAIRS] {
    let mut out = [q.splat(0.0); W_PAIRS];
    for two in 0..W_PAIRS / 2 {
        let four = q.load(&values.0.as_chunks().0[2 * part + two]);
        [out[2 * two], out[2 * two + 1]] = halves(q, four, four);
    }
    out
}

/// Returns the values of a tile's rows in the 2x2 layout: that of a row twice, then that of the
/// next.
#[inline(always)]
fn in_pairs<Q: MatrixProducts>(q: Q, values: &[f32; SQUARES_TILE]) -> [Q::Floats; X_PAIRS] {
    let [low, high] =
        [values.first_chunk(), values.last_chunk()].map(|four| q.bits(q.load(four.expect("six"))));
    let ([a, b], [_, c]) = (q.interleave(low, low), q.interleave(high, high));
    [a, b, c].map(|x| q.of_bits(x))
}
