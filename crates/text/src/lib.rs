//! The text side of a model: what turns text into tokens, a conversation into text, and logits into the next token, and
//! what guesses which one that may be.
//!
//! Everything here works from the metadata of a file ([`Gguf`](kvant_gguf::Gguf)) and from plain numbers; nothing
//! knows of weights, of a cache or of a device.
#![forbid(unsafe_code)]

pub mod chat;
pub mod guess;
mod jinja;
pub mod recommended;
pub mod sampler;
pub mod tokenizer;
