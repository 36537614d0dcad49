//! A sequence of a job: what it has read and said, and when.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvant::{BORDER, Error, Feed, Guesser, Pooled, Session, TOKENS_PER_BLOCK};
use tracing::Span;
use xxhash_rust::xxh3::Xxh3;

use super::{Event, Job, Progress, Times};
use crate::answer::{Likelihood, Voice, likelihood};
use crate::events::{Blocks, Held, Medium};

/// The most rows of a prompt in a step whose tokens are all scored: the logits of each are held.
const SCORED_ROWS: usize = 64;

/// A sequence of a job.
pub(super) struct Course {
    pub job: Arc<Job>,
    /// Among all answers of the request.
    pub index: usize,
    pub session: Option<Session>,
    /// Blocks of it that others can begin with.
    held: Held,
    /// The prompt and what was said. Once the prompt is read, the last one has not been fed yet.
    pub tokens: Vec<u32>,
    pub voice: Voice,
    pub guesser: Guesser,
    /// Guesses that were read, and those that were said after all.
    pub n_drafted: usize,
    pub n_accepted: usize,
    /// How likely the tokens of the prompt were, from the second one on, as far as that is known and asked for.
    pub scored: Vec<Likelihood>,
    /// The states of the prompt, as far as it has been read, while they are still to be told.
    pub pooled: Option<Pooled>,
    pub submitted: Instant,
    pub progress: Progress,
    /// When the first token was said.
    pub spoke: Option<Instant>,
    pub last_said: Instant,
    /// Since when nobody listens.
    pub unheard: Option<Instant>,
    /// It has read all, and what it may say next is being worked out.
    pub awaits_mask: bool,
    pub span: Span,
}

impl Course {
    pub fn new(job: Arc<Job>, index: usize) -> Self {
        let now = Instant::now();
        let guides = job.guides.fork();
        let voice = Voice::new(Arc::clone(&job.answer), guides, index);
        let tokens = job.prompt.to_vec();
        let progress = Progress { total: tokens.len(), ..Progress::default() };
        Self {
            index: job.first + index,
            span: job.trace.answer(),
            pooled: job.pooled.clone(),
            job,
            session: None,
            held: Held::default(),
            tokens,
            voice,
            guesser: Guesser::default(),
            n_drafted: 0,
            n_accepted: 0,
            scored: Vec::new(),
            submitted: now,
            progress,
            spoke: None,
            last_said: now,
            unheard: None,
            awaits_mask: false,
        }
    }

    /// Whether others go on without it.
    pub fn is_held_back(&self) -> bool {
        self.unheard.is_some() || self.awaits_mask
    }

    /// How many likeliest tokens to tell beside each of the prompt, while they are still to be told.
    pub fn scores(&self) -> Option<usize> {
        self.job.scores.filter(|_| self.scored.len() + 1 < self.job.prompt.len())
    }

    /// Whether it begins with what others have read: not where each token is wanted.
    pub fn takes_over(&self) -> bool {
        self.scores().is_none() && self.pooled.is_none()
    }

    /// Reads rows of the prompt and takes note of how likely each next token was. Returns how many rows.
    pub fn score(&mut self, n: usize, top: usize) -> Result<usize, Error> {
        let Some(session) = &mut self.session else { return Ok(0) };
        let at = session.tokens().len();
        let n = n.min(SCORED_ROWS).min(session.most_tokens());
        let (prompt, scored) = (&self.job.prompt, &mut self.scored);
        session.feed_scored(&self.tokens[at..at + n], 0, &mut |row, logits| {
            // What was read before it was parked is known.
            if let Some(&next) = prompt.get(at + row + 1).filter(|_| scored.len() == at + row) {
                scored.push(likelihood(logits, next, top));
            }
        })?;
        Ok(n)
    }

    /// Its next `n` tokens for its session and, where it speaks, at most so many guesses of what comes after. Predictions take their time for each
    /// sequence, while all share that of a step: they are made for one that is alone. `None` without a session.
    pub fn feed(&mut self, n: usize, most_guesses: usize, is_alone: bool) -> Option<Feed<'_>> {
        let session = self.session.as_mut()?;
        let at = session.tokens().len();
        let tokens = &self.tokens[at..at + n];
        let is_last = at + n == self.tokens.len();
        let may_guess = is_last && self.spoke.is_some() && most_guesses > 0;
        let guesses = match *tokens {
            [token] if may_guess && !session.foresees(token) => match is_alone {
                true => session.guess(&mut self.guesser, token, most_guesses),
                false => self.guesser.guess(session.tokens(), token, most_guesses),
            },
            _ => &[],
        };
        Some(Feed { guesses, pooled: self.pooled.as_mut(), ..Feed::new(session, tokens) })
    }

    pub fn times(&self) -> Times {
        let kv = self.session.as_ref().map(Session::kv);
        Times {
            prompt: self.progress,
            n_said: self.voice.n_said(),
            n_thought: self.voice.n_thought(),
            n_drafted: self.n_drafted,
            n_accepted: self.n_accepted,
            speaking: self.spoke.map_or(Duration::ZERO, |spoke| self.last_said - spoke),
            kv_bytes: kv.as_ref().map_or(0, |kv| kv.bytes),
            kv_bytes_f16: kv.as_ref().map_or(0, |kv| kv.bytes_f16),
        }
    }

    /// Tells; whoever has gone is noticed elsewhere.
    pub fn tell(&self, event: Event) {
        _ = self.job.events.try_send(event);
    }

    /// Gives it a cache.
    pub fn set_session(&mut self, session: Session, blocks: &Blocks) {
        self.held = blocks.hold(Medium::Device, &self.job.kind);
        self.session = Some(session);
        self.tell_blocks();
    }

    /// Takes its cache away.
    pub fn take_session(&mut self) -> Option<Session> {
        self.held = Held::default();
        self.session.take()
    }

    /// Whoever wants to know is told of what it has read, as far as others can begin with that.
    pub fn tell_blocks(&mut self) {
        if let Some(session) = &self.session {
            let tokens = session.tokens();
            self.held.grow(&tokens[..tokens.len() / BORDER * BORDER]);
        }
    }
}

/// What a job may take over from others. The last token is always read, so that there is something to go on from; what is to be scored
/// is, whoever has read it before.
pub(super) fn shared(job: &Job) -> &[u32] {
    let is_read_whole = job.scores.is_some() || job.pooled.is_some();
    let most = if is_read_whole { 0 } else { job.prompt.len().saturating_sub(1) };
    &job.prompt[..most]
}

/// Names each block of that, with whatever keeps it from being that of another.
pub(super) fn blocks(job: &Job) -> Arc<[u64]> {
    let mut hash = Xxh3::new();
    hash.update(format!("{:?}", job.kind.names()).as_bytes());
    let name = |block: &[u32]| {
        block.iter().for_each(|token| hash.update(&token.to_le_bytes()));
        hash.digest()
    };
    shared(job).chunks_exact(TOKENS_PER_BLOCK).map(name).collect()
}
