//! Memory for caches on one device: counted, within a budget, and found again by the tokens it holds.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kvant_backend::{Backend, BackendError, Held, Page, Pages, Result, TOKENS_PER_BLOCK};
use xxhash_rust::xxh3::Xxh3;

/// Names a block by all that its bytes depend on: model, plan, salt and the tokens up to its end, each block's key made from
/// the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockKey(u128);

impl BlockKey {
    /// What the first block follows on: whatever tells models, plans and owners apart.
    pub fn root(parts: &[&[u8]]) -> Self {
        let mut hash = Xxh3::new();
        for part in parts {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.digest128())
    }

    /// The key of the block of `tokens` after this one.
    pub fn then(self, tokens: &[u32]) -> Self {
        let mut hash = Xxh3::new();
        hash.update(&self.0.to_le_bytes());
        tokens.iter().for_each(|token| hash.update(&token.to_le_bytes()));
        Self(hash.digest128())
    }
}

/// What is kept of a block for as long as some sequence holds it.
pub(crate) struct Entry<P: Page> {
    /// The block of each group, `None` where it had been let go of.
    pub(crate) blocks: Vec<Option<Weak<Held<P>>>>,
    /// The sink of each group that has one.
    pub(crate) sinks: Vec<Option<Weak<Held<P>>>>,
    /// The states of recurrent layers at the end of the block, where they are remembered.
    pub(crate) states: Option<Weak<Held<P>>>,
}

impl<P: Page> Entry<P> {
    /// Whether any sequence holds something of it still.
    fn is_held(&self) -> bool {
        self.blocks.iter().flatten().any(|page| page.strong_count() > 0)
    }

    /// Whether it is the same memory.
    fn is_same(&self, other: &Self) -> bool {
        let same = |pages: (&Option<Weak<_>>, &Option<Weak<_>>)| match pages {
            (Some(a), Some(b)) => a.ptr_eq(b),
            (a, b) => a.is_none() && b.is_none(),
        };
        self.blocks.iter().zip(&other.blocks).all(same)
    }
}

/// Sequences that read the same tokens apart from each other and are known for it, at most: when one goes, others still have them.
const MOST_HOLDERS: usize = 8;

/// A block, and what it was made known for.
struct Known<P: Page> {
    parent: BlockKey,
    /// What [`Pool::check`] makes of the tokens: equal keys are not taken for equal tokens.
    check: u64,
    /// Whoever read the tokens, in the order of coming. All have the same bytes.
    holders: Vec<Entry<P>>,
}

impl<P: Page> Known<P> {
    fn is_held(&self) -> bool {
        self.holders.iter().any(Entry::is_held)
    }

    /// What is still held of it, whoever holds it; `None` where a sink is gone that was there: it cannot be done without.
    fn found(&self) -> Option<Found<P>> {
        let n_groups = self.holders.first()?.blocks.len();
        let block = |g: usize| self.holders.iter().find_map(|holder| holder.blocks[g].as_ref()?.upgrade());
        let sink = |g: usize| {
            let mut sinks = self.holders.iter().filter_map(|holder| holder.sinks[g].as_ref()).peekable();
            if sinks.peek().is_none() { Some(None) } else { sinks.find_map(Weak::upgrade).map(Some) }
        };
        let states = self.holders.iter().find_map(|holder| holder.states.as_ref()?.upgrade());
        let sinks = (0..n_groups).map(sink).collect::<Option<_>>()?;
        Some(Found { blocks: (0..n_groups).map(block).collect(), sinks, states })
    }
}

/// A block that was found: its page in each group, where it is still held, the groups' sinks, and the states at its end.
pub(crate) struct Found<P: Page> {
    pub(crate) blocks: Vec<Option<Arc<Held<P>>>>,
    pub(crate) sinks: Vec<Option<Arc<Held<P>>>>,
    pub(crate) states: Option<Arc<Held<P>>>,
}

/// The memory of all caches on a device.
pub struct Pool<P: Page> {
    live: Arc<AtomicUsize>,
    budget: Arc<AtomicUsize>,
    known: Mutex<HashMap<BlockKey, Known<P>>>,
    /// Key of [`Pool::check`], drawn at random for each pool.
    secret: RandomState,
}

impl<P: Page> Default for Pool<P> {
    fn default() -> Self {
        Self::counted(Arc::default(), Arc::new(AtomicUsize::new(usize::MAX)))
    }
}

impl<P: Page> Pool<P> {
    fn counted(live: Arc<AtomicUsize>, budget: Arc<AtomicUsize>) -> Self {
        Self { live, budget, known: Mutex::default(), secret: RandomState::new() }
    }

    /// An empty pool for the caches of another model: its bytes and those of this one are counted together, within one budget.
    pub fn beside(&self) -> Self {
        Self::counted(Arc::clone(&self.live), Arc::clone(&self.budget))
    }

    /// Bytes that all caches together have allocated; what several share is counted once.
    pub fn n_bytes(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Refuses memory beyond so many bytes from now on.
    pub fn set_budget(&self, bytes: usize) {
        self.budget.store(bytes, Ordering::Relaxed);
    }

    /// This pool, with the device that the memory is on.
    pub(crate) fn on<'a, B: Backend<Page = P>>(&'a self, backend: &'a B) -> PoolOn<'a, B> {
        PoolOn { pool: self, backend }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<BlockKey, Known<P>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A keyed hash beside that of the [key](BlockKey), so that nobody can make up tokens that pass for others. It takes 8 bytes
    /// where the tokens would take 512, for every block.
    fn check(&self, tokens: &[u32]) -> u64 {
        self.secret.hash_one(tokens)
    }

    /// The block of `tokens` after `parent`, if a sequence holds it.
    pub(crate) fn find(&self, parent: BlockKey, tokens: &[u32]) -> Option<(BlockKey, Found<P>)> {
        let key = parent.then(tokens);
        let known = self.known();
        let check = self.check(tokens);
        let there = known.get(&key).filter(|known| known.parent == parent && known.check == check)?;
        Some((key, there.found()?))
    }

    /// Makes the block of `tokens` after `parent` known.
    pub(crate) fn publish(
        &self,
        parent: BlockKey,
        tokens: &[u32; TOKENS_PER_BLOCK],
        entry: Entry<P>,
    ) -> BlockKey {
        let key = parent.then(tokens);
        let mut known = self.known();
        if known.len() == known.capacity() {
            known.retain(|_, known| known.is_held());
        }
        let check = self.check(tokens);
        match known.get_mut(&key) {
            Some(there) if (there.parent, there.check) == (parent, check) => {
                there.holders.retain(|holder| holder.is_held() && !holder.is_same(&entry));
                if there.holders.len() < MOST_HOLDERS {
                    there.holders.push(entry);
                }
            }
            // Other tokens with the same key: whoever was first stays.
            Some(there) if there.is_held() => {}
            _ => _ = known.insert(key, Known { parent, check, holders: vec![entry] }),
        }
        key
    }
}

/// A pool with its device.
pub(crate) struct PoolOn<'a, B: Backend> {
    pool: &'a Pool<B::Page>,
    backend: &'a B,
}

impl<B: Backend> PoolOn<'_, B> {
    fn held(&self, n_bytes: usize, page: impl FnOnce() -> Result<B::Page>) -> Result<Held<B::Page>> {
        if self.pool.n_bytes().saturating_add(n_bytes) > self.pool.budget.load(Ordering::Relaxed) {
            return Err(BackendError::OutOfMemory {
                bytes: n_bytes,
                what: "the cache, whose budget is used up",
            });
        }
        Ok(Held::new(page()?, &self.pool.live))
    }
}

impl<B: Backend> Pages<B::Page> for PoolOn<'_, B> {
    fn page(&self, n_bytes: usize) -> Result<Held<B::Page>> {
        self.held(n_bytes, || self.backend.page(n_bytes))
    }

    fn copy(&self, page: &B::Page) -> Result<Held<B::Page>> {
        self.held(page.n_bytes(), || page.duplicate())
    }
}
