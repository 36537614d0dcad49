//! Hyper-parameters, read from a GGUF file's metadata.

use std::ops::Range;

use kvant_backend::{AttendParams, Pairing};
use kvant_gguf::Gguf;
use kvant_kv::{KvLayerShape, KvShape};

use crate::ModelError;
use crate::rope::{Rope, Scaling};
use crate::weights::decode_vector;

/// The families this engine runs. They share one decoder; what differs is data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama and Mistral: interleaved RoPE pairs.
    Llama,
    /// Qwen2 and Qwen2.5: biases on Q, K and V.
    Qwen2,
    /// Qwen3: an RMS norm on every query and key head.
    Qwen3,
}

impl Family {
    const ALL: [(&'static str, Self); 3] =
        [("llama", Self::Llama), ("qwen2", Self::Qwen2), ("qwen3", Self::Qwen3)];

    /// The name in `general.architecture`.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, family)| *family == self).expect("every family is listed").0
    }

    fn pairing(self) -> Pairing {
        match self {
            Self::Llama => Pairing::Interleaved,
            Self::Qwen2 | Self::Qwen3 => Pairing::Halves,
        }
    }
}

/// The shape of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Which family's conventions hold.
    pub family: Family,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// The decoder layers, in order.
    pub layers: Vec<LayerSpec>,
    /// Added to the mean square in every norm.
    pub rms_eps: f32,
    /// Context length the model was trained for.
    pub n_ctx_train: usize,
    /// Rotary embedding.
    pub rope: Rope,
}

/// The shape of a decoder layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSpec {
    /// Its heads, and what its queries see.
    pub heads: KvLayerShape,
    /// Where the keys and values lie that its queries meet.
    pub state: LayerState,
    /// Width of the feed-forward layer.
    pub n_ff: usize,
}

/// What a layer keeps of past tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerState {
    /// Keys and values of its own.
    Own,
    /// Nothing: its queries meet the keys and values of this earlier layer, which has the same KV heads.
    Shared(usize),
}

impl LayerSpec {
    /// What attention goes by.
    pub fn attend_params(&self) -> AttendParams {
        let KvLayerShape { n_heads, n_kv_heads, k_head_dim, v_head_dim, .. } = self.heads;
        let scale = 1.0 / (k_head_dim as f32).sqrt();
        AttendParams { n_heads, n_kv_heads, k_head_dim, v_head_dim, scale, soft_cap: None }
    }

    /// Values of all queries of a row.
    pub fn n_q(&self) -> usize {
        self.heads.n_heads * self.heads.k_head_dim
    }

    /// Values of all keys of a row.
    pub fn n_k(&self) -> usize {
        self.heads.n_kv_heads * self.heads.k_head_dim
    }

    /// Values of all values of a row.
    pub fn n_v(&self) -> usize {
        self.heads.n_kv_heads * self.heads.v_head_dim
    }

    /// Values of what attention gives for a row.
    pub fn n_out(&self) -> usize {
        self.heads.n_heads * self.heads.v_head_dim
    }
}

impl Config {
    /// Reads and checks the hyper-parameters.
    ///
    /// # Errors
    /// An unknown architecture, a missing or absurd value (the key is named), or a feature that is not implemented.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let arch = gguf.meta().get::<&str>("general.architecture")?;
        let family = Family::ALL.iter().find(|(name, _)| *name == arch).map(|(_, family)| *family);
        let family = family.ok_or_else(|| ModelError::Architecture {
            got: arch.to_owned(),
            known: Family::ALL.map(|(name, _)| name).join(", "),
        })?;
        let keys = Keys { gguf, arch };
        keys.refuse("expert_count", "mixture of experts")?;
        keys.refuse("attention.sliding_window", "sliding-window attention")?;

        let n_embd = keys.size("embedding_length")?;
        let n_heads = keys.size("attention.head_count")?;
        let n_kv_heads = keys.size_or("attention.head_count_kv", n_heads)?;
        if n_heads % n_kv_heads != 0 {
            let what = format!("a multiple of the {n_kv_heads} KV heads");
            return Err(keys.bad("attention.head_count", &what, n_heads));
        }
        let k_head_dim = keys.size_or("attention.key_length", n_embd / n_heads)?;
        let v_head_dim = keys.size_or("attention.value_length", k_head_dim)?;
        for (key, dim) in [("attention.key_length", k_head_dim), ("attention.value_length", v_head_dim)] {
            if dim == 0 || dim % 2 != 0 || dim > 1024 {
                return Err(keys.bad(key, "an even head size from 2 to 1024", dim));
            }
        }
        let n_ctx_train = keys.size("context_length")?;
        let n_layers = keys.size("block_count")?;
        // Each layer has tensors; a number beyond them is checked before anything is made for each.
        if n_layers > gguf.tensors().len() {
            let what = format!("at most one layer for each of {} tensors", gguf.tensors().len());
            return Err(keys.bad("block_count", &what, n_layers));
        }
        check_heads(&keys, n_layers, [n_kv_heads, k_head_dim, v_head_dim])?;
        let heads = KvLayerShape { n_heads, n_kv_heads, k_head_dim, v_head_dim, window: None };
        Ok(Self {
            family,
            n_embd,
            layers: vec![
                LayerSpec { heads, state: LayerState::Own, n_ff: keys.size("feed_forward_length")? };
                n_layers
            ],
            rms_eps: keys.float("attention.layer_norm_rms_epsilon")?,
            n_ctx_train,
            rope: read_rope(&keys, family.pairing(), k_head_dim, n_ctx_train)?,
        })
    }

    /// The KV heads, as the cache sees them.
    pub fn kv_shape(&self) -> KvShape {
        self.kv_shape_of(0..self.layers.len())
    }

    /// Which keys and values layer `index` meets: their number among those that layers from `first` on keep; `None` when an
    /// earlier layer keeps them.
    pub fn kv_ordinal(&self, first: usize, index: usize) -> Option<usize> {
        let owner = match self.layers[index].state {
            LayerState::Own => index,
            LayerState::Shared(owner) => owner,
        };
        let before = self.layers.get(first..owner)?;
        Some(before.iter().filter(|layer| layer.state == LayerState::Own).count())
    }

    /// What some of the layers keep.
    ///
    /// # Panics
    /// When the model has no such layers.
    pub fn kv_shape_of(&self, layers: Range<usize>) -> KvShape {
        let own = self.layers[layers].iter().filter(|layer| layer.state == LayerState::Own);
        KvShape { layers: own.map(|layer| layer.heads).collect(), states: Vec::new() }
    }
}

/// Holds the KV heads against the tensors: each takes rows of them, at least a value for each dim.
fn check_heads(keys: &Keys, n_layers: usize, [n_kv_heads, k, v]: [usize; 3]) -> Result<(), ModelError> {
    let stored: u128 = keys.gguf.tensors().iter().map(|info| info.elements() as u128).sum();
    let taken = n_layers as u128 * n_kv_heads as u128 * (k + v) as u128;
    if taken <= stored {
        return Ok(());
    }
    let what = format!("heads that {stored} values in tensors suffice for");
    Err(keys.bad("attention.head_count_kv", &what, n_kv_heads))
}

fn read_rope(keys: &Keys, pairing: Pairing, head_dim: usize, n_ctx_train: usize) -> Result<Rope, ModelError> {
    let n_rot = keys.size_or("rope.dimension_count", head_dim)?;
    if n_rot % 2 != 0 || n_rot > head_dim {
        return Err(keys.bad("rope.dimension_count", &format!("an even number up to {head_dim}"), n_rot));
    }
    let theta = keys.float_or("rope.freq_base", 10_000.0)?;
    let factor = match keys.float_or("rope.scaling.factor", 0.0)? {
        0.0 => keys.float_or("rope.scale_linear", 1.0)?,
        factor => factor,
    };
    let n_ctx_orig = keys.size_or("rope.scaling.original_context_length", n_ctx_train)?;
    // A factor without a type means linear scaling, as other readers of GGUF take it.
    let default = if factor == 1.0 { "none" } else { "linear" };
    let scaling = match keys.str_or("rope.scaling.type", default)? {
        "none" => Scaling::None,
        "linear" => Scaling::Linear { factor },
        "yarn" => Scaling::Yarn {
            factor,
            n_ctx_orig,
            beta_fast: keys.float_or("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: keys.float_or("rope.scaling.yarn_beta_slow", 1.0)?,
            attn_factor: keys.float_or("rope.scaling.attn_factor", 1.0)?,
        },
        other => {
            return Err(ModelError::Unsupported {
                what: format!("RoPE scaling '{other}' (known: linear, yarn, llama3)"),
            });
        }
    };
    let frequency_factors = keys.gguf.find_tensor("rope_freqs.weight");
    let frequency_factors = frequency_factors.map(|t| decode_vector(&t, n_rot / 2)).transpose()?;
    Rope::new(pairing, n_rot, theta, &scaling, frequency_factors.as_deref())
        .ok_or_else(|| keys.bad("rope.freq_base", "a positive base and scaling factor", theta))
}

/// Reads `{arch}.key` values.
struct Keys<'a> {
    gguf: &'a Gguf,
    arch: &'a str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn has(&self, key: &str) -> bool {
        self.gguf.meta().value(&self.key(key)).is_some()
    }

    /// A size from 1 to 2³¹.
    fn size(&self, key: &str) -> Result<usize, ModelError> {
        let value: u32 = self.gguf.meta().get(&self.key(key))?;
        match value {
            1..=0x7fff_ffff => Ok(value as usize),
            _ => Err(self.bad(key, "a positive number", value)),
        }
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        if self.has(key) { self.size(key) } else { Ok(default) }
    }

    fn float(&self, key: &str) -> Result<f32, ModelError> {
        let value: f32 = self.gguf.meta().get(&self.key(key))?;
        if value.is_finite() && value >= 0.0 {
            Ok(value)
        } else {
            Err(self.bad(key, "a finite number", value))
        }
    }

    fn float_or(&self, key: &str, default: f32) -> Result<f32, ModelError> {
        if self.has(key) { self.float(key) } else { Ok(default) }
    }

    fn str_or<'a>(&'a self, key: &str, default: &'a str) -> Result<&'a str, ModelError> {
        Ok(self.gguf.meta().find(&self.key(key))?.unwrap_or(default))
    }

    fn refuse(&self, key: &str, feature: &str) -> Result<(), ModelError> {
        if self.gguf.meta().find::<u32>(&self.key(key))?.unwrap_or(0) > 0 {
            return Err(ModelError::Unsupported { what: format!("{feature} ({})", self.key(key)) });
        }
        Ok(())
    }

    fn bad(&self, key: &str, expected: &str, got: impl std::fmt::Display) -> ModelError {
        ModelError::Value { key: self.key(key), expected: expected.to_owned(), got: got.to_string() }
    }
}
