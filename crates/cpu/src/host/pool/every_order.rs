//! Model checks of the thread pool under every interleaving of a small pool (loom).

use loom::cell::UnsafeCell;

use super::*;

/// Cells that each thread writes without an ordering of its own. Loom reports accesses that race.
struct Written([UnsafeCell<usize>; 2]);

// SAFETY: loom stops a model when two threads access a cell at once.
unsafe impl Sync for Written {}

/// Two regions, with a worker that may be asleep, about to sleep or at work when the next one
/// starts, and an end that may find it so: each thread runs once, its writes are visible after the
/// region, and all threads wake.
#[test]
fn regions_end_whole_in_every_order() {
    loom::model(|| {
        let pool = Pool::new(2).unwrap();
        let written = Written([UnsafeCell::new(0), UnsafeCell::new(0)]);
        let written = &written;
        for region in 1..=2 {
            // SAFETY: each thread of the region has its own number.
            pool.region().run(&|thread| written.0[thread].with_mut(|x| unsafe { *x += 1 }));
            // SAFETY: the region has ended.
            written.0.iter().for_each(|x| x.with(|x| assert_eq!(unsafe { *x }, region)));
        }
    });
}

/// Items of both shares run once, on either thread.
#[test]
fn every_item_runs_once_in_every_order() {
    loom::model(|| {
        let pool = Pool::new(2).unwrap();
        let mut taken = vec![Vec::new(); 2];
        pool.for_shares_with(&mut taken, |_| 1, &|own, owner, item| own.push((owner, item)));
        let mut all = taken.concat();
        all.sort_unstable();
        assert_eq!(all, [(0, 0), (1, 0)]);
    });
}
