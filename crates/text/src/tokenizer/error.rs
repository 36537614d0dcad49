//! What can be wrong with a vocabulary, or with a text for a vocabulary.

use std::fmt;

use kvant_gguf::GgufError;

/// Every way in which building or using a [`Tokenizer`](super::Tokenizer) fails.
///
/// A GGUF file is untrusted: each variant names the key, token or merge at fault, with what was
/// expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The metadata has no such key, and nothing sound can stand in for it.
    #[error("the file has no '{key}', which a '{model}' tokenizer needs")]
    MissingKey {
        /// The absent metadata key.
        key: &'static str,
        /// The tokenizer model that needs it.
        model: &'static str,
    },
    /// A key is absent, or holds a value of another type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// A token or a merge is not UTF-8.
    #[error("'{key}' [{index}] is not UTF-8: {text}")]
    NotUtf8 {
        /// The metadata key.
        key: &'static str,
        /// Position in the array.
        index: usize,
        /// What it holds, with U+FFFD for what is invalid.
        text: String,
    },
    /// `tokenizer.ggml.model` names a kind that is not implemented.
    #[error("unknown tokenizer model '{got}' (known: {})", known.join(", "))]
    UnknownModel {
        /// The name in the file.
        got: String,
        /// Every accepted name.
        known: &'static [&'static str],
    },
    /// `tokenizer.ggml.pre` names a pre-tokeniser that is not implemented.
    #[error("unknown pre-tokenizer '{got}' (known: {})", known.join(", "))]
    UnknownPre {
        /// The name in the file.
        got: String,
        /// Every accepted name.
        known: Vec<&'static str>,
    },
    /// The vocabulary holds no token, or more than ids can number.
    #[error("a vocabulary of {got} tokens (1 to {max} are possible)")]
    VocabSize {
        /// Tokens in the file.
        got: usize,
        /// The largest supported number.
        max: usize,
    },
    /// A per-token array does not have one entry per token.
    #[error("'{key}' has {got} entries for {expected} tokens")]
    Length {
        /// The metadata key of the array.
        key: &'static str,
        /// Tokens in the vocabulary.
        expected: usize,
        /// Entries in the array.
        got: usize,
    },
    /// A token type outside of GGUF's 0 to 6.
    #[error("token {id} has type {got} (0 to 6 are defined)")]
    TokenType {
        /// The token.
        id: u32,
        /// The type in the file.
        got: i32,
    },
    /// A score that cannot be ordered.
    #[error("token {id} has score {got}, which is not a number that can be ordered")]
    Score {
        /// The token.
        id: u32,
        /// The score in the file.
        got: f32,
    },
    /// A token marked as a byte whose text is not `<0x00>` to `<0xFF>`.
    #[error("token {id} is marked as a byte, but reads '{text}' instead of '<0xHH>'")]
    ByteToken {
        /// The token.
        id: u32,
        /// Its text.
        text: String,
    },
    /// A step of the normalizer that is not known, or lacks a text that belongs to it.
    #[error("'kvant.tokenizer.normalizer': expected {expected}, got {got}")]
    Normalizer {
        /// What may stand there.
        expected: String,
        /// What does.
        got: String,
    },
    /// A property of a token that there is not.
    #[error("'{key}': expected tokens below {n_vocab}, got {id}")]
    AddedToken {
        /// The metadata key.
        key: &'static str,
        /// The token in the file.
        id: u32,
        /// Tokens in the vocabulary.
        n_vocab: usize,
    },
    /// A merge rule that does not fit the vocabulary.
    #[error("merge {index} '{merge}': {fault}")]
    Merge {
        /// Position in `tokenizer.ggml.merges`.
        index: usize,
        /// The rule as written.
        merge: String,
        /// What is wrong with it.
        fault: MergeFault,
    },
    /// The file asks for a token at the start or end of each text and does not say which.
    #[error("the file asks to add '{key}' to each text, but does not define it")]
    MissingSpecial {
        /// The metadata key of the absent id.
        key: &'static str,
    },
    /// The vocabulary has neither a token for a piece of the text, nor bytes, nor an unknown token.
    #[error("the vocabulary has no token for {what} at byte {at} of the text")]
    NoToken {
        /// The byte or word.
        what: String,
        /// Where it stands, in bytes from the start of its stretch of plain text.
        at: usize,
    },
    /// More text than offsets can number.
    #[error("a text of {got} bytes (fewer than 4 GiB are possible)")]
    TextSize {
        /// Bytes of the text.
        got: usize,
    },
    /// The special tokens or a pre-tokeniser pattern could not be compiled.
    #[error("cannot prepare the {what}: {why}")]
    Prepare {
        /// What was being compiled.
        what: &'static str,
        /// The library's message.
        why: String,
    },
}

/// What is wrong with a merge rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeFault {
    /// There is no space between two halves.
    NoSpace,
    /// The left half is not in the vocabulary.
    LeftUnknown,
    /// The right half is not in the vocabulary.
    RightUnknown,
    /// The two halves joined are not in the vocabulary.
    ProductUnknown,
}

impl fmt::Display for MergeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MergeFault::NoSpace => "expected two halves with a space between them",
            MergeFault::LeftUnknown => "the left half is not in the vocabulary",
            MergeFault::RightUnknown => "the right half is not in the vocabulary",
            MergeFault::ProductUnknown => "the joined halves are not in the vocabulary",
        })
    }
}
