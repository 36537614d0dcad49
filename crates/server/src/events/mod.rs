//! KV-block events for cache-aware routers: which prompt prefixes a server has cached, so that a
//! request can be routed to the longest one.
//!
//! Tokens of a conversation are published in blocks of 128, each with a hash of all tokens up to
//! its end. A block is *stored* when the first conversation that others can reuse holds it, and
//! *removed* when the last one is released. On the device these are idle sessions, whole, and
//! running sequences, up to the last position where blocks alone suffice to continue; in the other
//! media they are the offloaded sessions.

mod ledger;
#[cfg(feature = "kv-events")]
mod publisher;
#[cfg(feature = "kv-events")]
mod wire;

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::Xxh3;

use crate::cache_key::{CacheKey, CacheSpec};
use ledger::{KeySeed, Ledger};
#[cfg(feature = "kv-events")]
pub use publisher::{PublishError, Publisher};

/// Medium of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Medium {
    /// Memory of the device that computes.
    Device,
    /// Host memory, from which it can be restored.
    Ram,
    /// File.
    Disk,
}

/// Change of the cached prefixes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvEvent {
    /// Consecutive blocks were stored.
    Stored {
        /// Hashes of the blocks.
        blocks: Vec<u64>,
        /// Hash of the preceding block; `None` at the beginning of a prompt.
        parent: Option<u64>,
        /// Their tokens [blocks x 128].
        tokens: Vec<u32>,
        /// Medium of the blocks.
        medium: Medium,
        /// Further keys that a request must match: `None` except for blocks of API keys, of other
        /// KV types than the server's, or of other LoRA scales.
        extra: Option<Arc<[String]>>,
    },
    /// Blocks were removed, children before their parents.
    Removed {
        /// Hashes of the blocks.
        blocks: Vec<u64>,
        /// Medium of the blocks.
        medium: Medium,
    },
    /// All blocks were removed.
    Cleared,
}

type Sink = dyn Fn(Vec<KvEvent>) + Send + Sync;

/// Where subscribers receive events over ZeroMQ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventAddress {
    /// Address of the events; `*` is any address of the machine.
    pub endpoint: String,
    /// Address where missed events are replayed.
    pub replay: Option<String>,
    /// Topic.
    pub topic: String,
    /// Maximum batches that are replayed.
    pub n_replayed: usize,
}

/// Receiver of events; called on the worker thread, so it must return quickly.
#[derive(Clone)]
pub struct KvEventSink {
    send: Arc<Sink>,
    address: Option<EventAddress>,
}

impl KvEventSink {
    /// Creates a sink that calls `send` with each batch of events.
    pub fn new(send: impl Fn(Vec<KvEvent>) + Send + Sync + 'static) -> Self {
        Self { send: Arc::new(send), address: None }
    }

    /// Sets the address that routers are told.
    pub fn with_address(self, address: EventAddress) -> Self {
        Self { address: Some(address), ..self }
    }

    /// Returns the address that routers are told.
    pub fn address(&self) -> Option<&EventAddress> {
        self.address.as_ref()
    }
}

impl fmt::Debug for KvEventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KvEventSink")
    }
}

struct Shared {
    ledger: Mutex<Ledger>,
    sink: KvEventSink,
    /// Cache key of requests that set no options.
    usual: CacheKey,
    /// Key of the hash of API keys, so that they cannot be found by trial.
    secret: RandomState,
}

/// Publishes the blocks of a model; does nothing without a sink.
#[derive(Clone, Default)]
pub(crate) struct Blocks(Option<Arc<Shared>>);

impl Blocks {
    /// Starts without blocks. `stored` holds the cache options of requests that set none.
    pub fn new(sink: Option<KvEventSink>, stored: Arc<CacheSpec>) -> Self {
        let shared = sink.map(|sink| {
            // A subscriber that remembers an earlier process discards its blocks.
            (sink.send)(vec![KvEvent::Cleared]);
            let usual = CacheKey { spec: stored, owner: None };
            Arc::new(Shared { ledger: Mutex::default(), sink, usual, secret: RandomState::new() })
        });
        Self(shared)
    }

    /// Returns the cache key of requests that set no options.
    pub fn usual(&self) -> Option<&CacheKey> {
        self.0.as_ref().map(|shared| &shared.usual)
    }

    /// Registers a conversation that holds no blocks yet.
    pub fn register(&self, medium: Medium, kind: &CacheKey) -> BlockHolder {
        let Some(shared) = &self.0 else { return BlockHolder::default() };
        let root = shared.root(kind);
        BlockHolder(Some(Holding { shared: Arc::clone(shared), medium, root, blocks: Vec::new() }))
    }

    /// Publishes the changes since the last call.
    pub fn publish(&self) {
        if let Some(shared) = &self.0 {
            let changes = shared.ledger().changes();
            if !changes.is_empty() {
                (shared.sink.send)(changes);
            }
        }
    }
}

impl Shared {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn root(&self, kind: &CacheKey) -> KeySeed {
        let mut hash = Xxh3::new();
        hash.update(&kind.spec.hash().to_le_bytes());
        let owner = kind.owner.as_ref().map(|owner| self.secret.hash_one(owner));
        hash.update(&owner.unwrap_or_default().to_le_bytes());
        let options = &kind.spec.options;
        let types = (*options != self.usual.spec.options).then(|| format!("{}/{}", options.k, options.v));
        let lora_scales =
            kind.spec.lora_scales.as_ref().map(|lora_scales| format!("adapters {lora_scales:?}"));
        let owner = owner.map(|owner| format!("{owner:016x}"));
        let extra: Vec<String> = owner.into_iter().chain(types).chain(lora_scales).collect();
        KeySeed { seed: hash.digest(), extra: (!extra.is_empty()).then(|| extra.into()) }
    }
}

struct Holding {
    shared: Arc<Shared>,
    medium: Medium,
    root: KeySeed,
    blocks: Vec<u64>,
}

/// Blocks of a conversation, released on drop.
#[derive(Default)]
pub(crate) struct BlockHolder(Option<Holding>);

impl BlockHolder {
    /// Adds the complete blocks of these tokens, which extend those held so far.
    pub fn grow(&mut self, tokens: &[u32]) {
        if let Some(Holding { shared, medium, root, blocks }) = &mut self.0 {
            shared.ledger().hold(*medium, root, blocks, tokens);
        }
    }
}

impl Drop for BlockHolder {
    fn drop(&mut self) {
        if let Some(Holding { shared, medium, blocks, .. }) = &self.0 {
            shared.ledger().release(*medium, blocks);
        }
    }
}
