//! Steps of sequences: each feeds its next tokens and, in decode, verifies draft tokens.

use std::slice;

use kvant_generate::Sequence;
use kvant_generate::decoding::{SampleResult, SamplingError, TokenLogprobs, token_logprobs};
use kvant_generate::speculative::Drafter;

use super::{BatchItem, Session};
use crate::clock::Stopwatch;
use crate::embed::HiddenStatePool;
use crate::error::Error;

/// Maximum tokens per step when all are scored: their logits are held in memory.
const MAX_SCORED_TOKENS: usize = 64;

/// A sequence of a batch, its session, and the tokens to feed.
pub struct SequenceStep<'a> {
    session: &'a mut Session,
    sequence: &'a mut Sequence,
    n: usize,
    pooled: Option<&'a mut HiddenStatePool>,
    result: Option<Result<usize, Error>>,
}

impl<'a> SequenceStep<'a> {
    /// Creates the step that feeds `session` the next `n` tokens of its sequence.
    pub fn new(session: &'a mut Session, sequence: &'a mut Sequence, n: usize) -> Self {
        Self { session, sequence, n, pooled: None, result: None }
    }

    /// Passes the hidden states of the tokens to `pooled`; the step then has no logits.
    pub fn with_pooling(self, pooled: Option<&'a mut HiddenStatePool>) -> Self {
        Self { pooled, ..self }
    }

    /// Returns the rows of the step, draft tokens included, if its tokens have been fed (0 for an
    /// accepted draft token), or the error of a sequence [at fault](Session::isolate_faults).
    /// `None`: a failed step has left some of its tokens.
    pub fn into_result(self) -> Option<Result<usize, Error>> {
        self.result
    }

    /// Returns the input of the step with at most `most` draft tokens.
    fn item(&mut self, most: usize, is_alone: bool) -> BatchItem<'_> {
        let Self { session, sequence, n, pooled, .. } = self;
        let at = session.tokens().len();
        let is_last = at + *n == sequence.tokens().len();
        let most = if is_last { sequence.max_draft_tokens(most) } else { 0 };
        let n_candidates = if is_last { sequence.n_candidates() } else { None };
        let (tokens, drafter) = sequence.drafting();
        let tokens = &tokens[at..at + *n];
        let draft_tokens = match *tokens {
            [token] => session.propose(drafter, token, most, is_alone),
            _ => &[],
        };
        let pooled = pooled.as_deref_mut();
        BatchItem { draft_tokens, pooled, n_candidates, ..BatchItem::new(session, tokens) }
    }

    /// Records the result of a step that was to end at `end` tokens.
    fn record(&mut self, end: usize, is_accepted: bool) {
        if self.session.tokens().len() != end {
            return;
        }
        let n_drafted = if is_accepted { 0 } else { self.session.draft_tokens().len() };
        self.sequence.record_step(is_accepted, n_drafted);
        self.result = Some(Ok(if is_accepted { 0 } else { self.n + n_drafted }));
    }

    /// Records the time of a step that it ran alone.
    fn observe_time(&mut self, started: Stopwatch) {
        let n_rows = self.result.as_ref().and_then(|result| result.as_ref().ok());
        self.sequence.drafting().1.observe_step_time(n_rows.map_or(0, |&n_rows| n_rows), started.elapsed());
    }
}

impl Session {
    /// Feeds the next tokens of several sequences in one pass over the weights, with at most
    /// `draft_max` draft tokens for each that decodes, as long as the batch is small.
    ///
    /// # Errors
    /// As [`Session::step_batch`]; steps with a [result](SequenceStep::into_result) have completed.
    pub fn step_sequences(steps: &mut [SequenceStep<'_>], draft_max: usize) -> Result<(), Error> {
        let started = Stopwatch::start();
        let n_fed: usize = steps.iter().map(|step| step.n).sum();
        let max_rows = steps.first().map_or(0, |step| step.session.model().max_verify_rows());
        let each = max_rows.saturating_sub(n_fed) / steps.len().max(1);
        let is_alone = steps.len() == 1;
        let (mut items, mut ends) = (Vec::with_capacity(steps.len()), Vec::with_capacity(steps.len()));
        for step in &mut *steps {
            let item = step.item(each.min(draft_max), is_alone);
            let is_accepted = matches!(*item.tokens, [token] if item.session.is_drafted(token));
            ends.push((item.session.tokens().len() + item.tokens.len(), is_accepted));
            items.push(item);
        }
        let result = Self::step_batch(&mut items);
        for (step, (end, is_accepted)) in steps.iter_mut().zip(ends) {
            step.record(end, is_accepted);
        }
        if let [step] = steps {
            step.observe_time(started);
        }
        result
    }

    /// Finds the sequences at fault for the `error` of [`Session::step_sequences`]: runs the steps
    /// that it has left one after the other, each with its own error. A single one keeps `error`.
    pub fn isolate_faults(steps: &mut [SequenceStep<'_>], draft_max: usize, error: Error) {
        let mut left: Vec<_> = steps.iter_mut().filter(|step| step.result.is_none()).collect();
        if let [step] = &mut left[..] {
            step.result = Some(Err(error));
            return;
        }
        for step in left {
            if let Err(error) = Self::step_sequences(slice::from_mut(step), draft_max) {
                step.result = Some(Err(error));
            }
        }
    }

    /// Feeds at most `n` of the next tokens of a sequence, which starts here, and appends the
    /// logprobs of the token behind each to `scored`, with the `top` most probable ones. Logprobs
    /// that are there already, from before the session was replaced, are not computed again.
    /// Returns the number of tokens fed.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn score_sequence(
        &mut self,
        sequence: &Sequence,
        n: usize,
        top: usize,
        scored: &mut Vec<TokenLogprobs>,
    ) -> Result<usize, Error> {
        let (at, tokens) = (self.tokens.len(), sequence.tokens());
        let n = n.min(MAX_SCORED_TOKENS).min(self.max_tokens());
        self.feed_scored(&tokens[at..at + n], 0, &mut |row, logits| {
            if let Some(&next) = tokens.get(at + row + 1).filter(|_| scored.len() == at + row) {
                scored.push(token_logprobs(logits, next, top));
            }
        })?;
        Ok(n)
    }

    /// Samples the token that follows this context for a sequence, and appends it there.
    ///
    /// # Errors
    /// As [`Sequence::sample`]; a model without a tokenizer.
    pub fn sample_sequence(&mut self, sequence: &mut Sequence) -> Result<SampleResult, SamplingError<Error>> {
        let model = self.model.clone();
        sequence.sample(self, model.tokenizer().map_err(SamplingError::Source)?)
    }

    /// Feeds the next token of a sequence without waiting for the device, and verifies at most
    /// `draft_max` draft tokens behind it. Returns the rows of the step.
    pub(crate) fn queue_sequence(
        &mut self,
        sequence: &mut Sequence,
        draft_max: usize,
    ) -> Result<usize, Error> {
        let token = sequence.tokens()[self.tokens.len()];
        let (is_accepted, most) = (self.is_drafted(token), sequence.max_draft_tokens(draft_max));
        let draft_tokens = self.propose(sequence.drafting().1, token, most, true);
        let step = self.queue_verify(token, draft_tokens)?;
        sequence.record_step(is_accepted, step.n_draft_tokens);
        Ok(step.n_rows)
    }

    /// Returns at most `most` draft tokens behind `token`; none behind an accepted draft token,
    /// whose successors are computed already.
    fn propose<'d>(
        &mut self,
        drafter: &'d mut Drafter,
        token: u32,
        most: usize,
        is_alone: bool,
    ) -> &'d [u32] {
        if most == 0 || self.is_drafted(token) {
            return &[];
        }
        match is_alone {
            true => self.draft(drafter, token, most),
            // Predictions cost time per sequence, while the batch shares the time of a step.
            false => drafter.draft(&self.tokens, token, most),
        }
    }
}
