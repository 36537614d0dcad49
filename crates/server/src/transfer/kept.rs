//! Caches that a prefill worker keeps in host memory until a decode worker has fetched them.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use kvant::Session;
use serde_json::Value;

use super::{TransferId, params};
use crate::cache_key::CacheKey;
use crate::owner_limits::Owner;

/// Time that a cache is kept for its decode worker.
const LEASE: Duration = Duration::from_secs(120);

/// Cache to keep once its prompt has been read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeptCache {
    pub id: TransferId,
    /// API key of the request, and of the one that may fetch it.
    pub owner: Owner,
}

impl KeptCache {
    /// Returns the parameters of a response of the server at this address.
    pub fn params(&self, server: SocketAddr) -> Value {
        params::to_fetch(self.id, server)
    }
}

/// Cache that is kept, as the bytes of a context file.
struct Entry {
    cache: KeptCache,
    /// [Hash](CacheKey::hash_with_model) of its key and model.
    key: u64,
    bytes: Bytes,
    until: Instant,
}

/// Caches that are kept, oldest first, within a budget.
pub(crate) struct KeptCaches {
    budget: u64,
    kept: Mutex<VecDeque<Entry>>,
}

impl KeptCaches {
    /// Returns an empty store of `budget` bytes.
    pub fn new(budget: u64) -> Self {
        Self { budget, kept: Mutex::default() }
    }

    /// Reports whether any cache can be kept.
    pub fn is_enabled(&self) -> bool {
        self.budget > 0
    }

    /// Keeps the cache of a session. Where it does not fit, its decode worker reads the prompt.
    pub fn keep(&self, cache: KeptCache, key: &CacheKey, session: &Session) {
        let needed = session.saved_bytes();
        if needed > self.budget {
            tracing::warn!(bytes = needed, budget = self.budget, "a cache exceeds the budget of transfers");
            return;
        }
        match session.to_saved() {
            Ok(saved) => {
                let key = key.hash_with_model(&session.model().compute_fingerprint());
                let (bytes, until) = (Bytes::from_owner(saved), Instant::now() + LEASE);
                let mut kept = self.kept();
                while total(&kept) + needed > self.budget {
                    kept.pop_front();
                }
                kept.push_back(Entry { cache, key, bytes, until });
            }
            Err(error) => tracing::warn!(%error, "a cache cannot be kept for its decode worker"),
        }
    }

    /// Returns a cache and the hash of its key.
    pub fn get(&self, cache: &KeptCache) -> Option<(u64, Bytes)> {
        let kept = self.kept();
        kept.iter().find(|entry| entry.cache == *cache).map(|entry| (entry.key, entry.bytes.clone()))
    }

    /// Releases a cache. Reports whether it was kept.
    pub fn release(&self, cache: &KeptCache) -> bool {
        let mut kept = self.kept();
        let n = kept.len();
        kept.retain(|entry| entry.cache != *cache);
        kept.len() < n
    }

    /// Returns the bytes of all caches.
    pub fn bytes(&self) -> u64 {
        total(&self.kept())
    }

    /// Returns the caches whose lease has not expired.
    fn kept(&self) -> MutexGuard<'_, VecDeque<Entry>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        kept.retain(|entry| entry.until > now);
        kept
    }
}

fn total(kept: &VecDeque<Entry>) -> u64 {
    kept.iter().map(|entry| entry.bytes.len() as u64).sum()
}
