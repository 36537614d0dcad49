//! Errors of the cache.

use kvant_backend::BackendError;
use kvant_codec::DType;

/// Why a cache cannot be made or grown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// The context has no room for the tokens.
    #[error("the context is full: {need} tokens needed, {n_ctx} fit")]
    Full {
        /// Tokens that would have to fit.
        need: usize,
        /// The context length the cache was made for.
        n_ctx: usize,
    },
    /// A type that is not for caches.
    #[error("{got} is no KV type; known: {}", DType::KV.map(DType::name).join(" "))]
    NotKvType {
        /// The type asked for.
        got: String,
    },
    /// A policy that cannot be read.
    #[error("KV policy '{got}': expected {expected}")]
    Policy {
        /// What was written.
        got: String,
        /// What can be written.
        expected: &'static str,
    },
    /// A type table that does not fit.
    #[error("KV type table, line {line}: {what}")]
    Table {
        /// Line number, from 1.
        line: usize,
        /// What is wrong, with expected and got.
        what: String,
    },
    /// Factors and centres of another model, or out of range.
    #[error("balance: {what}")]
    Balance {
        /// What is wrong, with expected and got.
        what: String,
    },
    /// A saved stream that does not fit the cache it is for.
    #[error("stream {index}: {what}")]
    Image {
        /// Number of the stream: layer by layer, the keys of each head, then the values.
        index: usize,
        /// What is wrong, with expected and got.
        what: String,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] BackendError),
}
