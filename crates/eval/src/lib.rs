//! Measures the effect of a compressed KV cache on a model. Each is a function, or a module of
//! functions.
//!
//! | function | measures |
//! |---|---|
//! | [`ppl`] | perplexity of a text (llama.cpp's method and numbers) |
//! | [`kld`] | KL divergence of the output from that with an f16 cache |
//! | [`kld_by_layer`] | divergence that each layer's keys or values add |
//! | [`plan`] | the effect of each KV type; the best types and channel scales |
//! | [`MemoryCosts`] | the effect of types of weights, and of the caches that fit beside them |
//! | [`agree`] | tokens for which greedy answers equal those with an f16 cache |
//! | [`niah`] | retrieval of a sentence hidden in a long text |
//! | [`feed_chunks`] | nothing itself: the model's [`kvant::InputStatistics`] do |
//! | [`distortion`] | distortion of the codecs, on random vectors or a model's keys and values |
//!
//! # The 16-bit tail
//!
//! A query reads the most recent 17 to 32 tokens unquantized, in every KV type, and fewer just
//! after a multiple of 512; their number depends on the query's position alone, not on the batch
//! size. `KvOptions::tail` disables the
//! tail, to measure types alone.
//!
//! # The noise floor
//!
//! GEMMs with quantized weights round activations to eight bits, and any difference in a cache
//! changes some of these roundings: an f32 cache shows their share. Weights in f16
//! (`OpenOptions::weights`) avoid it.
#![forbid(unsafe_code)]

mod agree;
mod base_file;
mod base_trailer;
mod chunk_eval;
mod chunks;
mod config;
pub mod distortion;
mod error;
mod haystack;
mod inputs;
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

pub use agree::{AgreeOptions, Agreement, Answer, agree, question_prompts, text_prompts};
pub use base_file::{BaseReader, BaseWriter};
pub use chunks::Chunks;
pub use config::KvConfig;
pub use error::EvalError;
pub use inputs::feed_chunks;
pub use kld::{Base, Kld, KldOptions, LayerKld, kld, kld_by_layer};
pub use needle_form::NeedleForm;
pub use niah::{NiahCell, NiahOptions, niah};
pub use plan::{Goal, MemoryBudget, MemoryCosts, PlanOptions, Planned, WeightChoice, WeightCost, plan};
pub use ppl::{Ppl, PplOptions, ppl, ppl_saving_base};
pub use progress::{OnProgress, Progress};
pub use sample::{MIXTURE, QUESTIONS, SAMPLE};
pub use score::TokenScore;
pub use stats::{Estimate, KldStats, Percentiles};
