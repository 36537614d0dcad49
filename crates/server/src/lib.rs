//! OpenAI-compatible HTTP server on a compressed KV cache.
//!
//! A request becomes a job. One worker thread per model runs one batch at a time as the scheduler
//! plans it: every decoding sequence generates a token, and prefill chunks share the batch.
//! Prefixes are read once: conversations with a common prefix share its KV blocks, and an idle
//! conversation stays cached as long as memory allows. Each step emits events, from which the
//! response is assembled.
//!
//! ```text
//! http, grpc -> Job -> worker { scheduler, sessions, idle } -> Event -> reply
//! ```
#![forbid(unsafe_code)]

mod address;
mod cache_key;
mod constraint_compiler;
mod error;
mod events;
#[cfg(feature = "grpc")]
mod grpc;
mod http;
mod idle_sessions;
mod listen;
mod metrics;
mod models;
mod options;
mod owner_limits;
mod priority;
mod scheduler;
mod status;
mod store;
#[cfg(feature = "tls")]
mod tls;
mod trace;
mod transfer;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64};

use kvant::Model;

pub use crate::address::{Address, AddressError};
pub use crate::error::ServeError;
pub use crate::events::{EventAddress, KvEvent, KvEventSink, Medium};
#[cfg(feature = "kv-events")]
pub use crate::events::{PublishError, Publisher};
use crate::http::{Bodies, Server};
use crate::listen::Acceptors;
pub use crate::listen::Listening;
use crate::models::ModelRegistry;
#[cfg(not(feature = "tls"))]
pub use crate::options::TlsFiles;
pub use crate::options::{ModelSpec, OpenedModel, Options, ServerSampling};
#[cfg(feature = "tls")]
pub use crate::tls::TlsFiles;

/// Serves `model` until SIGTERM or an interrupt. Then it refuses new work and completes the running
/// requests within two minutes or until a second signal; conversations are saved within another
/// minute. `ready` receives the bound addresses.
///
/// # Errors
/// [`ServeError`]; never because of a request.
pub fn serve(model: Model, options: Options, ready: impl FnOnce(Listening)) -> Result<(), ServeError> {
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
    if options.kv_transfer > 0 && options.tls.is_some() {
        return Err(ServeError::TransferWithTls);
    }
    let acceptors = Acceptors::new(&options)?;
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
        http_port: AtomicU16::new(0),
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(listen::listen(server, cors, acceptors, has_broken, ready));
    // Without senders of jobs the workers end. Blocked threads of the runtime are not joined.
    runtime.shutdown_background();
    pool.end();
    result
}
