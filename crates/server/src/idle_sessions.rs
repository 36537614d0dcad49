//! Idle sessions: conversations without a running request, cached as long as memory allows, since
//! most of them continue.

use std::collections::VecDeque;

use kvant::Session;

use crate::cache_key::CacheKey;
use crate::events::{BlockHolder, Blocks, Medium};

/// Idle session.
pub(crate) struct IdleSession {
    pub kind: CacheKey,
    pub session: Session,
    /// Whether it is a snapshot at a branch point: it remains cached when a sequence continues from
    /// it.
    pub is_branch: bool,
    /// Publishes KV-block events for its blocks.
    _held: BlockHolder,
}

impl IdleSession {
    /// Returns the number of leading tokens it shares with `prompt`.
    fn common(&self, prompt: &[u32]) -> usize {
        self.session.tokens().iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }
}

/// Idle sessions of a model.
pub(crate) struct IdleSessions {
    /// Least recently used first.
    idle: VecDeque<IdleSession>,
    blocks: Blocks,
}

impl IdleSessions {
    /// Creates an empty cache that publishes events for its blocks.
    pub fn new(blocks: Blocks) -> Self {
        Self { idle: VecDeque::new(), blocks }
    }

    /// Returns the number of conversations, without snapshots.
    pub fn len(&self) -> usize {
        self.idle.iter().filter(|idle| !idle.is_branch).count()
    }

    /// Reports whether no session can be evicted.
    pub fn is_empty(&self) -> bool {
        self.idle.is_empty()
    }

    /// Returns all sessions, snapshots included.
    pub fn sessions(&self) -> impl Iterator<Item = &Session> {
        self.idle.iter().map(|idle| &idle.session)
    }

    /// Adds a conversation. A conversation that is a prefix of it becomes redundant and is removed.
    pub fn put(&mut self, kind: CacheKey, mut session: Session) {
        session.release_scratch();
        self.idle.retain(|old| {
            old.is_branch || old.kind != kind || !session.tokens().starts_with(old.session.tokens())
        });
        self.push(kind, session, false);
    }

    /// Adds a snapshot of a prefix.
    pub fn put_branch(&mut self, kind: CacheKey, mut session: Session) {
        session.release_scratch();
        self.idle
            .retain(|old| !old.is_branch || old.kind != kind || session.tokens() != old.session.tokens());
        self.push(kind, session, true);
    }

    fn push(&mut self, kind: CacheKey, session: Session, is_branch: bool) {
        let mut held = self.blocks.register(Medium::Device, &kind);
        held.grow(session.tokens());
        self.idle.push_back(IdleSession { kind, session, is_branch, _held: held });
    }

    /// Evicts the least recently used session. Blocks shared with others remain.
    pub fn evict(&mut self) -> Option<IdleSession> {
        self.idle.pop_front()
    }

    /// Returns the longest prefix that `prompt` shares with a session, in tokens.
    pub fn common(&self, kind: &CacheKey, prompt: &[u32]) -> usize {
        self.idle.iter().filter(|idle| idle.kind == *kind).map(|idle| idle.common(prompt)).max().unwrap_or(0)
    }

    /// Returns the session with the longest prefix of `prompt`, without its last token, if longer
    /// than `min_len`: a conversation that the prompt continues, or else a fork that shares its
    /// blocks, truncated to the common prefix.
    pub fn take(&mut self, kind: &CacheKey, prompt: &[u32], min_len: usize) -> Option<Session> {
        let max_len = prompt.len() - 1;
        let of_kind = self.idle.iter().enumerate().filter(|(_, idle)| idle.kind == *kind);
        let shared: Vec<_> = of_kind.map(|(index, idle)| (idle.common(prompt).min(max_len), index)).collect();
        let &(common, index) = shared.iter().max()?;
        let is_whole = |&(n, index): &(usize, usize)| n == self.idle[index].session.tokens().len();
        let whole = shared.iter().copied().filter(is_whole).max();
        let n_whole = whole.map_or(0, |(n, _)| n);
        // The truncated fork may end earlier than the common prefix.
        let cut = (common > n_whole.max(min_len)).then(|| {
            let mut cut = self.idle[index].session.fork();
            cut.reuse_prefix(prompt);
            cut
        });
        let cut = cut.filter(|cut| cut.tokens().len() > n_whole.max(min_len));
        let (index, session) = match (cut, whole) {
            (Some(cut), _) => (index, Some(cut)),
            (None, Some((n, index))) if n > min_len => (index, None),
            _ => return None,
        };
        let idle = self.idle.remove(index)?;
        if session.is_none() && !idle.is_branch {
            return Some(idle.session);
        }
        let session = session.unwrap_or_else(|| idle.session.fork());
        // A session that is used becomes the most recently used.
        self.idle.push_back(idle);
        Some(session)
    }
}
