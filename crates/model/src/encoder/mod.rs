//! Encoders of texts: bidirectional transformers whose hidden states are pooled into one vector,
//! or scored by a head (BERT, arXiv 1810.04805; MPNet, arXiv 2004.09297; Nomic, arXiv 2402.01613;
//! ModernBERT, arXiv 2412.13663; EmbeddingGemma, arXiv 2509.20354).
//!
//! ```text
//! x = norm(E[token] + T[type] + P[position])
//! x = sum(x + branch(W_o attention(W_q n, W_k n, W_v n))), n = input(x)
//! x = sum(x + branch(W_down a(W_up n))), n = input(x)
//! ```
//!
//! A family has some of the norms `input`, `branch` and `sum` (`family.rs`), and one behind the
//! last layer; BERT has `sum`. Products may have a bias. With a gate, the feed-forward layer is
//! `W_down (a(W_gate n) * (W_up n))`; some layers have experts instead (`experts.rs`).
//!
//! Texts of a batch are the windows of bidirectional attention: there is no padding, and a text's
//! result does not depend on the others. The layers run on a device; the host sums embeddings, and
//! gathers the tokens of experts.

mod config;
mod experts;
mod family;
mod relative;
mod weights;

use std::sync::Arc;

use kvant_backend::host_ops;
use kvant_backend::{
    Backend, BackendError, BidirectionalParams, Buffer, Gate, Heads, Input, Matrix, Pairing, RopeParams,
};
use kvant_codec::DType;
use kvant_gguf::Gguf;

pub use config::{EncoderConfig, EncoderExperts, HeadConfig, Positions};

use crate::ModelError;
use crate::family::NormKind;
use crate::linear::{Linear, all_rows, upload};
use family::{PositionKind, SublayerNorms};
use weights::{FeedForward, Layer, Norm, Weights};

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

/// The residual stream of a batch.
struct Stream<B: Backend> {
    /// Tokens of all texts.
    n: usize,
    /// `[n, n_embd]`
    x: B::Buffer,
    /// The normalized input of a sublayer, and then its output, `[n, n_embd]`.
    branch: B::Buffer,
}

/// Buffers of a batch.
struct Batch<B: Backend> {
    stream: Stream<B>,
    /// Tokens of each text.
    texts: Vec<usize>,
    /// Queries `[n, heads.n * heads.dim]`, and keys and values `[n, n_kv_heads * heads.dim]`.
    qkv: [B::Buffer; 3],
    /// Output of attention, as wide as queries.
    attn_out: B::Buffer,
    /// `[n, n_ff]`, and as much for a gate.
    hidden: B::Buffer,
    gates: Option<B::Buffer>,
    /// Biases by distance, `[heads.n, 2 longest - 1]`.
    bias: Option<B::Buffer>,
    /// Cosines and sines of RoPE, `[n, heads.dim / 2, 2]`, in global and in local layers.
    angles: Option<[B::Buffer; 2]>,
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
        let mut work = self.embed(texts)?;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.attention(index, layer, &mut work)?;
            self.feed_forward(layer, &mut work)?;
        }
        self.normalize_stream(self.weights.output_norm.as_ref(), &mut work.stream)?;
        let mut states = vec![0.0; work.stream.n * c.n_embd];
        self.device.read(&work.stream.x, 0, &mut states)?;
        Ok(states)
    }

    /// Returns the score of a text by the hidden state `[n_embd]` that the head
    /// [reads](HeadConfig): the logit of the head.
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
            host_ops::apply(&mut state, self.config.head.activation);
        }
        if let Some(norm) = &classifier.norm {
            let (x, mut y) = (upload(&*self.device, &state)?, self.device.buffer(state.len())?);
            self.normalize(norm, &x, 1, &mut y)?;
            self.device.read(&y, 0, &mut state)?;
        }
        Ok(classifier.output.forward(&*self.device, &state)?[0])
    }

    /// Whether the model has products behind pooling.
    pub fn projects_pooled(&self) -> bool {
        !self.weights.dense.is_empty()
    }

    /// Computes the products behind pooling of a pooled vector `[n_embd]`.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn project_pooled(&self, pooled: Vec<f32>) -> Result<Vec<f32>, ModelError> {
        let mut dense = self.weights.dense.iter();
        Ok(dense.try_fold(pooled, |x, linear| linear.forward(&*self.device, &x))?)
    }

    /// Sums the embeddings of tokens, segments and positions, and normalizes the sums.
    fn embed(&self, texts: &[EncoderText<'_>]) -> Result<Batch<B>, ModelError> {
        let (c, device, w) = (&self.config, &*self.device, &self.weights);
        let mut work = self.batch(texts)?;
        let stream = &mut work.stream;
        let tokens: Vec<u32> = texts.iter().flat_map(|text| text.tokens).copied().collect();
        let scale = if c.family.scales_embeddings { (c.n_embd as f32).sqrt() } else { 1.0 };
        device.embed(&w.tokens, &tokens, scale, &mut stream.x)?;
        let mut sums = vec![0.0; stream.n * c.n_embd];
        device.read(&stream.x, 0, &mut sums)?;
        let mut rows = sums.chunks_exact_mut(c.n_embd);
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
        device.write(&mut stream.x, &sums)?;
        self.normalize_stream(w.embedding_norm.as_ref(), stream)?;
        Ok(work)
    }

    /// Creates the buffers of a batch, with its biases and angles.
    fn batch(&self, texts: &[EncoderText<'_>]) -> Result<Batch<B>, ModelError> {
        let (c, device) = (&self.config, &*self.device);
        let lengths: Vec<usize> = texts.iter().map(|text| text.tokens.len()).collect();
        let n: usize = lengths.iter().sum();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let buffer = |columns: usize| device.buffer(n * columns);
        let [width, kv_width] = [c.heads.n, c.n_kv_heads].map(|n| n * c.heads.dim);
        let bias = match c.positions {
            Positions::LearnedAndRelative { .. } => {
                Some(relative::biases(&self.weights.relative, c.heads.n, longest))
            }
            Positions::Alibi => Some(relative::linear_biases(c.heads.n, longest)),
            Positions::Learned | Positions::Rotary { .. } => None,
        };
        let angles = match c.positions {
            Positions::Rotary { base, local_base } => {
                let of = |base| upload(device, &angles(&lengths, c.heads.dim, base));
                Some([of(base)?, of(local_base)?])
            }
            _ => None,
        };
        let stream = Stream { n, x: buffer(c.n_embd)?, branch: buffer(c.n_embd)? };
        Ok(Batch {
            stream,
            qkv: [buffer(width)?, buffer(kv_width)?, buffer(kv_width)?],
            attn_out: buffer(width)?,
            hidden: buffer(c.n_ff)?,
            gates: if c.family.is_gated { Some(buffer(c.n_ff)?) } else { None },
            bias: bias.map(|bias| upload(device, &bias)).transpose()?,
            angles,
            texts: lengths,
        })
    }

    /// Computes `y = norm(x)` of the first rows of a buffer, as long as the weight.
    fn normalize(
        &self,
        norm: &Norm<B>,
        x: &B::Buffer,
        rows: usize,
        y: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        let device = &*self.device;
        match self.config.norm() {
            NormKind::Layer => device.layer_norm(x, rows, norm.scaling(), norm.bias.as_ref(), y),
            NormKind::Rms => {
                let dim = norm.weight.n_values();
                device.copy(x, 0, y, 0, rows * dim)?;
                let no_rope = RopeParams { pairing: Pairing::Halves, n_rot: 0 };
                device.rope(y, rows, Heads { n: 1, dim }, Some(norm.scaling()), no_rope, &device.buffer(0)?)
            }
        }
    }

    /// Replaces the residual stream by its norm, if there is one.
    fn normalize_stream(&self, norm: Option<&Norm<B>>, stream: &mut Stream<B>) -> Result<(), BackendError> {
        let Some(norm) = norm else { return Ok(()) };
        self.normalize(norm, &stream.x, stream.n, &mut stream.branch)?;
        std::mem::swap(&mut stream.x, &mut stream.branch);
        Ok(())
    }

    /// Returns the input of a sublayer: the residual stream, or its norm in `branch`.
    fn input<'a>(
        &self,
        norms: &SublayerNorms<Norm<B>>,
        stream: &'a mut Stream<B>,
    ) -> Result<Input<'a, B>, BackendError> {
        let Some(norm) = &norms.input else { return Ok(all_rows(&stream.x, stream.n)) };
        self.normalize(norm, &stream.x, stream.n, &mut stream.branch)?;
        Ok(all_rows(&stream.branch, stream.n))
    }

    /// Adds the output of a sublayer, the product `linear` of `x`, to the residual stream.
    fn add_output(
        &self,
        norms: &SublayerNorms<Norm<B>>,
        linear: &Linear<B>,
        x: &B::Buffer,
        stream: &mut Stream<B>,
    ) -> Result<(), BackendError> {
        let (device, input) = (&*self.device, all_rows(x, stream.n));
        match &norms.branch {
            None => device.project(input, &mut [linear.output(&mut stream.x, true)])?,
            Some(norm) => {
                device.project(input, &mut [linear.output(&mut stream.branch, false)])?;
                device.add_normed(&mut stream.x, &stream.branch, stream.n, norm.scaling())?;
            }
        }
        self.normalize_stream(norms.sum.as_ref(), stream)
    }

    fn attention(&self, index: usize, layer: &Layer<B>, work: &mut Batch<B>) -> Result<(), BackendError> {
        let (c, device) = (&self.config, &*self.device);
        let ([w_q, w_k, w_v], [q, k, v]) = (&layer.qkv, &mut work.qkv);
        let input = self.input(&layer.attn_norms, &mut work.stream)?;
        let outputs = &mut [w_q.output(q, false), w_k.output(k, false), w_v.output(v, false)];
        device.project(input, outputs)?;
        let (n, reach) = (work.stream.n, c.reaches[index]);
        let kv_heads = Heads { n: c.n_kv_heads, ..c.heads };
        for (i, heads) in [c.heads, kv_heads].into_iter().enumerate() {
            if let (Some(angles), PositionKind::Rotary(pairing)) = (&work.angles, c.family.positions) {
                let norm = layer.qk_norms.as_ref().map(|norms| norms[i].scaling());
                let params = RopeParams { pairing, n_rot: heads.dim };
                let angles = &angles[usize::from(reach.is_some())];
                device.rope(&mut work.qkv[i], n, heads, norm, params, angles)?;
            }
        }
        let scale = 1.0 / (c.heads.dim as f32).sqrt();
        let params = BidirectionalParams { heads: c.heads, n_kv_heads: c.n_kv_heads, scale, reach };
        let (bias, qkv) = (work.bias.as_ref(), work.qkv.each_ref());
        device.attend_bidirectional(&params, &work.texts, bias, qkv, &mut work.attn_out)?;
        self.add_output(&layer.attn_norms, &layer.out, &work.attn_out, &mut work.stream)
    }

    fn feed_forward(&self, layer: &Layer<B>, work: &mut Batch<B>) -> Result<(), BackendError> {
        let (c, device) = (&self.config, &*self.device);
        let (gate, up, down) = match &layer.ffn {
            FeedForward::Dense { gate, up, down } => (gate, up, down),
            FeedForward::Experts { router, experts } => {
                return self.pass_experts(&layer.ffn_norms, router, experts, &mut work.stream);
            }
        };
        let len = work.stream.n * c.n_ff;
        let input = self.input(&layer.ffn_norms, &mut work.stream)?;
        let up = up.output(&mut work.hidden, false);
        let activated = match (gate, &mut work.gates) {
            (Some(gate), Some(gates)) => {
                device.project(input, &mut [up, gate.output(gates, false)])?;
                gates
            }
            _ => {
                device.project(input, &mut [up])?;
                &mut work.hidden
            }
        };
        device.apply(activated, len, c.activation)?;
        if let Some(gates) = &work.gates {
            device.gate(&mut work.hidden, len, gates, Gate::Plain)?;
        }
        self.add_output(&layer.ffn_norms, down, &work.hidden, &mut work.stream)
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
