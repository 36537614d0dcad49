//! A model, or a part of one, on a device, whichever device it is.
//!
//! The types of weights, activations and pages are a device's own. They meet here and nowhere above: a model holds a
//! [`Loaded`], a session the [number](SequenceId) of a sequence in it, and each step crosses that border once.
//!
//! What a sequence owns is its cache. Activations, logits and scratch belong to the device and are lent for a step.

mod mtp;
mod on;
mod relay;
mod sequence;

use std::sync::Arc;

use kvant_backend::{Candidate, DeviceInfo, KernelChoice};
use kvant_codec::Side;
use kvant_codec::random::Random;
use kvant_gguf::Gguf;
use kvant_kv::{BlockKey, CacheState, KvShape, Plan};
use kvant_model::{Config, Entry, ExtraTokens, OnQueries, Place, Want};

use crate::Error;
use crate::profile::StageTime;

pub(crate) use mtp::{OnPrediction, leader};
pub(crate) use on::load;
pub(crate) use relay::Relay;
pub(crate) use sequence::Sequence;

/// The most rows that go through the layers together.
pub(crate) const MAX_ROWS: usize = 512;

/// The number of a sequence, chosen by whoever starts it; all parts of a model know it by the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SequenceId(u64);

/// One sequence of a step.
#[derive(Debug, Clone)]
pub(crate) struct StepRow {
    pub id: SequenceId,
    /// Its rows, at least one.
    pub n: usize,
    /// Which of them get logits.
    pub want: Want,
    /// See [`StepPart::strengths`](kvant_model::StepPart::strengths).
    pub strengths: Option<Arc<[f32]>>,
    /// See [`StepPart::places`](kvant_model::StepPart::places).
    pub places: Option<Arc<[Place]>>,
}

/// How many tokens a context is to hold.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Room {
    /// As many, or an error.
    Exactly(usize),
    /// As many as the device's memory holds, up to this.
    UpTo(usize),
}

/// Logits of a step, on loan for as long as somebody holds them.
pub(crate) trait Logits: Send + Sync {
    /// Copies row `row` into `out` `[n_vocab]`.
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), Error>;
    /// The `k` likeliest tokens of row `row` into `out`.
    fn top_k(&self, row: usize, k: usize, out: &mut Vec<Candidate>) -> Result<(), Error>;
}

/// The weights of a model, or of a part of one, on a device.
pub(crate) trait Loaded: Caches + Send + Sync {
    /// The device.
    fn info(&self) -> DeviceInfo;
    /// The kernel for every op and type.
    fn kernel_choices(&self) -> Vec<KernelChoice>;
    /// The hyper-parameters.
    fn config(&self) -> &Config;
    /// The KV heads of the layers that are here.
    fn kv_shape(&self) -> KvShape;
    /// Size of the vocabulary.
    fn n_vocab(&self) -> usize;
    /// The tokens beyond it.
    fn extra(&self) -> &Arc<ExtraTokens>;
    /// Bytes of weights in the file's types.
    fn weight_bytes(&self) -> usize;
    /// Bytes of weights that one decoded token reads.
    fn weight_bytes_per_token(&self) -> usize;

    /// Runs what enters, the rows of all of `batch` one after the other, each after what its sequence holds. Gives the logits
    /// of the wanted rows, one after the other, where there are any. What the rows have [left](kvant_model::Decoder::left), which
    /// steps without wanted rows tell, comes to lie in `left` `[rows, n_embd]`. `queries` is told those of every layer, by KV layer. After an error every sequence holds what it held or, when the device failed in the middle
    /// of the step, fewer tokens.
    fn step(
        &self,
        batch: &[StepRow],
        entry: Entry<'_>,
        left: Option<&mut Vec<f32>>,
        queries: OnQueries<'_>,
    ) -> Result<Option<Arc<dyn Logits>>, Error>;
    /// Loads another, whole model onto the same device, or that of the first layers. The caches of both are counted together.
    fn load_beside(
        &self,
        config: Config,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn Loaded>, Error>;
    /// Whether there is a layer that predicts the token after the next.
    fn predicts(&self) -> bool {
        false
    }
    /// Tells what may come behind `next`, which comes behind the `at` tokens of a sequence that its cache holds or is owed: one token after the other, as
    /// long as `on_prediction` likes. Nothing where nothing predicts, or nothing follows this sequence.
    fn predict(&self, _id: SequenceId, _at: usize, _next: u32, _on_prediction: OnPrediction<'_>) {}
    /// Waits until the device has done what the steps asked for.
    fn finish(&self) -> Result<(), Error>;
    /// Appends `n` tokens with random keys and values.
    fn append_random(&self, id: SequenceId, n: usize, random: &mut Random) -> Result<(), Error>;
    /// Times attention over a sequence with stages of its reading left out.
    fn profile_attention(&self, id: SequenceId, repetitions: usize) -> Result<Vec<StageTime>, Error>;
}

/// The caches of the sequences on a device.
pub(crate) trait Caches {
    /// An empty sequence. Returns how many tokens fit, and the plan with what had to be changed.
    fn start(&self, id: SequenceId, plan: Plan, room: Room) -> Result<(usize, Plan), Error>;
    /// A sequence from the pages of another, asked for in the order of [`Caches::images`] with their number.
    fn restore(
        &self,
        id: SequenceId,
        plan: Plan,
        n_ctx: usize,
        state: CacheState,
        next: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>,
    ) -> Result<(), Error>;
    /// A second sequence with the same tokens, which shares all memory until one side writes.
    fn fork(&self, from: SequenceId, to: SequenceId);
    /// Lets go of a sequence.
    fn release(&self, id: SequenceId);
    /// Tokens stored, and tiles that are coded.
    fn state(&self, id: SequenceId) -> CacheState;
    /// Changes how many tokens fit; at least those that are stored do.
    fn set_n_ctx(&self, id: SequenceId, n_ctx: usize);
    /// See [`Cache::most_rows`](kvant_kv::Cache::most_rows).
    fn most_rows(&self, id: SequenceId) -> usize;
    /// See [`Cache::try_on`](kvant_kv::Cache::try_on).
    fn try_on(&self, id: SequenceId, known: usize, most: usize) -> usize;
    /// See [`Cache::rest`](kvant_kv::Cache::rest).
    fn rest(&self, id: SequenceId);
    /// See [`Cache::cut`](kvant_kv::Cache::cut).
    fn cut(&self, id: SequenceId, n: usize) -> usize;
    /// See [`Cache::mark`](kvant_kv::Cache::mark).
    fn mark(&self, id: SequenceId);
    /// See [`Cache::set_root`](kvant_kv::Cache::set_root).
    fn set_root(&self, id: SequenceId, root: BlockKey);
    /// See [`Cache::publish`](kvant_kv::Cache::publish).
    fn publish(&self, id: SequenceId, tokens: &[u32]);
    /// See [`Cache::attach`](kvant_kv::Cache::attach); takes no more than the first `most` tokens.
    fn attach(&self, id: SequenceId, tokens: &[u32], most: usize) -> usize;
    /// Cached keys or values of one head as numbers, `[tokens, head_dim]`.
    fn rows(&self, id: SequenceId, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error>;
    /// Bytes of each page that [`Caches::images`] hands over.
    fn image_bytes(&self, id: SequenceId) -> Vec<usize>;
    /// Hands every page of a sequence to `visit`, byte for byte.
    fn images(
        &self,
        id: SequenceId,
        visit: &mut dyn FnMut(Vec<u8>) -> Result<(), Error>,
    ) -> Result<(), Error>;
    /// Bytes that a sequence has allocated, shared ones too.
    fn n_bytes(&self, id: SequenceId) -> usize;
    /// Those that one of so many tokens allocates, shared ones too; `usize::MAX` when they are more than that.
    fn bytes_for(&self, plan: &Plan, tokens: usize) -> usize;
    /// Bytes that all sequences have allocated together, shared ones once.
    fn pool_bytes(&self) -> usize;
    /// Refuses to allocate more than so many bytes for all sequences together.
    fn set_budget(&self, bytes: usize);
}

#[cfg(test)]
mod tests;
