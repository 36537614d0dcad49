//! What recurrent layers keep: states that every token changes, so that a way back is a copy of them and not a cut.

use std::sync::Arc;

use kvant_backend::{Held, Page, Pages, Result, Rows, StatePart};

use crate::layout::StateLayout;

/// The states of all recurrent layers of a sequence: one allocation, and copies of it after earlier tokens.
#[derive(Debug)]
pub(crate) struct States<P: Page> {
    /// `None` before the first token, when all values are zero.
    now: Option<Arc<Held<P>>>,
    /// Snapshots, each after how many tokens, oldest first.
    past: Vec<(usize, Arc<Held<P>>)>,
}

impl<P: Page> Default for States<P> {
    fn default() -> Self {
        Self { now: None, past: Vec::new() }
    }
}

impl<P: Page> Clone for States<P> {
    fn clone(&self) -> Self {
        Self { now: self.now.clone(), past: self.past.clone() }
    }
}

impl<P: Page> States<P> {
    /// The states as they are.
    pub fn now(&self) -> Option<&Arc<Held<P>>> {
        self.now.as_ref()
    }

    /// The snapshot after `len` tokens.
    pub fn after(&self, len: usize) -> Option<&Arc<Held<P>>> {
        let index = self.past.binary_search_by_key(&len, |(at, _)| *at).ok()?;
        Some(&self.past[index].1)
    }

    /// The places that there are snapshots of, youngest first.
    pub fn places(&self) -> impl Iterator<Item = usize> {
        self.past.iter().rev().map(|(at, _)| *at)
    }

    /// Whether the youngest snapshot is the states as they are, not copied yet.
    pub fn is_remembered(&self) -> bool {
        self.now.as_ref().zip(self.past.last()).is_some_and(|(now, (_, past))| Arc::ptr_eq(now, past))
    }

    /// Every allocation, that of the states as they are first.
    pub fn pages(&self) -> impl Iterator<Item = &Arc<Held<P>>> {
        self.now.iter().chain(self.past.iter().map(|(_, page)| page))
    }

    /// Makes the states ones that nobody else has, to be changed by a step.
    pub fn reserve(&mut self, layout: &StateLayout, pages: &dyn Pages<P>) -> Result<()> {
        Held::own(&mut self.now, layout.n_bytes(), pages).map(|_| ())
    }

    /// The state of recurrent layer `index`, for a step of `rows`.
    ///
    /// # Panics
    /// Unless it was [reserved](States::reserve).
    pub fn part(&mut self, layout: &StateLayout, index: usize, rows: Rows) -> StatePart<'_, P> {
        let page = self.now.as_mut().and_then(Arc::get_mut).expect("states that were reserved");
        let (offset, n_values) = layout.state(index);
        StatePart { rows, page, offset, n_values }
    }

    /// Remembers the states as they are after `len` tokens, where that is a place for it.
    pub fn commit(&mut self, layout: &StateLayout, len: usize) {
        if let Some(now) = self.now.as_ref().filter(|_| layout.until_snapshot(len) == layout.every()) {
            self.past.push((len, Arc::clone(now)));
        }
    }

    /// Goes back to the states after `len` tokens, which are `page`.
    pub fn go_back(&mut self, len: usize, page: Option<Arc<Held<P>>>) {
        self.past.retain(|(at, _)| *at <= len);
        self.now = page;
    }

    /// Begins with the states after `len` tokens of another sequence.
    pub fn attach(&mut self, len: usize, page: Arc<Held<P>>) {
        self.past.push((len, Arc::clone(&page)));
        self.now = Some(page);
    }
}
