//! Selection of the tokens that a query attends to (DeepSeek Sparse Attention, arXiv 2512.02556).
//!
//! ```text
//! q[h] = rope(W_q norm(W_a n))[h],  k = rope(LayerNorm(W_k n)),  w = W_w n      per token
//! I[t, s] = Σ_h w[t, h] max(0, q[t, h] · k_s)
//! ```
//!
//! A query attends to the tokens s of the largest I. The keys k are a cache of their own, beside
//! the latent vectors of attention. A layer may attend to the selection of an earlier one
//! (IndexCache, arXiv 2603.12201).

use kvant_backend::Pairing;

use super::{Keys, Latent};
use crate::ModelError;
use crate::family::Family;

/// How a layer selects the tokens that a query attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenIndex {
    /// Query heads.
    pub n_heads: usize,
    /// Size of a query head and of the key.
    pub dim: usize,
    /// Tokens that a query attends to.
    pub n_used: usize,
    /// Pair order of RoPE, which rotates as many values as in attention.
    pub pairing: Pairing,
    /// Whether the layer selects tokens, rather than attending to those of the layer before.
    pub selects: bool,
}

/// Largest size of a key, and most heads: several times those of any model.
const MAX_DIM: usize = 1024;
const MAX_HEADS: usize = 1024;

/// Reads the index of each layer; none for families without.
pub(super) fn read(
    keys: &Keys,
    family: &Family,
    latent: Option<Latent>,
    n_layers: usize,
) -> Result<Vec<Option<TokenIndex>>, ModelError> {
    const HEADS: &str = "attention.indexer.head_count";
    const DIM: &str = "attention.indexer.key_length";
    let (Some(rule), Some(latent)) = (family.index, latent) else { return Ok(vec![None; n_layers]) };
    let (n_heads, dim, n_used) = (keys.size(HEADS)?, keys.size(DIM)?, keys.size("attention.indexer.top_k")?);
    if n_heads > MAX_HEADS {
        return Err(keys.bad(HEADS, &format!("at most {MAX_HEADS} heads"), n_heads));
    }
    if dim % 2 != 0 || !(latent.n_rot..=MAX_DIM).contains(&dim) {
        let expected = format!("an even size from {} to {MAX_DIM}", latent.n_rot);
        return Err(keys.bad(DIM, &expected, dim));
    }
    if latent.q_rank.is_none() {
        return Err(keys.bad("attention.q_lora_rank", "a rank, as the index reads low-rank queries", 0));
    }
    let selects = match rule.may_share {
        true => read_selecting(keys, n_layers)?,
        false => vec![true; n_layers],
    };
    let index = |selects| Some(TokenIndex { n_heads, dim, n_used, pairing: rule.pairing, selects });
    Ok(selects.into_iter().map(index).collect())
}

/// Reads which layers select tokens: those with the tensors of an index, unless the file names
/// them.
fn read_selecting(keys: &Keys, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    const SELECTING: &str = "attention.indexer.types";
    let mut selects = match keys.gguf.meta().find::<Vec<bool>>(&keys.key(SELECTING))? {
        Some(selects) if selects.len() < n_layers => {
            return Err(keys.bad(SELECTING, &format!("{n_layers} layers"), selects.len()));
        }
        Some(selects) => selects,
        None => {
            let has_key =
                |layer| keys.gguf.find_info(&format!("blk.{layer}.indexer.attn_k.weight")).is_some();
            (0..n_layers).map(has_key).collect()
        }
    };
    if !selects[0] {
        return Err(keys.bad(SELECTING, "a first layer that selects tokens", "one that selects none"));
    }
    selects.truncate(n_layers);
    Ok(selects)
}
