//! Recurrent layers: short convolutions and linear attention.

use kvant_backend::{
    Backend, Gate, Heads, Norm, Output, Page, Pairing, RopeParams, StateBatchEntry, StateInputs, StateRule,
};

use super::{Activations, BatchSequence, Branch, Decoder, Product};
use crate::ModelError;
use crate::config::{RecurrentMixer, StateKind};
use crate::weights::{HeadWeights, Recurrent, RuleWeights};

impl<B: Backend> Decoder<B> {
    /// Computes `W_in n`, `n = norm(x)`, and for heads with a state the gates, time steps and write
    /// strengths from n.
    pub(super) fn enter_state(
        &self,
        backend: &B,
        index: usize,
        weights: &Recurrent<B>,
        parts: &[BatchSequence<'_, B::Page>],
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let input =
            self.normed_input(backend, spec.norms.kind, &layer.attn_norm, (&act.x, &mut act.spare), rows)?;
        let output = |w, y| Output { w, bias: None, y, accumulate: false };
        let into = output(&weights.into, &mut act.entering);
        let product = Product { input, low_rank: weights.low_rank[0].as_ref() };
        let project = |outputs: &mut [Output<'_, B>]| self.project(backend, product, outputs, &mut act.low);
        match &weights.heads {
            None => project(&mut [into])?,
            Some(HeadWeights { gate, step, rule, .. }) => {
                let (gate, step) = (output(gate, &mut act.gates), output(step, &mut act.steps));
                match rule {
                    RuleWeights::Delta { write } => {
                        project(&mut [into, gate, step, output(write, &mut act.writes)])?;
                    }
                    RuleWeights::Space { .. } => project(&mut [into, gate, step])?,
                }
            }
        }
        let n_in = spec.recurrence.map_or(0, |of| of.conv().n_in());
        self.check_rows(backend, parts, index, ("inputs", &act.entering, n_in), rows)
    }

    /// Computes `x += W_out y`: y is the convolution of the input, or the output of its heads with
    /// a state, `norm(s) * silu(W_gate n)` or `norm(s * silu(W_gate n))`. The layer's states begin
    /// at index `first`.
    pub(super) fn recurrent_mixer(
        &self,
        backend: &B,
        (index, first): (usize, usize),
        weights: &Recurrent<B>,
        parts: &mut [BatchSequence<'_, B::Page>],
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let recurrence = spec.recurrence.expect("a recurrent layer");
        let (conv, x, kernel) = (recurrence.conv(), &act.entering, &weights.kernel);
        let y = if weights.heads.is_some() { &mut act.convolved } else { &mut act.attended };
        for_states(parts, first, |parts| backend.short_conv(parts, conv, x, kernel, y))?;
        if let Some(heads) = &weights.heads {
            self.linear_attention(backend, (recurrence, first + 1), heads, parts, act, rows)?;
        }
        let (w, low_rank) = (&weights.out, weights.low_rank[1].as_ref());
        let branch = Branch { of: &act.attended, w, low_rank, bias: None, norm: &layer.attn_after };
        self.add(backend, &mut act.x, branch, (&mut act.spare, &mut act.low), rows)
    }

    /// Updates the states and computes their normalized and gated output.
    fn linear_attention(
        &self,
        backend: &B,
        (recurrence, state): (RecurrentMixer, usize),
        weights: &HeadWeights<B>,
        parts: &mut [BatchSequence<'_, B::Page>],
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        let RecurrentMixer::Heads { heads, kind, eps, .. } = recurrence else { return Ok(()) };
        let rule = match &weights.rule {
            RuleWeights::Delta { .. } => StateRule::GatedDeltaNet { write: &act.writes, eps },
            RuleWeights::Space { skip } => StateRule::Mamba2 { skip },
        };
        let HeadWeights { bias, rate, norm, .. } = weights;
        let inputs = StateInputs { qkv: &act.convolved, step: &act.steps, bias, decay: rate, rule };
        let (y, gates, n_out) = (&mut act.attended, &act.gates, heads.n_out());
        for_states(parts, state, |parts| backend.linear_attention(parts, heads, inputs, y))?;
        let normalize = |y: &mut B::Buffer, heads: Heads| match norm {
            // Norm without rotation.
            Some(weight) => {
                let no_rope = RopeParams { pairing: Pairing::Halves, n_rot: 0 };
                backend.rope(y, rows, heads, Some(Norm { weight, eps }), no_rope, gates)
            }
            None => Ok(()),
        };
        match kind {
            StateKind::Delta => {
                normalize(y, Heads { n: heads.n_v_heads, dim: heads.v_dim })?;
                Ok(backend.gate(y, rows * n_out, gates, Gate::Silu)?)
            }
            StateKind::Space => {
                backend.gate(y, rows * n_out, gates, Gate::Silu)?;
                Ok(normalize(y, Heads { n: heads.n_k_heads, dim: n_out / heads.n_k_heads })?)
            }
        }
    }
}

/// Passes the parts of a step to `f` with their states of index `index`.
fn for_states<P: Page, T>(
    parts: &mut [BatchSequence<'_, P>],
    index: usize,
    f: impl FnOnce(&mut [StateBatchEntry<'_, P>]) -> T,
) -> T {
    match parts {
        // Decoding one sequence allocates no memory.
        [one] => {
            let rows = one.cache.rows(0, one.n);
            f(&mut [one.cache.state_part(index, rows)])
        }
        parts => {
            let mut first = 0;
            let parts = parts.iter_mut().map(|one| {
                let rows = one.cache.rows(first, one.n);
                first += one.n;
                one.cache.state_part(index, rows)
            });
            f(&mut parts.collect::<Vec<_>>())
        }
    }
}
