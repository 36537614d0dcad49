//! Fair shares of running slots and memory among owners.
//!
//! A single owner may use everything. Once another has a sequence to start that fits in its even
//! share, owners above their share give back: the youngest of their sequences is preempted and does
//! not resume while another's share is claimed.

use std::collections::BTreeMap;

use super::{Id, Limits, Memory, Scheduler, Sequence, Stage};

/// Resources of an owner.
#[derive(Debug, Clone, Copy, Default)]
struct Usage {
    slots: usize,
    bytes: usize,
}

/// Shares of all owners. See the [module](self).
#[derive(Debug)]
pub(super) struct Shares {
    held: BTreeMap<u64, Usage>,
    /// Even share of each owner.
    each: Usage,
    /// Owner that claims its share, and the bytes it needs.
    claim: Option<(u64, usize)>,
}

impl Shares {
    pub fn of(scheduler: &Scheduler) -> Self {
        let limits = &scheduler.limits;
        let mut held: BTreeMap<u64, Usage> = BTreeMap::new();
        for sequence in scheduler.sequences.values() {
            let held = held.entry(sequence.request.owner).or_default();
            if sequence.is_running() {
                held.slots += 1;
                held.bytes += sequence.bytes(sequence.n_tokens, limits.block);
            }
        }
        let n = held.len().max(1);
        let each = Usage { slots: (limits.n_running / n).max(1), bytes: limits.budget / n };
        let mut shares = Self { held, each, claim: None };
        if n > 1 {
            let mut waiting = scheduler.sequences.values().filter(|s| s.stage == Stage::Waiting);
            let fits = waiting.find(|waiting| shares.has_room(waiting, limits.block));
            shares.claim = fits.map(|s| (s.request.owner, s.needs(0, limits.block)));
        }
        shares
    }

    /// Reports whether a sequence fits in the rest of its owner's share.
    fn has_room(&self, sequence: &Sequence, block: usize) -> bool {
        let held = self.held.get(&sequence.request.owner).copied().unwrap_or_default();
        held.slots < self.each.slots && held.bytes + sequence.needs(0, block) <= self.each.bytes
    }

    /// Reports whether a sequence may start or resume: not beyond its owner's share while another
    /// owner claims its own.
    pub fn may_start(&self, sequence: &Sequence, block: usize) -> bool {
        self.claim.is_none_or(|(owner, _)| owner == sequence.request.owner) || self.has_room(sequence, block)
    }

    /// Returns the youngest sequence of an owner above its share, to be preempted for the claim.
    pub fn claim_victim(&self, scheduler: &Scheduler, free: usize, memory: Memory) -> Option<Id> {
        let (_, needed) = self.claim?;
        let is_full = scheduler.running().count() >= scheduler.limits.n_running;
        let is_over = |held: &Usage| match is_full {
            true => held.slots > self.each.slots,
            false => held.bytes > self.each.bytes,
        };
        if !is_full && (needed <= free || memory.can_evict) {
            return None;
        }
        self.youngest(scheduler, is_over)
    }

    /// Returns the youngest sequence of an owner above its share of memory.
    pub fn largest(&self, scheduler: &Scheduler) -> Option<Id> {
        let several = self.held.len() > 1;
        self.youngest(scheduler, |held| several && held.bytes > self.each.bytes)
    }

    /// Returns the youngest running sequence of an owner that satisfies `is_over` and has others.
    fn youngest(&self, scheduler: &Scheduler, is_over: impl Fn(&Usage) -> bool) -> Option<Id> {
        let over = |owner: &u64| self.held.get(owner).is_some_and(|held| held.slots > 1 && is_over(held));
        scheduler.running().rev().find(|(_, s)| over(&s.request.owner)).map(|(id, _)| id)
    }
}

impl Scheduler {
    /// Reports whether one more sequence may be queued: half of the queue is reserved in even parts
    /// for the owners, the rest is first come, first served.
    pub(super) fn may_wait(&self, owner: u64) -> bool {
        let mut waiting: BTreeMap<u64, usize> = BTreeMap::new();
        for sequence in self.sequences.values().filter(|s| s.stage == Stage::Waiting) {
            *waiting.entry(sequence.request.owner).or_default() += 1;
        }
        let own = self.limits.own_queue();
        let for_all: usize = waiting.values().map(|n| n.saturating_sub(own)).sum();
        waiting.get(&owner).copied().unwrap_or(0) < own || for_all < self.limits.shared_queue()
    }
}

impl Limits {
    /// Returns the queue slots reserved for each owner.
    fn own_queue(&self) -> usize {
        if self.n_owners > 1 { self.n_waiting / (2 * self.n_owners) } else { 0 }
    }

    /// Returns the queue slots open to all owners.
    fn shared_queue(&self) -> usize {
        self.n_waiting - self.own_queue() * self.n_owners.max(1)
    }

    /// Returns the maximum queued sequences of one owner.
    pub fn max_waiting(&self) -> usize {
        self.own_queue() + self.shared_queue()
    }
}
