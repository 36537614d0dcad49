//! What owners have of places and of memory, where there are several.
//!
//! One owner alone may have all. Once another has something to begin that fits in its even share, whoever has more than that gives back:
//! the youngest of its sequences is parked, and does not come back while another's share is claimed.

use std::collections::BTreeMap;

use super::{Id, Limits, Memory, Scheduler, Sequence, Stage};

/// What an owner has.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    places: usize,
    bytes: usize,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Shares {
    held: BTreeMap<u64, Held>,
    /// The even share of each.
    each: Held,
    /// Whoever claims its share, and the bytes that it needs for that.
    claim: Option<(u64, usize)>,
}

impl Shares {
    pub fn of(scheduler: &Scheduler) -> Self {
        let limits = &scheduler.limits;
        let mut held: BTreeMap<u64, Held> = BTreeMap::new();
        for sequence in scheduler.sequences.values() {
            let held = held.entry(sequence.request.owner).or_default();
            if sequence.is_running() {
                held.places += 1;
                held.bytes += sequence.bytes(sequence.n_tokens, limits.block);
            }
        }
        let n = held.len().max(1);
        let each = Held { places: (limits.n_running / n).max(1), bytes: limits.budget / n };
        let mut shares = Self { held, each, claim: None };
        if n > 1 {
            let mut waiting = scheduler.sequences.values().filter(|s| s.stage == Stage::Waiting);
            let fits = waiting.find(|waiting| shares.has_room(waiting, limits.block));
            shares.claim = fits.map(|s| (s.request.owner, s.needs(0, limits.block)));
        }
        shares
    }

    /// Whether a sequence fits in what is left of its owner's share.
    fn has_room(&self, sequence: &Sequence, block: usize) -> bool {
        let held = self.held.get(&sequence.request.owner).copied().unwrap_or_default();
        held.places < self.each.places && held.bytes + sequence.needs(0, block) <= self.each.bytes
    }

    /// Whether a sequence may begin or come back: not beyond its owner's share while another claims its own.
    pub fn lets_in(&self, sequence: &Sequence, block: usize) -> bool {
        self.claim.is_none_or(|(owner, _)| owner == sequence.request.owner) || self.has_room(sequence, block)
    }

    /// Who has more than its share of what is claimed: the youngest of its sequences is to go.
    pub fn in_the_way(&self, scheduler: &Scheduler, free: usize, memory: Memory) -> Option<Id> {
        let (_, needed) = self.claim?;
        let is_full = scheduler.running().count() >= scheduler.limits.n_running;
        let is_over = |held: &Held| match is_full {
            true => held.places > self.each.places,
            false => held.bytes > self.each.bytes,
        };
        if !is_full && (needed <= free || memory.can_evict) {
            return None;
        }
        self.youngest(scheduler, is_over)
    }

    /// The youngest of whoever has more than its share of memory.
    pub fn largest(&self, scheduler: &Scheduler) -> Option<Id> {
        let several = self.held.len() > 1;
        self.youngest(scheduler, |held| several && held.bytes > self.each.bytes)
    }

    /// The youngest sequence that runs of an owner like that, who has others.
    fn youngest(&self, scheduler: &Scheduler, is_over: impl Fn(&Held) -> bool) -> Option<Id> {
        let over = |owner: &u64| self.held.get(owner).is_some_and(|held| held.places > 1 && is_over(held));
        scheduler.running().rev().find(|(_, s)| over(&s.request.owner)).map(|(id, _)| id)
    }
}

impl Scheduler {
    /// Whether one more may wait: half of the queue is for each owner alone, in even parts, and the rest is for whoever comes first.
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
    /// Places in the queue for each owner alone.
    fn own_queue(&self) -> usize {
        if self.n_owners > 1 { self.n_waiting / (2 * self.n_owners) } else { 0 }
    }

    /// Places for whoever comes first.
    fn shared_queue(&self) -> usize {
        self.n_waiting - self.own_queue() * self.n_owners.max(1)
    }

    /// Sequences of one owner that wait at most.
    pub fn most_waiting(&self) -> usize {
        self.own_queue() + self.shared_queue()
    }
}
