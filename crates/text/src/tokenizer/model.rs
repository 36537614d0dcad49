//! The kinds of vocabulary.

use super::error::TokenizerError;

/// The tokenization algorithm of a vocabulary (`tokenizer.ggml.model`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenizerModel {
    /// `gpt2`: byte-level BPE after a named pre-tokenizer.
    Gpt2,
    /// `llama`: SentencePiece BPE, merged by token score, with byte fallback.
    Llama,
    /// `bert`: WordPiece.
    Bert,
    /// `gemma4`: BPE by merge rank over SentencePiece text, with byte fallback.
    Gemma4,
    /// `t5`: SentencePiece's unigram model, as in T5 and XLM-RoBERTa.
    T5,
    /// `rwkv`: the longest token at each place, as in RWKV's World models.
    Rwkv,
}

impl TokenizerModel {
    /// The names in GGUF files, in the order of the variants.
    pub const NAMES: [&'static str; 6] = ["gpt2", "llama", "bert", "gemma4", "t5", "rwkv"];

    /// Returns the name in GGUF files.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Returns the model named `name`.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownModel`] for any name outside of [`TokenizerModel::NAMES`].
    pub fn from_name(name: &str) -> Result<Self, TokenizerError> {
        match name {
            "gpt2" => Ok(Self::Gpt2),
            "llama" => Ok(Self::Llama),
            "bert" => Ok(Self::Bert),
            "gemma4" => Ok(Self::Gemma4),
            "t5" => Ok(Self::T5),
            "rwkv" => Ok(Self::Rwkv),
            _ => Err(TokenizerError::UnknownModel { got: name.to_owned(), known: &Self::NAMES }),
        }
    }
}
