//! The error a library user sees.

use kvant_backend::BackendError;
use kvant_codec::CodecError;
use kvant_gguf::GgufError;
use kvant_hf::HfError;
use kvant_kv::KvError;
use kvant_model::ModelError;
use kvant_text::chat::TemplateError;
use kvant_text::sampler::SampleError;
use kvant_text::tokenizer::TokenizerError;
use kvant_vision::VisionError;

use crate::{ContextFileError, PlanFileError};

/// Why something could not be done. `Display` is one line that names what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model file is unsound.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The folder is no model that can be read.
    #[error(transparent)]
    Hf(#[from] HfError),
    /// The model cannot be loaded or run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An adapter that does not fit the model.
    #[error("adapter {name}: {source}")]
    Lora {
        /// Where it is.
        name: String,
        /// What does not fit.
        source: ModelError,
    },
    /// A tower that cannot be used, or a picture that cannot be read.
    #[error(transparent)]
    Vision(#[from] VisionError),
    /// The vocabulary is unsound, or text cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// No token can be drawn from the logits.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The cache refused.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// A type name or a block could not be read.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] BackendError),
    /// A session cannot be saved or restored.
    #[error(transparent)]
    ContextFile(#[from] ContextFileError),
    /// A cache plan cannot be kept or used.
    #[error(transparent)]
    PlanFile(#[from] PlanFileError),
    /// The prompt leaves no room in the context.
    #[error("the prompt has {tokens} tokens, the context holds {n_ctx}")]
    PromptTooLong {
        /// Tokens of the prompt, with what the session held before.
        tokens: usize,
        /// The context length.
        n_ctx: usize,
    },
    /// The prompt is so long that it needs no counting.
    #[error("the prompt has {fewest} tokens or more, the context holds {n_ctx}")]
    TextTooLong {
        /// The fewest tokens that a text of this length can have.
        fewest: usize,
        /// The context length.
        n_ctx: usize,
    },
    /// The device has too little memory for the layers it is to take.
    #[error(
        "{device}: {needed} bytes wanted for the weights, {usable} can be had; {fitting} of {n_layers} layers fit"
    )]
    WeightMemory {
        /// The device.
        device: String,
        /// Bytes the weights take.
        needed: usize,
        /// Bytes that are free, less what the ops need for themselves.
        usable: usize,
        /// How many layers would fit, the last ones, with the output matrix and nothing left for a cache.
        fitting: usize,
        /// Layers of the model.
        n_layers: usize,
    },
    /// The device has too little memory for the cache.
    #[error(
        "{device}: {needed} bytes wanted for the cache of {tokens} tokens, {usable} can be had; {fitting} tokens fit, or \
         more in a smaller type"
    )]
    CacheMemory {
        /// The device.
        device: String,
        /// Tokens the cache was to hold.
        tokens: usize,
        /// Bytes it takes.
        needed: usize,
        /// Bytes that are free, less what the ops need for themselves.
        usable: usize,
        /// Tokens that would fit.
        fitting: usize,
    },
    /// There is nothing to continue from.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// Nothing has been fed since the session was begun, rewound, forked or restored.
    #[error("no logits: feed a token first")]
    NoLogits,
    /// The model's output is broken: a logit is NaN or positive infinity.
    #[error("the logits after position {position} are broken: that of token {token} is {got}")]
    LogitNotFinite {
        /// Position of the token that was read last, from 0.
        position: usize,
        /// The first token at fault.
        token: u32,
        /// Its logit.
        got: f32,
    },
    /// What the model has made of a text is broken: a value is NaN or infinite.
    #[error("the state of the text is broken: value {index} is {got}")]
    StateNotFinite {
        /// The first value at fault.
        index: usize,
        /// What it is.
        got: f32,
    },
    /// A setting is out of range.
    #[error("{name}: expected {expected}, got {got}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What is allowed.
        expected: String,
        /// What was given.
        got: String,
    },
    /// Generation was cancelled through its flag.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Whether there was no memory for a cache. What was being fed may have been read in part, where it takes several steps or a
    /// model is split ([`Session::tokens`](crate::Session::tokens) tells); with more memory, or fewer tokens elsewhere, the rest can be.
    pub fn is_out_of_memory(&self) -> bool {
        let device = match self {
            Self::Device(error) | Self::Kv(KvError::Device(error)) => error,
            Self::Model(ModelError::Device(error) | ModelError::Kv(KvError::Device(error))) => error,
            _ => return false,
        };
        matches!(device, BackendError::OutOfMemory { .. })
    }
}
