//! EAGLE-3 (arXiv 2503.01840): a draft head predicts the token after the next from the features of
//! a token, rows of the residual stream of its model, and from the token after it.
//!
//! ```text
//! g = W_fc f                            f the features [k n_embd of the model], normalized in some
//! a = [norm(e), norm(g)]                e the embedding of the next token
//! x = g + W_o attention(W_q a, W_k a, W_v a)
//! x = x + ffn(norm(x))
//! logits of the token after it = W_out norm(x)
//! ```
//!
//! From there on x takes the place of g, for the draft token and the one after it.

use kvant_backend::{Backend, BackendError, Columns, Heads, Input, Output};

use super::entry::InputTokens;
use super::{Activations, Decoder, StepContext, normalize};
use crate::weights::FeatureEntry;
use crate::{DraftHeadConfig, ModelError};

impl<B: Backend> Decoder<B> {
    /// Returns the decoder of a model that captures in each step the features that `head` reads.
    #[must_use]
    pub fn with_captures(self, head: &DraftHeadConfig) -> Self {
        Self { captures: head.target_layers.clone(), ..self }
    }

    /// Copies the rows of the residual stream before layer `index` to the features, if a head reads
    /// them.
    pub(super) fn capture(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
    ) -> Result<(), BackendError> {
        let n_embd = self.config.n_embd;
        let width = self.captures.len() * n_embd;
        for (slot, _) in self.captures.iter().enumerate().filter(|(_, layer)| **layer == index) {
            let columns = Columns { width, first: slot * n_embd };
            step.backend.copy_columns(&step.act.x, [step.rows, n_embd], &mut step.act.captured, columns)?;
        }
        Ok(())
    }

    /// Copies the features of the first rows of the previous step to `out` `[rows, features]`, as
    /// many as it holds.
    ///
    /// # Errors
    ///
    /// When the device cannot be read.
    pub fn captured(&self, backend: &B, act: &Activations<B>, out: &mut [f32]) -> Result<(), ModelError> {
        Ok(backend.read(&act.captured, 0, out)?)
    }

    /// Copies the residual stream after the last layer, before any norm, of the last of the `rows`
    /// rows of the previous step to `out` `[n_embd]`. In a model with LayerNorm it is not available
    /// after a step with requested logits.
    ///
    /// # Errors
    ///
    /// When the device cannot be read.
    pub fn last_residual(
        &self,
        backend: &B,
        act: &Activations<B>,
        rows: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        Ok(backend.read(&act.x, (rows - 1) * self.config.n_embd, out)?)
    }

    /// Computes input rows from tokens and the features `[rows, features]` of the tokens before
    /// them.
    pub(super) fn enter_features(
        &self,
        backend: &B,
        entry: &FeatureEntry<B>,
        input: InputTokens<'_>,
        features: &[f32],
        act: &mut Activations<B>,
    ) -> Result<(), BackendError> {
        backend.write(&mut act.features, features)?;
        let of_features = Input {
            x: &act.features,
            norm: self.norm(&entry.fc_norm),
            first_row: 0,
            rows: input.tokens.len(),
        };
        let g = Output { w: &entry.fc, bias: None, y: &mut act.x, accumulate: false };
        backend.project(of_features, &mut [g])?;
        self.enter_attention(backend, entry, input, act)
    }

    /// Computes attention's input of a head from tokens and the residual stream.
    pub(super) fn enter_attention(
        &self,
        backend: &B,
        entry: &FeatureEntry<B>,
        input: InputTokens<'_>,
        act: &mut Activations<B>,
    ) -> Result<(), BackendError> {
        let (rows, dim) = (input.tokens.len(), self.config.n_embd);
        let whole = Heads { n: 1, dim };
        let rope = self.config.ropes[0].params;
        for (index, norm) in [&entry.token_norm, &entry.stream_norm].into_iter().enumerate() {
            match index {
                0 => drop(self.embed(backend, input, &mut act.spare)?),
                _ => backend.copy(&act.x, 0, &mut act.spare, 0, rows * dim)?,
            }
            let norm = Some(self.normed(norm));
            normalize(backend, &mut act.spare, rows, whole, norm, rope, &act.angles[0].0)?;
            let columns = Columns { width: 2 * dim, first: index * dim };
            backend.copy_columns(&act.spare, [rows, dim], &mut act.attention_in, columns)?;
        }
        match entry.norm_before_residual {
            true => backend.copy(&act.spare, 0, &mut act.x, 0, rows * dim),
            false => Ok(()),
        }
    }
}
