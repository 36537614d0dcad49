//! Statistics of queries, keys and values from a model's weights alone, without a calibration text.
//!
//! The input of attention is normalized: its dimensions have unit variance, times the gain `g` of
//! the norm. So the mean square of dimension i of a key, around its bias, is `K_i = sum_j (W_k[i,
//! j] g_j)^2`, and that of a query `Q_i = sum_j (W_q[i, j] g_j)^2 + b_i^2`; with QK-norm, both are
//! the squares of that norm's gains. RoPE rotates two dimensions into each other, so both have the
//! mean of the two. Values get no factors: rows of W_v and columns of W_o of real models are so
//! even that factors would leave 0.88 to 1.00 of the noise
//! (docs/benchmarks/2026-11-27-channel-scales.md).
//!
//! Sums over many columns hardly change when some are omitted: some columns of each row are enough.

use std::sync::Arc;

use kvant_gguf::{Gguf, TensorView};
use kvant_kv::{ChannelScales, KvLayerShape, LayerScales, WeightStatistics, balance_factors};

use crate::family::{OutputGates, QkNorm};
use crate::weights::decode_vector;
use crate::{Config, LayerSpec, LayerState, ModelError};

/// Maximum share of the quantization noise that factors must leave to be used. Its prediction from
/// weights alone is off by some percent: SmolLM2's heads have 0.94 to 1, and using all their
/// factors costs it a tenth of its quality; Qwen2.5's and Gemma 3's have 0.1 to 0.8.
const MAX_LEFT: f64 = 0.75;

/// Maximum columns per span.
const SPAN: usize = 256;
/// Number of sampled spans of a key row; query rows have more.
const SPANS_OF_KEYS: usize = 2;
const SPANS_OF_QUERIES: usize = 1;
/// Tokens whose mean is the centre of a block of keys, and tokens of the block.
const CENTRE: usize = 32;
const BLOCK: usize = 128;

impl Config {
    /// Computes the statistics of each KV layer from the weights in `gguf`.
    ///
    /// # Errors
    ///
    /// A tensor of attention that is missing, of another shape or not finite.
    pub fn weight_statistics(&self, gguf: &Gguf) -> Result<WeightStatistics, ModelError> {
        let (mut balances, mut score_noise) = (ChannelScales::default(), Vec::new());
        for (index, spec) in self.layers.iter().enumerate() {
            if spec.state != LayerState::Own {
                continue;
            }
            let (balance, noise) = match spec.heads.shared_kv {
                false => Moments::of(gguf, self, index)?.balance(spec),
                // After the per-head projections of MLA, all dimensions of the latent vector count
                // alike; and those of a normalized key as values as well.
                true => (LayerScales::identity(&spec.heads), vec![0.0; spec.heads.n_kv_heads]),
            };
            balances.layers.push(balance);
            score_noise.push(noise);
        }
        Ok(WeightStatistics { channel_scales: Arc::new(balances), score_noise })
    }

    /// Returns the squared columns of the attention output matrix of layer `index`, summed over the
    /// query heads that share a KV head, `[n_kv_heads * v_head_dim]`.
    ///
    /// # Errors
    ///
    /// A matrix that is missing, or whose rows cannot be read.
    pub fn output_columns(&self, gguf: &Gguf, index: usize) -> Result<Vec<f64>, ModelError> {
        let spec = &self.layers[index];
        let tensor = gguf.tensor(&format!("blk.{}.attn_output.weight", self.loops.in_file(index)))?;
        let (n_in, dtype) = (spec.n_out(), tensor.info.dtype);
        let (dim, ratio) = (spec.heads.v_head_dim, spec.heads.gqa_ratio());
        let row_bytes = dtype.row_bytes(n_in).map_err(|error| wrong_type(&tensor, &error))?;
        let (mut sums, mut row) = (vec![0.0; spec.n_v()], vec![0.0; n_in]);
        for bytes in tensor.bytes.chunks_exact(row_bytes) {
            kvant_codec::decode(dtype, bytes, &mut row).map_err(|error| wrong_type(&tensor, &error))?;
            for (head, columns) in row.chunks_exact(dim).enumerate() {
                let sums = &mut sums[head / ratio * dim..][..dim];
                sums.iter_mut().zip(columns).for_each(|(sum, &x)| *sum += f64::from(x).powi(2));
            }
        }
        Ok(sums)
    }
}

/// Mean squares of a layer's projections of unit-variance rows, by KV head.
struct Moments {
    /// Of queries, summed over those that share a KV head, and of keys around their bias,
    /// `[n_kv_heads * k_head_dim]`.
    q: Vec<f64>,
    k: Vec<f64>,
    /// Part of the keys' bias that remains after subtracting a block's centre, `[n_kv_heads *
    /// k_head_dim]`.
    bias: Vec<f64>,
}

impl Moments {
    fn of(gguf: &Gguf, config: &Config, index: usize) -> Result<Self, ModelError> {
        let spec = &config.layers[index];
        let index = config.loops.in_file(index);
        let (gains, gates) = (gains(gguf, config, index)?, config.family.gates);
        let layer = Layer { gguf, spec, index, gains, gates };
        let KvLayerShape { n_heads, k_head_dim, .. } = spec.heads;
        let [q_rows, k_rows] = layer.entering(config.n_embd)?;
        let [q_bias, k_bias] =
            [("attn_q.bias", 0..spec.n_q()), ("attn_k.bias", spec.n_q()..spec.n_q() + spec.n_k())]
                .map(|(name, rows)| layer.bias(name, rows));
        let q_bias = layer.with_norm_bias(q_bias?, &q_rows, |dim| layer.q_row(dim), spec.n_q())?;
        let k_bias = layer.with_norm_bias(k_bias?, &k_rows, |dim| dim, spec.n_k())?;
        let mut q = layer.normed("attn_q_norm.weight", spec.n_q())?;
        if q.is_empty() {
            q = (0..spec.n_q())
                .map(|row| layer.row_square(&q_rows, layer.q_row(row), SPANS_OF_QUERIES))
                .collect::<Result<_, _>>()?;
            q.iter_mut().zip(&q_bias).for_each(|(q, b)| *q += b * b);
        }
        let mut k = layer.normed("attn_k_norm.weight", spec.n_k())?;
        let is_normed = !k.is_empty();
        if !is_normed {
            k = (0..spec.n_k())
                .map(|row| layer.row_square(&k_rows, row, SPANS_OF_KEYS))
                .collect::<Result<_, _>>()?;
        }
        let mut bias: Vec<f64> = k_bias.iter().map(|b| if is_normed { 0.0 } else { b * b }).collect();
        bias.resize(spec.n_k(), 0.0);
        let ratio = spec.heads.gqa_ratio();
        let mut shared = vec![0.0; spec.n_k()];
        for (head, squares) in q.chunks_exact(k_head_dim).enumerate().take(n_heads) {
            shared[head / ratio * k_head_dim..].iter_mut().zip(squares).for_each(|(q, square)| *q += square);
        }
        let mut moments = Self { q: shared, k, bias };
        moments.average_rope_pairs(config, spec);
        Ok(moments)
    }

    /// Averages both dimensions of each RoPE pair, and subtracts from the bias what the centre of a
    /// block removes.
    fn average_rope_pairs(&mut self, config: &Config, spec: &LayerSpec) {
        let rope = &config.ropes[spec.rope];
        let norms_after_rope = spec.norms.heads == QkNorm::QkNormAfterRope;
        let heads = (0..spec.heads.n_kv_heads).map(|head| head * spec.heads.k_head_dim);
        for (i, &frequency) in rope.frequencies(config.n_ctx_train).iter().enumerate() {
            let left_of_bias = residual_after_centre(frequency);
            for first in heads.clone() {
                let [x, y] = rope.params.pair(i).map(|dim| first + dim);
                if !norms_after_rope {
                    for squares in [&mut self.q, &mut self.k] {
                        let mean = (squares[x] + squares[y]) / 2.0;
                        (squares[x], squares[y]) = (mean, mean);
                    }
                }
                let left = (self.bias[x] + self.bias[y]) / 2.0 * left_of_bias;
                (self.bias[x], self.bias[y]) = (left, left);
            }
        }
        // Dimensions without RoPE are the same for all tokens: the centre removes their bias.
        for first in heads {
            self.bias[first + rope.params.n_rot..first + spec.heads.k_head_dim].fill(0.0);
        }
    }

    /// Returns the factors of the layer, and the variance of each KV head's scores if the code lost
    /// the keys completely.
    fn balance(&self, spec: &LayerSpec) -> (LayerScales, Vec<f64>) {
        let KvLayerShape { n_kv_heads, k_head_dim, .. } = spec.heads;
        let heads = self.q.chunks_exact(k_head_dim).zip(self.k.chunks_exact(k_head_dim));
        let k_scale: Vec<f32> = heads.flat_map(|(read, stored)| factors(read, stored)).collect();
        let noise = |head: usize| {
            let dims = head * k_head_dim..(head + 1) * k_head_dim;
            let (mut stored, mut read) = (0.0, 0.0);
            for dim in dims {
                let square = f64::from(k_scale[dim]).powi(2);
                stored += square * (self.k[dim] + self.bias[dim]);
                read += self.q[dim] / square;
            }
            let queries = spec.heads.gqa_ratio().max(1) as f64;
            f64::from(spec.scale).powi(2) * stored * read / queries / k_head_dim as f64
        };
        let noise = (0..n_kv_heads).map(noise).collect();
        (LayerScales { k_scale, ..LayerScales::identity(&spec.heads) }, noise)
    }
}

/// Returns the factors of a head, or 1 for each dimension if their gain is below the error of the
/// prediction.
fn factors(read: &[f64], stored: &[f64]) -> Vec<f32> {
    let sum = |values: &[f64]| values.iter().sum::<f64>();
    let best: f64 = read.iter().zip(stored).map(|(read, stored)| (read * stored).sqrt()).sum();
    let is_worth_it = best * best < MAX_LEFT * sum(read) * sum(stored);
    if is_worth_it { balance_factors(read, stored) } else { vec![1.0; read.len()] }
}

/// Returns the share of the squared vector, rotating by `frequency` per token, that remains over
/// the block after subtracting the mean of its first tokens.
fn residual_after_centre(frequency: f64) -> f64 {
    // A geometric sum of n rotations.
    let mean = |n: usize| {
        let (n, half) = (n as f64, frequency / 2.0);
        let length = if half.sin() == 0.0 { 1.0 } else { (n * half).sin() / (n * half.sin()) };
        let angle = (n - 1.0) * half;
        [length * angle.cos(), length * angle.sin()]
    };
    let ([a, b], [c, d]) = (mean(CENTRE), mean(BLOCK));
    1.0 + a * a + b * b - 2.0 * (a * c + b * d)
}

/// Returns the squared gains of the norm before attention, `[n_embd]`.
fn gains(gguf: &Gguf, config: &Config, index: usize) -> Result<Vec<f64>, ModelError> {
    let name = format!("blk.{index}.attn_norm.weight");
    match config.layers[index].norms.before && gguf.find_info(&name).is_some() {
        true => squares(&gguf.tensor(&name)?, config.n_embd),
        false => Ok(vec![1.0; config.n_embd]),
    }
}

fn squares(tensor: &TensorView<'_>, len: usize) -> Result<Vec<f64>, ModelError> {
    Ok(decode_vector(tensor, len)?.into_iter().map(|x| f64::from(x).powi(2)).collect())
}

/// Location of rows in a matrix.
struct RowsIn<'a> {
    tensor: TensorView<'a>,
    first: usize,
    n_in: usize,
}

impl RowsIn<'_> {
    /// Returns the bytes of a row.
    fn bytes(&self, row: usize) -> Result<&[u8], ModelError> {
        let Self { tensor, first, n_in } = self;
        let row = first + row;
        let row_bytes = tensor.info.dtype.row_bytes(*n_in).map_err(|error| wrong_type(tensor, &error))?;
        tensor.bytes.get(row * row_bytes..(row + 1) * row_bytes).ok_or_else(|| ModelError::TensorShape {
            name: tensor.info.name.clone(),
            expected: vec![*n_in, row + 1],
            got: tensor.info.shape.clone(),
        })
    }
}

/// A layer in its file.
struct Layer<'a> {
    gguf: &'a Gguf,
    spec: &'a LayerSpec,
    index: usize,
    /// Squared gains, `[n_embd]`.
    gains: Vec<f64>,
    gates: OutputGates,
}

impl<'a> Layer<'a> {
    fn name(&self, suffix: &str) -> String {
        format!("blk.{}.{suffix}", self.index)
    }

    /// Returns the rows of queries and of keys.
    fn entering(&self, n_in: usize) -> Result<[RowsIn<'a>; 2], ModelError> {
        let is_fused = self.gguf.find_info(&self.name("attn_q.weight")).is_none();
        let rows = |name: &str, first: usize| -> Result<_, ModelError> {
            let (name, first) = if is_fused { ("attn_qkv.weight", first) } else { (name, 0) };
            Ok(RowsIn { tensor: self.gguf.tensor(&self.name(name))?, first, n_in })
        };
        Ok([rows("attn_q.weight", 0)?, rows("attn_k.weight", self.spec.n_q())?])
    }

    /// Returns the row of the query matrix for a dimension: each head's query rows may be followed
    /// by as many gate rows.
    fn q_row(&self, dim: usize) -> usize {
        let n = self.spec.heads.k_head_dim;
        if self.gates == OutputGates::InQueries { dim / n * 2 * n + dim % n } else { dim }
    }

    /// Returns the square of a row times the gains, from some of its spans.
    fn row_square(&self, rows: &RowsIn<'_>, row: usize, max_spans: usize) -> Result<f64, ModelError> {
        let RowsIn { ref tensor, first, n_in } = *rows;
        let dtype = tensor.info.dtype;
        let span = span_of(n_in, dtype.block_len());
        let spans = n_in / span;
        let bytes = rows.bytes(row)?;
        let (row, row_bytes) = (first + row, bytes.len());
        let (mut sum, mut values) = (0.0, vec![0.0; span]);
        let n = max_spans.min(spans);
        for i in 0..n {
            let at = (row + i * spans / n) % spans;
            let bytes = &bytes[at * (row_bytes / spans)..(at + 1) * (row_bytes / spans)];
            kvant_codec::decode(dtype, bytes, &mut values).map_err(|error| wrong_type(tensor, &error))?;
            sum += weighted_square(&values, &self.gains[at * span..][..span]);
        }
        Ok(sum * spans as f64 / n as f64)
    }

    /// Returns the squared gains of QK-norm for each of `len` dimensions of a row; empty without
    /// QK-norm.
    fn normed(&self, suffix: &str, len: usize) -> Result<Vec<f64>, ModelError> {
        let name = self.name(suffix);
        let width = self.spec.norms.heads.width(self.spec.heads.k_head_dim, len);
        let Some(width) = width.filter(|_| self.gguf.find_info(&name).is_some()) else {
            return Ok(Vec::new());
        };
        let gains = squares(&self.gguf.tensor(&name)?, width)?;
        Ok(gains.iter().copied().cycle().take(len).collect())
    }

    /// Returns `bias` with what the bias of the norm before attention adds to `n` projections, if
    /// it has one.
    fn with_norm_bias(
        &self,
        mut bias: Vec<f64>,
        rows: &RowsIn<'_>,
        row_of: impl Fn(usize) -> usize,
        n: usize,
    ) -> Result<Vec<f64>, ModelError> {
        let name = self.name("attn_norm.bias");
        if self.gguf.find_info(&name).is_none() {
            return Ok(bias);
        }
        let norm_bias = decode_vector(&self.gguf.tensor(&name)?, rows.n_in)?;
        let mut values = vec![0.0; rows.n_in];
        bias.resize(n, 0.0);
        for (dim, bias) in bias.iter_mut().enumerate() {
            kvant_codec::decode(rows.tensor.info.dtype, rows.bytes(row_of(dim))?, &mut values)
                .map_err(|error| wrong_type(&rows.tensor, &error))?;
            let terms = values.iter().zip(&norm_bias).map(|(&x, &c)| f64::from(x) * f64::from(c));
            *bias += terms.sum::<f64>();
        }
        Ok(bias)
    }

    /// Returns a bias, if present.
    fn bias(&self, suffix: &str, rows: std::ops::Range<usize>) -> Result<Vec<f64>, ModelError> {
        let (own, fused) = (self.name(suffix), self.name("attn_qkv.bias"));
        let total = self.spec.n_q() + self.spec.n_k() + self.spec.n_v();
        let values = if self.gguf.find_info(&own).is_some() {
            decode_vector(&self.gguf.tensor(&own)?, rows.len())?
        } else if self.gguf.find_info(&fused).is_some() {
            decode_vector(&self.gguf.tensor(&fused)?, total)?[rows].to_vec()
        } else {
            Vec::new()
        };
        Ok(values.into_iter().map(f64::from).collect())
    }
}

/// Returns the weighted sum of squares, in independent accumulators.
fn weighted_square(values: &[f32], gains: &[f64]) -> f64 {
    let mut lanes = [0.0; 8];
    for (values, gains) in values.chunks(lanes.len()).zip(gains.chunks(lanes.len())) {
        for (lane, (&x, gain)) in lanes.iter_mut().zip(values.iter().zip(gains)) {
            *lane += f64::from(x).powi(2) * gain;
        }
    }
    lanes.iter().sum()
}

/// Returns the columns of a span: whole blocks that divide a row.
fn span_of(n_in: usize, block_len: usize) -> usize {
    (1..=SPAN / block_len.max(1))
        .rev()
        .map(|n| n * block_len)
        .find(|span| n_in.is_multiple_of(*span))
        .unwrap_or(n_in)
}

fn wrong_type(tensor: &TensorView<'_>, error: &kvant_codec::CodecError) -> ModelError {
    let expected = "rows of whole blocks".to_owned();
    ModelError::Value { key: tensor.info.name.clone(), expected, got: error.to_string() }
}

#[cfg(test)]
mod tests {
    use kvant_codec::DType;
    use kvant_codec::random::Random;
    use kvant_gguf::GgufWriter;

    use super::*;

    const N_EMBD: usize = 32;
    const HEADS: usize = 4;
    const KV_HEADS: usize = 2;
    const DIM: usize = 8;

    type Tensors = Vec<(&'static str, Vec<usize>, Vec<f32>)>;

    /// Creates one layer with two query heads per KV head, whose queries are long in the first and
    /// the fifth dimension, a RoPE pair.
    fn tensors(q_gain: f32) -> Tensors {
        let mut random = Random::new(7);
        let mut matrix = |rows: usize, cols: usize, gain: &dyn Fn(usize) -> f32| {
            let mut values = vec![0.0; rows * cols];
            random.fill_gaussian(&mut values, 1.0);
            values
                .chunks_exact_mut(cols)
                .enumerate()
                .for_each(|(row, values)| values.iter_mut().for_each(|x| *x *= gain(row)));
            values
        };
        let in_pair = move |row: usize| if row.is_multiple_of(DIM / 2) { q_gain } else { 1.0 };
        let gains = (0..N_EMBD).map(|i| 0.5 + i as f32 / 32.0).collect();
        vec![
            ("blk.0.attn_norm.weight", vec![N_EMBD], gains),
            ("blk.0.attn_q.weight", vec![N_EMBD, HEADS * DIM], matrix(HEADS * DIM, N_EMBD, &in_pair)),
            ("blk.0.attn_k.weight", vec![N_EMBD, KV_HEADS * DIM], matrix(KV_HEADS * DIM, N_EMBD, &|_| 1.0)),
            ("blk.0.attn_v.weight", vec![N_EMBD, KV_HEADS * DIM], matrix(KV_HEADS * DIM, N_EMBD, &|_| 1.0)),
            ("blk.0.attn_output.weight", vec![HEADS * DIM, N_EMBD], matrix(N_EMBD, HEADS * DIM, &|_| 1.0)),
        ]
    }

    fn gguf(tensors: &Tensors) -> Gguf {
        let mut writer = GgufWriter::new();
        writer.set("general.architecture", "qwen2").unwrap();
        for (key, value) in [
            ("block_count", 1),
            ("context_length", 64),
            ("embedding_length", N_EMBD as u32),
            ("feed_forward_length", 48),
            ("attention.head_count", HEADS as u32),
            ("attention.head_count_kv", KV_HEADS as u32),
        ] {
            writer.set(&format!("qwen2.{key}"), value).unwrap();
        }
        writer.set("qwen2.attention.layer_norm_rms_epsilon", 1e-5_f32).unwrap();
        for (name, shape, _) in tensors {
            writer.add_tensor(name, shape, DType::F32).unwrap();
        }
        let mut bytes = Vec::new();
        let of = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let write = |sink: &mut kvant_gguf::TensorSink<'_>| {
            tensors.iter().try_for_each(|(name, _, values)| sink.bytes(name, &of(values)))
        };
        writer.write_to(&mut bytes, write).unwrap();
        Gguf::from_bytes(bytes).unwrap()
    }

    fn statistics(tensors: &Tensors) -> WeightStatistics {
        let gguf = gguf(tensors);
        Config::from_gguf(&gguf).unwrap().weight_statistics(&gguf).unwrap()
    }

    #[test]
    fn factors_are_those_of_all_rows_and_columns() {
        let tensors = tensors(12.0);
        let found = statistics(&tensors);
        let layer = &found.channel_scales.layers[0];
        let gains = &tensors[0].2;
        let row = |which: usize, row: usize| -> f64 {
            let values = &tensors[which].2[row * N_EMBD..(row + 1) * N_EMBD];
            values.iter().zip(gains).map(|(x, g)| f64::from(x * g).powi(2)).sum()
        };
        let mut want = Vec::new();
        for head in 0..KV_HEADS {
            let pair = |of: &dyn Fn(usize) -> f64, dim: usize| (of(dim) + of((dim + DIM / 2) % DIM)) / 2.0;
            let q = |dim: usize| (0..2).map(|i| row(1, (2 * head + i) * DIM + dim)).sum::<f64>();
            let k = |dim: usize| row(2, head * DIM + dim);
            let ratios: Vec<f64> = (0..DIM).map(|dim| (pair(&q, dim) / pair(&k, dim)).powf(0.25)).collect();
            let mean = (ratios.iter().map(|x| x.ln()).sum::<f64>() / DIM as f64).exp();
            want.extend(ratios.into_iter().map(|x| x / mean));
        }
        for (got, want) in layer.k_scale.iter().zip(&want) {
            assert!((f64::from(*got) / want - 1.0).abs() < 1e-4, "{:?} {want:?}", layer.k_scale);
        }
        assert!(layer.k_scale[0] > 2.0 && layer.k_scale[0] == layer.k_scale[DIM / 2]);
        // Values whose dimensions count alike are unscaled.
        assert_eq!(layer.v_scale, [1.0; KV_HEADS * DIM]);
    }

    #[test]
    fn even_heads_have_no_factors() {
        assert!(statistics(&tensors(1.0)).channel_scales.is_none());
    }

    #[test]
    fn a_fused_matrix_gives_the_same_statistics() {
        let apart = tensors(12.0);
        let fused: Vec<f32> = apart[1..4].iter().flat_map(|(_, _, values)| values.clone()).collect();
        let rows = (HEADS + 2 * KV_HEADS) * DIM;
        let together =
            vec![apart[0].clone(), ("blk.0.attn_qkv.weight", vec![N_EMBD, rows], fused), apart[4].clone()];
        assert_eq!(statistics(&together), statistics(&apart));
    }

    #[test]
    fn only_rotating_key_biases_add_noise() {
        let noise = |dim: usize| {
            let mut bias = vec![0.0; KV_HEADS * DIM];
            bias[dim] = 300.0;
            let mut tensors = tensors(12.0);
            tensors.push(("blk.0.attn_k.bias", vec![KV_HEADS * DIM], bias));
            statistics(&tensors).score_noise[0].clone()
        };
        let plain = statistics(&tensors(12.0)).score_noise[0].clone();
        // The first pair rotates by one per token, the last one by a thousandth.
        let (fast, slow) = (noise(0), noise(DIM / 2 - 1));
        assert!(fast[0] > 100.0 * plain[0] && fast[1] == plain[1], "{fast:?} {plain:?}");
        assert!(slow[0] < 2.0 * plain[0], "{slow:?} {plain:?}");
        assert!(residual_after_centre(0.0).abs() < 1e-12 && (residual_after_centre(1.0) - 1.0).abs() < 0.1);
    }

    #[test]
    fn a_span_is_whole_blocks_that_divide_a_row() {
        for (n_in, block_len, span) in
            [(1536, 256, 256), (896, 32, 224), (896, 1, 224), (576, 32, 192), (40, 32, 40), (64, 256, 64)]
        {
            assert_eq!(span_of(n_in, block_len), span, "{n_in} {block_len}");
        }
    }
}
