//! Runs a model, or a part of one, on any device.
//!
//! The types of weights, activations and pages are private to a device. This module erases them: a
//! model holds a [`Loaded`], a session the [id](SequenceId) of a sequence in it, and each step
//! makes one dynamic call.
//!
//! A sequence owns its cache. Activations, logits and scratch belong to the device and are lent for
//! a step.

mod device_model;
mod mtp;
mod pipeline;
mod sequence;

use std::sync::Arc;

use kvant_backend::{Candidate, DeviceInfo, KernelChoice};
use kvant_codec::Side;
use kvant_codec::random::Random;
use kvant_gguf::Gguf;
use kvant_kv::{BlockKey, CacheState, KvShape, Plan};
use kvant_model::{Config, Entry, LogitsFor, OnQueries, Position, SoftTokens};

use crate::Error;
use crate::profile::StageTime;

pub(crate) use device_model::load;
pub(crate) use mtp::{OnDraft, top_with_margin};
pub(crate) use pipeline::LayerPipeline;
pub(crate) use sequence::Sequence;

/// Maximum of rows in a step.
pub(crate) const MAX_ROWS: usize = 512;

/// Id of a sequence, chosen by the caller that starts it; the same in all parts of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SequenceId(u64);

/// One sequence of a step.
#[derive(Debug, Clone)]
pub(crate) struct BatchEntry {
    pub id: SequenceId,
    /// Number of rows, at least one.
    pub n: usize,
    /// Rows whose logits are computed.
    pub logits_for: LogitsFor,
    /// See [`BatchSequence::strengths`](kvant_model::BatchSequence::strengths).
    pub lora_scales: Option<Arc<[f32]>>,
    /// See [`BatchSequence::places`](kvant_model::BatchSequence::places).
    pub positions: Option<Arc<[Position]>>,
}

/// Context length of a sequence, in tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ContextSize {
    /// This length, or an error.
    Exactly(usize),
    /// As much as fits the device's memory, up to this length.
    UpTo(usize),
}

/// Logits of a step, on loan until dropped.
pub(crate) trait Logits: Send + Sync {
    /// Copies row `row` into `out` `[n_vocab]`.
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), Error>;
    /// Writes the `k` most probable tokens of row `row` to `out`.
    fn top_k(&self, row: usize, k: usize, out: &mut Vec<Candidate>) -> Result<(), Error>;
}

/// The weights of a model, or of a part of one, on a device.
pub(crate) trait LoadedModel: KvCaches + Send + Sync {
    /// Returns the device information.
    fn info(&self) -> DeviceInfo;
    /// Returns the kernel of every op and type.
    fn kernel_choices(&self) -> Vec<KernelChoice>;
    /// Returns the hyper-parameters.
    fn config(&self) -> &Config;
    /// Returns the KV heads of the layers in this part.
    fn kv_shape(&self) -> KvShape;
    /// Returns the vocabulary size.
    fn n_vocab(&self) -> usize;
    /// Returns the soft tokens beyond the vocabulary.
    fn soft_tokens(&self) -> &Arc<SoftTokens>;
    /// Returns the bytes of weights in the file's types.
    fn weight_bytes(&self) -> usize;
    /// Returns the bytes of weights that one decoded token reads.
    fn weight_bytes_per_token(&self) -> usize;

    /// Runs a step over the rows of all sequences in `batch`, in order, each behind the tokens of
    /// its sequence. Returns the logits of the requested rows, in order, if there are any. Steps
    /// without requested logits write the [final hidden states](kvant_model::Decoder::left) to
    /// `left` `[rows, n_embd]`. `queries` receives the queries of every layer, by KV layer. After
    /// an error every sequence is unchanged or, when the device failed within the step, shorter.
    fn step(
        &self,
        batch: &[BatchEntry],
        entry: Entry<'_>,
        left: Option<&mut Vec<f32>>,
        queries: OnQueries<'_>,
    ) -> Result<Option<Arc<dyn Logits>>, Error>;
    /// Loads a second model, whole, onto the same device (for a split model, onto that of the first
    /// layers). The caches of both share one budget.
    fn load_beside(
        &self,
        config: Config,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error>;
    /// Returns whether an MTP layer is loaded.
    fn predicts(&self) -> bool {
        false
    }
    /// Passes predictions behind `next` to `on_prediction`, one token after the other until it
    /// returns `false`. `next` follows the `at` tokens of a sequence, cached or uncommitted. Does
    /// nothing without an MTP layer, or where it does not follow this sequence.
    fn predict(&self, _id: SequenceId, _at: usize, _next: u32, _on_prediction: OnDraft<'_>) {}
    /// Waits until the device has completed all steps.
    fn finish(&self) -> Result<(), Error>;
    /// Appends `n` tokens with random keys and values.
    fn append_random(&self, id: SequenceId, n: usize, random: &mut Random) -> Result<(), Error>;
    /// Times attention over a sequence with stages of the cache read left out.
    fn profile_attention(&self, id: SequenceId, repetitions: usize) -> Result<Vec<StageTime>, Error>;
}

/// The caches of the sequences on a device.
pub(crate) trait KvCaches {
    /// Starts an empty sequence. Returns its context length, and the plan with notes on changes.
    fn start(&self, id: SequenceId, plan: Plan, room: ContextSize) -> Result<(usize, Plan), Error>;
    /// Restores a sequence from page images; `next` returns each by its index in the order of
    /// [`KvCaches::images`].
    fn restore(
        &self,
        id: SequenceId,
        plan: Plan,
        n_ctx: usize,
        state: CacheState,
        next: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>,
    ) -> Result<(), Error>;
    /// Starts a second sequence with the same tokens; all memory is copy-on-write.
    fn fork(&self, from: SequenceId, to: SequenceId);
    /// Releases a sequence.
    fn release(&self, id: SequenceId);
    /// Returns the number of tokens stored and of tiles coded.
    fn state(&self, id: SequenceId) -> CacheState;
    /// Sets the context length, which stays at least the number of stored tokens.
    fn set_n_ctx(&self, id: SequenceId, n_ctx: usize);
    /// See [`Cache::max_step_rows`](kvant_kv::Cache::max_step_rows).
    fn max_rows(&self, id: SequenceId) -> usize;
    /// See [`Cache::reserve_draft`](kvant_kv::Cache::reserve_draft).
    fn reserve_draft(&self, id: SequenceId, known: usize, max: usize) -> usize;
    /// See [`Cache::rest`](kvant_kv::Cache::rest).
    fn release_scratch(&self, id: SequenceId);
    /// See [`Cache::cut`](kvant_kv::Cache::cut).
    fn truncate(&self, id: SequenceId, n: usize) -> usize;
    /// See [`Cache::mark`](kvant_kv::Cache::mark).
    fn set_checkpoint(&self, id: SequenceId);
    /// See [`Cache::set_prefix_root`](kvant_kv::Cache::set_prefix_root).
    fn set_prefix_root(&self, id: SequenceId, root: BlockKey);
    /// See [`Cache::publish`](kvant_kv::Cache::publish).
    fn register_prefix(&self, id: SequenceId, tokens: &[u32]);
    /// See [`Cache::attach`](kvant_kv::Cache::attach); attaches at most the first `max` tokens.
    fn attach_prefix(&self, id: SequenceId, tokens: &[u32], max: usize) -> usize;
    /// Returns the decoded keys or values of one head, `[tokens, head_dim]`.
    fn rows(&self, id: SequenceId, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error>;
    /// Returns the bytes of each page image of [`KvCaches::images`].
    fn page_bytes(&self, id: SequenceId) -> Vec<usize>;
    /// Passes a byte image of every page of a sequence to `visit`.
    fn pages(&self, id: SequenceId, visit: &mut dyn FnMut(Vec<u8>) -> Result<(), Error>)
    -> Result<(), Error>;
    /// Returns the bytes allocated by a sequence, shared ones included.
    fn n_bytes(&self, id: SequenceId) -> usize;
    /// Returns the bytes that a sequence of `tokens` tokens allocates, shared ones included;
    /// `usize::MAX` on overflow.
    fn bytes_for(&self, plan: &Plan, tokens: usize) -> usize;
    /// Returns the bytes allocated by all sequences together; shared ones count once.
    fn pool_bytes(&self) -> usize;
    /// Limits the bytes allocated by all sequences together.
    fn set_budget(&self, bytes: usize);
}

#[cfg(test)]
mod tests;
