//! A fork-join thread pool for decode: one parallel region per op, thousands per second.
//!
//! Waiting threads spin, because a region lasts tens of microseconds and a futex wake costs about as much. They go
//! to sleep when nothing happens for a while, and yield the core when they wait long, so that a machine shared with
//! others, or more threads than cores, still makes progress.

use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvant_backend::{BackendError, Result};

use crate::shards::Shards;

/// Spins before a look at the clock.
const SPINS: u32 = 1 << 10;
/// A worker that has been idle this long sleeps until the next region.
const SLEEP_AFTER: Duration = Duration::from_millis(2);
/// A thread that has waited this long gives its core away between looks.
const YIELD_AFTER: Duration = Duration::from_micros(100);

type Job<'a> = dyn Fn(usize) + Sync + 'a;

struct Shared {
    /// Number of regions started; a change tells workers that `job` is new.
    epoch: AtomicU32,
    /// Workers that have not finished the current region.
    pending: AtomicUsize,
    /// Workers asleep, or about to be, on `wake`.
    sleepers: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    job: UnsafeCell<Option<*const Job<'static>>>,
    lock: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is the only field that is not Sync by itself. It is written by the thread that holds `Pool::region`
// while `pending` is 0 (no worker reads it), and read by workers after they saw the `epoch` increment that follows
// the write; the pointee is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is only followed between the two synchronisations.
unsafe impl Send for Shared {}

/// A pool of threads that run one closure at a time, the caller included.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    region: Mutex<()>,
    /// The next item of each thread's share, in [`Pool::for_each`].
    next: Vec<Next>,
}

/// A counter on a cache line of its own (two, for processors that fetch lines in pairs).
#[derive(Default)]
#[repr(align(128))]
struct Next(AtomicUsize);

impl Pool {
    /// A pool of `n_threads` (at least 1), of which the caller of [`Pool::run`] is one.
    ///
    /// # Errors
    /// [`BackendError::Threads`] when the system starts fewer; those it has started are ended again.
    pub fn new(n_threads: usize) -> Result<Self> {
        Self::spawned(n_threads, |name, work| std::thread::Builder::new().name(name).spawn(work))
    }

    /// A pool whose threads `spawn` starts.
    fn spawned(
        n_threads: usize,
        spawn: impl Fn(String, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
    ) -> Result<Self> {
        let wanted = n_threads.max(1);
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            pending: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let next = (0..wanted).map(|_| Next::default()).collect();
        let mut pool = Self { shared, workers: Vec::new(), region: Mutex::new(()), next };
        for index in 1..wanted {
            let shared = Arc::clone(&pool.shared);
            match spawn(format!("kvant-{index}"), Box::new(move || work(&shared, index))) {
                Ok(worker) => pool.workers.push(worker),
                Err(error) => {
                    return Err(BackendError::Threads { wanted, started: index, problem: error.to_string() });
                }
            }
        }
        Ok(pool)
    }

    /// Threads that take part in a region.
    pub fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job(thread)` once on each thread, `0 .. n_threads()`, and returns when all are done.
    ///
    /// A panic in `job` is passed on to the caller. `job` must not call into the same pool.
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        self.run_region(&self.region.lock().unwrap_or_else(PoisonError::into_inner), job);
    }

    fn run_region(&self, _region: &MutexGuard<'_, ()>, job: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. No worker follows the pointer after `pending` has returned to 0, and
        // this function does not return, nor unwind, before that.
        let job_static: *const Job<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(job)) };
        // SAFETY: `region` is held and `pending` is 0, so no other thread touches the cell.
        unsafe { *shared.job.get() = Some(job_static) };
        shared.pending.store(self.workers.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
            shared.wake.notify_all();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| job(0)));
        wait(|| shared.pending.load(Ordering::Acquire) == 0, None);
        let theirs = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!theirs, "a worker thread panicked");
    }

    /// Runs `job(item)` for every item of `0 .. n`. Each thread works through its own share, in order, so that what it
    /// reads is one stream; a thread that has finished takes items from the shares of slower ones.
    pub fn for_each(&self, n: usize, job: &(dyn Fn(usize) + Sync)) {
        self.for_each_on(n, &|_, item| job(item));
    }

    /// As [`Pool::for_each`], with `job(state, item)` given the state of the thread it runs on.
    ///
    /// # Panics
    /// Unless there is a state for each thread.
    pub fn for_each_with<T: Send>(&self, states: &mut [T], n: usize, job: &(dyn Fn(&mut T, usize) + Sync)) {
        assert_eq!(states.len(), self.n_threads(), "a state for each thread");
        let states = Shards::new(states);
        self.for_each_on(n, &|thread, item| {
            // SAFETY: each number of a thread belongs to one thread of the region, which works on one item at a time.
            let own = unsafe { states.part(thread..thread + 1) };
            job(&mut own[0], item);
        });
    }

    /// As [`Pool::for_each`], with `job(thread, item)` told which thread it runs on.
    fn for_each_on(&self, n: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        let n_threads = self.n_threads();
        if n <= 1 || n_threads == 1 {
            return (0..n).for_each(|item| job(0, item));
        }
        let region = self.region.lock().unwrap_or_else(PoisonError::into_inner);
        let share = |thread: usize| thread * n / n_threads..(thread + 1) * n / n_threads;
        for (thread, next) in self.next.iter().enumerate() {
            next.0.store(share(thread).start, Ordering::Relaxed);
        }
        self.run_region(&region, &|thread| {
            for owner in (thread..n_threads).chain(0..thread) {
                let end = share(owner).end;
                loop {
                    let item = self.next[owner].0.fetch_add(1, Ordering::Relaxed);
                    if item >= end {
                        break;
                    }
                    job(thread, item);
                }
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        drop(self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker only ends by returning: its panics are caught and reported by `run`.
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
        // SAFETY: the epoch changed, so `run` has written the cell and keeps the closure alive until `pending` is 0.
        let job = unsafe { &*(*shared.job.get()).expect("a region without a job") };
        if catch_unwind(AssertUnwindSafe(|| job(index))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.pending.fetch_sub(1, Ordering::Release);
    }
}

/// Waits until `done`: spins, then yields between looks, then (a worker between regions) sleeps on `sleep.wake`.
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
            Some(shared) if waited > SLEEP_AFTER => {
                let mut guard = shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
                // Announced before the last look: `run` looks at `sleepers` after it changed the epoch.
                shared.sleepers.fetch_add(1, Ordering::SeqCst);
                while !done() {
                    guard = shared.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                shared.sleepers.fetch_sub(1, Ordering::SeqCst);
                return;
            }
            _ if waited > YIELD_AFTER => std::thread::yield_now(),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_runs_exactly_once() {
        for n_threads in [1, 2, 5] {
            let pool = Pool::new(n_threads).unwrap();
            for n in [0, 1, 2, 7, 1000] {
                let counts: Vec<_> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(n, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                    "{n_threads} threads, {n} items"
                );
            }
        }
    }

    #[test]
    fn every_item_meets_the_state_of_one_thread() {
        let pool = Pool::new(3).unwrap();
        let mut items = vec![Vec::new(); 3];
        pool.for_each_with(&mut items, 100, &|own, item| own.push(item));
        let mut all = items.concat();
        all.sort_unstable();
        assert_eq!(all, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn workers_wake_from_sleep() {
        let pool = Pool::new(3).unwrap();
        for _ in 0..3 {
            let sum = AtomicUsize::new(0);
            pool.run(&|thread| {
                sum.fetch_add(thread + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 6);
            std::thread::sleep(2 * SLEEP_AFTER);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2).unwrap();
        for bad in 0..2 {
            let result = catch_unwind(AssertUnwindSafe(|| pool.run(&|thread| assert_ne!(thread, bad))));
            assert!(result.is_err());
        }
        let ran = AtomicUsize::new(0);
        pool.for_each(10, &|_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.into_inner(), 10);
    }

    /// Of five threads the system starts three.
    #[test]
    fn a_thread_that_cannot_be_started_is_an_error_and_the_others_end() {
        let alive = Arc::new(AtomicUsize::new(0));
        let refused = Pool::spawned(5, |name, work| {
            if name == "kvant-3" {
                return Err(io::Error::from(io::ErrorKind::WouldBlock));
            }
            let alive = Arc::clone(&alive);
            std::thread::Builder::new().spawn(move || {
                alive.fetch_add(1, Ordering::SeqCst);
                work();
                alive.fetch_sub(1, Ordering::SeqCst);
            })
        });
        let error = refused.err().expect("a refusal").to_string();
        assert!(error.starts_with("3 of 5 threads started: "), "{error}");
        // The pool is gone, and with it everyone it had waited for.
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    }
}
