//! Kvant in a browser: the engine with its small model as WebAssembly, for a page without a server.
//!
//! An instance of the module is one [`Engine`]: a model, its conversations, and at most one running
//! answer. The interface to the page is [`abi`], a handful of functions; all else is plain Rust and
//! runs anywhere.
//!
//! `crates/web/build` builds the page; its sources are in `page/` and in the server's
//! `assets/page/`. WebAssembly has no threads and no clock here: the page runs the module in a
//! worker, calls it once per token and measures time itself. With WebGPU, the model runs on
//! `kvant-wgpu`'s kernels, over functions that the worker provides.

pub mod abi;
mod engine;
#[cfg(target_arch = "wasm32")]
mod file;
mod generation_request;

pub use engine::{About, Engine, Event, Finished, Kv};
pub use generation_request::GenerationRequest;

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
