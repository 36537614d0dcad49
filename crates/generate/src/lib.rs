//! Generation without a model: what happens between logits and an answer.
//!
//! A sequence takes [logits](LogitSource) from a model, a device or a test. [`sampler`] chooses a
//! token, [`constraint`] excludes those that would break a format, [`decoding`] converts tokens to
//! text and applies stop strings and budgets, [`output_parser`] splits the text into reasoning,
//! content and tool calls, [`speculative`] proposes draft tokens. [`conversation`] renders messages
//! and tools as a prompt and chooses the parser and the constraint of its answer.
#![forbid(unsafe_code)]

pub mod constraint;
pub mod conversation;
pub mod decoding;
pub mod fim;
pub mod gbnf;
pub mod output_parser;
pub mod reasoning_budget;
pub mod sampler;
pub mod sampling_defaults;
mod sequence;
mod source;
pub mod speculative;
#[cfg(test)]
mod test_tokenizer;

pub use sequence::{DraftCounts, Sequence};
pub use source::LogitSource;
