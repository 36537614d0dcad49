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
mod guide;
mod http;
mod listen;
mod metrics;
mod scheduler;
mod shelf;
mod speech;
mod store;
mod worker;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, mpsc};

use kvant::gguf::printable_path;
use kvant::{Error, KvOptions, Model, SamplerParams, SessionOptions, TOKENS_PER_BLOCK};

use crate::http::{Hosted, Server};
use crate::metrics::Metrics;
use crate::scheduler::Limits;
use crate::shelf::Stored;
use crate::store::Store;
use crate::worker::Worker;

/// Rows of a step, at most.
const ROWS: usize = 512;

/// How to serve.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to listen: a host and a port, 0 for any that is free.
    pub address: (String, u16),
    /// The model's name.
    pub name: String,
    /// Tokens of a conversation; the model's training length when `None`.
    pub n_ctx: Option<usize>,
    /// What caches store where a request does not say.
    pub kv: KvOptions,
    /// How tokens are drawn where a request does not say.
    pub sampler: SamplerParams,
    /// Answers in work at once.
    pub n_running: usize,
    /// Answers that wait for their turn; those that come then are told to try later.
    pub n_waiting: usize,
    /// Bytes for all caches together.
    pub kv_budget: usize,
    /// A folder for conversations that there is no memory for, and the bytes that they may take there; they are found again
    /// after a restart.
    pub kv_disk: Option<(PathBuf, u64)>,
    /// Keys that callers must have, one of them; none are asked for when there are none.
    pub api_keys: Vec<String>,
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

/// Serves `model` until the process is told to end (SIGTERM or an interrupt): then what is in work is brought to its end, and
/// nothing new is taken on. `ready` is told where the server listens.
///
/// # Errors
/// [`ServeError`]; never because of a request.
pub fn serve(model: Model, options: Options, ready: impl FnOnce(SocketAddr)) -> Result<(), ServeError> {
    let session = SessionOptions { n_ctx: options.n_ctx, kv: options.kv.clone() };
    let n_ctx = model.session(session)?.n_ctx();
    model.tokenizer()?;
    let (jobs, received) = mpsc::channel();
    let (metrics, status) = (Arc::new(Metrics::new()), Arc::new(Mutex::default()));
    let limits = Limits {
        n_running: options.n_running,
        n_waiting: options.n_waiting,
        n_rows: ROWS,
        block: TOKENS_PER_BLOCK,
        budget: options.kv_budget,
    };
    let store =
        options.kv_disk.clone().map(|(folder, budget)| Store::open(folder, budget, &model)).transpose()?;
    let told = (Arc::clone(&metrics), Arc::clone(&status));
    let worker = Worker::new(model.clone(), options.n_ctx, limits, store, told);
    // Dropped when the thread ends, whatever ends it.
    let (works, has_ended) = tokio::sync::oneshot::channel::<()>();
    let work = move || {
        let _works = works;
        worker.run(&received);
    };
    let thread = std::thread::Builder::new().name("model".to_owned()).spawn(work)?;
    let (name, kv) = (options.name.clone(), Stored::new(options.kv.clone()));
    let grammars = Arc::default();
    let hosted = Arc::new(Hosted { name, model, n_ctx, kv, grammars, jobs, metrics, status });
    let server =
        Arc::new(Server { options, hosted, is_leaving: AtomicBool::new(false), work: Arc::default() });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(listen::listen(server, has_ended, ready));
    // Without anybody who could send jobs, the worker ends.
    drop(runtime);
    _ = thread.join();
    result
}
