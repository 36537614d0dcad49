//! Jobs: requests to the worker, and the events with which it answers.

use std::ops::Range;
use std::sync::Arc;

use kvant::generate::constraint::Constraints;
use kvant::generate::decoding::{DecodingOptions, FinalOutput, Finish, TokenLogprobs, TokenOutput};
use kvant::{EncodedMedia, HiddenStatePool};
use tokio::sync::mpsc::Sender;

use crate::cache_key::CacheKey;
use crate::owner_limits::Owner;
use crate::scheduler::Refusal;
use crate::status::{AnswerStats, Progress};
use crate::trace::Trace;
use crate::transfer::{FetchedSlot, KeptCache};

/// Maximum events of an answer between two checks of its channel: prompt read, prompt scored, token
/// generated, answer ended.
pub(crate) const EVENTS_OF_ANSWER: usize = 4;

/// Request for answers to one prompt.
pub(crate) struct Job {
    pub prompt: Arc<[u32]>,
    pub kind: CacheKey,
    /// API key, among which the scheduler shares the model.
    pub owner: Owner,
    /// Number of answers, and the index of the first one.
    pub n: usize,
    pub first: usize,
    /// Answers of all jobs that share the event channel.
    pub n_answers: usize,
    pub answer: Arc<DecodingOptions>,
    /// Images and audio of the prompt.
    #[expect(dead_code, reason = "their embeddings must live as long as the prompt may be read again")]
    pub media: Vec<EncodedMedia>,
    /// Constraints of the answers.
    pub guides: Constraints,
    /// Whether to report prefill progress.
    pub reports_progress: bool,
    /// Number of top logprobs per prompt token, if prompt logprobs are requested.
    pub prompt_logprobs: Option<usize>,
    /// Whether every token of the prompt is computed, as if none were cached.
    pub bypasses_prefix_cache: bool,
    /// Name under which the cache is kept for a decode worker.
    pub keeps: Option<KeptCache>,
    /// Cache of the prompt from a prefill worker.
    pub fetched: FetchedSlot,
    /// Pooling of the prompt's hidden states, for an embedding instead of answers.
    pub pooled: Option<HiddenStatePool>,
    /// Request id in the log.
    pub id: Arc<str>,
    pub trace: Trace,
    pub events: Sender<Event>,
}

/// Event of a job. The first one is [`Event::Taken`] or a refusal.
#[derive(Debug)]
pub(crate) enum Event {
    /// The job is accepted.
    Accepted,
    /// The job is refused.
    Refused(Refusal),
    /// Prefill progress.
    Prefilled(Progress),
    /// Logprobs of all prompt tokens but the first, for these answers.
    Scored(Range<usize>, Arc<[TokenLogprobs]>),
    /// Pooled hidden states of the prompt, if requested.
    Pooled(HiddenStatePool),
    /// Token of the answer at this index.
    Token(usize, TokenOutput),
    /// End of an answer, with the text that had been withheld.
    Ended(usize, Finish, FinalOutput, AnswerStats),
    /// End of all answers: the request is invalid, or an internal error occurred.
    Failed { why: String, is_of_request: bool },
}
