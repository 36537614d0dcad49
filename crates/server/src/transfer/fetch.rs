//! Fetches caches from the prefill workers that a server trusts.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{AUTHORIZATION, CONTENT_LENGTH, HOST};
use axum::http::{HeaderMap, Method, Request, Response, StatusCode};
use futures_util::stream::{Stream, StreamExt as _};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use kvant::SavedSession;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::{CACHE_KEY, RemoteCache, path};
use crate::address::Address;
use crate::owner_limits::Owner;

/// Timeout of a connection to a peer.
const CONNECT: Duration = Duration::from_secs(2);
/// Timeout of the next bytes from a peer.
const STALL: Duration = Duration::from_secs(5);
/// Bytes of a permit of the semaphore.
const UNIT: u64 = 1 << 10;

/// Reason why a cache was not fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("{0}")]
    Body(#[from] axum::Error),
    #[error("no bytes for {} s", STALL.as_secs())]
    Stalled,
    #[error("it answers {0}")]
    Status(StatusCode),
    #[error("it does not announce {0}")]
    Missing(&'static str),
    #[error("cache of another model, plan or API key: expected {expected:016x}, got {got:016x}")]
    Key { expected: u64, got: u64 },
    #[error("it announces {got} bytes, at most {max} are taken")]
    TooLarge { max: u64, got: u64 },
    #[error("expected {expected} bytes, got {got}")]
    Length { expected: u64, got: u64 },
}

/// Cache that was fetched, and its share of the memory for such.
#[derive(Debug)]
pub(crate) struct FetchedCache {
    pub saved: SavedSession,
    _permit: OwnedSemaphorePermit,
}

/// Cache to fetch, and what it must be.
pub(crate) struct ExpectedCache<'a> {
    pub remote: &'a RemoteCache,
    /// [Hash](crate::cache_key::CacheKey::hash_with_model) of its key and model.
    pub key: u64,
    /// API key of the request.
    pub owner: &'a Owner,
}

/// Prefill workers that a server trusts, and the memory for their caches.
pub(crate) struct Peers {
    hosts: Vec<String>,
    budget: u64,
    room: Arc<Semaphore>,
}

impl Peers {
    /// Trusts the workers on `hosts`, whose caches take at most `budget` bytes at a time.
    pub fn new(hosts: Vec<String>, budget: u64) -> Self {
        let units = usize::try_from(budget / UNIT).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self { hosts, budget, room: Arc::new(Semaphore::new(units)) }
    }

    /// Reports whether caches of this peer may be fetched.
    pub fn trusts(&self, peer: &Address) -> bool {
        self.hosts.iter().any(|host| host.eq_ignore_ascii_case(&peer.host))
    }

    /// Fetches a cache, and has the peer release it.
    ///
    /// # Errors
    /// [`FetchError`]: the prompt has to be read here.
    pub async fn fetch(&self, expected: ExpectedCache<'_>) -> Result<FetchedCache, FetchError> {
        let ExpectedCache { remote, key, owner } = expected;
        let mut peer = Connection::open(remote, owner).await?;
        let response = peer.send(Method::GET).await?;
        let headers = response.headers();
        let got = number(headers, CACHE_KEY, 16)?;
        if got != key {
            return Err(FetchError::Key { expected: key, got });
        }
        let n_bytes = number(headers, CONTENT_LENGTH.as_str(), 10)?;
        let body = Body::new(response.into_body()).into_data_stream();
        let fetched = self.receive(n_bytes, body).await?;
        // A peer that misses this releases it when the lease expires.
        _ = peer.send(Method::DELETE).await;
        Ok(fetched)
    }

    /// Receives a cache of `n_bytes`.
    async fn receive(
        &self,
        n_bytes: u64,
        mut chunks: impl Stream<Item = Result<Bytes, axum::Error>> + Unpin,
    ) -> Result<FetchedCache, FetchError> {
        let units = n_bytes.div_ceil(UNIT);
        let room = || FetchError::TooLarge { max: self.budget, got: n_bytes };
        if n_bytes > self.budget / UNIT * UNIT {
            return Err(room());
        }
        let units = u32::try_from(units).map_err(|_| room())?;
        // The semaphore is never closed.
        let permit = Arc::clone(&self.room).acquire_many_owned(units).await.map_err(|_| room())?;
        let mut bytes = Vec::new();
        let length = |got: usize| FetchError::Length { expected: n_bytes, got: got as u64 };
        let capacity = usize::try_from(n_bytes).map_err(|_| room())?;
        bytes.try_reserve_exact(capacity).map_err(|_| room())?;
        while let Some(chunk) = timeout(STALL, chunks.next()).await.map_err(|_| FetchError::Stalled)? {
            let chunk = chunk?;
            if bytes.len() + chunk.len() > capacity {
                return Err(length(bytes.len() + chunk.len()));
            }
            bytes.extend_from_slice(&chunk);
        }
        if bytes.len() != capacity {
            return Err(length(bytes.len()));
        }
        Ok(FetchedCache { saved: SavedSession::from(bytes), _permit: permit })
    }
}

/// Returns a header that is a number of this radix.
fn number(headers: &HeaderMap, name: &'static str, radix: u32) -> Result<u64, FetchError> {
    let text = headers.get(name).and_then(|value| value.to_str().ok());
    text.and_then(|text| u64::from_str_radix(text, radix).ok()).ok_or(FetchError::Missing(name))
}

/// Connection to the peer of a cache.
struct Connection<'a> {
    remote: &'a RemoteCache,
    owner: &'a Owner,
    sender: http1::SendRequest<Body>,
}

impl<'a> Connection<'a> {
    async fn open(remote: &'a RemoteCache, owner: &'a Owner) -> Result<Self, FetchError> {
        let address = (remote.peer.host.as_str(), remote.peer.port);
        let stream = timeout(CONNECT, TcpStream::connect(address)).await;
        let stream = stream.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // Ends with the sender, or with an error that the sender receives too.
        tokio::spawn(async { _ = connection.await });
        Ok(Self { remote, owner, sender })
    }

    /// Sends a request for the cache. Returns the response if it is a success.
    async fn send(&mut self, method: Method) -> Result<Response<hyper::body::Incoming>, FetchError> {
        let Self { remote, owner, sender } = self;
        let mut request = Request::new(Body::empty());
        *request.method_mut() = method;
        // Digits and slashes are a path, and an address is a header.
        *request.uri_mut() = path(remote.id).parse().map_err(|_| FetchError::Missing("a path"))?;
        let mut header = |name, text: String| {
            text.parse()
                .map(|value| _ = request.headers_mut().insert(name, value))
                .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "an address or a key is no header"))
        };
        header(HOST, remote.peer.to_string())?;
        if let Some(key) = owner {
            header(AUTHORIZATION, format!("Bearer {key}"))?;
        }
        let response =
            timeout(STALL, sender.send_request(request)).await.map_err(|_| FetchError::Stalled)??;
        match response.status() {
            status if status.is_success() => Ok(response),
            status => Err(FetchError::Status(status)),
        }
    }
}

/// Cache of a job until its sequence takes it.
#[derive(Debug, Default)]
pub(crate) struct FetchedSlot(Mutex<Option<FetchedCache>>);

impl FetchedSlot {
    /// Takes the cache.
    pub fn take(&self) -> Option<FetchedCache> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl From<Option<FetchedCache>> for FetchedSlot {
    fn from(cache: Option<FetchedCache>) -> Self {
        Self(Mutex::new(cache))
    }
}
