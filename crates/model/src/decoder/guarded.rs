//! Shows the rows of a step to the [guard](KvGuard) of the caches.

use std::sync::Arc;

use kvant_backend::Backend;
use kvant_kv::{GuardQueries, KvGuard};

use super::{BatchSequence, Decoder, StepContext};
use crate::{LayerSpec, ModelError};

impl<B: Backend> Decoder<B> {
    /// Returns the guard of the caches.
    pub(super) fn guard(&self) -> Option<&Arc<KvGuard>> {
        self.weights.part.kv_guard()
    }

    /// Makes the guard follow every sequence of a step. Returns whether the step compares one.
    pub(super) fn begin_guarded(&self, parts: &mut [BatchSequence<'_, B::Page>]) -> bool {
        let Some(guard) = self.guard() else { return false };
        parts.iter_mut().for_each(|part| part.cache.follow(guard));
        guard.begin_step()
    }
}

/// Copies the rows of the followed heads of KV layer `kv`, after they were appended, to their
/// shadows. In a step that compares, does so with the last query of the first sequence that can.
pub(super) fn follow_rows<B: Backend>(
    guard: &KvGuard,
    step: &mut StepContext<'_, '_, B>,
    kv: usize,
    spec: &LayerSpec,
) -> Result<(), ModelError> {
    let (backend, act, heads) = (step.backend, &*step.act, &spec.heads);
    let mut end = 0;
    for part in step.parts.iter_mut() {
        let rows = end..end + part.n;
        end = rows.end;
        let Some((head, n_rows)) = part.cache.followed_head(kv) else { continue };
        let first = part.n.saturating_sub(n_rows);
        for (row, position) in rows.zip(part.cache.len()..).skip(first) {
            let [key, value] = part.cache.shadow_mut(position);
            backend.read(&act.k, row * spec.n_k() + head * heads.k_head_dim, key)?;
            backend.read(&act.v, row * spec.n_v() + head * heads.v_head_dim, value)?;
        }
        if step.compares {
            let width = heads.gqa_ratio() * heads.k_head_dim;
            let mut queries = vec![0.0; width];
            backend.read(&act.q, (end - 1) * spec.n_q() + head * width, &mut queries)?;
            let params = spec.attend_params();
            let queries = GuardQueries {
                rows: &queries,
                position: part.cache.len() + part.n - 1,
                scale: params.scale,
                soft_cap: params.soft_cap,
            };
            step.compares = !part.cache.compare(backend, guard, queries)?;
        }
    }
    Ok(())
}
