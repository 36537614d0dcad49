//! Attention with one KV head whose keys are the values, and with pooled keys beside the tokens of
//! a window (DeepSeek-V4).
//!
//! ```text
//! a = norm(W_a n),  q[h] = rope(W_q[h] a / rms),  k = rope(norm(W_k n))          per token
//! c = rope(norm(pool(W_c n)))                                                   per stride
//! o[h] = rope⁻¹(softmax(scale q[h] · (k, c), sink[h]) (k, c))
//! x += W_o concat(W_g o[heads of g])                                            per group g
//! ```
//!
//! k are the keys of the window, c the pooled keys that a query sees:
//! [`Backend::pool_tokens`](kvant_backend::Backend::pool_tokens) has their equation. Pools of four
//! tokens overlap, and an index with pooled keys of its own selects some of them; those of more
//! tokens do not, and a query attends to all. A value has the rotation of its position, which the
//! output loses again at the position of the query. RoPE rotates the last values of a head.

use kvant_backend::{Heads, Pairing, TokenPool};
use kvant_kv::{KeyPool, KvLayerShape};

use super::ropes::Ropes;
use super::{Keys, TokenIndex, ropes};
use crate::ModelError;
use crate::family::Family;
use crate::rope::Rope;

/// Sizes of attention with one shared KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedKv {
    /// Rank of the query projection.
    pub q_rank: usize,
    /// Groups of heads in the output projection, and the values that it makes of each.
    pub groups: Heads,
    /// Index into [`Config::ropes`](crate::Config::ropes) of the rotation that undoes that of
    /// values.
    pub rope_back: usize,
    /// The pooled keys, if the layer has some.
    pub keys: Option<PooledKeySpec>,
}

/// Pooled keys of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PooledKeySpec {
    /// How tokens become keys.
    pub pool: TokenPool,
    /// Index into [`Config::ropes`](crate::Config::ropes) for the keys.
    pub rope: usize,
    /// The pooled keys of the index, where it selects some.
    pub index: Option<PooledIndexSpec>,
}

/// Pooled keys of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PooledIndexSpec {
    /// How tokens become keys.
    pub pool: TokenPool,
    /// Index into [`Config::ropes`](crate::Config::ropes) for the queries.
    pub q_rope: usize,
    /// Index for the keys.
    pub rope: usize,
}

impl PooledKeySpec {
    /// Returns the f32 values of the states: of the index, then of the keys.
    pub fn states(&self) -> impl Iterator<Item = usize> + use<> {
        self.index.map(|index| index.pool.n_state()).into_iter().chain([self.pool.n_state()])
    }
}

/// Shared-KV attention of a model.
pub(super) struct SharedKvLayers {
    /// Rotary embeddings, that of layers without pooled keys first.
    pub ropes: Vec<Rope>,
    pub layers: Vec<SharedKvLayer>,
}

/// Shared-KV attention of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedKvLayer {
    pub sizes: SharedKv,
    /// Index of its rotary embedding.
    pub rope: usize,
    pub index: Option<TokenIndex>,
}

/// The stride whose pools overlap and have an index.
const INDEXED: usize = 4;
const RATIOS: &str = "attention.compress_ratios";
const GROUPS: &str = "attention.output_group_count";
const N_ROT: &str = "rope.dimension_count";
/// The longest stride: many times that of any model.
const MAX_STRIDE: usize = 4096;
/// The most heads of an index, and the largest size of its key.
const MAX_INDEX: usize = 1024;

/// Reads shared-KV attention, and completes the heads of its layers.
pub(super) fn read(
    keys: &Keys,
    family: &Family,
    heads: &mut [KvLayerShape],
    n_ctx_train: usize,
) -> Result<SharedKvLayers, ModelError> {
    let q_rank = keys.size("attention.q_lora_rank")?;
    let groups = Heads { n: keys.size(GROUPS)?, dim: keys.size("attention.output_lora_rank")? };
    let strides = read_strides(keys, heads.len())?;
    let index = if strides.contains(&INDEXED) { Some(read_index(keys)?) } else { None };
    let dim = heads[0].k_head_dim;
    let n_rot = keys.size(N_ROT)?;
    let least = index.map_or(dim, |index| index.dim.min(dim));
    if n_rot % 2 != 0 || n_rot > least {
        return Err(keys.bad(N_ROT, &format!("an even number up to {least}"), n_rot));
    }
    let base = keys.float_or("rope.freq_base", 10_000.0)?;
    let mut all = Ropes::given(Vec::new());
    let plain = ropes::plain(keys, family.pairing, n_rot, base)?.of_last(dim);
    let (rope, rope_back) = (all.add(plain.clone()), all.add(plain.backwards()));
    let of_pools = match strides.iter().any(|&stride| stride > 0) {
        true => Some(ropes::of_pools(keys, family, n_rot, n_ctx_train)?),
        false => None,
    };
    let mut layers = Vec::with_capacity(heads.len());
    for (heads, stride) in heads.iter_mut().zip(strides) {
        check_heads(keys, heads, groups)?;
        heads.shared_kv = true;
        let Some(of_pools) = of_pools.as_ref().filter(|_| stride > 0) else {
            let sizes = SharedKv { q_rank, groups, rope_back, keys: None };
            layers.push(SharedKvLayer { sizes, rope, index: None });
            continue;
        };
        let index = index.filter(|_| stride == INDEXED);
        let turned = of_pools.clone().of_last(dim);
        let pool = TokenPool { stride, width: dim, overlaps: stride == INDEXED };
        let pooled = PooledKeySpec {
            pool,
            rope: all.add(turned.clone().pooled(stride)),
            index: index.map(|TokenIndex { dim, .. }| {
                let turned = of_pools.clone().of_last(dim);
                let pool = TokenPool { width: dim, ..pool };
                PooledIndexSpec {
                    pool,
                    rope: all.add(turned.clone().pooled(stride)),
                    q_rope: all.add(turned),
                }
            }),
        };
        let pool = Some(KeyPool { stride, of_index: false });
        (heads.pool, heads.index) = (pool, index.map(|index| index.dim));
        let rope_back = all.add(turned.clone().backwards());
        let sizes = SharedKv { q_rank, groups, rope_back, keys: Some(pooled) };
        layers.push(SharedKvLayer { sizes, rope: all.add(turned), index });
    }
    Ok(SharedKvLayers { ropes: all.all, layers })
}

/// Reads the tokens per pooled key of each layer; 0 where a layer has none.
pub(super) fn read_strides(keys: &Keys, n_layers: usize) -> Result<Vec<usize>, ModelError> {
    let ratios: Vec<i64> = keys.gguf.meta().get(&keys.key(RATIOS))?;
    if ratios.len() < n_layers {
        return Err(keys.bad(RATIOS, &format!("{n_layers} layers"), ratios.len()));
    }
    let stride = |ratio: i64| match usize::try_from(ratio) {
        Ok(0) => Ok(0),
        Ok(stride) if (2..=MAX_STRIDE).contains(&stride) => Ok(stride),
        _ => Err(keys.bad(RATIOS, &format!("0, or 2 to {MAX_STRIDE} tokens"), ratio)),
    };
    ratios.into_iter().take(n_layers).map(stride).collect()
}

fn read_index(keys: &Keys) -> Result<TokenIndex, ModelError> {
    const HEADS: &str = "attention.indexer.head_count";
    const DIM: &str = "attention.indexer.key_length";
    let (n_heads, dim) = (keys.size(HEADS)?, keys.size(DIM)?);
    if n_heads > MAX_INDEX {
        return Err(keys.bad(HEADS, &format!("at most {MAX_INDEX} heads"), n_heads));
    }
    if dim % 2 != 0 || dim > MAX_INDEX {
        return Err(keys.bad(DIM, &format!("an even size up to {MAX_INDEX}"), dim));
    }
    Ok(TokenIndex {
        n_heads,
        dim,
        n_used: keys.size("attention.indexer.top_k")?,
        blocks: None,
        pairing: Pairing::Interleaved,
        rotates_last: true,
        key_eps: keys.float("attention.layer_norm_rms_epsilon")?,
        selects: true,
    })
}

fn check_heads(keys: &Keys, heads: &KvLayerShape, groups: Heads) -> Result<(), ModelError> {
    let KvLayerShape { n_heads, n_kv_heads, k_head_dim, v_head_dim, window, .. } = *heads;
    if n_kv_heads != 1 {
        return Err(keys.bad("attention.head_count_kv", "one KV head, whose keys are values", n_kv_heads));
    }
    if v_head_dim != k_head_dim {
        let expected = format!("the {k_head_dim} of a key, as keys are values");
        return Err(keys.bad("attention.value_length", &expected, v_head_dim));
    }
    if window.is_none() {
        return Err(keys.bad("attention.sliding_window", "a positive number", 0));
    }
    if n_heads % groups.n != 0 {
        return Err(keys.bad(GROUPS, &format!("equal groups of {n_heads} heads"), groups.n));
    }
    Ok(())
}
