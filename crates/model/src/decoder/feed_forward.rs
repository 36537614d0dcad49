//! The feed-forward sublayer, which processes each token by itself.
//!
//! ```text
//! x += W_down (a(W_gate n) * (W_up n)),  n = norm(x), a the activation
//! x += W_down xielu(W_up n)                                    without a gate (Apertus)
//! x += experts(n) + g W_down (..)                              g: gate of the shared expert
//! x += (experts(n) + W_down (..)) / 2                          n of attention (North Mini Code)
//! x += W_out experts(W_in n) + W_down (..)                     latent experts (Nemotron 3)
//! x += W_out norm(experts(W_in n)) + W_down (..)               with a norm (Kimi K3)
//! x += norm(experts(n) + W_down (..))                          with a post-norm (Trinity)
//! x += norm(norm_1(W_down (..)) + norm_2(experts(norm_3(x))))  with a dense layer (Gemma 4)
//! ```

use kvant_backend::{Backend, ExpertWeights, FfnWeights, Gate, Heads, Input, Norm, Output, Router};

use super::{Activations, Branch, Decoder, Product, Residual, StepContext, normalize};
use crate::weights::{Beside, Experts, FeedForward, LatentSpace, Layer};
use crate::{ExpertSpec, LayerSpec, ModelError, NormKind};

impl<B: Backend> Decoder<B> {
    /// Adds the feed-forward layer and the selected experts of layer `index`, with the layer's
    /// norms. If both sublayers share one norm, it is that of attention.
    pub(super) fn feed_forward(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let rows = step.rows;
        if let Some(weights) = self.fused(layer, spec) {
            let norm = self.norm(&layer.ffn_norm);
            let Activations { hidden, x, spare, .. } = &mut *step.act;
            let Some(after) = self.after_norm(&layer.ffn_after) else {
                return Ok(step.backend.dense_ffn(x, rows, norm, weights, hidden, None)?);
            };
            step.backend.dense_ffn(x, rows, norm, weights, hidden, Some(&mut *spare))?;
            return Ok(step.backend.add_normed(x, spare, rows, after)?);
        }
        if let Some(ffn) = &layer.ffn {
            self.activate(step, index, ffn)?;
            if let Some(by) = spec.experts.and_then(|experts| experts.shared_scale) {
                step.backend.scale(&mut step.act.hidden, rows * spec.n_ff, by)?;
            }
        }
        if let (Some(experts), Some(of)) = (&layer.experts, spec.experts) {
            self.moe_ffn(step, index, experts, of)?;
        }
        if let (Some(norm), Some(experts)) = (self.after_norm(&layer.ffn_after), &layer.experts)
            && experts.beside.is_none()
        {
            return self.add_normed_experts(step, layer.ffn.as_ref(), norm);
        }
        let Some(ffn) = &layer.ffn else { return Ok(()) };
        match layer.experts.as_ref().and_then(|experts| experts.beside.as_ref()) {
            Some(beside) => self.add_dense_and_experts(step, layer, spec, ffn, beside),
            None => {
                let FeedForward { down, biases: [.., bias], low_rank: [_, low_rank], .. } = ffn;
                let (bias, low_rank) = (bias.as_ref(), low_rank.as_ref());
                let Activations { hidden, x, spare, low, .. } = &mut *step.act;
                let branch = Branch { of: hidden, w: down, low_rank, bias, norm: &layer.ffn_after };
                self.add(step.backend, branch, Residual { x, spare, low, rows })
            }
        }
    }

    /// Returns the weights of a layer whose feed-forward layer is one op: a dense one after an RMS
    /// norm of its own, or none, with nothing between its products but the gate.
    fn fused<'a>(&self, layer: &'a Layer<B>, spec: &LayerSpec) -> Option<FfnWeights<'a, B>> {
        let ffn = layer.ffn.as_ref()?;
        let has_other_input = layer.rwkv.is_some() || spec.norms.shared || spec.norms.kind == NormKind::Layer;
        let has_other_gate = spec.xielu.is_some() || spec.sparsity.is_some();
        let [of_products, of_down] = [ffn.is_apart(), ffn.low_rank[1].is_some()];
        if has_other_input || has_other_gate || of_products || of_down || spec.experts.is_some() {
            return None;
        }
        let FeedForward { gate, up, down, biases: [.., bias], .. } = ffn;
        let (gate, bias) = (gate.as_ref().unwrap_or(up), bias.as_ref());
        Some(FfnWeights { activation: spec.activation, gate, up, down, bias })
    }

    /// Computes the activations of the dense feed-forward layer, or of the shared expert.
    fn activate(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        ffn: &FeedForward<B>,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        if let Some(weights) = &layer.rwkv {
            self.shift_channels(step, index, weights)?;
        }
        let (backend, rows) = (step.backend, step.rows);
        let Activations { x, spare, hidden, gates, low, rwkv, .. } = &mut *step.act;
        let FeedForward { gate, up, biases, low_rank: [low_rank, _], .. } = ffn;
        let input = match (&layer.rwkv, spec.norms.shared) {
            (Some(_), _) => Input { x: &rwkv.shifted, norm: None, first_row: 0, rows },
            // Attention has stored the normalized input there.
            (None, true) => Input { x: &*spare, norm: None, first_row: 0, rows },
            (None, false) => self.normed_input(backend, spec.norms.kind, &layer.ffn_norm, x, spare, rows)?,
        };
        let (n, product) = (rows * spec.n_ff, Product { input, low_rank: low_rank.as_ref() });
        let [of_gate, of_up, _] = biases.each_ref().map(Option::as_ref);
        let output = |w, bias, y| Output { w, bias, y, accumulate: false };
        if let Some(numbers) = spec.xielu {
            self.project(backend, product, &mut [output(up, of_up, &mut *hidden)], low)?;
            return Ok(backend.xielu(hidden, n, numbers)?);
        }
        if !ffn.is_apart() && spec.sparsity.is_none() {
            let gate = gate.as_ref().unwrap_or(up);
            return Ok(backend.gated_ffn(product.input, spec.activation, gate, up, hidden)?);
        }
        match gate {
            Some(gate) => {
                let outputs = &mut [output(gate, of_gate, &mut *gates), output(up, of_up, &mut *hidden)];
                self.project(backend, product, outputs, low)?;
            }
            None => {
                self.project(backend, product, &mut [output(up, of_up, &mut *hidden)], low)?;
                backend.copy(hidden, 0, gates, 0, n)?;
            }
        }
        if let Some(deviations) = spec.sparsity {
            return Ok(backend.gate_sparsely(hidden, gates, rows, spec.n_ff, deviations)?);
        }
        Ok(backend.activate(hidden, n, gates, spec.activation)?)
    }

    /// Adds the experts to the residual stream; beside a dense layer or before a norm, their output
    /// goes to a separate buffer.
    fn moe_ffn(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        experts: &Experts<B>,
        ExpertSpec { routing, activation, has_table, .. }: ExpertSpec,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let Experts { router, router_bias, selection_bias, scales, gate, up, down, biases, .. } = experts;
        let is_stored = spec.stores_norm();
        let [of_router, norm] = match (&experts.beside, self.norm(&layer.ffn_norm)) {
            (Some(beside), _) => [&beside.router, &beside.before].map(|norm| Some(self.normed(norm))),
            (None, Some(norm)) if spec.norms.kind == NormKind::Layer => {
                backend.layer_norm(&act.x, rows, norm, None, &mut act.spare)?;
                [None; 2]
            }
            // Without one, attention has stored the normalized input of both sublayers.
            (None, norm) => [norm; 2],
        };
        let output = |w, bias, y| Output { w, bias, y, accumulate: false };
        let router_logits = output(router, router_bias.as_ref(), &mut act.router);
        let x = if is_stored { &act.spare } else { &act.x };
        let input = Input { x, norm: of_router, first_row: 0, rows };
        match (&experts.shared_gate, &experts.latent) {
            (Some(w), _) => {
                backend.project(input, &mut [router_logits, output(w, None, &mut act.shared_gate)])?
            }
            (None, Some(LatentSpace { into, .. })) => {
                backend.project(input, &mut [router_logits, output(into, None, &mut act.latent)])?
            }
            (None, None) => backend.project(input, &mut [router_logits])?,
        }
        let [selection_bias, scales] = [selection_bias, scales].map(Option::as_ref);
        let chosen = if has_table { act.chosen.get(index) } else { None };
        let choice = Router { routing, logits: &act.router, selection_bias, scales, chosen };
        let biases = biases.as_ref().map(|biases| biases.each_ref());
        let gate = gate.as_ref().unwrap_or(up);
        let weights = ExpertWeights { activation, gate, up, down, biases };
        let from_experts = &mut act.expert_output;
        match &experts.latent {
            Some(LatentSpace { norm, out: w, .. }) => {
                backend.moe_ffn(&mut act.latent, rows, None, choice, weights, Some(from_experts))?;
                let sum = Input { x: from_experts, norm: self.norm(norm), first_row: 0, rows };
                backend.project(sum, &mut [Output { w, bias: None, y: &mut act.x, accumulate: true }])?;
            }
            None => {
                let is_apart = experts.beside.is_some() || layer.ffn_after.is_some() || is_stored;
                let apart = is_apart.then_some(&mut *from_experts);
                let x = if is_stored { &mut act.spare } else { &mut act.x };
                backend.moe_ffn(x, rows, norm, choice, weights, apart)?;
                if is_stored {
                    backend.add(&mut act.x, from_experts, rows * self.config.n_embd)?;
                }
            }
        }
        if experts.shared_gate.is_some() {
            backend.gate_rows(&mut act.hidden, rows, spec.n_ff, &act.shared_gate, Gate::Sigmoid)?;
        }
        Ok(())
    }

    /// Adds the norm of the experts' output, to which the shared expert is added first.
    fn add_normed_experts(
        &self,
        step: &mut StepContext<'_, '_, B>,
        shared: Option<&FeedForward<B>>,
        norm: Norm<'_, B::Buffer>,
    ) -> Result<(), ModelError> {
        let (backend, rows) = (step.backend, step.rows);
        let Activations { hidden, x, expert_output, low, .. } = &mut *step.act;
        if let Some(FeedForward { down, biases: [.., bias], low_rank: [_, low_rank], .. }) = shared {
            let input = Input { x: &*hidden, norm: None, first_row: 0, rows };
            let product = Product { input, low_rank: low_rank.as_ref() };
            let output = Output { w: down, bias: bias.as_ref(), y: &mut *expert_output, accumulate: true };
            self.project(backend, product, &mut [output], low)?;
        }
        Ok(backend.add_normed(x, expert_output, rows, norm)?)
    }

    /// Adds the sum of a dense layer and the experts beside it.
    fn add_dense_and_experts(
        &self,
        step: &mut StepContext<'_, '_, B>,
        layer: &Layer<B>,
        spec: &LayerSpec,
        ffn: &FeedForward<B>,
        beside: &Beside<B>,
    ) -> Result<(), ModelError> {
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let FeedForward { down, biases: [.., bias], low_rank: [_, low_rank], .. } = ffn;
        let input = Input { x: &act.hidden, norm: None, first_row: 0, rows };
        let product = Product { input, low_rank: low_rank.as_ref() };
        let sum = &mut act.spare;
        let output = Output { w: down, bias: bias.as_ref(), y: &mut *sum, accumulate: false };
        self.project(backend, product, &mut [output], &mut act.low)?;
        let row = Heads { n: 1, dim: self.config.n_embd };
        let (rope, angles) = (self.config.ropes[spec.rope].params, &act.angles[spec.rope].0);
        normalize(backend, sum, rows, row, Some(self.normed(&beside.after_ffn)), rope, angles)?;
        backend.add_normed(sum, &act.expert_output, rows, self.normed(&beside.after))?;
        let norm = self.norm(&layer.ffn_after).expect("the output of such a layer is normalized");
        Ok(backend.add_normed(&mut act.x, sum, rows, norm)?)
    }
}
