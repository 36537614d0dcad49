//! Thread priorities: long work for one request yields the CPU to the model, which serves all
//! requests.
//!
//! A thread inherits the priority of its parent and cannot raise its own: a low-priority thread
//! must not start others.

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

/// Lowers the priority of the calling thread to a tenth of the usual share of a busy core. An idle
/// core is used fully.
#[cfg(target_os = "linux")]
pub(crate) fn lower_priority() {
    const NICENESS: i32 = 10;
    // A denied change only costs speed.
    if let Err(error) = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS) {
        tracing::debug!(%error, "the priority of a thread stays as it is");
    }
}

/// Other systems have priorities per process only.
#[cfg(not(target_os = "linux"))]
pub(crate) fn lower_priority() {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_gets_a_lower_priority() {
        let niceness = || rustix::process::getpriority_process(Some(rustix::thread::gettid())).unwrap();
        let before = niceness();
        let lowered = std::thread::spawn(move || {
            lower_priority();
            niceness()
        });
        assert_eq!(lowered.join().unwrap(), 10.max(before));
        assert_eq!(niceness(), before);
    }
}
