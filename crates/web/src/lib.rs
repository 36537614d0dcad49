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
mod error;
#[cfg(target_arch = "wasm32")]
mod file;
mod generation_request;

pub use engine::{About, Engine, Event, Finished, Kv};
pub use error::WebError;
pub use generation_request::GenerationRequest;
