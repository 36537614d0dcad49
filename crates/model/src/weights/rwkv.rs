//! Weights of RWKV-7 (arXiv 2503.14456) beside its norms and its feed-forward layer.

use kvant_backend::{Backend, Heads, Matrix as _, Output, Wkv7Weights};

use super::Loader;
use crate::linear::all_rows;
use crate::{Config, ModelError};

/// Mixes of the token mixer with the row before: for receptance, decay, key, value, rate and gate.
pub(crate) const MIXES: usize = 6;

/// A layer. Matrices are `[n_embd, n_embd]`.
pub(crate) struct Rwkv<B: Backend> {
    /// Biases of the norms before the token mixer and before the feed-forward layer, `[n_embd]`.
    pub(crate) norm_biases: [B::Buffer; 2],
    /// How much of the row before enters each of the [`MIXES`], `[6, n_embd]`, and the feed-forward
    /// layer, `[n_embd]`.
    pub(crate) shifts: [B::Buffer; 2],
    pub(crate) receptance: B::Matrix,
    pub(crate) key: B::Matrix,
    pub(crate) value: B::Matrix,
    pub(crate) decay: Squashed<B>,
    pub(crate) rate: Squashed<B>,
    /// The share of the first layer's values; `None` in that layer.
    pub(crate) share: Option<Squashed<B>>,
    /// The gates of the output. Its bias is half the sum of each row: see [`Loader::rwkv`].
    pub(crate) gate: Squashed<B>,
    pub(crate) weights: Wkv7Weights<B::Buffer>,
    pub(crate) out: B::Matrix,
}

/// Norm of token embeddings, `[n_embd]` each.
pub(crate) struct EmbeddingNormWeights<B: Backend> {
    pub(crate) weight: B::Buffer,
    /// Of a LayerNorm, as RWKV has one.
    pub(crate) bias: Option<B::Buffer>,
}

/// A projection of low rank: `second f(first x) + bias`.
pub(crate) struct Squashed<B: Backend> {
    /// `[rank, n_embd]`
    pub(crate) first: B::Matrix,
    /// `[n_embd, rank]`
    pub(crate) second: B::Matrix,
    /// `[n_embd]`
    pub(crate) bias: B::Buffer,
}

impl<B: Backend> Squashed<B> {
    /// Returns the rank.
    pub(crate) fn rank(&self) -> usize {
        self.first.n_out()
    }
}

impl<B: Backend> Rwkv<B> {
    /// Returns the largest rank.
    pub(crate) fn rank(&self) -> usize {
        let all = [&self.decay, &self.rate, &self.gate].into_iter().chain(&self.share);
        all.map(Squashed::rank).max().unwrap_or(0)
    }
}

impl<B: Backend> Loader<'_, B> {
    /// Loads a layer.
    ///
    /// The gates are `W σ(x)`, σ the logistic function. As σ(x) is 1/2 more than half the
    /// hyperbolic tangent of x / 2, they are computed from that, which rounds better in 8 bits, and
    /// the rest, `W (1/2, 1/2, ..)`, is a bias.
    pub(super) fn rwkv(&mut self, c: &Config, index: usize, heads: Heads) -> Result<Rwkv<B>, ModelError> {
        let (n, width) = (c.n_embd, heads.n * heads.dim);
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let biases = ["attn_norm.bias", "attn_norm_2.bias"].map(|bias| self.vector(&name(bias), n));
        let [first_bias, second_bias] = biases;
        let amounts = self.flat(&name("time_mix_lerp_fused.weight"), &[n, 1, 1, MIXES])?;
        let of_ffn = self.vector(&name("channel_mix_lerp_k.weight"), n)?;
        let [receptance, key, value, out] = ["receptance", "key", "value", "output"]
            .map(|of| self.matrix(&name(&format!("time_mix_{of}.weight")), n, width));
        let (decay, rate) = (self.squashed(index, "w", n)?, self.squashed(index, "a", n)?);
        let share = match index {
            // The first layer has no use for them, but files have them.
            0 => {
                self.used.extend(["v0", "v1", "v2"].map(|of| name(&format!("time_mix_{of}.weight"))));
                None
            }
            _ => Some(self.squashed(index, "v", n)?),
        };
        let [first, second] = self.low_rank_pair(index, "g", n)?;
        let half = self.upload(&vec![0.5; first.n_out()])?;
        let mut bias = self.backend.buffer(n)?;
        let sums = Output { w: &second, bias: None, y: &mut bias, accumulate: false };
        self.backend.project(all_rows(&half, 1), &mut [sums])?;
        let gate = Squashed { first, second, bias };
        let [removal, replacement, bonus, norm] = ["k_k.weight", "k_a.weight", "r_k.weight", "ln.weight"]
            .map(|of| self.vector(&name(&format!("time_mix_{of}")), width));
        let norm_bias = self.vector(&name("time_mix_ln.bias"), width)?;
        let weights = Wkv7Weights {
            removal: removal?,
            replacement: replacement?,
            bonus: bonus?,
            norm: norm?,
            norm_bias,
        };
        Ok(Rwkv {
            norm_biases: [first_bias?, second_bias?],
            shifts: [amounts, of_ffn],
            receptance: receptance?,
            key: key?,
            value: value?,
            decay,
            rate,
            share,
            gate,
            weights,
            out: out?,
        })
    }

    /// Loads the LayerNorm of token embeddings.
    pub(super) fn embedding_norm(&mut self, n: usize) -> Result<EmbeddingNormWeights<B>, ModelError> {
        let [weight, bias] = ["weight", "bias"].map(|of| self.vector(&format!("token_embd_norm.{of}"), n));
        Ok(EmbeddingNormWeights { weight: weight?, bias: Some(bias?) })
    }

    /// Loads both factors of a projection with this letter, and its bias.
    fn squashed(&mut self, index: usize, letter: &str, n: usize) -> Result<Squashed<B>, ModelError> {
        let bias = self.vector(&format!("blk.{index}.time_mix_{letter}0.weight"), n)?;
        let [first, second] = self.low_rank_pair(index, letter, n)?;
        Ok(Squashed { first, second, bias })
    }

    /// Loads both factors of a projection, whose rank is the number of rows of the first.
    fn low_rank_pair(&mut self, index: usize, letter: &str, n: usize) -> Result<[B::Matrix; 2], ModelError> {
        let [first, second] = [1, 2].map(|factor| format!("blk.{index}.time_mix_{letter}{factor}.weight"));
        let rank = self.gguf.tensor(&first)?.info.rows();
        Ok([self.matrix(&first, n, rank)?, self.matrix(&second, rank, n)?])
    }
}
