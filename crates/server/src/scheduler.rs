//! Scheduler: a state machine without model, clock or threads that plans admission, prefill, decode
//! and preemption.
//!
//! A *sequence* is queued, prefills, decodes, and may be preempted when memory runs out.
//! [`Scheduler::next`] returns one action at a time; the caller executes it and reports the result.
//! Invariants:
//!
//! - Every decoding sequence runs in every step. Prefill tokens join the batch as long as the
//!   inter-token latency stays below [`GAP`] times its value without them.
//! - Owners (API keys) share batch tokens evenly: the next prompt is one of the owner that has
//!   received the fewest so far (fair queueing by virtual time). Among an owner's prompts the one
//!   with the fewest tokens left comes first, and in one step of [`OLDEST_EVERY`] the oldest: a
//!   short prompt waits for a fraction of its own time at any speed, and a long one does not
//!   starve.
//! - A prompt whose prefix another sequence is just reading waits and reuses that prefix. The
//!   reader stops where the prompts diverge (a *branch*), so that a snapshot can be taken there:
//!   blocks alone can be reused at few positions.
//! - Running slots and memory are shared evenly among competing owners ([`shares`]); a single owner
//!   may use everything.
//! - A sequence is admitted only if its whole prompt and one block fit beside the future needs of
//!   the running sequences. When a running sequence needs more memory than is free, idle sessions
//!   are evicted first, then the youngest sequence is preempted. Preempted sequences resume before
//!   new ones are admitted.

mod shares;
mod step_times;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use shares::Shares;
use step_times::Pace;

/// Maximum average factor by which prefill may lengthen a step in which sequences decode.
const MAX_ITL_RATIO: f64 = 2.0;
/// The same when each other owner has [`MANY`] or more decoding sequences: a single key with many
/// of them would leave another owner's prompts very little time.
const MAX_ITL_RATIO_OF_MANY: f64 = 4.0;
const CROWDED_SEQUENCES: usize = 8;
/// An owner's oldest prompt comes first in one step of so many, the shortest in the others.
const OLDEST_EVERY: u64 = 4;

/// Sequence number, in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub u64);

/// Limits of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum running sequences.
    pub n_running: usize,
    /// Maximum queued sequences.
    pub n_waiting: usize,
    /// Maximum owners.
    pub n_owners: usize,
    /// Maximum batch tokens of a step.
    pub n_rows: usize,
    /// Tokens of a block.
    pub block: usize,
    /// Minimum tokens of a shared prefix that are worth a wait or a snapshot.
    pub min_shared_tokens: usize,
    /// Bytes for all caches.
    pub budget: usize,
}

/// Size of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of a cache that is not empty, without its blocks.
    pub fixed: usize,
    /// Bytes of each block.
    pub block: usize,
}

/// Request to run a sequence.
#[derive(Debug, Clone)]
pub struct Request {
    /// Owner.
    pub owner: u64,
    /// Length of the prompt, at least one token.
    pub n_prompt: usize,
    /// Tokens of the prompt.
    pub prompt: Arc<[u32]>,
    /// Number of prompt tokens that may come from the prefix cache; excludes the last one.
    pub n_shared: usize,
    /// Hash of each whole block of these tokens, including all blocks before it.
    pub blocks: Arc<[u64]>,
    /// Size of its cache.
    pub cost: Cost,
}

/// Reason why a sequence is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue is full.
    #[error("{waiting} requests are waiting already")]
    Full {
        /// Queued sequences.
        waiting: usize,
        /// Seconds until a retry is worthwhile.
        retry_after: u64,
    },
    /// The prompt exceeds the budget for caches.
    #[error("the cache of this prompt would take {needed} bytes, all caches together may take {budget}")]
    TooLarge {
        /// Bytes of its cache.
        needed: usize,
        /// Bytes for all caches.
        budget: usize,
    },
}

/// Next action of the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Evict an idle session, then call [`Scheduler::next`] again.
    Evict,
    /// Create a session for this sequence from the longest cached prefix and report
    /// [`Scheduler::began`].
    Admit(Id),
    /// Preempt this sequence: release its memory. The client observes only a delay.
    Preempt(Id),
    /// Restore this sequence and report [`Scheduler::resumed`].
    Resume(Id),
    /// End this sequence: it fills all memory.
    End(Id),
    /// Run so many tokens of each sequence and report [`Scheduler::ran`].
    Run(Vec<(Id, usize)>),
    /// Wait for a sequence to arrive, leave or be unpaused.
    Wait,
}

/// State of the memory for caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Free bytes.
    pub free: usize,
    /// Whether idle sessions can be evicted.
    pub can_evict: bool,
    /// A step ran out of memory regardless of the accounting.
    pub is_short: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Prefill,
    Decode,
    Preempted,
}

#[derive(Debug)]
struct Sequence {
    request: Request,
    stage: Stage,
    /// Tokens in its cache; for a preempted sequence, those to restore.
    n_tokens: usize,
    /// Paused, by backpressure of its client or a missing token mask.
    paused: bool,
    /// Positions where other prompts diverge from this one.
    branches: BTreeSet<usize>,
    /// Tokens of the snapshot taken for it.
    snapshot_tokens: usize,
}

impl Sequence {
    fn new(request: Request) -> Self {
        let branches = BTreeSet::new();
        Self { request, stage: Stage::Waiting, n_tokens: 0, paused: false, branches, snapshot_tokens: 0 }
    }

    /// Records that another prompt diverges at `at`. Of two positions closer than `worth`, the
    /// first is retained.
    fn branch(&mut self, at: usize, worth: usize) {
        if at < worth || self.branches.range(at - (worth - 1)..=at).next().is_some() {
            return;
        }
        if let Some(&later) = self.branches.range(at..at + worth).next() {
            self.branches.remove(&later);
        }
        self.branches.insert(at);
    }

    /// Returns the number of prompt tokens until its end or the next branch.
    fn tokens_to_branch(&self) -> usize {
        let branch = self.branches.range(self.n_tokens + 1..).next();
        self.left().min(branch.map_or(usize::MAX, |at| at - self.n_tokens))
    }

    fn is_running(&self) -> bool {
        matches!(self.stage, Stage::Prefill | Stage::Decode)
    }

    fn left(&self) -> usize {
        self.request.n_prompt - self.n_tokens.min(self.request.n_prompt)
    }

    fn bytes(&self, n_tokens: usize, block: usize) -> usize {
        let Cost { fixed, block: each } = self.request.cost;
        if n_tokens == 0 { 0 } else { fixed + n_tokens.div_ceil(block) * each }
    }

    /// Returns the bytes needed, beyond those of `n_tokens`, to read the prompt and generate one
    /// token, or to generate the next token.
    fn needs(&self, n_tokens: usize, block: usize) -> usize {
        let until = n_tokens.max(self.request.n_prompt) + 1;
        self.bytes(until, block) - self.bytes(n_tokens, block)
    }
}

/// Number of sequences per stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Queued sequences.
    pub waiting: usize,
    /// Sequences in prefill.
    pub prefill: usize,
    /// Sequences in decode.
    pub decode: usize,
    /// Preempted sequences.
    pub preempted: usize,
}

impl std::ops::Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            waiting: self.waiting + other.waiting,
            prefill: self.prefill + other.prefill,
            decode: self.decode + other.decode,
            preempted: self.preempted + other.preempted,
        }
    }
}

/// Scheduler of a worker. See the [module](self).
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    sequences: BTreeMap<Id, Sequence>,
    next_id: u64,
    owners: HashMap<u64, Owner>,
    pace: Pace,
}

/// Service that an owner has received.
#[derive(Debug, Clone, Copy, Default)]
struct Owner {
    /// Batch tokens; starts at the minimum of all owners.
    n_rows: u64,
    /// Steps with prefill of its prompts.
    n_steps: u64,
    /// Admitted sequences.
    n_begun: u64,
}

impl Scheduler {
    /// Creates a scheduler without sequences.
    pub fn new(limits: Limits) -> Self {
        Self { limits, sequences: BTreeMap::new(), next_id: 0, owners: HashMap::new(), pace: Pace::default() }
    }

    /// Returns the limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the number of sequences per stage.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for sequence in self.sequences.values() {
            *match sequence.stage {
                Stage::Waiting => &mut counts.waiting,
                Stage::Prefill => &mut counts.prefill,
                Stage::Decode => &mut counts.decode,
                Stage::Preempted => &mut counts.preempted,
            } += 1;
        }
        counts
    }

    /// Queues a sequence.
    ///
    /// # Errors
    /// [`Refusal`]: the sequence is then not queued.
    pub fn submit(&mut self, request: Request) -> Result<Id, Refusal> {
        let mut sequence = Sequence::new(request);
        let needed = sequence.needs(0, self.limits.block);
        if needed > self.limits.budget {
            return Err(Refusal::TooLarge { needed, budget: self.limits.budget });
        }
        let waiting = self.counts().waiting;
        if !self.may_wait(sequence.request.owner) {
            return Err(Refusal::Full { waiting, retry_after: self.retry_after() });
        }
        self.register_owner(sequence.request.owner);
        let Limits { block, min_shared_tokens: worth, .. } = self.limits;
        let begins = |stage| matches!(stage, Stage::Waiting | Stage::Prefill);
        for other in self.sequences.values_mut().filter(|other| begins(other.stage)) {
            let at = cacheable_prompt(&sequence.request, &other.request, block);
            sequence.branch(at, worth);
            other.branch(at, worth);
        }
        Ok(self.insert(sequence))
    }

    /// Estimates the seconds until the queued prompts have been read.
    fn retry_after(&self) -> u64 {
        let rows: usize = self.sequences.values().map(Sequence::left).sum();
        (rows as f64 * self.pace.row.get().unwrap_or(1e-3)).ceil().clamp(1.0, 600.0) as u64
    }

    /// Registers an owner. A new owner starts at the minimum of the others, so that idle time earns
    /// no credit.
    fn register_owner(&mut self, owner: u64) {
        let is_here = |owner: u64| self.sequences.values().any(|sequence| sequence.request.owner == owner);
        if is_here(owner) {
            return;
        }
        self.owners.retain(|&owner, _| self.sequences.values().any(|other| other.request.owner == owner));
        let n_rows = self.owners.values().map(|owner| owner.n_rows).min().unwrap_or(0);
        self.owners.insert(owner, Owner { n_rows, ..Owner::default() });
    }

    fn insert(&mut self, sequence: Sequence) -> Id {
        let id = Id(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, sequence);
        id
    }

    /// Adds a sequence that continues at the state of the decoding sequence `of`; preempted until a
    /// running slot is free. `None` unless `of` decodes.
    pub fn fork(&mut self, of: Id) -> Option<Id> {
        let of = self.sequences.get(&of).filter(|of| of.stage == Stage::Decode)?;
        let has_place = self.running().count() < self.limits.n_running;
        let stage = if has_place { Stage::Decode } else { Stage::Preempted };
        let fork = Sequence::new(of.request.clone());
        Some(self.insert(Sequence { stage, n_tokens: of.n_tokens, ..fork }))
    }

    /// Reports whether a sequence is preempted.
    pub fn is_preempted(&self, id: Id) -> bool {
        self.sequences.get(&id).is_some_and(|sequence| sequence.stage == Stage::Preempted)
    }

    /// Removes a sequence that is finished or cancelled. Returns whether it existed.
    pub fn remove(&mut self, id: Id) -> bool {
        self.sequences.remove(&id).is_some()
    }

    /// Pauses or resumes a sequence.
    pub fn pause(&mut self, id: Id, paused: bool) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.paused = paused;
        }
    }

    /// Records that a cached conversation diverges from the prompt of `id` at `at`.
    pub fn branch(&mut self, id: Id, at: usize) {
        let worth = self.limits.min_shared_tokens;
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.branch(at.min(sequence.request.n_shared), worth);
        }
    }

    /// Reports whether `id` has just reached a branch of its prompt and memory suffices for a
    /// snapshot, which the caller then takes.
    pub fn takes_snapshot(&mut self, id: Id, memory: Memory) -> bool {
        let Some(sequence) = self.sequences.get(&id) else { return false };
        let (at, cost) = (sequence.n_tokens, sequence.request.cost);
        let is_branch = sequence.stage == Stage::Prefill && sequence.branches.contains(&at);
        if !is_branch || self.needs() + cost.fixed + cost.block > memory.free {
            return false;
        }
        let request = sequence.request.clone();
        for other in self.sequences.values_mut().filter(|other| other.stage == Stage::Waiting) {
            if cacheable_prompt(&request, &other.request, self.limits.block) >= at {
                other.snapshot_tokens = other.snapshot_tokens.max(at);
            }
        }
        true
    }

    /// Reports the admission of a sequence with `n_tokens` cached tokens.
    pub fn began(&mut self, id: Id, n_tokens: usize) {
        if let Some(sequence) = self.sequences.get(&id) {
            self.owners.entry(sequence.request.owner).or_default().n_begun += 1;
        }
        self.enter(id, Stage::Prefill, n_tokens);
    }

    /// Reports the return of a preempted sequence with `n_tokens` cached tokens; the missing ones
    /// are read again.
    pub fn resumed(&mut self, id: Id, n_tokens: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        // The tokens it had read and generated become its prompt.
        sequence.request.n_prompt = sequence.request.n_prompt.max(sequence.n_tokens);
        self.enter(id, Stage::Prefill, n_tokens);
    }

    fn enter(&mut self, id: Id, stage: Stage, n_tokens: usize) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            (sequence.stage, sequence.n_tokens) = (stage, n_tokens);
            if sequence.left() == 0 {
                sequence.stage = Stage::Decode;
            }
        }
    }

    /// Reports that a step of these tokens took `took`; zero if all were accepted draft tokens of
    /// earlier steps.
    pub fn ran(&mut self, rows: &[(Id, usize)], took: Duration) {
        let (mut n_decode, mut n_read) = (0, 0);
        let mut readers = BTreeSet::new();
        for &(id, n) in rows {
            let Some(sequence) = self.sequences.get_mut(&id) else { continue };
            self.owners.entry(sequence.request.owner).or_default().n_rows += n as u64;
            sequence.n_tokens += n;
            if sequence.stage == Stage::Decode {
                n_decode += n;
                continue;
            }
            n_read += n;
            readers.insert(sequence.request.owner);
            if sequence.left() == 0 {
                sequence.stage = Stage::Decode;
            }
        }
        for owner in readers {
            self.owners.entry(owner).or_default().n_steps += 1;
        }
        self.pace.ran(n_decode, n_read, took.as_secs_f64());
    }

    /// Returns the next action.
    pub fn next(&mut self, memory: Memory) -> Action {
        let needs = self.needs();
        let shares = Shares::of(self);
        if needs > memory.free || memory.is_short {
            return self.make_room(memory, &shares);
        }
        let free = memory.free - needs;
        if let Some(id) = shares.claim_victim(self, free, memory) {
            return self.preempt(id);
        }
        let back = self.resume_next(free, memory, &shares);
        if let Some(act) = back.or_else(|| self.admit_next(free, memory, &shares)) {
            return act;
        }
        let rows = self.rows();
        if rows.is_empty() { Action::Wait } else { Action::Run(rows) }
    }

    fn running(&self) -> impl DoubleEndedIterator<Item = (Id, &Sequence)> {
        self.sequences.iter().map(|(&id, sequence)| (id, sequence)).filter(|(_, s)| s.is_running())
    }

    /// Returns the bytes that running sequences may still need, each for its prompt and one token.
    fn needs(&self) -> usize {
        self.running().map(|(_, s)| s.needs(s.n_tokens, self.limits.block)).sum()
    }

    fn preempt(&mut self, id: Id) -> Action {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.stage = Stage::Preempted;
        }
        Action::Preempt(id)
    }

    /// Frees memory when the running sequences need more than is free.
    fn make_room(&mut self, memory: Memory, shares: &Shares) -> Action {
        if memory.can_evict {
            return Action::Evict;
        }
        let n_running = self.running().count();
        let youngest = self.running().next_back().map(|(id, _)| id);
        match shares.largest(self).or(youngest) {
            Some(id) if n_running > 1 => self.preempt(id),
            Some(id) => {
                self.remove(id);
                Action::End(id)
            }
            None => Action::Wait,
        }
    }

    /// Resumes the oldest preempted sequence if it fits with a spare block for each running
    /// sequence: otherwise it would soon be preempted again.
    fn resume_next(&self, free: usize, memory: Memory, shares: &Shares) -> Option<Action> {
        let (&id, parked) = self.parked(shares).next()?;
        let spare: usize = self.running().map(|(_, s)| s.request.cost.block).sum();
        let has_place = self.running().count() < self.limits.n_running;
        let fits = has_place && parked.needs(0, self.limits.block) + spare <= free;
        if fits || self.running().next().is_none() && !memory.can_evict {
            return Some(Action::Resume(id));
        }
        (has_place && memory.can_evict).then_some(Action::Evict)
    }

    /// Returns the preempted sequences that may resume.
    fn parked<'a>(&'a self, shares: &'a Shares) -> impl Iterator<Item = (&'a Id, &'a Sequence)> {
        let parked = self.sequences.iter().filter(|(_, s)| s.stage == Stage::Preempted);
        parked.filter(|(_, s)| shares.may_start(s, self.limits.block))
    }

    /// Admits the next queued sequence if there is room and no preempted sequence may resume.
    fn admit_next(&self, free: usize, memory: Memory, shares: &Shares) -> Option<Action> {
        if self.running().count() >= self.limits.n_running || self.parked(shares).next().is_some() {
            return None;
        }
        let block = self.limits.block;
        let waiting = self.sequences.iter().filter(|(_, s)| s.stage == Stage::Waiting);
        let ready = waiting.filter(|(_, waiting)| {
            !self.is_in_prefill_elsewhere(waiting) && shares.may_start(waiting, block)
        });
        let (&id, next) = ready.min_by_key(|&(&id, s)| self.priority(id, s, |owner| owner.n_begun))?;
        let known = self.running_prefix(next);
        if next.needs(0, block).saturating_sub(known / block * next.request.cost.block) <= free {
            return Some(Action::Admit(id));
        }
        memory.can_evict.then_some(Action::Evict)
    }

    /// Reports whether a running prefill will soon provide a clearly longer prefix of this prompt
    /// than the cache does.
    fn is_in_prefill_elsewhere(&self, waiting: &Sequence) -> bool {
        let mut reading = self.running().filter(|(_, s)| s.stage == Stage::Prefill);
        reading.any(|(_, s)| {
            let shared = cacheable_prompt(&waiting.request, &s.request, self.limits.block);
            shared > s.n_tokens && shared >= waiting.snapshot_tokens + self.limits.min_shared_tokens
        })
    }

    /// Returns the number of tokens of this prompt that a running sequence has read.
    fn running_prefix(&self, waiting: &Sequence) -> usize {
        let known =
            |s: &Sequence| cacheable_prompt(&waiting.request, &s.request, self.limits.block).min(s.n_tokens);
        self.running().map(|(_, s)| known(s)).max().unwrap_or(0)
    }

    /// Returns the priority, smallest first: the owner with the least service, then its shortest
    /// prompt, or its oldest when that is due.
    fn priority(&self, id: Id, sequence: &Sequence, turns: impl Fn(&Owner) -> u64) -> (u64, usize, Id) {
        let owner = self.owners.get(&sequence.request.owner).copied().unwrap_or_default();
        let is_oldest_first = turns(&owner) % OLDEST_EVERY == OLDEST_EVERY - 1;
        (owner.n_rows, if is_oldest_first { 0 } else { sequence.left() }, id)
    }

    /// Plans the batch of a step.
    fn rows(&mut self) -> Vec<(Id, usize)> {
        let decoding = self.running().filter(|(_, s)| s.stage == Stage::Decode && !s.paused);
        let decoding: Vec<_> = decoding.take(self.limits.n_rows).collect();
        let decoding_owners: BTreeSet<u64> = decoding.iter().map(|(_, s)| s.request.owner).collect();
        let mut rows: Vec<_> = decoding.iter().map(|&(id, _)| (id, 1)).collect();
        let reading = self.running().filter(|(_, s)| s.stage == Stage::Prefill);
        let mut reading: Vec<_> = reading
            .map(|(id, s)| (self.priority(id, s, |owner| owner.n_steps), s.tokens_to_branch()))
            .collect();
        reading.sort_unstable();
        let first = reading.first().and_then(|((.., id), _)| self.sequences.get(id));
        let is_crowded_out = first.is_some_and(|first| {
            !decoding_owners.contains(&first.request.owner)
                && rows.len() >= CROWDED_SEQUENCES * decoding_owners.len()
        });
        let gap = if is_crowded_out { MAX_ITL_RATIO_OF_MANY } else { MAX_ITL_RATIO };
        let mut room = self.pace.rows(rows.len(), self.limits.n_rows - rows.len(), gap);
        for ((.., id), stretch) in reading {
            let n = stretch.min(room);
            if n == 0 {
                break;
            }
            rows.push((id, n));
            room -= n;
        }
        rows
    }
}

/// Returns the length of the common prefix of both prompts in tokens.
fn cacheable_prompt(a: &Request, b: &Request, block: usize) -> usize {
    let whole = block * a.blocks.iter().zip(&*b.blocks).take_while(|(a, b)| a == b).count();
    if whole == 0 {
        return 0;
    }
    let rest = a.prompt[whole..a.n_shared].iter().zip(&b.prompt[whole..b.n_shared]);
    whole + rest.take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
