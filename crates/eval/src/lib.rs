//! Does a compressed cache hurt *my* model? Measurements, each a library function.
//!
//! | function | question |
//! |---|---|
//! | [`ppl`] | how well does the model predict a text (llama.cpp's method and numbers) |
//! | [`kld`] | how far is its output from what it says with an f16 cache |
//! | [`kld_by_layer`] | which layer's keys or values are to blame |
//! | [`plan`] | which types suit this model, and what are its keys and values best multiplied by |
//! | [`niah`] | does it still find a sentence hidden in a long text |
//! | [`distortion`] | what do the formats lose, beside what theory allows |
//!
//! # The f16 tail
//!
//! The youngest tokens of a cache wait in f16 until they fill a tile. Keys and values of a step are written before its
//! queries read them, so how many young tokens a query finds in f16 depends on how many tokens are fed at once: fed one by
//! one, as in decoding, every query finds at least the last 16; fed 512 at a time, as a prompt is read, hardly any does. Measured
//! values lie between the two. To compare types alone, switch the tail off (`KvOptions::tail`).
#![forbid(unsafe_code)]

mod base_file;
mod base_trailer;
mod chunks;
mod config;
pub mod distortion;
mod error;
mod kld;
mod needle_form;
mod niah;
mod plan;
mod ppl;
mod progress;
pub mod report;
mod run_state;
mod sample;
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
pub use plan::{Goal, PlanOptions, plan};
pub use ppl::{Ppl, PplOptions, ppl, ppl_saving_base};
pub use progress::{OnProgress, Progress};
pub use sample::{MIXTURE, SAMPLE};
pub use score::TokenScore;
pub use stats::{Estimate, KldStats, Percentiles};
