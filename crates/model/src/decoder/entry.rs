//! What enters a step: rows of tokens, or what another part of the model has left.

use std::borrow::Cow;
use std::sync::Arc;

use kvant_backend::{Backend, BackendError};

use super::{Activations, Decoder};
use crate::extra::runs;
use crate::{ExtraRows, ModelError};

/// What enters a step.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    /// Tokens, where the model begins; [extra](crate::ExtraTokens) ones too.
    Tokens(&'a [u32]),
    /// The residual stream that the layers before have left, `[rows, n_embd]`.
    Residual(&'a [f32]),
    /// Tokens, each with the [stream](Decoder::stream) of the token before it `[rows, n_embd]`, where a layer that predicts the token after the
    /// next stands by itself.
    Pairs(&'a [u32], &'a [f32]),
}

impl<B: Backend> Decoder<B> {
    /// Lets it enter the stream.
    pub(super) fn enter_model(
        &self,
        backend: &B,
        entry: Entry<'_>,
        extra: &[Arc<ExtraRows>],
        act: &mut Activations<B>,
    ) -> Result<(), ModelError> {
        match entry {
            Entry::Tokens(tokens) => {
                let known = self.embed(backend, (tokens, extra), &mut act.x)?;
                if let Some(weights) = &self.weights.per_layer {
                    self.give_layers(backend, weights, &known, act)?;
                }
            }
            Entry::Residual(x) => backend.write(&mut act.x, x)?,
            Entry::Pairs(tokens, streams) => self.enter_pairs(backend, (tokens, extra), streams, act)?,
        }
        Ok(())
    }

    /// What tokens beyond the vocabulary belong to.
    pub(super) fn check_tokens(&self, entry: Entry<'_>) -> Result<Vec<Arc<ExtraRows>>, ModelError> {
        let (Entry::Tokens(tokens) | Entry::Pairs(tokens, _)) = entry else { return Ok(Vec::new()) };
        self.extra.of(tokens).map_err(|token| ModelError::Token { token, n_vocab: self.n_vocab() })
    }

    /// The rows of tokens, those of `extra` among them. Gives the tokens, with the first of the vocabulary in the place of such.
    pub(super) fn embed<'t>(
        &self,
        backend: &B,
        (tokens, extra): (&'t [u32], &[Arc<ExtraRows>]),
        x: &mut B::Buffer,
    ) -> Result<Cow<'t, [u32]>, BackendError> {
        let embedding = self.weights.embedding.as_ref().expect("tokens enter where the model begins");
        let (scale, n_embd) = (self.config.embedding_scale, self.config.n_embd);
        if extra.is_empty() {
            backend.embed(embedding, tokens, scale, x)?;
            return Ok(Cow::Borrowed(tokens));
        }
        let known = tokens.iter().map(|&token| if self.extra.is_extra(token) { 0 } else { token });
        let known: Vec<u32> = known.collect();
        backend.embed(embedding, &known, scale, x)?;
        for (first, rows) in runs(tokens, extra) {
            let mut given = backend.buffer(rows.len())?;
            backend.write(&mut given, rows)?;
            backend.copy(&given, 0, x, first * n_embd, rows.len())?;
        }
        Ok(Cow::Owned(known))
    }
}
