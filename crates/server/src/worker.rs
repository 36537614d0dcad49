//! Worker thread of a model: executes the plan of the [scheduler](crate::scheduler) and sends
//! events to the requests.

mod pauses;
mod sequence;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvant::generate::constraint::Constraints;
use kvant::{EncodedImage, Error, HiddenStatePool, Model, SampleError, Session, SessionOptions};
use tokio::sync::mpsc::Sender;
use xxhash_rust::xxh3::xxh3_64;

use crate::cache_key::CacheKey;
use crate::events::Blocks;
use crate::idle_sessions::{IdleSession, IdleSessions};
use crate::metrics::Metrics;
use crate::scheduler::{Action, Id, Limits, Memory, Refusal, Request, Scheduler};
pub(crate) use crate::status::{AnswerStats, Progress, Status};
use crate::store::Store;
use crate::trace::{self, Trace};
use kvant::generate::decoding::{
    DecodingOptions, FinalOutput, Finish, SampleResult, SamplingError, TokenLogprobs, TokenOutput,
};
use sequence::Sequence;

/// Interval at which paused sequences are polled for free channel capacity.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum age of the published status while the worker is busy.
const STATUS_MAX_AGE: Duration = Duration::from_millis(50);
/// Maximum time that a step waits for token masks: a sequence that needs more is resumed later,
/// without delaying the others.
const MASK_GRACE: Duration = Duration::from_millis(2);

/// Maximum events of an answer between two checks of its channel: prompt read, prompt scored, token
/// generated, answer ended.
pub(crate) const EVENTS_OF_ANSWER: usize = 4;

/// Request for answers to one prompt.
pub(crate) struct Job {
    pub prompt: Arc<[u32]>,
    pub kind: CacheKey,
    /// Number of answers, and the index of the first one.
    pub n: usize,
    pub first: usize,
    /// Answers of all jobs that share the event channel.
    pub n_answers: usize,
    pub answer: Arc<DecodingOptions>,
    /// Images of the prompt.
    #[expect(dead_code, reason = "their embeddings must live as long as the prompt may be read again")]
    pub images: Vec<EncodedImage>,
    /// Constraints of the answers.
    pub guides: Constraints,
    /// Whether to report prefill progress.
    pub reports_progress: bool,
    /// Number of top logprobs per prompt token, if prompt logprobs are requested.
    pub prompt_logprobs: Option<usize>,
    /// Pooling of the prompt's hidden states, for an embedding instead of answers.
    pub pooled: Option<HiddenStatePool>,
    /// Request id in the log.
    pub id: Arc<str>,
    pub trace: Trace,
    pub events: Sender<Event>,
}

/// Event of a job. The first one is [`Event::Taken`] or a refusal.
#[derive(Debug)]
pub(crate) enum Event {
    /// The job is accepted.
    Accepted,
    /// The job is refused.
    Refused(Refusal),
    /// Prefill progress.
    Prefilled(Progress),
    /// Logprobs of all prompt tokens but the first, for these answers.
    Scored(Range<usize>, Arc<[TokenLogprobs]>),
    /// Pooled hidden states of the prompt, if requested.
    Pooled(HiddenStatePool),
    /// Token of the answer at this index.
    Token(usize, TokenOutput),
    /// End of an answer, with the text that had been withheld.
    Ended(usize, Finish, FinalOutput, AnswerStats),
    /// End of all answers: the request is invalid, or an internal error occurred.
    Failed { why: String, is_of_request: bool },
}

/// Result of feeding a batch.
struct BatchResult {
    /// Sequences whose tokens were all fed.
    read: Vec<Id>,
    /// Tokens that went through the model, draft tokens included.
    n_rows: usize,
    result: Result<(), Error>,
}

/// Reports whether the request is the cause of an error.
fn is_of_request(error: &SamplingError<Error>) -> bool {
    matches!(
        error,
        SamplingError::Constraint(_) | SamplingError::Source(Error::Sample(SampleError::NoCandidate))
    )
}

/// Worker thread of a model.
pub(crate) struct Worker {
    model: Model,
    n_ctx: Option<usize>,
    /// Maximum draft tokens per sequence.
    draft_max: usize,
    scheduler: Scheduler,
    sequences: BTreeMap<Id, Sequence>,
    idle: IdleSessions,
    /// Offload tier for conversations that exceed the memory.
    store: Store,
    blocks: Blocks,
    metrics: Arc<Metrics>,
    status: Arc<Mutex<Status>>,
    status_published: Instant,
    /// A step ran out of memory: the scheduler counts blocks, and a cache needs more than those.
    is_short: bool,
}

impl Worker {
    pub fn new(
        model: Model,
        (n_ctx, draft_max): (Option<usize>, Option<usize>),
        limits: Limits,
        (store, blocks): (Store, Blocks),
        (metrics, status): (Arc<Metrics>, Arc<Mutex<Status>>),
    ) -> Self {
        model.set_kv_budget(limits.budget);
        let draft_max = draft_max.unwrap_or_else(|| model.max_draft_tokens());
        Self {
            model,
            n_ctx,
            draft_max,
            scheduler: Scheduler::new(limits),
            sequences: BTreeMap::new(),
            idle: IdleSessions::new(blocks.clone()),
            store,
            blocks,
            metrics,
            status,
            status_published: Instant::now(),
            is_short: false,
        }
    }

    /// Runs until all job senders are dropped and all jobs are done.
    pub fn run(mut self, jobs: &Receiver<Job>) {
        let mut is_open = true;
        loop {
            while is_open {
                match jobs.try_recv() {
                    Ok(job) => self.submit(job),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => is_open = false,
                }
            }
            self.drop_disconnected();
            let awaits_masks = self.resume_ready();
            self.blocks.publish();
            let act = self.scheduler.next(self.memory());
            if act != Action::Wait {
                self.act(act);
                continue;
            }
            self.publish_status();
            match (self.sequences.is_empty(), is_open) {
                (true, false) => return self.flush_to_disk(),
                (true, true) => match jobs.recv() {
                    Ok(job) => self.submit(job),
                    Err(_) => is_open = false,
                },
                (false, _) => {
                    match jobs.recv_timeout(if awaits_masks { MASK_GRACE } else { POLL_INTERVAL }) {
                        Ok(job) => self.submit(job),
                        Err(RecvTimeoutError::Disconnected) => std::thread::sleep(POLL_INTERVAL),
                        Err(RecvTimeoutError::Timeout) => {}
                    }
                }
            }
        }
    }

    fn memory(&self) -> Memory {
        let free = self.scheduler.limits().budget.saturating_sub(self.model.kv_bytes());
        Memory { free, can_evict: !self.idle.is_empty(), is_short: self.is_short }
    }

    fn submit(&mut self, job: Job) {
        // When one of several jobs is refused, the others are cancelled with it.
        if job.events.is_closed() {
            return;
        }
        let cost = match job.kind.spec.cost(&self.model) {
            Ok(cost) => cost,
            Err(error) => {
                let failed = Event::Failed { why: error.to_string(), is_of_request: true };
                _ = job.events.try_send(failed);
                return;
            }
        };
        let request = Request {
            owner: xxh3_64(job.kind.owner.as_deref().unwrap_or_default().as_bytes()),
            n_prompt: job.prompt.len(),
            prompt: Arc::clone(&job.prompt),
            n_shared: sequence::shared(&job).len(),
            blocks: sequence::blocks(&job),
            cost,
        };
        match self.scheduler.submit(request) {
            Ok(id) => {
                let sequence = Sequence::new(Arc::new(job), 0);
                sequence.send(Event::Accepted);
                self.sequences.insert(id, sequence);
            }
            Err(refusal) => {
                self.metrics.refused.inc();
                _ = job.events.try_send(Event::Refused(refusal));
            }
        }
    }

    fn act(&mut self, act: Action) {
        match act {
            Action::Evict => {
                self.is_short = false;
                if let Some(idle) = self.idle.evict() {
                    self.offload_idle(&idle);
                }
            }
            Action::Admit(id) => match self.begin(id) {
                Ok(n) => self.scheduler.began(id, n),
                Err(error) => self.fail(id, &error),
            },
            Action::Resume(id) => match self.begin(id) {
                Ok(n) => self.scheduler.resumed(id, n),
                Err(error) => self.fail(id, &error),
            },
            Action::Preempt(id) => {
                self.is_short = false;
                self.metrics.preempted.inc();
                // If it cannot be offloaded, its tokens suffice to recompute it.
                self.await_mask(id, false);
                if let Some(sequence) = self.sequences.get_mut(&id)
                    && let Some(session) = sequence.take_session()
                {
                    let kind = sequence.job.kind.clone();
                    if sequence.pooled.is_none() {
                        self.store.save(&kind, &session);
                    }
                }
            }
            Action::End(id) => {
                self.is_short = false;
                self.end(id, Finish::Length);
            }
            Action::Run(rows) => self.step(&rows),
            Action::Wait => {}
        }
    }

    /// Assigns a session with the longest cached prefix to a sequence. Returns the number of cached
    /// tokens.
    fn begin(&mut self, id: Id) -> Result<usize, Error> {
        let Some(sequence) = self.sequences.get_mut(&id) else { return Ok(0) };
        let CacheKey { spec: stored, owner } = sequence.job.kind.clone();
        let options = SessionOptions { n_ctx: self.n_ctx, kv: stored.options.clone() };
        let mut session = self.model.session(options)?.with_cache_salt(owner);
        if let Some(lora_scales) = &stored.lora_scales {
            session = session.with_lora_scales(lora_scales)?;
        }
        if sequence.reuses_prefix() {
            let attached = session.attach_prefix(sequence.text.tokens());
            self.scheduler.branch(id, self.idle.common(&sequence.job.kind, sequence.text.tokens()));
            if let Some(idle) = self.idle.take(&sequence.job.kind, sequence.text.tokens(), attached) {
                session = idle;
            }
            self.store.load(&mut session, &sequence.job.kind, sequence.text.tokens());
        }
        let n = session.tokens().len();
        if sequence.progress.done == 0 {
            sequence.progress = Progress { cached: n, done: n, ..sequence.progress };
            self.metrics.cached_tokens.inc_by(n as u64);
            if sequence.job.reports_progress {
                sequence.send(Event::Prefilled(sequence.progress));
            }
        }
        sequence.set_session(session, &self.blocks);
        Ok(n)
    }

    fn step(&mut self, rows: &[(Id, usize)]) {
        let started = Instant::now();
        let is_scored = |id: &Id| self.sequences.get(id).is_some_and(|sequence| sequence.scores().is_some());
        let (scored, together): (Vec<_>, Vec<_>) = rows.iter().copied().partition(|(id, _)| is_scored(id));
        let was_short = std::mem::take(&mut self.is_short);
        let mut ran = Vec::with_capacity(rows.len());
        let BatchResult { read, mut n_rows, result } = self.feed(&together);
        if let [(id, _)] = together[..]
            && let Some(sequence) = self.sequences.get_mut(&id)
        {
            sequence.text.drafting().1.observe_step_time(n_rows, started.elapsed());
        }
        // Of several steps some may have completed.
        let (read, left): (Vec<_>, Vec<_>) = together.into_iter().partition(|(id, _)| read.contains(id));
        ran.extend(read);
        if let Err(error) = result {
            ran.extend(self.recover_from_failed_step(&left, was_short, &error));
        }
        for (id, n) in scored {
            let Some(sequence) = self.sequences.get_mut(&id) else { continue };
            match sequence.scores().map_or(Ok(0), |top| sequence.score(n, top)) {
                Ok(n) => {
                    n_rows += n;
                    ran.push((id, n));
                }
                Err(error) => ran.extend(self.recover_from_failed_step(&[(id, n)], was_short, &error)),
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
        if self.status_published.elapsed() > STATUS_MAX_AGE {
            self.publish_status();
        }
    }

    /// Snapshots the prefix that `id` has just read, at the point where other prompts diverge from
    /// it.
    fn snapshot_prefix(&mut self, id: Id) {
        if let Some(Sequence { job, session: Some(session), .. }) = self.sequences.get(&id) {
            self.idle.put_branch(job.kind.clone(), session.fork());
        }
    }

    /// Feeds the tokens of several sequences in one batch.
    fn feed(&mut self, rows: &[(Id, usize)]) -> BatchResult {
        let n_of: BTreeMap<Id, usize> = rows.iter().copied().collect();
        let (mut ids, mut steps) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for (&id, sequence) in &mut self.sequences {
            let step = n_of.get(&id).and_then(|&n| sequence.step(n));
            ids.extend(step.is_some().then_some(id));
            steps.extend(step);
        }
        let result = Session::step_sequences(&mut steps, self.draft_max);
        let read = ids.into_iter().zip(&steps).filter_map(|(id, step)| Some((id, step.n_rows()?)));
        let (read, n_rows): (Vec<Id>, Vec<usize>) = read.unzip();
        BatchResult { read, n_rows: n_rows.iter().sum(), result }
    }

    /// Recovers from a failed step: requests an eviction if memory ran out and, if that has been
    /// tried already or the error is another one, ends the sequences at fault. To find those among
    /// several, it feeds one sequence after the other. Returns the tokens that were fed.
    fn recover_from_failed_step(
        &mut self,
        rows: &[(Id, usize)],
        was_short: bool,
        error: &Error,
    ) -> Vec<(Id, usize)> {
        if error.is_out_of_memory() && !was_short {
            self.is_short = true;
            rows.iter().for_each(|&(id, _)| self.resync(id));
            return Vec::new();
        }
        if let &[(id, _)] = rows {
            self.fail(id, error);
            return Vec::new();
        }
        let mut read_alone = rows.to_vec();
        read_alone.retain(|&(id, n)| match self.feed(&[(id, n)]) {
            BatchResult { result: Err(error), .. } => {
                self.fail(id, &error);
                false
            }
            BatchResult { read, .. } if read.is_empty() => {
                self.resync(id);
                false
            }
            _ => true,
        });
        read_alone
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
    fn advance(&mut self, id: Id, n: usize, until: Instant) {
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
        let mut drawn = None;
        {
            let reader = match from {
                Some(from) => self.sequences.get_mut(&from).and_then(|from| from.session.as_mut()),
                None => sequence.session.as_mut(),
            };
            if let Some(session) = reader {
                let n_ctx = session.n_ctx();
                let model = session.model().clone();
                let tokenizer = model.tokenizer().map_err(SamplingError::Source);
                let sampled = tokenizer.and_then(|tokenizer| sequence.text.sample(session, tokenizer));
                drawn = Some((sampled, n_ctx));
            }
        }
        let mut ended = None;
        match drawn {
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

    fn end(&mut self, id: Id, finish: Finish) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            let rest = sequence.text.decoder_mut().finish();
            let (times, first) =
                (sequence.times(), sequence.first_token_at.map(|at| at - sequence.submitted));
            trace::ended(&sequence.span, finish, &times, first.map(|first| first.as_secs_f64()));
            sequence.send(Event::Ended(sequence.index, finish, rest, times));
            self.metrics.finished.inc();
            self.metrics.whole_answer.observe(sequence.submitted.elapsed().as_secs_f64());
        }
        self.retire(id);
    }

    fn fail(&mut self, id: Id, error: &dyn std::fmt::Display) {
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

    /// Removes a sequence; its session becomes idle if a later request may continue it.
    fn retire(&mut self, id: Id) {
        self.scheduler.remove(id);
        if let Some(Sequence { job, session: Some(session), .. }) = self.sequences.remove(&id)
            && job.pooled.is_none()
        {
            self.idle.put(job.kind.clone(), session);
        }
    }

    /// Copies at branch points are not saved: other sessions hold the same tokens.
    fn offload_idle(&mut self, idle: &IdleSession) {
        if !idle.is_branch {
            self.store.save(&idle.kind, &idle.session);
        }
    }

    /// Saves idle and offloaded sessions for the next start.
    fn flush_to_disk(&mut self) {
        self.store.flush_to_disk();
        while let Some(idle) = self.idle.evict() {
            self.offload_idle(&idle);
        }
    }

    fn publish_status(&mut self) {
        self.status_published = Instant::now();
        let running =
            || self.sequences.values().filter_map(|sequence| sequence.session.as_ref()).map(Session::kv);
        let idle = || self.idle.sessions().map(Session::kv);
        let status = Status {
            counts: self.scheduler.counts(),
            idle: self.idle.len(),
            kv_bytes: self.model.kv_bytes(),
            running_bytes: running().map(|kv| kv.bytes).sum(),
            idle_bytes: idle().map(|kv| kv.bytes).sum(),
            tokens: running().map(|kv| kv.tokens).sum(),
            running_bytes_f16: running().map(|kv| kv.bytes_f16).sum(),
            idle_bytes_f16: idle().map(|kv| kv.bytes_f16).sum(),
            budget: self.scheduler.limits().budget,
            store: self.store.in_use(),
        };
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }
}

#[cfg(test)]
mod tests;
