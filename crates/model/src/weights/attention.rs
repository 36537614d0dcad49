//! Weights of attention.

use kvant_backend::Backend;

use super::low_rank::RowsOf;
use super::{BlockIndexWeights, KV_TENSORS, LatentAttention, Loader, LowRank, SharedKvAttention};
use crate::config::LayerState;
use crate::family::OutputGates;
use crate::{Config, ModelError};

/// Attention of any kind.
pub(crate) enum AnyAttention<B: Backend> {
    Usual(Attention<B>),
    Latent(LatentAttention<B>),
    SharedKv(SharedKvAttention<B>),
}

/// Grouped-query attention. Matrices are `[n_out, n_in]`.
pub(crate) struct Attention<B: Backend> {
    pub(crate) wq: B::Matrix,
    pub(crate) wo: B::Matrix,
    pub(crate) bq: Option<B::Buffer>,
    pub(crate) bo: Option<B::Buffer>,
    pub(crate) q_norm: Option<B::Buffer>,
    /// Attention sink of each query head, `[n_heads]`.
    pub(crate) sinks: Option<B::Buffer>,
    /// Projection of the output gates, `[n_heads * v_head_dim, n_embd]` or `[n_heads, n_embd]`.
    pub(crate) gate: Option<B::Matrix>,
    /// Projections of K and V, if the layer has its own.
    pub(crate) kv: Option<KvWeights<B>>,
    /// Selection of the blocks of tokens that a query attends to.
    pub(crate) index: Option<BlockIndexWeights<B>>,
    /// LoRA weights of the input GEMM (queries, keys, values, gates), and of the output projection.
    pub(crate) low_rank: [Option<LowRank<B>>; 2],
}

/// Projections of K and V.
pub(crate) struct KvWeights<B: Backend> {
    pub(crate) wk: B::Matrix,
    /// `None` if V = K.
    pub(crate) wv: Option<B::Matrix>,
    pub(crate) bk: Option<B::Buffer>,
    pub(crate) bv: Option<B::Buffer>,
    pub(crate) k_norm: Option<B::Buffer>,
    /// Weight of the V norm: all ones, `[v_head_dim]`.
    pub(crate) v_norm: Option<B::Buffer>,
}

/// Query projection, output gates, K and V projections, and LoRA weights.
type Entering<B> =
    (<B as Backend>::Matrix, Option<<B as Backend>::Matrix>, Option<KvWeights<B>>, Option<LowRank<B>>);

impl<B: Backend> Loader<'_, B> {
    /// Loads the attention of layer `index`, if it has any.
    pub(super) fn any_attention(
        &mut self,
        c: &Config,
        index: usize,
    ) -> Result<Option<AnyAttention<B>>, ModelError> {
        let spec = &c.layers[index];
        if let Some(sizes) = spec.shared_kv {
            return Ok(Some(AnyAttention::SharedKv(self.shared_kv_attention(c, index, sizes)?)));
        }
        Ok(Some(match (spec.state, spec.latent) {
            (LayerState::Nothing, _) => return Ok(None),
            (_, Some(latent)) => AnyAttention::Latent(self.latent_attention(c, index, latent)?),
            (_, None) => AnyAttention::Usual(self.attention(c, index)?),
        }))
    }

    fn attention(&mut self, c: &Config, index: usize) -> Result<Attention<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let spec = &c.layers[index];
        let (n_q, heads) = (spec.n_q(), spec.heads);
        let (wq, gate, mut kv, mut of_input) = match (spec.state, spec.gate.is_some()) {
            (LayerState::Own, false) => self.qkv(c, index)?,
            (LayerState::Own, true) => self.gated_qkv(c, index)?,
            _ => {
                // Files contain these tensors nevertheless.
                self.used.extend(KV_TENSORS.iter().map(|suffix| name(suffix)));
                let ([wq], of_input) = self.group(c.n_embd, [RowsOf::all(name("attn_q.weight"), n_q)])?;
                (wq, None, None, of_input)
            }
        };
        let mut bq = self.attention_biases(c, index, kv.as_mut())?;
        // Gates have no bias that the norm's could become part of: it is refused as unused.
        if gate.is_none() {
            let norm = name("attn_norm.weight");
            let norm_bias = self.norm_bias(spec.norms.kind, &norm, c.n_embd, of_input.as_mut())?;
            bq = self.behind_norm(norm_bias.as_ref(), &wq, bq)?;
            if let Some(KvWeights { wk, wv, bk, bv, .. }) = &mut kv {
                *bk = self.behind_norm(norm_bias.as_ref(), wk, bk.take())?;
                if let Some(wv) = wv {
                    *bv = self.behind_norm(norm_bias.as_ref(), wv, bv.take())?;
                }
            }
        }
        let ([wo], of_output) =
            self.group(spec.n_out(), [RowsOf::all(name("attn_output.weight"), c.n_embd)])?;
        let q_normed = spec.norms.heads.width(heads.k_head_dim, n_q);
        Ok(Attention {
            wq,
            wo,
            bq,
            bo: self.optional_vector(&name("attn_output.bias"), c.n_embd)?,
            q_norm: self.vector_if(q_normed, &name("attn_q_norm.weight"))?,
            sinks: self.vector_if(spec.sinks.then_some(heads.n_heads), &name("attn_sinks.weight"))?,
            gate,
            kv,
            index: self.block_index(c, index)?,
            low_rank: [of_input, of_output],
        })
    }

    /// Loads the biases of queries, keys and values: returns those of the queries, and stores the
    /// others.
    fn attention_biases(
        &mut self,
        c: &Config,
        index: usize,
        kv: Option<&mut KvWeights<B>>,
    ) -> Result<Option<B::Buffer>, ModelError> {
        const FUSED: &str = "attn_qkv.bias";
        let spec = &c.layers[index];
        let [_, _, k, v, _] = KV_TENSORS;
        let [q, k, v] = [("attn_q.bias", spec.n_q()), (k, spec.n_k()), (v, spec.n_v())];
        match kv {
            None => self.biases(FUSED, [q], index).map(|[bq]| bq),
            Some(kv) if kv.wv.is_some() => {
                let [bq, bk, bv] = self.biases(FUSED, [q, k, v], index)?;
                (kv.bk, kv.bv) = (bk, bv);
                Ok(bq)
            }
            Some(kv) => {
                let [bq, bk] = self.biases(FUSED, [q, k], index)?;
                kv.bk = bk;
                Ok(bq)
            }
        }
    }

    fn qkv(&mut self, c: &Config, index: usize) -> Result<Entering<B>, ModelError> {
        const FUSED: &str = "attn_qkv.weight";
        let (spec, n_in) = (&c.layers[index], c.n_attention_in());
        let [k, v, ..] = KV_TENSORS;
        let [q, k, v] = [("attn_q.weight", spec.n_q()), (k, spec.n_k()), (v, spec.n_v())];
        let (wq, wk, wv, low_rank) = match spec.values_of_keys {
            true => {
                let ([wq, wk], low_rank) = self.group(n_in, self.rows_of(FUSED, [q, k], index))?;
                (wq, wk, None, low_rank)
            }
            false => {
                let ([wq, wk, wv], low_rank) = self.group(n_in, self.rows_of(FUSED, [q, k, v], index))?;
                (wq, wk, Some(wv), low_rank)
            }
        };
        Ok((wq, None, Some(self.beside_keys_and_values(c, index, wk, wv)?), low_rank))
    }

    /// Loads the same with output gates: a matrix of their own, or each head's query rows are
    /// followed by as many gate rows.
    fn gated_qkv(&mut self, c: &Config, index: usize) -> Result<Entering<B>, ModelError> {
        let spec = &c.layers[index];
        let (n, dim) = (spec.heads.n_heads, spec.heads.k_head_dim);
        let rows = |side: usize| (0..n).map(move |head| (2 * head + side) * dim..(2 * head + side + 1) * dim);
        let [k, v, ..] = KV_TENSORS.map(|suffix| format!("blk.{index}.{suffix}"));
        let [of_q, of_gates] =
            ["attn_q.weight", "attn_gate.weight"].map(|suffix| format!("blk.{index}.{suffix}"));
        let [q, gates] = match c.family.gates {
            OutputGates::Own(_) => [RowsOf::all(of_q, spec.n_q()), RowsOf::all(of_gates, spec.n_gates())],
            _ => [0, 1].map(|side| RowsOf::some(of_q.clone(), 2 * n * dim, rows(side))),
        };
        let rows = [q, RowsOf::all(k, spec.n_k()), RowsOf::all(v, spec.n_v()), gates];
        let ([wq, wk, wv, gate], low_rank) = self.group(c.n_embd, rows)?;
        Ok((wq, Some(gate), Some(self.beside_keys_and_values(c, index, wk, Some(wv))?), low_rank))
    }

    fn beside_keys_and_values(
        &mut self,
        c: &Config,
        index: usize,
        wk: B::Matrix,
        wv: Option<B::Matrix>,
    ) -> Result<KvWeights<B>, ModelError> {
        let spec = &c.layers[index];
        let [.., k_norm] = KV_TENSORS.map(|suffix| format!("blk.{index}.{suffix}"));
        let k_normed = spec.norms.heads.width(spec.heads.k_head_dim, spec.n_k());
        let v_norm = spec.norms.values.then(|| self.upload(&vec![1.0; spec.heads.v_head_dim])).transpose()?;
        Ok(KvWeights { wk, wv, bk: None, bv: None, k_norm: self.vector_if(k_normed, &k_norm)?, v_norm })
    }
}
