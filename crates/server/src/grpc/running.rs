//! Running requests by id, so that another call can abort them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::owner_limits::Owner;

/// Running requests. See the [module](self).
#[derive(Default)]
pub(super) struct RunningRequests(Mutex<Table>);

#[derive(Default)]
struct Table {
    next: u64,
    entries: HashMap<u64, Entry>,
}

struct Entry {
    owner: Owner,
    id: String,
    abort: Arc<Notify>,
}

/// Entry of a request, removed on drop.
pub(super) struct RunningRequest {
    requests: Arc<RunningRequests>,
    number: u64,
    abort: Arc<Notify>,
}

impl RunningRequests {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a request of `owner` under the id that its client has given.
    pub fn enter(self: &Arc<Self>, owner: Owner, id: String) -> RunningRequest {
        let (mut table, abort) = (self.table(), Arc::new(Notify::new()));
        let number = table.next;
        table.next += 1;
        table.entries.insert(number, Entry { owner, id, abort: Arc::clone(&abort) });
        RunningRequest { requests: Arc::clone(self), number, abort }
    }

    /// Aborts all requests of `owner` with one of these ids; others have ended.
    pub fn abort(&self, owner: &Owner, ids: &[String]) {
        let table = self.table();
        let named = table.entries.values().filter(|entry| entry.owner == *owner && ids.contains(&entry.id));
        named.for_each(|entry| entry.abort.notify_one());
    }
}

impl RunningRequest {
    /// Waits until the request is aborted.
    pub async fn aborted(&self) {
        self.abort.notified().await;
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        self.requests.table().entries.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn an_abort_reaches_the_owners_requests_of_that_id() {
        let requests = Arc::new(RunningRequests::default());
        let (alice, bob) = (Some(Arc::from("alice")), Some(Arc::from("bob")));
        let enter = |owner: &Owner, id: &str| requests.enter(owner.clone(), id.to_owned());
        let [first, twin, other] = ["a", "a", "b"].map(|id| enter(&alice, id));
        let of_bob = enter(&bob, "a");
        requests.abort(&alice, &["a".to_owned(), "unknown".to_owned()]);
        let is_aborted = |request: &RunningRequest| request.aborted().now_or_never().is_some();
        assert_eq!([&first, &twin, &other, &of_bob].map(is_aborted), [true, true, false, false]);
        drop((first, twin, other, of_bob));
        assert!(requests.table().entries.is_empty());
    }
}
