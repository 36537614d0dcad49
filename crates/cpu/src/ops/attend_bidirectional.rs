//! Bidirectional attention, in which each row sees all others within its reach: see
//! [`kvant_backend::Backend::attend_bidirectional`].
//!
//! The keys of a head are laid out so that a vector holds one dim of sixteen rows, the values so
//! that one holds sixteen dims of one row. A thread processes a few rows at a time: all their
//! scores, which stay in its caches, the softmax, and then the values. With a reach, it reads only
//! the keys that one of these rows sees.

use std::ops::Range;

use kvant_backend::BidirectionalParams;

use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::context::KernelContext;
use crate::simd::vec16::{Lanes, Op, exp2, with_lanes};

/// Rows that share the loads of keys and values: as many as leave registers for these.
const ROWS: usize = 6;
/// Rows of a work item.
const PER_ITEM: usize = 4 * ROWS;
const LANES: usize = 16;
/// Padding of keys, and of the values of a row: as many as the widest kernel processes at once.
const WIDEST: usize = 2 * LANES;

/// Scratch memory, reused between calls.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// `[n_kv_heads, blocks of 16 rows, dim, 16]`
    keys: Vec<f32>,
    /// `[n_kv_heads, rows, dim]`, dim of whole vectors.
    values: Vec<f32>,
}

/// Rows that see each other.
#[derive(Clone, Copy)]
pub(crate) struct Window<'a> {
    pub rows: usize,
    pub params: BidirectionalParams,
    /// Added to the scores.
    pub bias: Option<Bias<'a>>,
}

impl Window<'_> {
    /// Returns the rows that some of these rows see.
    fn seen(self, rows: Range<usize>) -> Range<usize> {
        match self.params.reach {
            None => 0..self.rows,
            Some(reach) => rows.start.saturating_sub(reach)..rows.end.saturating_add(reach).min(self.rows),
        }
    }
}

/// Relative position biases.
#[derive(Clone, Copy)]
pub(crate) struct Bias<'a> {
    /// `[heads, 2 longest - 1]`
    pub values: &'a [f32],
    /// Rows of the longest window, at least those of this one.
    pub longest: usize,
}

impl<'a> Bias<'a> {
    /// Returns the biases of a row of `head` with each of these rows of its window.
    fn of_row(self, head: usize, row: usize, seen: Range<usize>) -> &'a [f32] {
        let n_distances = 2 * self.longest - 1;
        &self.values[head * n_distances + self.longest - 1 - row..][seen]
    }
}

/// Windows, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct Windows<'a> {
    /// The rows of each.
    pub rows: &'a [usize],
    pub params: BidirectionalParams,
    pub bias: Option<Bias<'a>>,
}

/// Attends over the rows of each window of `q`, `k` and `v`. Shapes have been checked.
pub(crate) fn attend_windows(
    mut context: KernelContext<'_, Scratch>,
    Windows { rows: windows, params, bias }: Windows<'_>,
    qkv: [&[f32]; 3],
    out: &mut [f32],
) {
    let heads = [params.heads.n, params.n_kv_heads, params.n_kv_heads];
    let mut first = 0;
    for &rows in windows {
        let own = |n: usize| first * n * params.heads.dim..(first + rows) * n * params.heads.dim;
        let own_qkv = std::array::from_fn(|i| &qkv[i][own(heads[i])]);
        let own_out = &mut out[own(params.heads.n)];
        attend_bidirectional(context.reborrow(), Window { rows, params, bias }, own_qkv, own_out);
        first += rows;
    }
}

/// Attends over the rows of a window of `q` `[rows, heads.n * heads.dim]`, `k` and `v`. Shapes have
/// been checked.
pub(crate) fn attend_bidirectional(
    KernelContext { isa, pool, scratch }: KernelContext<'_, Scratch>,
    window: Window<'_>,
    [q, k, v]: [&[f32]; 3],
    out: &mut [f32],
) {
    let Window { rows, params, bias } = window;
    let (heads, n_groups) = (params.heads, params.heads.n / params.n_kv_heads);
    let (dim, width) = (heads.dim, heads.n * heads.dim);
    let (padded, wide) = (rows.next_multiple_of(WIDEST), dim.next_multiple_of(WIDEST));
    arrange(pool, scratch, rows, &params, [k, v]);
    let Scratch { keys, values } = &*scratch;
    let out = DisjointMut::new(out);
    let items = rows.div_ceil(PER_ITEM);
    pool.for_each(heads.n * items, &|item| {
        let (head, first) = (item / items, item % items * PER_ITEM);
        let keys = &keys[head / n_groups * padded * dim..][..padded * dim];
        let values = &values[head / n_groups * rows * wide..][..rows * wide];
        let mut scores = vec![0.0; ROWS * padded];
        let mut of_rows = vec![0.0; ROWS * wide];
        for first in (first..rows.min(first + PER_ITEM)).step_by(ROWS) {
            let n = ROWS.min(rows - first);
            let mut queries = vec![0.0; ROWS * dim];
            // Rows beyond the last have queries of zeros.
            let row = |row: usize| (first + row).min(rows - 1);
            let seen = window.seen(first..first + n);
            // Keys are read in whole vectors.
            let seen = seen.start / WIDEST * WIDEST..seen.end;
            let biases = bias.map(|bias| std::array::from_fn(|i| bias.of_row(head, row(i), seen.clone())));
            let seen_by = std::array::from_fn(|i| {
                let of_row = window.seen(row(i)..row(i) + 1);
                of_row.start - seen.start..of_row.end - seen.start
            });
            let n_padded = seen.len().next_multiple_of(WIDEST);
            for (row, query) in queries.chunks_exact_mut(dim).enumerate().take(n) {
                let at = (first + row) * width + head * dim;
                // The vector kernels have exp2, not exp.
                let scale = params.scale * std::f32::consts::LOG2_E;
                query.iter_mut().zip(&q[at..at + dim]).for_each(|(to, x)| *to = x * scale);
            }
            let few = RowGroup {
                seen: seen_by,
                dim,
                queries: &queries,
                biases,
                keys: &keys[seen.start * dim..][..n_padded * dim],
                values: &values[seen.start * wide..seen.end * wide],
                scores: &mut scores[..ROWS * n_padded],
                out: &mut of_rows,
            };
            with_lanes!(isa, lanes => lanes.run(few), _ => few.run_scalar());
            for (row, result) in of_rows.chunks_exact(wide).enumerate().take(n) {
                let at = (first + row) * width + head * dim;
                // SAFETY: these values of these rows belong to one item of this job.
                unsafe { out.part(at..at + dim) }.copy_from_slice(&result[..dim]);
            }
        }
    });
}

/// Arranges keys and values for the kernels.
fn arrange(
    pool: &Pool,
    scratch: &mut Scratch,
    rows: usize,
    params: &BidirectionalParams,
    [k, v]: [&[f32]; 2],
) {
    let (n_heads, dim) = (params.n_kv_heads, params.heads.dim);
    let width = n_heads * dim;
    let (padded, wide) = (rows.next_multiple_of(WIDEST), dim.next_multiple_of(WIDEST));
    for (memory, len) in [(&mut scratch.keys, padded * dim), (&mut scratch.values, rows * wide)] {
        memory.clear();
        memory.resize(n_heads * len, 0.0);
    }
    let (keys, values) = (DisjointMut::new(&mut scratch.keys), DisjointMut::new(&mut scratch.values));
    pool.for_each(n_heads, &|head| {
        // SAFETY: one call of this job writes the buffers of a head.
        let (keys, values) = unsafe {
            (
                keys.part(head * padded * dim..(head + 1) * padded * dim),
                values.part(head * rows * wide..(head + 1) * rows * wide),
            )
        };
        for row in 0..rows {
            let at = row * width + head * dim;
            let block = &mut keys[row / LANES * LANES * dim..][..LANES * dim];
            k[at..at + dim].iter().enumerate().for_each(|(i, x)| block[i * LANES + row % LANES] = *x);
            values[row * wide..][..dim].copy_from_slice(&v[at..at + dim]);
        }
    });
}

/// A few rows of one head.
struct RowGroup<'a> {
    /// Keys that each row sees, among those given.
    seen: [Range<usize>; ROWS],
    dim: usize,
    /// `[ROWS, dim]`, times the factor of the scores.
    queries: &'a [f32],
    /// Added to the scores of each row, `[ROWS, keys]`.
    biases: Option<[&'a [f32]; ROWS]>,
    /// In the layout of [`Scratch`].
    keys: &'a [f32],
    values: &'a [f32],
    /// `[ROWS, keys]`, keys of whole vectors.
    scores: &'a mut [f32],
    /// `[ROWS, dim]`, dim of whole vectors.
    out: &'a mut [f32],
}

impl Op for RowGroup<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        match L::WIDE {
            2 => self.run_wide::<L, 2>(lanes),
            _ => self.run_wide::<L, 1>(lanes),
        }
    }
}

/// Returns the sixteen values from value `at` on.
#[inline(always)]
fn sixteen(x: &[f32], at: usize) -> &[f32; LANES] {
    x[at..].first_chunk().expect("sixteen of them")
}

#[inline(always)]
fn sixteen_mut(x: &mut [f32], at: usize) -> &mut [f32; LANES] {
    x[at..].first_chunk_mut().expect("sixteen of them")
}

impl RowGroup<'_> {
    /// Runs with `W` vectors side by side.
    #[inline(always)]
    fn run_wide<L: Lanes, const W: usize>(&mut self, lanes: L) {
        let (dim, padded) = (self.dim, self.scores.len() / ROWS);
        for block in (0..padded / LANES).step_by(W) {
            let keys = &self.keys[block * LANES * dim..][..W * LANES * dim];
            let mut sums = [[lanes.splat(0.0); W]; ROWS];
            for i in 0..dim {
                let keys: [L::Floats; W] =
                    std::array::from_fn(|w| lanes.load(sixteen(keys, (w * dim + i) * LANES)));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let query = lanes.splat(self.queries[row * dim + i]);
                    sums.iter_mut().zip(keys).for_each(|(sum, key)| *sum = lanes.mul_add(query, key, *sum));
                }
            }
            for (row, sums) in sums.into_iter().enumerate() {
                for (w, sum) in sums.into_iter().enumerate() {
                    lanes.store(sum, sixteen_mut(self.scores, row * padded + (block + w) * LANES));
                }
            }
        }
        self.add_biases();
        let mut parts = [0.0; ROWS];
        let rows = self.scores.chunks_exact_mut(padded).zip(&self.seen).zip(&mut parts);
        for ((scores, seen), part) in rows {
            scores[..seen.start].fill(f32::NEG_INFINITY);
            scores[seen.end..].fill(f32::NEG_INFINITY);
            *part = 1.0 / weigh(lanes, scores);
        }
        let wide = self.out.len() / ROWS;
        for group in (0..wide).step_by(W * LANES) {
            let mut sums = [[lanes.splat(0.0); W]; ROWS];
            for key in 0..self.values.len() / wide {
                let values: [L::Floats; W] =
                    std::array::from_fn(|w| lanes.load(sixteen(self.values, key * wide + group + w * LANES)));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let weight = lanes.splat(self.scores[row * padded + key]);
                    sums.iter_mut().zip(values).for_each(|(sum, x)| *sum = lanes.mul_add(weight, x, *sum));
                }
            }
            for (row, sums) in sums.into_iter().enumerate() {
                for (w, sum) in sums.into_iter().enumerate() {
                    let result = lanes.mul(sum, lanes.splat(parts[row]));
                    lanes.store(result, sixteen_mut(self.out, row * wide + group + w * LANES));
                }
            }
        }
    }

    /// Adds the biases to the scores, which are in units of log2 e.
    #[inline(always)]
    fn add_biases(&mut self) {
        let Some(biases) = &self.biases else { return };
        let padded = self.scores.len() / ROWS;
        for (scores, biases) in self.scores.chunks_exact_mut(padded).zip(biases) {
            scores.iter_mut().zip(*biases).for_each(|(score, x)| *score += x * std::f32::consts::LOG2_E);
        }
    }

    /// Evaluates the equation.
    fn run_scalar(mut self) {
        let (dim, padded, wide) = (self.dim, self.scores.len() / ROWS, self.out.len() / ROWS);
        for (row, scores) in self.scores.chunks_exact_mut(padded).enumerate() {
            let query = &self.queries[row * dim..][..dim];
            for (key, score) in scores.iter_mut().enumerate().take(self.values.len() / wide) {
                let block = &self.keys[key / LANES * LANES * dim..][..LANES * dim];
                *score = query.iter().enumerate().map(|(i, q)| q * block[i * LANES + key % LANES]).sum();
            }
        }
        self.add_biases();
        for (row, scores) in self.scores.chunks_exact_mut(padded).enumerate() {
            let seen = self.seen[row].clone();
            let scores = &mut scores[seen.clone()];
            let max = scores.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
            scores.iter_mut().for_each(|x| *x = (*x - max).exp2());
            let sum: f32 = scores.iter().sum();
            let out = &mut self.out[row * wide..][..dim];
            out.fill(0.0);
            let values = self.values.chunks_exact(wide).skip(seen.start);
            for (weight, values) in scores.iter().zip(values) {
                out.iter_mut().zip(values).for_each(|(out, x)| *out += weight / sum * x);
            }
        }
    }
}

/// Replaces all by `2^(x - max)`, and returns their sum.
#[inline(always)]
fn weigh<L: Lanes>(lanes: L, scores: &mut [f32]) -> f32 {
    let mut max = lanes.splat(f32::NEG_INFINITY);
    for at in (0..scores.len()).step_by(LANES) {
        max = lanes.max(max, lanes.load(sixteen(scores, at)));
    }
    let max = lanes.splat(lanes.largest(max));
    let mut sum = lanes.splat(0.0);
    for at in (0..scores.len()).step_by(LANES) {
        let scores = sixteen_mut(scores, at);
        let weights = exp2(lanes, lanes.sub(lanes.load(scores), max));
        sum = lanes.add(sum, weights);
        lanes.store(weights, scores);
    }
    lanes.sum(sum)
}

#[cfg(test)]
mod tests {
    use kvant_backend::Heads;
    use kvant_codec::random::Random;

    use super::*;
    use crate::simd::isa::Isa;

    /// Evaluates the equation in f64, value by value.
    fn reference(Window { rows, params, bias }: Window<'_>, [q, k, v]: [&[f32]; 3]) -> Vec<f64> {
        let BidirectionalParams { heads, n_kv_heads, scale, reach } = params;
        let width = heads.n * heads.dim;
        let mut out = vec![0.0; rows * width];
        for (row, head) in (0..rows).flat_map(|row| (0..heads.n).map(move |head| (row, head))) {
            let at = |row: usize| row * width + head * heads.dim;
            let kv_head = head / (heads.n / n_kv_heads);
            let kv_at = |row: usize| (row * n_kv_heads + kv_head) * heads.dim;
            let sees = |key: usize| reach.is_none_or(|reach| key.abs_diff(row) <= reach);
            let dot = |key: usize| -> f64 {
                if !sees(key) {
                    return f64::NEG_INFINITY;
                }
                let pairs = q[at(row)..][..heads.dim].iter().zip(&k[kv_at(key)..][..heads.dim]);
                let dot = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * f64::from(scale);
                let distance = |bias: Bias<'_>| head * (2 * bias.longest - 1) + key + bias.longest - 1 - row;
                dot + bias.map_or(0.0, |bias| f64::from(bias.values[distance(bias)]))
            };
            let scores: Vec<f64> = (0..rows).map(dot).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for i in 0..heads.dim {
                let values =
                    weights.iter().enumerate().map(|(key, w)| w / sum * f64::from(v[kv_at(key) + i]));
                out[at(row) + i] = values.sum();
            }
        }
        out
    }

    /// Sums of up to 100 products of numbers of order 1 in f32, and their exponentials: a few units
    /// of 1e-6.
    #[test]
    fn every_set_agrees_with_the_equation() {
        let mut random = Random::new(3);
        for (rows, n, n_kv, dim) in
            [(1, 1, 1, 1), (5, 2, 2, 16), (17, 3, 1, 20), (33, 1, 1, 64), (64, 4, 2, 72), (100, 1, 1, 33)]
        {
            let mut values = |n: usize| {
                let mut values = vec![0.0; n];
                random.fill_gaussian(&mut values, 2.0);
                values
            };
            let [q, k, v] = [n, n_kv, n_kv].map(|n| values(rows * n * dim));
            // Other windows may be longer.
            let longest = rows + 3;
            let biases = values(n * (2 * longest - 1));
            let scale = 1.0 / (dim as f32).sqrt();
            for reach in [None, Some(0), Some(7), Some(40), Some(usize::MAX)] {
                let params = BidirectionalParams { heads: Heads { n, dim }, n_kv_heads: n_kv, scale, reach };
                for bias in [None, Some(Bias { values: &biases, longest })] {
                    check(Window { rows, params, bias }, [&q, &k, &v]);
                }
            }
        }
    }

    fn check(window: Window<'_>, qkv: [&[f32]; 3]) {
        let (rows, params) = (window.rows, window.params);
        let want = reference(window, qkv);
        for isa in Isa::available() {
            let run = |n_threads| {
                let mut out = vec![f32::NAN; qkv[0].len()];
                let pool = Pool::new(n_threads).unwrap();
                let context = KernelContext { isa, pool: &pool, scratch: &mut Scratch::default() };
                attend_bidirectional(context, window, qkv, &mut out);
                out
            };
            let got = run(1);
            assert_eq!(got, run(3), "{isa:?}");
            for (got, want) in got.iter().zip(&want) {
                let off = (f64::from(*got) - want).abs();
                assert!(off < 2e-5, "{isa:?}, {rows} rows, {params:?}: {got}, {want}");
            }
        }
    }
}
