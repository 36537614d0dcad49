//! Makes model files; runs none, so that no device is part of it.
//!
//! | item | makes |
//! |---|---|
//! | [`quantize`] | a GGUF file whose weight matrices have the types of a [`Recipe`] |
//! | [`Recipe`] | the type of each weight matrix: llama.cpp's mixes, or one type for all |
//! | [`ImportanceMatrix`] | how large the inputs of each column are, for smaller errors |
//! | [`synthetic`] | a GGUF file in memory with the shape of a published model and random weights |
#![forbid(unsafe_code)]

mod balance;
mod error;
mod importance;
mod quantize;
mod recipe;
mod recipe_file;
pub mod synthetic;

pub use error::QuantizeError;
pub use importance::{ImportanceMatrix, InputSums};
pub use quantize::{QuantizeOptions, Quantized, TypeCount, main_type, quantize, stored_name};
pub use recipe::{Recipe, UnknownRecipe};
pub use recipe_file::RecipeFileError;
