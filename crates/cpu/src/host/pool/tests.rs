//! Regions of any number of threads, and failures within them.

use std::sync::Barrier;

use super::*;

/// Returns the numbers of threads to test: under Miri, the small ones alone.
fn threads<const N: usize>(all: [usize; N]) -> impl Iterator<Item = usize> {
    all.into_iter().filter(|&n_threads| !cfg!(miri) || n_threads <= 5)
}

#[test]
fn every_item_runs_exactly_once() {
    // 17 and 33: one worker more than whole groups have, and more threads than cores.
    for n_threads in threads([1, 2, 5, 9, 17, 33, 34]) {
        let pool = Pool::new(n_threads).unwrap();
        for n in [0, 1, 2, 7, 1000] {
            let counts: Vec<_> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(n, &|i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{n_threads} threads, {n} items");
        }
    }
}

/// Shares of any size, including empty ones and a single item in all.
#[test]
fn every_item_runs_once_with_the_state_of_one_thread() {
    for n_threads in threads([1, 3, 17, 33]) {
        let pool = Pool::new(n_threads).unwrap();
        let sizes: [fn(usize) -> usize; 4] =
            [|thread| 7 * thread % 5, |_| 0, |thread| usize::from(thread == 2), |thread| 100 * (thread / 2)];
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

/// Every thread waits until all have an item, so that none takes a second one before.
#[test]
fn threads_begin_with_their_own_share() {
    for n_threads in threads([2, 9, 33]) {
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

/// The unordered writes of every thread are visible when the region ends, region after region.
#[test]
fn the_caller_sees_what_all_groups_have_written() {
    for n_threads in threads([2, 9, 17, 33]) {
        let pool = Pool::new(n_threads).unwrap();
        let mut written = vec![0; n_threads];
        for region in 1..=50 {
            let shards = DisjointMut::new(&mut written);
            pool.region().run(&|thread| {
                // SAFETY: each thread of the region has its own number.
                unsafe { shards.part(thread..thread + 1)[0] += 1 };
            });
            assert_eq!(written, vec![region; n_threads]);
        }
    }
}

#[test]
fn workers_wake_from_sleep() {
    for n_threads in threads([3, 17, 33]) {
        let pool = Pool::new(n_threads).unwrap();
        for _ in 0..3 {
            let sum = AtomicUsize::new(0);
            pool.region().run(&|thread| {
                sum.fetch_add(thread + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), n_threads * (n_threads + 1) / 2);
            std::thread::sleep(2 * SLEEP_AFTER);
        }
    }
}

/// Asleep, awake, and not yet begun: a dropped pool waits for all of its threads.
#[test]
fn a_dropped_pool_ends_its_threads_in_any_state() {
    for n_threads in threads([2, 17, 33]) {
        for pause in [Duration::ZERO, 2 * SLEEP_AFTER] {
            for regions in [0, 1] {
                let alive = Arc::new(AtomicUsize::new(0));
                let pool = Pool::spawned(n_threads, counted(&alive)).unwrap();
                (0..regions).for_each(|_| pool.region().run(&|_| {}));
                std::thread::sleep(pause);
                drop(pool);
                assert_eq!(alive.load(Ordering::SeqCst), 0);
            }
        }
    }
}

/// In any thread: the caller, the last of a group, the only one of a group, all at once.
#[test]
fn a_panic_reaches_the_caller_and_the_pool_stays_usable() {
    for n_threads in threads([2, 17, 33]) {
        let pool = Pool::new(n_threads).unwrap();
        for bad in [0..1, 1..2, n_threads - 1..n_threads, 1..n_threads, 0..n_threads] {
            let finished = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.region().run(&|thread| {
                    assert!(!bad.contains(&thread), "expected panic");
                    finished.fetch_add(1, Ordering::Relaxed);
                });
            }));
            assert!(result.is_err());
            // No thread still runs a closure that is gone.
            assert_eq!(finished.into_inner(), n_threads - bad.len());
        }
        let ran = AtomicUsize::new(0);
        pool.for_each(100, &|_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.into_inner(), 100);
    }
}

/// Starts threads that count themselves while they are alive.
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
fn a_failed_thread_start_is_an_error_and_ends_the_others() {
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
    // The pool is gone, with all the threads that it waited for.
    assert_eq!(alive.load(Ordering::SeqCst), 0);
}
