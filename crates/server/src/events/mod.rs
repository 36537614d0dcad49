//! What routers in front of several servers want to know: which beginnings of prompts are there, so that a request goes to where
//! most of it has been read.
//!
//! The tokens of a conversation are told in blocks of 128, each under a hash of all tokens up to its end. A block is *stored* when
//! the first conversation holds it that others can go on from, and *removed* when the last one is let go of: on the device those on
//! the shelf, whole, and those in work, up to the last place where blocks alone are enough; elsewhere those that are put away.

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

use crate::shelf::{Kind, Stored};
use ledger::{Ledger, Root};
#[cfg(feature = "kv-events")]
pub use publisher::{PublishError, Publisher};

/// Where a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Medium {
    /// The memory of the device that reads it.
    Device,
    /// The machine's memory, from where it is brought back.
    Ram,
    /// A file.
    Disk,
}

/// A change of what a server need not read again.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvEvent {
    /// Blocks that follow one another are there.
    Stored {
        /// Their hashes.
        blocks: Vec<u64>,
        /// That of the block before them; none where they begin a prompt.
        parent: Option<u64>,
        /// Their tokens [blocks x 128].
        tokens: Vec<u32>,
        /// Where they are.
        medium: Medium,
        /// What else a request must have in common with them: nothing, but for those of API keys and of other types than the
        /// server's.
        extra: Option<Arc<[String]>>,
    },
    /// Blocks are not there any more, those first that others stood on last.
    Removed {
        /// Their hashes.
        blocks: Vec<u64>,
        /// Where they were.
        medium: Medium,
    },
    /// Nothing is there.
    Cleared,
}

type Sink = dyn Fn(Vec<KvEvent>) + Send + Sync;

/// Is told of changes, on the thread that has the model: it must not take long.
#[derive(Clone)]
pub struct KvEventSink(Arc<Sink>);

impl KvEventSink {
    /// One that calls `hear` with changes that belong together.
    pub fn new(hear: impl Fn(Vec<KvEvent>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(hear))
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
    /// Kind of those that need nothing else in common than tokens.
    usual: Kind,
    /// Keeps hashes from telling API keys to those who try many.
    secret: RandomState,
}

/// Blocks of a model, told to whoever wants to know; nothing is done where nobody does.
#[derive(Clone, Default)]
pub(crate) struct Blocks(Option<Arc<Shared>>);

impl Blocks {
    /// None so far. `stored` is what caches store where a request does not say.
    pub fn new(sink: Option<KvEventSink>, stored: Arc<Stored>) -> Self {
        let told = sink.map(|sink| {
            // Whoever remembers an earlier process forgets it.
            (sink.0)(vec![KvEvent::Cleared]);
            let usual = Kind { stored, owner: None };
            Arc::new(Shared { ledger: Mutex::default(), sink, usual, secret: RandomState::new() })
        });
        Self(told)
    }

    /// The kind that is known without any request.
    pub fn usual(&self) -> Option<&Kind> {
        self.0.as_ref().map(|shared| &shared.usual)
    }

    /// A conversation that holds no blocks yet.
    pub fn hold(&self, medium: Medium, kind: &Kind) -> Held {
        let Some(shared) = &self.0 else { return Held::default() };
        let root = shared.root(kind);
        Held(Some(Holding { shared: Arc::clone(shared), medium, root, blocks: Vec::new() }))
    }

    /// Tells what has changed since the last time.
    pub fn tell(&self) {
        if let Some(shared) = &self.0 {
            let changes = shared.ledger().changes();
            if !changes.is_empty() {
                (shared.sink.0)(changes);
            }
        }
    }
}

impl Shared {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn root(&self, kind: &Kind) -> Root {
        let mut hash = Xxh3::new();
        hash.update(&kind.names().0.to_le_bytes());
        let owner = kind.owner.as_ref().map(|owner| self.secret.hash_one(owner));
        hash.update(&owner.unwrap_or_default().to_le_bytes());
        let options = &kind.stored.options;
        let types = (*options != self.usual.stored.options).then(|| format!("{}/{}", options.k, options.v));
        let strengths = kind.stored.strengths.as_ref().map(|strengths| format!("adapters {strengths:?}"));
        let owner = owner.map(|owner| format!("{owner:016x}"));
        let extra: Vec<String> = owner.into_iter().chain(types).chain(strengths).collect();
        Root { seed: hash.digest(), extra: (!extra.is_empty()).then(|| extra.into()) }
    }
}

struct Holding {
    shared: Arc<Shared>,
    medium: Medium,
    root: Root,
    blocks: Vec<u64>,
}

/// The blocks of a conversation, for as long as it is held.
#[derive(Default)]
pub(crate) struct Held(Option<Holding>);

impl Held {
    /// It has come to hold the complete blocks of these tokens, which go on from those that it held.
    pub fn grow(&mut self, tokens: &[u32]) {
        if let Some(Holding { shared, medium, root, blocks }) = &mut self.0 {
            shared.ledger().hold(*medium, root, blocks, tokens);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(Holding { shared, medium, blocks, .. }) = &self.0 {
            shared.ledger().release(*medium, blocks);
        }
    }
}
