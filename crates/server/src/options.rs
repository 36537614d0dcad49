//! Options of a server, and the models that it loads on demand.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use kvant::{KvOptions, Model, Pooling, SamplerParams};

use crate::address::Address;
use crate::events::KvEventSink;
#[cfg(feature = "tls")]
use crate::tls::TlsFiles;

/// Certificate and key files; uninhabited without the feature `tls`.
#[cfg(not(feature = "tls"))]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TlsFiles {}

/// Sampling parameters of requests that set none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServerSampling {
    /// For requests with no temperature or one above 0.
    pub usual: SamplerParams,
    /// For requests with temperature 0 (greedy): the model's recommended filters do not apply.
    pub greedy: SamplerParams,
}

impl From<SamplerParams> for ServerSampling {
    /// Uses the same parameters for all requests.
    fn from(params: SamplerParams) -> Self {
        Self { usual: params, greedy: params }
    }
}

/// Model that is loaded on demand, by name.
#[derive(Clone)]
pub struct ModelSpec {
    /// Name of the model.
    pub name: String,
    /// Approximate size of its weights in bytes.
    pub bytes: u64,
    /// Loads the model, or returns the reason for a failure in one line.
    pub open: Arc<dyn Fn() -> Result<OpenedModel, String> + Send + Sync>,
}

/// Loaded model with its defaults.
pub struct OpenedModel {
    /// Model.
    pub model: Model,
    /// Cache options of requests that set none.
    pub kv: KvOptions,
    /// Sampling parameters of requests that set none.
    pub sampling: ServerSampling,
}

impl fmt::Debug for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Offer").field("name", &self.name).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Server options.
#[derive(Debug, Clone)]
pub struct Options {
    /// Listening address.
    pub address: Address,
    /// Listening address of vLLM's gRPC services for routers; not served when `None`.
    #[cfg(feature = "grpc")]
    pub grpc: Option<Address>,
    /// Model name.
    pub name: String,
    /// Further models, loaded on demand. With any, each request selects a model by name.
    pub others: Vec<ModelSpec>,
    /// Bytes for the weights of all models together; idle models are evicted for others.
    pub weight_budget: u64,
    /// Maximum tokens of a conversation; the training context when `None`.
    pub n_ctx: Option<usize>,
    /// Cache options of requests that set none.
    pub kv: KvOptions,
    /// Sampling parameters of requests that set none.
    pub sampling: ServerSampling,
    /// Whether every request without a seed uses the seed above; otherwise each derives its own
    /// from it.
    pub repeats_seed: bool,
    /// `enable_thinking` for the chat template of requests that set none; undefined when `None`.
    pub enable_thinking: Option<bool>,
    /// Reasoning budget in tokens of requests that set none; the reasoning is closed at the limit.
    pub thinking_budget: Option<usize>,
    /// Maximum draft tokens per sequence; adaptive when `None`.
    pub draft_max: Option<usize>,
    /// Pooling of hidden states into an embedding; the model file's own when `None`.
    pub pooling: Option<Pooling>,
    /// Maximum running sequences.
    pub n_running: usize,
    /// Maximum queued sequences; requests beyond it are refused with a retry hint.
    pub n_waiting: usize,
    /// Bytes for all KV caches; each model gets an equal share.
    pub kv_budget: usize,
    /// Host memory in bytes for conversations evicted from the budget above, for devices with their
    /// own memory. Each model gets an equal share.
    pub kv_ram: u64,
    /// Folder and byte limit for conversations offloaded to disk; they survive a restart.
    pub kv_disk: Option<(PathBuf, u64)>,
    /// Host memory in bytes for caches that decode workers will fetch; 0 keeps none.
    pub kv_transfer: u64,
    /// Hosts of the prefill workers whose caches this server fetches.
    pub kv_peers: Vec<String>,
    /// Receives KV-block events, for routers. One model only: with several models no events are
    /// published.
    pub kv_events: Option<KvEventSink>,
    /// Certificate and key for TLS; plain HTTP when `None`.
    pub tls: Option<TlsFiles>,
    /// Accepted API keys; when empty, no key is required.
    pub api_keys: Vec<String>,
    /// Origins of web pages that may send requests (`https://chat.example`), `*` for all; when
    /// empty, only the server's own.
    pub origins: Vec<String>,
    /// Host names accepted beside `localhost` and IP addresses, by a server that listens on
    /// loopback only and requires no key.
    pub allowed_hosts: Vec<String>,
}

impl Options {
    /// Returns the options of a server of this one model on loopback, at any free port.
    pub fn new(name: impl Into<String>, kv: KvOptions) -> Self {
        Self {
            address: Address::loopback(0),
            #[cfg(feature = "grpc")]
            grpc: None,
            name: name.into(),
            others: Vec::new(),
            weight_budget: u64::MAX,
            n_ctx: None,
            kv,
            sampling: SamplerParams::default().into(),
            repeats_seed: false,
            enable_thinking: None,
            thinking_budget: None,
            draft_max: None,
            pooling: None,
            n_running: 64,
            n_waiting: 64,
            kv_budget: 256 << 20,
            kv_ram: 0,
            kv_disk: None,
            kv_transfer: 0,
            kv_peers: Vec::new(),
            kv_events: None,
            tls: None,
            api_keys: Vec::new(),
            origins: Vec::new(),
            allowed_hosts: Vec::new(),
        }
    }
}
