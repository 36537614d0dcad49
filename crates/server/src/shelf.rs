//! Conversations that nobody is waiting for: kept as long as there is memory, since most of them go on.

use std::collections::VecDeque;
use std::sync::Arc;

use kvant::{KvOptions, Session};
use xxhash_rust::xxh3::xxh3_64;

/// What a cache stores, with a name for it: a plan's factors are many numbers to compare.
#[derive(Debug)]
pub(crate) struct Stored {
    pub options: KvOptions,
    name: u64,
}

impl Stored {
    pub fn new(options: KvOptions) -> Arc<Self> {
        let name = xxh3_64(format!("{options:?}").as_bytes());
        Arc::new(Self { options, name })
    }
}

/// What two sequences must have in common before one goes on from the other.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    pub stored: Arc<Stored>,
    /// Whose it is.
    pub owner: Option<Arc<str>>,
}

impl Kind {
    /// What it consists of, in few bytes.
    pub fn names(&self) -> (u64, &str) {
        (self.stored.name, self.owner.as_deref().unwrap_or_default())
    }
}

impl PartialEq for Kind {
    fn eq(&self, other: &Self) -> bool {
        (self.stored.name, &self.owner) == (other.stored.name, &other.owner)
    }
}

/// The conversations, the one used longest ago first.
#[derive(Default)]
pub(crate) struct Shelf(VecDeque<(Kind, Session)>);

impl Shelf {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All conversations.
    pub fn sessions(&self) -> impl Iterator<Item = &Session> {
        self.0.iter().map(|(_, session)| session)
    }

    /// Keeps a conversation. One that is its beginning and no more is let go of: nobody will miss it.
    pub fn put(&mut self, kind: Kind, mut session: Session) {
        session.rest();
        self.0.retain(|(other, old)| *other != kind || !session.tokens().starts_with(old.tokens()));
        self.0.push_back((kind, session));
    }

    /// Lets go of the conversation that was used longest ago. What others share with it stays.
    pub fn evict(&mut self) -> Option<(Kind, Session)> {
        self.0.pop_front()
    }

    /// The conversation with the longest common beginning with `prompt`, cut to it: the one on the shelf where `prompt` continues
    /// it, else a copy that shares its memory. `None` where none has more than `least` tokens of it.
    pub fn take(&mut self, kind: &Kind, prompt: &[u32], least: usize) -> Option<Session> {
        let common =
            |session: &Session| session.tokens().iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let of_kind = self.0.iter().enumerate().filter(|(_, (other, _))| other == kind);
        let (n, index) = of_kind.map(|(index, (_, session))| (common(session), index)).max()?;
        if n.min(prompt.len() - 1) <= least {
            return None;
        }
        let is_continued = n == self.0[index].1.tokens().len();
        let mut session = if is_continued { self.0.remove(index)?.1 } else { self.0[index].1.fork() };
        session.keep_prefix(prompt);
        Some(session)
    }
}
