//! Panels in bf16 with activations in bf16, by 2x2 matrix instructions (`bfmmla`):
//!
//! ```text
//! sums [2, 2] += activations [2 rows, 4 columns] · weights [2 rows, 4 columns]ᵀ
//! ```

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use super::i8mm::{PARTS, SQUARES_TILE, W_PAIRS, X_PAIRS, fetch, put, to_squares};
use super::{HalvesPanels, Sums};
use crate::ops::matmul::bf16::Block;
use crate::ops::matmul::partition::PAIR;
use crate::simd::matmul::format::BLOCK;
use crate::simd::vec128::{Bf16MatrixProducts, MatrixProducts, Task};

/// Groups of four columns of a block.
const STEPS: usize = BLOCK / 4;

/// Arranges the two lines of each four columns (two columns of each row in either) for the
/// instruction: all four columns row by row, eight rows in the first line and eight in the second.
pub(in crate::ops::matmul) struct ArrangeBf16<'a, Q> {
    pub quad: Q,
    pub chunk: &'a mut [HalvesPanels],
}

impl<Q: MatrixProducts> Task for ArrangeBf16<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for lines in self.chunk.as_flattened_mut().iter_mut().flat_map(|panel| panel.as_chunks_mut().0) {
            *lines = to_squares(self.quad, lines.each_ref());
        }
    }
}

/// Two neighbouring rows of activations: tiles of sixteen rows, block by block, and the index of
/// the rows.
pub(in crate::ops::matmul) type TwoRows<'a> = (&'a [Block], usize);

/// Adds the products of a chunk, [arranged](ArrangeBf16), with as many blocks of six rows to
/// `sums`.
pub(in crate::ops::matmul) struct MultiplyBfmmla<'a, Q> {
    pub quad: Q,
    pub chunk: &'a [HalvesPanels],
    pub rows: [TwoRows<'a>; X_PAIRS],
    pub sums: &'a mut Sums<SQUARES_TILE>,
}

impl<Q: Bf16MatrixProducts> Task for MultiplyBfmmla<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { quad: q, chunk, rows, sums } = self;
        for p in 0..PAIR {
            for part in 0..PARTS {
                let mut totals = fetch(q, &sums[p], part);
                for (b, panels) in chunk.iter().enumerate() {
                    let x = rows.map(|(blocks, row)| {
                        [&blocks[b][row], &blocks[b][row + 1]]
                            .map(|line| bytemuck::cast_ref::<_, [[u8; 8]; STEPS]>(line))
                    });
                    for step in 0..STEPS {
                        let line: &[[u8; 16]; W_PAIRS] = bytemuck::cast_ref(&panels[p][2 * step + part]);
                        let mut pairs = [q.splat_i(0); X_PAIRS];
                        for pair in 0..X_PAIRS {
                            pairs[pair] = q.load_rows([&x[pair][0][step], &x[pair][1][step]]);
                        }
                        for i in 0..W_PAIRS {
                            let w = q.load_i(&line[i]);
                            for pair in 0..X_PAIRS {
                                totals[pair][i] = q.dot_halves(totals[pair][i], pairs[pair], w);
                            }
                        }
                    }
                }
                put(q, &mut sums[p], part, totals);
            }
        }
    }
}
