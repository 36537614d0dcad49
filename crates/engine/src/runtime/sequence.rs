//! A sequence of a loaded model: its number, and what of it never changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvant_kv::{CacheState, KvShape, Plan};
use kvant_model::Want;

use super::{Loaded, MAX_ROWS, Room, SequenceId, StepRow};
use crate::Error;

/// A sequence; it is let go of when this is dropped.
pub(crate) struct Sequence {
    loaded: Arc<dyn Loaded>,
    id: SequenceId,
    plan: Arc<Plan>,
    n_ctx: usize,
    /// How much of each adapter its tokens are made with; as much as those were loaded with where nothing is said.
    strengths: Option<Arc<[f32]>>,
}

/// A number that no sequence of this process has had.
fn fresh() -> SequenceId {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    SequenceId(NEXT.fetch_add(1, Ordering::Relaxed))
}

impl Sequence {
    /// An empty sequence.
    pub fn start(loaded: Arc<dyn Loaded>, plan: Plan, room: Room) -> Result<Self, Error> {
        let id = fresh();
        let (n_ctx, plan) = loaded.start(id, plan, room)?;
        Ok(Self { loaded, id, plan: Arc::new(plan), n_ctx, strengths: None })
    }

    /// See [`Caches::restore`](super::Caches::restore).
    pub fn restore(
        loaded: Arc<dyn Loaded>,
        plan: Plan,
        n_ctx: usize,
        state: CacheState,
        next: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>,
    ) -> Result<Self, Error> {
        let id = fresh();
        loaded.restore(id, plan.clone(), n_ctx, state, next)?;
        Ok(Self { loaded, id, plan: Arc::new(plan), n_ctx, strengths: None })
    }

    /// A second sequence with the same tokens.
    pub fn fork(&self) -> Self {
        let id = fresh();
        self.loaded.fork(self.id, id);
        let (loaded, plan) = (Arc::clone(&self.loaded), Arc::clone(&self.plan));
        Self { loaded, id, plan, n_ctx: self.n_ctx, strengths: self.strengths.clone() }
    }

    /// The same, whose tokens are made with so much of each adapter.
    pub fn with_strengths(mut self, strengths: Option<Arc<[f32]>>) -> Self {
        self.strengths = strengths;
        self
    }

    pub fn strengths(&self) -> Option<&Arc<[f32]>> {
        self.strengths.as_ref()
    }

    /// `n` rows of it in a step.
    pub fn step_row(&self, n: usize, want: Want) -> StepRow {
        StepRow { id: self.id, n, want, strengths: self.strengths.clone(), places: None }
    }

    pub fn loaded(&self) -> &dyn Loaded {
        &*self.loaded
    }

    /// Whether both are sequences of the same model on the same device.
    pub fn is_of(&self, loaded: &Arc<dyn Loaded>) -> bool {
        Arc::ptr_eq(&self.loaded, loaded)
    }

    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// What the cache stores.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.loaded.state(self.id).len
    }

    /// The most tokens that the next step may add.
    pub fn most_rows(&self) -> usize {
        MAX_ROWS.min(self.loaded.most_rows(self.id))
    }

    /// Tokens that fit.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Changes how many tokens fit.
    pub fn set_n_ctx(&mut self, n_ctx: usize) {
        self.loaded.set_n_ctx(self.id, n_ctx);
        self.n_ctx = n_ctx.max(self.len());
    }

    /// Bytes that an f16 cache of the same tokens would have allocated.
    pub fn f16_bytes(&self, shape: &KvShape) -> usize {
        shape.f16_bytes(self.len())
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.loaded.release(self.id);
    }
}
