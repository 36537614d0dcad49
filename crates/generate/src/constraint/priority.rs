//! Thread priorities: long work for one request yields the CPU to the model, which serves all
//! requests.
//!
//! A thread inherits the priority of its parent and cannot raise its own: a low-priority thread
//! must not start others.

/// Lowers the priority of the calling thread to a tenth of the usual share of a busy core. An idle
/// core is used fully.
#[cfg(target_os = "linux")]
pub fn lower_priority() {
    const NICENESS: i32 = 10;
    // A denied change only costs speed.
    _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
}

/// Other systems have priorities per process only.
#[cfg(not(target_os = "linux"))]
pub fn lower_priority() {}

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
