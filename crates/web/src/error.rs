//! Error of a call.

/// Errors reported to the page.
#[derive(Debug, thiserror::Error)]
pub enum WebError {
    /// An error of the engine.
    #[error(transparent)]
    Engine(#[from] kvant::Error),
    /// The request is malformed.
    #[error("the request: {0}")]
    Request(#[from] serde_json::Error),
    /// The model does not fit memory.
    #[error("the model needs {needed} MiB of memory, {room} MiB are available")]
    Memory {
        /// MiB of the file and its converted weights.
        needed: usize,
        /// MiB available.
        room: usize,
    },
    /// No model is open.
    #[error("no model is open")]
    NoModel,
    /// No answer is running.
    #[error("no answer is running")]
    NoAnswer,
}
