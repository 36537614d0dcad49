//! Concurrency limits for long work: a total, and a smaller limit per owner, so that one owner
//! cannot use all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// API key on whose behalf work is done, if the server requires keys.
pub(crate) use kvant::generate::constraint::Owner;

/// Semaphore with limits per owner. See the [module](self).
pub(crate) struct Lanes {
    n: usize,
    n_each: usize,
    taken: Mutex<HashMap<Owner, usize>>,
    freed: Notify,
}

impl Lanes {
    /// Creates `n` permits, of which one owner may hold `n_each`.
    pub fn new(n: usize, n_each: usize) -> Arc<Self> {
        Arc::new(Self { n, n_each, taken: Mutex::default(), freed: Notify::new() })
    }

    /// Waits for a permit.
    pub async fn enter(self: &Arc<Self>, owner: &Owner) -> Lane {
        loop {
            let freed = self.freed.notified();
            if self.take(owner) {
                return Lane { lanes: Arc::clone(self), owner: owner.clone() };
            }
            freed.await;
        }
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<Owner, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, owner: &Owner) -> bool {
        let mut taken = self.taken();
        let is_free =
            taken.values().sum::<usize>() < self.n && taken.get(owner).is_none_or(|&n| n < self.n_each);
        if is_free {
            *taken.entry(owner.clone()).or_default() += 1;
        }
        is_free
    }
}

/// Permit, released on drop.
pub(crate) struct Lane {
    lanes: Arc<Lanes>,
    owner: Owner,
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut taken = self.lanes.taken();
        if let Some(n) = taken.get_mut(&self.owner) {
            *n -= 1;
            if *n == 0 {
                taken.remove(&self.owner);
            }
        }
        drop(taken);
        self.lanes.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_are_limited_per_owner_and_in_total() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let lanes = Lanes::new(3, 2);
        let (alice, bob) = (Some(Arc::from("alice")), Some(Arc::from("bob")));
        let first = runtime.block_on(lanes.enter(&bob));
        let second = runtime.block_on(lanes.enter(&bob));
        assert!(!lanes.take(&bob));
        let third = runtime.block_on(lanes.enter(&alice));
        assert!(!lanes.take(&alice) && !lanes.take(&None));
        drop(first);
        // A waiting task is woken.
        let waiting = runtime.spawn({
            let (lanes, bob) = (Arc::clone(&lanes), bob.clone());
            async move { (lanes.enter(&bob).await, lanes.enter(&bob).await) }
        });
        runtime.block_on(async {
            tokio::task::yield_now().await;
            drop((second, third));
            waiting.await.unwrap();
        });
        assert!(lanes.taken().is_empty());
    }
}
