//! Language models: hyper-parameters, weights and the forward pass.
//!
//! The forward pass ([`Decoder::step`]) follows the equations top to bottom; it calls the ops of a
//! [`Backend`](kvant_backend::Backend) and is independent of the device.
#![forbid(unsafe_code)]

mod angle_table;
mod config;
mod decoder;
mod draft_head;
mod embedding_inputs;
pub mod encoder;
mod error;
mod family;
mod input_statistics;
pub mod linear;
mod lora;
pub mod retype;
mod rope;
mod statistics;
mod weights;

pub use config::{
    BlockKeys, Config, ExpertSpec, Latent, LayerSpec, LayerState, Ngrams, OutputGate, PooledIndexSpec,
    PooledKeySpec, RecurrentMixer, ResidualStreams, SharedKv, TokenBlocks, TokenIndex,
};
pub use decoder::{Activations, BatchSequence, Decoder, Entry, LogitsFor, OnQueries, Outputs, StepError};
pub use draft_head::{DraftHeadConfig, Drafting};
pub use embedding_inputs::{EmbeddingInput, EmbeddingRows, SoftTokens};
pub use error::ModelError;
pub use family::{Family, NormKind, Norms, QkNorm, SharedExpert};
pub use input_statistics::InputStatistics;
pub use lora::Lora;
pub use rope::{Position, Rope, Scaling, Temperature};
pub use weights::{LayerRange, SCORE_HEAD, Weights, check_finite, decode_values};
