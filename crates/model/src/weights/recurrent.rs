//! The weights of layers that keep a state.

use std::iter;

use kvant_backend::{Backend, KeySharing, ShortConv, StateHeads};

use super::{Loader, layer_of};
use crate::config::{Recurrence, StateKind};
use crate::{Config, ModelError};

/// A layer with a state. Matrices are `[n_out, n_in]`.
pub(crate) struct Recurrent<B: Backend> {
    /// What enters the convolution is made with, `[n_in of it, n_embd]`.
    pub(crate) into: B::Matrix,
    /// Of the convolution, `[taps + 1, channels]`: weights and then biases.
    pub(crate) kernel: B::Buffer,
    pub(crate) heads: Option<HeadWeights<B>>,
    pub(crate) out: B::Matrix,
}

/// What heads that keep a matrix have beside their convolution.
pub(crate) struct HeadWeights<B: Backend> {
    /// What the gates of their output are made with, `[n_v_heads * v_dim, n_embd]`.
    pub(crate) gate: B::Matrix,
    /// What says how long a step is, `[n_v_heads, n_embd]`.
    pub(crate) step: B::Matrix,
    /// Added to that, `[n_v_heads]`.
    pub(crate) bias: B::Buffer,
    /// How fast is forgotten, `[n_v_heads]`.
    pub(crate) rate: B::Buffer,
    pub(crate) rule: RuleWeights<B>,
    /// Of their output: of each head alike, `[v_dim]`, or of groups of them; state spaces beside attention may have none.
    pub(crate) norm: Option<B::Buffer>,
}

/// What a rule has of its own.
pub(crate) enum RuleWeights<B: Backend> {
    Delta {
        /// What says how much of a value is written, `[n_v_heads, n_embd]`.
        write: B::Matrix,
    },
    Space {
        /// How much of a value goes past the state, `[n_v_heads]`.
        skip: B::Buffer,
    },
}

impl<B: Backend> Loader<'_, B> {
    pub(super) fn recurrent(
        &mut self,
        c: &Config,
        index: usize,
        recurrence: Recurrence,
    ) -> Result<Recurrent<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let n_out = recurrence.n_out();
        match recurrence {
            Recurrence::ShortConv(conv) => Ok(Recurrent {
                into: self.matrix(&name("shortconv.in_proj.weight"), c.n_embd, conv.n_in())?,
                kernel: self.kernel(&name("shortconv.conv"), conv, 0..conv.channels, false)?,
                heads: None,
                out: self.matrix(&name("shortconv.out_proj.weight"), n_out, c.n_embd)?,
            }),
            Recurrence::Heads { conv, heads, kind: StateKind::Delta, .. } => Ok(Recurrent {
                into: self.matrix(&name("attn_qkv.weight"), c.n_embd, conv.n_in())?,
                kernel: self.kernel(&name("ssm_conv1d"), conv, 0..conv.channels, false)?,
                heads: Some(self.delta(c, index, heads)?),
                out: self.matrix(&name("ssm_out.weight"), n_out, c.n_embd)?,
            }),
            Recurrence::Heads { conv, heads, kind: StateKind::Space, .. } => {
                self.space(c, index, conv, heads)
            }
        }
    }

    /// The kernel of a convolution, of these channels of the file's one after the other. Files have it channel by channel, tap by tap.
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

    fn delta(&mut self, c: &Config, index: usize, heads: StateHeads) -> Result<HeadWeights<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let n = heads.n_v_heads;
        let [write, step] = match heads.sharing {
            KeySharing::Tiled => {
                ["ssm_beta.weight", "ssm_alpha.weight"].map(|of| self.matrix(&name(of), c.n_embd, n))
            }
            KeySharing::Grouped => {
                // Of each key head those of its value heads, and then as many of the others.
                let each = n / heads.n_k_heads;
                let rows = |side: usize| {
                    (0..heads.n_k_heads)
                        .map(move |head| (2 * head + side) * each..(2 * head + side + 1) * each)
                };
                [0, 1].map(|side| self.picked(&name("ssm_ba.weight"), [c.n_embd, 2 * n], rows(side)))
            }
        };
        Ok(HeadWeights {
            gate: self.matrix(&name("attn_gate.weight"), c.n_embd, heads.n_out())?,
            step: step?,
            bias: self.vector(&name("ssm_dt.bias"), n)?,
            rate: self.rates(&name("ssm_a"), &[n])?,
            rule: RuleWeights::Delta { write: write? },
            norm: Some(self.vector(&name("ssm_norm.weight"), heads.v_dim)?),
        })
    }

    /// A state space, whose file has one matrix of gates, values, keys, queries and steps, in this order.
    fn space(
        &mut self,
        c: &Config,
        index: usize,
        conv: ShortConv,
        heads: StateHeads,
    ) -> Result<Recurrent<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let (n, n_out, n_k) = (heads.n_v_heads, heads.n_out(), heads.n_k_heads * heads.k_dim);
        // Queries, keys and values, as the convolution has them in the file.
        let order = [n_out + n_k..n_out + 2 * n_k, n_out..n_out + n_k, 0..n_out];
        let behind_gates = order.clone().map(|channels| n_out + channels.start..n_out + channels.end);
        let (shape, steps) = ([c.n_embd, 2 * n_out + 2 * n_k + n], 2 * n_out + 2 * n_k);
        let (file, norm) = (name("ssm_in.weight"), name("ssm_norm.weight"));
        let into = self.picked(&file, shape, behind_gates.into_iter())?;
        let gate = self.picked(&file, shape, iter::once(0..n_out))?;
        let step = self.picked(&file, shape, iter::once(steps..steps + n))?;
        Ok(Recurrent {
            into,
            kernel: self.kernel(&name("ssm_conv1d"), conv, order.into_iter().flatten(), true)?,
            heads: Some(HeadWeights {
                gate,
                step,
                bias: self.vector(&name("ssm_dt.bias"), n)?,
                rate: self.rates(&name("ssm_a"), &[1, n])?,
                rule: RuleWeights::Space { skip: self.flat(&name("ssm_d"), &[1, n])? },
                norm: match !c.layers[index].attends() || self.has_in_some_layer("ssm_norm.weight") {
                    true => Some(self.flat(&norm, &[n_out / heads.n_k_heads, heads.n_k_heads])?),
                    false => None,
                },
            }),
            out: self.matrix(&name("ssm_out.weight"), n_out, c.n_embd)?,
        })
    }

    /// Whether some layer has such a tensor.
    fn has_in_some_layer(&self, suffix: &str) -> bool {
        let is_it = |name: &str| layer_of(name).is_some_and(|layer| name == format!("blk.{layer}.{suffix}"));
        self.gguf.tensors().iter().any(|info| is_it(&info.name))
    }

    /// How fast heads forget.
    fn rates(&mut self, name: &str, shape: &[usize]) -> Result<B::Buffer, ModelError> {
        let rates = self.values(name, shape)?;
        if let Some(rate) = rates.iter().find(|rate| **rate > 0.0) {
            let expected = "no factor above 0, with which a state would grow without end".to_owned();
            return Err(ModelError::Value { key: name.to_owned(), expected, got: rate.to_string() });
        }
        self.upload(&rates)
    }
}
