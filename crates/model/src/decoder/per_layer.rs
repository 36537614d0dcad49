//! Per-layer embeddings (Gemma 3n and 4): each layer receives its own numbers of each token, beside
//! the residual stream.
//!
//! ```text
//! p[l] = (norm(W[l] e / √n_embd) + √n E[token, l]) / √2   e: the token's embedding, n: width
//! x = x + norm(W_out (gelu(W_gate x) * p[l]))             after the feed-forward layer
//! ```

use kvant_backend::{Backend, Gate, Input, Norm, Output};

use super::{Activations, Branch, Decoder, LoraScratch, Product, Residual, StepContext};
use crate::ModelError;
use crate::weights::{PerLayer, PerLayerInputs};

impl<B: Backend> Decoder<B> {
    /// Computes p of all layers, after the tokens' embeddings were written.
    pub(super) fn compute_per_layer_embeddings(
        &self,
        backend: &B,
        weights: &PerLayerInputs<B>,
        tokens: &[u32],
        act: &mut Activations<B>,
    ) -> Result<(), ModelError> {
        let (n_layers, rows) = (act.per_layer.len(), tokens.len());
        let Some(n) = self.config.per_layer_embedding_size else { return Ok(()) };
        let scale = (n as f32 / 2.0).sqrt();
        // A norm of x / c equals that of x with c² times its epsilon.
        let eps = self.config.norm_eps * self.config.n_embd as f32;
        let each = weights.projections.iter().zip(&mut act.per_layer).enumerate();
        for (layer, (w, numbers)) in each {
            act.rows_of_table.clear();
            // The number of table rows fits `u32`, as checked on load.
            let known = tokens.iter().map(|&token| if token < weights.n_tokens { token } else { 0 });
            act.rows_of_table.extend(known.map(|token| token * n_layers as u32 + layer as u32));
            backend.embed(&weights.table, &act.rows_of_table, scale, numbers)?;
            let input = Input { x: &act.x, norm: None, first_row: 0, rows };
            backend.project(input, &mut [Output { w, bias: None, y: &mut act.narrow, accumulate: false }])?;
            backend.add_normed(numbers, &act.narrow, rows, Norm { weight: &weights.norm, eps })?;
        }
        Ok(())
    }

    /// Adds the per-layer embeddings of layer `index`.
    pub(super) fn per_layer_embeddings(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        weights: &PerLayer<B>,
    ) -> Result<(), ModelError> {
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let input = Input { x: &act.x, norm: None, first_row: 0, rows };
        let numbers = &mut act.per_layer[index];
        self.gate_per_layer(backend, weights, input, numbers, &mut act.narrow, &mut act.low)?;
        let low_rank = weights.low_rank[1].as_ref();
        let branch = Branch { of: numbers, w: &weights.out, low_rank, bias: None, norm: &weights.after };
        let Activations { x, spare, low, .. } = act;
        self.add(backend, branch, Residual { x, spare, low, rows })
    }

    /// Multiplies the numbers of a layer by their gates.
    pub(super) fn gate_per_layer(
        &self,
        backend: &B,
        weights: &PerLayer<B>,
        input: Input<'_, B>,
        numbers: &mut B::Buffer,
        gates: &mut B::Buffer,
        low: &mut LoraScratch<B>,
    ) -> Result<(), ModelError> {
        let n = input.rows * self.config.per_layer_embedding_size.unwrap_or(0);
        let product = Product { input, low_rank: weights.low_rank[0].as_ref() };
        let output = Output { w: &weights.gate, bias: None, y: &mut *gates, accumulate: false };
        self.project(backend, product, &mut [output], low)?;
        Ok(backend.gate(numbers, n, gates, Gate::Gelu)?)
    }
}
