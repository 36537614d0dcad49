//! Runs large language models on a compressed KV cache.
//!
//! ```
//! use kvant::{GenerateOptions, KvOptions, Message, Model, SamplerParams, SessionOptions};
//!
//! # fn main() -> Result<(), kvant::Error> {
//! let model = Model::bundled(Default::default())?; // or Model::open("model.gguf")?
//! let kv = KvOptions::symmetric("turbo3".parse()?);
//! let mut session = model.session(SessionOptions { kv, ..Default::default() })?;
//! let prompt = model.chat_prompt(&[Message::user("What is the capital of France?")])?;
//! let options = GenerateOptions { sampler: SamplerParams::greedy(), ..Default::default() };
//! let mut answer = String::new();
//! for token in session.generate(&prompt, options)? {
//!     answer += &token?.text;
//! }
//! assert!(answer.contains("Paris"));
//! println!("{answer} ({} bytes of KV cache)", session.kv().bytes);
//! # Ok(())
//! # }
//! ```
//!
//! A [`Model`] is cheap to clone and serves any number of [`Session`]s; a session owns one KV
//! cache. Weights, cache types and the device are chosen once; [`Model::device`] reports the device
//! and kernels in use.
#![forbid(unsafe_code)]

#[cfg_attr(not(feature = "wgpu"), path = "no_adapter.rs")]
mod adapter;
mod clock;
mod context_file;
mod device;
mod draft;
mod embed;
mod error;
mod fingerprint;
mod generate;
#[cfg_attr(not(feature = "cuda"), path = "no_gpu.rs")]
mod gpu;
mod model;
mod plan_file;
mod profile;
mod prompt;
pub mod quantize;
mod rerank;
mod runtime;
mod session;
pub mod synthetic;
pub mod tuning;
mod vision;

pub use adapter::adapters;
pub use context_file::{ContextFileError, SavedSession};
pub use device::{CpuInfo, DeviceChoice, WgpuInfo, memory_bandwidth};
pub use embed::{EmbedOptions, HiddenStatePool, Pooling};
pub use error::Error;
pub use generate::{
    CancelFlag, FinishReason, GenerateOptions, Generation, GenerationState, GenerationStats, Token,
};
pub use gpu::CudaInfo;
pub use kvant_backend::{
    BackendError, DeviceInfo, KernelChoice, PREFIX_ALIGNMENT, Pairing, RopeParams, TOKENS_PER_BLOCK, limits,
};
pub use kvant_codec::DType;
pub use kvant_cpu::PrefillPrecision;
pub use kvant_files as files;
pub use kvant_gguf::{self as gguf, Gguf};
pub use kvant_hf::{self as hf, HfError};
pub use kvant_kv::{
    ChannelScales, HeadTypes, KvError, KvLayerShape, KvShape, LayerScales, Plan, Policies, Policy,
    WeightStatistics, balance_factors, five_digits,
};
pub use kvant_model::{Config, ExpertSpec, LayerRange, LayerSpec, LogitsFor, ModelError};
pub use kvant_text::chat::{self, ChatTemplate, Message, RenderOptions, Rendered, TemplateError};
pub use kvant_text::sampler::{
    Dry, Dynatemp, Mirostat, MirostatVersion, SampleError, Sampler, SamplerParams, SequenceBreakers, Xtc,
};
pub use kvant_text::sampling_defaults::SamplingDefaults;
pub use kvant_text::speculative::{Drafter, MAX_DRAFT_TOKENS};
pub use kvant_text::tokenizer::{self, DecodeStream, Special, Tokenizer};
pub use kvant_vision::VisionError;
pub use model::{LoraFile, Model, OpenOptions, Requirements, open_file, open_lora};
pub use plan_file::{Certificate, KvPlan, PlanFileError, added_kld};
pub use profile::StageTime;
pub use rerank::Reranker;
pub use session::{BatchItem, KvBalance, KvOptions, KvUse, Session, SessionOptions};
pub use vision::{EncodedImage, check_mmproj};
