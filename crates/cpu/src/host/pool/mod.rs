//! A fork-join thread pool for decode: one parallel region per op, thousands per second.
//!
//! Waiting threads spin, because a region lasts tens of microseconds and a futex wake costs about
//! as much. They sleep after a while without work, and yield the core in long waits, so that a
//! shared machine, or one with more threads than cores, still makes progress.
//!
//! Threads write to separate cache lines: a line that many threads write moves from core to core,
//! one after the other. So workers report completion in groups of [`GROUP`], each with its own
//! counter, and a thread takes items from its own counter until none is left.

#[cfg(all(test, loom))]
mod every_order;
mod sync;
#[cfg(all(test, not(loom)))]
mod tests;

use std::cell::UnsafeCell;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, PoisonError};
#[cfg(not(loom))]
use std::time::{Duration, Instant};

use kvant_backend::{BackendError, Result};

use self::sync::{
    AtomicBool, AtomicU32, AtomicUsize, Builder, Condvar, JoinHandle, Mutex, MutexGuard, Ordering,
    seq_cst_fence,
};
use crate::host::disjoint::DisjointMut;

/// Spins before each reading of the clock; under an interpreter, each takes as long as a thousand.
#[cfg(not(loom))]
const SPINS: u32 = if cfg!(miri) { 1 } else { 1 << 10 };
/// A worker that has been idle this long sleeps until the next region.
#[cfg(not(loom))]
const SLEEP_AFTER: Duration = Duration::from_millis(2);
/// A thread that has waited this long yields its core between polls.
#[cfg(not(loom))]
const YIELD_AFTER: Duration = Duration::from_micros(100);

/// Workers that share a completion counter at the end of a region. The caller polls one counter
/// after the other: with 64 threads a line moves 8 times, and 8 lines are loaded, instead of one
/// that moves 63 times.
const GROUP: usize = 8;

type Job<'a> = dyn Fn(usize) + Sync + 'a;

struct Shared {
    /// Number of regions started; a change notifies workers that `job` is new.
    epoch: AtomicU32,
    /// Per group, the workers that have not finished the current region.
    pending: Box<[Counter]>,
    /// Workers asleep, or about to be, on `wake`.
    sleepers: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    job: UnsafeCell<Option<*const Job<'static>>>,
    lock: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is the only field that is not Sync by itself. It is written by the thread that
// holds `Pool::region` while every `pending` is 0 (no worker reads it), and read by workers after
// they saw the `epoch` increment that follows the write; the pointee is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is only followed between the two synchronizations.
unsafe impl Send for Shared {}

/// A pool of threads that run one closure at a time, the caller included.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    region: Mutex<()>,
    /// The share of each thread, in [`Pool::for_each`].
    shares: Box<[Share]>,
}

/// A counter on a cache line of its own (two, for processors that fetch lines in pairs).
#[derive(Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

/// The remaining items of one thread: `next .. end`, empty once `next` exceeds `end`. On a cache
/// line of its own, like [`Counter`].
#[derive(Default)]
#[repr(align(128))]
struct Share {
    next: AtomicUsize,
    end: AtomicUsize,
}

impl Share {
    /// Takes an item.
    fn take(&self) -> Option<usize> {
        let item = self.next.fetch_add(1, Ordering::Relaxed);
        (item < self.end.load(Ordering::Relaxed)).then_some(item)
    }

    /// Returns whether an item was left. A load leaves the line shared among all readers, so that
    /// idle threads do not wait for each other.
    fn has_more(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.end.load(Ordering::Relaxed)
    }
}

/// Returns the share of thread `thread` of `n_threads` in `n` items that are divided evenly, in
/// order.
pub(crate) fn share(n: usize, thread: usize, n_threads: usize) -> Range<usize> {
    thread * n / n_threads..(thread + 1) * n / n_threads
}

impl Pool {
    /// Starts a pool of `n_threads` (at least 1), of which the caller of [`Region::run`] is one.
    ///
    /// # Errors
    /// [`BackendError::Threads`] when the system starts fewer; those it has started are ended
    /// again.
    pub fn new(n_threads: usize) -> Result<Self> {
        Self::spawned(n_threads, |name, work| Builder::new().name(name).spawn(work))
    }

    /// Returns a pool whose threads `spawn` starts.
    fn spawned(
        n_threads: usize,
        spawn: impl Fn(String, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
    ) -> Result<Self> {
        let n_threads = n_threads.max(1);
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            pending: (1..n_threads).step_by(GROUP).map(|_| Counter::default()).collect(),
            sleepers: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let shares = (0..n_threads).map(|_| Share::default()).collect();
        let mut pool = Self { shared, workers: Vec::new(), region: Mutex::new(()), shares };
        for index in 1..n_threads {
            let shared = Arc::clone(&pool.shared);
            match spawn(format!("kvant-{index}"), Box::new(move || work(&shared, index))) {
                Ok(worker) => pool.workers.push(worker),
                Err(error) => {
                    return Err(BackendError::Threads {
                        requested: n_threads,
                        started: index,
                        problem: error.to_string(),
                    });
                }
            }
        }
        Ok(pool)
    }

    /// Returns the number of threads of a region.
    pub fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Takes the threads of the pool, once no other region has them.
    pub fn region(&self) -> Region<'_> {
        Region { pool: self, _threads: self.region.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Runs `job(item)` for every item of `0 .. n`. Each thread works through its own share in
    /// order, so that it reads memory sequentially; an idle thread steals items from the shares of
    /// slower ones.
    pub fn for_each(&self, n: usize, job: &(dyn Fn(usize) + Sync)) {
        if n <= 1 {
            return (0..n).for_each(job);
        }
        let n_threads = self.n_threads();
        self.for_shares(|thread| share(n, thread, n_threads), &|_, _, item| job(item));
    }

    /// Runs the items `0 .. n_items(thread)` of every thread as `job(state, thread, item)`, with
    /// the state of the thread that runs it; see [`Pool::for_shares`].
    ///
    /// # Panics
    /// Unless there is a state for each thread.
    pub(crate) fn for_shares_with<T: Send>(
        &self,
        states: &mut [T],
        n_items: impl Fn(usize) -> usize,
        job: &(dyn Fn(&mut T, usize, usize) + Sync),
    ) {
        assert_eq!(states.len(), self.n_threads(), "a state for each thread");
        let states = DisjointMut::new(states);
        self.for_shares(|thread| 0..n_items(thread), &|thread, owner, item| {
            // SAFETY: each number of a thread belongs to one thread of the region, which works on
            // one item at a time.
            let own = unsafe { states.part(thread..thread + 1) };
            job(&mut own[0], owner, item);
        });
    }

    /// Runs `job(thread, owner, item)` for every item of the share of each thread, its owner, on
    /// that thread or on an idle one, as [`Pool::for_each`] does; the caller divides the work.
    pub(crate) fn for_shares(
        &self,
        share: impl Fn(usize) -> Range<usize>,
        job: &(dyn Fn(usize, usize, usize) + Sync),
    ) {
        let n_threads = self.n_threads();
        if n_threads == 1 {
            return share(0).for_each(|item| job(0, 0, item));
        }
        let region = self.region();
        let mut total = 0;
        for (thread, of_thread) in self.shares.iter().enumerate() {
            let share = share(thread);
            total += share.len();
            of_thread.next.store(share.start, Ordering::Relaxed);
            of_thread.end.store(share.end, Ordering::Relaxed);
        }
        if total <= 1 {
            drop(region);
            return (0..n_threads).for_each(|owner| share(owner).for_each(|item| job(0, owner, item)));
        }
        region.run(&|thread| {
            while let Some(item) = self.shares[thread].take() {
                job(thread, thread, item);
            }
            for owner in (thread + 1..n_threads).chain(0..thread) {
                while self.shares[owner].has_more()
                    && let Some(item) = self.shares[owner].take()
                {
                    job(thread, owner, item);
                }
            }
        });
    }
}

/// The threads of a pool, for one parallel region after the other.
pub struct Region<'a> {
    pool: &'a Pool,
    _threads: MutexGuard<'a, ()>,
}

impl Region<'_> {
    /// Runs `job(thread)` once on each thread, `0 .. n_threads()`, and returns when all are done.
    ///
    /// Propagates a panic in `job` to the caller. `job` must not call into the same pool.
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        let Pool { shared, workers, .. } = self.pool;
        if workers.is_empty() {
            return job(0);
        }
        // SAFETY: only the lifetime changes. No worker follows the pointer after it has counted
        // down, and this function does not return, nor unwind, before all have.
        let job_static: *const Job<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(job)) };
        // SAFETY: this region has the threads and every `pending` is 0, so no other thread touches
        // the cell.
        unsafe { *shared.job.get() = Some(job_static) };
        for (group, pending) in shared.pending.iter().enumerate() {
            pending.0.store(GROUP.min(workers.len() - group * GROUP), Ordering::Relaxed);
        }
        // Releases the writes above, the cell and the counters, to workers that see the new epoch.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        seq_cst_fence();
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
            shared.wake.notify_all();
        }
        let own_result = catch_unwind(AssertUnwindSafe(|| job(0)));
        // Every subtraction releases, and the later ones are read-modify-writes, which continue its
        // release sequence: acquiring the final 0 of a group acquires the writes of the whole
        // group.
        for pending in &shared.pending {
            wait(|| pending.0.load(Ordering::Acquire) == 0, None);
        }
        let worker_panicked = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = own_result {
            resume_unwind(panic);
        }
        assert!(!worker_panicked, "a worker thread panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        drop(self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker only ends by returning: its panics are caught and reported by `Region::run`.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        wait(|| shared.epoch.load(Ordering::SeqCst) != seen, Some(shared));
        seen = shared.epoch.load(Ordering::SeqCst);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the epoch changed, so `Region::run` has written the cell and keeps the closure
        // alive until this worker has counted down.
        let job = unsafe { &*(*shared.job.get()).expect("a region without a job") };
        if catch_unwind(AssertUnwindSafe(|| job(index))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.pending[(index - 1) / GROUP].0.fetch_sub(1, Ordering::Release);
    }
}

/// Waits until `done`: spins, then yields between polls, then (a worker between regions) sleeps on
/// `sleep.wake`.
#[cfg(not(loom))]
fn wait(done: impl Fn() -> bool, sleep: Option<&Shared>) {
    let mut started = None;
    loop {
        for _ in 0..SPINS {
            if done() {
                return;
            }
            std::hint::spin_loop();
        }
        let waited = started.get_or_insert_with(Instant::now).elapsed();
        match sleep {
            Some(shared) if waited > SLEEP_AFTER => return shared.sleep_until(done),
            _ if waited > YIELD_AFTER => std::thread::yield_now(),
            _ => {}
        }
    }
}

/// Waits without a clock: a worker sleeps at once, the caller of a region yields to the others.
#[cfg(loom)]
fn wait(done: impl Fn() -> bool, sleep: Option<&Shared>) {
    match sleep {
        Some(shared) => shared.sleep_until(done),
        None => {
            while !done() {
                loom::thread::yield_now();
            }
        }
    }
}

impl Shared {
    /// Sleeps until `done`, which a change of the epoch causes.
    fn sleep_until(&self, done: impl Fn() -> bool) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Announced before the last check: `Region::run` reads `sleepers` after it changed the
        // epoch.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        seq_cst_fence();
        while !done() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
