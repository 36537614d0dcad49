//! Errors of loading a tower and of reading pictures.

use kvant_backend::BackendError;
use kvant_gguf::{GgufError, printable};
use kvant_model::ModelError;

/// Why a picture cannot become rows.
#[derive(Debug, thiserror::Error)]
pub enum VisionError {
    /// The file of the tower is not sound, or the tower is of a kind that is not known.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Bytes that are no picture.
    #[error("not a picture that can be read (PNG, JPEG, WebP, GIF or BMP): {}", printable(.why, 128))]
    Picture {
        /// What the decoder says.
        why: String,
    },
    /// A picture that is too large, or so narrow that it cannot be cut.
    #[error("a picture of {width} x {height} pixels: expected {expected}")]
    Size {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// What can be read.
        expected: String,
    },
}

impl From<GgufError> for VisionError {
    fn from(error: GgufError) -> Self {
        Self::Model(error.into())
    }
}

impl From<BackendError> for VisionError {
    fn from(error: BackendError) -> Self {
        Self::Model(error.into())
    }
}
