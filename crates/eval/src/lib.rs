//! Does a compressed cache hurt *my* model? Measurements, each a library function.
//!
//! | function | question |
//! |---|---|
//! | [`ppl`] | how well does the model predict a text (llama.cpp's method and numbers) |
//! | [`kld`] | how far is its output from what it says with an f16 cache |
//! | [`kld_by_layer`] | which layer's keys or values are to blame |
//! | [`plan`] | which types suit this model, and what are its keys and values best multiplied by |
//! | [`agree`] | for how long are its answers the same as with an f16 cache |
//! | [`niah`] | does it still find a sentence hidden in a long text |
//! | [`distortion`] | what do the formats lose, beside what theory allows |
//!
//! # The window in 16 bit
//!
//! A query sees the youngest 17 to 32 tokens as they are, whatever they are stored as; which ones depends on its position alone, not on
//! how many tokens are fed at once. To measure types alone, switch it off (`KvOptions::tail`).
//!
//! # What is not the cache's
//!
//! Products with quantised weights round activations to eight bits, and any difference in a cache flips some of these roundings: a
//! cache in f32 shows how much that is. Weights in f16 (`OpenOptions::weights`) are multiplied without.
#![forbid(unsafe_code)]

mod agree;
mod base_file;
mod base_trailer;
mod chunks;
mod config;
pub mod distortion;
mod error;
mod haystack;
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

pub use agree::{AgreeOptions, Agreement, Answer, agree, question_prompts, text_prompts};
pub use base_file::{BaseReader, BaseWriter};
pub use chunks::Chunks;
pub use config::KvConfig;
pub use error::EvalError;
pub use kld::{Base, Kld, KldOptions, LayerKld, kld, kld_by_layer};
pub use needle_form::NeedleForm;
pub use niah::{NiahCell, NiahOptions, niah};
pub use plan::{Goal, PlanOptions, Planned, plan};
pub use ppl::{Ppl, PplOptions, ppl, ppl_saving_base};
pub use progress::{OnProgress, Progress};
pub use sample::{MIXTURE, QUESTIONS, SAMPLE};
pub use score::TokenScore;
pub use stats::{Estimate, KldStats, Percentiles};
