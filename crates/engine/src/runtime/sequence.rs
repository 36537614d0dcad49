//! A sequence of a loaded model: its id and constant properties.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvant_kv::{CacheState, KvShape, Plan};
use kvant_model::LogitsFor;

use super::{BatchEntry, ContextSize, LoadedModel, MAX_ROWS, SequenceId};
use crate::Error;

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
        BatchEntry { id: self.id, n, logits_for: want, lora_scales: self.strengths.clone(), positions: None }
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

    /// Returns the number of tokens stored.
    pub fn len(&self) -> usize {
        self.loaded.state(self.id).len
    }

    /// Returns the maximum number of tokens of the next step.
    pub fn max_step_rows(&self) -> usize {
        MAX_ROWS.min(self.loaded.max_rows(self.id))
    }

    /// Returns the context length in tokens.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Sets the context length.
    pub fn set_n_ctx(&mut self, n_ctx: usize) {
        self.loaded.set_n_ctx(self.id, n_ctx);
        self.n_ctx = n_ctx.max(self.len());
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
