//! Recurrent layers: short convolutions and linear attention.

use kvant_backend::{
    Backend, Columns, Heads, Input, Norm, Output, Pairing, RopeParams, StateInputs, StateRule,
};

use super::batch_entries::state_entries;
use super::mla::output;
use super::{Activations, Branch, Decoder, Product, Residual, StepContext, StepRows};
use crate::ModelError;
use crate::config::{RecurrentMixer, StateKind};
use crate::weights::{Entering, Factored, HeadWeights, KimiEntering, Recurrent, RuleWeights};

/// Epsilon of the L2 norm of queries and keys by Kimi's rule.
const KIMI_EPS: f32 = 1e-6;

impl<B: Backend> Decoder<B> {
    /// Computes `W_in n`, `n = norm(x)`, and for heads with a state the gates, time steps and write
    /// strengths from n.
    pub(super) fn enter_state(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        weights: &Recurrent<B>,
    ) -> Result<(), ModelError> {
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let input =
            self.normed_input(backend, spec.norms.kind, &layer.attn_norm, &act.x, &mut act.spare, rows)?;
        let product = Product { input, low_rank: weights.low_rank[0].as_ref() };
        let project = |outputs: &mut [Output<'_, B>]| self.project(backend, product, outputs, &mut act.low);
        match &weights.entering {
            Entering::Conv(into) => project(&mut [output(into, &mut act.entering)])?,
            Entering::Heads { qkv, gate, step, write } => {
                let qkv = output(qkv, &mut act.entering);
                let (gate, step) = (output(gate, &mut act.gates), output(step, &mut act.steps));
                match write {
                    Some(write) => project(&mut [qkv, gate, step, output(write, &mut act.writes)])?,
                    None => project(&mut [qkv, gate, step])?,
                }
            }
            Entering::Kimi(KimiEntering { qkv: [q, k, v], gate, step: of_step, write }) => {
                let [low_gate, low_step] = &mut act.state_low_rank;
                project(&mut [
                    output(q, &mut act.q),
                    output(k, &mut act.k),
                    output(v, &mut act.v),
                    output(&gate.first, if gate.second.is_some() { low_gate } else { &mut act.gates }),
                    output(&of_step.first, if of_step.second.is_some() { low_step } else { &mut act.steps }),
                    output(write, &mut act.writes),
                ])?;
                self.join_kimi(step, spec.recurrence.map_or(0, |of| of.separate_width()), [gate, of_step])?;
            }
        }
        let act = &mut *step.act;
        let width = spec.recurrence.map_or(0, |of| of.conv().n_in());
        let inputs = StepRows { what: "inputs", x: &act.entering, width, n: rows };
        self.check_rows(backend, step.parts, index, inputs)
    }

    /// Computes the second factors of gates and time steps, and joins queries, keys and values.
    fn join_kimi(
        &self,
        step: &mut StepContext<'_, '_, B>,
        width: usize,
        [gate, of_step]: [&Factored<B>; 2],
    ) -> Result<(), ModelError> {
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let [low_gate, low_step] = &act.state_low_rank;
        for (of, x, y) in [(gate, low_gate, &mut act.gates), (of_step, low_step, &mut act.steps)] {
            let Some((w, low_rank)) = &of.second else { continue };
            let input = Input { x, norm: None, first_row: 0, rows };
            let product = Product { input, low_rank: low_rank.as_ref() };
            self.project(backend, product, &mut [output(w, y)], &mut act.low)?;
        }
        let parts = [&act.q, &act.k, &act.v];
        for (i, x) in parts.into_iter().enumerate() {
            let columns = Columns { width: parts.len() * width, first: i * width };
            backend.copy_columns(x, [rows, width], &mut act.entering, columns)?;
        }
        Ok(())
    }

    /// Computes `x += W_out y`: y is the convolution of the input, or the output of its heads with
    /// a state: `norm(s) * g(W_gate n)`, or in state spaces `norm(s * g(W_gate n))`, g the gate.
    /// The layer's states begin at index `first`.
    pub(super) fn recurrent_mixer(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        first: usize,
        weights: &Recurrent<B>,
    ) -> Result<(), ModelError> {
        let (backend, act) = (step.backend, &mut *step.act);
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let recurrence = spec.recurrence.expect("a recurrent layer");
        let (conv, x, kernel) = (recurrence.conv(), &act.entering, &weights.kernel);
        let y = if weights.heads.is_some() { &mut act.convolved } else { &mut act.attended };
        backend.short_conv(&mut state_entries(step.parts, first), conv, x, kernel, y)?;
        if let Some(heads) = &weights.heads {
            self.linear_attention(step, recurrence, first + 1, heads)?;
        }
        let (w, low_rank) = (&weights.out, weights.low_rank[1].as_ref());
        let Activations { attended, x, spare, low, .. } = &mut *step.act;
        let branch = Branch { of: attended, w, low_rank, bias: None, norm: &layer.attn_after };
        self.add(backend, branch, Residual { x, spare, low, rows: step.rows })
    }

    /// Updates the states of index `state` and computes their normalized and gated output.
    fn linear_attention(
        &self,
        step: &mut StepContext<'_, '_, B>,
        recurrence: RecurrentMixer,
        state: usize,
        weights: &HeadWeights<B>,
    ) -> Result<(), ModelError> {
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let RecurrentMixer::Heads { heads, kind, eps, bound, gate, .. } = recurrence else { return Ok(()) };
        let rule = match &weights.rule {
            RuleWeights::Delta => StateRule::GatedDeltaNet { write: &act.writes, eps },
            RuleWeights::KimiDelta => {
                let bound = bound.map(|bound| bound.log);
                StateRule::KimiDelta { write: &act.writes, eps: KIMI_EPS, bound }
            }
            RuleWeights::Space { skip } => StateRule::Mamba2 { skip },
        };
        let HeadWeights { bias, rate, norm, .. } = weights;
        let inputs = StateInputs { qkv: &act.convolved, step: &act.steps, bias, decay: rate, rule };
        let (y, gates, n_out) = (&mut act.attended, &act.gates, heads.n_out());
        backend.linear_attention(&mut state_entries(step.parts, state), heads, inputs, y)?;
        let normalize = |y: &mut B::Buffer, heads: Heads| match norm {
            // Norm without rotation.
            Some(weight) => {
                let no_rope = RopeParams { pairing: Pairing::Halves, n_rot: 0 };
                backend.rope(y, rows, heads, Some(Norm { weight, eps }), no_rope, gates)
            }
            None => Ok(()),
        };
        match kind {
            StateKind::Delta | StateKind::KimiDelta => {
                normalize(y, Heads { n: heads.n_v_heads, dim: heads.v_dim })?;
                Ok(backend.gate(y, rows * n_out, gates, gate)?)
            }
            StateKind::Space => {
                backend.gate(y, rows * n_out, gates, gate)?;
                Ok(normalize(y, Heads { n: heads.n_k_heads, dim: n_out / heads.n_k_heads })?)
            }
        }
    }
}
