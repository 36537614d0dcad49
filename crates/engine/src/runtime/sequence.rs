//! A sequence of a loaded model: its id and constant properties.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvant_kv::{CacheState, KvShape, Plan};
use kvant_model::LogitsFor;

use super::cache::{CacheOps, shortest_if_unequal};
use super::{BatchEntry, ContextSize, LoadedModel, OnDraft, SequenceId};
use crate::error::Error;

/// A sequence; dropping it releases its cache.
pub(crate) struct Sequence {
    loaded: Arc<dyn LoadedModel>,
    id: SequenceId,
    plan: Arc<Plan>,
    n_ctx: usize,
    /// LoRA scales of its tokens; the default scales when `None`.
    strengths: Option<Arc<[f32]>>,
}

/// Returns an id that is unique in this process.
fn fresh() -> SequenceId {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    SequenceId(NEXT.fetch_add(1, Ordering::Relaxed))
}

impl Sequence {
    /// Starts an empty sequence.
    pub fn start(loaded: Arc<dyn LoadedModel>, plan: Plan, room: ContextSize) -> Result<Self, Error> {
        let id = fresh();
        let (n_ctx, plan) = loaded.start(id, plan, room)?;
        Ok(Self { loaded, id, plan: Arc::new(plan), n_ctx, strengths: None })
    }

    /// See [`KvCaches::restore`](super::KvCaches::restore).
    pub fn restore(
        loaded: Arc<dyn LoadedModel>,
        plan: Plan,
        n_ctx: usize,
        state: CacheState,
        next: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>,
    ) -> Result<Self, Error> {
        let id = fresh();
        loaded.restore(id, plan.clone(), n_ctx, state, next)?;
        Ok(Self { loaded, id, plan: Arc::new(plan), n_ctx, strengths: None })
    }

    /// Starts a second sequence with the same tokens.
    pub fn fork(&self) -> Self {
        let id = fresh();
        self.loaded.fork(self.id, id);
        let (loaded, plan) = (Arc::clone(&self.loaded), Arc::clone(&self.plan));
        Self { loaded, id, plan, n_ctx: self.n_ctx, strengths: self.strengths.clone() }
    }

    /// Replaces the LoRA scales.
    pub fn with_strengths(mut self, strengths: Option<Arc<[f32]>>) -> Self {
        self.strengths = strengths;
        self
    }

    pub fn lora_scales(&self) -> Option<&Arc<[f32]>> {
        self.strengths.as_ref()
    }

    /// Describes `n` rows of the sequence in a step.
    pub fn step_row(&self, n: usize, want: LogitsFor) -> BatchEntry {
        let (id, lora_scales) = (self.id, self.strengths.clone());
        BatchEntry { id, n, logits_for: want, lora_scales, positions: None, tokens_before: Arc::default() }
    }

    pub fn loaded(&self) -> &dyn LoadedModel {
        &*self.loaded
    }

    /// Returns whether this is a sequence of `loaded`.
    pub fn is_of(&self, loaded: &Arc<dyn LoadedModel>) -> bool {
        Arc::ptr_eq(&self.loaded, loaded)
    }

    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Returns the plan of the cache.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Calls `f` with the cache on each device, in the order of the layers.
    pub fn caches(&self, mut f: impl FnMut(&mut dyn CacheOps)) {
        self.loaded.visit(self.id, &mut f);
    }

    /// Returns the sum of `value` over the caches.
    pub fn sum(&self, value: impl Fn(&dyn CacheOps) -> usize) -> usize {
        let mut sum = 0;
        self.caches(|cache| sum += value(cache));
        sum
    }

    /// Returns the number of tokens stored and of tiles coded.
    pub fn state(&self) -> CacheState {
        // All parts hold equal numbers of tokens, but some may code none.
        let mut max = CacheState { len: 0, coded: 0, mark: None };
        self.caches(|cache| {
            let state = cache.state();
            if (state.coded, state.mark) >= (max.coded, max.mark) {
                max = state;
            }
        });
        max
    }

    /// Returns the number of tokens stored.
    pub fn len(&self) -> usize {
        self.state().len
    }

    /// Returns the maximum number of tokens of the next step.
    pub fn max_step_rows(&self) -> usize {
        let mut max = self.loaded.properties().info.max_step_rows;
        self.caches(|cache| max = max.min(cache.max_rows()));
        max
    }

    /// Returns the context length in tokens.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Sets the context length, which stays at least the number of stored tokens.
    pub fn set_n_ctx(&mut self, n_ctx: usize) {
        self.caches(|cache| cache.set_n_ctx(n_ctx));
        self.n_ctx = n_ctx.max(self.len());
    }

    /// See [`Cache::reserve_draft`](kvant_kv::Cache::reserve_draft).
    pub fn reserve_draft(&self, known: usize, max: usize) -> usize {
        let mut max = max;
        self.caches(|cache| max = cache.reserve_draft(known, max));
        max
    }

    /// See [`CacheOps::predict`].
    pub fn predict(&self, at: usize, next: u32, on_prediction: OnDraft<'_>) {
        self.caches(|cache| cache.predict(at, next, on_prediction));
    }

    /// See [`Cache::truncate`](kvant_kv::Cache::truncate).
    pub fn truncate(&self, n: usize) -> usize {
        let mut left = n;
        // A part may have to truncate further than the others. Only then is it repeated: the MTP
        // layer keeps the first `n` tokens where the model's cache has to recompute some of them.
        loop {
            self.caches(|cache| left = cache.truncate(left.min(cache.state().len)));
            if shortest_if_unequal(&*self.loaded, self.id).is_none() {
                return left;
            }
        }
    }

    /// See [`CacheOps::attach_prefix`].
    pub fn attach_prefix(&self, tokens: &[u32], max: usize) -> usize {
        let mut max = max;
        // All parts attach the prefix that each of them has.
        loop {
            let mut attached = usize::MAX;
            self.caches(|cache| attached = attached.min(cache.attach_prefix(tokens, max)));
            if shortest_if_unequal(&*self.loaded, self.id).is_none() {
                return attached;
            }
            self.caches(|cache| _ = cache.truncate(0));
            max = attached;
        }
    }

    /// Returns the bytes of each page image of [`Sequence::pages`].
    pub fn page_bytes(&self) -> Vec<usize> {
        let mut bytes = Vec::new();
        self.caches(|cache| bytes.extend(cache.page_bytes()));
        bytes
    }

    /// Passes a byte image of every page to `visit`.
    pub fn pages(&self, visit: &mut dyn FnMut(Vec<u8>) -> Result<(), Error>) -> Result<(), Error> {
        let mut readers = Vec::new();
        self.caches(|cache| readers.push(cache.page_reader()));
        readers.into_iter().try_for_each(|read| read(visit))
    }

    /// Returns the allocated bytes, shared ones included.
    pub fn n_bytes(&self) -> usize {
        self.sum(|cache| cache.n_bytes())
    }

    /// Returns the bytes that an f16 cache of the same tokens would allocate.
    pub fn f16_bytes(&self, shape: &KvShape) -> usize {
        shape.f16_bytes(self.len())
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.loaded.release(self.id);
    }
}
