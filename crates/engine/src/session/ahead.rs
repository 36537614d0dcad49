//! Tokens that are read on trial, before it is known that they come next.

use kvant_model::Want;
use kvant_text::guess::MOST_GUESSES;

use super::Session;
use crate::Error;

impl Session {
    /// [`Session::feed`] of `token` and, in the same step, of as many of `guesses` as cost nothing but their rows: tokens that may come after it.
    /// As long as they are what is fed next, they have been read already and feeding them takes no time. The session is as if it had been fed
    /// `token` alone, whatever comes next.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_ahead(&mut self, token: u32, guesses: &[u32]) -> Result<(), Error> {
        self.queue_ahead(token, guesses)?;
        self.sequence.loaded().finish()
    }

    /// [`Session::feed_ahead`] that need not be done when this returns. Gives the guesses that were read.
    pub(crate) fn queue_ahead(&mut self, token: u32, guesses: &[u32]) -> Result<usize, Error> {
        if self.take_ahead(&[token]) == 1 {
            return Ok(0);
        }
        self.check_room(&[token])?;
        self.settle();
        let n = self.sequence.loaded().most_on_trial(self.sequence.id(), guesses.len().min(MOST_GUESSES));
        let mut tokens = [token; 1 + MOST_GUESSES];
        tokens[1..=n].copy_from_slice(&guesses[..n]);
        self.run(&tokens[..=n], Want::From(0), None)?;
        self.lent = self.lent.take().map(|(logits, _)| (logits, 0));
        self.ahead.clear();
        self.ahead.extend_from_slice(&guesses[..n]);
        self.stepped(&[token]);
        Ok(n)
    }

    /// The tokens that were read on trial and have not been fed since: feeding them takes no step.
    pub fn ahead(&self) -> &[u32] {
        // What was given back is not there any more.
        if self.sequence.len() == self.tokens.len() + self.ahead.len() { &self.ahead } else { &[] }
    }

    /// Whether `token` was read on trial to come next.
    pub fn foresees(&self, token: u32) -> bool {
        self.ahead().first() == Some(&token)
    }

    /// Feeds as many of `tokens` as were read on trial; returns how many.
    pub(super) fn take_ahead(&mut self, tokens: &[u32]) -> usize {
        let n = self.ahead().iter().zip(tokens).take_while(|(ahead, token)| ahead == token).count();
        if n > 0 {
            self.lent = self.lent.take().map(|(logits, row)| (logits, row + n));
            self.ahead.drain(..n);
            self.stepped(&tokens[..n]);
        }
        n
    }

    /// Gives back what was read on trial. What has been fed keeps its logits.
    pub(super) fn settle(&self) {
        if !self.ahead().is_empty() {
            let left = self.sequence.loaded().cut(self.sequence.id(), self.tokens.len());
            debug_assert_eq!(left, self.tokens.len(), "what is on trial can be cut off");
        }
    }
}
