//! Errors of vocabularies and encoding.

use std::fmt;

use kvant_gguf::GgufError;

/// Errors of building or using a [`Tokenizer`](super::Tokenizer).
///
/// A GGUF file is untrusted: each variant names the key, token or merge at fault, with the expected
/// and actual values.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A required metadata key is absent and has no safe default.
    #[error("the file has no '{key}', which a '{model}' tokenizer needs")]
    MissingKey {
        /// The absent metadata key.
        key: &'static str,
        /// The tokenizer model that requires it.
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
        /// The content, with U+FFFD for invalid bytes.
        text: String,
    },
    /// `tokenizer.ggml.model` names an unsupported kind.
    #[error("unknown tokenizer model '{got}' (known: {})", known.join(", "))]
    UnknownModel {
        /// The name in the file.
        got: String,
        /// Every accepted name.
        known: &'static [&'static str],
    },
    /// `tokenizer.ggml.pre` names an unsupported pre-tokenizer.
    #[error("unknown pre-tokenizer '{got}' (known: {})", known.join(", "))]
    UnknownPre {
        /// The name in the file.
        got: String,
        /// Every accepted name.
        known: Vec<&'static str>,
    },
    /// The vocabulary is empty, or larger than ids can number.
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
    /// A character map that cannot be read.
    #[error("'tokenizer.ggml.precompiled_charsmap': expected {expected}, got {got}")]
    Charsmap {
        /// What is expected.
        expected: String,
        /// What is there.
        got: String,
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
    /// A token that RWKV's method cannot use.
    #[error("token {id}: {fault}")]
    Token {
        /// The token.
        id: u32,
        /// The fault.
        fault: TokenFault,
    },
    /// An unknown normalizer step, or one without its text argument.
    #[error("'kvant.tokenizer.normalizer': expected {expected}, got {got}")]
    Normalizer {
        /// The accepted input.
        expected: String,
        /// The actual input.
        got: String,
    },
    /// A token property refers to an id outside of the vocabulary.
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
        /// The fault.
        fault: MergeFault,
    },
    /// The file requires a token at the start or end of each text without defining it.
    #[error("the file adds '{key}' to each text, but does not define it")]
    MissingSpecial {
        /// The metadata key of the absent id.
        key: &'static str,
    },
    /// The vocabulary has neither a token for a piece of the text, nor bytes, nor an unknown token.
    #[error("the vocabulary has no token for {what} at byte {at} of the text")]
    NoToken {
        /// The byte or word.
        what: String,
        /// Its offset in bytes from the start of its piece of plain text.
        at: usize,
    },
    /// The text is longer than offsets can number.
    #[error("a text of {got} bytes (fewer than 4 GiB are possible)")]
    TextSize {
        /// Bytes of the text.
        got: usize,
    },
    /// The special tokens or a pre-tokenizer pattern could not be compiled.
    #[error("cannot prepare the {what}: {why}")]
    Prepare {
        /// The compiled item.
        what: &'static str,
        /// The library's message.
        why: String,
    },
}

/// Faults of a token of RWKV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenFault {
    /// The text has a backslash that begins none of the known escapes.
    Escape,
    /// The token writes no bytes.
    Empty,
    /// The token writes more bytes than this.
    Length {
        /// The largest supported number.
        max: usize,
        /// Bytes of the token.
        got: usize,
    },
    /// An earlier token writes the same bytes.
    Duplicate {
        /// The earlier token.
        of: u32,
    },
}

impl fmt::Display for TokenFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Escape => {
                f.write_str(r#"expected \xHH, \t, \n, \r, \\, \' or \" where it has a backslash"#)
            }
            Self::Empty => f.write_str("it writes no bytes"),
            Self::Length { max, got } => write!(f, "it writes {got} bytes (up to {max} are possible)"),
            Self::Duplicate { of } => write!(f, "it writes the same bytes as token {of}"),
        }
    }
}

/// Faults of a merge rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeFault {
    /// The rule has no space between two halves.
    NoSpace,
    /// The left half is not in the vocabulary.
    LeftUnknown,
    /// The right half is not in the vocabulary.
    RightUnknown,
    /// The joined halves are not in the vocabulary.
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
