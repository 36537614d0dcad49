//! The text side of a model: what turns text into tokens, a conversation into text, and logits into the next token.
//!
//! Everything here works from the metadata of a file ([`Gguf`](kvant_gguf::Gguf)) and from plain numbers; nothing
//! knows of weights, of a cache or of a device.
#![forbid(unsafe_code)]

pub mod chat;
mod jinja;
pub mod recommended;
pub mod sampler;
pub mod tokenizer;
