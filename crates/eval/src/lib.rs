//! Does a compressed cache hurt *my* model? Measurements, each a library function.
//!
//! | function | question |
//! |---|---|
//! | [`ppl`] | how well does the model predict a text (llama.cpp's method and numbers) |
//! | [`kld`] | how far is its output from what it says with an f16 cache |
//! | [`kld_by_layer`] | which layer's keys or values are to blame |
//! | [`niah`] | does it still find a sentence hidden in a long text |
//! | [`distortion`] | what do the formats lose, beside what theory allows |
#![forbid(unsafe_code)]

mod base_file;
mod chunks;
mod config;
pub mod distortion;
mod error;
mod files;
mod kld;
mod needle_form;
mod niah;
mod ppl;
mod progress;
pub mod report;
mod run_state;
mod score;
mod stats;
mod walk;

pub use base_file::{BaseReader, BaseWriter};
pub use chunks::Chunks;
pub use config::KvConfig;
pub use error::EvalError;
pub use kld::{Base, Kld, KldOptions, LayerKld, kld, kld_by_layer};
pub use needle_form::NeedleForm;
pub use niah::{NiahCell, NiahOptions, niah};
pub use ppl::{Ppl, PplOptions, ppl, ppl_saving_base};
pub use progress::{OnProgress, Progress};
pub use score::TokenScore;
pub use stats::{Estimate, KldStats, Percentiles};
