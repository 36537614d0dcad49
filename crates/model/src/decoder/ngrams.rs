//! Values of n-grams that are added to the residual streams before a layer, as Qwen4-Exp has them.
//! [`Ngrams`] has the equation of their rows in the table,
//! [`NgramInjection`](kvant_backend::NgramInjection) that of what they add:
//!
//! ```text
//! e = concat(table[rows of the token's n-grams])
//! key = W_k e,  value = W_v e
//! ```

use kvant_backend::{Backend, BackendError, Input, NgramInjection, Page};

use super::batch_entries::state_entries;
use super::mla::output;
use super::{BatchSequence, Decoder, StepContext};
use crate::weights::NgramWeights;
use crate::{ModelError, Ngrams};

/// N-grams of the tokens of a step.
pub(super) struct NgramActivations<B: Backend> {
    /// Their rows in the table, `[rows * heads]`.
    rows: Vec<u32>,
    /// `[rows, width]`
    embedded: B::Buffer,
    /// A row of the table, `[dim]`.
    row: B::Buffer,
}

impl<B: Backend> NgramActivations<B> {
    /// Allocates buffers for such n-grams, if the model has them.
    pub(super) fn new(
        of: Option<&Ngrams>,
        buffer: impl Fn(usize) -> Result<B::Buffer, BackendError>,
    ) -> Result<Self, BackendError> {
        let embedded = buffer(of.map_or(0, Ngrams::width))?;
        Ok(Self { rows: Vec::new(), embedded, row: buffer(of.map_or(0, |of| of.dim))? })
    }

    /// Finds the rows of the n-grams of `tokens`, those of all parts. Soft tokens are those that
    /// `is_soft` names.
    pub(super) fn enter<P: Page>(
        &mut self,
        of: &Ngrams,
        parts: &[BatchSequence<'_, P>],
        tokens: &[u32],
        is_soft: impl Fn(u32) -> bool,
    ) -> Result<(), ModelError> {
        self.rows.clear();
        let known = |&token: &u32| if is_soft(token) { of.soft } else { token };
        let mut left = tokens;
        for part in parts {
            let (own, others) = left.split_at(part.n);
            left = others;
            if part.tokens_before.len() < of.n_before().min(part.cache.len()) {
                let what = "n-grams without the tokens before a step".to_owned();
                return Err(ModelError::Unsupported { what });
            }
            let read: Vec<u32> = part.tokens_before.iter().chain(own).map(known).collect();
            for end in part.tokens_before.len() + 1..=read.len() {
                of.rows(&read[..end], &mut self.rows);
            }
        }
        Ok(())
    }
}

impl<B: Backend> Decoder<B> {
    /// Adds the values of n-grams to the residual streams before layer `index` of this part, if
    /// they are added there.
    pub(super) fn inject_ngrams(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
    ) -> Result<(), ModelError> {
        let (Some(weights), Some(of)) = (&self.weights.ngrams, &self.config.ngrams) else { return Ok(()) };
        if of.layer != self.weights.part.layers().start + index {
            return Ok(());
        }
        let NgramWeights { table, keys, values, norms, kernel } = weights;
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let NgramActivations { rows: of_table, embedded, row } = &mut act.ngrams;
        table.embed(backend, of_table, row, embedded)?;
        let input = Input { x: &act.ngrams.embedded, norm: None, first_row: 0, rows };
        let (of_keys, of_values) = (&mut act.gated.gates, &mut act.spare);
        backend.project(input, &mut [output(keys, of_keys), output(values, of_values)])?;
        let injection = NgramInjection {
            n: self.config.streams.n(),
            width: self.config.n_embd,
            norms: norms.each_ref(),
            norm_eps: self.config.norm_eps,
            kernel,
            taps: of.taps,
            dilation: of.size,
        };
        // Behind the states of the layer's mixer.
        let first = self.cache_indices[index].state.expect("a layer with a state of n-grams");
        let state = first + self.layers()[index].states().count() - 1;
        let parts = &mut state_entries(step.parts, state);
        Ok(backend.inject_ngrams(parts, injection, of_keys, of_values, rows, &mut act.streams)?)
    }
}
