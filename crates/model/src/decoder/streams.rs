//! Several residual streams: alternating updates (AltUp, arXiv 2301.13310) and learned residual
//! layers (Laurel, arXiv 2411.07501), as Gemma 3n has them.
//!
//! ```text
//! h[0] = e,  h[i] = |e| u / |u|,  u = U[i] e           e: the token's embedding
//! r(x) = tanh(W_r norm(x) / n_embd)                    of each layer: its router
//! p[i] = h[i] + Σ_j (P[i, j] r(h[0])) h[j]             predicted streams
//! n = norm(p[0]),  x = (p[0] + norm(attention(n)) + n + norm(R L n)) / √2
//! a = x + norm(ffn(x))                                 the layer, activated for one stream alone
//! h[i] = p[i] + (1 + C[i] r(a)) (a - p[0])             corrected streams
//! h[i] = h[i] + g,  g = norm(W_out (gelu(W_gate (s * h[0])) * numbers))    per layer; i > 0
//! y = (h[0] + Σ_i |h[0]| v / |v|) / n,  v = V[i] h[i]  behind the last layer
//! ```
//!
//! The streams `[n + 1, rows, n_embd]` are one buffer, with an additional one at their end: g, and
//! a in the predictions. So prediction and correction both are linear combinations of n + 1 streams
//! with coefficients per row.

use kvant_backend::{Backend, Heads, Input, Norm, Output, Streams};

use super::{Activations, Decoder, Product, StepContext, normalize};
use crate::ModelError;
use crate::weights::{AltUp, Coefficients, PerLayer, StreamProjections};

/// Epsilon of norms that only divide by a length: too small to change that of other rows than
/// zeros.
const EPS: f32 = 1e-12;

impl<B: Backend> Decoder<B> {
    /// Makes the streams of the embeddings of `rows` tokens.
    pub(super) fn enter_streams(
        &self,
        backend: &B,
        weights: &StreamProjections<B>,
        rows: usize,
        act: &mut Activations<B>,
    ) -> Result<(), ModelError> {
        let Activations { x, spare, streams, angles, .. } = act;
        let len = rows * self.config.n_embd;
        backend.copy(x, 0, streams, 0, len)?;
        for (i, w) in weights.into.iter().enumerate() {
            let input = Input { x: &*x, norm: None, first_row: 0, rows };
            backend.project(input, &mut [Output { w, bias: None, y: &mut *spare, accumulate: false }])?;
            self.normalize_rows(backend, spare, rows, length(&weights.ones), &angles[0].0)?;
            backend.scale_by_rms(spare, x, rows, self.config.n_embd)?;
            backend.copy(spare, 0, streams, (i + 1) * len, len)?;
        }
        // The first layer has no per-layer embedding before it.
        backend.scale(spare, len, 0.0)?;
        Ok(backend.copy(spare, 0, streams, self.config.streams.n() * len, len)?)
    }

    /// Predicts the streams of layer `index`. The first becomes the input of attention and, with
    /// the learned residual layer, the residual stream.
    pub(super) fn predict(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        weights: &AltUp<B>,
    ) -> Result<(), ModelError> {
        let (backend, rows, layer) = (step.backend, step.rows, &self.weights.layers[index]);
        let len = rows * self.config.n_embd;
        self.router_coefficients(step, weights, &weights.predict, StreamOf::Model)?;
        let Activations { x, spare, streams, predictions, coefs, attention_in, narrow, .. } = &mut *step.act;
        backend.mix_streams(coefs, streams, rows, self.streams(), predictions)?;
        backend.copy(predictions, 0, x, 0, len)?;
        backend.copy(predictions, 0, attention_in, 0, len)?;
        let norm = self.norm(&layer.attn_norm);
        if let Some(norm) = norm {
            backend.add_normed(x, attention_in, rows, norm)?;
        }
        let [left, right] = &weights.laurel;
        let input = Input { x: &*attention_in, norm, first_row: 0, rows };
        backend.project(input, &mut [Output { w: left, bias: None, y: &mut *narrow, accumulate: false }])?;
        let input = Input { x: &*narrow, norm: None, first_row: 0, rows };
        backend.project(input, &mut [Output { w: right, bias: None, y: &mut *spare, accumulate: false }])?;
        Ok(backend.add_normed(x, spare, rows, self.normed(&weights.laurel_norm))?)
    }

    /// Corrects the predicted streams of layer `index` by what it made of the first, and computes
    /// its per-layer embedding.
    pub(super) fn correct(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        weights: &AltUp<B>,
        per_layer: Option<&PerLayer<B>>,
    ) -> Result<(), ModelError> {
        let (backend, rows, n) = (step.backend, step.rows, self.config.streams.n());
        let len = rows * self.config.n_embd;
        self.router_coefficients(step, weights, &weights.correct, StreamOf::Layer)?;
        let Activations { x, streams, predictions, coefs, attention_in, angles, .. } = &mut *step.act;
        backend.copy(x, 0, predictions, n * len, len)?;
        backend.mix_streams(coefs, predictions, rows, self.streams(), streams)?;
        let Some(per_layer) = per_layer else { return Ok(()) };
        backend.copy(streams, 0, attention_in, 0, len)?;
        // A product of each value with that of the weight: a norm, undone but for its weight.
        self.normalize_rows(backend, attention_in, rows, length(&weights.output_scale), &angles[0].0)?;
        backend.scale_by_rms(attention_in, streams, rows, self.config.n_embd)?;
        let act = &mut *step.act;
        let input = Input { x: &act.attention_in, norm: None, first_row: 0, rows };
        let numbers = &mut act.per_layer[index];
        self.gate_per_layer(backend, per_layer, input, numbers, &mut act.narrow, &mut act.low)?;
        let Activations { spare, streams, per_layer: numbers, low, angles, .. } = act;
        let input = Input { x: &numbers[index], norm: None, first_row: 0, rows };
        let [_, low_rank] = per_layer.low_rank.each_ref().map(Option::as_ref);
        let output = Output { w: &per_layer.out, bias: None, y: &mut *spare, accumulate: false };
        self.project(backend, Product { input, low_rank }, &mut [output], low)?;
        if let Some(norm) = self.after_norm(&per_layer.after) {
            self.normalize_rows(backend, spare, rows, norm, &angles[0].0)?;
        }
        Ok(backend.copy(spare, 0, streams, n * len, len)?)
    }

    /// Makes one residual stream of all, behind the last layer.
    pub(super) fn leave_streams(
        &self,
        step: &mut StepContext<'_, '_, B>,
        weights: &StreamProjections<B>,
    ) -> Result<(), ModelError> {
        let (backend, rows, n) = (step.backend, step.rows, self.config.streams.n());
        let Activations { x, spare, streams, angles, .. } = &mut *step.act;
        let len = rows * self.config.n_embd;
        backend.copy(streams, 0, x, 0, len)?;
        self.normalize_rows(backend, x, rows, length(&weights.ones), &angles[0].0)?;
        for (i, w) in weights.from.iter().enumerate() {
            // The stream, and the last layer's per-layer embedding, which belongs to it.
            for (of, accumulate) in [(i + 1, false), (n, true)] {
                let input = Input { x: &*streams, norm: None, first_row: of * rows, rows };
                backend.project(input, &mut [Output { w, bias: None, y: &mut *spare, accumulate }])?;
            }
            backend.add_normed(x, spare, rows, length(&weights.ones))?;
        }
        backend.scale_by_rms(x, streams, rows, self.config.n_embd)?;
        Ok(backend.scale(x, len, 1.0 / n as f32)?)
    }

    /// Returns the sizes of a linear combination of streams.
    fn streams(&self) -> Streams {
        let n = self.config.streams.n();
        Streams { n_in: n + 1, n_out: n, width: self.config.n_embd }
    }

    /// Computes the coefficients of the rows of a step: the router reads the first stream, or what
    /// the layer made of it.
    fn router_coefficients(
        &self,
        step: &mut StepContext<'_, '_, B>,
        weights: &AltUp<B>,
        Coefficients { w, bias }: &Coefficients<B>,
        of: StreamOf,
    ) -> Result<(), ModelError> {
        let (backend, rows) = (step.backend, step.rows);
        let Activations { x, streams, modalities, coefs, .. } = &mut *step.act;
        let x = match of {
            StreamOf::Model => &*streams,
            StreamOf::Layer => &*x,
        };
        let input = Input { x, norm: Some(self.normed(&weights.router_norm)), first_row: 0, rows };
        let output = Output { w: &weights.router, bias: None, y: &mut *modalities, accumulate: false };
        backend.project(input, &mut [output])?;
        // This is tanh.
        backend.soft_cap(modalities, rows * self.config.streams.n(), 1.0)?;
        let input = Input { x: &*modalities, norm: None, first_row: 0, rows };
        let output = Output { w, bias: Some(bias), y: coefs, accumulate: false };
        Ok(backend.project(input, &mut [output])?)
    }

    /// Normalizes rows in place.
    fn normalize_rows(
        &self,
        backend: &B,
        x: &mut B::Buffer,
        rows: usize,
        norm: Norm<'_, B::Buffer>,
        angles: &B::Buffer,
    ) -> Result<(), ModelError> {
        let (row, rope) = (Heads { n: 1, dim: self.config.n_embd }, self.config.ropes[0].params);
        Ok(normalize(backend, x, rows, row, Some(norm), rope, angles)?)
    }
}

/// Returns the norm that divides rows by their length alone, and multiplies them by this weight.
fn length<Buffer>(weight: &Buffer) -> Norm<'_, Buffer> {
    Norm { weight, eps: EPS }
}

/// What a router reads.
#[derive(Debug, Clone, Copy)]
enum StreamOf {
    /// The first stream of the model.
    Model,
    /// The residual stream of the layer.
    Layer,
}
