//! The error type of this crate.

use kvant_backend::BackendError;
use kvant_codec::{CodecError, DType};
use kvant_gguf::GgufError;

/// Why a call was rejected. `Display` is one line that names what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinearError {
    /// The device cannot run the call.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Weights cannot be encoded.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// A tensor is missing from its file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A type of KV caches alone.
    #[error("expected a type of weights, got {0}")]
    NotWeights(DType),
    /// An operand has the wrong size.
    #[error("{operand}: expected {expected}, got {got}")]
    Size {
        /// The operand.
        operand: &'static str,
        /// The sizes that it may have.
        expected: String,
        /// The size that it has.
        got: String,
    },
    /// Weights that no product can be computed with.
    #[error("weights: row {row} holds NaN or an infinity")]
    NotFinite {
        /// The first such row.
        row: usize,
    },
}

impl LinearError {
    pub(crate) fn size(operand: &'static str, expected: impl ToString, got: impl ToString) -> Self {
        Self::Size { operand, expected: expected.to_string(), got: got.to_string() }
    }
}
