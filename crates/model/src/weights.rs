//! The weights of a model: loads tensors of a GGUF file as matrices on a device.

use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use kvant_backend::{Backend, Experts as _, Matrix as _, SharedBytes, WeightSource, limits};
use kvant_codec::finite::find_non_finite_block;
use kvant_gguf::{Gguf, TensorInfo, TensorView};

mod attention;
mod columns;
mod connections;
mod draft_head;
mod experts;
mod index;
mod layer_range;
mod low_rank;
mod mla;
mod mtp;
mod ngrams;
mod norm_bias;
mod per_layer;
mod recurrent;
mod rwkv;
mod shared_kv;
mod streams;

pub(crate) use attention::{AnyAttention, Attention, KvWeights};
pub(crate) use connections::{Connection, GatedStreamWeights, StreamGates, StreamScores};
pub(crate) use draft_head::{BlockEntry, DraftEntry, FeatureEntry};
pub(crate) use experts::{Beside, Experts, LatentSpace};
pub(crate) use index::{BlockIndexWeights, IndexWeights};
pub use layer_range::LayerRange;
pub(crate) use low_rank::{LowRank, RankAssignment};
pub(crate) use mla::LatentAttention;
pub(crate) use ngrams::NgramWeights;
pub(crate) use per_layer::{PerLayer, PerLayerInputs};
pub(crate) use recurrent::{Entering, Factored, HeadWeights, KimiEntering, Recurrent, RuleWeights};
pub(crate) use rwkv::{EmbeddingNormWeights, MIXES, Rwkv, Squashed};
pub(crate) use shared_kv::{PooledKeyWeights, SharedKvAttention};
pub(crate) use streams::{AltUp, Coefficients, StreamProjections};

use crate::config::{DIVISORS, LayerState};
use crate::family::EmbeddingNorm;
use crate::linear::upload;
use crate::retype::convert;
use crate::{Config, LayerSpec, ModelError, Norms, ResidualStreams, SharedExpert};
use layer_range::{check_part, layer_of};
use low_rank::RowsOf;
use norm_bias::OutputBiases;

/// Classification head of a reranking model, applied to the last hidden state of a text; it is
/// independent of the layers.
pub const SCORE_HEAD: &str = "cls.output.weight";

/// The weights of one decoder layer. Matrices are `[n_out, n_in]`.
pub struct Layer<B: Backend> {
    pub(crate) attn_norm: Option<B::Buffer>,
    /// Attention, if the layer has it.
    pub(crate) attention: Option<AnyAttention<B>>,
    /// The recurrent mixer, if the layer has one.
    pub(crate) recurrent: Option<Recurrent<B>>,
    /// Weights of RWKV-7 beside its norms and its feed-forward layer.
    pub(crate) rwkv: Option<Rwkv<B>>,
    /// Norm of attention's output.
    pub(crate) attn_after: Option<B::Buffer>,
    pub(crate) ffn_norm: Option<B::Buffer>,
    /// The dense feed-forward layer, or the shared expert.
    pub(crate) ffn: Option<FeedForward<B>>,
    pub(crate) experts: Option<Experts<B>>,
    /// Norm of the feed-forward layer's output.
    pub(crate) ffn_after: Option<B::Buffer>,
    /// Per-layer embeddings, if the model has them.
    pub(crate) per_layer: Option<PerLayer<B>>,
    /// Alternating updates of several residual streams, if the model has them.
    pub(crate) altup: Option<AltUp<B>>,
    /// How the token mixer and the feed-forward layer read several residual streams, if they do.
    pub(crate) connections: Option<[Connection<B>; 2]>,
    /// Factor on the residual stream after the layer.
    pub(crate) out_scale: Option<f32>,
}

/// A gated feed-forward layer.
pub(crate) struct FeedForward<B: Backend> {
    /// `None` if the up projection gates itself.
    pub(crate) gate: Option<B::Matrix>,
    pub(crate) up: B::Matrix,
    pub(crate) down: B::Matrix,
    /// LoRA weights of gate and up, and of down.
    pub(crate) low_rank: [Option<LowRank<B>>; 2],
    /// Biases of gate, up and down, `[n_out]` each, if the file has them.
    pub(crate) biases: [Option<B::Buffer>; 3],
}

impl<B: Backend> FeedForward<B> {
    /// Returns whether biases or LoRA change gate and up, so that the gated GEMM cannot be fused.
    pub(crate) fn is_apart(&self) -> bool {
        let [of_gate, of_up, _] = &self.biases;
        of_gate.is_some() || of_up.is_some() || self.low_rank[0].is_some()
    }
}

/// The weights of a model, or of a part of one.
pub struct Weights<B: Backend> {
    /// The layers of this part.
    pub(crate) part: LayerRange,
    /// `None` if the first layer is elsewhere.
    pub(crate) embedding: Option<Arc<B::Matrix>>,
    /// Norm of token embeddings.
    pub(crate) embedding_norm: Option<EmbeddingNormWeights<B>>,
    /// Input projection of an MTP layer or a draft head.
    pub(crate) entry: Option<DraftEntry<B>>,
    /// Inputs of the per-layer embeddings, if the model has them.
    pub(crate) per_layer: Option<PerLayerInputs<B>>,
    /// Projections of several residual streams, if the model has them.
    pub(crate) streams: Option<StreamProjections<B>>,
    /// What the final norm reads of such streams.
    pub(crate) last_connection: Option<Connection<B>>,
    /// Embeddings of n-grams, if the model has them.
    pub(crate) ngrams: Option<NgramWeights<B>>,
    pub(crate) layers: Vec<Arc<Layer<B>>>,
    /// `None` if the last layer is elsewhere, or what reads the residual streams normalizes.
    pub(crate) output_norm: Option<B::Buffer>,
    /// Its bias, `[n_embd]`, for hidden states; empty if it has none. In logits it is part of
    /// [`output_bias`](Self::output_bias).
    pub(crate) output_norm_bias: Vec<f32>,
    /// Bias of the output matrix, `[n_vocab]`.
    pub(crate) output_bias: Option<B::Buffer>,
    /// The output matrix; `None` if it is the embedding, or elsewhere.
    pub(crate) output: Option<Arc<B::Matrix>>,
    /// LoRA weights of the output matrix.
    pub(crate) output_low_rank: Option<Arc<LowRank<B>>>,
    /// Assignment of LoRA ranks to adapters, for GEMMs of one input.
    pub(crate) ranks: Vec<RankAssignment>,
    pub(crate) n_vocab: usize,
    pub(crate) n_bytes: usize,
    /// Bytes that decoding a token never reads: an embedding that is not the output matrix, and the
    /// unselected experts.
    pub(crate) idle_bytes: usize,
    /// Bytes of layers that decoding one token reads again.
    pub(crate) repeated_bytes: usize,
}

impl<B: Backend> Weights<B> {
    /// Returns whether the last layer is here.
    pub(crate) fn ends_model(&self) -> bool {
        self.output_norm.is_some() || self.last_connection.is_some()
    }

    /// Loads every tensor of `part`. Passes the fraction of loaded bytes to `progress` after each
    /// layer.
    ///
    /// # Errors
    ///
    /// A missing tensor, a shape that does not fit the hyper-parameters, or a device error.
    pub fn load(
        gguf: &Arc<Gguf>,
        config: &Config,
        part: &LayerRange,
        backend: &B,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Self, ModelError> {
        check_part(config, part)?;
        let mut loader = Loader::new(gguf, part, backend);
        loader.used.extend(DIVISORS.into_iter().chain([SCORE_HEAD]).map(str::to_owned));
        let n_embd = config.n_embd;
        let n_vocab = gguf.tensor("token_embd.weight")?.info.rows();
        let is_tied = !loader.has("output.weight");
        let embedding = match (part.is_first(), is_tied && part.is_last()) {
            (true, true) => {
                Some(backend.upload_tied(loader.source("token_embd.weight", n_embd, n_vocab)?)?)
            }
            (true, false) => Some(backend.table(loader.source("token_embd.weight", n_embd, n_vocab)?)?),
            (false, _) => None,
        };
        let embedding = embedding.map(Arc::new);
        let embedding_norm = match config.family.embedding_norm {
            EmbeddingNorm::Rms if part.is_first() => {
                Some(EmbeddingNormWeights { weight: loader.upload(&vec![1.0; n_embd])?, bias: None })
            }
            EmbeddingNorm::Layer => Some(loader.embedding_norm(n_embd)?),
            EmbeddingNorm::Rms | EmbeddingNorm::None => None,
        };
        let embedding_bytes = loader.n_bytes;
        let per_layer = config
            .per_layer_embedding_size
            .map(|n| loader.per_layer_inputs(config, n, n_vocab))
            .transpose()?;
        let has_altup = matches!(config.streams, ResidualStreams::Alternating { .. });
        let streams = has_altup.then(|| loader.stream_projections(config)).transpose()?;
        let last_connection = loader.last_connection(config)?;
        let ngrams = config.ngrams.as_ref().map(|of| loader.ngrams(config, of)).transpose()?;
        let total = part.n_bytes(gguf).max(1) as f32;
        progress(loader.n_bytes as f32 / total);
        let bytes_before = loader.n_bytes;
        let mut layers = Vec::with_capacity(part.layers().len());
        for index in part.layers() {
            if let LayerState::Shared(with) = config.layers[index].state
                && config.kv_ordinal(part.layers().start, index).is_none()
            {
                return Err(ModelError::Apart { layer: index, with });
            }
            let in_file = config.loops.in_file(index);
            if in_file < index {
                layers.push(Arc::clone(&layers[in_file]));
                continue;
            }
            layers.push(Arc::new(loader.layer(config, index)?));
            // Repacked weights need no second copy in memory.
            gguf.release();
            progress(loader.n_bytes as f32 / total);
        }
        let repeated_bytes = (config.loops.n - 1) * (loader.n_bytes - bytes_before);
        let output_norm = if part.is_last() { loader.output_norm(config)? } else { None };
        let (output, mut output_low_rank) = match (part.is_last(), is_tied) {
            (true, false) => {
                let ([output], low_rank) = loader.group(n_embd, [RowsOf::all("output.weight", n_vocab)])?;
                (Some(output), low_rank.map(|of| loader.for_logit_rows(of)))
            }
            (true, true) if !part.is_first() => {
                (Some(loader.matrix("token_embd.weight", n_embd, n_vocab)?), None)
            }
            _ => (None, None),
        };
        let w = output.as_ref().or(embedding.as_deref()).filter(|_| part.is_last());
        let OutputBiases { of_norm, of_output } =
            loader.output_biases(config, w, output_low_rank.as_mut())?;
        let predicts_further = |name: &str| {
            let from = config.layers.len();
            layer_of(name).is_some_and(|layer| (from..from + config.n_mtp).contains(&layer))
        };
        loader.refuse_unused(|name| part.owns(name, is_tied) && !predicts_further(name))?;
        loader.refuse_unadapted(|name| part.owns(name, is_tied) && !predicts_further(name))?;
        gguf.release();
        progress(1.0);
        let lookup_bytes = if output.is_some() || !part.is_last() { embedding_bytes } else { 0 };
        let [experts, chosen] = part.expert_bytes(gguf, config);
        let table_bytes = gguf.find_info(per_layer::TABLE).map_or(0, |info| part.tensor_bytes(info));
        let idle_bytes = lookup_bytes + table_bytes + experts - chosen;
        let part = part.clone();
        Ok(Self {
            part,
            embedding,
            embedding_norm,
            entry: None,
            per_layer,
            streams,
            last_connection,
            ngrams,
            layers,
            output_norm,
            output_norm_bias: of_norm,
            output_bias: of_output,
            output: output.map(Arc::new),
            output_low_rank: output_low_rank.map(Arc::new),
            ranks: loader.ranks,
            n_vocab,
            n_bytes: loader.n_bytes,
            idle_bytes,
            repeated_bytes,
        })
    }
}

/// Tensors that compute a layer's K and V.
const KV_TENSORS: [&str; 5] =
    ["attn_k.weight", "attn_v.weight", "attn_k.bias", "attn_v.bias", "attn_k_norm.weight"];

struct Loader<'a, B: Backend> {
    gguf: &'a Arc<Gguf>,
    part: &'a LayerRange,
    backend: &'a B,
    n_bytes: usize,
    /// Tensors that were used.
    used: HashSet<String>,
    /// Tensors that adapters change.
    adapted: HashSet<String>,
    /// Assignment of LoRA ranks, without duplicates.
    ranks: Vec<RankAssignment>,
}

impl<'a, B: Backend> Loader<'a, B> {
    fn new(gguf: &'a Arc<Gguf>, part: &'a LayerRange, backend: &'a B) -> Self {
        let (used, adapted) = (HashSet::new(), HashSet::new());
        Self { gguf, part, backend, n_bytes: 0, used, adapted, ranks: Vec::new() }
    }

    fn layer(&mut self, c: &Config, index: usize) -> Result<Layer<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let spec = &c.layers[index];
        let Norms { before, after, shared, .. } = spec.norms;
        let (before, after) = (before.then_some(c.n_embd), after.then_some(c.n_embd));
        let experts = spec.experts.map(|experts| self.experts(c, index, experts)).transpose()?;
        let attention = self.any_attention(c, index)?;
        let recurrent = spec.recurrence.map(|of| self.recurrent(c, index, of)).transpose()?;
        let rwkv = spec.wkv.map(|heads| self.rwkv(c, index, heads)).transpose()?;
        let has_mixer = attention.is_some() || spec.is_recurrent();
        let has_ffn = spec.n_ff > 0 || experts.is_some();
        Ok(Layer {
            attn_norm: self.vector_if(before.filter(|_| has_mixer), &name("attn_norm.weight"))?,
            attention,
            recurrent,
            rwkv,
            attn_after: self.vector_if(after, &name("post_attention_norm.weight"))?,
            ffn_norm: self.vector_if(before.filter(|_| has_ffn && !shared), &name(spec.norms.before_ffn))?,
            ffn: self.feed_forward(c, index)?,
            experts,
            ffn_after: self.vector_if(after, &name("post_ffw_norm.weight"))?,
            per_layer: c.per_layer_embedding_size.map(|n| self.per_layer(c, index, n)).transpose()?,
            altup: match c.streams {
                ResidualStreams::Alternating { .. } => Some(self.altup(c, index)?),
                _ => None,
            },
            connections: self.connections(c, index)?,
            out_scale: self.optional_number(&name("layer_output_scale.weight"))?,
        })
    }

    /// Loads the dense feed-forward layer of layer `index`, or its shared expert.
    fn feed_forward(&mut self, c: &Config, index: usize) -> Result<Option<FeedForward<B>>, ModelError> {
        let LayerSpec { n_ff, experts, gates_itself, norms, wkv, .. } = c.layers[index];
        if n_ff == 0 {
            return Ok(None);
        }
        let names = match experts.map(|experts| experts.shared) {
            None if wkv.is_some() => ["", "channel_mix_key.weight", "channel_mix_value.weight"],
            None | Some(SharedExpert::Beside) => ["ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"],
            Some(_) => ["ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight"],
        };
        let [gate, up, down] = names;
        let (gate, up, mut of_both) = match gates_itself {
            true => {
                let ([up], low_rank) =
                    self.group(c.n_embd, [RowsOf::all(format!("blk.{index}.{up}"), n_ff)])?;
                (None, up, low_rank)
            }
            false => {
                let rows = self.rows_of(up, [(gate, n_ff), (up, n_ff)], index);
                let ([gate, up], low_rank) = self.group(c.n_embd, rows)?;
                (Some(gate), up, low_rank)
            }
        };
        let down = RowsOf::all(format!("blk.{index}.{down}"), c.n_embd);
        let ([down], of_down) = self.group(n_ff, [down])?;
        let [mut of_gate, mut of_up, bias] = self.feed_forward_biases(c, index, names)?;
        // Experts have no biases that a norm's could become part of: it is refused as unused. What
        // RWKV-7 mixes between norm and product includes the bias.
        if experts.is_none() && wkv.is_none() {
            let before = if norms.shared { "attn_norm.weight" } else { norms.before_ffn };
            let norm = format!("blk.{index}.{before}");
            let norm_bias = self.norm_bias(norms.kind, &norm, c.n_embd, of_both.as_mut())?;
            if let Some(gate) = &gate {
                of_gate = self.behind_norm(norm_bias.as_ref(), gate, of_gate)?;
            }
            of_up = self.behind_norm(norm_bias.as_ref(), &up, of_up)?;
        }
        let low_rank = [of_both, of_down];
        Ok(Some(FeedForward { gate, up, down, low_rank, biases: [of_gate, of_up, bias] }))
    }

    /// Loads the norm before the logits, if there is one, with the factor on these.
    fn output_norm(&mut self, c: &Config) -> Result<Option<B::Buffer>, ModelError> {
        let name = c.family.output_norm;
        name.map(|name| self.scaled_vector(name, c.n_embd, c.logit_scale)).transpose()
    }

    fn has(&self, name: &str) -> bool {
        self.gguf.find_info(name).is_some()
    }

    fn matrix(&mut self, name: &str, n_in: usize, n_out: usize) -> Result<B::Matrix, ModelError> {
        let source = self.source(name, n_in, n_out)?;
        let mut matrix = self.backend.upload_matrix(source)?;
        self.watch(name, &mut matrix)?;
        Ok(matrix)
    }

    /// Makes a matrix, rows of a tensor, report its inputs if statistics want them.
    fn watch(&self, tensor: &str, matrix: &mut B::Matrix) -> Result<(), ModelError> {
        let inputs = self.part.inputs().and_then(|inputs| inputs.of(tensor, matrix.n_in(), 1));
        inputs.map_or(Ok(()), |inputs| Ok(self.backend.watch_inputs(matrix, &inputs)?))
    }

    /// As [`Loader::watch`], for the matrices of experts.
    fn watch_experts(&self, tensor: &str, experts: &mut B::Experts) -> Result<(), ModelError> {
        let statistics = self.part.inputs();
        let inputs = statistics.and_then(|inputs| inputs.of(tensor, experts.n_in(), experts.n_experts()));
        inputs.map_or(Ok(()), |inputs| Ok(self.backend.watch_expert_inputs(experts, &inputs)?))
    }

    /// Loads the matrices of `n` experts, each `[n_out, n_in]`.
    fn stack(&mut self, name: &str, [n_in, n_out, n]: [usize; 3]) -> Result<B::Experts, ModelError> {
        let source = self.rows(name, &[n_in, n_out, n], 0..n_out * n)?;
        let mut experts = self.backend.upload_experts(source, n)?;
        self.watch_experts(name, &mut experts)?;
        Ok(experts)
    }

    /// Returns the rows of matrices of layer `index` with these sizes: separate tensors or, if the
    /// first is absent, consecutive rows of `fused`.
    fn rows_of<const N: usize>(&self, fused: &str, parts: [(&str, usize); N], index: usize) -> [RowsOf; N] {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let (fused, total) = (name(fused), parts.iter().map(|(_, n_out)| n_out).sum());
        let holds_all = |info: &TensorInfo| info.name == fused && info.rows() == total;
        let is_fused = !self.has(&name(parts[0].0)) && self.gguf.tensors().iter().any(holds_all);
        let mut first = 0;
        parts.map(|(part, n_out)| {
            let rows = first..first + n_out;
            first += n_out;
            match is_fused {
                true => RowsOf::some(fused.clone(), total, [rows]),
                false => RowsOf::all(name(part), n_out),
            }
        })
    }

    /// Loads the biases of such matrices, if present: separate tensors, or consecutive parts of
    /// `fused`.
    fn biases<const N: usize>(
        &mut self,
        fused: &str,
        parts: [(&str, usize); N],
        index: usize,
    ) -> Result<[Option<B::Buffer>; N], ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let (fused, total) = (name(fused), parts.iter().map(|(_, len)| len).sum());
        let holds_all = |info: &TensorInfo| info.elements() == total;
        let is_fused = !self.has(&name(parts[0].0)) && self.gguf.find_info(&fused).is_some_and(holds_all);
        let all = if is_fused { self.values(&fused, &[total])? } else { Vec::new() };
        let mut first = 0;
        let mut biases = Vec::with_capacity(N);
        for (part, len) in parts {
            biases.push(match is_fused {
                true => Some(self.upload(&all[first..first + len])?),
                false => self.optional_vector(&name(part), len)?,
            });
            first += len;
        }
        Ok(biases.try_into().unwrap_or_else(|_| unreachable!("one for each part")))
    }

    /// Returns the source of a matrix with these rows.
    fn source_of(&mut self, rows: &RowsOf, n_in: usize) -> Result<WeightSource, ModelError> {
        let RowsOf { tensor, n_rows, ranges } = rows;
        let shape = [n_in, *n_rows];
        if let [one] = &ranges[..] {
            return self.rows(tensor, &shape, one.clone());
        }
        let mut bytes = Vec::new();
        let (mut n, mut dtype) = (0, None);
        for range in ranges {
            let source = self.rows(tensor, &shape, range.clone())?;
            bytes.extend_from_slice(&source.bytes);
            (n, dtype) = (n + source.n_out, Some(source.dtype));
        }
        let none = || ModelError::Unsupported { what: format!("no rows of '{tensor}'") };
        Ok(WeightSource { dtype: dtype.ok_or_else(none)?, n_out: n, n_in, bytes: bytes.into() })
    }

    fn source(&mut self, name: &str, n_in: usize, n_out: usize) -> Result<WeightSource, ModelError> {
        self.rows(name, &[n_in, n_out], 0..n_out)
    }

    /// Returns some rows of a tensor of this shape, in GGUF order (innermost first).
    fn rows(&mut self, name: &str, shape: &[usize], rows: Range<usize>) -> Result<WeightSource, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        check_shape(tensor.info, shape)?;
        let (n_in, n_out): (usize, usize) = (shape[0], shape[1..].iter().product());
        // A tensor of several matrices is checked once, completely.
        if self.used.insert(name.to_owned()) {
            check_finite(tensor.info, &tensor.bytes)?;
        }
        let row_bytes = tensor.bytes.len() / n_out.max(1);
        let range = rows.start * row_bytes..rows.end * row_bytes;
        let dtype = self.part.dtype(tensor.info);
        let bytes = if dtype == tensor.info.dtype {
            shared_bytes(self.gguf, tensor, range)
        } else {
            let bytes = &tensor.bytes[range];
            let converted = convert(tensor.info.dtype, bytes, rows.len() * n_in, dtype).map_err(|error| {
                let expected = format!("rows that become {dtype}");
                ModelError::Value { key: name.to_owned(), expected, got: error.to_string() }
            })?;
            SharedBytes::from(converted)
        };
        self.n_bytes += bytes.len();
        Ok(WeightSource { dtype, n_out: rows.len(), n_in, bytes })
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<B::Buffer, ModelError> {
        self.scaled_vector(name, len, 1.0)
    }

    /// Loads a vector, each value times `scale`.
    fn scaled_vector(&mut self, name: &str, len: usize, scale: f32) -> Result<B::Buffer, ModelError> {
        let mut values = self.values(name, &[len])?;
        values.iter_mut().for_each(|x| *x *= scale);
        self.upload(&values)
    }

    /// Loads the values of a tensor of this shape as a flat buffer.
    fn flat(&mut self, name: &str, shape: &[usize]) -> Result<B::Buffer, ModelError> {
        let values = self.values(name, shape)?;
        self.upload(&values)
    }

    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        self.used.insert(name.to_owned());
        self.n_bytes += tensor.bytes.len();
        decode_values(&tensor, shape)
    }

    fn upload(&self, values: &[f32]) -> Result<B::Buffer, ModelError> {
        Ok(upload(self.backend, values)?)
    }

    /// Loads the vector of `len` values; `None` without `len`.
    fn vector_if(&mut self, len: Option<usize>, name: &str) -> Result<Option<B::Buffer>, ModelError> {
        len.map(|len| self.vector(name, len)).transpose()
    }

    /// Loads a vector, if present.
    fn optional_vector(&mut self, name: &str, len: usize) -> Result<Option<B::Buffer>, ModelError> {
        if self.has(name) { self.vector(name, len).map(Some) } else { Ok(None) }
    }

    /// Loads the only value of a tensor, if present.
    fn optional_number(&mut self, name: &str) -> Result<Option<f32>, ModelError> {
        if self.has(name) { Ok(self.values(name, &[1])?.first().copied()) } else { Ok(None) }
    }

    /// Rejects unused tensors of this part: they belong to a feature that is not implemented, and
    /// ignoring them would silently change the logits.
    fn refuse_unused(&self, is_ours: impl Fn(&str) -> bool) -> Result<(), ModelError> {
        let mut unused = self.gguf.tensors().iter().filter(|info| !self.used.contains(&info.name));
        match unused.find(|info| is_ours(&info.name)) {
            Some(info) => Err(ModelError::Unsupported { what: format!("tensor '{}'", info.name) }),
            None => Ok(()),
        }
    }
}

/// Returns some bytes of a tensor that keep their file alive, so that a device can read a mapped
/// matrix in place.
fn shared_bytes(gguf: &Arc<Gguf>, tensor: TensorView<'_>, range: Range<usize>) -> SharedBytes {
    shared_part(gguf, tensor.info, tensor.bytes, 0).slice(range)
}

/// Returns `bytes`, part `index` of a tensor, that keep their file alive.
fn shared_part(gguf: &Arc<Gguf>, info: &TensorInfo, bytes: Cow<'_, [u8]>, index: usize) -> SharedBytes {
    struct PartBytes(Arc<Gguf>, TensorInfo, usize);
    impl AsRef<[u8]> for PartBytes {
        fn as_ref(&self) -> &[u8] {
            match self.0.part(&self.1, self.2) {
                Cow::Borrowed(bytes) => bytes,
                Cow::Owned(_) => unreachable!("a file never loses a tensor"),
            }
        }
    }
    let all = 0..bytes.len();
    let owner: Arc<dyn AsRef<[u8]> + Send + Sync> = match bytes {
        Cow::Owned(bytes) => Arc::new(bytes),
        Cow::Borrowed(_) => Arc::new(PartBytes(Arc::clone(gguf), info.clone(), index)),
    };
    SharedBytes::new(owner, all).expect("a part has all of its bytes")
}

/// Decodes a one-dimensional tensor of `len` values to f32.
pub(crate) fn decode_vector(tensor: &TensorView<'_>, len: usize) -> Result<Vec<f32>, ModelError> {
    decode_values(tensor, &[len])
}

/// Decodes the values of a tensor of this shape, in GGUF order (innermost first), to f32.
///
/// # Errors
///
/// [`ModelError::TensorShape`] for another shape, [`ModelError::NotFinite`] for NaN or infinities.
pub fn decode_values(tensor: &TensorView<'_>, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
    check_shape(tensor.info, shape)?;
    let len = shape.iter().product();
    let mut values = vec![0.0; len];
    kvant_codec::decode(tensor.info.dtype, &tensor.bytes, &mut values).map_err(|error| {
        ModelError::Value {
            key: tensor.info.name.clone(),
            expected: format!("{len} values"),
            got: error.to_string(),
        }
    })?;
    check_finite(tensor.info, &tensor.bytes)?;
    Ok(values)
}

/// Minimum bytes per thread.
const SHARE: usize = 1 << 20;

/// Rejects a tensor (its data `bytes`) with NaN or infinities, which would spread to all outputs.
/// Scans on every core, just before a device reads the same bytes: they are in the CPU caches then.
///
/// # Errors
///
/// [`ModelError::NotFinite`] with the first invalid row.
pub fn check_finite(info: &TensorInfo, bytes: &[u8]) -> Result<(), ModelError> {
    let block_bytes = info.dtype.block_bytes();
    let share = bytes.len().div_ceil(limits::n_cores()).max(SHARE).next_multiple_of(block_bytes);
    let find = |share: &[u8]| find_non_finite_block(info.dtype, share);
    let broken = if bytes.len() <= share {
        find(bytes)
    } else {
        std::thread::scope(|scope| {
            let shares: Vec<_> = bytes.chunks(share).map(|bytes| scope.spawn(move || find(bytes))).collect();
            let found = shares.into_iter().enumerate().map(|(i, found)| {
                let block = found.join().expect("scanning bytes does not panic");
                block.map(|block| i * share / block_bytes + block)
            });
            found.fold(None, Option::or)
        })
    };
    match broken {
        None => Ok(()),
        Some(block) => {
            let row = block * info.dtype.block_len() / info.row_len().max(1);
            Err(ModelError::NotFinite { name: info.name.clone(), row })
        }
    }
}

/// Ignores trailing dimensions of 1, since writers differ in them.
fn check_shape(info: &TensorInfo, expected: &[usize]) -> Result<(), ModelError> {
    fn significant(shape: &[usize]) -> &[usize] {
        &shape[..shape.len() - shape.iter().rev().take_while(|&&n| n == 1).count()]
    }
    let got = &info.shape;
    if significant(got) == significant(expected) {
        return Ok(());
    }
    Err(ModelError::TensorShape { name: info.name.clone(), expected: expected.to_vec(), got: got.clone() })
}
