//! Operations on the cache of a sequence, with the page type erased.

use std::iter;
use std::sync::Arc;

use kvant_backend::{Backend, Page};
use kvant_kv::{BlockKey, BlockPool, Cache, CacheState};

use super::draft_head::{DraftHead, HeadSequence, OnDraft};
use super::{KvCaches, SequenceId};
use crate::error::Error;

/// Passes a byte image of every page of a cache to the function given. It holds a copy of the
/// cache that shares all memory, so that other sequences run meanwhile.
pub(crate) type PageReader =
    Box<dyn FnOnce(&mut dyn FnMut(Vec<u8>) -> Result<(), Error>) -> Result<(), Error>>;

/// Operations on the cache of a sequence on one device, with the draft head's.
///
/// An operation is declared here and implemented for [`DeviceCache`].
/// [`Sequence`](super::Sequence) combines the results of several devices.
pub(crate) trait CacheOps {
    /// Returns the number of tokens stored and of tiles coded.
    fn state(&self) -> CacheState;
    /// Sets the context length, which stays at least the number of stored tokens.
    fn set_n_ctx(&mut self, n_ctx: usize);
    /// See [`Cache::max_rows`].
    fn max_rows(&self) -> usize;
    /// See [`Cache::reserve_draft`].
    fn reserve_draft(&mut self, known: usize, max: usize) -> usize;
    /// See [`Cache::release_scratch`].
    fn release_scratch(&mut self);
    /// See [`Cache::truncate`].
    fn truncate(&mut self, n: usize) -> usize;
    /// See [`Cache::set_checkpoint`].
    fn set_checkpoint(&mut self);
    /// See [`Cache::set_prefix_root`].
    fn set_prefix_root(&mut self, root: BlockKey);
    /// See [`Cache::register_prefix`].
    fn register_prefix(&mut self, tokens: &[u32]);
    /// See [`Cache::attach_prefix`]; attaches at most the first `max` tokens.
    fn attach_prefix(&mut self, tokens: &[u32], max: usize) -> usize;
    /// Passes predictions of the draft head behind `next` to `on_prediction`, one token after the
    /// other until it returns `false`. `next` follows the `at` tokens of the sequence, cached or
    /// uncommitted. Does nothing where no draft head follows the sequence.
    fn predict(&mut self, at: usize, next: u32, on_prediction: OnDraft<'_>);
    /// Returns the bytes of each page image of the [reader](CacheOps::page_reader).
    fn page_bytes(&self) -> Vec<usize>;
    /// Returns the reader of the pages.
    fn page_reader(&self) -> PageReader;
    /// Returns the allocated bytes, shared ones included.
    fn n_bytes(&self) -> usize;
}

/// A device, and the pool of its cache blocks.
pub(super) struct PooledDevice<B: Backend> {
    pub backend: Arc<B>,
    pub pool: BlockPool<B::Page>,
}

/// The caches of a sequence on a device.
pub(super) struct SequenceCaches<P: Page> {
    pub model: Cache<P>,
    /// The state of the draft head, where it follows the sequence.
    pub head: Option<HeadSequence<P>>,
}

/// The caches of a sequence, with the device that they are on.
pub(super) struct DeviceCache<'a, B: Backend> {
    pub device: &'a PooledDevice<B>,
    pub caches: &'a mut SequenceCaches<B::Page>,
    pub head: Option<&'a mut DraftHead<B>>,
}

impl<P: Page> Clone for SequenceCaches<P> {
    fn clone(&self) -> Self {
        Self { model: self.model.clone(), head: self.head.clone() }
    }
}

impl<P: Page> SequenceCaches<P> {
    /// Iterates over the model's cache and that of the draft head.
    fn iter_mut(&mut self) -> impl Iterator<Item = &mut Cache<P>> {
        iter::once(&mut self.model).chain(self.head.as_mut().map(|head| &mut head.cache))
    }
}

impl<B: Backend> DeviceCache<'_, B> {
    /// Calls `f` with the draft head and its state. After an error, out of memory in most cases,
    /// the head no longer follows the sequence.
    fn with_head(
        &mut self,
        f: impl FnOnce(&mut DraftHead<B>, &PooledDevice<B>, &mut HeadSequence<B::Page>) -> Result<(), Error>,
    ) {
        if let (Some(head), Some(followed)) = (&mut self.head, &mut self.caches.head)
            && f(head, self.device, followed).is_err()
        {
            self.caches.head = None;
        }
    }
}

impl<B: Backend> CacheOps for DeviceCache<'_, B> {
    fn state(&self) -> CacheState {
        self.caches.model.state()
    }

    fn set_n_ctx(&mut self, n_ctx: usize) {
        self.caches.iter_mut().for_each(|cache| cache.set_n_ctx(n_ctx));
    }

    fn max_rows(&self) -> usize {
        self.caches.model.max_rows()
    }

    fn reserve_draft(&mut self, known: usize, max: usize) -> usize {
        let PooledDevice { backend, pool } = self.device;
        self.caches.model.reserve_draft(&**backend, pool, known, max)
    }

    fn release_scratch(&mut self) {
        self.caches.iter_mut().for_each(Cache::release_scratch);
    }

    fn truncate(&mut self, n: usize) -> usize {
        // The head's cache needs no recomputation where the model's cache may.
        if let Some(head) = &mut self.caches.head {
            head.truncate(n);
        }
        self.caches.model.truncate(n)
    }

    fn set_checkpoint(&mut self) {
        self.caches.model.set_checkpoint();
        self.with_head(|head, device, followed| {
            head.process(device, followed, followed.n_pending())?;
            followed.cache.set_checkpoint();
            Ok(())
        });
    }

    fn set_prefix_root(&mut self, root: BlockKey) {
        self.caches.model.set_prefix_root(root);
        if let Some(head) = &mut self.caches.head {
            // It differs from that of the model's cache.
            head.cache.set_prefix_root(root.child(&[]));
        }
    }

    fn register_prefix(&mut self, tokens: &[u32]) {
        let SequenceCaches { model, head } = &mut *self.caches;
        model.register_prefix(&self.device.pool, tokens);
        if let Some(head) = head {
            head.register_prefix(&self.device.pool, tokens);
        }
    }

    fn attach_prefix(&mut self, tokens: &[u32], max: usize) -> usize {
        let pool = &self.device.pool;
        let max = tokens.len().min(max.saturating_add(1));
        let n = self.caches.model.attach_prefix(pool, &tokens[..max]);
        self.caches.head.take_if(|head| !head.attach_prefix(pool, tokens, n));
        n
    }

    fn predict(&mut self, at: usize, next: u32, on_prediction: OnDraft<'_>) {
        self.with_head(|head, device, followed| match followed.len() == at {
            true => head.predict(device, followed, next, on_prediction),
            false => Ok(()),
        });
    }

    fn page_bytes(&self) -> Vec<usize> {
        self.caches.model.page_bytes().collect()
    }

    fn page_reader(&self) -> PageReader {
        let (backend, cache) = (Arc::clone(&self.device.backend), self.caches.model.clone());
        Box::new(move |visit| cache.pages(&*backend).try_for_each(|image| visit(image?)))
    }

    fn n_bytes(&self) -> usize {
        let head = self.caches.head.as_ref().map_or(0, |head| head.cache.n_bytes());
        self.caches.model.n_bytes() + head
    }
}

/// Returns the minimum of the tokens that the caches of a sequence hold, if the numbers differ.
pub(super) fn shortest_if_unequal(caches: &(impl KvCaches + ?Sized), id: SequenceId) -> Option<usize> {
    let (mut shortest, mut longest) = (usize::MAX, 0);
    caches.visit(id, &mut |cache| {
        let len = cache.state().len;
        (shortest, longest) = (shortest.min(len), longest.max(len));
    });
    (shortest < longest).then_some(shortest)
}
