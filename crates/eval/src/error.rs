//! Errors of measurements.

use std::path::{Path, PathBuf};

use kvant::gguf::printable_path;

/// The error of every measurement. `Display` is one line with the expected and the actual value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvalError {
    /// An engine error.
    #[error(transparent)]
    Engine(#[from] kvant::Error),
    /// A codec error.
    #[error(transparent)]
    Codec(#[from] kvant_codec::CodecError),
    /// The text has too few tokens.
    #[error("the text has {tokens} tokens, one chunk takes {n_ctx}")]
    ShortText {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens per chunk.
        n_ctx: usize,
    },
    /// The model's output is NaN or infinite.
    #[error("chunk {chunk}, position {position}: the logits hold {value}")]
    NotFinite {
        /// Index of the chunk, from 0.
        chunk: usize,
        /// Token position within the chunk.
        position: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// A setting is out of range.
    #[error("{name}: expected {expected}, got {got}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// The valid range.
        expected: String,
        /// The given value.
        got: String,
    },
    /// A file system error.
    #[error("{}: {source}", printable_path(path))]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// An invalid file, or one of another run or model.
    #[error("{}: {what}", printable_path(path))]
    File {
        /// The file.
        path: PathBuf,
        /// The fault, with expected and actual value.
        what: String,
    },
}

impl EvalError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn file(path: &Path, what: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), what: what.into() }
    }
}
