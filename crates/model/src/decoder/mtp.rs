//! The multi-token prediction (MTP) layer, which predicts the token after the next (DeepSeek-V3,
//! arXiv 2412.19437).
//!
//! ```text
//! x = W_e norm_e(e_i) + W_h norm_h(h_(i - 1))   its input: e embeddings, h hidden states
//! x = layer(x)                                  a decoder layer like the others
//! logits of token i + 1 = W_out norm(x)
//! ```
//!
//! The hidden state of a token is the output of the last layer, after the norm before the logits.
//! The output of this layer is a hidden state too, from which the next draft token is predicted,
//! and so on.

use kvant_backend::{Backend, BackendError, Heads, Input, Output};

use super::entry::InputTokens;
use super::{Activations, Decoder, normalize};
use crate::weights::DraftEntry;
use crate::{ModelError, NormKind};

impl<B: Backend> Decoder<B> {
    /// Computes input rows from tokens and the hidden states of the tokens before them `[rows,
    /// n_embd]`: in a draft head, its own.
    pub(super) fn enter_pairs(
        &self,
        backend: &B,
        input: InputTokens<'_>,
        streams: &[f32],
        act: &mut Activations<B>,
    ) -> Result<(), BackendError> {
        let entry = match self.weights.entry.as_ref().expect("pairs enter what drafts") {
            DraftEntry::Pairs(entry) => entry,
            DraftEntry::Features(entry) => {
                backend.write(&mut act.x, streams)?;
                return self.enter_attention(backend, entry, input, act);
            }
            DraftEntry::Block(_) => panic!("no pairs enter a DFlash head"),
        };
        let rows = input.tokens.len();
        let parts = [(&entry.of_stream, &entry.stream_norm), (&entry.of_token, &entry.token_norm)];
        for (index, (w, norm)) in parts.into_iter().enumerate() {
            match index {
                0 => backend.write(&mut act.x, streams)?,
                _ => drop(self.embed(backend, input, &mut act.x)?),
            }
            let of_part = Input { x: &act.x, norm: Some(self.normed(norm)), first_row: 0, rows };
            let sum = Output { w, bias: None, y: &mut act.spare, accumulate: index > 0 };
            backend.project(of_part, &mut [sum])?;
        }
        backend.copy(&act.spare, 0, &mut act.x, 0, rows * self.config.n_embd)
    }

    /// Copies the final hidden states of the last rows of the previous step, of `rows` rows, to
    /// `out` `[rows, n_embd]`, as many as it holds. In a model with LayerNorm they are not
    /// available after a step with requested logits.
    ///
    /// # Errors
    ///
    /// When the device cannot be read.
    ///
    /// # Panics
    ///
    /// When the last layer is on another device.
    pub fn final_hidden(
        &self,
        backend: &B,
        act: &mut Activations<B>,
        rows: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let n_embd = self.config.n_embd;
        let norm =
            self.norm(&self.weights.output_norm).expect("hidden states belong to the last part of the model");
        match self.config.output_norm {
            NormKind::Layer => backend.layer_norm(&act.x, rows, norm, None, &mut act.spare)?,
            NormKind::Rms => {
                let (rope, angles) = (self.config.ropes[0].params, &act.angles[0].0);
                backend.copy(&act.x, 0, &mut act.spare, 0, rows * n_embd)?;
                let whole = Heads { n: 1, dim: n_embd };
                normalize(backend, &mut act.spare, rows, whole, Some(norm), rope, angles)?;
            }
        }
        backend.read(&act.spare, rows * n_embd - out.len(), out)?;
        let bias = &self.weights.output_norm_bias;
        if !bias.is_empty() {
            out.chunks_exact_mut(n_embd).for_each(|row| row.iter_mut().zip(bias).for_each(|(x, b)| *x += b));
        }
        Ok(())
    }
}
