//! Who runs next: a state machine that knows no model, no clock and no thread.
//!
//! A *sequence* waits, reads its prompt, speaks, and may be parked when memory runs out. [`Scheduler::next`] says one thing to
//! do at a time; whoever does it says how it went. What it holds to:
//!
//! - Whoever speaks goes on in every step; prompts are read beside that, in as many rows as keep the gap between two tokens below
//!   [`GAP`] times what it is without them.
//! - Owners (API keys) share rows evenly: the prompt that is read next is one of the owner that has been given the least so far
//!   (fair queueing by virtual time). Of an owner's prompts, the one with the fewest tokens left comes first, and in one step of
//!   [`OLDEST_EVERY`] the oldest: a short prompt waits for a fraction of its own time at any pace, and a long one is read on.
//! - A prompt whose beginning another one is just reading waits for it, and takes that beginning over. Whoever reads it stops where
//!   they part (a *branch*), so that a copy can be left there: blocks alone can be taken over at few places.
//! - Places and memory are shared evenly where several owners want them ([`shares`]); an owner alone may have all.
//! - Nobody begins unless the whole prompt and a block fit beside what those who run may still need. Where somebody who runs needs
//!   more than there is, what is idle goes first; then the youngest is parked. Those come back before anybody new begins.

mod pace;
mod shares;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use pace::Pace;
use shares::Shares;

/// How many times longer than without prompts a step may take that somebody waits for, on average.
const GAP: f64 = 2.0;
/// The same where many answers of other owners wait for it, [`MANY`] of each or more: one key that lets many speak leaves the prompts of
/// another most of the time.
const GAP_OF_MANY: f64 = 4.0;
const MANY: usize = 8;
/// An owner's oldest prompt comes first in one step of so many, and the shortest in the others.
const OLDEST_EVERY: u64 = 4;

/// The number of a sequence, in the order of coming.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub u64);

/// What bounds the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that run at once.
    pub n_running: usize,
    /// Sequences that wait at most.
    pub n_waiting: usize,
    /// Owners that there may be.
    pub n_owners: usize,
    /// Rows of a step.
    pub n_rows: usize,
    /// Tokens of a block.
    pub block: usize,
    /// The fewest tokens that are worth waiting for, or a copy.
    pub worth: usize,
    /// Bytes for all caches.
    pub budget: usize,
}

/// What a cache takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of one that holds anything at all.
    pub fixed: usize,
    /// Bytes of each block.
    pub block: usize,
}

/// A sequence to be.
#[derive(Debug, Clone)]
pub struct Request {
    /// Whose it is.
    pub owner: u64,
    /// Tokens of the prompt, at least one.
    pub n_prompt: usize,
    /// Which they are.
    pub prompt: Arc<[u32]>,
    /// How many of them may be taken over from others: not the last one.
    pub n_shared: usize,
    /// Names each whole block of those together with all before it.
    pub blocks: Arc<[u64]>,
    /// What its cache takes.
    pub cost: Cost,
}

/// Why a sequence is not taken on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Too many wait.
    #[error("{waiting} requests are waiting already")]
    Full {
        /// Sequences that wait.
        waiting: usize,
        /// Seconds after which it is worth another try.
        retry_after: u64,
    },
    /// It can never fit.
    #[error("the cache of this prompt would take {needed} bytes, all caches together may take {budget}")]
    TooLarge {
        /// Bytes of its cache.
        needed: usize,
        /// Bytes for all caches.
        budget: usize,
    },
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    /// Let go of an idle cache, and ask again.
    Evict,
    /// Make a cache for this one, take over what is there of its prompt, and say so by [`Scheduler::began`].
    Begin(Id),
    /// Take the memory of this one away; nobody notices but by the time that it takes.
    Park(Id),
    /// Bring this one back, and say so by [`Scheduler::resumed`].
    Resume(Id),
    /// End this one: it fills all memory that there is.
    End(Id),
    /// Run so many rows of each, and tell by [`Scheduler::ran`].
    Run(Vec<(Id, usize)>),
    /// Nothing, until somebody comes, goes or listens again.
    Wait,
}

/// Memory for caches, as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Bytes that nobody holds.
    pub free: usize,
    /// Whether some are held by caches that nobody uses.
    pub can_evict: bool,
    /// A step ran out of it, whatever there should have been.
    pub is_short: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Reading,
    Speaking,
    Parked,
}

#[derive(Debug)]
struct Sequence {
    request: Request,
    stage: Stage,
    /// Tokens in its cache; of one that is parked, those that will be.
    n_tokens: usize,
    /// Nobody listens to it at the moment.
    paused: bool,
    /// Where others part from its prompt.
    branches: BTreeSet<usize>,
    /// Tokens that a copy was left of for it.
    found: usize,
}

impl Sequence {
    fn new(request: Request) -> Self {
        let branches = BTreeSet::new();
        Self { request, stage: Stage::Waiting, n_tokens: 0, paused: false, branches, found: 0 }
    }

    /// Others part from its prompt at `at`: of two places that lie close together the first counts.
    fn branch(&mut self, at: usize, worth: usize) {
        if at < worth || self.branches.range(at - (worth - 1)..=at).next().is_some() {
            return;
        }
        if let Some(&later) = self.branches.range(at..at + worth).next() {
            self.branches.remove(&later);
        }
        self.branches.insert(at);
    }

    /// Tokens of its prompt until it ends or others part from it.
    fn stretch(&self) -> usize {
        let branch = self.branches.range(self.n_tokens + 1..).next();
        self.left().min(branch.map_or(usize::MAX, |at| at - self.n_tokens))
    }

    fn is_running(&self) -> bool {
        matches!(self.stage, Stage::Reading | Stage::Speaking)
    }

    fn left(&self) -> usize {
        self.request.n_prompt - self.n_tokens.min(self.request.n_prompt)
    }

    fn bytes(&self, n_tokens: usize, block: usize) -> usize {
        let Cost { fixed, block: each } = self.request.cost;
        if n_tokens == 0 { 0 } else { fixed + n_tokens.div_ceil(block) * each }
    }

    /// Bytes until the prompt is read and a token said, or until the next token is, beyond those of `n_tokens`.
    fn needs(&self, n_tokens: usize, block: usize) -> usize {
        let until = n_tokens.max(self.request.n_prompt) + 1;
        self.bytes(until, block) - self.bytes(n_tokens, block)
    }
}

/// How many sequences there are of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Those that have not begun.
    pub waiting: usize,
    /// Those that read their prompt.
    pub reading: usize,
    /// Those that speak.
    pub speaking: usize,
    /// Those that will come back.
    pub parked: usize,
}

impl std::ops::Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            waiting: self.waiting + other.waiting,
            reading: self.reading + other.reading,
            speaking: self.speaking + other.speaking,
            parked: self.parked + other.parked,
        }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    sequences: BTreeMap<Id, Sequence>,
    next_id: u64,
    owners: HashMap<u64, Owner>,
    pace: Pace,
}

/// What an owner has been given.
#[derive(Debug, Clone, Copy, Default)]
struct Owner {
    /// Rows, with a start as if it had always been here.
    n_rows: u64,
    /// Steps that read its prompts.
    n_steps: u64,
    /// Sequences that began.
    n_begun: u64,
}

impl Scheduler {
    /// One without any sequences.
    pub fn new(limits: Limits) -> Self {
        Self { limits, sequences: BTreeMap::new(), next_id: 0, owners: HashMap::new(), pace: Pace::default() }
    }

    /// What bounds the work.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// How many sequences there are of each kind.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for sequence in self.sequences.values() {
            *match sequence.stage {
                Stage::Waiting => &mut counts.waiting,
                Stage::Reading => &mut counts.reading,
                Stage::Speaking => &mut counts.speaking,
                Stage::Parked => &mut counts.parked,
            } += 1;
        }
        counts
    }

    /// A new sequence comes.
    ///
    /// # Errors
    /// It is refused: nothing is known of it then.
    pub fn submit(&mut self, request: Request) -> Result<Id, Refusal> {
        let mut sequence = Sequence::new(request);
        let needed = sequence.needs(0, self.limits.block);
        if needed > self.limits.budget {
            return Err(Refusal::TooLarge { needed, budget: self.limits.budget });
        }
        let waiting = self.counts().waiting;
        if !self.may_wait(sequence.request.owner) {
            return Err(Refusal::Full { waiting, retry_after: self.seconds_of_waiting() });
        }
        self.welcome(sequence.request.owner);
        let Limits { block, worth, .. } = self.limits;
        let begins = |stage| matches!(stage, Stage::Waiting | Stage::Reading);
        for other in self.sequences.values_mut().filter(|other| begins(other.stage)) {
            let at = shared(&sequence.request, &other.request, block);
            sequence.branch(at, worth);
            other.branch(at, worth);
        }
        Ok(self.insert(sequence))
    }

    /// Seconds until those who wait now will have been read, about.
    fn seconds_of_waiting(&self) -> u64 {
        let rows: usize = self.sequences.values().map(Sequence::left).sum();
        (rows as f64 * self.pace.row.unwrap_or(1e-3)).ceil().clamp(1.0, 600.0) as u64
    }

    /// Whoever was away has not saved rows up.
    fn welcome(&mut self, owner: u64) {
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

    /// A second sequence goes on from where `of` stands, which speaks; parked until there is a place for it. `None` where `of` does not
    /// speak.
    pub fn fork(&mut self, of: Id) -> Option<Id> {
        let of = self.sequences.get(&of).filter(|of| of.stage == Stage::Speaking)?;
        let has_place = self.running().count() < self.limits.n_running;
        let stage = if has_place { Stage::Speaking } else { Stage::Parked };
        let fork = Sequence::new(of.request.clone());
        Some(self.insert(Sequence { stage, n_tokens: of.n_tokens, ..fork }))
    }

    /// Whether a sequence has no cache now and will come back.
    pub fn is_parked(&self, id: Id) -> bool {
        self.sequences.get(&id).is_some_and(|sequence| sequence.stage == Stage::Parked)
    }

    /// A sequence has said all, or nobody wants it any more. Whether it was known.
    pub fn remove(&mut self, id: Id) -> bool {
        self.sequences.remove(&id).is_some()
    }

    /// Whether anybody listens to a sequence; while nobody does, it does not go on.
    pub fn pause(&mut self, id: Id, paused: bool) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.paused = paused;
        }
    }

    /// A conversation that is there parts from the prompt of `id` at `at`.
    pub fn branch(&mut self, id: Id, at: usize) {
        let worth = self.limits.worth;
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.branch(at.min(sequence.request.n_shared), worth);
        }
    }

    /// Whether `id` has just come to where others part from its prompt, with room for a copy: the caller leaves one there.
    pub fn leaves_copy(&mut self, id: Id, memory: Memory) -> bool {
        let Some(sequence) = self.sequences.get(&id) else { return false };
        let (at, cost) = (sequence.n_tokens, sequence.request.cost);
        let is_branch = sequence.stage == Stage::Reading && sequence.branches.contains(&at);
        if !is_branch || self.needs() + cost.fixed + cost.block > memory.free {
            return false;
        }
        let request = sequence.request.clone();
        for other in self.sequences.values_mut().filter(|other| other.stage == Stage::Waiting) {
            if shared(&request, &other.request, self.limits.block) >= at {
                other.found = other.found.max(at);
            }
        }
        true
    }

    /// A sequence begins with so many tokens that were there.
    pub fn began(&mut self, id: Id, n_tokens: usize) {
        if let Some(sequence) = self.sequences.get(&id) {
            self.owners.entry(sequence.request.owner).or_default().n_begun += 1;
        }
        self.enter(id, Stage::Reading, n_tokens);
    }

    /// A sequence is back with so many tokens; it reads again what is missing.
    pub fn resumed(&mut self, id: Id, n_tokens: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        // What it had read and said is what there is to read now.
        sequence.request.n_prompt = sequence.request.n_prompt.max(sequence.n_tokens);
        self.enter(id, Stage::Reading, n_tokens);
    }

    fn enter(&mut self, id: Id, stage: Stage, n_tokens: usize) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            (sequence.stage, sequence.n_tokens) = (stage, n_tokens);
            if sequence.left() == 0 {
                sequence.stage = Stage::Speaking;
            }
        }
    }

    /// A step of these rows has taken so long; no time at all where all of them had been read ahead.
    pub fn ran(&mut self, rows: &[(Id, usize)], took: Duration) {
        let (mut n_speaking, mut n_read) = (0, 0);
        let mut readers = BTreeSet::new();
        for &(id, n) in rows {
            let Some(sequence) = self.sequences.get_mut(&id) else { continue };
            self.owners.entry(sequence.request.owner).or_default().n_rows += n as u64;
            sequence.n_tokens += n;
            if sequence.stage == Stage::Speaking {
                n_speaking += n;
                continue;
            }
            n_read += n;
            readers.insert(sequence.request.owner);
            if sequence.left() == 0 {
                sequence.stage = Stage::Speaking;
            }
        }
        for owner in readers {
            self.owners.entry(owner).or_default().n_steps += 1;
        }
        self.pace.ran(n_speaking, n_read, took.as_secs_f64());
    }

    /// What to do next.
    pub fn next(&mut self, memory: Memory) -> Act {
        let needs = self.needs();
        let shares = Shares::of(self);
        if needs > memory.free || memory.is_short {
            return self.make_room(memory, &shares);
        }
        let free = memory.free - needs;
        if let Some(id) = shares.in_the_way(self, free, memory) {
            return self.park(id);
        }
        let back = self.bring_back(free, memory, &shares);
        if let Some(act) = back.or_else(|| self.take_on(free, memory, &shares)) {
            return act;
        }
        let rows = self.rows();
        if rows.is_empty() { Act::Wait } else { Act::Run(rows) }
    }

    fn running(&self) -> impl DoubleEndedIterator<Item = (Id, &Sequence)> {
        self.sequences.iter().map(|(&id, sequence)| (id, sequence)).filter(|(_, s)| s.is_running())
    }

    /// Bytes that those who run may still need, each for its prompt and a token.
    fn needs(&self) -> usize {
        self.running().map(|(_, s)| s.needs(s.n_tokens, self.limits.block)).sum()
    }

    fn park(&mut self, id: Id) -> Act {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.stage = Stage::Parked;
        }
        Act::Park(id)
    }

    /// Those who run need more than there is.
    fn make_room(&mut self, memory: Memory, shares: &Shares) -> Act {
        if memory.can_evict {
            return Act::Evict;
        }
        let n_running = self.running().count();
        let youngest = self.running().next_back().map(|(id, _)| id);
        match shares.largest(self).or(youngest) {
            Some(id) if n_running > 1 => self.park(id),
            Some(id) => {
                self.remove(id);
                Act::End(id)
            }
            None => Act::Wait,
        }
    }

    /// The oldest of those that were parked, where it fits with a block to spare for everybody: else it would soon go again.
    fn bring_back(&self, free: usize, memory: Memory, shares: &Shares) -> Option<Act> {
        let (&id, parked) = self.parked(shares).next()?;
        let spare: usize = self.running().map(|(_, s)| s.request.cost.block).sum();
        let has_place = self.running().count() < self.limits.n_running;
        let fits = has_place && parked.needs(0, self.limits.block) + spare <= free;
        if fits || self.running().next().is_none() && !memory.can_evict {
            return Some(Act::Resume(id));
        }
        (has_place && memory.can_evict).then_some(Act::Evict)
    }

    /// Those that were parked and may come back.
    fn parked<'a>(&'a self, shares: &'a Shares) -> impl Iterator<Item = (&'a Id, &'a Sequence)> {
        let parked = self.sequences.iter().filter(|(_, s)| s.stage == Stage::Parked);
        parked.filter(|(_, s)| shares.lets_in(s, self.limits.block))
    }

    /// The next of those who wait, if there is room and nobody is parked who may come back.
    fn take_on(&self, free: usize, memory: Memory, shares: &Shares) -> Option<Act> {
        if self.running().count() >= self.limits.n_running || self.parked(shares).next().is_some() {
            return None;
        }
        let block = self.limits.block;
        let waiting = self.sequences.iter().filter(|(_, s)| s.stage == Stage::Waiting);
        let ready =
            waiting.filter(|(_, waiting)| !self.is_being_read(waiting) && shares.lets_in(waiting, block));
        let (&id, next) = ready.min_by_key(|&(&id, s)| self.rank(id, s, |owner| owner.n_begun))?;
        let known = self.known(next);
        if next.needs(0, block).saturating_sub(known / block * next.request.cost.block) <= free {
            return Some(Act::Begin(id));
        }
        memory.can_evict.then_some(Act::Evict)
    }

    /// Whether somebody is about to have read clearly more of this prompt than there is.
    fn is_being_read(&self, waiting: &Sequence) -> bool {
        let mut reading = self.running().filter(|(_, s)| s.stage == Stage::Reading);
        reading.any(|(_, s)| {
            let shared = shared(&waiting.request, &s.request, self.limits.block);
            shared > s.n_tokens && shared >= waiting.found + self.limits.worth
        })
    }

    /// Tokens of this prompt that somebody who runs has.
    fn known(&self, waiting: &Sequence) -> usize {
        let known = |s: &Sequence| shared(&waiting.request, &s.request, self.limits.block).min(s.n_tokens);
        self.running().map(|(_, s)| known(s)).max().unwrap_or(0)
    }

    /// Who comes first, the smallest: of the owner that was given least, the shortest, or the oldest where it is its turn.
    fn rank(&self, id: Id, sequence: &Sequence, turns: impl Fn(&Owner) -> u64) -> (u64, usize, Id) {
        let owner = self.owners.get(&sequence.request.owner).copied().unwrap_or_default();
        let is_oldest_first = turns(&owner) % OLDEST_EVERY == OLDEST_EVERY - 1;
        (owner.n_rows, if is_oldest_first { 0 } else { sequence.left() }, id)
    }

    /// The rows of a step.
    fn rows(&mut self) -> Vec<(Id, usize)> {
        let speaking = self.running().filter(|(_, s)| s.stage == Stage::Speaking && !s.paused);
        let speaking: Vec<_> = speaking.take(self.limits.n_rows).collect();
        let speakers: BTreeSet<u64> = speaking.iter().map(|(_, s)| s.request.owner).collect();
        let mut rows: Vec<_> = speaking.iter().map(|&(id, _)| (id, 1)).collect();
        let reading = self.running().filter(|(_, s)| s.stage == Stage::Reading);
        let mut reading: Vec<_> =
            reading.map(|(id, s)| (self.rank(id, s, |owner| owner.n_steps), s.stretch())).collect();
        reading.sort_unstable();
        let first = reading.first().and_then(|((.., id), _)| self.sequences.get(id));
        let is_crowded_out = first.is_some_and(|first| {
            !speakers.contains(&first.request.owner) && rows.len() >= MANY * speakers.len()
        });
        let gap = if is_crowded_out { GAP_OF_MANY } else { GAP };
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

/// Tokens with which both prompts begin.
fn shared(a: &Request, b: &Request, block: usize) -> usize {
    let whole = block * a.blocks.iter().zip(&*b.blocks).take_while(|(a, b)| a == b).count();
    if whole == 0 {
        return 0;
    }
    let rest = a.prompt[whole..a.n_shared].iter().zip(&b.prompt[whole..b.n_shared]);
    whole + rest.take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
