//! The weights of what mixes the rows of a sequence in a layer: attention, or what a state is kept for.

use std::ops::Range;

use kvant_backend::{Backend, DeltaRule, KeySharing, SharedBytes, WeightSource};

use super::{KV_TENSORS, LatentAttention, Loader};
use crate::config::{LayerState, Recurrence};
use crate::{Config, ModelError};

/// What mixes the rows of a sequence.
pub(crate) enum Mixer<B: Backend> {
    Attention(Attention<B>),
    Latent(LatentAttention<B>),
    Recurrent(Recurrent<B>),
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

/// A layer with a state.
pub(crate) struct Recurrent<B: Backend> {
    /// What enters the convolution is made with, `[n_in of it, n_embd]`.
    pub(crate) into: B::Matrix,
    /// Of the convolution, `[taps, channels]`.
    pub(crate) kernel: B::Buffer,
    pub(crate) delta: Option<Delta<B>>,
    pub(crate) out: B::Matrix,
}

/// What the gated delta rule has beside its convolution.
pub(crate) struct Delta<B: Backend> {
    /// What the gates of its output are made with, `[n_v_heads * v_dim, n_embd]`.
    pub(crate) gate: B::Matrix,
    /// What says how much of a value is written, `[n_v_heads, n_embd]`.
    pub(crate) write: B::Matrix,
    /// What says how much is forgotten, `[n_v_heads, n_embd]`.
    pub(crate) forget: B::Matrix,
    /// Added to that, `[n_v_heads]`.
    pub(crate) bias: B::Buffer,
    /// Factors on it, `[n_v_heads]`.
    pub(crate) rate: B::Buffer,
    /// Of each head of its output, `[v_dim]`.
    pub(crate) norm: B::Buffer,
}

impl<B: Backend> Loader<'_, B> {
    /// What mixes the rows in layer `index`.
    pub(super) fn mixer(&mut self, c: &Config, index: usize) -> Result<Mixer<B>, ModelError> {
        match c.layers[index].state {
            LayerState::Recurrent(recurrence) => Ok(Mixer::Recurrent(self.recurrent(c, index, recurrence)?)),
            LayerState::Own | LayerState::Shared(_) => match c.layers[index].latent {
                Some(latent) => Ok(Mixer::Latent(self.latent_attention(c, index, latent)?)),
                None => Ok(Mixer::Attention(self.attention(c, index)?)),
            },
        }
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

    fn recurrent(
        &mut self,
        c: &Config,
        index: usize,
        recurrence: Recurrence,
    ) -> Result<Recurrent<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let (conv, n_out) = (recurrence.conv(), c.layers[index].n_out());
        let [into, kernel, out] = match recurrence {
            Recurrence::ShortConv(_) => {
                ["shortconv.in_proj.weight", "shortconv.conv.weight", "shortconv.out_proj.weight"]
            }
            Recurrence::Delta { .. } => ["attn_qkv.weight", "ssm_conv1d.weight", "ssm_out.weight"],
        };
        Ok(Recurrent {
            into: self.matrix(&name(into), c.n_embd, conv.n_in())?,
            kernel: self.kernel(&name(kernel), [conv.taps, conv.channels])?,
            delta: recurrence.rule().map(|rule| self.delta(c, index, rule)).transpose()?,
            out: self.matrix(&name(out), n_out, c.n_embd)?,
        })
    }

    /// The kernel of a convolution, which files have channel by channel, tap by tap.
    fn kernel(&mut self, name: &str, [taps, channels]: [usize; 2]) -> Result<B::Buffer, ModelError> {
        let values = self.values(name, &[taps, channels])?;
        let by_tap = |tap| values.iter().skip(tap).step_by(taps).copied();
        self.upload(&(0..taps).flat_map(by_tap).collect::<Vec<_>>())
    }

    fn delta(&mut self, c: &Config, index: usize, rule: DeltaRule) -> Result<Delta<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let n = rule.n_v_heads;
        let [write, forget] = match rule.sharing {
            KeySharing::Tiled => {
                ["ssm_beta.weight", "ssm_alpha.weight"].map(|of| self.matrix(&name(of), c.n_embd, n))
            }
            KeySharing::Grouped => {
                // Of each key head those of its value heads, and then as many of the others.
                let each = n / rule.n_k_heads;
                let rows = |side: usize| {
                    (0..rule.n_k_heads)
                        .map(move |head| (2 * head + side) * each..(2 * head + side + 1) * each)
                };
                [0, 1].map(|side| self.picked(&name("ssm_ba.weight"), [c.n_embd, 2 * n], rows(side)))
            }
        };
        let rate = self.values(&name("ssm_a"), &[n])?;
        if let Some(rate) = rate.iter().find(|rate| **rate > 0.0) {
            let expected = "no factor above 0, with which a state would grow without end".to_owned();
            return Err(ModelError::Value { key: name("ssm_a"), expected, got: rate.to_string() });
        }
        Ok(Delta {
            gate: self.matrix(&name("attn_gate.weight"), c.n_embd, rule.n_out())?,
            write: write?,
            forget: forget?,
            bias: self.vector(&name("ssm_dt.bias"), n)?,
            rate: self.upload(&rate)?,
            norm: self.vector(&name("ssm_norm.weight"), rule.v_dim)?,
        })
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
