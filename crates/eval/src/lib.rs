//! Does a compressed cache hurt *my* model? Measurements, each a library function.
//!
//! | function | question |
//! |---|---|
//! | [`ppl`] | how well does the model predict a text (llama.cpp's method and numbers) |
//! | [`kld`] | how far is its output from what it says with an f16 cache |
//! | [`kld_by_layer`] | which layer's keys or values are to blame |
#![forbid(unsafe_code)]

mod base_file;
mod chunks;
mod config;
mod error;
mod files;
mod kld;
mod ppl;
mod progress;
mod run_state;
mod score;
mod stats;
mod walk;

pub use base_file::{BaseReader, BaseWriter};
pub use chunks::Chunks;
pub use config::KvConfig;
pub use error::EvalError;
pub use kld::{Base, Kld, KldOptions, LayerKld, kld, kld_by_layer};
pub use ppl::{Ppl, PplOptions, ppl, ppl_saving_base};
pub use progress::{OnProgress, Progress};
pub use score::TokenScore;
pub use stats::{Estimate, KldStats, Percentiles};
