//! Weights of recurrent layers.

use std::ops::Range;
use std::slice;

use kvant_backend::{Backend, KeySharing, ShortConv, StateHeads};

use super::low_rank::RowsOf;
use super::{Loader, LowRank, layer_of};
use crate::config::{RecurrentMixer, StateKind};
use crate::{Config, ModelError};

/// A recurrent layer. Matrices are `[n_out, n_in]`.
pub(crate) struct Recurrent<B: Backend> {
    /// Projection to the input of the convolution, `[n_in of it, n_embd]`.
    pub(crate) into: B::Matrix,
    /// Kernel of the convolution, `[taps + 1, channels]`: weights, then biases.
    pub(crate) kernel: B::Buffer,
    pub(crate) heads: Option<HeadWeights<B>>,
    pub(crate) out: B::Matrix,
    /// LoRA weights of the input GEMM (convolution, gates, steps, writes), and of `out`.
    pub(crate) low_rank: [Option<LowRank<B>>; 2],
}

/// Weights of heads with a matrix state, beside their convolution.
pub(crate) struct HeadWeights<B: Backend> {
    /// Projection of the output gates, `[n_v_heads * v_dim, n_embd]`.
    pub(crate) gate: B::Matrix,
    /// Projection of the time step, `[n_v_heads, n_embd]`.
    pub(crate) step: B::Matrix,
    /// Bias of the time step, `[n_v_heads]`.
    pub(crate) bias: B::Buffer,
    /// Decay rate, `[n_v_heads]`.
    pub(crate) rate: B::Buffer,
    pub(crate) rule: RuleWeights<B>,
    /// Output norm: shared by all heads, `[v_dim]`, or per group of heads; state spaces beside
    /// attention may have none.
    pub(crate) norm: Option<B::Buffer>,
}

/// Weights that depend on the update rule.
pub(crate) enum RuleWeights<B: Backend> {
    Delta {
        /// Projection of the write strength, `[n_v_heads, n_embd]`.
        write: B::Matrix,
    },
    Space {
        /// Skip connection of the values past the state, `[n_v_heads]`.
        skip: B::Buffer,
    },
}

/// Projection to the convolution's input, its kernel, the heads, and the LoRA weights of the input
/// GEMM.
type Entering<B> =
    (<B as Backend>::Matrix, <B as Backend>::Buffer, Option<HeadWeights<B>>, Option<LowRank<B>>);

impl<B: Backend> Loader<'_, B> {
    pub(super) fn recurrent(
        &mut self,
        c: &Config,
        index: usize,
        recurrence: RecurrentMixer,
    ) -> Result<Recurrent<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let n_out = recurrence.n_out();
        let (into, kernel, heads, of_input) = match recurrence {
            RecurrentMixer::ShortConv(conv) => {
                let into = RowsOf::all(name("shortconv.in_proj.weight"), conv.n_in());
                let ([into], of_input) = self.group(c.n_embd, [into])?;
                let kernel = self.kernel(&name("shortconv.conv"), conv, 0..conv.channels, false)?;
                (into, kernel, None, of_input)
            }
            RecurrentMixer::Heads { conv, heads, kind: StateKind::Delta, .. } => {
                self.delta(c, index, conv, heads)?
            }
            RecurrentMixer::Heads { conv, heads, kind: StateKind::Space, .. } => {
                self.space(c, index, conv, heads)?
            }
        };
        let out = match recurrence {
            RecurrentMixer::ShortConv(_) => "shortconv.out_proj.weight",
            RecurrentMixer::Heads { .. } => "ssm_out.weight",
        };
        let ([out], of_output) = self.group(n_out, [RowsOf::all(name(out), c.n_embd)])?;
        Ok(Recurrent { into, kernel, heads, out, low_rank: [of_input, of_output] })
    }

    /// Loads the kernel of a convolution for these consecutive channels of the file, which stores
    /// it channel by channel, tap by tap.
    fn kernel(
        &mut self,
        name: &str,
        ShortConv { taps, channels, .. }: ShortConv,
        order: impl Iterator<Item = usize> + Clone,
        has_biases: bool,
    ) -> Result<B::Buffer, ModelError> {
        let weights = self.values(&format!("{name}.weight"), &[taps, channels])?;
        let biases = match has_biases {
            true => self.values(&format!("{name}.bias"), &[channels])?,
            false => vec![0.0; channels],
        };
        let by_tap = (0..taps).flat_map(|tap| order.clone().map(move |channel| (channel, tap)));
        let kernel = by_tap.map(|(channel, tap)| weights[channel * taps + tap]);
        self.upload(&kernel.chain(order.clone().map(|channel| biases[channel])).collect::<Vec<_>>())
    }

    fn delta(
        &mut self,
        c: &Config,
        index: usize,
        conv: ShortConv,
        heads: StateHeads,
    ) -> Result<Entering<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let n = heads.n_v_heads;
        let [write, step] = match heads.sharing {
            KeySharing::Tiled => ["ssm_beta.weight", "ssm_alpha.weight"].map(|of| RowsOf::all(name(of), n)),
            KeySharing::Grouped => {
                // The file has for each key head the rows of its value heads, then as many of the
                // others.
                let each = n / heads.n_k_heads;
                let rows = |side: usize| {
                    (0..heads.n_k_heads)
                        .map(move |head| (2 * head + side) * each..(2 * head + side + 1) * each)
                };
                [0, 1].map(|side| RowsOf::some(name("ssm_ba.weight"), 2 * n, rows(side)))
            }
        };
        let into = RowsOf::all(name("attn_qkv.weight"), conv.n_in());
        let gate = RowsOf::all(name("attn_gate.weight"), heads.n_out());
        let ([into, gate, step, write], low_rank) = self.group(c.n_embd, [into, gate, step, write])?;
        let kernel = self.kernel(&name("ssm_conv1d"), conv, 0..conv.channels, false)?;
        let heads = HeadWeights {
            gate,
            step,
            bias: self.vector(&name("ssm_dt.bias"), n)?,
            rate: self.rates(&name("ssm_a"), &[n])?,
            rule: RuleWeights::Delta { write },
            norm: Some(self.vector(&name("ssm_norm.weight"), heads.v_dim)?),
        };
        Ok((into, kernel, Some(heads), low_rank))
    }

    /// Loads a state space, whose file has one matrix of gates, values, keys, queries and steps, in
    /// this order.
    fn space(
        &mut self,
        c: &Config,
        index: usize,
        conv: ShortConv,
        heads: StateHeads,
    ) -> Result<Entering<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let (n, n_out, n_k) = (heads.n_v_heads, heads.n_out(), heads.n_k_heads * heads.k_dim);
        // Order of queries, keys and values in the file's convolution.
        let order = [n_out + n_k..n_out + 2 * n_k, n_out..n_out + n_k, 0..n_out];
        let behind_gates = order.clone().map(|channels| n_out + channels.start..n_out + channels.end);
        let steps = 2 * n_out + 2 * n_k;
        let norm = name("ssm_norm.weight");
        let some = |rows: &[Range<usize>]| RowsOf::some(name("ssm_in.weight"), steps + n, rows.to_vec());
        let (gates, steps) = (0..n_out, steps..steps + n);
        let parts = [&behind_gates[..], slice::from_ref(&gates), slice::from_ref(&steps)].map(some);
        let ([into, gate, step], low_rank) = self.group(c.n_embd, parts)?;
        let kernel = self.kernel(&name("ssm_conv1d"), conv, order.into_iter().flatten(), true)?;
        let heads = HeadWeights {
            gate,
            step,
            bias: self.vector(&name("ssm_dt.bias"), n)?,
            rate: self.rates(&name("ssm_a"), &[1, n])?,
            rule: RuleWeights::Space { skip: self.flat(&name("ssm_d"), &[1, n])? },
            norm: match !c.layers[index].attends() || self.has_in_some_layer("ssm_norm.weight") {
                true => Some(self.flat(&norm, &[n_out / heads.n_k_heads, heads.n_k_heads])?),
                false => None,
            },
        };
        Ok((into, kernel, Some(heads), low_rank))
    }

    /// Returns whether any layer has such a tensor.
    fn has_in_some_layer(&self, suffix: &str) -> bool {
        let matches =
            |name: &str| layer_of(name).is_some_and(|layer| name == format!("blk.{layer}.{suffix}"));
        self.gguf.tensors().iter().any(|info| matches(&info.name))
    }

    /// Loads the decay rates of the heads.
    fn rates(&mut self, name: &str, shape: &[usize]) -> Result<B::Buffer, ModelError> {
        let rates = self.values(name, shape)?;
        if let Some(rate) = rates.iter().find(|rate| **rate > 0.0) {
            let expected = "decay factors of at most 0, so that states do not diverge".to_owned();
            return Err(ModelError::Value { key: name.to_owned(), expected, got: rate.to_string() });
        }
        self.upload(&rates)
    }
}
