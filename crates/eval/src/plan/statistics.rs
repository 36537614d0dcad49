//! How large queries, keys and values of a model are, dim by dim, over a text.

use kvant::{Config, DType, KvLayerShape, KvOptions, Model, Policies};
use kvant_codec::Side;

use super::moments::{Moments, Pair, pairs};
use super::pieces::Pieces;
use crate::{EvalError, OnProgress, walk};

/// The first tokens, which look like no others: they are left out, and stay in 16 bit.
pub(super) const SINK: usize = 16;
/// Keys are coded in pages of so many tokens, around the mean of the first of them.
const PAGE: usize = 128;
const CENTRE: usize = 32;

/// What was seen of a model's queries, keys and values, by KV layer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Statistics {
    pub layers: Vec<LayerStatistics>,
}

/// What was seen of one KV layer. Sums over tokens are divided by their number.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LayerStatistics {
    pub shape: KvLayerShape,
    /// Mean squares of the queries after RoPE, summed over those that share a KV head, `[n_kv_heads * k_head_dim]`: wherever
    /// the text stands.
    pub q: Vec<f64>,
    /// Mean squares of what the centre of their page leaves of the keys after RoPE, `[n_kv_heads * k_head_dim]`.
    pub k: Vec<f64>,
    /// Means of the values, `[n_kv_heads * v_head_dim]`.
    pub v_mean: Vec<f64>,
    /// Their variances, `[n_kv_heads * v_head_dim]`.
    pub v: Vec<f64>,
    /// How strongly the output matrix reads each dim of a value: squares of its columns, summed over the query heads that share
    /// a KV head, `[n_kv_heads * v_head_dim]`.
    pub w: Vec<f64>,
}

impl Statistics {
    /// Reads `pieces` and gathers what there is to see, as it would be wherever they stood within `reach` tokens. `progress` is
    /// told the pieces read.
    ///
    /// # Errors
    /// An output matrix that cannot be read, an engine error.
    pub fn gather(
        model: &Model,
        pieces: &Pieces,
        reach: usize,
        progress: OnProgress<'_>,
    ) -> Result<Self, EvalError> {
        let config = model.config();
        let mut sums = first_layers(config)
            .into_iter()
            .map(|(shape, pairs)| Sums::new(shape, pairs))
            .collect::<Vec<_>>();
        for (index, piece) in pieces.iter().enumerate() {
            read(model, piece, &mut sums)?;
            progress(&pieces.done(index + 1));
        }
        let mut layers: Vec<_> =
            sums.into_iter().map(|sums| sums.finish(reach.saturating_sub(pieces.longest()))).collect();
        for (index, layer) in config.layers.iter().enumerate() {
            // Recurrent layers keep none.
            let Some(kv) = config.kv_ordinal(0, index) else { continue };
            add_columns(model, index, layer.n_out(), &mut layers[kv])?;
        }
        Ok(Self { layers })
    }
}

/// The shape of each KV layer, and what the layer that makes its keys turns of them.
fn first_layers(config: &Config) -> Vec<(KvLayerShape, Vec<Pair>)> {
    let mut first = Vec::new();
    for (index, layer) in config.layers.iter().enumerate() {
        if config.kv_ordinal(0, index) == Some(first.len()) {
            let rope = &config.ropes[layer.rope];
            first.push((layer.heads, pairs(rope.params, rope.frequencies())));
        }
    }
    first
}

/// Reads one piece with an f16 cache.
fn read(model: &Model, piece: &[u32], sums: &mut [Sums]) -> Result<(), EvalError> {
    let f16 = KvOptions { policies: Policies::none(), ..KvOptions::symmetric(DType::F16) };
    let mut session = walk::session(model, &f16, piece.len())?;
    let mut left = piece;
    while !left.is_empty() {
        let (step, rest) = left.split_at(session.most_tokens().min(left.len()));
        let first = piece.len() - left.len();
        session.feed_observed(step, &mut |layer, q| sums[layer].add_queries(first, q))?;
        for (layer, sums) in sums.iter_mut().enumerate() {
            for head in 0..sums.shape.n_kv_heads {
                let KvLayerShape { k_head_dim, v_head_dim, .. } = sums.shape;
                let k = session.kv_rows(layer, head, Side::K)?;
                sums.add_keys(head, first, last(&k, step.len() * k_head_dim));
                let v = session.kv_rows(layer, head, Side::V)?;
                sums.add_values(head, first, last(&v, step.len() * v_head_dim));
            }
            sums.n += (first..first + step.len()).filter(|&position| position >= SINK).count() as f64;
        }
        left = rest;
    }
    Ok(())
}

/// The last `n` values, or as many as a window has left.
fn last(values: &[f32], n: usize) -> &[f32] {
    &values[values.len().saturating_sub(n)..]
}

/// What is summed up of a KV layer.
struct Sums {
    shape: KvLayerShape,
    /// Tokens that count.
    n: f64,
    q: Moments,
    k: Moments,
    v: Vec<f64>,
    v_squares: Vec<f64>,
}

impl Sums {
    fn new(shape: KvLayerShape, pairs: Vec<Pair>) -> Self {
        let KvLayerShape { n_kv_heads, k_head_dim, v_head_dim, .. } = shape;
        let (k, v) = (Moments::new(pairs, n_kv_heads, k_head_dim), vec![0.0; n_kv_heads * v_head_dim]);
        Self { shape, n: 0.0, q: k.clone(), k, v: v.clone(), v_squares: v }
    }

    /// Queries `[rows, n_heads * k_head_dim]`, the first of them at position `first`.
    fn add_queries(&mut self, first: usize, q: &[f32]) {
        let (dim, ratio) = (self.shape.k_head_dim, self.shape.gqa_ratio());
        let rows = q.chunks_exact(self.shape.n_heads * dim).zip(first..);
        for (row, _) in rows.filter(|(_, position)| *position >= SINK) {
            for (head, q) in row.chunks_exact(dim).enumerate() {
                self.q.add(head / ratio, &q.iter().map(|&q| f64::from(q)).collect::<Vec<_>>());
            }
        }
    }

    /// Keys of one head `[rows, k_head_dim]`, page by page.
    fn add_keys(&mut self, head: usize, first: usize, k: &[f32]) {
        let dim = self.shape.k_head_dim;
        for (page, k) in k.chunks(PAGE * dim).enumerate() {
            let (start, n) = (first + page * PAGE, k.len() / dim);
            let counted = SINK.saturating_sub(start).min(n)..n;
            let row = |row: usize| k[row * dim..][..dim].iter().map(|&k| f64::from(k));
            let first = counted.clone().take(CENTRE);
            let mut centre = vec![0.0; dim];
            let by = 1.0 / first.len().max(1) as f64;
            first.for_each(|i| centre.iter_mut().zip(row(i)).for_each(|(sum, k)| *sum += by * k));
            for i in counted {
                self.k.add(head, &row(i).zip(&centre).map(|(k, centre)| k - centre).collect::<Vec<_>>());
            }
        }
    }

    /// Values of one head `[rows, v_head_dim]`.
    fn add_values(&mut self, head: usize, first: usize, v: &[f32]) {
        let dim = self.shape.v_head_dim;
        let rows = v.chunks_exact(dim).zip(first..);
        for (row, _) in rows.filter(|(_, position)| *position >= SINK) {
            for (d, v) in row.iter().enumerate() {
                self.v[head * dim + d] += f64::from(*v);
                self.v_squares[head * dim + d] += f64::from(*v).powi(2);
            }
        }
    }

    /// What was seen, as it would be up to `reach` tokens later in a text.
    fn finish(self, reach: usize) -> LayerStatistics {
        let n = self.n.max(1.0);
        let mean = |sums: &[f64]| sums.iter().map(|sum| sum / n).collect::<Vec<_>>();
        let (v_mean, squares) = (mean(&self.v), mean(&self.v_squares));
        let variances = squares.iter().zip(&v_mean).map(|(square, mean)| (square - mean * mean).max(0.0));
        let (v, w) = (variances.collect(), vec![0.0; v_mean.len()]);
        LayerStatistics {
            shape: self.shape,
            q: mean(&self.q.turned(reach)),
            k: mean(&self.k.turned(reach)),
            v_mean,
            v,
            w,
        }
    }
}

/// Adds the squares of the columns of the output matrix of model layer `index`, `[n_embd, n_out]`.
fn add_columns(
    model: &Model,
    index: usize,
    n_out: usize,
    layer: &mut LayerStatistics,
) -> Result<(), EvalError> {
    let name = format!("blk.{index}.attn_output.weight");
    let tensor = model.gguf().tensor(&name).map_err(kvant::Error::from)?;
    let row_bytes = tensor.info.dtype.row_bytes(n_out).map_err(kvant::Error::from)?;
    let (dim, ratio) = (layer.shape.v_head_dim, layer.shape.gqa_ratio());
    let mut row = vec![0.0; n_out];
    for bytes in tensor.bytes.chunks_exact(row_bytes) {
        kvant_codec::decode(tensor.info.dtype, bytes, &mut row).map_err(kvant::Error::from)?;
        for (head, w) in row.chunks_exact(dim).enumerate() {
            let sums = &mut layer.w[head / ratio * dim..][..dim];
            sums.iter_mut().zip(w).for_each(|(sum, w)| *sum += f64::from(*w).powi(2));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> KvLayerShape {
        KvLayerShape { n_heads: 2, n_kv_heads: 1, k_head_dim: 4, v_head_dim: 2, window: None }
    }

    fn sums() -> Sums {
        Sums::new(shape(), Vec::new())
    }

    #[test]
    fn keys_count_around_the_centre_of_their_page_and_the_sink_does_not_count() {
        let mut sums = sums();
        // A page of 10 and one of 20, each give or take 1; the first 16 tokens are far off. In the second dim the page moves on by
        // one once its centre is known.
        let row = |i: usize| {
            let wave = if i.is_multiple_of(2) { 1.0 } else { -1.0 };
            let far = if i < SINK { 99.0 } else { 0.0 };
            let moved = if i % PAGE >= SINK + CENTRE { 1.0 } else { 0.0 };
            [if i < PAGE { 10.0 } else { 20.0 } + wave + far, moved, 0.5, 0.0]
        };
        let keys: Vec<f32> = (0..2 * PAGE).flat_map(row).collect();
        sums.add_keys(0, 0, &keys);
        let n = (2 * PAGE - SINK) as f64;
        sums.n = n;
        let k = sums.finish(0).k;
        let moved = 2 * (PAGE - SINK - CENTRE);
        assert!((k[0] - 1.0).abs() < 1e-12 && (k[1] * n - moved as f64).abs() < 1e-9, "{k:?}");
        assert_eq!(k[2..], [0.0; 2]);
    }

    #[test]
    fn queries_of_a_group_add_up_and_values_have_a_mean() {
        let mut sums = sums();
        sums.add_queries(SINK - 1, &[[9.0; 8], [1.0, 2.0, 0.0, 0.0, 3.0, 0.0, 0.0, 1.0]].concat());
        sums.add_values(0, SINK - 1, &[9.0, 9.0, 1.0, 5.0]);
        sums.add_values(0, SINK, &[3.0, 5.0]);
        sums.n = 2.0;
        let layer = sums.finish(0);
        assert_eq!(layer.q, [5.0, 2.0, 0.0, 0.5]);
        assert_eq!((layer.v_mean, layer.v), (vec![2.0, 5.0], vec![1.0, 0.0]));
    }
}
