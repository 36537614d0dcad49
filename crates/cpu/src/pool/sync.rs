//! What threads of a pool meet by: the standard library's, or [loom](https://docs.rs/loom)'s, which runs a test once for every order in
//! which they can come (`RUSTFLAGS="--cfg loom" cargo test -p kvant-cpu --lib every_order`).

#[cfg(loom)]
pub(super) use loom::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
    sync::{Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle},
};
#[cfg(not(loom))]
pub(super) use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    sync::{Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle},
};

/// Between a write that is `SeqCst` and a read that must not come before it: nothing, but loom takes such accesses for acquire and
/// release alone and has to be told.
pub(super) fn keep_order() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
