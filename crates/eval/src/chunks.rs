//! Text chunks as in llama.cpp's perplexity: contiguous chunks of tokens, the second half of each
//! scored.

use std::ops::Range;

use kvant::{Model, Special};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::EvalError;

/// The chunks of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunks {
    tokens: Vec<u32>,
    n_ctx: usize,
    bos: Option<u32>,
}

impl Chunks {
    /// Splits `text` into chunks of `n_ctx` tokens, at most `max`; the remainder is dropped.
    /// Special tokens in the text are plain text.
    ///
    /// # Errors
    ///
    /// [`EvalError::ShortText`] when the text does not fill one chunk, a context below 4 tokens or
    /// above the training context, or a tokenizer error.
    pub fn new(model: &Model, text: &str, n_ctx: usize, max: Option<usize>) -> Result<Self, EvalError> {
        let tokens = model.tokenizer()?.encode(text, Special::AsText, true).map_err(kvant::Error::from)?;
        Self::from_tokens(model, tokens, n_ctx, max)
    }

    /// Splits tokens into chunks.
    ///
    /// # Errors
    ///
    /// As [`Chunks::new`].
    pub fn from_tokens(
        model: &Model,
        mut tokens: Vec<u32>,
        n_ctx: usize,
        max: Option<usize>,
    ) -> Result<Self, EvalError> {
        let n_train = model.config().n_ctx_train;
        if n_ctx < 4 || n_ctx > n_train {
            let expected = format!("4 to {n_train} tokens, the training context");
            return Err(EvalError::Setting { name: "n_ctx", expected, got: n_ctx.to_string() });
        }
        let n_chunks = (tokens.len() / n_ctx).min(max.unwrap_or(usize::MAX));
        if tokens.len() < n_ctx {
            return Err(EvalError::ShortText { tokens: tokens.len(), n_ctx });
        }
        if n_chunks == 0 {
            let expected = "at least 1".to_owned();
            return Err(EvalError::Setting { name: "chunks", expected, got: "0".to_owned() });
        }
        tokens.truncate(n_chunks * n_ctx);
        Ok(Self { tokens, n_ctx, bos: begin_of_text(model)? })
    }

    /// Returns the number of chunks.
    pub fn len(&self) -> usize {
        self.tokens.len() / self.n_ctx
    }

    /// Returns the first `n` chunks, at least one.
    pub fn first(&self, n: usize) -> Self {
        let tokens = self.tokens[..n.clamp(1, self.len()) * self.n_ctx].to_vec();
        Self { tokens, ..self.clone() }
    }

    /// Always false: there is at least one chunk. Present because `len` is.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the tokens per chunk.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Returns the tokens of all chunks, as in the text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the input tokens of a chunk: the first one is BOS if the model adds it.
    pub fn input(&self, chunk: usize) -> Vec<u32> {
        let mut tokens = self.tokens[chunk * self.n_ctx..][..self.n_ctx].to_vec();
        tokens[0] = self.bos.unwrap_or(tokens[0]);
        tokens
    }

    /// Returns the positions whose next-token prediction is scored: the second half, without the
    /// last.
    pub fn scored(&self) -> Range<usize> {
        self.n_ctx / 2..self.n_ctx - 1
    }

    /// Identifies the text and its chunks.
    pub(crate) fn fingerprint(&self) -> String {
        let bytes: Vec<u8> = self.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        format!("{:016x}:{}:{:?}", xxh3_64(&bytes), self.n_ctx, self.bos)
    }
}

/// Returns the BOS token, if the model adds one. A model without a tokenizer adds none.
pub(crate) fn begin_of_text(model: &Model) -> Result<Option<u32>, EvalError> {
    let Ok(tokenizer) = model.tokenizer() else { return Ok(None) };
    let around = tokenizer.encode("", Special::AsText, true).map_err(kvant::Error::from)?;
    Ok(around.first().copied().filter(|&token| tokenizer.bos() == Some(token)))
}
