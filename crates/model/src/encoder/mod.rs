//! Encoders of texts: bidirectional transformers whose hidden states are pooled into one vector,
//! or scored by a head (BERT, arXiv 1810.04805; MPNet, arXiv 2004.09297; Nomic, arXiv 2402.01613).
//!
//! ```text
//! x = norm(E[token] + T[type] + P[position])
//! x = norm(x + W_o attention(W_q x, W_k x, W_v x))
//! x = norm(x + W_down a(W_up x))
//! ```
//!
//! Every product has a bias, and so has every norm (LayerNorm). With a gate, the feed-forward layer
//! is `W_down (a(W_gate x) * (W_up x))`.
//!
//! Texts of a batch are the windows of bidirectional attention: there is no padding, and a text's
//! result does not depend on the others. Products run on a device, the operations between them on
//! the host.

mod config;
mod relative;
mod weights;

use std::sync::Arc;

use kvant_backend::{Backend, BackendError, Gate, Heads, Matrix, Pairing, RopeParams, limits};
use kvant_codec::DType;
use kvant_gguf::Gguf;

pub use config::{EncoderConfig, Positions};

use crate::ModelError;
use crate::host_ops::{activate, for_rows};
use crate::linear::{all_rows, upload};
use weights::{Layer, Norm, Weights};

/// An encoder on a device.
pub struct Encoder<B: Backend> {
    device: Arc<B>,
    config: EncoderConfig,
    weights: Weights<B>,
}

/// A text to encode.
#[derive(Debug, Clone, Copy)]
pub struct EncoderText<'a> {
    /// Its tokens, at least one.
    pub tokens: &'a [u32],
    /// Tokens of the first segment (type 0); those after it are of the second (type 1).
    pub n_first: usize,
}

/// Buffers of a batch.
struct Batch<B: Backend> {
    /// Tokens of each text, and of all of them.
    texts: Vec<usize>,
    n: usize,
    /// The residual stream, `[n, n_embd]`, on the device and on the host.
    x: B::Buffer,
    x_on_host: Vec<f32>,
    /// Queries, keys and values, `[n, n_embd]` each.
    qkv: [B::Buffer; 3],
    /// Output of attention, `[n, n_embd]`.
    attn_out: B::Buffer,
    /// `[n, n_ff]`, and as much for a gate.
    hidden: B::Buffer,
    gates: Option<B::Buffer>,
    hidden_on_host: Vec<f32>,
    /// Relative position biases, `[n_heads, 2 longest - 1]`.
    bias: Option<B::Buffer>,
    /// Cosines and sines of RoPE, `[n, head_dim / 2, 2]`.
    angles: Option<B::Buffer>,
}

impl<B: Backend> Encoder<B> {
    /// Loads the encoder of a file onto a device, with its matrices as `dtype` if it is given.
    ///
    /// # Errors
    /// A file of another kind, tensors that are missing, unknown or of wrong shapes, or a device
    /// without memory.
    pub fn load(gguf: &Gguf, dtype: Option<DType>, device: Arc<B>) -> Result<Self, ModelError> {
        let config = EncoderConfig::from_gguf(gguf)?;
        let weights = Weights::load(gguf, &config, dtype, &*device)?;
        Ok(Self { device, config, weights })
    }

    /// Returns the hyper-parameters.
    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }

    /// Returns the number of tokens of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.weights.tokens.n_out()
    }

    /// Returns the bytes of the weights.
    pub fn weight_bytes(&self) -> usize {
        self.weights.n_bytes
    }

    /// Whether the model has a head that scores.
    pub fn has_classifier(&self) -> bool {
        self.weights.classifier.is_some()
    }

    /// Returns the hidden states of the tokens of all texts, text after text, `[tokens, n_embd]`.
    ///
    /// # Errors
    /// A text without tokens or with more than the model has positions, a token beyond the
    /// vocabulary, or a failure of the device.
    pub fn hidden_states(&self, texts: &[EncoderText<'_>]) -> Result<Vec<f32>, ModelError> {
        let c = &self.config;
        for text in texts {
            let n = text.tokens.len();
            if n == 0 || n > c.n_ctx {
                let (key, expected) = ("tokens of a text".to_owned(), format!("1 to {}", c.n_ctx));
                return Err(ModelError::Value { key, expected, got: n.to_string() });
            }
            if let Some(&token) = text.tokens.iter().find(|&&token| token as usize >= self.n_vocab()) {
                return Err(ModelError::Token { token, n_vocab: self.n_vocab() });
            }
        }
        let work = &mut self.embed(texts)?;
        for layer in &self.weights.layers {
            self.attention(layer, work)?;
            self.feed_forward(layer, work)?;
        }
        Ok(std::mem::take(&mut work.x_on_host))
    }

    /// Returns the score of a text by the hidden state `[n_embd]` of its first token: the logit of
    /// the model's head.
    ///
    /// # Errors
    /// A model without a head, or a failure of the device.
    pub fn score(&self, state: &[f32]) -> Result<f32, ModelError> {
        let Some(classifier) = &self.weights.classifier else {
            return Err(ModelError::Unsupported {
                what: "scores of a model without 'cls.output'".to_owned(),
            });
        };
        let mut state = state.to_vec();
        if let Some(dense) = &classifier.dense {
            state = dense.forward(&*self.device, &state)?;
            state.iter_mut().for_each(|x| *x = x.tanh());
        }
        Ok(classifier.output.forward(&*self.device, &state)?[0])
    }

    /// Sums the embeddings of tokens, segments and positions, and normalizes the sums.
    fn embed(&self, texts: &[EncoderText<'_>]) -> Result<Batch<B>, ModelError> {
        let (c, device, w) = (&self.config, &*self.device, &self.weights);
        let lengths: Vec<usize> = texts.iter().map(|text| text.tokens.len()).collect();
        let n: usize = lengths.iter().sum();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let buffer = |columns: usize| device.buffer(n * columns);
        let is_gated = matches!(c.positions, Positions::Rotary { .. });
        let mut work = Batch {
            n,
            x: buffer(c.n_embd)?,
            x_on_host: vec![0.0; n * c.n_embd],
            qkv: [buffer(c.n_embd)?, buffer(c.n_embd)?, buffer(c.n_embd)?],
            attn_out: buffer(c.n_embd)?,
            hidden: buffer(c.n_ff)?,
            gates: if is_gated { Some(buffer(c.n_ff)?) } else { None },
            hidden_on_host: vec![0.0; n * c.n_ff],
            bias: None,
            angles: None,
            texts: lengths,
        };
        match c.positions {
            Positions::Learned => {}
            Positions::LearnedAndRelative { .. } => {
                work.bias = Some(upload(device, &relative::biases(&w.relative, c.n_heads, longest))?);
            }
            Positions::Rotary { base } => {
                work.angles = Some(upload(device, &angles(&work.texts, c.head_dim(), base))?);
            }
        }
        let tokens: Vec<u32> = texts.iter().flat_map(|text| text.tokens).copied().collect();
        device.embed(&w.tokens, &tokens, 1.0, &mut work.x)?;
        device.read(&work.x, 0, &mut work.x_on_host)?;
        let mut rows = work.x_on_host.chunks_exact_mut(c.n_embd);
        for text in texts {
            for (at, row) in rows.by_ref().take(text.tokens.len()).enumerate() {
                // A model of one segment has no second type.
                let kind = usize::from(at >= text.n_first);
                let kind = table_row(&w.types, c.n_embd, kind).or(table_row(&w.types, c.n_embd, 0));
                for more in [kind, table_row(&w.positions, c.n_embd, at)].into_iter().flatten() {
                    row.iter_mut().zip(more).for_each(|(x, y)| *x += y);
                }
            }
        }
        self.normalize(&w.embedding_norm, &mut work.x_on_host);
        device.write(&mut work.x, &work.x_on_host)?;
        Ok(work)
    }

    /// Replaces rows by `norm(x)`, with sums in f64.
    fn normalize(&self, norm: &Norm, rows: &mut [f32]) {
        let (n, eps) = (self.config.n_embd, f64::from(self.config.eps));
        for_rows(rows, n, limits::n_cores(), |row| {
            let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / n as f64;
            let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n as f64;
            let factor = 1.0 / (variance + eps).sqrt();
            for ((x, weight), bias) in row.iter_mut().zip(&norm.weight).zip(&norm.bias) {
                *x = ((f64::from(*x) - mean) * factor) as f32 * weight + bias;
            }
        });
    }

    /// Replaces the residual stream by `norm(x)`.
    fn normalize_stream(&self, norm: &Norm, work: &mut Batch<B>) -> Result<(), BackendError> {
        self.device.read(&work.x, 0, &mut work.x_on_host)?;
        self.normalize(norm, &mut work.x_on_host);
        self.device.write(&mut work.x, &work.x_on_host)
    }

    fn attention(&self, layer: &Layer<B>, work: &mut Batch<B>) -> Result<(), BackendError> {
        let (c, device, n) = (&self.config, &*self.device, work.n);
        let ([w_q, w_k, w_v], [q, k, v]) = (&layer.qkv, &mut work.qkv);
        let outputs = &mut [w_q.output(q, false), w_k.output(k, false), w_v.output(v, false)];
        device.project(all_rows(&work.x, n), outputs)?;
        let heads = Heads { n: c.n_heads, dim: c.head_dim() };
        if let Some(angles) = &work.angles {
            let params = RopeParams { pairing: Pairing::Halves, n_rot: c.head_dim() };
            for x in &mut work.qkv[..2] {
                device.rope(x, n, heads, None, params, angles)?;
            }
        }
        let scale = 1.0 / (c.head_dim() as f32).sqrt();
        let (bias, qkv) = (work.bias.as_ref(), work.qkv.each_ref());
        device.attend_bidirectional(&work.texts, heads, scale, bias, qkv, &mut work.attn_out)?;
        device.project(all_rows(&work.attn_out, n), &mut [layer.out.output(&mut work.x, true)])?;
        self.normalize_stream(&layer.attn_norm, work)
    }

    fn feed_forward(&self, layer: &Layer<B>, work: &mut Batch<B>) -> Result<(), BackendError> {
        let (c, device, n) = (&self.config, &*self.device, work.n);
        let (input, up) = (all_rows(&work.x, n), layer.up.output(&mut work.hidden, false));
        let activated = match (&layer.gate, &mut work.gates) {
            (Some(gate), Some(gates)) => {
                device.project(input, &mut [up, gate.output(gates, false)])?;
                gates
            }
            _ => {
                device.project(input, &mut [up])?;
                &mut work.hidden
            }
        };
        device.read(activated, 0, &mut work.hidden_on_host)?;
        for_rows(&mut work.hidden_on_host, c.n_ff, limits::n_cores(), |row| activate(row, c.activation));
        device.write(activated, &work.hidden_on_host)?;
        if let Some(gates) = &work.gates {
            device.gate(&mut work.hidden, n * c.n_ff, gates, Gate::Plain)?;
        }
        device.project(all_rows(&work.hidden, n), &mut [layer.down.output(&mut work.x, true)])?;
        self.normalize_stream(&layer.ffn_norm, work)
    }
}

/// Returns a row of a table `[rows, n]`, if it has that row.
fn table_row(table: &[f32], n: usize, row: usize) -> Option<&[f32]> {
    table.get(row * n..(row + 1) * n)
}

/// Returns the cosines and sines of the positions of texts of these lengths, in f32 as models are
/// trained.
fn angles(texts: &[usize], head_dim: usize, base: f32) -> Vec<f32> {
    let frequency = |pair: usize| 1.0 / base.powf((2 * pair) as f32 / head_dim as f32);
    let frequencies: Vec<f32> = (0..head_dim / 2).map(frequency).collect();
    let mut angles = Vec::with_capacity(texts.iter().sum::<usize>() * head_dim);
    for position in texts.iter().flat_map(|&n| 0..n) {
        for frequency in &frequencies {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            angles.extend([cos, sin]);
        }
    }
    angles
}
