//! Hyper-parameters of an encoder, from the keys of its GGUF file.

use kvant_gguf::Gguf;

use crate::ModelError;
use crate::config::Keys;
use crate::family::{ENCODERS, Family};
use crate::host_ops::Activation;

/// Key of the longest text, which may be shorter than the positions allow: the limit of
/// sentence-transformers. GGUF has no key for it.
const MAX_TOKENS: &str = "kvant.encoder.max_tokens";

/// Hyper-parameters of an encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    /// The name in `general.architecture`.
    pub(crate) family: &'static Family,
    /// Hidden size.
    pub n_embd: usize,
    /// Layers.
    pub n_layers: usize,
    /// Attention heads.
    pub n_heads: usize,
    /// Width of the feed-forward layer.
    pub n_ff: usize,
    /// Epsilon of LayerNorm.
    pub eps: f32,
    /// Positions of the model.
    pub n_ctx: usize,
    /// Tokens of the longest text; the rest of a longer one is not read.
    pub max_tokens: usize,
    /// What tells positions apart.
    pub positions: Positions,
    /// The activation of the feed-forward layer, or of its gate.
    pub activation: Activation,
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
    /// RoPE with this base (Nomic, arXiv 2402.01613).
    Rotary {
        /// The base of the frequencies.
        base: f32,
    },
}

/// Most buckets of distances, many times those of any model.
const MAX_BUCKETS: usize = 1 << 12;

impl EncoderConfig {
    /// Whether the file is an encoder of texts.
    pub fn is_encoder(gguf: &Gguf) -> bool {
        let arch = gguf.meta().find::<&str>("general.architecture").ok().flatten();
        arch.is_some_and(|arch| ENCODERS.iter().any(|family| family.name == arch))
    }

    /// Reads and checks the hyper-parameters.
    ///
    /// # Errors
    ///
    /// An architecture that is no encoder, a missing or invalid value (the key is named), or a
    /// feature that is not implemented.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let arch = gguf.meta().get::<&str>("general.architecture")?;
        let family = ENCODERS.iter().find(|family| family.name == arch);
        let family = family.ok_or_else(|| ModelError::Architecture {
            got: arch.to_owned(),
            nearest: ENCODERS[0].name,
            known: ENCODERS.iter().map(|family| family.name).collect::<Vec<_>>().join(", "),
        })?;
        let keys = Keys { gguf, arch };
        if keys.flag_or("attention.causal", false)? {
            return Err(keys.bad("attention.causal", "false in an encoder", true));
        }
        let (n_embd, n_heads) = (keys.size("embedding_length")?, keys.size("attention.head_count")?);
        if !n_embd.is_multiple_of(n_heads) {
            return Err(keys.bad("attention.head_count", &format!("a divisor of {n_embd}"), n_heads));
        }
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
        let positions = positions(&keys, n_embd / n_heads)?;
        let is_rotary = matches!(positions, Positions::Rotary { .. });
        Ok(Self {
            family,
            n_embd,
            n_layers,
            n_heads,
            n_ff: keys.size("feed_forward_length")?,
            eps: keys.float("attention.layer_norm_epsilon")?,
            n_ctx,
            max_tokens,
            positions,
            activation: if is_rotary { Activation::Silu } else { Activation::Gelu },
        })
    }

    /// Returns the name of the architecture.
    pub fn arch(&self) -> &'static str {
        self.family.name
    }

    /// Returns the values of a head.
    pub fn head_dim(&self) -> usize {
        self.n_embd / self.n_heads
    }
}

fn positions(keys: &Keys<'_>, head_dim: usize) -> Result<Positions, ModelError> {
    const BASE: &str = "rope.freq_base";
    const BUCKETS: &str = "attention.relative_buckets_count";
    Ok(match keys.arch {
        "bert" => Positions::Learned,
        "mpnet" => {
            let n_buckets = keys.size(BUCKETS)?;
            // Half of a direction's buckets, the exact ones, must exist.
            if n_buckets > MAX_BUCKETS || !n_buckets.is_multiple_of(4) {
                let expected = format!("a multiple of 4, at most {MAX_BUCKETS}");
                return Err(keys.bad(BUCKETS, &expected, n_buckets));
            }
            Positions::LearnedAndRelative { n_buckets }
        }
        _ => {
            let base = keys.float_or(BASE, 10_000.0)?;
            if base < 1.0 {
                return Err(keys.bad(BASE, "a number from 1 on", base));
            }
            if !head_dim.is_multiple_of(2) {
                return Err(keys.bad("attention.head_count", "heads of an even size", head_dim));
            }
            let scaling = keys.str_or("rope.scaling.type", "none")?;
            if scaling != "none" {
                let what =
                    format!("RoPE scaling of an encoder ({} is {scaling})", keys.key("rope.scaling.type"));
                return Err(ModelError::Unsupported { what });
            }
            Positions::Rotary { base }
        }
    })
}
