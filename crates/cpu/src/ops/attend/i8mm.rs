//! Products of codes with the bytes of many queries, or of their weights, by 2x2 matrix
//! instructions (`smmla`, `usmmla`):
//!
//! ```text
//! sums [2, 2] += codes [2 lanes, 8 bytes] · bytes [2 rows, 8 bytes]ᵀ
//! ```
//!
//! They take half the instructions of a dot product in every lane. A lane is a token of keys, or a
//! dim of values; a pair of rows is two queries, or both planes of one. Two groups of a panel are
//! arranged for the instruction once for all rows. Sums of bytes are exact in any order, and
//! [`Epilogue`] defines the epilogue: so the bits are those of [`kernels`](super::kernels).

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use super::matrix_unit::{Epilogue, MatrixPath, Operands};
use super::shape::{Bytes, MAX_QUERIES};
use crate::simd::matrix_unit::{Products, ROWS, Row};
use crate::simd::tokens::I8mm;
use crate::simd::vec16::{Lanes, Op};
use crate::simd::vec128::{MatrixProducts, Quad};

/// Maximum pairs of rows that are multiplied at once: as many as leave registers for the operands.
const MAX_PAIRS: usize = 3;
/// Pairs of lanes.
const LANE_PAIRS: usize = 8;
/// Pairs of groups of the widest panel.
const MAX_STEPS: usize = 16;

/// Sixteen lanes, eight bytes of each.
type Step = [[u8; 16]; LANE_PAIRS];

/// Sums of half of the lanes with a pair of rows.
type Half<Q> = [<Q as Quad>::Ints; LANE_PAIRS / 2];

/// The matrix path of 2x2 matrix instructions.
pub(super) struct I8mmPath {
    quad: I8mm,
    /// The arranged panel.
    steps: [Step; MAX_STEPS],
    /// Sums of some queries, by plane.
    sums: [Products; 2],
}

impl MatrixPath for I8mmPath {
    type Proof = I8mm;

    // Vector kernels read the codes of fewer queries in place.
    const MIN_QUERIES: usize = MAX_QUERIES + 1;
    // As for the vector kernels: from here on, unpacking a tile costs little beside reading it.
    const QUERIES: usize = 48;

    fn new(quad: I8mm) -> Self {
        let steps = [[[0; 16]; LANE_PAIRS]; MAX_STEPS];
        Self { quad, steps, sums: [[Row::ZERO; ROWS]; 2] }
    }

    fn multiply<L: Lanes>(&mut self, lanes: L, of: Operands<'_>, planes: usize, take: impl Epilogue) {
        match planes {
            1 => lanes.run(Multiply::<_, 1> { by: self, of, take }),
            2 => lanes.run(Multiply::<_, 2> { by: self, of, take }),
            planes => unreachable!("rows of {planes} planes"),
        }
    }
}

/// Products in `P` planes. Runs on the lanes of the same token.
struct Multiply<'a, K, const P: usize> {
    by: &'a mut I8mmPath,
    of: Operands<'a>,
    take: K,
}

impl<K: Epilogue, const P: usize> Op for Multiply<'_, K, P> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let Operands { panels, stride, n_panels, groups, rows, queries, .. } = self.of;
        for panel in 0..n_panels {
            self.arrange(&panels[panel * stride..].as_chunks().0[..groups]);
            let at_once = 2 * MAX_PAIRS / P;
            for first in (0..queries).step_by(at_once) {
                let some = first..queries.min(first + at_once);
                let rows = &rows[first * P..];
                match (some.len() * P).div_ceil(2) {
                    1 => self.multiply::<1>(rows),
                    2 => self.multiply::<2>(rows),
                    3 => self.multiply::<3>(rows),
                    pairs => unreachable!("{pairs} pairs of rows at once"),
                }
                let sums = &self.by.sums;
                self.take.take(lanes, panel, some, std::array::from_fn::<_, P, _>(|plane| &sums[plane]));
            }
        }
    }
}

impl<K, const P: usize> Multiply<'_, K, P> {
    /// Arranges a panel for the instruction.
    #[inline(always)]
    fn arrange(&mut self, groups: &[[u8; 64]]) {
        let q = self.by.quad;
        for ([first, second], step) in groups.as_chunks().0.iter().zip(&mut self.by.steps) {
            let (first, second) = (first.as_chunks().0, second.as_chunks().0);
            for i in 0..LANE_PAIRS / 2 {
                let [low, high] = q.interleave(q.load_i(&first[i]), q.load_i(&second[i]));
                q.store_i(low, &mut step[2 * i]);
                q.store_i(high, &mut step[2 * i + 1]);
            }
        }
    }

    /// Multiplies the first pairs of `rows` with the panel; their sums are those of queries from
    /// the first on.
    #[inline(always)]
    fn multiply<const N: usize>(&mut self, rows: &[Bytes]) {
        let (q, n_steps, first) = (self.by.quad, self.of.groups / 2, self.of.at / 2);
        assert!(n_steps <= MAX_STEPS && first + n_steps <= MAX_STEPS);
        let mut operands = [[&[[0; 8]; MAX_STEPS]; 2]; N];
        for (pair, rows) in operands.iter_mut().zip(rows.as_chunks::<2>().0) {
            *pair = rows.each_ref().map(bytemuck::cast_ref);
        }
        let mut sums = [[[q.splat_i(0); LANE_PAIRS / 2]; N]; 2];
        for step in 0..n_steps {
            let mut x = [q.splat_i(0); N];
            for n in 0..N {
                x[n] = q.load_rows(operands[n].map(|row| &row[first + step]));
            }
            let [low, high] = self.by.steps[step].as_chunks().0 else { unreachable!("two halves") };
            add(q, &mut sums[0], low, x);
            add(q, &mut sums[1], high, x);
        }
        self.put(0, sums[0]);
        self.put(1, sums[1]);
    }

    /// Stores the sums of half of the lanes, row by row.
    #[inline(always)]
    fn put<const N: usize>(&mut self, half: usize, sums: [Half<I8mm>; N]) {
        let q = self.by.quad;
        for n in 0..N {
            for two in 0..LANE_PAIRS / 4 {
                let both = q.deinterleave(sums[n][2 * two], sums[n][2 * two + 1]);
                for (row, sums) in (2 * n..).zip(both) {
                    let out = &mut self.by.sums[row % P][row / P].0;
                    q.store_i(sums, &mut out.as_chunks_mut().0[2 * half + two]);
                }
            }
        }
    }
}

/// Adds the products of half of the lanes with some pairs of rows. Halves, and their code, are
/// small enough that compilers keep sums in registers.
#[inline(always)]
fn add<Q: MatrixProducts, const N: usize>(
    q: Q,
    sums: &mut [Half<Q>; N],
    codes: &[[u8; 16]; LANE_PAIRS / 2],
    x: [Q::Ints; N],
) {
    for lane in 0..LANE_PAIRS / 2 {
        let codes = q.load_i(&codes[lane]);
        for n in 0..N {
            sums[n][lane] = q.dot_square_unsigned(sums[n][lane], codes, x[n]);
        }
    }
}
