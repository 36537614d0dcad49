//! Errors of sizes and format names.

use crate::DType;

/// Errors of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// A format name that matches no [`DType`].
    #[error("unknown format {name:?}; known: {known}")]
    UnknownName {
        /// The name as given.
        name: String,
        /// Every known name, separated by commas.
        known: String,
    },
    /// A number of values that is not a whole number of blocks.
    #[error("{dtype}: {got} values are not a multiple of the block of {block}")]
    NotWholeBlocks {
        /// The requested format.
        dtype: DType,
        /// Values per block.
        block: usize,
        /// Values given.
        got: usize,
    },
    /// A byte buffer whose length does not match the number of values.
    #[error("{dtype}: {values} values take {expected} bytes, the buffer has {got}")]
    BufferSize {
        /// The requested format.
        dtype: DType,
        /// Values given.
        values: usize,
        /// Bytes these values take.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// Importance for another number of values.
    #[error("expected the importance of {values} values, got that of {got}")]
    Importance {
        /// Values given.
        values: usize,
        /// Length of the importance.
        got: usize,
    },
    /// A size computation that does not fit `usize`.
    #[error("{dtype}: the size of {values} values does not fit the address space")]
    TooLarge {
        /// The requested format.
        dtype: DType,
        /// Number of values requested.
        values: usize,
    },
    /// A format that the KV cache does not support.
    #[error("{dtype} is not a KV cache format; the cache holds {known}")]
    NotKv {
        /// The requested format.
        dtype: DType,
        /// Every KV format, separated by commas.
        known: String,
    },
    /// A tile row length that is zero or not a multiple of the format's step.
    #[error("{dtype}: a tile row of {got} dims is not a positive multiple of {step}")]
    TileDim {
        /// The requested format.
        dtype: DType,
        /// Rows are padded to a multiple of this.
        step: usize,
        /// Dims given.
        got: usize,
    },
}
