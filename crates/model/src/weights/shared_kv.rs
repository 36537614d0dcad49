//! Weights of attention with one shared KV head; [`SharedKv`] has its equations.

use kvant_backend::{Backend, Heads, TokenPool};

use super::Loader;
use super::low_rank::RowsOf;
use super::mla::LatentLowRank;
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
    pub(crate) low_rank: LatentLowRank<B>,
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
        let (n_q, of_index) = (spec.n_q(), spec.index.zip(keys.and_then(|keys| keys.index)));
        let rows = |suffix: &str, n: usize| RowsOf::all(name(suffix), n);
        let mut of_input = vec![rows("attn_q_a", q_rank), rows("attn_kv", dim)];
        let mut of_queries = vec![rows("attn_q_b", n_q)];
        for (of, pool) in [
            ("attn_compressor", keys.map(|keys| keys.pool)),
            ("indexer_compressor", of_index.map(|(_, keys)| keys.pool)),
        ] {
            let n = pool.map(|pool| pool.n_in());
            of_input.extend(
                n.into_iter().flat_map(|n| ["kv", "gate"].map(|part| rows(&format!("{of}_{part}"), n))),
            );
        }
        if let Some((of, _)) = of_index {
            of_input.push(rows("indexer.proj", of.n_heads));
            of_queries.push(rows("indexer.attn_q_b", of.n_heads * of.dim));
        }
        let (matrices, of_input) = self.group_of(c.n_embd, &of_input)?;
        let (queries, of_queries) = self.group_of(q_rank, &of_queries)?;
        let (mut matrices, mut queries) = (matrices.into_iter(), queries.into_iter());
        let mut next = || matrices.next().expect("a matrix for each");
        let (low_queries, keys_matrix) = (next(), next());
        let pooled = match keys {
            Some(keys) => Some(self.pooled_keys(&name("attn_compressor"), keys.pool, [next(), next()])?),
            None => None,
        };
        let mut query = || queries.next().expect("a matrix for each");
        let own_queries = query();
        let index = match of_index {
            Some((_, keys)) => {
                let keys = self.pooled_keys(&name("indexer_compressor"), keys.pool, [next(), next()])?;
                Some(PooledIndexWeights { queries: query(), heads: next(), keys })
            }
            None => None,
        };
        let of_groups = self.source(&name("attn_output_a"), n_q / n_groups, n_groups * rank)?;
        let ([out], of_output) = self.group(n_groups * rank, [rows("attn_output_b", c.n_embd)])?;
        Ok(SharedKvAttention {
            of_queries: low_queries,
            queries_norm: self.vector(&name("attn_q_a_norm"), q_rank)?,
            queries: own_queries,
            ones: self.upload(&vec![1.0; dim])?,
            keys: keys_matrix,
            keys_norm: self.vector(&name("attn_kv_a_norm"), dim)?,
            sinks: self.vector(&name("attn_sinks"), spec.heads.n_heads)?,
            of_groups: self.backend.upload_experts(of_groups, n_groups)?,
            out,
            pooled,
            index,
            low_rank: LatentLowRank { input: of_input, queries: of_queries, output: of_output },
        })
    }

    /// Loads the bias and the norm of pooled keys, whose tensors' names start like that of `of`.
    fn pooled_keys(
        &mut self,
        of: &str,
        pool: TokenPool,
        [values, gates]: [B::Matrix; 2],
    ) -> Result<PooledKeyWeights<B>, ModelError> {
        let name = |part: &str| of.replace(".weight", &format!("_{part}.weight"));
        let bias = self.flat(&name("ape"), &[pool.n_in(), pool.stride])?;
        Ok(PooledKeyWeights { values, gates, bias, norm: self.vector(&name("norm"), pool.width)? })
    }
}
