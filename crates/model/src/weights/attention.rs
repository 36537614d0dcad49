//! The weights of attention.

use std::ops::Range;

use kvant_backend::{Backend, SharedBytes, WeightSource};

use super::{KV_TENSORS, LatentAttention, Loader};
use crate::config::LayerState;
use crate::{Config, ModelError};

/// What attends.
pub(crate) enum AnyAttention<B: Backend> {
    Usual(Attention<B>),
    Latent(LatentAttention<B>),
}

/// Attention. Matrices are `[n_out, n_in]`.
pub(crate) struct Attention<B: Backend> {
    pub(crate) wq: B::Matrix,
    pub(crate) wo: B::Matrix,
    pub(crate) bq: Option<B::Buffer>,
    pub(crate) bo: Option<B::Buffer>,
    pub(crate) q_norm: Option<B::Buffer>,
    /// The sink of each query head, `[n_heads]`.
    pub(crate) sinks: Option<B::Buffer>,
    /// What the gates of its output are made with, `[n_heads * v_head_dim, n_embd]`.
    pub(crate) gate: Option<B::Matrix>,
    /// What its keys and values are made with, where they are its own.
    pub(crate) kv: Option<KvWeights<B>>,
}

/// What keys and values are made with.
pub(crate) struct KvWeights<B: Backend> {
    pub(crate) wk: B::Matrix,
    /// `None` where values are what keys are made of.
    pub(crate) wv: Option<B::Matrix>,
    pub(crate) bk: Option<B::Buffer>,
    pub(crate) bv: Option<B::Buffer>,
    pub(crate) k_norm: Option<B::Buffer>,
    /// Of each head of values: all ones, `[v_head_dim]`.
    pub(crate) v_norm: Option<B::Buffer>,
}

impl<B: Backend> Loader<'_, B> {
    /// What attends in layer `index`, if anything.
    pub(super) fn any_attention(
        &mut self,
        c: &Config,
        index: usize,
    ) -> Result<Option<AnyAttention<B>>, ModelError> {
        Ok(Some(match (c.layers[index].state, c.layers[index].latent) {
            (LayerState::Nothing, _) => return Ok(None),
            (_, Some(latent)) => AnyAttention::Latent(self.latent_attention(c, index, latent)?),
            (_, None) => AnyAttention::Usual(self.attention(c, index)?),
        }))
    }

    fn attention(&mut self, c: &Config, index: usize) -> Result<Attention<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let spec = &c.layers[index];
        let (n_q, heads) = (spec.n_q(), spec.heads);
        let (wq, gate, mut kv) = match (spec.state, spec.gated) {
            (LayerState::Own, false) => {
                let (wq, kv) = self.qkv(c, index)?;
                (wq, None, Some(kv))
            }
            (LayerState::Own, true) => {
                let [wq, gate] = self.gated_queries(&name("attn_q.weight"), c, index)?;
                (wq, Some(gate), Some(self.keys_and_values(c, index)?))
            }
            _ => {
                // Files have them all the same.
                self.used.extend(KV_TENSORS.iter().map(|suffix| name(suffix)));
                (self.matrix(&name("attn_q.weight"), c.n_embd, n_q)?, None, None)
            }
        };
        let bq = self.attention_biases(c, index, kv.as_mut())?;
        let q_normed = spec.norms.heads.width(heads.k_head_dim, n_q);
        Ok(Attention {
            wq,
            wo: self.matrix(&name("attn_output.weight"), spec.n_out(), c.n_embd)?,
            bq,
            bo: self.optional_vector(&name("attn_output.bias"), c.n_embd)?,
            q_norm: self.vector_if(q_normed, &name("attn_q_norm.weight"))?,
            sinks: self.vector_if(spec.sinks.then_some(heads.n_heads), &name("attn_sinks.weight"))?,
            gate,
            kv,
        })
    }

    /// Biases of queries, keys and values: gives those of the queries, and puts the others to what they belong to.
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

    fn qkv(&mut self, c: &Config, index: usize) -> Result<(B::Matrix, KvWeights<B>), ModelError> {
        let spec = &c.layers[index];
        let [k, v, ..] = KV_TENSORS;
        let (fused, [q, k, v]) =
            ("attn_qkv.weight", [("attn_q.weight", spec.n_q()), (k, spec.n_k()), (v, spec.n_v())]);
        let (wq, wk, wv) = match spec.values_of_keys {
            true => self.matrices(fused, [q, k], index, c.n_embd).map(|[wq, wk]| (wq, wk, None))?,
            false => {
                self.matrices(fused, [q, k, v], index, c.n_embd).map(|[wq, wk, wv]| (wq, wk, Some(wv)))?
            }
        };
        Ok((wq, self.beside_keys_and_values(c, index, wk, wv)?))
    }

    /// Queries and the gates of what they give: behind the rows of each head as many of its gate.
    fn gated_queries(&mut self, name: &str, c: &Config, index: usize) -> Result<[B::Matrix; 2], ModelError> {
        let spec = &c.layers[index];
        let (n, dim) = (spec.heads.n_heads, spec.heads.k_head_dim);
        let rows = |side: usize| (0..n).map(move |head| (2 * head + side) * dim..(2 * head + side + 1) * dim);
        let [queries, gates] = [0, 1].map(|side| self.picked(name, [c.n_embd, 2 * n * dim], rows(side)));
        Ok([queries?, gates?])
    }

    fn keys_and_values(&mut self, c: &Config, index: usize) -> Result<KvWeights<B>, ModelError> {
        let spec = &c.layers[index];
        let [k, v, ..] = KV_TENSORS.map(|suffix| format!("blk.{index}.{suffix}"));
        let (wk, wv) = (self.matrix(&k, c.n_embd, spec.n_k())?, self.matrix(&v, c.n_embd, spec.n_v())?);
        self.beside_keys_and_values(c, index, wk, Some(wv))
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

    /// A matrix of some rows of a tensor `[n_out, n_in]`.
    pub(super) fn picked(
        &mut self,
        name: &str,
        shape: [usize; 2],
        rows: impl Iterator<Item = Range<usize>>,
    ) -> Result<B::Matrix, ModelError> {
        let source = self.picked_rows(name, shape, rows)?;
        Ok(self.backend.matrix(source)?)
    }

    /// Some rows of a tensor `[n_out, n_in]`.
    pub(super) fn picked_rows(
        &mut self,
        name: &str,
        [n_in, n_out]: [usize; 2],
        rows: impl Iterator<Item = Range<usize>>,
    ) -> Result<WeightSource, ModelError> {
        let mut bytes = Vec::new();
        let (mut n, mut dtype) = (0, None);
        for rows in rows {
            let source = self.rows(name, &[n_in, n_out], rows)?;
            bytes.extend_from_slice(&source.bytes);
            (n, dtype) = (n + source.n_out, Some(source.dtype));
        }
        let dtype = dtype.ok_or_else(|| ModelError::Unsupported { what: format!("no rows of '{name}'") })?;
        let bytes = SharedBytes::from(bytes);
        Ok(WeightSource { dtype, n_out: n, n_in, bytes })
    }
}
