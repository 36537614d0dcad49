//! Steps of a batch: feeds its sequences, then samples a token for each that has read its prompt.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvant::generate::decoding::{Finish, SampleResult, SamplingError};
use kvant::{Error, GuardReport, SampleError, SequenceStep, Session};

use super::job::Event;
use super::sequence::Sequence;
use super::{MASK_GRACE, STATUS_MAX_AGE, Worker};
use crate::scheduler::Id;
use crate::trace;

/// Sequence of a step and its planned tokens; the rows it took, or its error, if it has completed.
struct Stepped {
    id: Id,
    n: usize,
    result: Option<Result<usize, Error>>,
}

/// Reports whether the request is the cause of an error.
fn is_of_request(error: &SamplingError<Error>) -> bool {
    matches!(
        error,
        SamplingError::Constraint(_) | SamplingError::Source(Error::Sample(SampleError::NoCandidate))
    )
}

impl Worker {
    /// Runs a step of these sequences, each with so many tokens.
    pub(super) fn step(&mut self, rows: &[(Id, usize)]) {
        let started = Instant::now();
        let was_short = std::mem::take(&mut self.is_short);
        let is_scored = |id: &Id| self.sequences.get(id).is_some_and(|sequence| sequence.scores().is_some());
        let (scored, together): (Vec<_>, Vec<_>) = rows.iter().copied().partition(|(id, _)| is_scored(id));
        let mut stepped = self.feed(&together, was_short);
        stepped.extend(scored.into_iter().filter_map(|(id, n)| self.score(id, n)));
        let (mut ran, mut n_rows) = (Vec::with_capacity(rows.len()), 0);
        for Stepped { id, n, result } in stepped {
            match result {
                Some(Ok(rows)) => {
                    n_rows += rows;
                    ran.push((id, n));
                }
                Some(Err(error)) if was_short || !error.is_out_of_memory() => self.fail(id, &error),
                // Memory ran out: an eviction precedes the next step.
                unfed => {
                    self.is_short |= unfed.is_some();
                    self.resync(id);
                }
            }
        }
        let took = if n_rows > 0 { started.elapsed() } else { Duration::ZERO };
        self.scheduler.ran(&ran, took);
        let until = Instant::now() + MASK_GRACE;
        for &(id, n) in &ran {
            if self.scheduler.takes_snapshot(id, self.memory()) {
                self.snapshot_prefix(id);
            }
            self.advance(id, n, until);
        }
        self.metrics.steps.inc();
        self.report_guard();
        if self.status_published.elapsed() > STATUS_MAX_AGE {
            self.publish_status();
        }
    }

    /// Publishes what the guard of the caches found.
    fn report_guard(&self) {
        let Some(guard) = self.model.kv_guard() else { return };
        let GuardReport { samples, broken } = guard.take_report();
        for sample in samples {
            tracing::debug!(%sample, "KV guard");
            self.metrics.guard_error.observe(sample.error);
            self.metrics.guard_noise.observe(sample.noise_ratio());
        }
        for head in broken {
            tracing::warn!("KV guard: {head}: its keys need more bits");
            self.metrics.guard_broken.inc();
        }
    }

    /// Feeds the tokens of several sequences in one batch. If memory runs out, requests an
    /// eviction; if that has been tried already or the error is another one, finds the sequences at
    /// fault.
    fn feed(&mut self, rows: &[(Id, usize)], was_short: bool) -> Vec<Stepped> {
        let n_of: BTreeMap<Id, usize> = rows.iter().copied().collect();
        let (mut ids, mut steps) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for (&id, sequence) in &mut self.sequences {
            let Some(&n) = n_of.get(&id) else { continue };
            let step = sequence.step(n);
            ids.extend(step.is_some().then_some(id));
            steps.extend(step);
        }
        match Session::step_sequences(&mut steps, self.draft_max) {
            Ok(()) => {}
            Err(error) if error.is_out_of_memory() && !was_short => self.is_short = true,
            Err(error) => Session::isolate_faults(&mut steps, self.draft_max, error),
        }
        let results = steps.into_iter().map(SequenceStep::into_result);
        let mut results: BTreeMap<Id, _> = ids.into_iter().zip(results).collect();
        let in_order = |&(id, n): &(Id, usize)| Some(Stepped { id, n, result: results.remove(&id)? });
        rows.iter().filter_map(in_order).collect()
    }

    /// Feeds prompt tokens of a sequence whose logprobs are requested.
    fn score(&mut self, id: Id, n: usize) -> Option<Stepped> {
        let sequence = self.sequences.get_mut(&id)?;
        let top = sequence.scores()?;
        let result = sequence.score(n, top);
        Some(Stepped { id, n: result.as_ref().map_or(n, |&n| n), result: Some(result) })
    }

    /// Resynchronizes the scheduler: a failed step may have fed some tokens of a sequence, and a
    /// split model may have taken some back.
    fn resync(&mut self, id: Id) {
        let session = self.sequences.get(&id).and_then(|sequence| sequence.session.as_ref());
        self.scheduler.resumed(id, session.map_or(0, |session| session.tokens().len()));
    }

    /// Advances a sequence that was fed `n` tokens: reports progress or, at the end of its tokens,
    /// samples the next one. If the token mask is not ready by `until`, the sequence is paused and
    /// the others proceed.
    pub(super) fn advance(&mut self, id: Id, n: usize, until: Instant) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.publish_blocks();
        let read = sequence.session.as_ref().map_or(0, |session| session.tokens().len());
        if sequence.first_token_at.is_none() {
            self.metrics.prompt_tokens.inc_by(n as u64);
            sequence.progress.done = read;
            sequence.progress.took = sequence.submitted.elapsed();
            if sequence.job.reports_progress {
                sequence.send(Event::Prefilled(sequence.progress));
            }
        }
        if read < sequence.text.tokens().len() {
            return;
        }
        if let Some(pooled) = sequence.pooled.take() {
            sequence.send(Event::Pooled(pooled));
            return self.end(id, Finish::Stop);
        }
        if !sequence.text.decoder_mut().is_ready(until.saturating_duration_since(Instant::now())) {
            return self.await_mask(id, true);
        }
        let others = if sequence.first_token_at.is_none() { 1..sequence.job.n } else { 0..0 };
        if sequence.first_token_at.is_none()
            && let Some(session) = &mut sequence.session
        {
            // Another answer to the same prompt starts here.
            session.set_checkpoint();
            if sequence.job.prompt_logprobs.is_some() {
                let answers = sequence.job.first..sequence.job.first + sequence.job.n;
                sequence.send(Event::Scored(answers, sequence.scored.as_slice().into()));
            }
        }
        for index in others {
            self.fork(id, index);
        }
        self.sample(id, None);
    }

    /// Adds one more answer to a prompt that has just been read.
    fn fork(&mut self, of: Id, index: usize) {
        let Some(id) = self.scheduler.fork(of) else { return };
        let Some(first) = self.sequences.get(&of) else { return };
        let mut sequence = Sequence::new(Arc::clone(&first.job), index);
        (sequence.submitted, sequence.progress) = (first.submitted, first.progress);
        if let Some(session) = first.session.as_ref().filter(|_| !self.scheduler.is_preempted(id)) {
            sequence.set_session(session.fork(), &self.blocks);
        }
        self.sequences.insert(id, sequence);
        self.sample(id, Some(of));
    }

    /// Samples a token for `id`, from the logits of `from` if `id` has read no token of its own
    /// yet.
    fn sample(&mut self, id: Id, from: Option<Id>) {
        let Some(mut sequence) = self.sequences.remove(&id) else { return };
        if sequence.job.answer.max_tokens == 0 {
            self.sequences.insert(id, sequence);
            return self.end(id, Finish::Length);
        }
        let now = Instant::now();
        let reader = match from {
            Some(from) => self.sequences.get_mut(&from).and_then(|from| from.session.as_mut()),
            None => sequence.session.as_mut(),
        };
        let sampled = reader.map(|session| (session.sample_sequence(&mut sequence.text), session.n_ctx()));
        let mut ended = None;
        match sampled {
            Some((Ok(SampleResult::Token(output, finish)), n_ctx)) => {
                self.record_latency(&mut sequence, now);
                sequence.send(Event::Token(sequence.index, output));
                ended = finish.or((sequence.text.tokens().len() > n_ctx).then_some(Finish::Length));
            }
            Some((Ok(SampleResult::End), _)) => ended = Some(Finish::Stop),
            Some((Err(error), _)) => {
                self.sequences.insert(id, sequence);
                return self.fail_for(id, &error, is_of_request(&error));
            }
            None => {}
        }
        self.sequences.insert(id, sequence);
        if let Some(finish) = ended {
            self.end(id, finish);
        }
    }

    fn record_latency(&self, sequence: &mut Sequence, now: Instant) {
        self.metrics.generated_tokens.inc();
        if sequence.first_token_at.is_none() {
            sequence.first_token_at = Some(now);
            self.metrics.first_token.observe((now - sequence.submitted).as_secs_f64());
        } else {
            self.metrics.next_token.observe((now - sequence.last_token_at).as_secs_f64());
        }
        sequence.last_token_at = now;
    }

    pub(super) fn end(&mut self, id: Id, finish: Finish) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            let rest = sequence.text.decoder_mut().finish();
            let (times, first) =
                (sequence.times(), sequence.first_token_at.map(|at| at - sequence.submitted));
            trace::ended(&sequence.span, finish, &times, first.map(|first| first.as_secs_f64()));
            // Before the last event: who has the answer finds it counted, and its cache for a
            // decode worker.
            if let (Some(cache), Some(session)) = (&sequence.job.keeps, &sequence.session) {
                self.transfers.kept.keep(cache.clone(), &sequence.job.kind, session);
            }
            self.metrics.finished.inc();
            self.metrics.whole_answer.observe(sequence.submitted.elapsed().as_secs_f64());
            sequence.send(Event::Ended(sequence.index, finish, rest, times));
        }
        self.retire(id);
    }

    pub(super) fn fail(&mut self, id: Id, error: &dyn std::fmt::Display) {
        self.fail_for(id, error, false);
    }

    /// Ends a sequence with an error, of the request or internal.
    fn fail_for(&mut self, id: Id, error: &dyn std::fmt::Display, is_of_request: bool) {
        if let Some(sequence) = self.sequences.remove(&id) {
            match is_of_request {
                true => tracing::warn!(%error, id = %sequence.job.id, "a request cannot be answered"),
                false => tracing::error!(%error, id = %sequence.job.id, "a request failed"),
            }
            trace::failed(&sequence.span);
            sequence.send(Event::Failed { why: error.to_string(), is_of_request });
        }
        self.scheduler.remove(id);
    }
}
