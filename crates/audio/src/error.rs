//! Errors of loading an audio encoder and of decoding audio.

use kvant_backend::BackendError;
use kvant_gguf::{GgufError, printable};
use kvant_model::ModelError;

/// Why audio cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum AudioError {
    /// The encoder's file is malformed, or its kind is not supported.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The bytes are not audio.
    #[error("not readable audio (WAV, MP3, FLAC or Ogg Vorbis): {}", printable(.why, 128))]
    Audio {
        /// The decoder's message.
        why: String,
    },
    /// A property of the audio is outside the supported range.
    #[error("{what} of the audio: expected {expected}, got {got}")]
    Range {
        /// The property.
        what: &'static str,
        /// The supported range.
        expected: String,
        /// The property's value.
        got: String,
    },
    /// The caller ended the encoding.
    #[error("cancelled")]
    Cancelled,
}

impl From<GgufError> for AudioError {
    fn from(error: GgufError) -> Self {
        Self::Model(error.into())
    }
}

impl From<BackendError> for AudioError {
    fn from(error: BackendError) -> Self {
        Self::Model(error.into())
    }
}
