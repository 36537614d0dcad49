//! OpenAI-compatible HTTP server on a compressed KV cache.
//!
//! A request becomes a job. One worker thread per model runs one batch at a time as the scheduler
//! plans it: every decoding sequence generates a token, and prefill chunks share the batch.
//! Prefixes are read once: conversations with a common prefix share its KV blocks, and an idle
//! conversation stays cached as long as memory allows. Each step emits events, from which the
//! response is assembled.
//!
//! ```text
//! http -> Job -> worker { scheduler, sessions, idle } -> Event -> reply
//! ```
#![forbid(unsafe_code)]

mod cache_key;
mod constraint_compiler;
mod events;
mod http;
mod idle_sessions;
mod listen;
mod metrics;
mod models;
mod owner_limits;
mod priority;
mod scheduler;
mod status;
mod store;
#[cfg(feature = "tls")]
mod tls;
mod trace;
mod worker;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use kvant::gguf::printable_path;
use kvant::{Error, KvOptions, Model, Pooling, SamplerParams};

pub use crate::events::{KvEvent, KvEventSink, Medium};
#[cfg(feature = "kv-events")]
pub use crate::events::{PublishError, Publisher};
use crate::http::{Bodies, Server};
use crate::models::ModelRegistry;
pub use crate::models::{ModelSpec, OpenedModel};
#[cfg(feature = "tls")]
pub use crate::tls::TlsFiles;

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

/// Server options.
#[derive(Debug, Clone)]
pub struct Options {
    /// Listening address: host and port, with 0 for any free port.
    pub address: (String, u16),
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
            address: ("127.0.0.1".to_owned(), 0),
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
            kv_events: None,
            tls: None,
            api_keys: Vec::new(),
            origins: Vec::new(),
            allowed_hosts: Vec::new(),
        }
    }
}

/// Reason why a server cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be bound.
    #[error("{host}:{port}: {source}")]
    Listen {
        /// Host.
        host: String,
        /// Port.
        port: u16,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The folder for conversations cannot be used.
    #[error("{}: {source}", printable_path(folder))]
    Folder {
        /// Folder.
        folder: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The certificate or its key cannot be used.
    #[error("{}: {why}", printable_path(file))]
    Tls {
        /// File.
        file: PathBuf,
        /// Reason.
        why: String,
    },
    /// Invalid origin of a web page.
    #[error("expected an origin such as https://chat.example, or *, got {0}")]
    Origin(String),
    /// Invalid host name.
    #[error("expected the name of a host such as box.example, got {0}")]
    Host(String),
    /// Invalid API key.
    #[error("expected an API key in one line that is not blank, got {0:?}")]
    Key(String),
    /// The system provides no threads or sockets.
    #[error("the server cannot go on: {0}")]
    Io(#[from] std::io::Error),
    /// The worker thread panicked: an internal error.
    #[error("the model's thread has ended: no more answers can be given")]
    Broken,
    /// The model cannot be served.
    #[error(transparent)]
    Model(#[from] Error),
}

/// Serves `model` until SIGTERM or an interrupt. Then it refuses new work and completes the running
/// requests within two minutes or until a second signal; conversations are saved within another
/// minute. `ready` receives the bound address.
///
/// # Errors
/// [`ServeError`]; never because of a request.
pub fn serve(model: Model, options: Options, ready: impl FnOnce(SocketAddr)) -> Result<(), ServeError> {
    let cors = http::cors(&options.origins)?;
    let is_name = |host: &&String| !host.is_empty() && !host.contains(['/', ':', '*', ' ', ',']);
    if let Some(host) = options.allowed_hosts.iter().find(|host| !is_name(host)) {
        return Err(ServeError::Host(host.clone()));
    }
    let is_key =
        |key: &&String| !key.trim_ascii().is_empty() && !key.trim_ascii().contains(|c: char| c.is_control());
    if let Some(key) = options.api_keys.iter().find(|key| !is_key(key)) {
        return Err(ServeError::Key(key.clone()));
    }
    #[cfg(feature = "tls")]
    let tls = options.tls.as_ref().map(tls::acceptor).transpose()?;
    #[cfg(not(feature = "tls"))]
    let tls = None;
    let (broken, has_broken) = tokio::sync::mpsc::channel(1);
    let pool = Arc::new(ModelRegistry::new(model, options.clone(), broken)?);
    let is_leaving = AtomicBool::new(false);
    let (n_requests, bodies, work) = (AtomicU64::new(0), Bodies::default(), Arc::default());
    let server = Arc::new(Server {
        options,
        pool: Arc::clone(&pool),
        n_requests,
        bodies,
        is_shutting_down: is_leaving,
        work,
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(listen::listen(server, (cors, tls), has_broken, ready));
    // Without senders of jobs the workers end. Blocked threads of the runtime are not joined.
    runtime.shutdown_background();
    pool.end();
    result
}
