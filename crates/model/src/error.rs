//! Errors of loading and running a model.

use kvant_backend::BackendError;
use kvant_gguf::{GgufError, printable};
use kvant_kv::KvError;

/// Why a model cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file is not a valid GGUF, or lacks a key or tensor.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The architecture is not supported.
    #[error("unknown architecture '{}'; the nearest is {nearest}, known are {known}", printable(.got, 64))]
    Architecture {
        /// `general.architecture` of the file.
        got: String,
        /// The most similar supported name.
        nearest: &'static str,
        /// The supported architectures.
        known: String,
    },
    /// The file is an adapter, not a model.
    #[error("an adapter, not a model by itself")]
    Adapter,
    /// The file is a vision encoder, not a language model.
    #[error("a vision or audio encoder, which is not a language model")]
    Encoder,
    /// The file is a text encoder, which generates nothing.
    #[error("a text encoder ('{}'), which embeds or ranks texts and generates none", printable(.arch, 64))]
    TextEncoder {
        /// `general.architecture` of the file.
        arch: String,
    },
    /// The file is a draft head, which generates nothing by itself.
    #[error("a draft head ('{}'), which drafts for its model and is none by itself", printable(.arch, 64))]
    DraftHead {
        /// `general.architecture` of the file.
        arch: String,
    },
    /// A feature of the architecture that is not implemented.
    #[error("not supported yet: {}", printable(.what, 256))]
    Unsupported {
        /// The feature, with the key that requires it.
        what: String,
    },
    /// An invalid metadata value.
    #[error("{key}: expected {expected}, got {got}")]
    Value {
        /// The metadata key.
        key: String,
        /// The valid values.
        expected: String,
        /// The value in the file.
        got: String,
    },
    /// A layer that shares the K and V of a layer on another device.
    #[error("layer {layer} shares K and V of layer {with}, and cannot be on another device")]
    Apart {
        /// The layer.
        layer: usize,
        /// The layer that stores the K and V.
        with: usize,
    },
    /// A tensor that cannot stay in the file, because its format is converted on load.
    #[error("tensor '{tensor}' needs conversion while it is loaded, and cannot stay in the mapped file")]
    NotInFile {
        /// The tensor.
        tensor: String,
    },
    /// A tensor whose shape differs from the hyper-parameters.
    #[error("tensor '{name}': expected shape {expected:?}, got {got:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// The required shape, GGUF order (innermost first).
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// A weight that is NaN or infinite.
    #[error("tensor '{}': row {row} holds NaN or an infinity", printable(.name, 96))]
    NotFinite {
        /// The tensor.
        name: String,
        /// The first invalid row, from 0.
        row: usize,
    },
    /// A key or value that is NaN or infinite, detected before it is cached.
    #[error("the {what} of layer {layer} at position {position} hold NaN or an infinity")]
    RowNotFinite {
        /// `keys` or `values`.
        what: &'static str,
        /// The layer, from 0.
        layer: usize,
        /// Position of the token.
        position: usize,
    },
    /// A token outside the model's vocabulary.
    #[error("token {token} is not in the vocabulary of {n_vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// An error of the KV cache.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// An error of the device.
    #[error(transparent)]
    Device(#[from] BackendError),
}
