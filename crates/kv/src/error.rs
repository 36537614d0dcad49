//! Errors of the KV cache.

use kvant_backend::BackendError;
use kvant_codec::DType;

/// Reports why a cache cannot be created or extended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// The tokens do not fit in the context.
    #[error("the context is full: {need} tokens needed, {n_ctx} fit")]
    Full {
        /// Tokens needed.
        need: usize,
        /// The context length of the cache.
        n_ctx: usize,
    },
    /// A type that caches do not support.
    #[error("{got} is no KV type; known: {}", DType::KV.map(DType::name).join(" "))]
    NotKvType {
        /// The requested type.
        got: String,
    },
    /// An invalid policy.
    #[error("KV policy '{got}': expected {expected}")]
    Policy {
        /// The text given.
        got: String,
        /// The expected syntax.
        expected: &'static str,
    },
    /// An invalid line of a type table.
    #[error("KV type table, line {line}: {what}")]
    Table {
        /// Line number, from 1.
        line: usize,
        /// The problem, with expected and got.
        what: String,
    },
    /// Channel scales of another model, or out of range.
    #[error("balance: {what}")]
    Balance {
        /// The problem, with expected and got.
        what: String,
    },
    /// A saved page that does not fit the cache.
    #[error("page {index}: {what}")]
    Image {
        /// Index of the page, in the order of [`Cache::pages`](crate::Cache::pages).
        index: usize,
        /// The problem, with expected and got.
        what: String,
    },
    /// An error of the device.
    #[error(transparent)]
    Device(#[from] BackendError),
}
