//! Worker thread of a model: executes the plan of the [scheduler](crate::scheduler) and sends
//! events to the requests.

mod job;
mod pauses;
mod sequence;
mod step;

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvant::generate::decoding::Finish;
use kvant::{Error, Model, Session, SessionOptions};
use xxhash_rust::xxh3::xxh3_64;

use crate::cache_key::CacheKey;
use crate::events::Blocks;
use crate::idle_sessions::{IdleSession, IdleSessions};
use crate::metrics::Metrics;
use crate::scheduler::{Action, Id, Limits, Memory, Request, Scheduler};
use crate::status::{Progress, Status};
use crate::store::Store;
use crate::transfer::Transfers;
pub(crate) use job::{EVENTS_OF_ANSWER, Event, Job};
use sequence::Sequence;

/// Interval at which paused sequences are polled for free channel capacity.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum age of the published status while the worker is busy.
const STATUS_MAX_AGE: Duration = Duration::from_millis(50);
/// Maximum time that a step waits for token masks: a sequence that needs more is resumed later,
/// without delaying the others.
const MASK_GRACE: Duration = Duration::from_millis(2);

/// Options of a worker.
pub(crate) struct WorkerOptions {
    /// Maximum tokens of a conversation; the training context when `None`.
    pub n_ctx: Option<usize>,
    /// Maximum draft tokens per sequence; the model's own maximum when `None`.
    pub draft_max: Option<usize>,
    /// Limits of the scheduler.
    pub limits: Limits,
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
    transfers: Arc<Transfers>,
    metrics: Arc<Metrics>,
    status: Arc<Mutex<Status>>,
    status_published: Instant,
    /// A step ran out of memory: the scheduler counts blocks, and a cache needs more than those.
    is_short: bool,
}

impl Worker {
    pub fn new(
        model: Model,
        options: WorkerOptions,
        store: Store,
        blocks: Blocks,
        transfers: Arc<Transfers>,
        metrics: Arc<Metrics>,
        status: Arc<Mutex<Status>>,
    ) -> Self {
        let WorkerOptions { n_ctx, draft_max, limits } = options;
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
            transfers,
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
                _ = job.events.try_send(Event::Failed { why: error.to_string(), is_of_request: true });
                return;
            }
        };
        let request = Request {
            owner: xxh3_64(job.owner.as_deref().unwrap_or_default().as_bytes()),
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
                    && sequence.pooled.is_none()
                {
                    self.store.save(&sequence.job.kind, &session);
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
            sequence.load_fetched(&mut session, &self.metrics);
        }
        let n = session.tokens().len();
        if sequence.progress.done == 0 {
            sequence.progress = Progress { cached: n, done: n, ..sequence.progress };
            if sequence.reuses_prefix() {
                self.metrics.looked_up_tokens.inc_by(sequence.text.tokens().len() as u64);
            }
            self.metrics.cached_tokens.inc_by(n as u64);
            if sequence.job.reports_progress {
                sequence.send(Event::Prefilled(sequence.progress));
            }
        }
        sequence.set_session(session, &self.blocks);
        Ok(n)
    }

    /// Snapshots the prefix that `id` has just read, at the point where other prompts diverge from
    /// it.
    fn snapshot_prefix(&mut self, id: Id) {
        if let Some(Sequence { job, session: Some(session), .. }) = self.sequences.get(&id) {
            self.idle.put_branch(job.kind.clone(), session.fork());
        }
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
