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
//!
//! An index of blocks has a query head for each KV head of usual attention (MiniMax M3):
//!
//! ```text
//! q[h] = rope(norm(W_q n))[h],  k = rope(norm(W_k n))                     per token
//! I[t, h, b] = max_s q[t, h] · k_s                                        s in block b, s <= t
//! ```
//!
//! A query attends to the last blocks and to the others of the largest I.
//!
//! An index of pooled keys has a key for each whole block (Qwen4-Exp):
//!
//! ```text
//! q[h] = rope(norm(W_q n))[h]                                             per token
//! k = rope(norm(mean(W_k n)))                                             per block
//! I[t, b] = Σ_h max(0, q[t, h] · k_b)
//! ```
//!
//! A query attends to the whole blocks of the largest I, and to the tokens behind the last one.

use kvant_backend::{Pairing, TokenPool};
use kvant_kv::{KeyPool, KvLayerShape};

use super::heads::LayerWindows;
use super::ropes::Ropes;
use super::{Keys, Latent, shared_kv};
use crate::ModelError;
use crate::family::{Family, IndexRule};

/// How a layer selects the tokens that a query attends to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenIndex {
    /// Query heads.
    pub n_heads: usize,
    /// Size of a query head and of the key.
    pub dim: usize,
    /// Tokens that a query attends to, or blocks of them.
    pub n_used: usize,
    /// The blocks that it selects instead of tokens.
    pub blocks: Option<TokenBlocks>,
    /// Pair order of RoPE, which rotates as many values as in attention.
    pub pairing: Pairing,
    /// Whether it rotates the last values of a head in the file; loaded, they come first.
    pub rotates_last: bool,
    /// Epsilon of the LayerNorm of keys.
    pub key_eps: f32,
    /// Whether the layer selects tokens, rather than attending to those of the layer before.
    pub selects: bool,
}

/// Blocks of tokens that an index selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBlocks {
    /// Tokens of a block.
    pub size: usize,
    /// The keys by which it selects them.
    pub keys: BlockKeys,
}

/// The keys by which an index selects blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockKeys {
    /// Those of their tokens, for each KV head.
    OfTokens {
        /// The last blocks, which each query attends to.
        n_local: usize,
    },
    /// One for each whole block, for all KV heads.
    Pooled {
        /// Index into [`Config::ropes`](crate::Config::ropes) for these keys.
        rope: usize,
    },
}

impl TokenIndex {
    /// Returns the tokens of a selected block: one where tokens are selected.
    pub fn block_size(&self) -> usize {
        self.blocks.map_or(1, |blocks| blocks.size)
    }

    /// Returns the selections of a query: of blocks by the keys of tokens, one for each KV head.
    pub fn n_lists(&self) -> usize {
        match self.blocks.map(|blocks| blocks.keys) {
            Some(BlockKeys::OfTokens { .. }) => self.n_heads,
            Some(BlockKeys::Pooled { .. }) | None => 1,
        }
    }

    /// Returns how the tokens of a block become its key, if it has one.
    pub fn pool(&self) -> Option<TokenPool> {
        let TokenBlocks { size, keys } = self.blocks?;
        matches!(keys, BlockKeys::Pooled { .. }).then_some(TokenPool {
            stride: size,
            width: self.dim,
            overlaps: false,
        })
    }

    /// Returns the same as the cache stores it.
    pub(super) fn key_pool(&self) -> Option<KeyPool> {
        Some(KeyPool { stride: self.pool()?.stride, of_index: true })
    }
}

/// Largest size of a key, and most heads: several times those of any model.
const MAX_DIM: usize = 1024;
const MAX_HEADS: usize = 1024;

/// Reads the index of each layer; none for families without, and for layers with a window.
pub(super) fn read(
    keys: &Keys,
    family: &Family,
    latent: Option<Latent>,
    heads: &[KvLayerShape],
    windows: &LayerWindows,
) -> Result<Vec<Option<TokenIndex>>, ModelError> {
    let n_layers = heads.len();
    let of_usual_attention = |rule: &IndexRule| rule.of_blocks || rule.pools_keys;
    let Some(rule) = family.index.filter(|rule| of_usual_attention(rule) || latent.is_some()) else {
        return Ok(vec![None; n_layers]);
    };
    let (n_heads, dim, n_used) = (keys.size(HEADS)?, keys.size(DIM)?, keys.size(N_USED)?);
    if n_heads > MAX_HEADS {
        return Err(keys.bad(HEADS, &format!("at most {MAX_HEADS} heads"), n_heads));
    }
    let n_rot = match latent {
        Some(latent) => latent.n_rot,
        None => keys.size_or("rope.dimension_count", heads[0].k_head_dim)?,
    };
    if dim % 2 != 0 || !(n_rot..=MAX_DIM).contains(&dim) {
        let expected = format!("an even size from {n_rot} to {MAX_DIM}");
        return Err(keys.bad(DIM, &expected, dim));
    }
    let (pairing, rotates_last) = (rule.pairing, rule.rotates_last);
    if rule.pools_keys {
        let sizes = IndexSizes { n_heads, dim, n_used };
        return read_pooled(keys, sizes, rule.pairing, heads);
    }
    let key_eps = rule.key_eps.map_or_else(|| keys.float("attention.layer_norm_rms_epsilon"), Ok)?;
    let index =
        TokenIndex { n_heads, dim, n_used, blocks: None, pairing, rotates_last, key_eps, selects: true };
    if rule.of_blocks {
        return read_blocks(keys, index, heads);
    }
    if latent.is_some_and(|latent| latent.q_rank.is_none()) {
        return Err(keys.bad("attention.q_lora_rank", "a rank, as the index reads low-rank queries", 0));
    }
    if family.windows.is_some() {
        check_windows(keys, windows)?;
    }
    let selects = match rule.may_share {
        true => read_selecting(keys, n_layers)?,
        false => vec![true; n_layers],
    };
    let of_layer =
        |(selects, is_windowed): (bool, &bool)| (!is_windowed).then_some(TokenIndex { selects, ..index });
    Ok(selects.into_iter().zip(&windows.layers).map(of_layer).collect())
}

const N_USED: &str = "attention.indexer.top_k";
const HEADS: &str = "attention.indexer.head_count";
const DIM: &str = "attention.indexer.key_length";
/// Which layers have an index of their own.
const TYPES: &str = "attention.indexer.types";

/// Reads the blocks that layers with the tensors of an index select.
fn read_blocks(
    keys: &Keys,
    index: TokenIndex,
    heads: &[KvLayerShape],
) -> Result<Vec<Option<TokenIndex>>, ModelError> {
    const LOCAL: &str = "attention.indexer.local_blocks";
    let (size, n_local) = (keys.size("attention.indexer.block_size")?, keys.count(LOCAL)?);
    if n_local > index.n_used {
        return Err(keys.bad(
            LOCAL,
            &format!("at most the {} that a query attends to", index.n_used),
            n_local,
        ));
    }
    let of_layer = |(layer, heads): (usize, &KvLayerShape)| {
        let parts = ["q_proj", "k_proj", "q_norm", "k_norm"];
        let has = |part: &str| keys.gguf.find_info(&format!("blk.{layer}.indexer.{part}.weight")).is_some();
        let has_index = parts.into_iter().any(has);
        if has_index && heads.n_kv_heads != index.n_heads {
            return Err(keys.bad(
                HEADS,
                &format!("a head for each of {} KV heads", heads.n_kv_heads),
                index.n_heads,
            ));
        }
        let blocks = Some(TokenBlocks { size, keys: BlockKeys::OfTokens { n_local } });
        Ok(has_index.then_some(TokenIndex { blocks, ..index }))
    };
    heads.iter().enumerate().map(of_layer).collect()
}

/// Sizes of an index in a file.
#[derive(Clone, Copy)]
struct IndexSizes {
    n_heads: usize,
    dim: usize,
    n_used: usize,
}

/// Reads the blocks whose pooled keys layers with attention select.
fn read_pooled(
    keys: &Keys,
    IndexSizes { n_heads, dim, n_used }: IndexSizes,
    pairing: Pairing,
    heads: &[KvLayerShape],
) -> Result<Vec<Option<TokenIndex>>, ModelError> {
    let of_layer = |size: usize| {
        if size == 0 {
            return Ok(None);
        }
        if n_used % size != 0 {
            return Err(keys.bad(N_USED, &format!("whole blocks of {size} tokens"), n_used));
        }
        // The rotary embedding is known once all of the file are.
        let blocks = Some(TokenBlocks { size, keys: BlockKeys::Pooled { rope: 0 } });
        Ok(Some(TokenIndex {
            n_heads,
            dim,
            n_used: n_used / size,
            blocks,
            pairing,
            rotates_last: false,
            key_eps: keys.float("attention.layer_norm_rms_epsilon")?,
            selects: true,
        }))
    };
    shared_kv::read_strides(keys, heads.len())?.into_iter().map(of_layer).collect()
}

/// Adds the rotary embeddings of pooled keys to those of the model, and refers to them.
pub(super) fn add_ropes(indexes: &mut [Option<TokenIndex>], ropes: &mut Ropes) {
    for TokenBlocks { size, keys } in indexes.iter_mut().flatten().filter_map(|of| of.blocks.as_mut()) {
        if let BlockKeys::Pooled { rope } = keys {
            *rope = ropes.add(ropes.all[0].clone().pooled(*size));
        }
    }
}

/// Rejects a file that gives an index to a layer with a window, or none to another layer.
fn check_windows(keys: &Keys, windows: &LayerWindows) -> Result<(), ModelError> {
    let Some(types) = keys.gguf.meta().find::<Vec<bool>>(&keys.key(TYPES))? else { return Ok(()) };
    let n_layers = windows.layers.len();
    if types.len() < n_layers {
        return Err(keys.bad(TYPES, &format!("{n_layers} layers"), types.len()));
    }
    let mut both = types.iter().zip(&windows.layers);
    let Some(layer) = both.position(|(has_index, is_windowed)| has_index == is_windowed) else {
        return Ok(());
    };
    let got = if types[layer] { "both" } else { "none" };
    Err(keys.bad(TYPES, &format!("either an index or a window in layer {layer}"), got))
}

/// Reads which layers select tokens: those with the tensors of an index, unless the file names
/// them.
fn read_selecting(keys: &Keys, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    let mut selects = match keys.gguf.meta().find::<Vec<bool>>(&keys.key(TYPES))? {
        Some(selects) if selects.len() < n_layers => {
            return Err(keys.bad(TYPES, &format!("{n_layers} layers"), selects.len()));
        }
        Some(selects) => selects,
        None => {
            let has_key =
                |layer| keys.gguf.find_info(&format!("blk.{layer}.indexer.attn_k.weight")).is_some();
            (0..n_layers).map(has_key).collect()
        }
    };
    if !selects[0] {
        return Err(keys.bad(TYPES, "a first layer that selects tokens", "one that selects none"));
    }
    selects.truncate(n_layers);
    Ok(selects)
}
