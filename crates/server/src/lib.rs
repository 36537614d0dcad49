//! An OpenAI-compatible server on a compressed KV cache.
//!
//! A request becomes a job; one thread has the model and does, a step at a time, what the scheduler says: everybody who speaks
//! says a token, and prompts are read beside that. What was read once is not read again while it is remembered: every
//! conversation that shares its beginning with another shares the memory of it, and one that has been answered stays for as
//! long as there is room. What comes of a step goes back as events, and an answer is made of those.
//!
//! ```text
//! http -> Job -> worker { scheduler, sessions, shelf } -> Event -> reply
//! ```
#![forbid(unsafe_code)]

mod answer;
mod events;
mod gbnf;
mod guide;
mod http;
mod lanes;
mod listen;
mod metrics;
mod pool;
mod priority;
mod scheduler;
mod shelf;
mod speech;
mod store;
mod thinking;
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
use crate::pool::Pool;
pub use crate::pool::{Offer, Opened};
#[cfg(feature = "tls")]
pub use crate::tls::TlsFiles;

/// Files of a certificate and its key: there are none without the feature `tls`.
#[cfg(not(feature = "tls"))]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TlsFiles {}

/// How tokens are drawn where a request does not say.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawing {
    /// Where it asks for no temperature, or for one above 0.
    pub usual: SamplerParams,
    /// Where it asks for temperature 0, the likeliest token: what a model recommends for its usual draws has no place there.
    pub likeliest: SamplerParams,
}

impl From<SamplerParams> for Drawing {
    /// The same for all requests.
    fn from(params: SamplerParams) -> Self {
        Self { usual: params, likeliest: params }
    }
}

/// How to serve.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to listen: a host and a port, 0 for any that is free.
    pub address: (String, u16),
    /// The model's name.
    pub name: String,
    /// Models beside it that are loaded when somebody asks for them. Then a request is for the model that it names.
    pub others: Vec<Offer>,
    /// Bytes for the weights of all models together; those that nobody uses make room for others.
    pub weight_budget: u64,
    /// Tokens of a conversation; the model's training length when `None`.
    pub n_ctx: Option<usize>,
    /// What caches store where a request does not say.
    pub kv: KvOptions,
    /// How tokens are drawn where a request does not say.
    pub drawing: Drawing,
    /// Whether each request that names no seed has the one above; else each has another one, made of it.
    pub has_one_seed: bool,
    /// Whether chat templates are told that the model is to think, or is not, where a request does not say; told nothing when `None`.
    pub thinks: Option<bool>,
    /// The most tokens that a model may think before it answers, where a request does not say; then its thought is ended.
    pub thinking_budget: Option<usize>,
    /// The most tokens that are guessed ahead for an answer; as many as pay when `None`.
    pub draft_max: Option<usize>,
    /// How the states of a text become its vector; as its file says for each model when `None`.
    pub pooling: Option<Pooling>,
    /// Answers in work at once.
    pub n_running: usize,
    /// Answers that wait for their turn; those that come then are told to try later.
    pub n_waiting: usize,
    /// Bytes for all caches together; each model has an equal share.
    pub kv_budget: usize,
    /// Bytes of the machine's memory for conversations that there is no room for in the budget above: for devices with a memory of
    /// their own. Each model has an equal share.
    pub kv_ram: u64,
    /// A folder for conversations that there is no memory for, and the bytes that they may take there; they are found again
    /// after a restart.
    pub kv_disk: Option<(PathBuf, u64)>,
    /// Is told which blocks of conversations are there, for routers. Of one model only: nothing is told where there are others.
    pub kv_events: Option<KvEventSink>,
    /// The certificate and the key to speak TLS with; plain HTTP without.
    pub tls: Option<TlsFiles>,
    /// Keys that callers must have, one of them; none are asked for when there are none.
    pub api_keys: Vec<String>,
    /// Origins of web pages that may send requests (`https://chat.example`), `*` for all; none but the server's own when there are none.
    pub origins: Vec<String>,
    /// Names by which a server that listens for its own machine alone, and asks for no key, may be called, beside `localhost` and addresses.
    pub allowed_hosts: Vec<String>,
}

impl Options {
    /// A server of this one model for programs of the same machine, at any free port, with nothing besides.
    pub fn new(name: impl Into<String>, kv: KvOptions) -> Self {
        Self {
            address: ("127.0.0.1".to_owned(), 0),
            name: name.into(),
            others: Vec::new(),
            weight_budget: u64::MAX,
            n_ctx: None,
            kv,
            drawing: SamplerParams::default().into(),
            has_one_seed: false,
            thinks: None,
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

/// Why a server cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be listened at.
    #[error("{host}:{port}: {source}")]
    Listen {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// What the system says.
        source: std::io::Error,
    },
    /// The folder for conversations cannot be used.
    #[error("{}: {source}", printable_path(folder))]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The certificate or its key cannot be used.
    #[error("{}: {why}", printable_path(file))]
    Tls {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// No page has such an origin.
    #[error("expected an origin such as https://chat.example, or *, got {0}")]
    Origin(String),
    /// No host has such a name.
    #[error("expected the name of a host such as box.example, got {0}")]
    Host(String),
    /// No request can have such a key.
    #[error("expected an API key in one line that is not blank, got {0:?}")]
    Key(String),
    /// The system gives no threads or sockets.
    #[error("the server cannot go on: {0}")]
    Io(#[from] std::io::Error),
    /// The thread that has the model broke: a fault of ours.
    #[error("the model's thread has ended: no more answers can be given")]
    Broken,
    /// The model cannot be served.
    #[error(transparent)]
    Model(#[from] Error),
}

/// Serves `model` until the process is told to end (SIGTERM or an interrupt): then what is in work is brought to its end, within two
/// minutes or until the process is told again, and nothing new is taken on. Conversations are put away within another minute. `ready` is told where the server listens.
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
    let pool = Arc::new(Pool::new(model, options.clone(), broken)?);
    let is_leaving = AtomicBool::new(false);
    let (n_asked, bodies, work) = (AtomicU64::new(0), Bodies::default(), Arc::default());
    let server = Arc::new(Server { options, pool: Arc::clone(&pool), n_asked, bodies, is_leaving, work });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(listen::listen(server, (cors, tls), has_broken, ready));
    // Without anybody who could send jobs, the workers end. What blocks a thread of the runtime is not waited for.
    runtime.shutdown_background();
    pool.end();
    result
}
