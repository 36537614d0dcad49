//! Errors of loading a vision encoder and of decoding images.

use kvant_backend::BackendError;
use kvant_gguf::{GgufError, printable};
use kvant_model::ModelError;

/// Why an image cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum VisionError {
    /// The encoder's file is malformed, or its kind is not supported.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The bytes are not an image.
    #[error("not a readable image (PNG, JPEG, WebP, GIF or BMP): {}", printable(.why, 128))]
    Image {
        /// The decoder's message.
        why: String,
    },
    /// The image is too large, or too narrow for tiling.
    #[error("an image of {width} x {height} pixels: expected {expected}")]
    Size {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// The supported sizes.
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
