//! Published state of a worker, for metrics and health, and of an answer.

use std::time::Duration;

use crate::scheduler::Counts;
use crate::store::StoreUse;

/// State of a worker as of its last step.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Status {
    pub counts: Counts,
    /// Idle sessions.
    pub idle: usize,
    /// Bytes of all caches; shared blocks count once.
    pub kv_bytes: usize,
    /// Bytes of running sequences; shared blocks count for each.
    pub running_bytes: usize,
    /// Bytes of idle sessions; shared blocks count for each.
    pub idle_bytes: usize,
    /// Tokens of running sequences.
    pub tokens: usize,
    /// Bytes that unshared f16 caches of the running sequences, and of the idle ones, would need.
    pub running_bytes_f16: usize,
    pub idle_bytes_f16: usize,
    pub budget: usize,
    /// Offloaded sessions.
    pub store: StoreUse,
}

impl std::iter::Sum for Status {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |a, b| Self {
            counts: a.counts + b.counts,
            idle: a.idle + b.idle,
            kv_bytes: a.kv_bytes + b.kv_bytes,
            running_bytes: a.running_bytes + b.running_bytes,
            idle_bytes: a.idle_bytes + b.idle_bytes,
            tokens: a.tokens + b.tokens,
            running_bytes_f16: a.running_bytes_f16 + b.running_bytes_f16,
            idle_bytes_f16: a.idle_bytes_f16 + b.idle_bytes_f16,
            budget: a.budget + b.budget,
            store: a.store + b.store,
        })
    }
}

/// Prefill progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Progress {
    pub total: usize,
    /// Tokens taken from the prefix cache.
    pub cached: usize,
    /// Tokens present in the cache now.
    pub done: usize,
    pub took: Duration,
}

/// Counts and times of an answer, and the size of its cache.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct AnswerStats {
    pub prompt: Progress,
    pub n_generated: usize,
    /// Token that ended the answer, which does not count as generated.
    pub end_token: Option<u32>,
    /// Reasoning tokens.
    pub n_reasoning: usize,
    /// Draft tokens that were verified, and those that were accepted.
    pub n_drafted: usize,
    pub n_accepted: usize,
    pub decode_time: Duration,
    pub kv_bytes: usize,
    pub kv_bytes_f16: usize,
}
