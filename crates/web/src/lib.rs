//! Kvant in a browser: the engine with its small model as WebAssembly, for a page that needs no server.
//!
//! An instance of the module is one [`Engine`]: a model, what has been said with it, and at most one answer in the making. The
//! border to the page is [`abi`], a handful of functions; everything else is plain Rust and runs anywhere.
//!
//! `crates/web/build` makes the page; what it consists of is in `page/` and in the server's `assets/page/`.
//! There are no threads and no clock here: the page runs the module in a worker of its own, calls once per token and
//! measures time itself. Where the page has WebGPU, the model runs on `kvant-wgpu`'s kernels, over functions that the worker provides.

pub mod abi;
mod asked;
mod engine;
#[cfg(target_arch = "wasm32")]
mod file;

pub use asked::Asked;
pub use engine::{About, Engine, Event, Finished, Kv};

/// Why the page is refused something.
#[derive(Debug, thiserror::Error)]
pub enum WebError {
    /// The engine says so.
    #[error(transparent)]
    Engine(#[from] kvant::Error),
    /// What the page asks is not understood.
    #[error("the request: {0}")]
    Request(#[from] serde_json::Error),
    /// No memory for a model of this size.
    #[error("the model takes {needed} MiB of memory, and there is room for {room} MiB here")]
    Memory {
        /// MiB that the file and what is made of it take together.
        needed: usize,
        /// MiB that can be had.
        room: usize,
    },
    /// Nothing was opened yet.
    #[error("no model is open")]
    NoModel,
    /// Nothing was asked.
    #[error("no answer is in the making")]
    NoAnswer,
}
