//! Synchronization primitives of the pool: the standard library's, or those of
//! [loom](https://docs.rs/loom), which runs a test once for every possible interleaving
//! (`RUSTFLAGS="--cfg loom" cargo test -p kvant-cpu --lib every_order`).

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

/// Orders a `SeqCst` write before a later read: empty, except under loom, which treats such
/// accesses as acquire and release alone and needs a fence.
pub(super) fn seq_cst_fence() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
