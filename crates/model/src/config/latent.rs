//! Latent attention (arXiv 2405.04434): keys and values of all heads are made of one small vector of each token.
//!
//! ```text
//! c = norm(W_c n),  r = rope(W_r n)                     of each token: what is kept
//! k[h] = K[h] c, r      v[h] = V[h] c                   of each head
//! q[h] . k[h] = (K[h]^T p[h]) . c + rope(t[h]) . r      p and t the parts of a query that are not turned, and that are
//! sum w v[h] = V[h] sum w c
//! ```
//!
//! So queries are brought to where c is, and what attention gives of c is brought back: all query heads meet one KV head, whose
//! keys are c and r, one after the other, and whose values are c. The cache keeps one stream of these keys and reads values from it
//! too.

use kvant_kv::KvLayerShape;

use super::Keys;
use crate::ModelError;

/// The sizes of latent attention, in which the keys and values of all heads are made of one small vector of each token (arXiv
/// 2405.04434).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Of what queries are made of, where that is smaller than the model.
    pub q_rank: Option<usize>,
    /// Of c.
    pub rank: usize,
    /// Of r: what RoPE turns.
    pub n_rot: usize,
    /// Of the part of a key that is not turned.
    pub k_dim: usize,
    /// Of a value.
    pub v_dim: usize,
}

impl Latent {
    /// Size of a key as the model says it, of which the factor on scores comes.
    pub fn whole(&self) -> usize {
        self.k_dim + self.n_rot
    }
}

/// The largest heads.
const MOST: usize = 1024;

/// Reads and checks what a file says of latent attention. Newer files say the sizes of heads under names of their own, beside those
/// of what is kept.
pub(super) fn read(keys: &Keys, n_layers: usize) -> Result<(KvLayerShape, Latent), ModelError> {
    const RANK: &str = "attention.kv_lora_rank";
    const TURNED: &str = "rope.dimension_count";
    let n_heads = keys.size_of("attention.head_count", &vec![true; n_layers])?;
    let (rank, n_rot) = (keys.size(RANK)?, keys.size(TURNED)?);
    let size = |key, older| if keys.has(key) { (key, keys.size(key)) } else { (older, keys.size(older)) };
    let (k_key, whole) = size("attention.key_length_mla", "attention.key_length");
    let (v_key, v_dim) = size("attention.value_length_mla", "attention.value_length");
    let (whole, v_dim) = (whole?, v_dim?);
    for (key, dim) in [(k_key, whole), (v_key, v_dim)] {
        if dim > MOST {
            return Err(keys.bad(key, &format!("a head size up to {MOST}"), dim));
        }
    }
    if n_rot % 2 != 0 || n_rot >= whole {
        return Err(keys.bad(TURNED, &format!("an even number below {whole}"), n_rot));
    }
    if rank % 2 != 0 || rank.saturating_add(n_rot) > MOST {
        return Err(keys.bad(RANK, &format!("an even number up to {}", MOST - n_rot), rank));
    }
    keys.refuse_positive(super::ropes::TEMPERATURE, "scores that grow with the position")?;
    let q_rank = Some(keys.count("attention.q_lora_rank")?).filter(|&rank| rank > 0);
    let heads = KvLayerShape {
        n_heads,
        n_kv_heads: 1,
        k_head_dim: rank + n_rot,
        v_head_dim: rank,
        window: None,
        joint: true,
    };
    Ok((heads, Latent { q_rank, rank, n_rot, k_dim: whole - n_rot, v_dim }))
}

/// The factor on scores: where YaRN says that it sharpens them by m, files have that in the place of cosines and sines, and a tenth
/// of its rate.
pub(super) fn read_scale(keys: &Keys, latent: Latent) -> Result<f32, ModelError> {
    let plain = 1.0 / (latent.whole() as f32).sqrt();
    let factor = keys.float_or("rope.scaling.factor", 1.0)?;
    if keys.str_or("rope.scaling.type", "none")? != "yarn" || factor <= 1.0 {
        return Ok(plain);
    }
    let sharpened = 1.0 + read_rate(keys)? * factor.ln();
    Ok(plain * sharpened * sharpened)
}

/// How fast scores are sharpened with the logarithm of YaRN's factor; 0 where cosines and sines are instead.
pub(super) fn read_rate(keys: &Keys) -> Result<f32, ModelError> {
    keys.float_or("rope.scaling.yarn_log_multiplier", 0.0)
}
