//! The memory that the caches of a model's sessions take.

use kvant_kv::Plan;

use super::Model;
use crate::draft;
use crate::error::Error;
use crate::session::KvOptions;

impl Model {
    /// Returns the bytes allocated by the caches of all sessions together; shared blocks count
    /// once.
    pub fn kv_bytes(&self) -> usize {
        self.inner.loaded.pool_bytes()
    }

    /// Returns the bytes that the cache of a session of `tokens` tokens with `plan` allocates:
    /// [`Plan::n_bytes`] plus the cache of the [MTP layer](crate::OpenOptions::mtp), or of a [draft
    /// model or draft head](crate::OpenOptions::draft).
    pub fn kv_bytes_for(&self, plan: &Plan, tokens: usize) -> usize {
        let drafts = self.draft().map_or(0, |draft| {
            let plan = draft::kv_options().plan(&draft.config().kv_shape()).expect("a plan for any model");
            draft.inner.loaded.bytes_for(&plan, tokens.min(draft.config().n_ctx_train))
        });
        self.inner.loaded.bytes_for(plan, tokens).saturating_add(drafts)
    }

    /// Returns how many sessions of `n_ctx` tokens fit the memory together, those that hold some
    /// now included.
    ///
    /// # Errors
    /// Options that do not fit the model; a device error.
    pub fn max_sessions(&self, kv: &KvOptions, n_ctx: usize) -> Result<usize, Error> {
        self.inner.loaded.max_sequences(&kv.plan(&self.config().kv_shape())?, n_ctx)
    }

    /// Limits the bytes allocated by the caches of all sessions together.
    pub fn set_kv_budget(&self, bytes: usize) {
        self.inner.loaded.set_budget(bytes);
    }
}
