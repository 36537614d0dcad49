//! Weights of recurrent layers.

use std::ops::Range;
use std::{iter, slice};

use kvant_backend::{Backend, KeySharing, Matrix as _, ShortConv, StateHeads};

use super::low_rank::RowsOf;
use super::{Loader, LowRank, layer_of};
use crate::config::{DecayBound, RecurrentMixer, StateKind};
use crate::{Config, ModelError};

/// A recurrent layer. Matrices are `[n_out, n_in]`.
pub(crate) struct Recurrent<B: Backend> {
    pub(crate) entering: Entering<B>,
    /// Kernel of the convolution, `[taps + 1, channels]`: weights, then biases.
    pub(crate) kernel: B::Buffer,
    pub(crate) heads: Option<HeadWeights<B>>,
    pub(crate) out: B::Matrix,
    /// LoRA weights of the input GEMM (all of [`Entering`]), and of `out`.
    pub(crate) low_rank: [Option<LowRank<B>>; 2],
}

/// Projections of the layer's input.
pub(crate) enum Entering<B: Backend> {
    /// To the input of the convolution, `[n_in of it, n_embd]`.
    Conv(B::Matrix),
    /// To the inputs of heads with a state.
    Heads {
        /// To queries, keys and values, `[n_qkv, n_embd]`.
        qkv: B::Matrix,
        /// To the output gates, `[n_v_heads * v_dim, n_embd]`.
        gate: B::Matrix,
        /// To the time steps, `[n_v_heads, n_embd]`.
        step: B::Matrix,
        /// To the write strengths of the delta rule, `[n_v_heads, n_embd]`.
        write: Option<B::Matrix>,
    },
    /// To those of Kimi's rule.
    Kimi(KimiEntering<B>),
}

/// Projections to the inputs of heads by Kimi's rule.
pub(crate) struct KimiEntering<B: Backend> {
    /// To queries, keys and values, `[n_heads * k_dim, n_embd]` each.
    pub(crate) qkv: [B::Matrix; 3],
    /// To the output gates, `[n_heads * v_dim]`.
    pub(crate) gate: Factored<B>,
    /// To the time steps, `[n_heads * k_dim]`.
    pub(crate) step: Factored<B>,
    /// To the write strengths, `[n_heads, n_embd]`.
    pub(crate) write: B::Matrix,
}

/// A projection that may be of low rank.
pub(crate) struct Factored<B: Backend> {
    /// `[n_out or rank, n_embd]`
    pub(crate) first: B::Matrix,
    /// `[n_out, rank]`, and its LoRA weights.
    pub(crate) second: Option<(B::Matrix, Option<LowRank<B>>)>,
}

/// Weights of heads with a matrix state, beside their convolution.
pub(crate) struct HeadWeights<B: Backend> {
    /// Bias of the time steps, `[n_steps]`.
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
    Delta,
    KimiDelta,
    Space {
        /// Skip connection of the values past the state, `[n_v_heads]`.
        skip: B::Buffer,
    },
}

/// The projections of the layer's input and their LoRA weights, the convolution's kernel, and the
/// heads.
struct Front<B: Backend> {
    entering: Entering<B>,
    low_rank: Option<LowRank<B>>,
    kernel: B::Buffer,
    heads: Option<HeadWeights<B>>,
}

impl<B: Backend> Loader<'_, B> {
    pub(super) fn recurrent(
        &mut self,
        c: &Config,
        index: usize,
        recurrence: RecurrentMixer,
    ) -> Result<Recurrent<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let n_out = recurrence.n_out();
        let front = match recurrence {
            RecurrentMixer::ShortConv(conv) => {
                let into = RowsOf::all(name("shortconv.in_proj.weight"), conv.n_in());
                let ([into], low_rank) = self.group(c.n_embd, [into])?;
                let kernel = self.kernel(&name("shortconv.conv"), conv, 0..conv.channels, false)?;
                Front { entering: Entering::Conv(into), low_rank, kernel, heads: None }
            }
            RecurrentMixer::Heads { conv, heads, kind, bound, .. } => match kind {
                StateKind::Delta => self.delta(c, index, conv, heads)?,
                StateKind::KimiDelta => self.kimi_delta(c, index, conv, heads, bound)?,
                StateKind::Space => self.space(c, index, conv, heads)?,
            },
        };
        let out = match recurrence {
            RecurrentMixer::ShortConv(_) => "shortconv.out_proj.weight",
            RecurrentMixer::Heads { kind: StateKind::KimiDelta, .. } => "attn_output.weight",
            RecurrentMixer::Heads { .. } => "ssm_out.weight",
        };
        let ([out], of_output) = self.group(n_out, [RowsOf::all(name(out), c.n_embd)])?;
        let Front { entering, low_rank, kernel, heads } = front;
        Ok(Recurrent { entering, kernel, heads, out, low_rank: [low_rank, of_output] })
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
        self.upload(&by_tap(&weights, taps, order.clone(), order.map(|channel| biases[channel])))
    }

    fn delta(
        &mut self,
        c: &Config,
        index: usize,
        conv: ShortConv,
        heads: StateHeads,
    ) -> Result<Front<B>, ModelError> {
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
        let qkv = RowsOf::all(name("attn_qkv.weight"), conv.n_in());
        let gate = RowsOf::all(name("attn_gate.weight"), heads.n_out());
        let ([qkv, gate, step, write], low_rank) = self.group(c.n_embd, [qkv, gate, step, write])?;
        let kernel = self.kernel(&name("ssm_conv1d"), conv, 0..conv.channels, false)?;
        let heads = HeadWeights {
            bias: self.vector(&name("ssm_dt.bias"), n)?,
            rate: self.rates(&name("ssm_a"), &[n])?,
            rule: RuleWeights::Delta,
            norm: Some(self.vector(&name("ssm_norm.weight"), heads.v_dim)?),
        };
        let entering = Entering::Heads { qkv, gate, step, write: Some(write) };
        Ok(Front { entering, low_rank, kernel, heads: Some(heads) })
    }

    /// Loads Kimi's rule, whose queries, keys and values have tensors of their own.
    fn kimi_delta(
        &mut self,
        c: &Config,
        index: usize,
        conv: ShortConv,
        heads: StateHeads,
        bound: Option<DecayBound>,
    ) -> Result<Front<B>, ModelError> {
        const SIDES: [&str; 3] = ["q", "k", "v"];
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let (n, width, rank) = (heads.n_v_heads, heads.n_out(), heads.k_dim);
        let [q, k, v] = SIDES.map(|of| RowsOf::all(name(&format!("attn_{of}.weight")), width));
        let seconds = ["ssm_g_b.weight", "ssm_f_b.weight"].map(name);
        // Kimi K3's gate is whole; Ling's are both, under the names of the first factors.
        let is_named_whole = self.has_in_some_layer("ssm_g.weight");
        let gate = if is_named_whole { "ssm_g.weight" } else { "ssm_g_a.weight" };
        let [gate, step] = [gate, "ssm_f_a.weight"].map(name).map(|first| {
            let is_whole = self.gguf.find_info(&first).is_some_and(|info| info.rows() == width);
            RowsOf::all(first, if is_whole { width } else { rank })
        });
        let write = RowsOf::all(name("ssm_beta.weight"), n);
        let ([q, k, v, gate, step, write], low_rank) = self.group(c.n_embd, [q, k, v, gate, step, write])?;
        let mut factored = |first: B::Matrix, second: String| {
            if first.n_out() > rank {
                return Ok(Factored { first, second: None });
            }
            let ([w], low_rank) = self.group(rank, [RowsOf::all(second, width)])?;
            Ok::<_, ModelError>(Factored { first, second: Some((w, low_rank)) })
        };
        let [of_gate, of_step] = seconds;
        let (gate, step) = (factored(gate, of_gate)?, factored(step, of_step)?);
        let mut weights = Vec::with_capacity(conv.taps * conv.channels);
        for of in SIDES {
            weights.extend(self.values(&name(&format!("ssm_conv1d_{of}.weight")), &[conv.taps, 1, width])?);
        }
        let no_biases = iter::repeat_n(0.0, conv.channels);
        let kernel = self.upload(&by_tap(&weights, conv.taps, 0..conv.channels, no_biases))?;
        let heads = HeadWeights {
            bias: self.vector(&name("ssm_dt.bias"), width)?,
            rate: self.kimi_rates(&name("ssm_a"), n, bound)?,
            rule: RuleWeights::KimiDelta,
            norm: Some(self.vector(&name("ssm_norm.weight"), heads.v_dim)?),
        };
        let entering = Entering::Kimi(KimiEntering { qkv: [q, k, v], gate, step, write });
        Ok(Front { entering, low_rank, kernel, heads: Some(heads) })
    }

    /// Loads the decay rates of n heads, a row or a column. With a bound, states decay at any rate.
    fn kimi_rates(
        &mut self,
        name: &str,
        n: usize,
        bound: Option<DecayBound>,
    ) -> Result<B::Buffer, ModelError> {
        let is_row = self.gguf.find_info(name).is_some_and(|info| info.shape.len() == 1);
        let shape = if is_row { &[n][..] } else { &[1, n] };
        let Some(DecayBound { negates_rates, .. }) = bound else { return self.rates(name, shape) };
        let sign = if negates_rates { -1.0 } else { 1.0 };
        let rates: Vec<f32> = self.values(name, shape)?.into_iter().map(|rate| sign * rate).collect();
        self.upload(&rates)
    }

    /// Loads a state space, whose file has one matrix of gates, values, keys, queries and steps, in
    /// this order.
    fn space(
        &mut self,
        c: &Config,
        index: usize,
        conv: ShortConv,
        heads: StateHeads,
    ) -> Result<Front<B>, ModelError> {
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
        let ([qkv, gate, step], low_rank) = self.group(c.n_embd, parts)?;
        let kernel = self.kernel(&name("ssm_conv1d"), conv, order.into_iter().flatten(), true)?;
        let heads = HeadWeights {
            bias: self.vector(&name("ssm_dt.bias"), n)?,
            rate: self.rates(&name("ssm_a"), &[1, n])?,
            rule: RuleWeights::Space { skip: self.flat(&name("ssm_d"), &[1, n])? },
            norm: match !c.layers[index].attends() || self.has_in_some_layer("ssm_norm.weight") {
                true => Some(self.flat(&norm, &[n_out / heads.n_k_heads, heads.n_k_heads])?),
                false => None,
            },
        };
        let entering = Entering::Heads { qkv, gate, step, write: None };
        Ok(Front { entering, low_rank, kernel, heads: Some(heads) })
    }

    /// Returns whether any layer has such a tensor.
    pub(super) fn has_in_some_layer(&self, suffix: &str) -> bool {
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

/// Orders the weights of these channels `[channels, taps]` by tap, followed by the biases.
fn by_tap(
    weights: &[f32],
    taps: usize,
    channels: impl Iterator<Item = usize> + Clone,
    biases: impl Iterator<Item = f32>,
) -> Vec<f32> {
    let places = (0..taps).flat_map(|tap| channels.clone().map(move |channel| channel * taps + tap));
    places.map(|place| weights[place]).chain(biases).collect()
}
