//! Prepares queries: pads, scales, rotates them where the keys are rotated, and rounds them to
//! signed bytes where keys are coded.

use std::ops::Range;

use kvant_backend::KvTensorSpec;
use kvant_codec::tile::{TileBlock, TileLayout, slices};

use super::codes::CodeMeaning;
use super::kernels::ByteChunk;
use super::shape::{Bytes, SLICE};
use crate::ops::channel_scales::Affine;
use crate::simd::matrix_unit::ROWS;
use crate::simd::vec16::{Direction, Lanes, Op, Rotate};

/// The queries of one KV head that a job processes.
#[derive(Debug, Default)]
pub(super) struct Queries {
    /// Number of queries.
    pub(super) n: usize,
    /// Padded, scaled and rotated, `[queries][dim]`.
    pub(super) floats: Vec<f32>,
    /// Byte planes, `[slices][queries][planes]`, padded to whole tiles of a matrix unit.
    pub(super) rows: Vec<Bytes>,
    /// `-bias · Σ integers`, `[blocks][queries]`.
    pub(super) starts: Vec<i32>,
    /// Value of one unit of an integer product with the codes of a key, `[blocks][queries]`.
    pub(super) factors: Vec<f32>,
}

impl Queries {
    /// Prepares `queries` of the key's head dimension, each times the channel scales `balance` and
    /// `scale`. Allocates only while the vectors still grow.
    pub(super) fn prepare<'a, L: Lanes>(
        &mut self,
        lanes: L,
        keys: &KvTensorSpec,
        scale: f32,
        balance: Option<Affine<'_>>,
        queries: impl Iterator<Item = &'a [f32]>,
    ) {
        let dim = keys.stored_dim();
        self.floats.clear();
        for query in queries {
            let first = self.floats.len();
            self.floats.extend_from_slice(query);
            if let Some(balance) = balance {
                balance.apply(0..query.len(), query, &mut self.floats[first..]);
            }
            self.floats[first..].iter_mut().for_each(|x| *x *= scale);
            self.floats.resize(self.floats.len().next_multiple_of(dim), 0.0);
        }
        self.n = self.floats.len() / dim;
        if keys.rotates {
            for slice in slices(dim, SLICE) {
                lanes.run(Rotate { rows: &mut self.floats, width: dim, slice, way: Direction::Forward });
            }
        }
        if let Some(meaning) = CodeMeaning::of(keys.dtype) {
            self.round(lanes, meaning, &keys.main_layout());
        }
    }

    /// Returns the floats of some queries, `[some][dim]`.
    pub(super) fn of(&self, some: &Range<usize>, dim: usize) -> &[f32] {
        &self.floats[some.start * dim..some.end * dim]
    }

    /// Returns the byte planes, `planes` of each, of some queries for the block of dims `block`,
    /// which lies in slice `slice`.
    pub(super) fn chunk(
        &self,
        block: usize,
        slice: usize,
        some: Range<usize>,
        planes: usize,
    ) -> ByteChunk<'_> {
        let rows = slice * self.n + some.start..slice * self.n + some.end;
        let of_block = block * self.n + some.start..block * self.n + some.end;
        ByteChunk {
            rows: &self.rows[rows.start * planes..rows.end * planes],
            starts: &self.starts[of_block.clone()],
            factors: &self.factors[of_block],
        }
    }

    fn round<L: Lanes>(&mut self, lanes: L, meaning: CodeMeaning, keys: &TileLayout) {
        let dim = keys.dim();
        let n = self.n;
        let planes = meaning.query_planes;
        // A matrix unit multiplies whole tiles of queries.
        self.rows.resize((dim.div_ceil(SLICE) * n + ROWS - 1) * planes, Bytes([[0; 4]; 32]));
        self.starts.clear();
        self.factors.clear();
        for TileBlock { dims, .. } in keys.blocks() {
            for query in 0..n {
                let row = (dims.start / SLICE * n + query) * planes;
                let (unit, sum) = lanes.run(RoundQuery {
                    x: &self.floats[query * dim..][dims.clone()],
                    rows: &mut self.rows[row..row + planes],
                    at: dims.start % SLICE / 4,
                });
                // A query that is not finite gives arbitrary integers; its unit is NaN.
                self.starts.push(sum.wrapping_mul(-meaning.bias));
                self.factors.push(unit * meaning.step);
            }
        }
    }
}

/// Rounds a block of a query to integers of as many bytes as there are rows. Returns the value of
/// one unit, NaN if a value is not finite, and the sum of the integers.
struct RoundQuery<'a> {
    x: &'a [f32],
    rows: &'a mut [Bytes],
    /// Index of the block's first four dims within the rows.
    at: usize,
}

impl Op for RoundQuery<'_> {
    type Output = (f32, i32);

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> (f32, i32) {
        let (x, _) = self.x.as_chunks::<16>();
        let (mut max, mut bad) = (lanes.splat(0.0), lanes.splat(0.0));
        for x in x {
            let x = lanes.load(x);
            max = lanes.max(lanes.abs(x), max);
            bad = lanes.mul_add(x, lanes.splat(0.0), bad);
        }
        // 0 when all are finite, else NaN.
        let bad = lanes.sum(bad);
        let max = lanes.largest(max);
        let limit = if self.rows.len() == 2 { L::MAX_SPLIT } else { L::MAX_BYTE };
        // A query this small gives scores of zero.
        let per_unit = if max > 1e-30 && bad == 0.0 { limit as f32 / max } else { 0.0 };
        let mut sum = lanes.splat_i(0);
        for (i, x) in x.iter().enumerate() {
            let integers = lanes.round(lanes.mul(lanes.load(x), lanes.splat(per_unit)));
            sum = lanes.add_i(sum, integers);
            let fours = self.at + 4 * i..self.at + 4 * i + 4;
            match self.rows {
                [one] => one.0[fours].copy_from_slice(&lanes.low_bytes(integers)),
                [first, second] => {
                    let parts = lanes.split(integers);
                    first.0[fours.clone()].copy_from_slice(&parts[0]);
                    second.0[fours].copy_from_slice(&parts[1]);
                }
                _ => unreachable!("one or two planes"),
            }
        }
        (max / limit as f32 + bad, lanes.sum_i(sum))
    }
}
