//! Weights of an index that selects tokens; [`TokenIndex`] has its equations.

use kvant_backend::Backend;

use super::Loader;
use super::low_rank::RowsOf;
use crate::{ModelError, TokenIndex};

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
}
