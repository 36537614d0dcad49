//! The error type of this crate.

use kvant_codec::CodecError;
use kvant_gguf::GgufError;
use kvant_model::ModelError;

/// Why a model file cannot be made. `Display` is one line that names what was expected and what was
/// found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// The file cannot be written, or its contents are not those of a GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A tensor has values that no model computes with.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tensor cannot be encoded.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The file is no importance matrix.
    #[error("{path}: expected an importance matrix of kvant imatrix or llama-imatrix, got {got}")]
    Importance {
        /// The file.
        path: String,
        /// What it is instead.
        got: String,
    },
    /// An argument is not allowed: a setting, a type, or the file to write.
    #[error("{name}: expected {expected}, got {got}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// The allowed values.
        expected: String,
        /// The given value.
        got: String,
    },
}
