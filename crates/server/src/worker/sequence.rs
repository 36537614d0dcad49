//! Sequence of a job: its tokens, session, drafter and timing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvant::generate;
use kvant::generate::decoding::{SequenceDecoder, TokenLogprobs};
use kvant::{Error, HiddenStatePool, PREFIX_ALIGNMENT, SequenceStep, Session, TOKENS_PER_BLOCK};
use tracing::Span;
use xxhash_rust::xxh3::Xxh3;

use super::{Event, Job};
use crate::events::{BlockHolder, Blocks, Medium};
use crate::metrics::Metrics;
use crate::status::{AnswerStats, Progress};

/// Sequence of a job.
pub(super) struct Sequence {
    pub job: Arc<Job>,
    /// Index among all answers of the request.
    pub index: usize,
    pub session: Option<Session>,
    /// Published KV blocks that other sequences can reuse.
    held: BlockHolder,
    /// Prompt and answer. Once the prompt is read, the last token has not been fed yet.
    pub text: generate::Sequence,
    /// Logprobs of the prompt tokens from the second on, as far as computed, if requested.
    pub scored: Vec<TokenLogprobs>,
    /// Pooling of the prompt so far, until it has been sent.
    pub pooled: Option<HiddenStatePool>,
    pub submitted: Instant,
    pub progress: Progress,
    /// Time of the first generated token.
    pub first_token_at: Option<Instant>,
    pub last_token_at: Instant,
    /// Start of the client's backpressure.
    pub backpressure_since: Option<Instant>,
    /// All tokens are fed, and the mask of the next token is being computed.
    pub awaits_mask: bool,
    pub span: Span,
}

impl Sequence {
    pub fn new(job: Arc<Job>, index: usize) -> Self {
        let now = Instant::now();
        let guides = job.guides.fork();
        let decoder = SequenceDecoder::new(Arc::clone(&job.answer), guides, index);
        let text = generate::Sequence::new(job.prompt.to_vec(), decoder);
        let progress = Progress { total: job.prompt.len(), ..Progress::default() };
        Self {
            index: job.first + index,
            span: job.trace.answer(),
            pooled: job.pooled.clone(),
            job,
            session: None,
            held: BlockHolder::default(),
            text,
            scored: Vec::new(),
            submitted: now,
            progress,
            first_token_at: None,
            last_token_at: now,
            backpressure_since: None,
            awaits_mask: false,
        }
    }

    /// Reports whether the batch runs without it.
    pub fn is_paused(&self) -> bool {
        self.backpressure_since.is_some() || self.awaits_mask
    }

    /// Returns the number of top logprobs per prompt token, until all have been computed.
    pub fn scores(&self) -> Option<usize> {
        self.job.prompt_logprobs.filter(|_| self.scored.len() + 1 < self.job.prompt.len())
    }

    /// Reports whether it may reuse a cached prefix: not if the output of each prompt token is
    /// needed, or if the request bypasses the cache.
    pub fn reuses_prefix(&self) -> bool {
        self.scores().is_none() && self.pooled.is_none() && !self.job.bypasses_prefix_cache
    }

    /// Loads the cache that was fetched for it, if it has not been loaded before and the session
    /// lacks enough of it.
    pub fn load_fetched(&self, session: &mut Session, metrics: &Metrics) {
        let tokens = self.text.tokens();
        let Some(fetched) = self.job.fetched.take() else { return };
        if session.tokens().len() + TOKENS_PER_BLOCK > tokens.len() {
            return;
        }
        match session.load_saved_prefix(&fetched.saved, tokens) {
            Ok(_) => _ = metrics.kv_fetched_bytes.inc_by(fetched.saved.n_bytes()),
            Err(error) => {
                metrics.kv_fetch_failures.inc();
                tracing::warn!(%error, id = %self.job.id, "a fetched cache cannot be used: the prompt is read here");
            }
        }
    }

    /// Feeds up to `n` prompt tokens and records the logprob of each next one. Returns the number
    /// of tokens fed.
    pub fn score(&mut self, n: usize, top: usize) -> Result<usize, Error> {
        let Some(session) = &mut self.session else { return Ok(0) };
        session.score_sequence(&self.text, n, top, &mut self.scored)
    }

    /// Returns the step that feeds its next `n` tokens. `None` without a session.
    pub fn step(&mut self, n: usize) -> Option<SequenceStep<'_>> {
        let session = self.session.as_mut()?;
        Some(SequenceStep::new(session, &mut self.text, n).with_pooling(self.pooled.as_mut()))
    }

    pub fn times(&self) -> AnswerStats {
        let kv = self.session.as_ref().map(Session::kv);
        let (decoder, drafts) = (self.text.decoder(), self.text.drafts());
        AnswerStats {
            prompt: self.progress,
            n_generated: decoder.n_generated(),
            end_token: decoder.end_token(),
            n_reasoning: decoder.n_reasoning(),
            n_drafted: drafts.n_verified,
            n_accepted: drafts.n_accepted,
            decode_time: self.first_token_at.map_or(Duration::ZERO, |first| self.last_token_at - first),
            kv_bytes: kv.as_ref().map_or(0, |kv| kv.bytes),
            kv_bytes_f16: kv.as_ref().map_or(0, |kv| kv.bytes_f16),
        }
    }

    /// Sends an event. A disconnected client is detected elsewhere.
    pub fn send(&self, event: Event) {
        _ = self.job.events.try_send(event);
    }

    /// Assigns a session.
    pub fn set_session(&mut self, session: Session, blocks: &Blocks) {
        self.held = blocks.register(Medium::Device, &self.job.kind);
        self.session = Some(session);
        self.publish_blocks();
    }

    /// Removes the session.
    pub fn take_session(&mut self) -> Option<Session> {
        self.held = BlockHolder::default();
        self.session.take()
    }

    /// Publishes KV-block events for the prefix that is reusable.
    pub fn publish_blocks(&mut self) {
        if let Some(session) = &self.session {
            let tokens = session.tokens();
            self.held.grow(&tokens[..tokens.len() / PREFIX_ALIGNMENT * PREFIX_ALIGNMENT]);
        }
    }
}

/// Returns the prompt tokens that may come from the prefix cache. The last token is always
/// computed, since its logits are needed, and so is every token of a prompt whose logprobs or
/// hidden states are requested, or that bypasses the cache.
pub(super) fn shared(job: &Job) -> &[u32] {
    let is_read_whole = job.prompt_logprobs.is_some() || job.pooled.is_some() || job.bypasses_prefix_cache;
    let max_shared = if is_read_whole { 0 } else { job.prompt.len().saturating_sub(1) };
    &job.prompt[..max_shared]
}

/// Hashes each block of [`shared`] with all blocks before it and with the cache key.
pub(super) fn blocks(job: &Job) -> Arc<[u64]> {
    let mut hash = Xxh3::new();
    hash.update(&job.kind.hash().to_le_bytes());
    let name = |block: &[u32]| {
        block.iter().for_each(|token| hash.update(&token.to_le_bytes()));
        hash.digest()
    };
    shared(job).chunks_exact(TOKENS_PER_BLOCK).map(name).collect()
}
