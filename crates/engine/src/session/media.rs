//! Images and audio of a session, and what a step needs to know of its tokens: their M-RoPE
//! positions, and those before them.

use std::sync::Arc;

use kvant_model::{LogitsFor, Position};

use super::Session;
use crate::runtime::BatchEntry;

impl Session {
    /// Returns whether the context has soft tokens of images or audio.
    pub fn has_media(&self) -> bool {
        self.tokens.iter().any(|&token| self.sequence.loaded().properties().soft_tokens.is_soft(token))
    }

    /// Retains the rows of soft tokens among `tokens`.
    pub(super) fn keep_media(&mut self, tokens: &[u32]) {
        // Freed rows cannot be retained.
        for rows in self.sequence.loaded().properties().soft_tokens.of(tokens).unwrap_or_default() {
            if !self.media.iter().any(|shown| Arc::ptr_eq(shown, &rows)) {
                self.media.push(rows);
            }
        }
    }

    /// Describes a step over `tokens` behind the cached ones. The rows of their soft tokens
    /// must have been [retained](Self::keep_media).
    pub(super) fn batch_entry(&self, tokens: &[u32], want: LogitsFor) -> BatchEntry {
        let (positions, tokens_before) = (self.positions(tokens), self.tokens_before());
        BatchEntry { positions, tokens_before, ..self.sequence.step_row(tokens.len(), want) }
    }

    /// Returns the last cached tokens, as many as n-grams of the next one read.
    fn tokens_before(&self) -> Arc<[u32]> {
        let Some(ngrams) = &self.model.config().ngrams else { return Arc::default() };
        let (n_read, n) = (self.sequence.len(), ngrams.n_before());
        let read = self.tokens.iter().chain(&self.draft_tokens).take(n_read);
        read.skip(n_read.saturating_sub(n)).copied().collect()
    }

    /// Returns the M-RoPE positions of `tokens`, and of those before them with which they complete
    /// pooled keys, or `None` where they are consecutive: the positions of an image span a plane,
    /// and the text after it continues behind its longer side. Those of audio are consecutive.
    fn positions(&self, tokens: &[u32]) -> Option<Arc<[Position]>> {
        let ropes = &self.model.config().ropes;
        let has_axes = ropes.iter().any(|rope| rope.has_axes());
        if self.media.is_empty() || !has_axes {
            return None;
        }
        let (n_read, extra) = (self.sequence.len(), &self.sequence.loaded().properties().soft_tokens);
        let read = self.tokens.iter().chain(&self.draft_tokens).take(n_read).chain(tokens);
        let (mut next, mut first) = (0, 0);
        let mut place = |&token: &u32| {
            let shown =
                extra.is_soft(token).then(|| self.media.iter().find(|rows| rows.tokens().contains(&token)));
            if let Some(rows) = shown.flatten() {
                if token == rows.tokens().start {
                    first = next;
                }
                if let Some((place, after)) = rows.place(token, first) {
                    next = after;
                    return place;
                }
            }
            next += 1;
            [next - 1; 3]
        };
        let places: Vec<Position> = read.map(&mut place).collect();
        let n_before = ropes.iter().map(|rope| rope.stride() - 1).max().unwrap_or(0);
        Some(places[n_read.saturating_sub(n_before)..].into())
    }
}
