//! Sensitivity of a layer's attention output to noise in keys, values and queries.
//!
//! With weights p of a query i over tokens t and o = sum p v, an error e of value t changes the
//! output by `p e`, and an error d of the score by `p (v - o) d`. So an error of the value counts
//! `p^2`, one of the score `p^2 |v - o|^2`, the latter measured as the output matrix reads it.
//! Tokens without attention weight, and queries whose tokens have equal values, count little.

use super::statistics::SINK;

/// Stride of sampled queries: the weights are means over thousands of them.
const EVERY: usize = 4;

/// Keys and values of one head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    /// `[tokens, k_head_dim]`
    pub k: &'a [f32],
    /// `[tokens, v_head_dim]`
    pub v: &'a [f32],
}

/// One KV head of a layer, as its queries read it.
pub(super) struct KvHead<'a> {
    pub k_head_dim: usize,
    pub v_head_dim: usize,
    /// Factor on scores.
    pub scale: f32,
    /// Soft cap of scores.
    pub soft_cap: Option<f32>,
    /// Window of a query in tokens, itself included.
    pub window: Option<usize>,
    /// Position of the first row.
    pub first: usize,
    pub rows: Rows<'a>,
    /// Squared column norms of the output matrix for each dimension of a value `[v_head_dim]`.
    pub w: &'a [f64],
}

/// Weights of errors, by token of a piece.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Weights {
    /// Of scores with the key.
    pub k: Vec<f64>,
    /// Of the value.
    pub v: Vec<f64>,
}

impl Weights {
    pub fn new(tokens: usize) -> Self {
        Self { k: vec![0.0; tokens], v: vec![0.0; tokens] }
    }
}

/// A KV head's rows, transposed so that all tokens are processed together.
pub(super) struct TransposedRows<'a> {
    head: &'a KvHead<'a>,
    /// `[k_head_dim, tokens]`
    k: Vec<f32>,
    /// As the output matrix reads them, `[v_head_dim, tokens]`.
    v: Vec<f32>,
    /// Their squared norms, `[tokens]`.
    norms: Vec<f32>,
}

impl<'a> TransposedRows<'a> {
    pub fn new(head: &'a KvHead<'a>) -> Self {
        let n = head.rows.k.len() / head.k_head_dim;
        let transposed = |x: &[f32], dim: usize, by: &dyn Fn(usize) -> f32| -> Vec<f32> {
            (0..dim)
                .flat_map(|d| x.iter().skip(d).step_by(dim).map(move |x| (d, x)))
                .map(|(d, x)| x * by(d))
                .collect()
        };
        let k = transposed(head.rows.k, head.k_head_dim, &|_| head.scale);
        let v = transposed(head.rows.v, head.v_head_dim, &|d| head.w[d].sqrt() as f32);
        let mut norms = vec![0.0; n];
        for v in v.chunks_exact(n) {
            norms.iter_mut().zip(v).for_each(|(sum, v)| *sum += v * v);
        }
        Self { head, k, v, norms }
    }

    /// Adds the attention weights of queries `[rows, k_head_dim]` of one head, the first at
    /// position `first`; passes to `visit` the sampled rows with the weight of errors in their
    /// scores.
    pub fn attend<'q>(
        &self,
        queries: impl Iterator<Item = &'q [f32]>,
        first: usize,
        weights: &mut Weights,
        mut visit: impl FnMut(&'q [f32], f64),
    ) {
        let mut p = Vec::new();
        let mut apart = Vec::new();
        for (i, q) in queries.enumerate().skip(EVERY - 1).step_by(EVERY) {
            let end = first + i + 1;
            let start = self.head.window.map_or(0, |window| end.saturating_sub(window)).max(self.head.first);
            if start >= end {
                // The cached window no longer covers this query: a window is shorter than a step.
                continue;
            }
            let rows = start - self.head.first..end - self.head.first;
            self.probabilities(q, rows.clone(), &mut p);
            self.distances(&p, rows, &mut apart);
            let mut total = 0.0;
            for (position, (&p, &apart)) in (start..end).zip(p.iter().zip(&apart)) {
                let square = f64::from(p).powi(2);
                let of_score = square * f64::from(apart.max(0.0));
                weights.v[position] += square;
                weights.k[position] += of_score;
                // The sink stays in 16 bits.
                total += if position < SINK { 0.0 } else { of_score };
            }
            visit(q, total);
        }
    }

    /// Computes the attention weights of a query over `rows`.
    fn probabilities(&self, q: &[f32], rows: std::ops::Range<usize>, p: &mut Vec<f32>) {
        p.clear();
        p.resize(rows.len(), 0.0);
        for (q, k) in q.iter().zip(self.k.chunks_exact(self.norms.len())) {
            p.iter_mut().zip(&k[rows.clone()]).for_each(|(sum, k)| *sum += q * k);
        }
        if let Some(cap) = self.head.soft_cap {
            p.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh());
        }
        let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        p.iter_mut().for_each(|s| *s = (*s - max).exp());
        let sum: f32 = p.iter().sum();
        p.iter_mut().for_each(|s| *s /= sum);
    }

    /// Computes the squared distance of each value in `rows` from their mean weighted by `p`.
    fn distances(&self, p: &[f32], rows: std::ops::Range<usize>, apart: &mut Vec<f32>) {
        apart.clear();
        apart.extend_from_slice(&self.norms[rows.clone()]);
        for v in self.v.chunks_exact(self.norms.len()) {
            let v = &v[rows.clone()];
            let mut parts = [0.0; 8];
            for (p, v) in p.chunks(8).zip(v.chunks(8)) {
                parts.iter_mut().zip(p).zip(v).for_each(|((sum, p), v)| *sum += p * v);
            }
            let mean = parts.iter().sum::<f32>();
            apart.iter_mut().zip(v).for_each(|(apart, v)| *apart += mean * (mean - 2.0 * v));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the weights with finite differences of the output.
    #[test]
    fn attention_weights_match_finite_differences() {
        let (dim, n) = (2, SINK + 4);
        let wave = |i: usize| ((i * 7 % 11) as f32 - 5.0) / 4.0;
        let k: Vec<f32> = (0..dim * n).map(wave).collect();
        let v: Vec<f32> = (0..dim * n).map(|i| wave(i + 3)).collect();
        let queries: Vec<f32> = (0..dim * n).map(|i| wave(i + 5)).collect();
        let w = [4.0, 0.25];
        for window in [None, Some(7)] {
            let head = KvHead {
                k_head_dim: dim,
                v_head_dim: dim,
                scale: 0.5,
                soft_cap: Some(3.0),
                window,
                first: 0,
                rows: Rows { k: &k, v: &v },
                w: &w,
            };
            // The output of query i, when the score of token t is off by `of_score` and its value
            // by `of_value` in its first dimension.
            let out = |i: usize, t: usize, of_score: f64, of_value: f64| -> [f64; 2] {
                let start = window.map_or(0, |window| (i + 1).saturating_sub(window));
                let score = |j: usize| {
                    let s: f64 = (0..dim).map(|d| f64::from(queries[dim * i + d] * k[dim * j + d])).sum();
                    3.0 * (0.5 * s / 3.0).tanh() + if j == t { of_score } else { 0.0 }
                };
                let total: f64 = (start..=i).map(|j| score(j).exp()).sum();
                std::array::from_fn(|d| {
                    let value =
                        |j: usize| f64::from(v[dim * j + d]) + if j == t && d == 0 { of_value } else { 0.0 };
                    w[d].sqrt() * (start..=i).map(|j| score(j).exp() / total * value(j)).sum::<f64>()
                })
            };
            let moved = |i, t, of_score, of_value| {
                let (a, b) = (out(i, t, of_score, of_value), out(i, t, -of_score, -of_value));
                a.iter().zip(b).map(|(a, b)| ((a - b) / 2e-4).powi(2)).sum::<f64>()
            };
            let mut weights = Weights::new(n);
            let mut totals = Vec::new();
            TransposedRows::new(&head)
                .attend(queries.chunks_exact(dim), 0, &mut weights, |_, total| totals.push(total));
            let sampled: Vec<_> = (EVERY - 1..n).step_by(EVERY).collect();
            assert_eq!(totals.len(), sampled.len());
            for t in 0..n {
                let sum = |of: &dyn Fn(usize) -> f64| -> f64 {
                    sampled
                        .iter()
                        .filter(|&&i| i >= t && window.is_none_or(|window| i < t + window))
                        .map(|&i| of(i))
                        .sum()
                };
                let of_score = sum(&|i| moved(i, t, 1e-4, 0.0));
                let of_value = sum(&|i| moved(i, t, 0.0, 1e-4)) / w[0];
                assert!((weights.k[t] - of_score).abs() < 1e-4, "{t}: {} {of_score}", weights.k[t]);
                assert!((weights.v[t] - of_value).abs() < 1e-4, "{t}: {} {of_value}", weights.v[t]);
            }
            let behind: f64 = weights.k[SINK..].iter().sum();
            assert!((totals.iter().sum::<f64>() - behind).abs() < 1e-9, "{totals:?} {behind}");
        }
    }
}
