//! Makes model files; runs none, so that no device is part of it.
//!
//! | item | makes |
//! |---|---|
//! | [`quantize`] | a GGUF file whose weight matrices have the types of a [`Recipe`] |
//! | [`Recipe`] | the type of each weight matrix: llama.cpp's mixes, or one type for all |
//! | [`synthetic`] | a GGUF file in memory with the shape of a published model and random weights |
#![forbid(unsafe_code)]

mod error;
mod quantize;
mod recipe;
pub mod synthetic;

pub use error::QuantizeError;
pub use quantize::{Quantized, TypeCount, main_type, quantize};
pub use recipe::{Recipe, UnknownRecipe};
