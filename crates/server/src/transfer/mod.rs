//! KV caches on their way from the worker that prefills a prompt to the one that decodes.
//!
//! ```text
//! router  -> prefill worker   do_remote_decode: the prompt, one token
//!         <- its response     kv_transfer_params: host, port and id of the kept cache
//! router  -> decode worker    the same prompt with these parameters
//!            decode worker -> prefill worker   GET /kv/transfers/ID, then DELETE
//! ```
//!
//! A cache travels as the bytes of a context file: compressed pages with checksums, which are all
//! verified before the first token is decoded. Where it cannot be fetched, the decode worker reads
//! the prompt itself, so a router need not know why.

mod fetch;
mod kept;
mod params;

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::str::FromStr;
use std::sync::Arc;

use crate::metrics::Metrics;
use crate::options::Options;
pub(crate) use fetch::{ExpectedCache, FetchedCache, FetchedSlot};
use fetch::{FetchError, Peers};
pub(crate) use kept::KeptCache;
use kept::KeptCaches;
pub(crate) use params::KvTransfer;
use params::RemoteCache;

/// Transfers of a server.
pub(crate) struct Transfers {
    /// As a prefill worker.
    pub kept: KeptCaches,
    /// As a decode worker.
    pub peers: Peers,
    metrics: Arc<Metrics>,
}

impl Transfers {
    /// Returns the transfers of a server with these options.
    pub fn new(options: &Options, metrics: Arc<Metrics>) -> Self {
        let peers = Peers::new(options.kv_peers.clone(), options.kv_budget as u64);
        Self { kept: KeptCaches::new(options.kv_transfer), peers, metrics }
    }

    /// Fetches a cache for a request; `None` if its prompt has to be read here.
    pub async fn fetch(&self, expected: ExpectedCache<'_>, request_id: &str) -> Option<FetchedCache> {
        let peer = expected.remote.peer.clone();
        let fetched = self.peers.fetch(expected).await;
        let failed = |error: &FetchError| {
            self.metrics.kv_fetch_failures.inc();
            tracing::warn!(%peer, %error, id = request_id, "a cache cannot be fetched: the prompt is read here");
        };
        fetched.inspect_err(failed).ok()
    }
}

/// Header of a kept cache: the [hash](crate::cache_key::CacheKey::hash_with_model) of its key and
/// model.
pub(crate) const CACHE_KEY: &str = "x-kvant-cache-key";

/// Returns the path of a kept cache.
pub(crate) fn path(id: TransferId) -> String {
    format!("/kv/transfers/{id}")
}

/// Random name of a kept cache, a secret of those who may fetch it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TransferId(u128);

impl TransferId {
    /// Returns a new id.
    pub fn random() -> Self {
        // Keyed with the system's random numbers.
        let half = |n: u64| u128::from(RandomState::new().hash_one(n));
        Self(half(0) << 64 | half(1))
    }
}

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for TransferId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let id = is_hex.then(|| u128::from_str_radix(text, 16).ok()).flatten();
        id.map(Self).ok_or(())
    }
}
