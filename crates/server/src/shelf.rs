//! Conversations that nobody is waiting for: kept as long as there is memory, since most of them go on.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use kvant::{Error, KvOptions, Model, Session, TOKENS_PER_BLOCK};
use xxhash_rust::xxh3::xxh3_64;

use crate::events::{Blocks, Held, Medium};
use crate::scheduler::Cost;

/// What a cache stores, and of which model, with a name for it: a plan's factors are many numbers to compare.
#[derive(Debug)]
pub(crate) struct Stored {
    pub options: KvOptions,
    /// How much of each adapter tokens are made with; as much as those were loaded with where nothing is said.
    pub strengths: Option<Arc<[f32]>>,
    /// What a cache takes, once it has been worked out.
    cost: OnceLock<Cost>,
    name: u64,
}

impl Stored {
    pub fn new(options: KvOptions, strengths: Option<Arc<[f32]>>) -> Arc<Self> {
        let adapters = strengths.as_ref().map_or_else(String::new, |strengths| format!(" {strengths:?}"));
        let name = xxh3_64(format!("{options:?}{adapters}").as_bytes());
        Arc::new(Self { options, strengths, cost: OnceLock::new(), name })
    }

    /// What a cache of the model takes that stores this.
    ///
    /// # Errors
    /// Types that the model cannot have.
    pub fn cost(&self, model: &Model) -> Result<Cost, Error> {
        if let Some(&cost) = self.cost.get() {
            return Ok(cost);
        }
        let shape = model.config().kv_shape();
        let plan = self.options.plan(&shape)?;
        let bytes = |n_blocks: usize| model.kv_bytes_for(&plan, n_blocks * TOKENS_PER_BLOCK);
        let block = (bytes(16) - bytes(8)) / 8;
        // Where the answer begins is remembered, and states before guesses.
        let cost = Cost { fixed: bytes(8) - 8 * block + plan.bytes_aside(&shape), block };
        Ok(*self.cost.get_or_init(|| cost))
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

/// A conversation that nobody is waiting for.
pub(crate) struct Idle {
    pub kind: Kind,
    pub session: Session,
    /// Whether it is a copy, left where prompts part: it stays for the next one, whoever goes on from it.
    pub is_branch: bool,
    /// Whoever wants to know is told that its blocks are here.
    _held: Held,
}

impl Idle {
    /// Tokens with which it and `prompt` begin.
    fn common(&self, prompt: &[u32]) -> usize {
        self.session.tokens().iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }
}

/// The conversations.
pub(crate) struct Shelf {
    /// The one used longest ago first.
    idle: VecDeque<Idle>,
    blocks: Blocks,
}

impl Shelf {
    /// One without any, whose blocks are told of.
    pub fn new(blocks: Blocks) -> Self {
        Self { idle: VecDeque::new(), blocks }
    }

    /// Conversations, copies of their beginnings left out.
    pub fn len(&self) -> usize {
        self.idle.iter().filter(|idle| !idle.is_branch).count()
    }

    /// Whether there is nothing to let go of.
    pub fn is_empty(&self) -> bool {
        self.idle.is_empty()
    }

    /// All conversations, and copies of their beginnings.
    pub fn sessions(&self) -> impl Iterator<Item = &Session> {
        self.idle.iter().map(|idle| &idle.session)
    }

    /// Keeps a conversation. One that is its beginning and no more is let go of: nobody will miss it.
    pub fn put(&mut self, kind: Kind, mut session: Session) {
        session.rest();
        self.idle.retain(|old| {
            old.is_branch || old.kind != kind || !session.tokens().starts_with(old.session.tokens())
        });
        self.push(kind, session, false);
    }

    /// Keeps a copy of a beginning.
    pub fn put_branch(&mut self, kind: Kind, mut session: Session) {
        session.rest();
        self.idle
            .retain(|old| !old.is_branch || old.kind != kind || session.tokens() != old.session.tokens());
        self.push(kind, session, true);
    }

    fn push(&mut self, kind: Kind, session: Session, is_branch: bool) {
        let mut held = self.blocks.hold(Medium::Device, &kind);
        held.grow(session.tokens());
        self.idle.push_back(Idle { kind, session, is_branch, _held: held });
    }

    /// Lets go of the conversation that was used longest ago. What others share with it stays.
    pub fn evict(&mut self) -> Option<Idle> {
        self.idle.pop_front()
    }

    /// Tokens with which `prompt` and a conversation begin: the most there are.
    pub fn common(&self, kind: &Kind, prompt: &[u32]) -> usize {
        self.idle.iter().filter(|idle| idle.kind == *kind).map(|idle| idle.common(prompt)).max().unwrap_or(0)
    }

    /// The most that there is of `prompt` but for its last token, where that is more than `least`: a conversation that it continues,
    /// or else a copy that shares memory with one, cut to what they have in common.
    pub fn take(&mut self, kind: &Kind, prompt: &[u32], least: usize) -> Option<Session> {
        let most = prompt.len() - 1;
        let of_kind = self.idle.iter().enumerate().filter(|(_, idle)| idle.kind == *kind);
        let shared: Vec<_> = of_kind.map(|(index, idle)| (idle.common(prompt).min(most), index)).collect();
        let &(common, index) = shared.iter().max()?;
        let is_whole = |&(n, index): &(usize, usize)| n == self.idle[index].session.tokens().len();
        let whole = shared.iter().copied().filter(is_whole).max();
        let n_whole = whole.map_or(0, |(n, _)| n);
        // What is cut may end at an earlier place.
        let cut = (common > n_whole.max(least)).then(|| {
            let mut cut = self.idle[index].session.fork();
            cut.keep_prefix(prompt);
            cut
        });
        let cut = cut.filter(|cut| cut.tokens().len() > n_whole.max(least));
        let (index, session) = match (cut, whole) {
            (Some(cut), _) => (index, Some(cut)),
            (None, Some((n, index))) if n > least => (index, None),
            _ => return None,
        };
        let idle = self.idle.remove(index)?;
        if session.is_none() && !idle.is_branch {
            return Some(idle.session);
        }
        let session = session.unwrap_or_else(|| idle.session.fork());
        // What is used stays longest.
        self.idle.push_back(idle);
        Some(session)
    }
}
