//! A model from its file: hyper-parameters, weights, the forward pass, tokenizer, chat template and sampler.
//!
//! The forward pass ([`Decoder::step`]) reads top to bottom like the equations; it calls the ops of a
//! [`Backend`](kvant_backend::Backend) and knows no device.
#![forbid(unsafe_code)]

pub mod chat;
mod config;
mod decoder;
mod error;
mod rope;
pub mod sampler;
pub mod tokenizer;
mod weights;

pub use config::{Config, Family};
pub use decoder::{Activations, Decoder, Entry, Want};
pub use error::ModelError;
pub use rope::{Rope, Scaling};
pub use weights::{Part, Weights};
