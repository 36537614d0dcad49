//! Soft tokens: embedding rows that enter a model in place of those of its vocabulary, such as the
//! patches of an image.
//!
//! Their ids start at the vocabulary size. Components that identify tokens by id (prefix caches,
//! sessions that prefill again) thus handle soft tokens unchanged: an id denotes the same row for
//! as long as the model is loaded.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::Position;

/// Values of new soft tokens.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct EmbeddingInput {
    /// Embedding rows `[n, n_embd]`, followed by as many rows to add after each of the first layers
    /// (DeepStack).
    pub rows: Vec<Vec<f32>>,
    /// Width of the grid, for rows of an image in row-major order.
    pub columns: Option<usize>,
}

/// Embedding rows `[n, n_embd]` and their token ids.
pub struct EmbeddingRows {
    tokens: Range<u32>,
    n_embd: usize,
    given: EmbeddingInput,
}

impl EmbeddingRows {
    /// Returns the M-RoPE position of token `token`, for rows in a grid whose first position is
    /// `first`; and the position after the whole grid.
    pub fn place(&self, token: u32, first: u32) -> Option<(Position, u32)> {
        let columns = u32::try_from(self.given.columns?).ok()?;
        let at = token.checked_sub(self.tokens.start).filter(|_| token < self.tokens.end)?;
        let lines = (self.tokens.end - self.tokens.start).div_ceil(columns);
        Some(([first, first + at / columns, first + at % columns], first + lines.max(columns)))
    }

    /// Returns the token ids of the rows.
    pub fn tokens(&self) -> Range<u32> {
        self.tokens.clone()
    }

    /// Returns the bytes in memory.
    pub fn n_bytes(&self) -> usize {
        self.given.rows.iter().map(|rows| size_of_val(&rows[..])).sum()
    }

    /// Returns the number of first layers after which rows are added.
    pub(crate) fn depth(&self) -> usize {
        self.given.rows.len() - 1
    }

    /// Returns the embedding rows of some of its tokens or, with `depth`, the rows to add after
    /// that many layers.
    pub(crate) fn of(&self, tokens: Range<u32>, depth: usize) -> &[f32] {
        let [start, end] =
            [tokens.start, tokens.end].map(|token| (token - self.tokens.start) as usize * self.n_embd);
        &self.given.rows[depth][start..end]
    }
}

impl std::fmt::Debug for EmbeddingRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ExtraRows {{ tokens: {:?} }}", self.tokens)
    }
}

/// The soft tokens of a model. Holders of [`EmbeddingRows`] keep the rows alive, and their ids are
/// valid for as long.
pub struct SoftTokens {
    n_embd: usize,
    n_vocab: usize,
    state: Mutex<State>,
}

struct State {
    /// The next unused id.
    next: u32,
    /// Live rows, by their first id.
    alive: BTreeMap<u32, Weak<EmbeddingRows>>,
}

impl SoftTokens {
    /// Creates an empty set, for a model whose embedding has rows `[n_vocab, n_embd]`.
    pub fn new(n_vocab: usize, n_embd: usize) -> Self {
        let state = State { next: u32::try_from(n_vocab).unwrap_or(u32::MAX), alive: BTreeMap::new() };
        Self { n_embd, n_vocab, state: Mutex::new(state) }
    }

    /// Returns whether an id denotes a soft token, live or not.
    pub fn is_soft(&self, token: u32) -> bool {
        token as usize >= self.n_vocab
    }

    /// Adds rows, under new ids or, with `again`, under the ids that the same rows had before.
    /// `None` when all ids are used: four billion rows, more than a year of image encoding.
    ///
    /// # Panics
    ///
    /// When the values are not whole rows, or not equally many per layer, or `columns` is 0, or
    /// `again` has not been assigned before.
    pub fn add(&self, given: EmbeddingInput, again: Option<u32>) -> Option<Arc<EmbeddingRows>> {
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
        assert!(self.is_soft(first) && first + n <= state.next, "numbers that have been given");
        let rows = Arc::new(EmbeddingRows { tokens: first..first + n, n_embd: self.n_embd, given });
        state.alive.retain(|_, rows| rows.strong_count() > 0);
        state.alive.insert(first, Arc::downgrade(&rows));
        Some(rows)
    }

    /// Returns the rows of the soft tokens among `tokens`, each once.
    ///
    /// # Errors
    ///
    /// The first soft token without live rows.
    pub fn of(&self, tokens: &[u32]) -> Result<Vec<Arc<EmbeddingRows>>, u32> {
        let mut found: Vec<Arc<EmbeddingRows>> = Vec::new();
        for &token in tokens.iter().filter(|&&token| self.is_soft(token)) {
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

/// Returns the runs of soft tokens among `tokens`, as `(index of the first, its rows)`, from the
/// result of [`SoftTokens::of`]; with `depth`, the runs with rows to add after that many layers,
/// and these rows.
pub(crate) fn runs<'a>(
    tokens: &'a [u32],
    found: &'a [Arc<EmbeddingRows>],
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
    fn rows_are_found_by_id_while_they_are_alive() {
        let extra = SoftTokens::new(100, 2);
        let rows =
            |n: usize| EmbeddingInput { rows: vec![(0..2 * n).map(|x| x as f32).collect()], columns: None };
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
        // The same rows return under their ids.
        let a = extra.add(rows(3), Some(100)).unwrap();
        assert_eq!(extra.of(&text).unwrap()[0].tokens(), a.tokens());
        assert_eq!(extra.add(rows(1), None).unwrap().tokens(), 105..106);
        assert!(extra.of(&[0, 99]).unwrap().is_empty());
    }

    #[test]
    fn soft_token_ids_are_bounded() {
        let extra = SoftTokens::new(u32::MAX as usize - 2, 1);
        let rows = |n: usize| EmbeddingInput { rows: vec![vec![0.0; n]], columns: None };
        assert!(extra.add(rows(3), None).is_none());
        assert!(extra.add(rows(2), None).is_some() && extra.add(rows(1), None).is_none());
    }
}
