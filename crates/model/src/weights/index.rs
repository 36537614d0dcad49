//! Weights of an index that selects tokens; [`TokenIndex`] has its equations.

use std::ops::Range;

use kvant_backend::Backend;

use super::Loader;
use super::low_rank::RowsOf;
use crate::{Config, Latent, ModelError, TokenIndex};

/// Weights of an index. Matrices are `[n_out, n_in]`.
pub(crate) struct IndexWeights<B: Backend> {
    /// Of queries, from the low-rank ones of attention, `[n_heads * dim, q_rank]`.
    pub(crate) queries: B::Matrix,
    /// Of the key, `[dim, n_embd]`.
    pub(crate) key: B::Matrix,
    /// LayerNorm of the key and its bias, `[dim]`.
    pub(crate) key_norm: [B::Buffer; 2],
    /// Of the weights of heads, `[n_heads, n_embd]`.
    pub(crate) heads: B::Matrix,
}

/// Weights of an index that selects blocks. Matrices are `[n_out, n_in]`.
pub(crate) struct BlockIndexWeights<B: Backend> {
    /// Of queries, `[n_heads * dim, n_embd]`.
    pub(crate) queries: B::Matrix,
    /// Of the key, `[dim, n_embd]`.
    pub(crate) key: B::Matrix,
    /// Norms of each query head and of the key, `[dim]`.
    pub(crate) norms: [B::Buffer; 2],
    /// Bias of the gates of its pool, if it pools keys: zeros, `[stride, dim]`.
    pub(crate) pool_bias: Option<B::Buffer>,
}

/// Returns the values of a head in a file, in the order of memory: first those that RoPE rotates.
fn order(
    TokenIndex { dim, rotates_last, .. }: TokenIndex,
    latent: Latent,
) -> impl Iterator<Item = Range<usize>> + Clone {
    let first = if rotates_last { dim - latent.n_rot } else { 0 };
    [first..dim, 0..first].into_iter().filter(|part| !part.is_empty())
}

impl<B: Backend> Loader<'_, B> {
    /// Returns the rows of the key and of the weights of heads of layer `index`, and those of
    /// queries; of a head first those that RoPE rotates.
    pub(super) fn rows_of_index(of: TokenIndex, latent: Latent, index: usize) -> [RowsOf; 3] {
        let TokenIndex { n_heads, dim, .. } = of;
        let name = |suffix: &str| format!("blk.{index}.indexer.{suffix}");
        let order = order(of, latent);
        let heads = |suffix, n: usize| {
            let order = &order;
            let of_head = move |head: usize| {
                order.clone().map(move |part| head * dim + part.start..head * dim + part.end)
            };
            RowsOf::some(name(suffix), n * dim, (0..n).flat_map(of_head))
        };
        [
            heads("attn_k.weight", 1),
            RowsOf::all(name("proj.weight"), n_heads),
            heads("attn_q_b.weight", n_heads),
        ]
    }

    /// Loads the LayerNorm of the key of layer `index`, in the order of its rows.
    pub(super) fn index_norm(
        &mut self,
        of: TokenIndex,
        latent: Latent,
        index: usize,
    ) -> Result<[B::Buffer; 2], ModelError> {
        let mut part = |kind| {
            let values = self.values(&format!("blk.{index}.indexer.k_norm.{kind}"), &[of.dim])?;
            let ordered: Vec<f32> = order(of, latent).flat_map(|part| &values[part]).copied().collect();
            self.upload(&ordered)
        };
        Ok([part("weight")?, part("bias")?])
    }

    /// Loads the index of layer `index`, if it selects blocks.
    pub(super) fn block_index(
        &mut self,
        c: &Config,
        index: usize,
    ) -> Result<Option<BlockIndexWeights<B>>, ModelError> {
        let of_blocks = c.layers[index].index.filter(|index| index.blocks.is_some());
        let Some(of @ TokenIndex { n_heads, dim, .. }) = of_blocks else { return Ok(None) };
        let name = |suffix: &str| format!("blk.{index}.indexer.{suffix}");
        let [q_norm, k_norm] =
            ["q_norm.weight", "k_norm.weight"].map(|suffix| self.vector(&name(suffix), dim));
        Ok(Some(BlockIndexWeights {
            queries: self.matrix(&name("q_proj.weight"), c.n_embd, n_heads * dim)?,
            key: self.matrix(&name("k_proj.weight"), c.n_embd, dim)?,
            norms: [q_norm?, k_norm?],
            pool_bias: of
                .pool()
                .map(|pool| self.upload(&vec![0.0; pool.stride * pool.n_in()]))
                .transpose()?,
        }))
    }
}
