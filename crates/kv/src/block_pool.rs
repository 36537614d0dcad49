//! Cache memory of one device: counted, limited by a budget, and indexed by prefix.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kvant_backend::{Backend, BackendError, CountedPage, Page, PageAllocator, Result};
use xxhash_rust::xxh3::Xxh3;

use crate::recurrent_states::KeptBlocks;

/// Identifies a block by everything its bytes depend on: model, plan, salt and all tokens up to its
/// end. Each key is a hash of the previous block's key and the block's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockKey(u128);

impl BlockKey {
    /// Returns the parent key of the first block, from the parts that distinguish models, plans and
    /// owners.
    pub fn root(parts: &[&[u8]]) -> Self {
        let mut hash = Xxh3::new();
        for part in parts {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.digest128())
    }

    /// Returns the key of the block of `tokens` after this one.
    pub fn child(self, tokens: &[u32]) -> Self {
        let mut hash = Xxh3::new();
        hash.update(&self.0.to_le_bytes());
        tokens.iter().for_each(|token| hash.update(&token.to_le_bytes()));
        Self(hash.digest128())
    }
}

/// Weak references to a registered block, valid as long as some sequence holds it.
pub(crate) struct Entry<P: Page> {
    /// The block of each group, `None` if it was released before.
    pub(crate) blocks: Vec<Option<Weak<CountedPage<P>>>>,
    /// The sink of each group that has one.
    pub(crate) sinks: Vec<Option<Weak<CountedPage<P>>>>,
    /// The states of recurrent layers at the end of the block, if there is a snapshot.
    pub(crate) states: Option<Weak<CountedPage<P>>>,
    /// With them, for each group the blocks that the snapshot holds.
    pub(crate) kept: Vec<Vec<Weak<CountedPage<P>>>>,
    /// Whether a sequence with these tokens lives, which may hold no block of them: those of a
    /// window are released, and a block of pooled keys is of more tokens.
    pub(crate) life: Weak<Life>,
}

/// What sequences with common tokens hold together.
#[derive(Debug)]
pub(crate) struct Life;

impl<P: Page> Entry<P> {
    /// Returns whether any sequence still has its tokens, or holds one of its blocks or the states.
    fn is_held(&self) -> bool {
        self.life.strong_count() > 0
            || self.blocks.iter().chain([&self.states]).flatten().any(|page| page.strong_count() > 0)
    }

    /// Returns whether both refer to the same memory.
    fn is_same(&self, other: &Self) -> bool {
        let same = |pages: (&Option<Weak<_>>, &Option<Weak<_>>)| match pages {
            (Some(a), Some(b)) => a.ptr_eq(b),
            (a, b) => a.is_none() && b.is_none(),
        };
        self.blocks.iter().zip(&other.blocks).chain([(&self.states, &other.states)]).all(same)
    }
}

/// Maximum number of registered holders of equal tokens: when one is dropped, others still have the
/// block.
const MAX_HOLDERS: usize = 8;

/// A registered block.
struct PrefixEntry<P: Page> {
    parent: BlockKey,
    /// [`Pool::check`] of the tokens, since equal keys do not prove equal tokens.
    check: u64,
    /// Sequences that computed the tokens, oldest first. All have the same bytes.
    holders: Vec<Entry<P>>,
}

impl<P: Page> PrefixEntry<P> {
    fn is_held(&self) -> bool {
        self.holders.iter().any(Entry::is_held)
    }

    /// Returns the pages still held, by any holder; `None` where a required sink is gone.
    fn found(&self) -> Option<PrefixHit<P>> {
        let n_groups = self.holders.first()?.blocks.len();
        let block = |g: usize| self.holders.iter().find_map(|holder| holder.blocks[g].as_ref()?.upgrade());
        let sink = |g: usize| {
            let mut sinks = self.holders.iter().filter_map(|holder| holder.sinks[g].as_ref()).peekable();
            if sinks.peek().is_none() { Some(None) } else { sinks.find_map(Weak::upgrade).map(Some) }
        };
        let states = self.holders.iter().find_map(|holder| {
            let kept = holder.kept.iter().map(|of| of.iter().map(Weak::upgrade).collect());
            Some((holder.states.as_ref()?.upgrade()?, kept.collect::<Option<_>>()?))
        });
        let sinks = (0..n_groups).map(sink).collect::<Option<_>>()?;
        let life = self.holders.iter().find_map(|holder| holder.life.upgrade());
        Some(PrefixHit { blocks: (0..n_groups).map(block).collect(), sinks, states, life })
    }
}

/// A prefix hit: the block's page in each group, if still held, the groups' sinks, the states at
/// its end with the blocks that their snapshot holds, and a sequence with the tokens.
pub(crate) struct PrefixHit<P: Page> {
    pub(crate) blocks: Vec<Option<Arc<CountedPage<P>>>>,
    pub(crate) sinks: Vec<Option<Arc<CountedPage<P>>>>,
    pub(crate) states: Option<(Arc<CountedPage<P>>, KeptBlocks<P>)>,
    pub(crate) life: Option<Arc<Life>>,
}

/// The memory of all caches on a device.
pub struct BlockPool<P: Page> {
    live: Arc<AtomicUsize>,
    budget: Arc<AtomicUsize>,
    known: Mutex<HashMap<BlockKey, PrefixEntry<P>>>,
    /// Random key of [`Pool::check`], one per pool.
    secret: RandomState,
}

impl<P: Page> Default for BlockPool<P> {
    fn default() -> Self {
        Self::counted(Arc::default(), Arc::new(AtomicUsize::new(usize::MAX)))
    }
}

impl<P: Page> BlockPool<P> {
    fn counted(live: Arc<AtomicUsize>, budget: Arc<AtomicUsize>) -> Self {
        Self { live, budget, known: Mutex::default(), secret: RandomState::new() }
    }

    /// Returns an empty pool for the caches of another model, with a common byte count and budget.
    pub fn with_shared_budget(&self) -> Self {
        Self::counted(Arc::clone(&self.live), Arc::clone(&self.budget))
    }

    /// Returns the bytes allocated by all caches together; shared pages count once.
    pub fn n_bytes(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Sets the budget in bytes, beyond which allocations fail.
    pub fn set_budget(&self, bytes: usize) {
        self.budget.store(bytes, Ordering::Relaxed);
    }

    /// Returns this pool with the device of its memory.
    pub(crate) fn allocator<'a, B: Backend<Page = P>>(&'a self, backend: &'a B) -> PoolAllocator<'a, B> {
        PoolAllocator { pool: self, backend }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<BlockKey, PrefixEntry<P>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A keyed hash in addition to the [key](BlockKey), so that no client can construct tokens that
    /// collide with others. It takes 8 bytes per block instead of 512 for the tokens.
    fn check(&self, tokens: &[u32]) -> u64 {
        self.secret.hash_one(tokens)
    }

    /// Returns the block of `tokens` after `parent`, if a sequence holds it.
    pub(crate) fn find(&self, parent: BlockKey, tokens: &[u32]) -> Option<(BlockKey, PrefixHit<P>)> {
        let key = parent.child(tokens);
        let known = self.known();
        let check = self.check(tokens);
        let entry = known.get(&key).filter(|known| known.parent == parent && known.check == check)?;
        Some((key, entry.found()?))
    }

    /// Registers the block of `tokens` after `parent`.
    pub(crate) fn register_prefix(&self, parent: BlockKey, tokens: &[u32], entry: Entry<P>) -> BlockKey {
        let key = parent.child(tokens);
        let mut known = self.known();
        if known.len() == known.capacity() {
            known.retain(|_, known| known.is_held());
        }
        let check = self.check(tokens);
        match known.get_mut(&key) {
            Some(there) if (there.parent, there.check) == (parent, check) => {
                there.holders.retain(|holder| holder.is_held() && !holder.is_same(&entry));
                if there.holders.len() < MAX_HOLDERS {
                    there.holders.push(entry);
                }
            }
            // Other tokens with the same key: the first entry stays.
            Some(there) if there.is_held() => {}
            _ => _ = known.insert(key, PrefixEntry { parent, check, holders: vec![entry] }),
        }
        key
    }
}

/// A pool with its device.
pub(crate) struct PoolAllocator<'a, B: Backend> {
    pool: &'a BlockPool<B::Page>,
    backend: &'a B,
}

impl<B: Backend> PoolAllocator<'_, B> {
    fn held(&self, n_bytes: usize, page: impl FnOnce() -> Result<B::Page>) -> Result<CountedPage<B::Page>> {
        if self.pool.n_bytes().saturating_add(n_bytes) > self.pool.budget.load(Ordering::Relaxed) {
            return Err(BackendError::OutOfMemory {
                bytes: n_bytes,
                what: "the cache, whose budget is exhausted",
            });
        }
        Ok(CountedPage::new(page()?, &self.pool.live))
    }
}

impl<B: Backend> PageAllocator<B::Page> for PoolAllocator<'_, B> {
    fn page(&self, n_bytes: usize) -> Result<CountedPage<B::Page>> {
        self.held(n_bytes, || self.backend.page(n_bytes))
    }

    fn copy(&self, page: &B::Page) -> Result<CountedPage<B::Page>> {
        self.held(page.n_bytes(), || page.duplicate())
    }
}
