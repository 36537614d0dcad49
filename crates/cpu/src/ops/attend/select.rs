//! Selection of the tokens that a row attends to: see [`kvant_backend::Backend::select_tokens`],
//! [`kvant_backend::Backend::select_pooled`] and [`kvant_backend::Backend::select_blocks`].
//!
//! Rows whose queries are in one tile read every key in the same form, so that they share its
//! decoding, a tile at a time.

use std::ops::Range;

use kvant_backend::{BlockSelection, KvBatchEntry, PooledBatchEntry, Selection, TILES_PER_BLOCK, TokenSpan};
use kvant_codec::tile::{TILE, prepare_query};

use super::decode::DecodeRows;
use super::view::View;
use crate::host::disjoint::DisjointMut;
use crate::host::page::CpuPage;
use crate::host::pool::Pool;
use crate::ops::context::KernelContext;
use crate::simd::isa::Isa;
use crate::simd::vec16::{Lanes, Op, with_lanes};

/// The operands of the op. Shapes have been checked.
#[derive(Clone, Copy)]
pub(crate) struct SelectArgs<'a> {
    pub selection: Selection,
    /// `[rows, n_heads * head_dim]`
    pub q: &'a [f32],
    /// `[rows, n_heads]`
    pub weights: &'a [f32],
    pub step_tiles: Option<&'a CpuPage>,
}

/// Scratch memory, reused between calls.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Queries as the keys are stored, `[rows, n_heads, dim]`.
    queries: Vec<f32>,
    /// `[rows, tokens]`, in whole tiles.
    scores: Vec<f32>,
    /// Weights of heads that are rows by themselves.
    ones: Vec<f32>,
}

/// Selects the tokens of each row that has more than `n_used`, into `selected` `[rows, n_used]`.
pub(crate) fn select_tokens(
    mut context: KernelContext<'_, Scratch>,
    args: SelectArgs<'_>,
    parts: &[KvBatchEntry<'_, CpuPage>],
    selected: &mut [f32],
) {
    for part in parts {
        let keys = View::new(part, &part.layer.k[0], args.step_tiles);
        for positions in tiles(part.rows, args.selection.n_used) {
            let rows = Rows { of: part.rows, positions, stride: 1 };
            select_in_tile(context.reborrow(), args, &keys, rows, selected);
        }
    }
}

/// Selects the pooled keys of each row that sees more than `n_used`, into `selected` `[rows,
/// n_used]`.
pub(crate) fn select_pooled(
    mut context: KernelContext<'_, Scratch>,
    args: SelectArgs<'_>,
    parts: &[PooledBatchEntry<'_, CpuPage>],
    selected: &mut [f32],
) {
    for &PooledBatchEntry { tokens, stride, ref keys } in parts {
        let keys = View::new(keys, &keys.layer.k[0], None);
        for positions in tiles(tokens, (args.selection.n_used + 1) * stride - 1) {
            let rows = Rows { of: tokens, positions, stride };
            select_in_tile(context.reborrow(), args, &keys, rows, selected);
        }
    }
}

/// Returns the positions of `rows` from `first` on, tile by tile.
pub(super) fn tiles(rows: TokenSpan, first: usize) -> impl Iterator<Item = Range<usize>> {
    let mut next = rows.start.max(first);
    std::iter::from_fn(move || {
        let tile = next..rows.end().min((next / TILE + 1) * TILE);
        next = tile.end;
        (!tile.is_empty()).then_some(tile)
    })
}

/// Rows in one tile.
struct Rows {
    /// All rows of their sequence.
    of: TokenSpan,
    positions: Range<usize>,
    /// Tokens per key.
    stride: usize,
}

impl Rows {
    /// Returns the number of keys that row `row` sees.
    fn n_seen(&self, row: usize) -> usize {
        (self.positions.start + row + 1) / self.stride
    }
}

/// Selects the keys of rows in one tile.
fn select_in_tile(
    KernelContext { isa, pool, scratch }: KernelContext<'_, Scratch>,
    args: SelectArgs<'_>,
    keys: &View<'_>,
    rows: Rows,
    selected: &mut [f32],
) {
    let (Selection { n_heads, n_used }, n) = (args.selection, rows.positions.len());
    let first_row = rows.of.first + rows.positions.start - rows.of.start;
    let head_dim = keys.tensor.spec.head_dim;
    let q = &args.q[first_row * n_heads * head_dim..][..n * n_heads * head_dim];
    let queries = prepare(pool, keys, q, &mut scratch.queries);
    let weights = &args.weights[first_row * n_heads..][..n * n_heads];
    let of_rows = Queries { n_rows: n, queries, weights, floor: 0.0 };
    let seen = rows.n_seen(0) - 1..rows.n_seen(n - 1);
    let scores = score(isa, pool, keys, &seen, of_rows, &mut scratch.scores);

    let width = scores.len() / n;
    let selected = DisjointMut::new(&mut selected[first_row * n_used..(first_row + n) * n_used]);
    pool.for_each(n, &|row| {
        let scores = &scores[row * width..][..rows.n_seen(row)];
        // SAFETY: one call of this job writes each row.
        largest(scores, unsafe { selected.part(row * n_used..(row + 1) * n_used) });
    });
}

/// The operands of the op that selects blocks. Shapes have been checked.
#[derive(Clone, Copy)]
pub(crate) struct SelectBlocksArgs<'a> {
    pub selection: BlockSelection,
    pub parts: &'a [KvBatchEntry<'a, CpuPage>],
    /// `[rows, n_heads * head_dim]`
    pub q: &'a [f32],
    pub step_tiles: Option<&'a CpuPage>,
}

/// Selects the blocks of each row that has more than `n_used`, into `selected` `[rows, n_heads,
/// n_used]`.
pub(crate) fn select_blocks(
    mut context: KernelContext<'_, Scratch>,
    args: SelectBlocksArgs<'_>,
    selected: &mut [f32],
) {
    let BlockSelection { n_used, size, .. } = args.selection;
    for part in args.parts {
        for positions in tiles(part.rows, n_used * size) {
            select_blocks_in_tile(context.reborrow(), args, part, positions, selected);
        }
    }
}

/// Selects the blocks of the rows at `positions`, which are in one tile.
fn select_blocks_in_tile(
    KernelContext { isa, pool, scratch }: KernelContext<'_, Scratch>,
    args: SelectBlocksArgs<'_>,
    part: &KvBatchEntry<'_, CpuPage>,
    positions: Range<usize>,
    selected: &mut [f32],
) {
    let BlockSelection { n_heads, n_used, size, n_local } = args.selection;
    let keys = View::new(part, &part.layer.k[0], args.step_tiles);
    let first = (part.rows.first + positions.start - part.rows.start) * n_heads;
    let (n, head_dim) = (positions.len() * n_heads, keys.tensor.spec.head_dim);
    let q = &args.q[first * head_dim..][..n * head_dim];
    let queries = prepare(pool, &keys, q, &mut scratch.queries);
    // A head by itself, of any sign.
    scratch.ones.resize(n, 1.0);
    let of_heads = Queries { n_rows: n, queries, weights: &scratch.ones, floor: f32::NEG_INFINITY };
    let scores = score(isa, pool, &keys, &positions, of_heads, &mut scratch.scores);

    let width = scores.len() / n;
    let selected = DisjointMut::new(&mut selected[first * n_used..(first + n) * n_used]);
    pool.for_each(n, &|head| {
        let scores = &scores[head * width..][..=positions.start + head / n_heads];
        let largest_of = |block: &[f32]| block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut of_blocks: Vec<f32> = scores.chunks(size).map(largest_of).collect();
        let n_others = of_blocks.len() - n_local;
        of_blocks[n_others..].fill(f32::INFINITY);
        // SAFETY: one call of this job writes each list.
        largest(&of_blocks, unsafe { selected.part(head * n_used..(head + 1) * n_used) });
    });
}

/// Pads and rotates queries `[rows, head_dim]` like the keys.
fn prepare<'a>(pool: &Pool, keys: &View<'_>, q: &[f32], queries: &'a mut Vec<f32>) -> &'a [f32] {
    let (head_dim, dim, rotates) = (keys.tensor.spec.head_dim, keys.dim(), keys.tensor.spec.rotates);
    queries.clear();
    queries.resize(q.len() / head_dim * dim, 0.0);
    let prepared = DisjointMut::new(queries);
    pool.for_each(q.len() / head_dim, &|i| {
        // SAFETY: one call of this job writes each query.
        let out = unsafe { prepared.part(i * dim..(i + 1) * dim) };
        prepare_query(rotates, &q[i * head_dim..(i + 1) * head_dim], out);
    });
    queries
}

/// Queries of rows.
#[derive(Clone, Copy)]
struct Queries<'a> {
    n_rows: usize,
    /// `[rows, n_heads, dim]`
    queries: &'a [f32],
    /// `[rows, n_heads]`
    weights: &'a [f32],
    /// The least product of a query and a key that counts.
    floor: f32,
}

/// Returns the scores of all keys up to the last of `seen`, `[rows, keys]` in whole tiles. The
/// first of `seen` is the youngest key that the first row sees.
fn score<'a>(
    isa: Isa,
    pool: &Pool,
    keys: &View<'_>,
    seen: &Range<usize>,
    Queries { n_rows: n, queries, weights, floor }: Queries<'_>,
    scores: &'a mut Vec<f32>,
) -> &'a [f32] {
    let (dim, tile_of_rows) = (keys.dim(), seen.start / TILE);
    let n_tiles = seen.end.div_ceil(TILE);
    let width = n_tiles * TILE;
    scores.clear();
    scores.resize(n * width, 0.0);
    let out = DisjointMut::new(scores);
    pool.for_each(n_tiles.div_ceil(TILES_PER_BLOCK), &|block| {
        let mut tile = vec![0.0; TILE * dim];
        let of_block = block * TILES_PER_BLOCK..n_tiles.min((block + 1) * TILES_PER_BLOCK);
        for first in of_block.map(|tile| tile * TILE) {
            let stored = keys.stored(tile_of_rows, first / TILE);
            let decode = DecodeRows { tile: stored, out: &mut tile };
            with_lanes!(isa, lanes => lanes.run(decode), _ => {
                let tokens = first..seen.end.min(first + TILE);
                let rows = tokens.zip(tile.chunks_exact_mut(dim));
                rows.for_each(|(token, row)| keys.read(tile_of_rows, token, row));
            });
            let of_rows =
                queries.chunks_exact(queries.len() / n).zip(weights.chunks_exact(weights.len() / n));
            for (i, (queries, weights)) in of_rows.enumerate() {
                // SAFETY: one call of this job writes these tokens of each row.
                let out = unsafe { out.part(i * width + first..i * width + first + TILE) };
                let out: &mut [f32; TILE] = out.try_into().expect("a tile of scores");
                let scores = TileScores { keys: &tile, queries, weights, floor, out };
                with_lanes!(isa, lanes => lanes.run(scores), _ => scores.run_scalar());
            }
        }
    });
    scores
}

/// Computes the scores of a tile of tokens for one row.
struct TileScores<'a> {
    /// `[tokens, dim]`
    keys: &'a [f32],
    /// `[n_heads, dim]`
    queries: &'a [f32],
    /// `[n_heads]`
    weights: &'a [f32],
    floor: f32,
    out: &'a mut [f32; TILE],
}

/// Tokens, and heads, whose products are summed side by side.
const TOKENS: usize = 4;
const HEADS: usize = 2;
const LANES: usize = 16;

impl TileScores<'_> {
    fn dim(&self) -> usize {
        self.keys.len() / TILE
    }

    /// The reference: head after head, in f64.
    fn run_scalar(self) {
        let dim = self.dim();
        for (key, out) in self.keys.chunks_exact(dim).zip(self.out) {
            let of_head = |(query, &weight): (&[f32], &f32)| {
                let products = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k));
                f64::from(weight) * products.sum::<f64>().max(f64::from(self.floor))
            };
            *out = self.queries.chunks_exact(dim).zip(self.weights).map(of_head).sum::<f64>() as f32;
        }
    }

    /// Returns the products of all tokens with each of some queries.
    #[inline(always)]
    fn products<L: Lanes, const N: usize>(&self, lanes: L, queries: &[f32]) -> [L::Floats; N] {
        let (queries, keys) = (queries.as_chunks::<LANES>().0, self.keys.as_chunks::<LANES>().0);
        let width = queries.len() / N;
        let mut sums = [[lanes.splat(0.0); TILE]; N];
        for (quad, keys) in keys.chunks_exact(TOKENS * width).enumerate() {
            let [a, b, c, d] = [0, 1, 2, 3].map(|token| &keys[token * width..][..width]);
            let mut of_quad = [[lanes.splat(0.0); TOKENS]; N];
            for i in 0..width {
                let keys = [lanes.load(&a[i]), lanes.load(&b[i]), lanes.load(&c[i]), lanes.load(&d[i])];
                for (of_quad, query) in of_quad.iter_mut().zip(queries.chunks_exact(width)) {
                    let query = lanes.load(&query[i]);
                    for (sum, key) in of_quad.iter_mut().zip(keys) {
                        *sum = lanes.mul_add(key, query, *sum);
                    }
                }
            }
            for (sums, of_quad) in sums.iter_mut().zip(of_quad) {
                sums[quad * TOKENS..][..TOKENS].copy_from_slice(&of_quad);
            }
        }
        let mut products = [lanes.splat(0.0); N];
        for (product, sums) in products.iter_mut().zip(sums) {
            *product = lanes.sum_of_each(sums);
        }
        products
    }

    /// Adds the scores of some heads.
    #[inline(always)]
    fn add_heads<L: Lanes, const N: usize>(&self, lanes: L, first: usize, total: &mut L::Floats) {
        let products: [_; N] = self.products(lanes, &self.queries[first * self.dim()..][..N * self.dim()]);
        for (product, &weight) in products.into_iter().zip(&self.weights[first..]) {
            let product = lanes.max(product, lanes.splat(self.floor));
            *total = lanes.mul_add(product, lanes.splat(weight), *total);
        }
    }
}

impl Op for TileScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (mut total, n_heads) = (lanes.splat(0.0), self.weights.len());
        let in_pairs = n_heads / HEADS * HEADS;
        for first in (0..in_pairs).step_by(HEADS) {
            self.add_heads::<L, HEADS>(lanes, first, &mut total);
        }
        if in_pairs < n_heads {
            self.add_heads::<L, 1>(lanes, in_pairs, &mut total);
        }
        lanes.store(total, self.out);
    }
}

/// Writes the indices of the `out.len()` largest scores, the older of equal ones, ascending.
fn largest(scores: &[f32], out: &mut [f32]) {
    let mut tokens: Vec<u32> = (0..scores.len() as u32).collect();
    let rank = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
    let n = out.len();
    if n < tokens.len() {
        tokens.select_nth_unstable_by(n, rank);
    }
    tokens[..n].sort_unstable();
    out.iter_mut().zip(&tokens).for_each(|(out, &token)| *out = token as f32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_of_equal_scores_are_largest() {
        let mut out = [0.0; 3];
        largest(&[1.0, 3.0, 2.0, 2.0, -1.0, 3.0], &mut out);
        assert_eq!(out, [1.0, 2.0, 5.0]);
        largest(&[0.0; 5], &mut out);
        assert_eq!(out, [0.0, 1.0, 2.0]);
    }
}
