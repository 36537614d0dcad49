//! Recurrent states: every token overwrites them, so truncation restores a copy.

use std::sync::Arc;

use kvant_backend::{CountedPage, Page, PageAllocator, Result, StateBatchEntry, TokenSpan};

use crate::layout::StateLayout;

/// The states of all recurrent layers of a sequence: the current page, and copies at earlier
/// lengths.
#[derive(Debug)]
pub(crate) struct RecurrentStates<P: Page> {
    /// `None` before the first token, when all values are zero.
    now: Option<Arc<CountedPage<P>>>,
    /// Snapshots, oldest first.
    past: Vec<Snapshot<P>>,
    /// The states before the latest step with draft tokens, and the length at that time; `None` as
    /// length once they are obsolete and only their memory is reused.
    before: Option<(Option<usize>, Arc<CountedPage<P>>)>,
}

/// The states after so many tokens.
#[derive(Debug)]
struct Snapshot<P: Page> {
    len: usize,
    page: Arc<CountedPage<P>>,
    kept: KeptBlocks<P>,
}

/// Blocks that a query after some tokens reads and later ones do not leave as they are, `[groups]`:
/// those of a sliding window, which are released, and a block of pooled keys that is not complete,
/// of which later tokens write a copy.
pub(crate) type KeptBlocks<P> = Vec<Vec<Arc<CountedPage<P>>>>;

impl<P: Page> Clone for Snapshot<P> {
    fn clone(&self) -> Self {
        Self { len: self.len, page: Arc::clone(&self.page), kept: self.kept.clone() }
    }
}

impl<P: Page> Default for RecurrentStates<P> {
    fn default() -> Self {
        Self { now: None, past: Vec::new(), before: None }
    }
}

impl<P: Page> Clone for RecurrentStates<P> {
    fn clone(&self) -> Self {
        Self { now: self.now.clone(), past: self.past.clone(), before: None }
    }
}

impl<P: Page> RecurrentStates<P> {
    /// Returns the current states.
    pub fn now(&self) -> Option<&Arc<CountedPage<P>>> {
        self.now.as_ref()
    }

    /// Returns the states after `len` tokens, if saved.
    pub fn after(&self, len: usize) -> Option<&Arc<CountedPage<P>>> {
        if let Some((Some(at), page)) = &self.before
            && *at == len
        {
            return Some(page);
        }
        self.snapshot(len).map(|snapshot| &snapshot.page)
    }

    fn snapshot(&self, len: usize) -> Option<&Snapshot<P>> {
        let index = self.past.binary_search_by_key(&len, |snapshot| snapshot.len).ok()?;
        Some(&self.past[index])
    }

    /// Returns the blocks that the snapshot after `len` tokens holds, if there is one.
    pub fn kept_after(&self, len: usize) -> Option<&KeptBlocks<P>> {
        self.snapshot(len).map(|snapshot| &snapshot.kept)
    }

    /// Returns the blocks that snapshots hold.
    pub fn kept_blocks(&self) -> impl Iterator<Item = &Arc<CountedPage<P>>> {
        self.past.iter().flat_map(|snapshot| snapshot.kept.iter().flatten())
    }

    /// Returns the lengths with saved states.
    pub fn places(&self) -> impl Iterator<Item = usize> {
        let before = self.before.iter().filter_map(|(at, _)| *at);
        self.past.iter().map(|snapshot| snapshot.len).chain(before)
    }

    /// Returns every page, that of the current states first.
    pub fn pages(&self) -> impl Iterator<Item = &Arc<CountedPage<P>>> {
        let past = self.past.iter().map(|snapshot| &snapshot.page);
        self.now.iter().chain(past).chain(self.before.iter().map(|(_, page)| page))
    }

    /// Saves the current states, after `len` tokens, until the next call.
    pub fn remember(&mut self, len: usize, pages: &dyn PageAllocator<P>) -> Result<()> {
        let Some(now) = &self.now else { return Ok(()) };
        match self.before.as_mut().and_then(|(_, page)| Arc::get_mut(page)) {
            Some(page) => {
                page.copy_from(now)?;
                self.before = self.before.take().map(|(_, page)| (Some(len), page));
            }
            None => self.before = Some((Some(len), Arc::new(pages.copy(now)?))),
        }
        Ok(())
    }

    /// Releases the states that [`States::remember`] saved.
    pub fn discard_saved(&mut self) {
        self.before = None;
    }

    /// Makes the current states exclusively owned, before a step updates them.
    pub fn reserve(&mut self, layout: &StateLayout, pages: &dyn PageAllocator<P>) -> Result<()> {
        CountedPage::make_unique(&mut self.now, layout.n_bytes(), pages).map(|_| ())
    }

    /// Returns the state of recurrent layer `index`, for a step of `rows`.
    ///
    /// # Panics
    /// Unless it was [reserved](States::reserve).
    pub fn part(&mut self, layout: &StateLayout, index: usize, rows: TokenSpan) -> StateBatchEntry<'_, P> {
        let page = self.now.as_mut().and_then(Arc::get_mut).expect("states that were reserved");
        let (offset, n_values) = layout.state(index);
        StateBatchEntry { rows, page, offset, n_values }
    }

    /// Takes a snapshot of the states after `len` tokens, with the blocks that it keeps.
    pub fn save_snapshot(&mut self, len: usize, kept: KeptBlocks<P>) {
        if let Some(now) = &self.now {
            self.past.push(Snapshot { len, page: Arc::clone(now), kept });
        }
    }

    /// Returns the length of the youngest snapshot, and the blocks that it keeps.
    pub fn youngest(&self) -> Option<(usize, &KeptBlocks<P>)> {
        self.past.last().map(|snapshot| (snapshot.len, &snapshot.kept))
    }

    /// Lets the youngest snapshot keep these blocks of groups of which it keeps none.
    pub fn keep(&mut self, blocks: KeptBlocks<P>) {
        let Some(snapshot) = self.past.last_mut() else { return };
        for (kept, blocks) in snapshot.kept.iter_mut().zip(blocks).filter(|(kept, _)| kept.is_empty()) {
            *kept = blocks;
        }
    }

    /// Restores the states after `len` tokens from `page`.
    pub fn go_back(&mut self, len: usize, page: Option<Arc<CountedPage<P>>>) {
        self.past.retain(|snapshot| snapshot.len <= len);
        let left = std::mem::replace(&mut self.now, page);
        // Later steps overwrite the restored page, so the replaced one is reused for the next save.
        self.before = self.before.take().and_then(|(_, page)| match &self.now {
            Some(now) if Arc::ptr_eq(now, &page) => left.map(|left| (None, left)),
            _ => Some((None, page)),
        });
    }

    /// Starts with the states after `len` tokens of another sequence.
    pub fn attach_prefix(&mut self, len: usize, page: Arc<CountedPage<P>>, kept: KeptBlocks<P>) {
        self.past.push(Snapshot { len, page: Arc::clone(&page), kept });
        self.now = Some(page);
    }
}
