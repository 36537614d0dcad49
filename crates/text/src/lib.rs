//! Tokenizer, chat templates, sampler and prompt-lookup drafter.
//!
//! All modules work from the metadata of a file ([`Gguf`](kvant_gguf::Gguf)) and from plain
//! numbers, independent of weights, caches and devices.
#![forbid(unsafe_code)]

pub mod chat;
mod jinja;
pub mod sampler;
pub mod sampling_defaults;
pub mod speculative;
pub mod tokenizer;
