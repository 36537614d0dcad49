//! Pictures that a session has been shown, and where its tokens are then.

use std::sync::Arc;

use kvant_model::{Place, Want};

use super::Session;
use crate::runtime::StepRow;

impl Session {
    /// Whether a picture is among its tokens.
    pub fn holds_pictures(&self) -> bool {
        self.tokens.iter().any(|&token| self.sequence.loaded().extra().is_extra(token))
    }

    /// Keeps the rows of pictures among `tokens`.
    pub(super) fn keep_shown(&mut self, tokens: &[u32]) {
        // What is gone already, nobody can keep.
        for rows in self.sequence.loaded().extra().of(tokens).unwrap_or_default() {
            if !self.shown.iter().any(|shown| Arc::ptr_eq(shown, &rows)) {
                self.shown.push(rows);
            }
        }
    }

    /// Rows of it in a step that reads `tokens` after what its cache holds. What they show has been [kept](Self::keep_shown).
    pub(super) fn step_row(&self, tokens: &[u32], want: Want) -> StepRow {
        StepRow { places: self.places(tokens), ..self.sequence.step_row(tokens.len(), want) }
    }

    /// Where `tokens` are, where that is not behind each other: a picture lies in a plane, and what follows it comes after its longer side.
    fn places(&self, tokens: &[u32]) -> Option<Arc<[Place]>> {
        let has_axes = self.model.config().ropes.iter().any(|rope| rope.has_axes());
        if self.shown.is_empty() || !has_axes {
            return None;
        }
        let (n_read, extra) = (self.sequence.len(), self.sequence.loaded().extra());
        let read = self.tokens.iter().chain(&self.ahead).take(n_read).chain(tokens);
        let (mut next, mut first) = (0, 0);
        let mut place = |&token: &u32| {
            let shown =
                extra.is_extra(token).then(|| self.shown.iter().find(|rows| rows.tokens().contains(&token)));
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
        let places: Vec<Place> = read.map(&mut place).collect();
        Some(places[n_read..].into())
    }
}
