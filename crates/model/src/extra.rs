//! Tokens that no vocabulary has: rows that enter a model in the place of those of its embedding, such as the parts of a picture.
//!
//! They have numbers from the size of the vocabulary on. So whatever knows tokens by their numbers (caches that share a beginning, sessions that
//! read some again) knows these as well: the same number is the same row for as long as the model is loaded.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::Place;

/// What becomes tokens.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Given {
    /// Rows `[n, n_embd]` and then, as many, what is added to them behind each of the first layers.
    pub rows: Vec<Vec<f32>>,
    /// Rows of a line, where they lie in a plane, line by line.
    pub columns: Option<usize>,
}

/// Rows `[n, n_embd]`, and the numbers they are fed by.
pub struct ExtraRows {
    tokens: Range<u32>,
    n_embd: usize,
    given: Given,
}

impl ExtraRows {
    /// Where token `token` of them lies, if they lie in a plane whose first is at `first`; and where what follows all of them is.
    pub fn place(&self, token: u32, first: u32) -> Option<(Place, u32)> {
        let columns = u32::try_from(self.given.columns?).ok()?;
        let at = token.checked_sub(self.tokens.start).filter(|_| token < self.tokens.end)?;
        let lines = (self.tokens.end - self.tokens.start).div_ceil(columns);
        Some(([first, first + at / columns, first + at % columns], first + lines.max(columns)))
    }

    /// The numbers of the rows.
    pub fn tokens(&self) -> Range<u32> {
        self.tokens.clone()
    }

    /// Bytes in memory.
    pub fn n_bytes(&self) -> usize {
        self.given.rows.iter().map(|rows| size_of_val(&rows[..])).sum()
    }

    /// Behind how many of the first layers something is added to them.
    pub(crate) fn depth(&self) -> usize {
        self.given.rows.len() - 1
    }

    /// The rows of some of its tokens or, with `depth`, what is added to them behind that many layers.
    pub(crate) fn of(&self, tokens: Range<u32>, depth: usize) -> &[f32] {
        let [start, end] =
            [tokens.start, tokens.end].map(|token| (token - self.tokens.start) as usize * self.n_embd);
        &self.given.rows[depth][start..end]
    }
}

impl std::fmt::Debug for ExtraRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ExtraRows {{ tokens: {:?} }}", self.tokens)
    }
}

/// Those of a model: whoever has the rows keeps them alive, and the numbers are known for as long.
pub struct ExtraTokens {
    n_embd: usize,
    n_vocab: usize,
    state: Mutex<State>,
}

struct State {
    /// No number from this on has been given.
    next: u32,
    /// By the first of their numbers.
    alive: BTreeMap<u32, Weak<ExtraRows>>,
}

impl ExtraTokens {
    /// None yet, for a model whose embedding has rows `[n_vocab, n_embd]`.
    pub(crate) fn new(n_vocab: usize, n_embd: usize) -> Self {
        let state = State { next: u32::try_from(n_vocab).unwrap_or(u32::MAX), alive: BTreeMap::new() };
        Self { n_embd, n_vocab, state: Mutex::new(state) }
    }

    /// Whether a token is one of these, if it is any.
    pub fn is_extra(&self, token: u32) -> bool {
        token as usize >= self.n_vocab
    }

    /// Takes rows, under numbers that nothing has had or, with `again`, under those that the same rows have had before. `None` when
    /// all numbers have been given: four billion rows, more than a year of a tower's work.
    ///
    /// # Panics
    /// When the values are no whole rows, or not as many each time, or the columns none, or the numbers those of something else.
    pub fn add(&self, given: Given, again: Option<u32>) -> Option<Arc<ExtraRows>> {
        let len = given.rows[0].len();
        let is_whole = len.is_multiple_of(self.n_embd) && given.rows.iter().all(|rows| rows.len() == len);
        assert!(is_whole && given.columns != Some(0), "{len} values of rows of {}", self.n_embd);
        let n = u32::try_from(len / self.n_embd).ok()?;
        let mut state = self.state();
        let first = match again {
            Some(first) => first,
            None => {
                let end = state.next.checked_add(n)?;
                std::mem::replace(&mut state.next, end)
            }
        };
        assert!(self.is_extra(first) && first + n <= state.next, "numbers that have been given");
        let rows = Arc::new(ExtraRows { tokens: first..first + n, n_embd: self.n_embd, given });
        state.alive.retain(|_, rows| rows.strong_count() > 0);
        state.alive.insert(first, Arc::downgrade(&rows));
        Some(rows)
    }

    /// What the extra ones among `tokens` belong to, each once; the first token that belongs to nothing that is alive.
    ///
    /// # Errors
    /// That token.
    pub fn of(&self, tokens: &[u32]) -> Result<Vec<Arc<ExtraRows>>, u32> {
        let mut found: Vec<Arc<ExtraRows>> = Vec::new();
        for &token in tokens.iter().filter(|&&token| self.is_extra(token)) {
            if found.iter().any(|rows| rows.tokens.contains(&token)) {
                continue;
            }
            let rows = self.state().alive.range(..=token).next_back().and_then(|(_, rows)| rows.upgrade());
            found.push(rows.filter(|rows| rows.tokens.contains(&token)).ok_or(token)?);
        }
        Ok(found)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The runs of extra tokens among `tokens`, as `(index of the first, its rows)`, of what [`ExtraTokens::of`] has found; with `depth`, of those to
/// which something is added behind so many layers, and that.
pub(crate) fn runs<'a>(
    tokens: &'a [u32],
    found: &'a [Arc<ExtraRows>],
    depth: usize,
) -> impl Iterator<Item = (usize, &'a [f32])> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let holder =
            |token: &u32| found.iter().find(|rows| rows.tokens.contains(token) && depth <= rows.depth());
        let (first, rows) = (at..tokens.len()).find_map(|i| Some((i, holder(&tokens[i])?)))?;
        let token = tokens[first];
        let of_run =
            tokens[first..].iter().zip(token..rows.tokens.end).take_while(|(a, b)| **a == *b).count();
        at = first + of_run;
        Some((first, rows.of(token..token + of_run as u32, depth)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_by_their_numbers_for_as_long_as_somebody_has_them() {
        let extra = ExtraTokens::new(100, 2);
        let rows = |n: usize| Given { rows: vec![(0..2 * n).map(|x| x as f32).collect()], columns: None };
        let (a, b) = (extra.add(rows(3), None).unwrap(), extra.add(rows(2), None).unwrap());
        assert_eq!((a.tokens(), b.tokens()), (100..103, 103..105));
        let text = [1, 101, 102, 7, 103, 104, 100, 99];
        let found = extra.of(&text).unwrap();
        assert_eq!(found.iter().map(|rows| rows.tokens()).collect::<Vec<_>>(), [100..103, 103..105]);
        let of_text: Vec<_> = runs(&text, &found, 0).collect();
        assert_eq!(of_text, [(1, &[2.0, 3.0, 4.0, 5.0][..]), (4, &[0.0, 1.0, 2.0, 3.0]), (6, &[0.0, 1.0])]);
        drop((a, found));
        assert_eq!(extra.of(&text).unwrap_err(), 101);
        assert_eq!(extra.of(&[5, 104]).unwrap().len(), 1);
        assert_eq!(extra.of(&[105]).unwrap_err(), 105);
        // The same rows come again under their numbers.
        let a = extra.add(rows(3), Some(100)).unwrap();
        assert_eq!(extra.of(&text).unwrap()[0].tokens(), a.tokens());
        assert_eq!(extra.add(rows(1), None).unwrap().tokens(), 105..106);
        assert!(extra.of(&[0, 99]).unwrap().is_empty());
    }

    #[test]
    fn numbers_end() {
        let extra = ExtraTokens::new(u32::MAX as usize - 2, 1);
        let rows = |n: usize| Given { rows: vec![vec![0.0; n]], columns: None };
        assert!(extra.add(rows(3), None).is_none());
        assert!(extra.add(rows(2), None).is_some() && extra.add(rows(1), None).is_none());
    }
}
