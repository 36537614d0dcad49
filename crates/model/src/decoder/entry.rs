//! Input of a step: tokens, or the residual stream of another part of the model.

use std::borrow::Cow;
use std::sync::Arc;

use kvant_backend::{Backend, BackendError, Heads};

use super::{Activations, Decoder, normalize};
use crate::embedding_inputs::runs;
use crate::weights::{DraftEntry, EmbeddingNormWeights};
use crate::{EmbeddingRows, ModelError};

/// Input of a step.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    /// Tokens, in the first part; [soft tokens](crate::SoftTokens) too.
    Tokens(&'a [u32]),
    /// The residual stream after the previous part's layers, `[rows, n_embd]`.
    Residual(&'a [f32]),
    /// Tokens, each with the [final hidden state](Decoder::final_hidden) of the previous token
    /// `[rows, n_embd]`: the input of an MTP layer. In a draft head, each with its own [residual
    /// stream](Decoder::last_residual) of the previous token.
    Pairs(&'a [u32], &'a [f32]),
    /// Tokens, each with the [features](Decoder::captured) of the previous token `[rows,
    /// features]`: the input of a draft head, of which DFlash [caches](Decoder::cache_features) the
    /// features alone.
    Features(&'a [u32], &'a [f32]),
}

/// Tokens of a step, and the rows of the soft tokens among them.
#[derive(Debug, Clone, Copy)]
pub(super) struct InputTokens<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) extra: &'a [Arc<EmbeddingRows>],
}

impl<B: Backend> Decoder<B> {
    /// Writes the input to the residual stream.
    pub(super) fn enter_model(
        &self,
        backend: &B,
        entry: Entry<'_>,
        extra: &[Arc<EmbeddingRows>],
        act: &mut Activations<B>,
    ) -> Result<(), ModelError> {
        match entry {
            Entry::Tokens(tokens) => {
                let known = self.embed(backend, InputTokens { tokens, extra }, &mut act.x)?;
                if let Some(weights) = &self.weights.per_layer {
                    self.compute_per_layer_embeddings(backend, weights, &known, act)?;
                }
                if let Some(weights) = &self.weights.streams {
                    self.enter_streams(backend, weights, tokens.len(), act)?;
                }
                if self.weights.last_connection.is_some() {
                    self.fill_streams(backend, tokens.len(), act)?;
                }
                self.choose_experts(backend, tokens, act)?;
            }
            Entry::Residual(x) => backend.write(&mut act.x, x)?,
            Entry::Pairs(tokens, streams) => {
                self.enter_pairs(backend, InputTokens { tokens, extra }, streams, act)?;
            }
            Entry::Features(tokens, features) => match &self.weights.entry {
                Some(DraftEntry::Features(entry)) => {
                    self.enter_features(backend, entry, InputTokens { tokens, extra }, features, act)?;
                }
                Some(DraftEntry::Block(entry)) => {
                    self.enter_context(backend, entry, tokens.len(), features, act)?;
                }
                _ => panic!("features enter a draft head"),
            },
        }
        Ok(())
    }

    /// Returns the rows of the soft tokens.
    pub(super) fn check_tokens(&self, entry: Entry<'_>) -> Result<Vec<Arc<EmbeddingRows>>, ModelError> {
        let tokens = match entry {
            Entry::Tokens(tokens) | Entry::Pairs(tokens, _) | Entry::Features(tokens, _) => tokens,
            Entry::Residual(_) => return Ok(Vec::new()),
        };
        let found =
            self.extra.of(tokens).map_err(|token| ModelError::Token { token, n_vocab: self.n_vocab() })?;
        let (depth, n_layers) = (found.iter().map(|rows| rows.depth()).max(), self.layers().len());
        if depth.is_some_and(|depth| depth > n_layers) {
            let what = format!("images with fewer than {} layers on the first device", depth.unwrap_or(0));
            return Err(ModelError::Unsupported { what });
        }
        Ok(found)
    }

    /// Writes the embeddings of tokens, with the rows of `extra`. Returns the tokens, with soft
    /// tokens replaced by token 0.
    pub(super) fn embed<'t>(
        &self,
        backend: &B,
        InputTokens { tokens, extra }: InputTokens<'t>,
        x: &mut B::Buffer,
    ) -> Result<Cow<'t, [u32]>, BackendError> {
        let embedding = self.weights.embedding.as_ref().expect("tokens enter the first part of the model");
        let (scale, n_embd) = (self.config.embedding_scale, self.config.n_embd);
        if extra.is_empty() {
            backend.embed(embedding, tokens, scale, x)?;
            self.normalize_embeddings(backend, tokens.len(), x)?;
            return Ok(Cow::Borrowed(tokens));
        }
        let known = tokens.iter().map(|&token| if self.extra.is_soft(token) { 0 } else { token });
        let known: Vec<u32> = known.collect();
        backend.embed(embedding, &known, scale, x)?;
        self.normalize_embeddings(backend, tokens.len(), x)?;
        for (first, rows) in runs(tokens, extra, 0) {
            put(backend, rows, x, first * n_embd)?;
        }
        Ok(Cow::Owned(known))
    }

    /// Normalizes token embeddings, in models that do (Muse Glimmer, RWKV).
    fn normalize_embeddings(&self, backend: &B, rows: usize, x: &mut B::Buffer) -> Result<(), BackendError> {
        let Some(EmbeddingNormWeights { weight, bias }) = &self.weights.embedding_norm else { return Ok(()) };
        if bias.is_some() {
            let n = rows * self.config.n_embd;
            let mut normed = backend.buffer(n)?;
            backend.layer_norm(x, rows, self.normed(weight), bias.as_ref(), &mut normed)?;
            return backend.copy(&normed, 0, x, 0, n);
        }
        let row = Heads { n: 1, dim: self.config.n_embd };
        let (rope, no_angles) = (self.config.ropes[0].params, backend.buffer(0)?);
        normalize(backend, x, rows, row, Some(self.normed(weight)), rope, &no_angles)
    }

    /// Adds the DeepStack rows of `extra` after layer `layer` of the model (Qwen3-VL). The step
    /// then waits for the device.
    pub(super) fn deepstack(
        &self,
        backend: &B,
        layer: usize,
        InputTokens { tokens, extra }: InputTokens<'_>,
        x: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        for (first, added) in runs(tokens, extra, layer + 1) {
            let at = first * self.config.n_embd;
            let mut rows = vec![0.0; added.len()];
            backend.read(x, at, &mut rows)?;
            rows.iter_mut().zip(added).for_each(|(x, added)| *x += added);
            put(backend, &rows, x, at)?;
        }
        Ok(())
    }
}

/// Copies values into a buffer at an offset.
fn put<B: Backend>(backend: &B, values: &[f32], x: &mut B::Buffer, at: usize) -> Result<(), BackendError> {
    let mut given = backend.buffer(values.len())?;
    backend.write(&mut given, values)?;
    backend.copy(&given, 0, x, at, values.len())
}
