//! The layer that predicts the token after the next (multi-token prediction, DeepSeek-V3, arXiv 2412.19437).
//!
//! ```text
//! x = W_e norm_e(embedding of token i) + W_h norm_h(stream of token i - 1)    enters it, a decoder layer like the others
//! logits of token i + 1 = W_out norm(x)
//! ```
//!
//! The stream of a token is what has left the last layer, and the norm before the logits. What leaves this layer is one too, from which the token
//! after the predicted one is predicted, and so on.

use std::sync::Arc;

use kvant_backend::{Backend, BackendError, Heads, Input, Output};

use super::{Activations, Decoder};
use crate::{ExtraRows, ModelError, NormKind};

impl<B: Backend> Decoder<B> {
    /// Makes rows of tokens and the streams of those before them `[rows, n_embd]`.
    pub(super) fn enter_pairs(
        &self,
        backend: &B,
        (tokens, extra): (&[u32], &[Arc<ExtraRows>]),
        streams: &[f32],
        act: &mut Activations<B>,
    ) -> Result<(), BackendError> {
        let entry = self.weights.entry.as_ref().expect("pairs enter where something makes rows of them");
        let rows = tokens.len();
        let parts = [(&entry.of_stream, &entry.stream_norm), (&entry.of_token, &entry.token_norm)];
        for (index, (w, norm)) in parts.into_iter().enumerate() {
            match index {
                0 => backend.write(&mut act.x, streams)?,
                _ => drop(self.embed(backend, (tokens, extra), &mut act.x)?),
            }
            let input = Input { x: &act.x, norm: Some(self.normed(norm)), first_row: 0, rows };
            let sum = Output { w, bias: None, y: &mut act.spare, accumulate: index > 0 };
            backend.project(input, &mut [sum])?;
        }
        backend.copy(&act.spare, 0, &mut act.x, 0, rows * self.config.n_embd)
    }

    /// Copies the streams of the last of the `rows` rows of a step that has just been taken into `out` `[rows, n_embd]`, as many as it holds. A step that
    /// wanted logits has left none of a model with layer norms.
    ///
    /// # Errors
    /// When the device cannot be read.
    ///
    /// # Panics
    /// Where the last layer is elsewhere.
    pub fn stream(
        &self,
        backend: &B,
        act: &mut Activations<B>,
        rows: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let n_embd = self.config.n_embd;
        let norm = self.norm(&self.weights.output_norm).expect("streams leave where the model ends");
        match self.config.output_norm {
            NormKind::Layer => backend.layer_norm(&act.x, rows, norm, &mut act.spare)?,
            NormKind::Rms => {
                let rope = (self.config.ropes[0].params, &act.angles[0].0);
                backend.copy(&act.x, 0, &mut act.spare, 0, rows * n_embd)?;
                let whole = Heads { n: 1, dim: n_embd };
                self.normalise(backend, (&mut act.spare, rows, whole), Some(norm), rope)?;
            }
        }
        Ok(backend.read(&act.spare, rows * n_embd - out.len(), out)?)
    }
}
