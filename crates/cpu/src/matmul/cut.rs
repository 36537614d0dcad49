//! How threads divide panels: each has a slice of every matrix, and cuts it into items.
//!
//! Panels become the memory of the thread that packs them, and of the socket it runs on. So it is the same slice that it multiplies
//! later, whatever else is in the region: of queries, keys and values that are multiplied together it takes its part of each, and
//! of every expert. (What a thread that has finished takes over from others is the exception, in both.)

use std::ops::Range;

use super::kernels::PAIR;
use crate::pool::share;

/// The items of a matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    pub n_threads: usize,
    /// The most panels of an item.
    pub per_item: usize,
}

impl Cut {
    /// The items that thread `thread` has of a matrix of `n_panels`.
    pub fn n_items(self, n_panels: usize, thread: usize) -> usize {
        self.slice(n_panels, thread).len().div_ceil(self.per_item)
    }

    /// The panels of one of them.
    pub fn panels(self, n_panels: usize, thread: usize, item: usize) -> Range<usize> {
        let Range { start, end } = self.slice(n_panels, thread);
        start + item * self.per_item..end.min(start + (item + 1) * self.per_item)
    }

    /// The items that thread `thread` has of `n` matrices of `n_panels` each.
    pub fn n_items_of(self, n: usize, n_panels: usize, thread: usize) -> usize {
        n * self.n_items(n_panels, thread)
    }

    /// The matrix that one of them belongs to, and its panels there.
    pub fn panels_of(self, n_panels: usize, thread: usize, item: usize) -> (usize, Range<usize>) {
        let n_items = self.n_items(n_panels, thread);
        (item / n_items, self.panels(n_panels, thread, item % n_items))
    }

    /// The panels of a thread: whole pairs, which blocked products multiply together.
    fn slice(self, n_panels: usize, thread: usize) -> Range<usize> {
        let pairs = share(n_panels.div_ceil(PAIR), thread, self.n_threads);
        PAIR * pairs.start..n_panels.min(PAIR * pairs.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packing takes one panel at a time, products take pairs or as many as make few items.
    #[test]
    fn a_thread_multiplies_the_panels_that_it_packs() {
        for n_threads in [1, 2, 3, 17, 64] {
            for n_panels in (0..40).chain([96, 257]) {
                let panels = |per_item, thread| {
                    let cut = Cut { n_threads, per_item };
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
            let cut = Cut { n_threads, per_item: PAIR };
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
    fn items_are_no_larger_than_was_asked_for_and_only_the_last_panel_has_no_company() {
        for n_threads in [1, 2, 3, 17] {
            for n_panels in 0..70 {
                for per_item in [1, 2, 6] {
                    let cut = Cut { n_threads, per_item };
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
