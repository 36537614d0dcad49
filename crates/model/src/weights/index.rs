//! Weights of an index that selects tokens; [`TokenIndex`] has its equations.

use kvant_backend::Backend;

use super::Loader;
use super::low_rank::RowsOf;
use crate::{Config, ModelError, TokenIndex};

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
}

impl<B: Backend> Loader<'_, B> {
    /// Returns the rows of the key and of the weights of heads of layer `index`, and those of
    /// queries.
    pub(super) fn rows_of_index(TokenIndex { n_heads, dim, .. }: TokenIndex, index: usize) -> [RowsOf; 3] {
        let rows = |suffix: &str, n| RowsOf::all(format!("blk.{index}.indexer.{suffix}"), n);
        [rows("attn_k.weight", dim), rows("proj.weight", n_heads), rows("attn_q_b.weight", n_heads * dim)]
    }

    /// Loads the LayerNorm of the key of layer `index`.
    pub(super) fn index_norm(
        &mut self,
        TokenIndex { dim, .. }: TokenIndex,
        index: usize,
    ) -> Result<[B::Buffer; 2], ModelError> {
        let [weight, bias] = ["weight", "bias"].map(|of| format!("blk.{index}.indexer.k_norm.{of}"));
        Ok([self.vector(&weight, dim)?, self.vector(&bias, dim)?])
    }

    /// Loads the index of layer `index`, if it selects blocks.
    pub(super) fn block_index(
        &mut self,
        c: &Config,
        index: usize,
    ) -> Result<Option<BlockIndexWeights<B>>, ModelError> {
        let of_blocks = c.layers[index].index.filter(|index| index.blocks.is_some());
        let Some(TokenIndex { n_heads, dim, .. }) = of_blocks else { return Ok(None) };
        let name = |suffix: &str| format!("blk.{index}.indexer.{suffix}");
        let [q_norm, k_norm] =
            ["q_norm.weight", "k_norm.weight"].map(|suffix| self.vector(&name(suffix), dim));
        Ok(Some(BlockIndexWeights {
            queries: self.matrix(&name("q_proj.weight"), c.n_embd, n_heads * dim)?,
            key: self.matrix(&name("k_proj.weight"), c.n_embd, dim)?,
            norms: [q_norm?, k_norm?],
        }))
    }
}
