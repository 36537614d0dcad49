//! Speculative decoding: verifies draft tokens in one step.
//!
//! Rejected draft tokens are truncated from the cache. Recurrent states cannot be truncated: they
//! return to their values before the step, and the accepted tokens become *uncommitted*: the next
//! step recomputes them before its own. Their logits have been used already.

use kvant_generate::speculative::{Drafter, MAX_DRAFT_TOKENS};
use kvant_model::{Entry, LogitsFor};

use super::Session;
use super::logits::LogitsLoan;
use crate::clock::Stopwatch;
use crate::error::Error;
use crate::runtime::OnDraft;

/// Maximum of rows in a verification step, uncommitted tokens included: the uncommitted tokens
/// after all but the last draft token were accepted, and one more.
const MAX_VERIFY_ROWS: usize = 1 + MAX_DRAFT_TOKENS;

/// The rows of a verification step.
pub(crate) struct DraftStep {
    /// All rows.
    pub n_rows: usize,
    /// Draft tokens among them.
    pub n_draft_tokens: usize,
}

impl Session {
    /// Returns draft tokens behind `next`, the token to be fed now: from prompt lookup or, where
    /// they promise more, from the MTP layer ([`OpenOptions::mtp`](crate::OpenOptions::mtp)), a
    /// [draft model or a draft head](crate::OpenOptions::draft). Returns as many as are worth their
    /// time, at most `max`, often none.
    pub fn draft<'g>(&mut self, drafter: &'g mut Drafter, next: u32, max: usize) -> &'g [u32] {
        drafter.draft_from_lookup(&self.tokens, next);
        if self.predicts() && drafter.should_predict(max) {
            let started = Stopwatch::start();
            let n_vocab = self.model.n_vocab();
            self.predict(next, &mut |token, lead| {
                (token as usize) < n_vocab && drafter.push_prediction(token, lead, max)
            });
            drafter.observe_prediction_time(started.elapsed());
        }
        drafter.draft_tokens(max)
    }

    fn predicts(&self) -> bool {
        self.drafter.is_some() || self.sequence.loaded().properties().has_draft_head
    }

    /// Passes predictions behind `next` to `on_prediction`, one token after the other until it
    /// returns `false`.
    pub(super) fn predict(&mut self, next: u32, on_prediction: OnDraft<'_>) {
        if self.drafter.is_some() {
            return self.with_drafter(|drafter, text| drafter.draft_behind(text, next, on_prediction));
        }
        self.discard_drafts();
        self.sequence.predict(self.tokens.len(), next, on_prediction);
    }

    /// Has the draft model prefill the tokens just fed here, where there were several: a prompt.
    pub(super) fn sync_drafter(&mut self, n_read: usize) {
        if n_read > 1 {
            self.with_drafter(Self::catch_up);
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

    /// Works as [`Session::feed`] of `token` and, in the same step, verifies as many of
    /// `draft_tokens` as cost nothing but their rows: draft tokens that may follow it. While the
    /// tokens fed next equal them, feeding takes no time. The session equals one that was fed
    /// `token` alone, whatever follows.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn verify(&mut self, token: u32, draft_tokens: &[u32]) -> Result<(), Error> {
        self.queue_verify(token, draft_tokens)?;
        self.sequence.loaded().finish()
    }

    /// Works as [`Session::verify`] without waiting for the device.
    pub(crate) fn queue_verify(&mut self, token: u32, draft_tokens: &[u32]) -> Result<DraftStep, Error> {
        if self.accept_draft_tokens(&[token]) == 1 {
            return Ok(DraftStep { n_rows: 0, n_draft_tokens: 0 });
        }
        self.check_capacity(&[token])?;
        let n_owed = self.uncommitted_with(1)?.len();
        let n = self.draft_capacity(draft_tokens.len());
        let mut tokens = [token; MAX_VERIFY_ROWS];
        tokens[..n_owed].copy_from_slice(self.uncommitted());
        tokens[n_owed + 1..][..n].copy_from_slice(&draft_tokens[..n]);
        let n_rows = n_owed + 1 + n;
        self.step(&tokens[..n_rows], LogitsFor::From(n_owed), None)?;
        self.logits_loan = self.logits_loan.take().map(|loan| loan.at(0));
        self.draft_tokens.clear();
        self.draft_tokens.extend_from_slice(&draft_tokens[..n]);
        self.commit_step(&[token]);
        Ok(DraftStep { n_rows, n_draft_tokens: n })
    }

    /// Returns how many of `n` draft tokens the next step may verify behind a token, after
    /// [`Session::uncommitted_with`].
    pub(super) fn draft_capacity(&self, n: usize) -> usize {
        // Each row beyond these costs more.
        let max = n.min(self.model.max_verify_rows().saturating_sub(1 + self.uncommitted().len()));
        match max {
            0 => 0,
            max => self.sequence.reserve_draft(self.uncommitted().len() + 1, max),
        }
    }

    /// Returns the verified draft tokens that have not been fed yet: feeding them takes no step.
    pub fn draft_tokens(&self) -> &[u32] {
        // Discarded draft tokens are not in the cache any more.
        if self.sequence.len() == self.tokens.len() + self.draft_tokens.len() {
            &self.draft_tokens
        } else {
            &[]
        }
    }

    /// Returns whether `token` is the next verified draft token.
    pub fn is_drafted(&self, token: u32) -> bool {
        self.draft_tokens().first() == Some(&token)
    }

    /// Accepts the verified draft tokens that `tokens` begin with; returns how many.
    pub(super) fn accept_draft_tokens(&mut self, tokens: &[u32]) -> usize {
        let n = self.draft_tokens().iter().zip(tokens).take_while(|(ahead, token)| ahead == token).count();
        if n > 0 {
            self.logits_loan = self.logits_loan.take().map(|loan| LogitsLoan::new(loan.logits, loan.row + n));
            self.draft_tokens.drain(..n);
            self.commit_step(&tokens[..n]);
        }
        n
    }

    /// Discards the remaining draft tokens. Fed tokens keep their logits, and become uncommitted
    /// where the cache could not keep them.
    pub(super) fn discard_drafts(&self) {
        if !self.draft_tokens().is_empty() {
            self.sequence.truncate(self.tokens.len());
        }
    }

    /// Returns the uncommitted tokens: the last ones fed that the cache has to recompute.
    pub(super) fn uncommitted(&self) -> &[u32] {
        &self.tokens[self.sequence.len().min(self.tokens.len())..]
    }

    /// Discards draft tokens and returns the uncommitted tokens, to be recomputed in a step with
    /// `n` more. Recomputes them in a step of their own where one step is too small for all.
    pub(super) fn uncommitted_with(&self, n: usize) -> Result<&[u32], Error> {
        self.discard_drafts();
        if self.uncommitted().len() + n > self.sequence.max_step_rows() {
            self.recommit()?;
        }
        Ok(self.uncommitted())
    }

    /// Recomputes the uncommitted tokens, so that the cache holds exactly the fed tokens.
    pub(crate) fn recommit(&self) -> Result<(), Error> {
        self.discard_drafts();
        let owed = self.uncommitted();
        if owed.is_empty() {
            return Ok(());
        }
        let row = self.batch_entry(owed, LogitsFor::None);
        self.sequence.loaded().step(&[row], Entry::Tokens(owed), None, None).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvant_gguf::Gguf;
    use kvant_text::chat::Message;

    use crate::devices::DeviceChoice;
    use crate::model::{Model, OpenOptions};
    use crate::session::SessionOptions;

    /// Draft tokens that are requested behind each token of an answer.
    const N_CHAIN: usize = 3;

    /// Returns how many draft tokens of a head trained for the bundled model (generator:
    /// `tools/reference/train_head.py`) are those of a greedy answer of `n` tokens, by their place.
    fn n_accepted(model: &Model, question: &str, n: usize) -> [usize; N_CHAIN] {
        let mut session = model.session(SessionOptions::default()).unwrap();
        session.feed(&model.chat_prompt(&[Message::user(question)]).unwrap(), &mut |_| true).unwrap();
        let (mut answer, mut chains) = (Vec::new(), Vec::new());
        while answer.len() < n + N_CHAIN {
            let logits = session.logits().unwrap();
            let next =
                (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a }).unwrap() as u32;
            let mut chain = Vec::new();
            session.predict(next, &mut |token, _| {
                chain.push(token);
                chain.len() < N_CHAIN
            });
            session.feed(&[next], &mut |_| true).unwrap();
            answer.push(next);
            chains.push(chain);
        }
        let mut accepted = [0; N_CHAIN];
        for (place, chain) in chains[..n].iter().enumerate() {
            let right = chain.iter().zip(&answer[place + 1..]).take_while(|(a, b)| a == b).count();
            accepted[..right].iter_mut().for_each(|count| *count += 1);
        }
        accepted
    }

    #[test]
    fn a_trained_draft_head_predicts_what_follows() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/heads/pocket-q8_0.gguf");
        let draft = Some(Arc::new(Gguf::open(file).unwrap()));
        let device = DeviceChoice::Cpu.into();
        let model = Model::bundled(OpenOptions { device, n_threads: Some(2), draft, ..Default::default() });
        let model = model.unwrap();
        let n = if model.device().kernels.contains("scalar") { 30 } else { 120 };
        let questions = ["What is the capital of France?", "Count to ten.", "Tell me a story about a cat."];
        let counts = questions.map(|question| n_accepted(&model, question, n));
        let rates: Vec<f32> = (0..N_CHAIN)
            .map(|place| {
                counts.iter().map(|of| of[place]).sum::<usize>() as f32 / (questions.len() * n) as f32
            })
            .collect();
        // Half of what was measured.
        assert!(rates[0] > 0.33 && rates[2] > 0.25, "{rates:?}, {counts:?}");
    }
}
