//! Conversations in one place: found by what they say, the one used longest ago first to go.

use std::collections::VecDeque;

use crate::events::Held;

/// A conversation.
pub(super) struct Kept<P> {
    /// Names its model, its types and its owner.
    pub kind: u64,
    pub tokens: Vec<u32>,
    pub bytes: u64,
    /// Where it is.
    pub place: P,
    /// Whoever wants to know is told that its blocks are here, once it is known whose they are.
    pub held: Option<Held>,
}

impl<P> Kept<P> {
    /// Tokens with which it and `prompt` begin.
    fn common(&self, prompt: &[u32]) -> usize {
        self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }
}

/// The conversations, the one used longest ago first, and how many bytes they may take together.
pub(super) struct Tier<P> {
    budget: u64,
    kept: VecDeque<Kept<P>>,
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

    /// Whether so many bytes more fit.
    pub fn fits(&self, bytes: u64) -> bool {
        self.bytes() + bytes <= self.budget
    }

    pub fn iter(&self) -> impl Iterator<Item = &Kept<P>> {
        self.kept.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Kept<P>> {
        self.kept.iter_mut()
    }

    /// Adds one as the one that was used last.
    pub fn push(&mut self, kept: Kept<P>) {
        self.kept.push_back(kept);
    }

    /// Takes the one that was used longest ago.
    pub fn pop(&mut self) -> Option<Kept<P>> {
        self.kept.pop_front()
    }

    pub fn take(&mut self, index: usize) -> Option<Kept<P>> {
        self.kept.remove(index)
    }

    /// Whether one of this kind begins with `tokens`.
    pub fn has(&self, kind: u64, tokens: &[u32]) -> bool {
        self.kept.iter().any(|kept| kept.kind == kind && kept.tokens.starts_with(tokens))
    }

    /// Takes one that is the beginning of `tokens` and no more: it will not be missed where those are kept.
    pub fn take_beginning(&mut self, kind: u64, tokens: &[u32]) -> Option<Kept<P>> {
        let is_beginning = |kept: &Kept<P>| kept.kind == kind && tokens.starts_with(&kept.tokens);
        self.kept.iter().position(is_beginning).and_then(|index| self.take(index))
    }

    /// The most tokens with which one of this kind and `prompt` begin, and its index.
    pub fn longest(&self, kind: u64, prompt: &[u32]) -> Option<(usize, usize)> {
        let of_kind = self.kept.iter().enumerate().filter(|(_, kept)| kept.kind == kind);
        of_kind.map(|(index, kept)| (kept.common(prompt), index)).max()
    }
}
