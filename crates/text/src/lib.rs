//! Tokenizer and chat templates.
//!
//! All modules work from the metadata of a file ([`Gguf`](kvant_gguf::Gguf)) and from plain
//! numbers, independent of weights, caches and devices.
#![forbid(unsafe_code)]

pub mod chat;
mod jinja;
pub mod tokenizer;
