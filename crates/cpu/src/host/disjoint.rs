//! A mutable slice that the threads of a region share, each writing disjoint parts.

use std::marker::PhantomData;
use std::ops::Range;

/// A `&mut [T]` to be divided among threads.
pub(crate) struct DisjointMut<'a, T> {
    start: *mut T,
    len: usize,
    whole: PhantomData<&'a mut [T]>,
}

impl<T> Clone for DisjointMut<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DisjointMut<'_, T> {}

// SAFETY: a `Shards` only hands out parts that its callers promise are disjoint, so sharing it
// between threads is sending each of them `&mut [T]`s, which `T: Send` allows.
unsafe impl<T: Send> Sync for DisjointMut<'_, T> {}

impl<'a, T> DisjointMut<'a, T> {
    pub(crate) fn new(whole: &'a mut [T]) -> Self {
        Self { start: whole.as_mut_ptr(), len: whole.len(), whole: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the elements of `range`.
    ///
    /// # Safety
    /// No other part that overlaps `range`, of this or of a copy, may be alive.
    ///
    /// # Panics
    /// When `range` is not within the slice.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: the range is within the borrowed slice, and the caller keeps parts disjoint.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
