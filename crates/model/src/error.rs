//! Errors of loading and running a model.

use kvant_backend::BackendError;
use kvant_gguf::{GgufError, printable};
use kvant_kv::KvError;

/// Why a model cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file is not a sound GGUF, or lacks a key or tensor.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The architecture is not one of ours.
    #[error("unknown architecture '{}'; the nearest is {nearest}, known are {known}", printable(.got, 64))]
    Architecture {
        /// `general.architecture` of the file.
        got: String,
        /// The most alike of them.
        nearest: &'static str,
        /// What this engine runs.
        known: String,
    },
    /// No model, but what changes one.
    #[error("an adapter, which changes a model and is none by itself")]
    Adapter,
    /// No model, but what makes tokens of pictures for one.
    #[error("a tower, which makes tokens of pictures for a model and is none by itself")]
    Tower,
    /// A feature of the architecture that is not implemented.
    #[error("not supported yet: {}", printable(.what, 256))]
    Unsupported {
        /// The feature, with the key that asks for it.
        what: String,
    },
    /// A metadata value that makes no sense.
    #[error("{key}: expected {expected}, got {got}")]
    Value {
        /// The metadata key.
        key: String,
        /// What would be sound.
        expected: String,
        /// What the file says.
        got: String,
    },
    /// A layer that meets the keys and values of a layer on another device.
    #[error("layer {layer} needs what layer {with} keeps, and cannot be on another device")]
    Apart {
        /// The layer.
        layer: usize,
        /// The layer that keeps the keys and values.
        with: usize,
    },
    /// A tensor that was to stay in the file, and is not there as it is used.
    #[error("tensor '{tensor}' needs conversion while it is loaded, and cannot stay in the mapped file")]
    NotInFile {
        /// The tensor.
        tensor: String,
    },
    /// A tensor of another shape than the hyper-parameters ask for.
    #[error("tensor '{name}': expected shape {expected:?}, got {got:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// The shape that fits, GGUF order (innermost first).
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// A weight that is no number.
    #[error("tensor '{}': row {row} holds NaN or an infinity", printable(.name, 96))]
    NotFinite {
        /// The tensor.
        name: String,
        /// The first row at fault, from 0.
        row: usize,
    },
    /// A key or a value that is no number, before it went to the cache.
    #[error("the {what} of layer {layer} at position {position} hold NaN or an infinity")]
    RowNotFinite {
        /// `keys` or `values`.
        what: &'static str,
        /// The layer, from 0.
        layer: usize,
        /// Position of the token.
        position: usize,
    },
    /// A token that the model's vocabulary does not have.
    #[error("token {token} is not in the vocabulary of {n_vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// The cache refused.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] BackendError),
}
