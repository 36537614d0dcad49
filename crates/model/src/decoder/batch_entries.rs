//! The sequences of a step as an op receives them: with the pages of one KV layer, or with one
//! recurrent state.

use std::ops::{Deref, DerefMut};

use kvant_backend::{KvBatchEntry, Page, PooledBatchEntry, StateBatchEntry, TokenSpan};

use super::BatchSequence;

/// An entry for each sequence of a step.
pub(super) enum BatchEntries<T> {
    /// Decoding one sequence allocates no memory.
    One([T; 1]),
    Many(Vec<T>),
}

impl<T> IntoIterator for BatchEntries<T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        match self {
            Self::One(entries) => Vec::from(entries).into_iter(),
            Self::Many(entries) => entries.into_iter(),
        }
    }
}

impl<T> Deref for BatchEntries<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::One(entries) => entries,
            Self::Many(entries) => entries,
        }
    }
}

impl<T> DerefMut for BatchEntries<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::One(entries) => entries,
            Self::Many(entries) => entries,
        }
    }
}

/// Returns the sequences of a step with the K and V of index `kv`, whose step tiles begin at byte
/// `first_offset`.
pub(super) fn kv_entries<'a, P: Page>(
    parts: &'a mut [BatchSequence<'_, P>],
    kv: usize,
    first_offset: usize,
) -> BatchEntries<KvBatchEntry<'a, P>> {
    let mut step_tiles = first_offset;
    with_rows(parts, |part, rows| {
        let entry = part.cache.part(kv, rows, step_tiles);
        step_tiles += entry.step_bytes();
        entry
    })
}

/// Returns the sequences of a step with the pooled keys of index `kv`, of which those that the
/// step completes are consecutive rows.
pub(super) fn pooled_entries<'a, P: Page>(
    parts: &'a mut [BatchSequence<'_, P>],
    kv: usize,
) -> Vec<PooledBatchEntry<'a, P>> {
    let mut first_key = 0;
    let of = |part: &'a mut BatchSequence<'_, P>, rows| {
        let pooled = part.cache.pooled_part(kv, rows, first_key).expect("a layer with pooled keys");
        first_key += pooled.keys.rows.n;
        pooled
    };
    with_rows(parts, of).into_iter().collect()
}

/// Returns the sequences of a step with the K and V of index `kv`, and with its pooled keys.
pub(super) fn pooled_pairs<'a, P: Page>(
    parts: &'a mut [BatchSequence<'_, P>],
    kv: usize,
    first_offset: usize,
) -> (Vec<KvBatchEntry<'a, P>>, Vec<PooledBatchEntry<'a, P>>) {
    let mut step_tiles = first_offset;
    let of = |part: &'a mut BatchSequence<'_, P>, rows| {
        let own = step_tiles;
        step_tiles += part.cache.part(kv, rows, 0).step_bytes();
        part.cache.parts(kv, rows, own).expect("a layer with pooled keys")
    };
    with_rows(parts, of).into_iter().unzip()
}

/// Returns the sequences of a step with their states of index `index`.
pub(super) fn state_entries<'a, P: Page>(
    parts: &'a mut [BatchSequence<'_, P>],
    index: usize,
) -> BatchEntries<StateBatchEntry<'a, P>> {
    with_rows(parts, |part, rows| part.cache.state_part(index, rows))
}

/// Returns the entry that `of` makes of each sequence and its rows in the step.
fn with_rows<'a, 's, P: Page, T>(
    parts: &'a mut [BatchSequence<'s, P>],
    mut of: impl FnMut(&'a mut BatchSequence<'s, P>, TokenSpan) -> T,
) -> BatchEntries<T> {
    let mut first = 0;
    let entry = |part: &'a mut BatchSequence<'s, P>| {
        let rows = part.cache.rows(first, part.n);
        first += part.n;
        of(part, rows)
    };
    match parts {
        [one] => BatchEntries::One([one].map(entry)),
        many => BatchEntries::Many(many.iter_mut().map(entry).collect()),
    }
}
