//! Layers that keep a state.

use kvant_backend::{
    Backend, DeltaInputs, DeltaRule, Gate, Heads, Norm, Output, Page, Pairing, RopeParams, StatePart,
};

use super::{Activations, Branch, Decoder, StepPart};
use crate::ModelError;
use crate::weights::{Delta, Recurrent};

impl<B: Backend> Decoder<B> {
    /// `x += W_out y`, with y of the convolution of `W_in n`, `n = norm(x)`; or with `y = norm(d) * silu(W_gate n)`, where d is what the
    /// gated delta rule makes of that convolution.
    pub(super) fn recur(
        &self,
        backend: &B,
        (index, first): (usize, usize),
        weights: &Recurrent<B>,
        parts: &mut [StepPart<'_, B::Page>],
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let recurrence = spec.recurrence().expect("a layer that keeps a state");
        let conv = recurrence.conv();
        let input = self.enter(backend, spec.norms.kind, &layer.attn_norm, (&act.x, &mut act.spare), rows)?;
        let output = |w, y| Output { w, bias: None, y, accumulate: false };
        let into = output(&weights.into, &mut act.entering);
        let [write, forget] = &mut act.writes;
        match &weights.delta {
            None => backend.project(input, &mut [into])?,
            Some(delta) => {
                let gate = output(&delta.gate, &mut act.gates);
                let (write, forget) = (output(&delta.write, write), output(&delta.forget, forget));
                backend.project(input, &mut [into, gate, write, forget])?;
            }
        }
        self.check_rows(backend, parts, index, ("inputs", &act.entering, conv.n_in()), rows)?;
        let (x, kernel) = (&act.entering, &weights.kernel);
        let y = if weights.delta.is_some() { &mut act.convolved } else { &mut act.attended };
        for_states(parts, first, |parts| backend.short_conv(parts, conv, x, kernel, y))?;
        if let (Some(rule), Some(delta)) = (recurrence.rule(), &weights.delta) {
            self.delta(backend, (rule, first + 1), delta, parts, act, rows)?;
        }
        let branch = Branch { of: &act.attended, w: &weights.out, bias: None, norm: &layer.attn_after };
        self.add(backend, &mut act.x, branch, &mut act.spare, rows)
    }

    /// What the gated delta rule makes of what a convolution gives, normalised head by head and gated.
    fn delta(
        &self,
        backend: &B,
        (rule, state): (DeltaRule, usize),
        delta: &Delta<B>,
        parts: &mut [StepPart<'_, B::Page>],
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        let [write, forget] = &act.writes;
        let inputs = DeltaInputs { qkv: &act.convolved, write, forget, bias: &delta.bias, rate: &delta.rate };
        let y = &mut act.attended;
        for_states(parts, state, |parts| backend.delta_rule(parts, rule, inputs, y))?;
        // Nothing is turned: a norm of each head.
        let (heads, unturned) =
            (Heads { n: rule.n_v_heads, dim: rule.v_dim }, RopeParams { pairing: Pairing::Halves, n_rot: 0 });
        let norm = Norm { weight: &delta.norm, eps: self.config.norm_eps };
        backend.rope(y, rows, heads, Some(norm), unturned, &act.gates)?;
        Ok(backend.gate(y, rows * rule.n_out(), &act.gates, Gate::Silu)?)
    }
}

/// Hands the parts of a step to `f` with their states of number `index`.
fn for_states<P: Page, T>(
    parts: &mut [StepPart<'_, P>],
    index: usize,
    f: impl FnOnce(&mut [StatePart<'_, P>]) -> T,
) -> T {
    match parts {
        // Decoding one sequence allocates nothing.
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
