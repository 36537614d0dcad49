//! Speculative decoding: verifies draft tokens in one step.
//!
//! Rejected draft tokens are truncated from the cache. Recurrent states cannot be truncated: they
//! return to their values before the step, and the accepted tokens become *uncommitted*: the next
//! step recomputes them before its own. Their logits have been used already.

use kvant_model::{Entry, Want};
use kvant_text::guess::{Guesser, MOST_GUESSES};

use super::Session;
use crate::Error;
use crate::clock::Stopwatch;
use crate::runtime::OnPrediction;

/// Maximum of rows in a verification step, uncommitted tokens included: the uncommitted tokens
/// after all but the last draft token were accepted, and one more.
const MOST_ROWS: usize = 1 + MOST_GUESSES;

/// The rows of a verification step.
pub(crate) struct Trial {
    /// All rows.
    pub n_rows: usize,
    /// Draft tokens among them.
    pub n_guesses: usize,
}

impl Session {
    /// Returns draft tokens behind `next`, the token to be fed now: from prompt lookup or, where
    /// they promise more, from the MTP layer ([`OpenOptions::mtp`](crate::OpenOptions::mtp)) or a
    /// [draft model](crate::OpenOptions::draft). Returns as many as are worth their time, at most
    /// `most`, often none.
    pub fn guess<'g>(&mut self, guesser: &'g mut Guesser, next: u32, most: usize) -> &'g [u32] {
        guesser.look_up(&self.tokens, next);
        if self.predicts() && guesser.wants_predictions(most) {
            let started = Stopwatch::start();
            let n_vocab = self.model.n_vocab();
            self.predict(next, &mut |token, lead| {
                (token as usize) < n_vocab && guesser.predicted(token, lead, most)
            });
            guesser.predictions_took(started.elapsed());
        }
        guesser.guesses(most)
    }

    fn predicts(&self) -> bool {
        self.drafter.is_some() || self.sequence.loaded().predicts()
    }

    /// Passes predictions behind `next` to `on_prediction`, one token after the other until it
    /// returns `false`.
    pub(super) fn predict(&mut self, next: u32, on_prediction: OnPrediction<'_>) {
        if self.drafter.is_some() {
            return self.with_drafter(|drafter, text| drafter.predict_behind(text, next, on_prediction));
        }
        self.settle();
        let (loaded, id) = (self.sequence.loaded(), self.sequence.id());
        loaded.predict(id, self.tokens.len(), next, on_prediction);
    }

    /// Has the draft model prefill the tokens just fed here, where there were several: a prompt.
    pub(super) fn be_followed(&mut self, n_read: usize) {
        if n_read > 1 {
            self.with_drafter(Self::follow);
        }
    }

    /// Passes the fed tokens to the draft model, if there is one. It affects speed alone: where its
    /// context is full or memory runs out, the session continues without it.
    fn with_drafter(&mut self, f: impl FnOnce(&mut Self, &[u32]) -> Result<(), Error>) {
        if let Some(drafter) = &mut self.drafter
            && f(drafter, &self.tokens).is_err()
        {
            self.drafter = None;
        }
    }

    /// Works as [`Session::feed`] of `token` and, in the same step, verifies as many of `guesses`
    /// as cost nothing but their rows: draft tokens that may follow it. While the tokens fed next
    /// equal them, feeding takes no time. The session equals one that was fed `token` alone,
    /// whatever follows.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_ahead(&mut self, token: u32, guesses: &[u32]) -> Result<(), Error> {
        self.queue_ahead(token, guesses)?;
        self.sequence.loaded().finish()
    }

    /// Works as [`Session::feed_ahead`] without waiting for the device.
    pub(crate) fn queue_ahead(&mut self, token: u32, guesses: &[u32]) -> Result<Trial, Error> {
        if self.take_ahead(&[token]) == 1 {
            return Ok(Trial { n_rows: 0, n_guesses: 0 });
        }
        self.check_room(&[token])?;
        let n_owed = self.owed_with(1)?.len();
        let n = self.n_on_trial(guesses.len());
        let mut tokens = [token; MOST_ROWS];
        tokens[..n_owed].copy_from_slice(self.owed());
        tokens[n_owed + 1..][..n].copy_from_slice(&guesses[..n]);
        let n_rows = n_owed + 1 + n;
        self.run(&tokens[..n_rows], Want::From(n_owed), None)?;
        self.lent = self.lent.take().map(|(logits, _)| (logits, 0));
        self.ahead.clear();
        self.ahead.extend_from_slice(&guesses[..n]);
        self.stepped(&[token]);
        Ok(Trial { n_rows, n_guesses: n })
    }

    /// Returns how many of `n` draft tokens the next step may verify behind a token, after
    /// [`Session::settle`].
    pub(super) fn n_on_trial(&self, n: usize) -> usize {
        // Each row beyond these costs more.
        let most = n.min(MOST_GUESSES.saturating_sub(self.owed().len()));
        match most {
            0 => 0,
            most => self.sequence.loaded().try_on(self.sequence.id(), self.owed().len() + 1, most),
        }
    }

    /// Returns the verified draft tokens that have not been fed yet: feeding them takes no step.
    pub fn ahead(&self) -> &[u32] {
        // Discarded draft tokens are not in the cache any more.
        if self.sequence.len() == self.tokens.len() + self.ahead.len() { &self.ahead } else { &[] }
    }

    /// Returns whether `token` is the next verified draft token.
    pub fn foresees(&self, token: u32) -> bool {
        self.ahead().first() == Some(&token)
    }

    /// Accepts the verified draft tokens that `tokens` begin with; returns how many.
    pub(super) fn take_ahead(&mut self, tokens: &[u32]) -> usize {
        let n = self.ahead().iter().zip(tokens).take_while(|(ahead, token)| ahead == token).count();
        if n > 0 {
            self.lent = self.lent.take().map(|(logits, row)| (logits, row + n));
            self.ahead.drain(..n);
            self.stepped(&tokens[..n]);
        }
        n
    }

    /// Discards the remaining draft tokens. Fed tokens keep their logits, and become uncommitted
    /// where the cache could not keep them.
    pub(super) fn settle(&self) {
        if !self.ahead().is_empty() {
            self.sequence.loaded().cut(self.sequence.id(), self.tokens.len());
        }
    }

    /// Returns the uncommitted tokens: the last ones fed that the cache has to recompute.
    pub(super) fn owed(&self) -> &[u32] {
        &self.tokens[self.sequence.len().min(self.tokens.len())..]
    }

    /// Discards draft tokens and returns the uncommitted tokens, to be recomputed in a step with
    /// `n` more. Recomputes them in a step of their own where one step is too small for all.
    pub(super) fn owed_with(&self, n: usize) -> Result<&[u32], Error> {
        self.settle();
        if self.owed().len() + n > self.sequence.most_rows() {
            self.repay()?;
        }
        Ok(self.owed())
    }

    /// Recomputes the uncommitted tokens, so that the cache holds exactly the fed tokens.
    pub(crate) fn repay(&self) -> Result<(), Error> {
        self.settle();
        let owed = self.owed();
        if owed.is_empty() {
            return Ok(());
        }
        let row = self.step_row(owed, Want::Nothing);
        self.sequence.loaded().step(&[row], Entry::Tokens(owed), None, None).map(|_| ())
    }
}
