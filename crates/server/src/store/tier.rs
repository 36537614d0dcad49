//! Tier of saved conversations: found by their tokens, evicted least recently used first.

use std::collections::VecDeque;

use crate::events::BlockHolder;

/// Saved conversation.
pub(super) struct OffloadedSession<P> {
    /// Hash of its model, KV types and owner.
    pub kind: u64,
    pub tokens: Vec<u32>,
    pub bytes: u64,
    /// Location: in memory, or the path of a file.
    pub place: P,
    /// Publishes KV-block events for its blocks, once its owner is known.
    pub held: Option<BlockHolder>,
}

impl<P> OffloadedSession<P> {
    /// Returns the number of leading tokens it shares with `prompt`.
    fn common(&self, prompt: &[u32]) -> usize {
        self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }
}

/// Conversations, least recently used first, within a budget in bytes.
pub(super) struct Tier<P> {
    budget: u64,
    kept: VecDeque<OffloadedSession<P>>,
}

impl<P> Tier<P> {
    pub fn new(budget: u64) -> Self {
        Self { budget, kept: VecDeque::new() }
    }

    pub fn budget(&self) -> u64 {
        self.budget
    }

    pub fn bytes(&self) -> u64 {
        self.iter().map(|kept| kept.bytes).sum()
    }

    /// Reports whether `bytes` more fit.
    pub fn fits(&self, bytes: u64) -> bool {
        self.bytes() + bytes <= self.budget
    }

    pub fn iter(&self) -> impl Iterator<Item = &OffloadedSession<P>> {
        self.kept.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut OffloadedSession<P>> {
        self.kept.iter_mut()
    }

    /// Adds a conversation as the most recently used.
    pub fn push(&mut self, kept: OffloadedSession<P>) {
        self.kept.push_back(kept);
    }

    /// Removes the least recently used conversation.
    pub fn pop(&mut self) -> Option<OffloadedSession<P>> {
        self.kept.pop_front()
    }

    pub fn take(&mut self, index: usize) -> Option<OffloadedSession<P>> {
        self.kept.remove(index)
    }

    /// Reports whether a conversation of this key starts with `tokens`.
    pub fn has(&self, kind: u64, tokens: &[u32]) -> bool {
        self.kept.iter().any(|kept| kept.kind == kind && kept.tokens.starts_with(tokens))
    }

    /// Removes a conversation that is a prefix of `tokens`: it is redundant once those are saved.
    pub fn take_prefix(&mut self, kind: u64, tokens: &[u32]) -> Option<OffloadedSession<P>> {
        let is_beginning = |kept: &OffloadedSession<P>| kept.kind == kind && tokens.starts_with(&kept.tokens);
        self.kept.iter().position(is_beginning).and_then(|index| self.take(index))
    }

    /// Returns the longest prefix of `prompt` in a conversation of this key, and its index.
    pub fn longest(&self, kind: u64, prompt: &[u32]) -> Option<(usize, usize)> {
        let of_kind = self.kept.iter().enumerate().filter(|(_, kept)| kept.kind == kind);
        of_kind.map(|(index, kept)| (kept.common(prompt), index)).max()
    }
}
