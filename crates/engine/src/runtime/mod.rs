//! Runs a model, or a part of one, on any device.
//!
//! The types of weights, activations and pages are private to a device. This module erases them: a
//! model holds a [`LoadedModel`], a session a [`Sequence`] in it, and each step makes one dynamic
//! call.
//!
//! Operations on a sequence's cache are [`CacheOps`]: one dynamic call visits the caches on all
//! devices.
//!
//! A sequence owns its cache. Activations, logits and scratch belong to the device and are lent for
//! a step.

mod cache;
mod device_model;
mod draft_head;
mod measure;
mod pipeline;
mod sequence;

use std::sync::Arc;

use kvant_backend::{DeviceInfo, KernelChoice, TopK};
use kvant_gguf::Gguf;
use kvant_kv::{CacheState, KvShape, Plan};
use kvant_model::{Config, Entry, LogitsFor, OnQueries, Position, SoftTokens};

use crate::error::Error;

pub(crate) use cache::CacheOps;
pub(crate) use measure::Measure;

pub(crate) use device_model::load;
pub(crate) use draft_head::{OnDraft, top_with_margin};
pub use measure::StageTime;
pub(crate) use pipeline::LayerPipeline;
pub(crate) use sequence::Sequence;

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
    /// See [`BatchSequence::lora_scales`](kvant_model::BatchSequence::lora_scales).
    pub lora_scales: Option<Arc<[f32]>>,
    /// See [`BatchSequence::places`](kvant_model::BatchSequence::places).
    pub positions: Option<Arc<[Position]>>,
    /// See [`BatchSequence::tokens_before`](kvant_model::BatchSequence::tokens_before).
    pub tokens_before: Arc<[u32]>,
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
    /// Selects the most probable tokens of `rows`; see [`Backend::top_k`].
    ///
    /// [`Backend::top_k`]: kvant_backend::Backend::top_k
    fn top_k(&self, rows: &mut [TopK<'_>]) -> Result<(), Error>;
}

/// Constant properties of a loaded model, or of a part of one.
pub(crate) struct ModelProperties {
    pub info: DeviceInfo,
    /// The kernel of every op and type.
    pub kernel_choices: Vec<KernelChoice>,
    /// Hyper-parameters of the whole model.
    pub config: Config,
    /// KV heads of the layers in this part.
    pub kv_shape: KvShape,
    pub n_vocab: usize,
    /// Soft tokens beyond the vocabulary.
    pub soft_tokens: Arc<SoftTokens>,
    /// Bytes of weights in the file's types.
    pub weight_bytes: usize,
    /// Bytes of weights that one decoded token reads.
    pub weight_bytes_per_token: usize,
    /// Whether an MTP layer or another draft head is loaded.
    pub has_draft_head: bool,
}

/// The weights of a model, or of a part of one, on a device.
pub(crate) trait LoadedModel: KvCaches + Measure + Send + Sync {
    fn properties(&self) -> &ModelProperties;
    /// Runs a step over the rows of all sequences in `batch`, in order, each behind the tokens of
    /// its sequence. Returns the logits of the requested rows, in order, if there are any. Steps
    /// without requested logits write the [hidden states](kvant_model::Decoder::hidden_states) to
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
    /// Loads the kernels of steps with caches of `plan`, so that no step has to. Returns how many
    /// there are: none where loading takes no time.
    fn warm_up(&self, plan: &Plan) -> Result<usize, Error> {
        _ = plan;
        Ok(0)
    }
    /// Waits until the device has completed all steps.
    fn finish(&self) -> Result<(), Error>;
}

/// The caches of the sequences on a device, or on several.
pub(crate) trait KvCaches {
    /// Starts an empty sequence. Returns its context length, and the plan with notes on changes.
    fn start(&self, id: SequenceId, plan: Plan, room: ContextSize) -> Result<(usize, Plan), Error>;
    /// Restores a sequence from page images; `next` returns each by its index in the order of
    /// [`Sequence::pages`].
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
    /// Calls `f` with the cache of a sequence on each device, in the order of the layers.
    fn visit(&self, id: SequenceId, f: &mut dyn FnMut(&mut dyn CacheOps));
    /// Returns the bytes that a sequence of `tokens` tokens allocates, shared ones included;
    /// `usize::MAX` on overflow.
    fn bytes_for(&self, plan: &Plan, tokens: usize) -> usize;
    /// Returns how many sequences of `tokens` tokens fit the memory, when no other holds any.
    fn max_sequences(&self, plan: &Plan, tokens: usize) -> Result<usize, Error>;
    /// Returns the bytes allocated by all sequences together; shared ones count once.
    fn pool_bytes(&self) -> usize;
    /// Limits the bytes allocated by all sequences together.
    fn set_budget(&self, bytes: usize);
}

#[cfg(test)]
mod tests;
