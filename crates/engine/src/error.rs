//! The error type of this library.

use kvant_audio::AudioError;
use kvant_backend::BackendError;
use kvant_codec::CodecError;
use kvant_generate::constraint::ConstraintError;
use kvant_generate::decoding::SamplingError;
use kvant_generate::sampler::SampleError;
use kvant_gguf::GgufError;
use kvant_hf::HfError;
use kvant_kv::KvError;
use kvant_model::ModelError;
use kvant_text::chat::TemplateError;
use kvant_text::tokenizer::TokenizerError;
use kvant_vision::VisionError;

use crate::context_file::ContextFileError;
use crate::plan_file::PlanFileError;

/// Why an operation failed. `Display` is one line that names what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model file is unsound.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The folder is not a readable Hugging Face model.
    #[error(transparent)]
    Hf(#[from] HfError),
    /// The model cannot be loaded or run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A LoRA adapter does not fit the model.
    #[error("adapter {name}: {source}")]
    Lora {
        /// Path of the adapter.
        name: String,
        /// The mismatch.
        source: ModelError,
    },
    /// A vision encoder is unusable, or an image cannot be decoded.
    #[error(transparent)]
    Vision(#[from] VisionError),
    /// An audio encoder is unusable, or audio cannot be decoded.
    #[error(transparent)]
    Audio(#[from] AudioError),
    /// The vocabulary is unsound, or text cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// No token can be sampled from the logits.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A text cannot be constrained to its format.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// The KV cache rejected the operation.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// A type name or a block cannot be decoded.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The device reported an error.
    #[error(transparent)]
    Device(#[from] BackendError),
    /// A session cannot be saved or restored.
    #[error(transparent)]
    ContextFile(#[from] ContextFileError),
    /// A cache plan cannot be saved or used.
    #[error(transparent)]
    PlanFile(#[from] PlanFileError),
    /// The prompt does not fit the context.
    #[error("the prompt has {tokens} tokens, the context holds {n_ctx}")]
    PromptTooLong {
        /// Tokens of the prompt, including those already in the session.
        tokens: usize,
        /// The context length.
        n_ctx: usize,
    },
    /// The prompt is too long even before tokenization.
    #[error("the prompt has {fewest} tokens or more, the context holds {n_ctx}")]
    TextTooLong {
        /// Lower bound on the tokens of a text of this length.
        fewest: usize,
        /// The context length.
        n_ctx: usize,
    },
    /// The device has too little memory for its layers.
    #[error(
        "{device}: {needed} bytes needed for the weights, {usable} available; {fitting} of {n_layers} layers fit"
    )]
    WeightMemory {
        /// The device.
        device: String,
        /// Bytes of the weights.
        needed: usize,
        /// Free bytes, less the scratch memory of the ops.
        usable: usize,
        /// Layers that would fit, counted from the last, with the output matrix and no room for a
        /// cache.
        fitting: usize,
        /// Layers of the model.
        n_layers: usize,
    },
    /// The device has too little memory for the KV cache.
    #[error(
        "{device}: {needed} bytes needed for the cache of {tokens} tokens, {usable} available; {fitting} tokens fit, or \
         more in a smaller type"
    )]
    CacheMemory {
        /// The device.
        device: String,
        /// Context length of the cache, in tokens.
        tokens: usize,
        /// Bytes of the cache.
        needed: usize,
        /// Free bytes, less the scratch memory of the ops.
        usable: usize,
        /// Tokens that would fit.
        fitting: usize,
    },
    /// The prompt is empty.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// No token has been fed since the session was created, rewound, forked or restored.
    #[error("no logits: feed a token first")]
    NoLogits,
    /// The model's output is broken: a logit is NaN or positive infinity.
    #[error("the logits after position {position} are broken: that of token {token} is {got}")]
    LogitNotFinite {
        /// Position of the last token fed, from 0.
        position: usize,
        /// The first token with a broken logit.
        token: u32,
        /// Its logit.
        got: f32,
    },
    /// A hidden state of the text is broken: a value is NaN or infinite.
    #[error("the state of the text is broken: value {index} is {got}")]
    StateNotFinite {
        /// Index of the first broken value.
        index: usize,
        /// That value.
        got: f32,
    },
    /// A setting is out of range.
    #[error("{name}: expected {expected}, got {got}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// The allowed values.
        expected: String,
        /// The given value.
        got: String,
    },
    /// Generation was cancelled through its flag, or an encoding by its options.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Returns whether memory for a KV cache ran out. The input may have been processed in part
    /// where it takes several steps or the model is split
    /// ([`Session::tokens`](crate::Session::tokens) holds the processed tokens); the rest can be
    /// fed once memory is available.
    pub fn is_out_of_memory(&self) -> bool {
        let device = match self {
            Self::Device(error) | Self::Kv(KvError::Device(error)) => error,
            Self::Model(ModelError::Device(error) | ModelError::Kv(KvError::Device(error))) => error,
            _ => return false,
        };
        matches!(device, BackendError::OutOfMemory { .. })
    }
}

impl From<SamplingError<Self>> for Error {
    fn from(error: SamplingError<Self>) -> Self {
        match error {
            SamplingError::Source(error) => error,
            SamplingError::Constraint(error) => error.into(),
        }
    }
}
