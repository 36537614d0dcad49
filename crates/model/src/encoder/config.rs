//! Hyper-parameters of an encoder, from the keys of its GGUF file.

use kvant_backend::Heads;
use kvant_backend::host_ops::Pointwise;
use kvant_gguf::{Gguf, Value};

use super::family::{ENCODERS, EncoderFamily, LocalLayers, PositionKind};
use crate::ModelError;
use crate::config::Keys;
use crate::family::{Family, NormKind};

/// Key of the longest text, which may be shorter than the positions allow: the limit of
/// sentence-transformers. GGUF has no key for it.
const MAX_TOKENS: &str = "kvant.encoder.max_tokens";
/// Key of the activation in the head that scores. GGUF has none.
const HEAD_ACTIVATION: &str = "kvant.encoder.head_activation";

/// Hyper-parameters of an encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    /// The conventions of the architecture.
    pub(crate) family: &'static EncoderFamily,
    /// Hidden size.
    pub n_embd: usize,
    /// The distance up to which each layer attends; `None` in a global one.
    pub reaches: Vec<Option<usize>>,
    /// The heads of the queries.
    pub heads: Heads,
    /// Heads of keys and values.
    pub n_kv_heads: usize,
    /// Width of the feed-forward layer, and of each expert.
    pub n_ff: usize,
    /// Experts instead of the feed-forward layer in some layers.
    pub experts: Option<EncoderExperts>,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Positions of the model.
    pub n_ctx: usize,
    /// Tokens of the longest text; the rest of a longer one is not read.
    pub max_tokens: usize,
    /// What tells positions apart.
    pub positions: Positions,
    /// The activation of the feed-forward layer, or of its gate.
    pub activation: Pointwise,
    /// The head that scores, if the model has one.
    pub head: HeadConfig,
}

/// Experts of an encoder. A router selects some for each token, by the softmax of its products with
/// the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncoderExperts {
    /// Experts of a layer.
    pub n: usize,
    /// Those that a token passes.
    pub n_used: usize,
    /// Whether their weights are normalized to a sum of one.
    pub normalizes: bool,
    /// The second layer of each of these periods has experts.
    pub period: usize,
}

impl EncoderExperts {
    /// Returns whether layer `index` has experts.
    pub fn are_in(&self, index: usize) -> bool {
        index % self.period == 1
    }
}

/// How an encoder tells positions apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Positions {
    /// Embeddings of positions, added to those of tokens (BERT, arXiv 1810.04805).
    Learned,
    /// The same, and biases of the scores by distance, in this many buckets (MPNet, arXiv
    /// 2004.09297).
    LearnedAndRelative {
        /// Buckets of distances, half of them for each direction.
        n_buckets: usize,
    },
    /// RoPE (arXiv 2104.09864).
    Rotary {
        /// The base of the frequencies.
        base: f32,
        /// That of local layers.
        local_base: f32,
    },
    /// Biases of the scores, by head proportional to the distance (ALiBi, arXiv 2108.12409).
    Alibi,
}

/// What a head that scores reads and computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadConfig {
    /// Whether it reads the mean of all hidden states; otherwise that of the first token.
    pub reads_mean: bool,
    /// The activation of its first layer.
    pub activation: Pointwise,
}

/// Most buckets of distances, many times those of any model.
const MAX_BUCKETS: usize = 1 << 12;

impl EncoderConfig {
    /// Whether the file is an encoder of texts.
    pub fn is_encoder(gguf: &Gguf) -> bool {
        let arch = gguf.meta().find::<&str>("general.architecture").ok().flatten();
        arch.is_some_and(|arch| ENCODERS.iter().any(|encoder| encoder.family.name == arch))
    }

    /// Reads and checks the hyper-parameters.
    ///
    /// # Errors
    ///
    /// An architecture that is no encoder, a missing or invalid value (the key is named), or a
    /// feature that is not implemented.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let arch = gguf.meta().get::<&str>("general.architecture")?;
        let family = ENCODERS.iter().find(|encoder| encoder.family.name == arch);
        let family = family.ok_or_else(|| ModelError::Architecture {
            got: arch.to_owned(),
            nearest: ENCODERS[0].family.name,
            known: ENCODERS.iter().map(|encoder| encoder.family.name).collect::<Vec<_>>().join(", "),
        })?;
        let keys = Keys { gguf, arch };
        if keys.flag_or("attention.causal", false)? {
            return Err(keys.bad("attention.causal", "false in an encoder", true));
        }
        let n_embd = keys.size("embedding_length")?;
        let (heads, n_kv_heads) = read_heads(&keys, n_embd)?;
        let (n_layers, n_tensors) = (keys.size("block_count")?, gguf.tensors().len());
        if n_layers > n_tensors {
            let expected = format!("at most one layer for each of {n_tensors} tensors");
            return Err(keys.bad("block_count", &expected, n_layers));
        }
        let n_ctx = keys.size("context_length")?;
        let max_tokens = gguf.meta().find::<u32>(MAX_TOKENS)?.map_or(n_ctx, |n| n as usize);
        if max_tokens < 2 || max_tokens > n_ctx {
            let (key, expected) = (MAX_TOKENS.to_owned(), format!("2 to the {n_ctx} positions"));
            return Err(ModelError::Value { key, expected, got: max_tokens.to_string() });
        }
        let eps = match family.norm {
            NormKind::Layer => "attention.layer_norm_epsilon",
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
        };
        Ok(Self {
            family,
            n_embd,
            reaches: read_reaches(&keys, family.windows, n_layers)?,
            heads,
            n_kv_heads,
            n_ff: keys.size("feed_forward_length")?,
            experts: if family.has_experts { read_experts(&keys)? } else { None },
            eps: keys.float(eps)?,
            n_ctx,
            max_tokens,
            positions: positions(&keys, family, heads.dim)?,
            activation: activation(keys.key("hidden_activation"), gguf, family.activation)?,
            head: read_head(&keys, family)?,
        })
    }

    /// Returns the name of the architecture.
    pub fn arch(&self) -> &'static str {
        self.family.family.name
    }

    /// Returns the family of its name, whose other properties are those of decoders.
    pub(crate) fn decoder_family(&self) -> &'static Family {
        &self.family.family
    }

    /// Returns the kind of its norms.
    pub(crate) fn norm(&self) -> NormKind {
        self.family.norm
    }
}

/// Reads the heads of queries, and the number of those of keys and values.
fn read_heads(keys: &Keys<'_>, n_embd: usize) -> Result<(Heads, usize), ModelError> {
    const HEADS: &str = "attention.head_count";
    const KV_HEADS: &str = "attention.head_count_kv";
    const DIMS: [&str; 2] = ["attention.key_length", "attention.value_length"];
    let n = keys.size(HEADS)?;
    if !keys.has(DIMS[0]) && !n_embd.is_multiple_of(n) {
        return Err(keys.bad(HEADS, &format!("a divisor of {n_embd}"), n));
    }
    let dim = keys.size_or(DIMS[0], n_embd / n)?;
    let of_values = keys.size_or(DIMS[1], dim)?;
    if of_values != dim {
        return Err(keys.bad(DIMS[1], &format!("the {dim} of a key"), of_values));
    }
    // Shapes of tensors limit the product, if it is a number.
    if n.checked_mul(dim).is_none_or(|width| width > u32::MAX as usize) {
        return Err(keys.bad(DIMS[0], "heads of fewer values", dim));
    }
    let n_kv = keys.size_or(KV_HEADS, n)?;
    if !n.is_multiple_of(n_kv) {
        return Err(keys.bad(KV_HEADS, &format!("a divisor of the {n} heads"), n_kv));
    }
    Ok((Heads { n, dim }, n_kv))
}

/// Reads the experts, if any layer has some.
fn read_experts(keys: &Keys<'_>) -> Result<Option<EncoderExperts>, ModelError> {
    const USED: &str = "expert_used_count";
    let period = keys.count("moe_every_n_layers")?;
    if period < 2 {
        keys.refuse("expert_count", "experts without a period of layers")?;
        return Ok(None);
    }
    let (n, n_used) = (keys.size("expert_count")?, keys.size(USED)?);
    if n_used > n {
        return Err(keys.bad(USED, &format!("at most the {n} experts"), n_used));
    }
    Ok(Some(EncoderExperts { n, n_used, normalizes: keys.flag_or("expert_weights_norm", false)?, period }))
}

/// Reads which layers are local: by period, or layer by layer.
fn read_reaches(
    keys: &Keys<'_>,
    windows: Option<LocalLayers>,
    n_layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    const WINDOW: &str = "attention.sliding_window";
    const PATTERN: &str = "attention.sliding_window_pattern";
    let window = keys.count(WINDOW)?;
    let Some(local) = windows.filter(|_| window > 0) else {
        if window > 0 {
            return Err(ModelError::Unsupported { what: format!("local attention ({})", keys.key(WINDOW)) });
        }
        return Ok(vec![None; n_layers]);
    };
    let is_local: Vec<bool> = match keys.gguf.meta().value(&keys.key(PATTERN)) {
        Some(Value::Array(_)) => keys.gguf.meta().get(&keys.key(PATTERN))?,
        value => {
            let period = if value.is_some() { keys.size(PATTERN)? } else { local.period };
            let global = if local.is_first_global { 0 } else { period - 1 };
            (0..n_layers).map(|layer| layer % period != global).collect()
        }
    };
    if is_local.len() < n_layers {
        return Err(keys.bad(PATTERN, &format!("{n_layers} layers"), is_local.len()));
    }
    Ok(is_local[..n_layers].iter().map(|&is_local| is_local.then_some(window / 2)).collect())
}

fn read_head(keys: &Keys<'_>, family: &EncoderFamily) -> Result<HeadConfig, ModelError> {
    const POOLING: &str = "classifier.pooling_type";
    let reads_mean = match keys.gguf.meta().find::<u32>(&keys.key(POOLING))? {
        None => family.head_reads_mean,
        Some(1) => true,
        Some(2) => false,
        Some(other) => return Err(keys.bad(POOLING, "1 (mean) or 2 (cls)", other)),
    };
    let activation = activation(HEAD_ACTIVATION.to_owned(), keys.gguf, family.head_activation)?;
    Ok(HeadConfig { reads_mean, activation })
}

/// Reads an activation by its name in `transformers`.
fn activation(key: String, gguf: &Gguf, default: Pointwise) -> Result<Pointwise, ModelError> {
    match gguf.meta().find::<&str>(&key)? {
        None => Ok(default),
        Some("gelu") => Ok(Pointwise::Gelu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Pointwise::GeluTanh),
        Some("silu" | "swish") => Ok(Pointwise::Silu),
        Some("relu") => Ok(Pointwise::Relu),
        Some("tanh") => Ok(Pointwise::Tanh),
        Some(got) => {
            let expected = "gelu, gelu_pytorch_tanh, silu, relu or tanh".to_owned();
            Err(ModelError::Value { key, expected, got: got.to_owned() })
        }
    }
}

fn positions(keys: &Keys<'_>, family: &EncoderFamily, head_dim: usize) -> Result<Positions, ModelError> {
    const BUCKETS: &str = "attention.relative_buckets_count";
    Ok(match family.positions {
        PositionKind::Learned => Positions::Learned,
        PositionKind::Alibi => Positions::Alibi,
        PositionKind::LearnedAndRelative => {
            let n_buckets = keys.size(BUCKETS)?;
            // Half of a direction's buckets, the exact ones, must exist.
            if n_buckets > MAX_BUCKETS || !n_buckets.is_multiple_of(4) {
                let expected = format!("a multiple of 4, at most {MAX_BUCKETS}");
                return Err(keys.bad(BUCKETS, &expected, n_buckets));
            }
            Positions::LearnedAndRelative { n_buckets }
        }
        PositionKind::Rotary(_) => {
            let base = read_base(keys, "rope.freq_base", 10_000.0)?;
            let local_base = match family.windows {
                Some(local) => read_base(keys, "rope.freq_base_swa", local.base)?,
                None => base,
            };
            if !head_dim.is_multiple_of(2) {
                return Err(keys.bad("attention.head_count", "heads of an even size", head_dim));
            }
            let n_rot = keys.size_or("rope.dimension_count", head_dim)?;
            if n_rot != head_dim {
                return Err(keys.bad("rope.dimension_count", &format!("all {head_dim} of a head"), n_rot));
            }
            let scaling = keys.str_or("rope.scaling.type", "none")?;
            if scaling != "none" {
                let what =
                    format!("RoPE scaling of an encoder ({} is {scaling})", keys.key("rope.scaling.type"));
                return Err(ModelError::Unsupported { what });
            }
            Positions::Rotary { base, local_base }
        }
    })
}

fn read_base(keys: &Keys<'_>, key: &str, default: f32) -> Result<f32, ModelError> {
    let base = keys.float_or(key, default)?;
    if base < 1.0 { Err(keys.bad(key, "a number from 1 on", base)) } else { Ok(base) }
}
