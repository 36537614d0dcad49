//! Why a measurement could not be made.

use std::path::{Path, PathBuf};

use kvant::gguf::printable_path;

/// The error of every measurement. `Display` is one line with what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvalError {
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] kvant::Error),
    /// A format could not be measured.
    #[error(transparent)]
    Codec(#[from] kvant_codec::CodecError),
    /// The text has too few tokens.
    #[error("the text has {tokens} tokens, one chunk takes {n_ctx}")]
    ShortText {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens of a chunk.
        n_ctx: usize,
    },
    /// The model's output is not a number.
    #[error("chunk {chunk}, position {position}: the logits hold {value}")]
    NotFinite {
        /// Number of the chunk, from 0.
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
        /// What is allowed.
        expected: String,
        /// What was given.
        got: String,
    },
    /// The file system refused.
    #[error("{}: {source}", printable_path(path))]
    Io {
        /// The file.
        path: PathBuf,
        /// What the file system says.
        source: std::io::Error,
    },
    /// A file that is not what it should be, or belongs to another run or model.
    #[error("{}: {what}", printable_path(path))]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, with expected and got.
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
