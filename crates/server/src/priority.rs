//! Thread priorities: long work for one request yields the CPU to the model, which serves all
//! requests.
//!
//! A thread inherits the priority of its parent and cannot raise its own: a low-priority thread
//! must not start others.

use kvant::generate::constraint::lower_priority;
use tokio::sync::oneshot;

/// Runs work on a new low-priority thread. `None` if no thread can be started or the work panicked.
pub(crate) async fn run_low_priority<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (to, done) = oneshot::channel();
    let run = move || {
        lower_priority();
        // The receiver may have been dropped.
        _ = to.send(work());
    };
    std::thread::Builder::new().name("patient".to_owned()).spawn(run).ok()?;
    done.await.ok()
}
