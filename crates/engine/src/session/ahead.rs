//! Tokens that are read on trial, before it is known that they come next.
//!
//! What turns out wrong is cut off the cache. States cannot be cut: they go back to where they were before the step, and the tokens that
//! did come are *owed* to the cache until the next step, which reads them again before its own. Their logits have been seen.

use kvant_model::{Entry, Want};
use kvant_text::guess::{Guesser, MOST_GUESSES};

use super::Session;
use crate::Error;
use crate::clock::Stopwatch;
use crate::runtime::OnPrediction;

/// The most rows of a step with guesses, what is owed among them: as much as is owed when all but the last comes true, and one more.
const MOST_ROWS: usize = 1 + MOST_GUESSES;

/// What a step with guesses read.
pub(crate) struct Trial {
    /// Rows of it.
    pub n_rows: usize,
    /// Guesses among them.
    pub n_guesses: usize,
}

impl Session {
    /// What may come behind `next`, which is to be fed now: what the text has said before or, where they promise more, predictions of a layer that the
    /// model has for that ([`OpenOptions::mtp`](crate::OpenOptions::mtp)) or of a [draft model](crate::OpenOptions::draft). As many tokens as pay,
    /// `most` at most, often none.
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

    /// Tells what may come behind `next`, one token after the other as long as `on_prediction` likes.
    pub(super) fn predict(&mut self, next: u32, on_prediction: OnPrediction<'_>) {
        if self.drafter.is_some() {
            return self.with_drafter(|drafter, text| drafter.predict_behind(text, next, on_prediction));
        }
        self.settle();
        let (loaded, id) = (self.sequence.loaded(), self.sequence.id());
        loaded.predict(id, self.tokens.len(), next, on_prediction);
    }

    /// Has what drafts for this session read what has just been read here, where it was more than a token: a prompt.
    pub(super) fn be_followed(&mut self, n_read: usize) {
        if n_read > 1 {
            self.with_drafter(Self::follow);
        }
    }

    /// Hands what drafts for this session, if anything does, the tokens that were fed. It changes the time that an answer takes and nothing
    /// else: where its context is full or there is no memory for it, this goes on without.
    fn with_drafter(&mut self, f: impl FnOnce(&mut Self, &[u32]) -> Result<(), Error>) {
        if let Some(drafter) = &mut self.drafter
            && f(drafter, &self.tokens).is_err()
        {
            self.drafter = None;
        }
    }

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

    /// [`Session::feed_ahead`] that need not be done when this returns.
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

    /// How many of `n` guesses the next step may read behind a token, once this is [settled](Session::settle).
    pub(super) fn n_on_trial(&self, n: usize) -> usize {
        // Beyond so many rows each costs more.
        let most = n.min(MOST_GUESSES.saturating_sub(self.owed().len()));
        match most {
            0 => 0,
            most => self.sequence.loaded().try_on(self.sequence.id(), self.owed().len() + 1, most),
        }
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

    /// Gives back what was read on trial. What has been fed keeps its logits, and is owed to the cache where that could not keep it.
    pub(super) fn settle(&self) {
        if !self.ahead().is_empty() {
            self.sequence.loaded().cut(self.sequence.id(), self.tokens.len());
        }
    }

    /// The last tokens that were fed, as far as the cache has to read them again.
    pub(super) fn owed(&self) -> &[u32] {
        &self.tokens[self.sequence.len().min(self.tokens.len())..]
    }

    /// [Settles](Session::settle); what is owed then and left to be read in a step with `n` more tokens: it is read by itself where a step does
    /// not take as many.
    pub(super) fn owed_with(&self, n: usize) -> Result<&[u32], Error> {
        self.settle();
        if self.owed().len() + n > self.sequence.most_rows() {
            self.repay()?;
        }
        Ok(self.owed())
    }

    /// Has the cache read what is owed to it, so that it holds what has been fed and nothing else.
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
