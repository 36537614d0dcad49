//! A fork-join thread pool for decode: one parallel region per op, thousands per second.
//!
//! Waiting threads spin, because a region lasts tens of microseconds and a futex wake costs about as much. They go
//! to sleep when nothing happens for a while, and yield the core when they wait long, so that a machine shared with
//! others, or more threads than cores, still makes progress.
//!
//! What threads write they write side by side: a cache line that many write is handed from core to core, one after the
//! other. So workers tell that they are done in groups of [`GROUP`], each with a counter of its own, and a thread takes
//! items from its own counter until it has none left.

use std::cell::UnsafeCell;
use std::io;
use std::ops::Range;
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

/// Workers that count down together at the end of a region. The caller looks at one counter after the other: with 64
/// threads a line is handed on 8 times, and 8 lines are fetched, instead of one that is handed on 63 times.
const GROUP: usize = 8;

type Job<'a> = dyn Fn(usize) + Sync + 'a;

struct Shared {
    /// Number of regions started; a change tells workers that `job` is new.
    epoch: AtomicU32,
    /// Of each group, the workers that have not finished the current region.
    pending: Box<[Counter]>,
    /// Workers asleep, or about to be, on `wake`.
    sleepers: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    job: UnsafeCell<Option<*const Job<'static>>>,
    lock: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is the only field that is not Sync by itself. It is written by the thread that holds `Pool::region`
// while every `pending` is 0 (no worker reads it), and read by workers after they saw the `epoch` increment that follows
// the write; the pointee is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is only followed between the two synchronisations.
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

/// The items of one thread that nobody has taken yet: `next .. end`, nothing where `next` has gone beyond `end`. On a line of its own, as
/// [`Counter`].
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

    /// Whether there was an item left. A look leaves the line with all who look, so that those who find nothing do not wait for
    /// each other.
    fn has_more(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.end.load(Ordering::Relaxed)
    }
}

/// What thread `thread` of `n_threads` has of `n` things that are divided evenly, in order.
pub(crate) fn share(n: usize, thread: usize, n_threads: usize) -> Range<usize> {
    thread * n / n_threads..(thread + 1) * n / n_threads
}

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
            pending: (1..wanted).step_by(GROUP).map(|_| Counter::default()).collect(),
            sleepers: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let shares = (0..wanted).map(|_| Share::default()).collect();
        let mut pool = Self { shared, workers: Vec::new(), region: Mutex::new(()), shares };
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
        // SAFETY: only the lifetime changes. No worker follows the pointer after it has counted down, and this function does
        // not return, nor unwind, before all have.
        let job_static: *const Job<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(job)) };
        // SAFETY: `region` is held and every `pending` is 0, so no other thread touches the cell.
        unsafe { *shared.job.get() = Some(job_static) };
        for (group, pending) in shared.pending.iter().enumerate() {
            pending.0.store(GROUP.min(self.workers.len() - group * GROUP), Ordering::Relaxed);
        }
        // Releases what was written above, the cell and the counters, to workers that see the new epoch.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
            shared.wake.notify_all();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| job(0)));
        // Every subtraction releases, and those that follow it are read-modify-writes, which carry it on: who acquires the 0 of a
        // group's last one acquires what all of the group have done.
        for pending in &shared.pending {
            wait(|| pending.0.load(Ordering::Acquire) == 0, None);
        }
        let theirs = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!theirs, "a worker thread panicked");
    }

    /// Runs `job(item)` for every item of `0 .. n`. Each thread works through its own share, in order, so that what it
    /// reads is one stream; a thread that has finished takes items from the shares of slower ones.
    pub fn for_each(&self, n: usize, job: &(dyn Fn(usize) + Sync)) {
        if n <= 1 {
            return (0..n).for_each(job);
        }
        let n_threads = self.n_threads();
        self.hand_out(|thread| share(n, thread, n_threads), &|_, _, item| job(item));
    }

    /// As [`Pool::for_each`], where a caller divides the work: `job(thread, item)` for every item of `0 .. n_items(thread)` of
    /// every thread, on that thread or on one that has finished its own.
    pub(crate) fn for_shares(&self, n_items: impl Fn(usize) -> usize, job: &(dyn Fn(usize, usize) + Sync)) {
        self.hand_out(|thread| 0..n_items(thread), &|_, owner, item| job(owner, item));
    }

    /// As [`Pool::for_shares`], with `job(state, thread, item)` given the state of the thread it runs on.
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
        let states = Shards::new(states);
        self.hand_out(|thread| 0..n_items(thread), &|thread, owner, item| {
            // SAFETY: each number of a thread belongs to one thread of the region, which works on one item at a time.
            let own = unsafe { states.part(thread..thread + 1) };
            job(&mut own[0], owner, item);
        });
    }

    /// Runs `job(thread, owner, item)` for every item of the share of each owner.
    fn hand_out(&self, share: impl Fn(usize) -> Range<usize>, job: &(dyn Fn(usize, usize, usize) + Sync)) {
        let n_threads = self.n_threads();
        if n_threads == 1 {
            return share(0).for_each(|item| job(0, 0, item));
        }
        let region = self.region.lock().unwrap_or_else(PoisonError::into_inner);
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
        self.run_region(&region, &|thread| {
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
        // SAFETY: the epoch changed, so `run` has written the cell and keeps the closure alive until this worker has counted
        // down.
        let job = unsafe { &*(*shared.job.get()).expect("a region without a job") };
        if catch_unwind(AssertUnwindSafe(|| job(index))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.pending[(index - 1) / GROUP].0.fetch_sub(1, Ordering::Release);
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
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn every_item_runs_exactly_once() {
        // 17 and 33: one worker more than whole groups have, and more threads than cores.
        for n_threads in [1, 2, 5, 9, 17, 33, 34] {
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

    /// Shares of any size, empty ones and one item in all among them.
    #[test]
    fn every_item_of_a_share_meets_the_state_of_one_thread() {
        for n_threads in [1, 3, 17, 33] {
            let pool = Pool::new(n_threads).unwrap();
            let sizes: [fn(usize) -> usize; 4] = [
                |thread| 7 * thread % 5,
                |_| 0,
                |thread| usize::from(thread == 2),
                |thread| 100 * (thread / 2),
            ];
            for n_items in sizes {
                let mut seen = vec![Vec::new(); n_threads];
                pool.for_shares_with(&mut seen, n_items, &|own, owner, item| own.push((owner, item)));
                let mut all = seen.concat();
                all.sort_unstable();
                let items = |owner| (0..n_items(owner)).map(move |item| (owner, item));
                assert_eq!(all, (0..n_threads).flat_map(items).collect::<Vec<_>>(), "{n_threads} threads");
            }
        }
    }

    /// All are held until everybody has an item, so that nobody can take a second one before.
    #[test]
    fn threads_begin_with_their_own_share() {
        for n_threads in [2, 9, 33] {
            let pool = Pool::new(n_threads).unwrap();
            let (all_are_there, mut firsts) = (Barrier::new(n_threads), vec![None; n_threads]);
            pool.for_shares_with(&mut firsts, |thread| 1 + thread % 3, &|first, owner, item| {
                if first.is_none() {
                    *first = Some((owner, item));
                    all_are_there.wait();
                }
            });
            let own = (0..n_threads).map(|thread| Some((thread, 0)));
            assert_eq!(firsts, own.collect::<Vec<_>>());
        }
    }

    /// What every thread has written without any ordering of its own is there when the region ends, region after region.
    #[test]
    fn the_caller_sees_what_all_groups_have_written() {
        for n_threads in [2, 9, 17, 33] {
            let pool = Pool::new(n_threads).unwrap();
            let mut written = vec![0; n_threads];
            for region in 1..=50 {
                let shards = Shards::new(&mut written);
                pool.run(&|thread| {
                    // SAFETY: each thread of the region has its own number.
                    unsafe { shards.part(thread..thread + 1)[0] += 1 };
                });
                assert_eq!(written, vec![region; n_threads]);
            }
        }
    }

    #[test]
    fn workers_wake_from_sleep() {
        for n_threads in [3, 17, 33] {
            let pool = Pool::new(n_threads).unwrap();
            for _ in 0..3 {
                let sum = AtomicUsize::new(0);
                pool.run(&|thread| {
                    sum.fetch_add(thread + 1, Ordering::Relaxed);
                });
                assert_eq!(sum.into_inner(), n_threads * (n_threads + 1) / 2);
                std::thread::sleep(2 * SLEEP_AFTER);
            }
        }
    }

    /// Asleep, awake, and not yet begun: a dropped pool waits for all of its threads.
    #[test]
    fn a_dropped_pool_ends_its_threads_whatever_they_do() {
        for n_threads in [2, 17, 33] {
            for pause in [Duration::ZERO, 2 * SLEEP_AFTER] {
                for regions in [0, 1] {
                    let alive = Arc::new(AtomicUsize::new(0));
                    let pool = Pool::spawned(n_threads, counted(&alive)).unwrap();
                    (0..regions).for_each(|_| pool.run(&|_| {}));
                    std::thread::sleep(pause);
                    drop(pool);
                    assert_eq!(alive.load(Ordering::SeqCst), 0);
                }
            }
        }
    }

    /// Whoever it is: the caller, the last of a group, the only one of a group, all at once.
    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        for n_threads in [2, 17, 33] {
            let pool = Pool::new(n_threads).unwrap();
            for bad in [0..1, 1..2, n_threads - 1..n_threads, 1..n_threads, 0..n_threads] {
                let finished = AtomicUsize::new(0);
                let result = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(&|thread| {
                        assert!(!bad.contains(&thread), "as it should");
                        finished.fetch_add(1, Ordering::Relaxed);
                    });
                }));
                assert!(result.is_err());
                // Nobody is still at work in a closure that is gone.
                assert_eq!(finished.into_inner(), n_threads - bad.len());
            }
            let ran = AtomicUsize::new(0);
            pool.for_each(100, &|_| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.into_inner(), 100);
        }
    }

    /// Starts threads that count themselves while they live.
    fn counted(
        alive: &Arc<AtomicUsize>,
    ) -> impl Fn(String, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        let alive = Arc::clone(alive);
        move |name, work| {
            let alive = Arc::clone(&alive);
            std::thread::Builder::new().name(name).spawn(move || {
                alive.fetch_add(1, Ordering::SeqCst);
                work();
                alive.fetch_sub(1, Ordering::SeqCst);
            })
        }
    }

    /// Of five threads the system starts three.
    #[test]
    fn a_thread_that_cannot_be_started_is_an_error_and_the_others_end() {
        let alive = Arc::new(AtomicUsize::new(0));
        let start = counted(&alive);
        let refused = Pool::spawned(5, |name, work| {
            if name == "kvant-3" {
                return Err(io::Error::from(io::ErrorKind::WouldBlock));
            }
            start(name, work)
        });
        let error = refused.err().expect("a refusal").to_string();
        assert!(error.starts_with("3 of 5 threads started: "), "{error}");
        // The pool is gone, and with it everyone it had waited for.
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    }
}
