//! The half of a layer that looks at each row by itself.
//!
//! ```text
//! x += W_down (a(W_gate n) * (W_up n)),  n = norm(x), a the activation
//! x += experts(n) + g W_down (..)                              where each row chooses experts; g gates the one that all share
//! x += W_out experts(W_in n) + W_down (..)                     where they see less of a row (Nemotron 3)
//! x += norm(norm_1(W_down (..)) + norm_2(experts(norm_3(x))))  where experts stand beside a feed-forward layer (Gemma 4)
//! ```

use kvant_backend::{Activation, Backend, Choice, ExpertWeights, Gate, Heads, Input, Output, Routing};

use super::{Activations, Branch, Decoder};
use crate::weights::{Beside, Experts, FeedForward, Layer};
use crate::{LayerSpec, ModelError};

impl<B: Backend> Decoder<B> {
    /// Adds what the feed-forward layer gives, and the experts that each row chooses; norms where the layer has them. Where both
    /// halves of the layer share one, it is attention's.
    pub(super) fn feed_forward(
        &self,
        backend: &B,
        (layer, spec): (&Layer<B>, &LayerSpec),
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        if let Some(FeedForward { gate, up, biases, .. }) = &layer.ffn {
            let input = match spec.norms.shared {
                // Attention has left it there.
                true => Input { x: &act.spare, norm: None, first_row: 0, rows },
                false => {
                    self.enter(backend, spec.norms.kind, &layer.ffn_norm, (&act.x, &mut act.spare), rows)?
                }
            };
            match biases {
                [None, None, _] => {
                    let gate = gate.as_ref().unwrap_or(up);
                    backend.gated_ffn(input, spec.activation, gate, up, &mut act.hidden)?;
                }
                [gate_bias, up_bias, _] => {
                    let output = |w, bias, y| Output { w, bias, y, accumulate: false };
                    let gate = gate.as_ref().unwrap_or(up);
                    let gates = output(gate, gate_bias.as_ref(), &mut act.gates);
                    let ups = output(up, up_bias.as_ref(), &mut act.hidden);
                    backend.project(input, &mut [gates, ups])?;
                    let gate = match spec.activation {
                        Activation::Silu => Gate::Silu,
                        Activation::Gelu => Gate::Gelu,
                        Activation::Bounded | Activation::Relu => unreachable!("refused with its weights"),
                    };
                    backend.gate(&mut act.hidden, rows * spec.n_ff, &act.gates, gate)?;
                }
            }
        }
        if let (Some(experts), Some(of)) = (&layer.experts, spec.experts) {
            self.go_through_experts(backend, (layer, spec), (experts, of.routing), act, rows)?;
        }
        let Some(FeedForward { down, biases: [.., bias], .. }) = &layer.ffn else { return Ok(()) };
        let bias = bias.as_ref();
        match layer.experts.as_ref().and_then(|experts| experts.beside.as_ref()) {
            Some(beside) => self.add_both(backend, (layer, spec), (down, bias, beside), act, rows),
            None => {
                let branch = Branch { of: &act.hidden, w: down, bias, norm: &layer.ffn_after };
                self.add(backend, &mut act.x, branch, &mut act.spare, rows)
            }
        }
    }

    /// Adds what the experts give to the stream; where they stand beside a feed-forward layer, it is put apart.
    fn go_through_experts(
        &self,
        backend: &B,
        (layer, spec): (&Layer<B>, &LayerSpec),
        (experts, routing): (&Experts<B>, Routing),
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        let Experts { router, router_bias, selection_bias, scales, gate, up, down, biases, .. } = experts;
        // Families with experts enter every half through an RMSNorm of its own.
        let [of_router, norm] = match &experts.beside {
            Some(beside) => [&beside.router, &beside.before].map(|norm| Some(self.normed(norm))),
            None => [self.norm(&layer.ffn_norm); 2],
        };
        let output = |w, bias, y| Output { w, bias, y, accumulate: false };
        let wanted = output(router, router_bias.as_ref(), &mut act.router);
        let input = Input { x: &act.x, norm: of_router, first_row: 0, rows };
        match (&experts.shared_gate, &experts.latent) {
            (Some(w), _) => backend.project(input, &mut [wanted, output(w, None, &mut act.shared_gate)])?,
            (None, Some([w, _])) => {
                backend.project(input, &mut [wanted, output(w, None, &mut act.latent)])?
            }
            (None, None) => backend.project(input, &mut [wanted])?,
        }
        let [selection_bias, scales] = [selection_bias, scales].map(Option::as_ref);
        let choice = Choice { routing, logits: &act.router, selection_bias, scales };
        let biases = biases.as_ref().map(|biases| biases.each_ref());
        let gate = gate.as_ref().unwrap_or(up);
        let weights = ExpertWeights { activation: spec.activation, gate, up, down, biases };
        let from_experts = &mut act.from_experts;
        match &experts.latent {
            Some([_, w]) => {
                backend.expert_ffn(&mut act.latent, rows, None, choice, weights, Some(from_experts))?;
                let sum = Input { x: from_experts, norm: None, first_row: 0, rows };
                backend.project(sum, &mut [Output { w, bias: None, y: &mut act.x, accumulate: true }])?;
            }
            None => {
                let apart = experts.beside.is_some().then_some(from_experts);
                backend.expert_ffn(&mut act.x, rows, norm, choice, weights, apart)?;
            }
        }
        if experts.shared_gate.is_some() {
            backend.gate_rows(&mut act.hidden, rows, spec.n_ff, &act.shared_gate)?;
        }
        Ok(())
    }

    /// Adds what a feed-forward layer and the experts beside it give.
    fn add_both(
        &self,
        backend: &B,
        (layer, spec): (&Layer<B>, &LayerSpec),
        (down, bias, beside): (&B::Matrix, Option<&B::Buffer>, &Beside<B>),
        act: &mut Activations<B>,
        rows: usize,
    ) -> Result<(), ModelError> {
        let input = Input { x: &act.hidden, norm: None, first_row: 0, rows };
        let sum = &mut act.spare;
        backend.project(input, &mut [Output { w: down, bias, y: sum, accumulate: false }])?;
        let row = Heads { n: 1, dim: self.config.n_embd };
        let rope = (self.config.ropes[spec.rope].params, &act.angles[spec.rope].0);
        self.normalise(backend, (sum, rows, row), Some(self.normed(&beside.after_ffn)), rope)?;
        backend.add_normed(sum, &act.from_experts, rows, self.normed(&beside.after))?;
        let norm = self.norm(&layer.ffn_after).expect("whatever leaves such a layer is normalised");
        Ok(backend.add_normed(&mut act.x, sum, rows, norm)?)
    }
}
