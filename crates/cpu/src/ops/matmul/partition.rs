//! Partitions panels among threads: each thread has a slice of every matrix, and divides it into
//! items.
//!
//! First touch places panels in the memory of the socket of the thread that packs them. So a thread
//! later multiplies the same slice, whatever else is in the region: its slice of each of Q, K and V
//! in a fused projection, and of every expert. (Items that an idle thread steals are the exception,
//! when packing as when multiplying.)

use std::ops::Range;

use crate::host::pool::share;

/// Panels that a GEMM multiplies together.
pub(super) const PAIR: usize = 2;
/// Below this many values a parallel region costs more than it saves.
pub(super) const MIN_PARALLEL_VALUES: usize = 16 * 1024;

/// Partition of a matrix into items.
#[derive(Debug, Clone, Copy)]
pub(super) struct Partition {
    pub n_threads: usize,
    /// Maximum panels of an item.
    pub per_item: usize,
}

impl Partition {
    /// Returns the number of items of thread `thread` for a matrix of `n_panels`.
    pub fn n_items(self, n_panels: usize, thread: usize) -> usize {
        self.slice(n_panels, thread).len().div_ceil(self.per_item)
    }

    /// Returns the panels of item `item`.
    pub fn panels(self, n_panels: usize, thread: usize, item: usize) -> Range<usize> {
        let Range { start, end } = self.slice(n_panels, thread);
        start + item * self.per_item..end.min(start + (item + 1) * self.per_item)
    }

    /// Returns the number of items of thread `thread` for `n` matrices of `n_panels` each.
    pub fn n_items_of(self, n: usize, n_panels: usize, thread: usize) -> usize {
        n * self.n_items(n_panels, thread)
    }

    /// Returns the matrix of item `item`, and its panels there.
    pub fn panels_of(self, n_panels: usize, thread: usize, item: usize) -> (usize, Range<usize>) {
        let n_items = self.n_items(n_panels, thread);
        (item / n_items, self.panels(n_panels, thread, item % n_items))
    }

    /// Returns the panels of a thread: whole pairs, which GEMMs multiply together.
    fn slice(self, n_panels: usize, thread: usize) -> Range<usize> {
        let pairs = share(n_panels.div_ceil(PAIR), thread, self.n_threads);
        PAIR * pairs.start..n_panels.min(PAIR * pairs.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packing uses items of one panel; products use pairs, or larger items for few of them.
    #[test]
    fn a_thread_multiplies_the_panels_that_it_packs() {
        for n_threads in [1, 2, 3, 17, 64] {
            for n_panels in (0..40).chain([96, 257]) {
                let panels = |per_item, thread| {
                    let cut = Partition { n_threads, per_item };
                    let items = 0..cut.n_items(n_panels, thread);
                    items.flat_map(|item| cut.panels(n_panels, thread, item)).collect::<Vec<_>>()
                };
                for thread in 0..n_threads {
                    let packed = panels(1, thread);
                    for per_item in [2, 3, 8, 1000] {
                        assert_eq!(panels(per_item, thread), packed, "{n_panels}, {n_threads} threads");
                    }
                }
                let all: Vec<_> = (0..n_threads).flat_map(|thread| panels(1, thread)).collect();
                assert_eq!(all, (0..n_panels).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_thread_has_its_slice_of_every_one_of_several_matrices() {
        for (n_threads, n, n_panels) in [(2, 3, 5), (3, 1, 8), (17, 4, 6), (2, 0, 5), (2, 3, 0)] {
            let cut = Partition { n_threads, per_item: PAIR };
            for thread in 0..n_threads {
                let items = 0..cut.n_items_of(n, n_panels, thread);
                let got = items.map(|item| cut.panels_of(n_panels, thread, item));
                let of_one = 0..cut.n_items(n_panels, thread);
                let of_one: Vec<_> = of_one.map(|item| cut.panels(n_panels, thread, item)).collect();
                let want =
                    (0..n).flat_map(|matrix| of_one.iter().map(move |panels| (matrix, panels.clone())));
                assert!(got.eq(want), "{n} of {n_panels}, {n_threads} threads");
            }
        }
    }

    #[test]
    fn items_respect_the_limit_and_only_the_last_panel_is_unpaired() {
        for n_threads in [1, 2, 3, 17] {
            for n_panels in 0..70 {
                for per_item in [1, 2, 6] {
                    let cut = Partition { n_threads, per_item };
                    for thread in 0..n_threads {
                        for item in 0..cut.n_items(n_panels, thread) {
                            let panels = cut.panels(n_panels, thread, item);
                            assert!((1..=per_item).contains(&panels.len()), "{panels:?} of {n_panels}");
                            let is_whole = per_item == 1 || panels.len().is_multiple_of(PAIR);
                            assert!(is_whole || panels.end == n_panels, "{panels:?} of {n_panels}");
                        }
                    }
                }
            }
        }
    }
}
