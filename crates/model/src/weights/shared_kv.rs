//! Weights of attention with one shared KV head; [`SharedKv`] has its equations.

use kvant_backend::{Backend, Heads, TokenPool};

use super::Loader;
use crate::{Config, ModelError, SharedKv};

/// Weights of attention with one shared KV head. Matrices are `[n_out, n_in]`.
pub(crate) struct SharedKvAttention<B: Backend> {
    /// Low-rank query input, `[q_rank, n_embd]`, and its norm.
    pub(crate) of_queries: B::Matrix,
    pub(crate) queries_norm: B::Buffer,
    /// `[n_heads * head_dim, q_rank]`
    pub(crate) queries: B::Matrix,
    /// Weight of the norm of queries: all ones, `[head_dim]`.
    pub(crate) ones: B::Buffer,
    /// `[head_dim, n_embd]`, and its norm.
    pub(crate) keys: B::Matrix,
    pub(crate) keys_norm: B::Buffer,
    /// Attention sink of each query head, `[n_heads]`.
    pub(crate) sinks: B::Buffer,
    /// Output projection of each group of heads, `[groups, rank, heads * head_dim]`.
    pub(crate) of_groups: B::Experts,
    /// `[n_embd, groups * rank]`
    pub(crate) out: B::Matrix,
    pub(crate) pooled: Option<PooledKeyWeights<B>>,
    pub(crate) index: Option<PooledIndexWeights<B>>,
}

/// Weights of pooled keys.
pub(crate) struct PooledKeyWeights<B: Backend> {
    /// Of what is pooled, and of its gates, `[n_in, n_embd]`.
    pub(crate) values: B::Matrix,
    pub(crate) gates: B::Matrix,
    /// Bias of the gates, `[stride, n_in]`.
    pub(crate) bias: B::Buffer,
    /// Norm of the pooled keys, `[width]`.
    pub(crate) norm: B::Buffer,
}

/// Weights of an index with pooled keys.
pub(crate) struct PooledIndexWeights<B: Backend> {
    /// Of queries, from the low-rank ones of attention, `[n_heads * dim, q_rank]`.
    pub(crate) queries: B::Matrix,
    /// Of the weights of heads, `[n_heads, n_embd]`.
    pub(crate) heads: B::Matrix,
    pub(crate) keys: PooledKeyWeights<B>,
}

impl<B: Backend> Loader<'_, B> {
    pub(super) fn shared_kv_attention(
        &mut self,
        c: &Config,
        index: usize,
        SharedKv { q_rank, groups: Heads { n: n_groups, dim: rank }, keys, .. }: SharedKv,
    ) -> Result<SharedKvAttention<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}.weight");
        let (spec, dim) = (&c.layers[index], c.layers[index].heads.k_head_dim);
        let n_q = spec.n_q();
        let of_groups = self.source(&name("attn_output_a"), n_q / n_groups, n_groups * rank)?;
        Ok(SharedKvAttention {
            of_queries: self.matrix(&name("attn_q_a"), c.n_embd, q_rank)?,
            queries_norm: self.vector(&name("attn_q_a_norm"), q_rank)?,
            queries: self.matrix(&name("attn_q_b"), q_rank, n_q)?,
            ones: self.upload(&vec![1.0; dim])?,
            keys: self.matrix(&name("attn_kv"), c.n_embd, dim)?,
            keys_norm: self.vector(&name("attn_kv_a_norm"), dim)?,
            sinks: self.vector(&name("attn_sinks"), spec.heads.n_heads)?,
            of_groups: self.backend.upload_experts(of_groups, n_groups)?,
            out: self.matrix(&name("attn_output_b"), n_groups * rank, c.n_embd)?,
            pooled: match keys {
                Some(keys) => Some(self.pooled_keys(c.n_embd, &name("attn_compressor"), keys.pool)?),
                None => None,
            },
            index: match (spec.index, keys.and_then(|keys| keys.index)) {
                (Some(of), Some(keys)) => Some(PooledIndexWeights {
                    queries: self.matrix(&name("indexer.attn_q_b"), q_rank, of.n_heads * of.dim)?,
                    heads: self.matrix(&name("indexer.proj"), c.n_embd, of.n_heads)?,
                    keys: self.pooled_keys(c.n_embd, &name("indexer_compressor"), keys.pool)?,
                }),
                _ => None,
            },
        })
    }

    /// Loads the weights of pooled keys, whose tensors' names start like that of `of`.
    fn pooled_keys(
        &mut self,
        n_embd: usize,
        of: &str,
        pool: TokenPool,
    ) -> Result<PooledKeyWeights<B>, ModelError> {
        let name = |part: &str| of.replace(".weight", &format!("_{part}.weight"));
        Ok(PooledKeyWeights {
            values: self.matrix(&name("kv"), n_embd, pool.n_in())?,
            gates: self.matrix(&name("gate"), n_embd, pool.n_in())?,
            bias: self.flat(&name("ape"), &[pool.n_in(), pool.stride])?,
            norm: self.vector(&name("norm"), pool.width)?,
        })
    }
}
