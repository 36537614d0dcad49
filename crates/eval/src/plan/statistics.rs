//! Magnitudes of a model's queries, keys and values, per dimension, over a text.

use kvant::{Config, DType, KvLayerShape, KvOptions, Measure, Model, Policies, Session};
use kvant_codec::Side;

use super::attention::{KvHead, Rows, TransposedRows, Weights};
use super::moments::{Moments, Pair, pairs};
use super::text_splits::CalibrationPieces;
use crate::chunk_eval;
use crate::error::EvalError;
use crate::progress::OnProgress;

/// The attention sink: the first tokens, which are unlike all others, are excluded from statistics
/// and stay in 16 bits.
pub(super) const SINK: usize = 16;
/// Keys are coded in pages of this many tokens, around the mean of the first of them.
const PAGE: usize = 128;
const CENTRE: usize = 32;

/// Statistics of a model's queries, keys and values, by KV layer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Statistics {
    pub layers: Vec<LayerStatistics>,
}

/// Statistics of one KV layer. Sums over tokens are divided by their number.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LayerStatistics {
    pub shape: KvLayerShape,
    /// Mean squares of the queries after RoPE, summed over those that share a KV head,
    /// `[n_kv_heads * k_head_dim]`, averaged over positions. If values are a prefix of their keys,
    /// these dimensions include the readers of the values, both as the effect of an error on the
    /// output.
    pub q: Vec<f64>,
    /// Mean squares of the keys after RoPE less the centre of their page,
    /// `[n_kv_heads * k_head_dim]`.
    pub k: Vec<f64>,
    /// Means of the values, `[n_kv_heads * v_head_dim]`.
    pub v_mean: Vec<f64>,
    /// Their variances, `[n_kv_heads * v_head_dim]`.
    pub v: Vec<f64>,
    /// Weight of each dimension of a value in the output matrix: squares of its columns, summed
    /// over the query heads that share a KV head, `[n_kv_heads * v_head_dim]`.
    pub w: Vec<f64>,
}

impl Statistics {
    /// Prefills `pieces` and gathers statistics, averaged over text positions within `reach`
    /// tokens. Passes the finished pieces to `progress`.
    ///
    /// # Errors
    ///
    /// An output matrix that cannot be read, an engine error.
    pub fn gather(
        model: &Model,
        pieces: &CalibrationPieces,
        reach: usize,
        progress: OnProgress<'_>,
    ) -> Result<Self, EvalError> {
        let mut sums = first_layers(model.config(), reach);
        for (index, layer) in model.config().layers.iter().enumerate() {
            // Recurrent layers store no K and V.
            let Some(kv) = model.config().kv_ordinal(0, index) else { continue };
            match layer.heads.shared_kv {
                false => {
                    let columns = model.config().output_columns(model.gguf(), index);
                    let columns = columns.map_err(kvant::Error::from)?;
                    sums[kv].w.iter_mut().zip(columns).for_each(|(sum, column)| *sum += column);
                }
                // After the per-head projections of MLA, all dimensions of the latent vector count
                // alike; so do those of a key that every head reads as its value.
                true => sums[kv].w.fill(1.0),
            }
        }
        for (index, piece) in pieces.iter().enumerate() {
            read(model, piece, &mut sums)?;
            progress(&pieces.done(index + 1));
        }
        let further = reach.saturating_sub(pieces.longest());
        Ok(Self { layers: sums.into_iter().map(|sums| sums.finish(further)).collect() })
    }
}

/// Returns empty sums for each KV layer, as the layer that stores it attends to it in a context of
/// `n_ctx` tokens.
fn first_layers(config: &Config, n_ctx: usize) -> Vec<Sums> {
    let mut first = Vec::new();
    for (index, layer) in config.layers.iter().enumerate() {
        if config.kv_ordinal(0, index) == Some(first.len()) {
            let rope = &config.ropes[layer.rope];
            // After the latent vector (MLA).
            let turned = layer.latent.map_or(0, |latent| latent.rank);
            first.push(Sums::new(
                layer.heads,
                pairs(rope.params, turned, rope.frequencies(n_ctx)),
                layer.scale,
                layer.soft_cap,
            ));
        }
    }
    first
}

/// Prefills one piece with an f16 cache.
fn read(model: &Model, piece: &[u32], sums: &mut [Sums]) -> Result<(), EvalError> {
    let f16 = KvOptions { policies: Policies::none(), ..KvOptions::symmetric(DType::F16) };
    let mut session = chunk_eval::session(model, &f16, piece.len())?;
    let mut weights: Vec<Vec<_>> =
        sums.iter().map(|sums| vec![Weights::new(piece.len()); sums.shape.n_kv_heads]).collect();
    let rows = |session: &Session, layer, head| -> Result<_, EvalError> {
        Ok([session.kv_rows(layer, head, Side::K)?, session.kv_rows(layer, head, Side::V)?])
    };
    let mut left = piece;
    while !left.is_empty() {
        let (step, rest) = left.split_at(session.max_tokens().min(left.len()));
        let first = piece.len() - left.len();
        let mut queries = vec![Vec::new(); sums.len()];
        session.feed_observed(step, &mut |layer, q| queries[layer].push(q.to_vec()))?;
        for (layer, (sums, weights)) in sums.iter_mut().zip(&mut weights).enumerate() {
            for (head, weights) in weights.iter_mut().enumerate() {
                let [k, v] = rows(&session, layer, head)?;
                let positions = (first, first + step.len());
                sums.add_attention(head, positions, &queries[layer], Rows { k: &k, v: &v }, weights);
            }
        }
        left = rest;
    }
    for (layer, (sums, weights)) in sums.iter_mut().zip(&weights).enumerate() {
        for (head, weights) in weights.iter().enumerate() {
            let [k, v] = rows(&session, layer, head)?;
            sums.add_keys(head, &k, weights);
            sums.add_values(head, &v, weights);
        }
        sums.n += piece.len() as f64;
    }
    Ok(())
}

/// Sums of a KV layer.
struct Sums {
    shape: KvLayerShape,
    /// Factor on scores.
    scale: f32,
    soft_cap: Option<f32>,
    /// See [`LayerStatistics::w`].
    w: Vec<f64>,
    /// Queries, weighted by the effect of errors in their scores.
    q: Moments,
    /// Keys, likewise, and the sum of weights by head.
    k: Moments,
    k_weight: Vec<f64>,
    /// Values and their squares, weighted by the effect of their errors, and the sum of weights by
    /// head.
    v: Vec<f64>,
    v_squares: Vec<f64>,
    v_weight: Vec<f64>,
    /// Tokens prefilled.
    n: f64,
}

impl Sums {
    fn new(shape: KvLayerShape, pairs: Vec<Pair>, scale: f32, soft_cap: Option<f32>) -> Self {
        let KvLayerShape { n_kv_heads, k_head_dim, v_head_dim, .. } = shape;
        let (k, v) = (Moments::new(pairs, n_kv_heads, k_head_dim), vec![0.0; n_kv_heads * v_head_dim]);
        let weight = vec![0.0; n_kv_heads];
        Self {
            shape,
            scale,
            soft_cap,
            w: v.clone(),
            q: k.clone(),
            k,
            k_weight: weight.clone(),
            v: v.clone(),
            v_squares: v,
            v_weight: weight,
            n: 0.0,
        }
    }

    /// Adds the attention of a step's queries, `[rows, n_heads * k_head_dim]` each, the first row
    /// at position `first`, over one head's keys and values, the last of them at position `end -
    /// 1`.
    fn add_attention(
        &mut self,
        head: usize,
        (first, end): (usize, usize),
        queries: &[Vec<f32>],
        rows: Rows<'_>,
        weights: &mut Weights,
    ) {
        let KvLayerShape { n_heads, k_head_dim, v_head_dim, window, .. } = self.shape;
        let kv_head = KvHead {
            k_head_dim,
            v_head_dim,
            scale: self.scale,
            soft_cap: self.soft_cap,
            window,
            first: end - rows.k.len() / k_head_dim,
            rows,
            w: &self.w[head * v_head_dim..][..v_head_dim],
        };
        let keys = TransposedRows::new(&kv_head);
        let ratio = self.shape.gqa_ratio();
        for queries in queries {
            for of_group in head * ratio..(head + 1) * ratio {
                let of_head = queries
                    .chunks_exact(n_heads * k_head_dim)
                    .map(|row| &row[of_group * k_head_dim..][..k_head_dim]);
                keys.attend(of_head, first, weights, |q, weight| self.q.add(head, weight, q));
            }
        }
    }

    /// Adds the keys of one head `[rows, k_head_dim]` at the end of a piece of `weights.k.len()`
    /// tokens, page by page.
    fn add_keys(&mut self, head: usize, k: &[f32], weights: &Weights) {
        let dim = self.shape.k_head_dim;
        let first = weights.k.len() - k.len() / dim;
        for start in (first.next_multiple_of(PAGE)..weights.k.len()).step_by(PAGE) {
            let counted = start.max(SINK)..(start + PAGE).min(weights.k.len());
            let row = |position: usize| &k[(position - first) * dim..][..dim];
            let first = counted.clone().take(CENTRE);
            let mut centre = vec![0.0; dim];
            let by = 1.0 / first.len().max(1) as f32;
            first.for_each(|i| centre.iter_mut().zip(row(i)).for_each(|(sum, k)| *sum += by * k));
            for i in counted {
                let left: Vec<_> = row(i).iter().zip(&centre).map(|(k, centre)| k - centre).collect();
                self.k.add(head, weights.k[i], &left);
                self.k_weight[head] += weights.k[i];
            }
        }
    }

    /// Adds the values of one head `[rows, v_head_dim]` at the end of a piece of `weights.v.len()`
    /// tokens.
    fn add_values(&mut self, head: usize, v: &[f32], weights: &Weights) {
        let dim = self.shape.v_head_dim;
        let first = weights.v.len() - v.len() / dim;
        let rows = v.chunks_exact(dim).zip(&weights.v[first..]).zip(first..);
        for ((row, &weight), _) in rows.filter(|(_, position)| *position >= SINK) {
            self.v_weight[head] += weight;
            for (d, v) in row.iter().enumerate() {
                self.v[head * dim + d] += weight * f64::from(*v);
                self.v_squares[head * dim + d] += weight * f64::from(*v).powi(2);
            }
        }
    }

    /// Returns the read weight of each dimension of a key, `[n_kv_heads * k_head_dim]`, summed over
    /// tokens.
    fn read(&self, reach: usize) -> Vec<f64> {
        let mut read = self.q.turned(reach);
        let KvLayerShape { k_head_dim, v_head_dim, shared_kv, .. } = self.shape;
        if shared_kv {
            read.iter_mut().for_each(|q| *q *= f64::from(self.scale).powi(2));
            let of_heads = read.chunks_exact_mut(k_head_dim).zip(self.w.chunks_exact(v_head_dim));
            for ((read, w), weight) in of_heads.zip(&self.v_weight) {
                read.iter_mut().zip(w).for_each(|(read, w)| *read += weight * w);
            }
        }
        read
    }

    /// Returns the statistics, averaged over positions up to `reach` tokens later.
    fn finish(self, reach: usize) -> LayerStatistics {
        let n = self.n.max(1.0);
        let mean = |sums: &[f64], weights: &[f64]| -> Vec<f64> {
            let dim = sums.len() / weights.len().max(1);
            let by = weights
                .iter()
                .flat_map(|&weight| std::iter::repeat_n(if weight > 0.0 { 1.0 / weight } else { 0.0 }, dim));
            sums.iter().zip(by).map(|(sum, by)| sum * by).collect()
        };
        let q = self.read(reach).iter().map(|q| q / n).collect();
        let (v_mean, squares) = (mean(&self.v, &self.v_weight), mean(&self.v_squares, &self.v_weight));
        let dim = self.shape.v_head_dim;
        let variances = squares.iter().zip(&v_mean).map(|(square, mean)| (square - mean * mean).max(0.0));
        LayerStatistics {
            shape: self.shape,
            q,
            k: mean(&self.k.turned(reach), &self.k_weight),
            v: variances.enumerate().map(|(i, variance)| variance * self.v_weight[i / dim] / n).collect(),
            v_mean,
            w: self.w,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> KvLayerShape {
        KvLayerShape {
            n_heads: 2,
            n_kv_heads: 1,
            k_head_dim: 4,
            v_head_dim: 2,
            window: None,
            shared_kv: false,
            index: None,
            pool: None,
        }
    }

    fn sums() -> Sums {
        let mut sums = Sums::new(shape(), Vec::new(), 1.0, None);
        sums.w.fill(1.0);
        sums
    }

    #[test]
    fn keys_are_centred_per_page_and_the_sink_is_excluded() {
        let mut sums = sums();
        // A page of 10 and one of 20, each give or take 1; the first 16 tokens are far off. In the
        // second dimension the page moves on by one after its centre is computed.
        let row = |i: usize| {
            let wave = if i.is_multiple_of(2) { 1.0 } else { -1.0 };
            let far = if i < SINK { 99.0 } else { 0.0 };
            let centre_end = if i < PAGE { SINK + CENTRE } else { CENTRE };
            let moved = if i % PAGE >= centre_end { 1.0 } else { 0.0 };
            [if i < PAGE { 10.0 } else { 20.0 } + wave + far, moved, 0.5, 0.0]
        };
        let keys: Vec<f32> = (0..2 * PAGE).flat_map(row).collect();
        let mut weights = Weights::new(2 * PAGE);
        weights.k.fill(0.5);
        sums.add_keys(0, &keys, &weights);
        let n = (2 * PAGE - SINK) as f64;
        let moved = (2 * PAGE - SINK - 2 * CENTRE) as f64;
        let k = sums.finish(0).k;
        assert!((k[0] - 1.0).abs() < 1e-9 && (k[1] * n - moved).abs() < 1e-6, "{k:?}");
        assert_eq!(k[2..], [0.0; 2]);
    }

    #[test]
    fn keys_count_by_their_weight() {
        let mut sums = sums();
        let keys: Vec<f32> = (0..2 * PAGE).flat_map(|i| [(i % 3) as f32 - 1.0, 0.0, 0.0, 0.0]).collect();
        let mut weights = Weights::new(2 * PAGE);
        // Only tokens of one value, 1 above a centre near 0.
        (SINK..2 * PAGE).filter(|i| i % 3 == 2).for_each(|i| weights.k[i] = 2.0);
        sums.add_keys(0, &keys, &weights);
        let k = sums.finish(0).k;
        // A centre of 32 tokens, a number that three does not divide, is off by up to a 32nd.
        assert!((k[0] - 1.0).abs() < 0.07, "{k:?}");
    }

    #[test]
    fn shared_kv_rows_have_two_readers() {
        let shape = KvLayerShape { shared_kv: true, ..shape() };
        let mut sums = Sums::new(shape, Vec::new(), 0.5, None);
        sums.w = vec![3.0, 1.0];
        sums.q.add(0, 2.0, &[2.0, 0.0, 1.0, 0.0]);
        (sums.v_weight[0], sums.n) = (4.0, 2.0);
        let layer = sums.finish(0);
        // Scores: 2 (0.5 q)^2, values: 4 w, of two tokens.
        assert_eq!(layer.q, [(2.0 + 12.0) / 2.0, 4.0 / 2.0, 0.5 / 2.0, 0.0]);
        let balance = layer.balance();
        assert_eq!((balance.k_scale.len(), balance.v_scale.len(), balance.v_centre.len()), (4, 0, 0));
        kvant::ChannelScales { layers: vec![balance] }.check(&kvant::KvShape::uniform(1, shape)).unwrap();
    }

    #[test]
    fn queries_of_a_group_are_summed_and_values_averaged() {
        let mut sums = sums();
        // Two tokens after the sink, with equal attention from all queries: their scores are those
        // of zero keys.
        let n = SINK + 2;
        let (k, mut v) = (vec![0.0; 4 * n], vec![0.0; 2 * n]);
        v[2 * SINK..].copy_from_slice(&[1.0, 5.0, 3.0, 5.0]);
        let mut queries = vec![0.0; 8 * n];
        // The last query of each head is sampled if their number is a multiple of four.
        queries.drain(..8 * (n % 4));
        let last = queries.len() - 8;
        queries[last..].copy_from_slice(&[1.0, 2.0, 0.0, 0.0, 3.0, 0.0, 0.0, 1.0]);
        let mut weights = Weights::new(n);
        sums.add_attention(0, (n % 4, n), &[queries], Rows { k: &k, v: &v }, &mut weights);
        sums.add_values(0, &v, &weights);
        sums.n = 1.0;
        let layer = sums.finish(0);
        // Both heads' last queries count alike, so the sums have the proportions of their squares.
        let by = layer.q[1] / 4.0;
        assert!(
            by > 0.0
                && layer
                    .q
                    .iter()
                    .zip([10.0, 4.0, 0.0, 1.0])
                    .all(|(q, want)| (q - by * want).abs() < 1e-9 * by)
        );
        assert!((layer.v_mean[0] - 2.0).abs() < 0.5 && layer.v_mean[1] == 5.0, "{:?}", layer.v_mean);
        assert!(layer.v[0] > 0.0 && layer.v[1].abs() < 1e-12, "{:?}", layer.v);
    }
}
