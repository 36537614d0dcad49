//! Lanes for work that takes long: so much of it at once, and less than that of each owner, so that nobody takes all of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Whose work it is: an API key, where there are any.
pub(crate) type Owner = Option<Arc<str>>;

/// See the [module](self).
pub(crate) struct Lanes {
    n: usize,
    n_each: usize,
    taken: Mutex<HashMap<Owner, usize>>,
    freed: Notify,
}

impl Lanes {
    /// So many lanes, and so many of them for one owner.
    pub fn new(n: usize, n_each: usize) -> Arc<Self> {
        Arc::new(Self { n, n_each, taken: Mutex::default(), freed: Notify::new() })
    }

    /// A lane, as soon as one is free for this owner.
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

/// A lane that is taken until this is dropped.
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
    fn an_owner_has_some_of_the_lanes_and_all_together_have_all() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let lanes = Lanes::new(3, 2);
        let (alice, bob) = (Some(Arc::from("alice")), Some(Arc::from("bob")));
        let first = runtime.block_on(lanes.enter(&bob));
        let second = runtime.block_on(lanes.enter(&bob));
        assert!(!lanes.take(&bob));
        let third = runtime.block_on(lanes.enter(&alice));
        assert!(!lanes.take(&alice) && !lanes.take(&None));
        drop(first);
        // Whoever waits is woken.
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
