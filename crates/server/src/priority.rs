//! Priorities of threads: work of one request that takes long gives way to the model, which works for all.
//!
//! A thread begins with the priority of the one that starts it, and cannot raise its own: one that gives way starts no others.

use tokio::sync::oneshot;

/// Does work on a thread of its own that gives way. `None` where there is no thread to be had, or the work panicked.
pub(crate) async fn do_giving_way<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (to, done) = oneshot::channel();
    let run = move || {
        give_way();
        // Whoever asked may have gone.
        _ = to.send(work());
    };
    std::thread::Builder::new().name("patient".to_owned()).spawn(run).ok()?;
    done.await.ok()
}

/// Lowers the priority of the calling thread to a tenth of a usual one's share of a busy core. Of an idle one it has all.
#[cfg(target_os = "linux")]
pub(crate) fn give_way() {
    const NICENESS: i32 = 10;
    // What a system does not allow makes others slower and nothing wrong.
    if let Err(error) = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS) {
        tracing::debug!(%error, "the priority of a thread stays as it is");
    }
}

/// Elsewhere a priority is that of the whole process.
#[cfg(not(target_os = "linux"))]
pub(crate) fn give_way() {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gives_way_and_those_beside_it_do_not() {
        let niceness = || rustix::process::getpriority_process(Some(rustix::thread::gettid())).unwrap();
        let before = niceness();
        let lowered = std::thread::spawn(move || {
            give_way();
            niceness()
        });
        assert_eq!(lowered.join().unwrap(), 10.max(before));
        assert_eq!(niceness(), before);
    }
}
