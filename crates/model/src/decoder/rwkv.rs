//! RWKV-7 (arXiv 2503.14456): a token mixer with a matrix state, and a feed-forward layer, which
//! both read each row mixed with the one before it.
//!
//! ```text
//! x_i = n + amounts_i * (n of the row before - n),  n = layer_norm(x)
//! r, k, v = W_r x_r, W_k x_k, W_v x_v
//! w = W_w2 tanh(W_w1 x_w) + w0,  a = W_a2 W_a1 x_a + a0
//! s = W_v2 W_v1 x_v + v0,  g = W_g2 σ(W_g1 x_g)
//! x += W_o wkv(r, k, v, w, a, s, g)
//! x += W_down relu(W_up x_k)²,  x_k of the row's other norm
//! ```

use kvant_backend::{
    Backend, BackendError, Buffer as _, FirstValues, Input, Output, TokenShift, Wkv7Inputs, Wkv7Weights,
};

use super::batch_entries::state_entries;
use super::mla::output;
use super::{Activations, Branch, Decoder, Residual, StepContext, StepRows};
use crate::weights::{MIXES, Rwkv, Squashed};
use crate::{LayerSpec, ModelError};

/// Index of the row before the feed-forward layer among a layer's states, behind the row before the
/// token mixer and the heads.
const CHANNELS: usize = 2;

/// Rows of a step, `[rows, n_embd]` each.
pub(super) struct RwkvActivations<B: Backend> {
    /// Output of a norm.
    normed: B::Buffer,
    /// Its mixes with the row before, `[6, rows, n_embd]`.
    pub(super) shifted: B::Buffer,
    /// Values of the first layer.
    first_values: B::Buffer,
    decays: B::Buffer,
    rates: B::Buffer,
    shares: B::Buffer,
    gates: B::Buffer,
    /// Inputs of second factors, `[rows, rank]`.
    low: B::Buffer,
}

impl<B: Backend> RwkvActivations<B> {
    /// Allocates them where layers have such heads; `buffer` allocates columns.
    pub(super) fn new(
        layers: &[LayerSpec],
        rank: usize,
        buffer: impl Fn(usize) -> Result<B::Buffer, BackendError>,
    ) -> Result<Self, BackendError> {
        let widths = layers.iter().filter_map(|layer| layer.wkv).map(|heads| heads.n * heads.dim);
        let width = widths.max().unwrap_or(0);
        Ok(Self {
            normed: buffer(width)?,
            shifted: buffer(MIXES * width)?,
            first_values: buffer(width)?,
            decays: buffer(width)?,
            rates: buffer(width)?,
            shares: buffer(width)?,
            gates: buffer(width)?,
            low: buffer(rank)?,
        })
    }
}

impl<B: Backend> Decoder<B> {
    /// Returns the largest rank of RWKV's projections.
    pub(super) fn widest_rank(&self) -> usize {
        let ranks = self.weights.layers.iter().filter_map(|layer| layer.rwkv.as_ref()).map(Rwkv::rank);
        ranks.max().unwrap_or(0)
    }

    /// Computes `x += W_o wkv(..)` of layer `index`, whose states begin at index `first`.
    pub(super) fn time_mix(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        first: usize,
        weights: &Rwkv<B>,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let heads = spec.wkv.expect("a layer of RWKV");
        let norm = layer.attn_norm.as_ref().expect("a norm before the token mixer");
        self.shift(step, first, norm, [&weights.norm_biases[0], &weights.shifts[0]])?;
        self.enter_heads(step, weights)?;
        let (backend, rows, width) = (step.backend, step.rows, heads.n * heads.dim);
        let Activations { q, k, v, attended, rwkv, .. } = &mut *step.act;
        let value = if weights.share.is_some() { &*v } else { &rwkv.first_values };
        for (what, x) in [("keys", &*k), ("values", value)] {
            self.check_rows(backend, step.parts, index, StepRows { what, x, width, n: rows })?;
        }
        let inputs = Wkv7Inputs {
            receptance: &*q,
            key: k,
            value,
            decay: &rwkv.decays,
            rate: &rwkv.rates,
            gate: &rwkv.gates,
            first: weights
                .share
                .as_ref()
                .map(|_| FirstValues { values: &rwkv.first_values, share: &rwkv.shares }),
            weights: {
                let Wkv7Weights { removal, replacement, bonus, norm, norm_bias } = &weights.weights;
                Wkv7Weights { removal, replacement, bonus, norm, norm_bias }
            },
        };
        backend.wkv7(&mut state_entries(step.parts, first + 1), heads, inputs, attended)?;
        let Activations { attended, x, spare, low, .. } = &mut *step.act;
        let branch =
            Branch { of: attended, w: &weights.out, low_rank: None, bias: None, norm: &layer.attn_after };
        self.add(backend, branch, Residual { x, spare, low, rows })
    }

    /// Mixes the normalized input of the feed-forward layer with the row before.
    pub(super) fn shift_channels(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        weights: &Rwkv<B>,
    ) -> Result<(), ModelError> {
        let first = self.cache_indices[index].state.expect("a layer with states");
        let norm = self.weights.layers[index].ffn_norm.as_ref().expect("a norm before the layer");
        self.shift(step, first + CHANNELS, norm, [&weights.norm_biases[1], &weights.shifts[1]])
    }

    /// Computes the mixes of `layer_norm(x)` with the row before, whose state has index `state`, by
    /// these amounts.
    fn shift(
        &self,
        step: &mut StepContext<'_, '_, B>,
        state: usize,
        norm: &B::Buffer,
        [bias, amounts]: [&B::Buffer; 2],
    ) -> Result<(), ModelError> {
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let channels = self.config.n_embd;
        let RwkvActivations { normed, shifted, .. } = &mut act.rwkv;
        backend.layer_norm(&act.x, rows, self.normed(norm), Some(bias), normed)?;
        let shift = TokenShift { channels, n_mixes: amounts.n_values() / channels, rows };
        Ok(backend.shift_tokens(&mut state_entries(step.parts, state), shift, normed, amounts, shifted)?)
    }

    /// Computes the inputs of the heads from the mixes of the rows.
    fn enter_heads(&self, step: &mut StepContext<'_, '_, B>, weights: &Rwkv<B>) -> Result<(), ModelError> {
        let (backend, rows) = (step.backend, step.rows);
        let Activations { q, k, v, rwkv, .. } = &mut *step.act;
        let RwkvActivations { shifted, first_values, decays, rates, shares, gates, low, .. } = rwkv;
        let mixed = |mix: usize| Input { x: &*shifted, norm: None, first_row: mix * rows, rows };
        let value = if weights.share.is_some() { v } else { first_values };
        for (mix, w, y) in [(0, &weights.receptance, q), (2, &weights.key, k), (3, &weights.value, value)] {
            backend.project(mixed(mix), &mut [output(w, y)])?;
        }
        // The logistic function of the gates as a hyperbolic tangent: see the weights.
        let by_half_tanh = |low: &mut B::Buffer, n: usize| {
            backend.soft_cap(low, n, 2.0)?;
            backend.scale(low, n, 0.25)
        };
        let unchanged = |_: &mut B::Buffer, _: usize| Ok(());
        let tanh = |low: &mut B::Buffer, n: usize| backend.soft_cap(low, n, 1.0);
        project_twice(backend, mixed(1), &weights.decay, tanh, [low, decays])?;
        project_twice(backend, mixed(4), &weights.rate, unchanged, [low, rates])?;
        if let Some(share) = &weights.share {
            project_twice(backend, mixed(3), share, unchanged, [low, shares])?;
        }
        Ok(project_twice(backend, mixed(5), &weights.gate, by_half_tanh, [low, gates])?)
    }
}

/// Computes `y = second f(first x) + bias`, by way of `low`.
fn project_twice<B: Backend>(
    backend: &B,
    input: Input<'_, B>,
    weights: &Squashed<B>,
    f: impl Fn(&mut B::Buffer, usize) -> Result<(), BackendError>,
    [low, y]: [&mut B::Buffer; 2],
) -> Result<(), BackendError> {
    let rows = input.rows;
    backend.project(input, &mut [output(&weights.first, low)])?;
    f(low, rows * weights.rank())?;
    let input = Input { x: low, norm: None, first_row: 0, rows };
    let bias = Some(&weights.bias);
    backend.project(input, &mut [Output { w: &weights.second, bias, y, accumulate: false }])
}
