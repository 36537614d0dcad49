//! Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): the keys and values of all
//! heads are projections of one latent vector per token.
//!
//! ```text
//! c = norm(W_c n),  r = rope(W_r n)                per token: the cached vectors
//! k[h] = K[h] c, r      v[h] = V[h] c              per head
//! q[h] . k[h] = (K[h]^T p[h]) . c + rope(t[h]) . r   p, t: query parts without and with RoPE
//! sum w v[h] = V[h] sum w c
//! ```
//!
//! In this absorbed form, queries are projected into the latent space and the attention output is
//! projected back: all query heads attend to one KV head with keys `[c, r]` and values `c`. The
//! cache stores one shared KV tensor: the keys, whose prefix is the values.
//!
//! Layers with a sliding window may have heads and ranks of their own (dots.3 note).

use kvant_kv::KvLayerShape;

use super::Keys;
use super::heads::LayerWindows;
use crate::ModelError;

/// Sizes of multi-head latent attention (MLA, arXiv 2405.04434), in which the keys and values of
/// all heads are projections of one latent vector per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Rank of the query projection, if queries are low-rank.
    pub q_rank: Option<usize>,
    /// Size of the latent vector c.
    pub rank: usize,
    /// Size of r: the part of a key with RoPE.
    pub n_rot: usize,
    /// Size of the part of a key head without RoPE.
    pub k_dim: usize,
    /// Size of a value head.
    pub v_dim: usize,
}

impl Latent {
    /// Returns the size of a key head in the model's definition, which determines the factor on
    /// scores.
    pub fn whole(&self) -> usize {
        self.k_dim + self.n_rot
    }
}

/// Maximum head size in the model's definition.
const MAX_HEAD_SIZE: usize = 1024;
/// Maximum size of a cached vector `[c, r]`: above the 1088 of dots.3 note.
const MAX_CACHED_SIZE: usize = 1152;

/// Attention of a layer: the heads of the absorbed form, and the sizes of the model's definition.
#[derive(Debug, Clone, Copy)]
pub(super) struct MlaLayer {
    pub heads: KvLayerShape,
    pub latent: Latent,
}

/// Names of the keys of sizes, which layers with a sliding window have for themselves.
struct SizeKeys {
    rank: &'static str,
    k_dim: &'static str,
    v_dim: &'static str,
}

/// Reads and checks the MLA keys of a file, for each layer.
pub(super) fn read(keys: &Keys, windows: &LayerWindows) -> Result<Vec<MlaLayer>, ModelError> {
    const WINDOWED: SizeKeys = SizeKeys {
        rank: "attention.kv_lora_rank_swa",
        k_dim: "attention.key_length_mla_swa",
        v_dim: "attention.value_length_mla_swa",
    };
    let newer_or = |newer, older| if keys.has(newer) { newer } else { older };
    // Newer files give the head sizes under separate names, beside those of the cached vectors.
    let full = SizeKeys {
        rank: "attention.kv_lora_rank",
        k_dim: newer_or("attention.key_length_mla", "attention.key_length"),
        v_dim: newer_or("attention.value_length_mla", "attention.value_length"),
    };
    let of_kind = |is_windowed: bool, names: &SizeKeys| {
        let layers: Vec<bool> = windows.layers.iter().map(|&windowed| windowed == is_windowed).collect();
        let window = windows.length.filter(|_| is_windowed);
        layers.contains(&true).then(|| read_kind(keys, names, &layers, window)).transpose()
    };
    let (full, windowed) = (of_kind(false, &full)?, of_kind(true, &WINDOWED)?);
    let of_layer = |&is_windowed: &bool| if is_windowed { windowed } else { full };
    Ok(windows.layers.iter().map(|layer| of_layer(layer).expect("the layer's kind was read")).collect())
}

/// Reads the attention of these layers, which have one window.
fn read_kind(
    keys: &Keys,
    &SizeKeys { rank: rank_key, k_dim: k_key, v_dim: v_key }: &SizeKeys,
    layers: &[bool],
    window: Option<usize>,
) -> Result<MlaLayer, ModelError> {
    const TURNED: &str = "rope.dimension_count";
    let n_heads = keys.size_of("attention.head_count", layers)?;
    let (rank, n_rot) = (keys.size(rank_key)?, keys.size(TURNED)?);
    let (whole, v_dim) = (keys.size(k_key)?, keys.size(v_key)?);
    for (key, dim) in [(k_key, whole), (v_key, v_dim)] {
        if dim > MAX_HEAD_SIZE {
            return Err(keys.bad(key, &format!("a head size up to {MAX_HEAD_SIZE}"), dim));
        }
    }
    if n_rot % 2 != 0 || n_rot >= whole {
        return Err(keys.bad(TURNED, &format!("an even number below {whole}"), n_rot));
    }
    if rank % 2 != 0 || rank.saturating_add(n_rot) > MAX_CACHED_SIZE {
        return Err(keys.bad(rank_key, &format!("an even number up to {}", MAX_CACHED_SIZE - n_rot), rank));
    }
    keys.refuse_positive("attention.value_scale", "a factor on values")?;
    let q_rank = Some(keys.count("attention.q_lora_rank")?).filter(|&rank| rank > 0);
    let heads = KvLayerShape {
        n_heads,
        n_kv_heads: 1,
        k_head_dim: rank + n_rot,
        v_head_dim: rank,
        window,
        shared_kv: true,
        index: None,
        pool: None,
    };
    Ok(MlaLayer { heads, latent: Latent { q_rank, rank, n_rot, k_dim: whole - n_rot, v_dim } })
}

/// Returns the factor on scores: with YaRN, files of MLA models have the attention scaling m here
/// instead of in the RoPE magnitude, and store a tenth of its rate.
pub(super) fn read_scale(keys: &Keys, latent: Latent) -> Result<f32, ModelError> {
    let plain = 1.0 / (latent.whole() as f32).sqrt();
    let factor = keys.float_or("rope.scaling.factor", 1.0)?;
    if keys.str_or("rope.scaling.type", "none")? != "yarn" || factor <= 1.0 {
        return Ok(plain);
    }
    let sharpened = 1.0 + read_rate(keys)? * factor.ln();
    Ok(plain * sharpened * sharpened)
}

/// Reads the rate of YaRN's attention scaling per logarithm of its factor; 0 if RoPE's magnitude
/// carries it.
pub(super) fn read_rate(keys: &Keys) -> Result<f32, ModelError> {
    keys.float_or("rope.scaling.yarn_log_multiplier", 0.0)
}
