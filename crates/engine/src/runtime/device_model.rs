//! A model, or a part of one, on one device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvant_backend::{Activation, Backend, BackendError, DeviceInfo, Page, TopK, limits};
use kvant_gguf::Gguf;
use kvant_kv::{BlockPool, Cache, CacheState, KvShape, Layout, Plan};
use kvant_model::{
    Activations, BatchSequence, Config, Decoder, DraftHeadConfig, Entry, LayerRange, ModelError, OnQueries,
    Outputs, ResidualStreams, StepError, Weights,
};

use super::cache::{CacheOps, DeviceCache, PooledDevice, SequenceCaches};
use super::draft_head::DraftHead;
use super::{BatchEntry, ContextSize, KvCaches, LoadedModel, Logits, ModelProperties, SequenceId};
use crate::error::Error;

/// Device memory reserved for the scratch of ops besides that of experts, in bytes.
const RESERVED_BYTES: usize = 256 << 20;

/// What every operation expects of its sequence.
const STARTED: &str = "a sequence that was started and not released";

/// A device, the weights on it, and its sequences.
pub(super) struct DeviceModel<B: Backend> {
    pub device: PooledDevice<B>,
    pub decoder: Decoder<B>,
    properties: ModelProperties,
    state: Mutex<State<B>>,
}

/// The mutable state of steps.
pub(super) struct State<B: Backend> {
    sequences: HashMap<SequenceId, SequenceCaches<B::Page>>,
    pub act: Activations<B>,
    /// Buffers of logits; those without a borrower are reused.
    logits: Vec<Arc<LogitsBuffer<B>>>,
    head: Option<DraftHead<B>>,
    /// Hidden states of a step, for the draft head, `[rows, width]`.
    hidden: Vec<f32>,
}

/// Rows of logits `[rows, n_vocab]`.
struct LogitsBuffer<B: Backend> {
    device: Arc<B>,
    buffer: B::Buffer,
    rows: usize,
    n_vocab: usize,
}

/// Loads `part` of a model onto `device`; `progress` receives the fraction loaded.
pub(crate) fn load<B: Backend>(
    device: B,
    config: Config,
    part: &LayerRange,
    gguf: &Arc<Gguf>,
    progress: &mut dyn FnMut(f32),
) -> Result<Arc<dyn LoadedModel>, Error> {
    load_with(Arc::new(device), BlockPool::default(), config, part, gguf, progress)
}

fn load_with<B: Backend>(
    device: Arc<B>,
    pool: BlockPool<B::Page>,
    config: Config,
    part: &LayerRange,
    gguf: &Arc<Gguf>,
    progress: &mut dyn FnMut(f32),
) -> Result<Arc<dyn LoadedModel>, Error> {
    check_guard(&device.info(), part)?;
    check_selection(&device.info(), &config, part)?;
    check_weights(&*device, part, &config, gguf)?;
    // Speculative decoding needs batch-invariant steps of several rows.
    let drafts = device.info().batch_invariant_rows > 1;
    let of_file = match part.draft_head() {
        Some(file) if drafts => Some((file, DraftHeadConfig::of(file, &config, n_vocab(gguf)?)?)),
        _ => None,
    };
    let weights = Weights::load(gguf, &config, part, &*device, progress)?;
    let of_head = match &of_file {
        Some((file, head)) => Some(weights.load_draft_head(file, head, &*device)?),
        None if drafts => weights.load_mtp(gguf, &config, &*device)?,
        None => None,
    };
    let mut decoder = Decoder::new(config, weights);
    let head = match (of_file, of_head) {
        (Some((_, head)), Some(weights)) => {
            decoder = decoder.with_captures(&head);
            Some(DraftHead::of_file(&*device, &decoder, head, weights)?)
        }
        (_, Some(weights)) => Some(DraftHead::mtp(&*device, &decoder, weights)?),
        (_, None) => None,
    };
    let act = decoder.activations(&*device, device.info().max_step_rows)?;
    let properties = ModelProperties {
        info: device.info(),
        kernel_choices: device.kernel_choices(),
        config: decoder.config().clone(),
        kv_shape: decoder.kv_shape(),
        n_vocab: decoder.n_vocab(),
        soft_tokens: Arc::clone(decoder.extra()),
        weight_bytes: decoder.weight_bytes() + head.as_ref().map_or(0, DraftHead::weight_bytes),
        weight_bytes_per_token: decoder.weight_bytes_per_token(),
        has_draft_head: head.is_some(),
    };
    let (sequences, logits, hidden) = (HashMap::new(), Vec::new(), Vec::new());
    let state = Mutex::new(State { sequences, act, logits, head, hidden });
    let device = PooledDevice { backend: device, pool };
    Ok(Arc::new(DeviceModel { device, decoder, properties, state }))
}

/// Returns the size of a model's vocabulary.
fn n_vocab(gguf: &Gguf) -> Result<usize, ModelError> {
    Ok(gguf.tensor("token_embd.weight")?.info.rows())
}

/// Rejects a guard on a device that would have to wait for the rows of a step.
fn check_guard(device: &DeviceInfo, part: &LayerRange) -> Result<(), Error> {
    if part.kv_guard().is_none() || device.checks_finite_rows {
        return Ok(());
    }
    let expected = "a device whose steps are read while they run (cpu)".to_owned();
    Err(Error::Setting { name: "kv_guard", expected, got: device.name.clone() })
}

/// Rejects layers whose ops the device lacks: attention to selected tokens, pooled keys or residual
/// streams, gated streams, SiTU, and RWKV-7.
fn check_selection(device: &DeviceInfo, config: &Config, part: &LayerRange) -> Result<(), ModelError> {
    let layers = &config.layers[part.layers()];
    let what = if layers.iter().any(|layer| layer.shared_kv.is_some()) {
        "attention to pooled keys"
    } else if layers.iter().any(|layer| layer.index.is_some()) {
        "attention to selected tokens"
    } else if matches!(config.streams, ResidualStreams::Gated { .. }) {
        "gated residual streams"
    } else if matches!(config.streams, ResidualStreams::Attended { .. }) {
        "attention to residual streams"
    } else if layers.iter().any(|layer| matches!(layer.activation, Activation::Situ { .. })) {
        "SiTU"
    } else if layers.iter().any(|layer| layer.wkv.is_some()) {
        "token shift"
    } else {
        return Ok(());
    };
    if device.selects_tokens {
        return Ok(());
    }
    let what = format!("{what} ({}) on {}; the CPU has it", config.family.name, device.name);
    Err(ModelError::Unsupported { what })
}

/// Rejects weights that do not fit before any of them is copied.
fn check_weights<B: Backend>(
    device: &B,
    part: &LayerRange,
    config: &Config,
    gguf: &Gguf,
) -> Result<(), Error> {
    let (needed, n_layers) = (part.n_bytes(gguf), config.layers.len());
    let Some(usable) = usable_bytes(device, config)? else { return Ok(()) };
    if needed <= usable {
        return Ok(());
    }
    let split_off = |n| {
        let [_, last] = LayerRange::split(n_layers, n_layers - n);
        last.with_weights(part.weights()).with_loras(part.loras().to_vec())
    };
    let last = |n| if n < n_layers { split_off(n).n_bytes(gguf) } else { usize::MAX };
    let fitting = limits::largest(n_layers, |n| n == 0 || last(n) <= usable);
    Err(Error::WeightMemory { device: device.info().name, needed, usable, fitting, n_layers })
}

/// Returns the memory for weights and caches, where the device has memory of its own.
fn usable_bytes<B: Backend>(device: &B, config: &Config) -> Result<Option<usize>, Error> {
    let experts = config.layers.iter().filter_map(|layer| layer.experts.as_ref());
    let max_rows = device.info().max_step_rows;
    let of_experts = experts.map(|experts| {
        let n_slots = max_rows * experts.routing.n_used;
        expert_scratch_bytes(n_slots, experts.n_ff, config.n_embd)
    });
    let reserved = RESERVED_BYTES + of_experts.max().unwrap_or(0);
    Ok(device.free_bytes()?.map(|free| free.saturating_sub(reserved)))
}

/// Returns the scratch that the experts of a layer take in a step with `n_slots` pairs of a row and
/// an expert: gates, their products, these in f16, and outputs. Devices round blocks up to powers
/// of two.
fn expert_scratch_bytes(n_slots: usize, n_ff: usize, n_embd: usize) -> usize {
    let [hidden, out] = [n_ff, n_embd].map(|n| n_slots * n * size_of::<f32>());
    [hidden, hidden, hidden / 2, out].map(usize::next_power_of_two).iter().sum()
}

/// Rolls back a failed step in its caches.
pub(super) fn roll_back<'c, P: Page + 'c>(
    error: StepError,
    caches: impl IntoIterator<Item = &'c mut Cache<P>>,
) -> Error {
    match error {
        StepError::Refused(error) => {
            caches.into_iter().for_each(Cache::unreserve);
            error.into()
        }
        StepError::Broken(error) => {
            caches.into_iter().for_each(|cache| _ = cache.undo_step());
            error.into()
        }
    }
}

impl<B: Backend> DeviceModel<B> {
    pub(super) fn state(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a function from tokens to the bytes of the caches with `plan`, that of the draft
    /// head included.
    fn sizes(&self, plan: &Plan) -> impl Fn(usize) -> usize + use<B> {
        let layout = Layout::new(&self.properties.kv_shape, plan.clone());
        let beside = self.state().head.as_ref().map(|head| head.layout(plan));
        move |tokens| {
            let beside = beside.as_ref().map_or(0, |beside| beside.n_bytes(tokens));
            layout.n_bytes(tokens).saturating_add(beside)
        }
    }

    /// Returns the context length that fits memory: the device's, or the machine's, which is
    /// allocated as tokens arrive.
    fn fit(&self, plan: &mut Plan, room: ContextSize) -> Result<usize, Error> {
        let (ContextSize::Exactly(requested) | ContextSize::UpTo(requested)) = room;
        let free =
            usable_bytes(&*self.device.backend, &self.properties.config)?.or_else(limits::machine_bytes);
        let usable = [free, self.device.backend.max_page_bytes()].into_iter().flatten().min();
        let usable = usable.unwrap_or(isize::MAX as usize);
        let n_bytes = self.sizes(plan);
        let needed = n_bytes(requested);
        if needed <= usable {
            return Ok(requested);
        }
        let fitting = limits::largest(requested, |tokens| n_bytes(tokens) <= usable);
        match room {
            ContextSize::UpTo(_) if fitting > 0 => {
                plan.notes.push(format!("context of {fitting} tokens: {requested} do not fit"));
                Ok(fitting)
            }
            _ => {
                let device = self.properties.info.name.clone();
                Err(Error::CacheMemory { device, tokens: requested, needed, usable, fitting })
            }
        }
    }
}

/// Returns one sequence of a step with its cache.
fn batch_sequence<'a, P: Page>(cache: &'a mut Cache<P>, row: &'a BatchEntry) -> BatchSequence<'a, P> {
    BatchSequence {
        cache,
        n: row.n,
        logits_for: row.logits_for,
        lora_scales: row.lora_scales.as_deref(),
        places: row.positions.as_deref(),
        tokens_before: &row.tokens_before,
    }
}

impl<B: Backend> State<B> {
    /// Returns the model's cache of a sequence, and the activations.
    pub(super) fn cache_and_activations(
        &mut self,
        id: SequenceId,
    ) -> (&mut Cache<B::Page>, &mut Activations<B>) {
        (&mut self.sequences.get_mut(&id).expect(STARTED).model, &mut self.act)
    }

    /// Passes a completed step of the model, whose rows entered as `tokens`, to the draft head.
    fn record_step(
        &mut self,
        device: &PooledDevice<B>,
        decoder: &Decoder<B>,
        batch: &[BatchEntry],
        tokens: &[u32],
    ) -> Result<(), Error> {
        let Self { sequences, act, head: Some(head), hidden, .. } = self else { return Ok(()) };
        if !batch.iter().any(|row| sequences[&row.id].head.is_some()) {
            return Ok(());
        }
        let width = head.read_states(&device.backend, decoder, act, tokens.len(), hidden)?;
        let mut first = 0;
        for row in batch {
            let rows = first..first + row.n;
            first = rows.end;
            let SequenceCaches { model, head: followed } = sequences.get_mut(&row.id).expect(STARTED);
            let streams = &hidden[rows.start * width..rows.end * width];
            let start = model.len() - row.n;
            followed.take_if(|followed| !head.record(device, followed, start, &tokens[rows], streams));
        }
        Ok(())
    }

    /// Returns the layout of a cache with `plan`: that of another sequence where one has it, so
    /// that the sequences of a step have the same layers.
    fn layout(&self, shape: &KvShape, plan: &Plan) -> Arc<Layout> {
        let layouts = self.sequences.values().map(|caches| caches.model.layout());
        let known = layouts.into_iter().find(|layout| layout.plan() == plan);
        known.map_or_else(|| Arc::new(Layout::new(shape, plan.clone())), Arc::clone)
    }

    /// Returns the index of a free logits buffer for `rows` rows: the smallest that fits, or a new
    /// one.
    fn free_logits(&mut self, device: &Arc<B>, rows: usize, n_vocab: usize) -> Result<usize, Error> {
        let fits = |logits: &mut Arc<LogitsBuffer<B>>| {
            Arc::get_mut(logits).is_some_and(|logits| logits.rows >= rows)
        };
        let fitting = self
            .logits
            .iter_mut()
            .enumerate()
            .filter_map(|(i, logits)| fits(logits).then_some((logits.rows, i)));
        if let Some((_, index)) = fitting.min() {
            return Ok(index);
        }
        // Frees smaller unused buffers before allocating a larger one.
        self.logits.retain_mut(|logits| Arc::get_mut(logits).is_none());
        let buffer = device.buffer(rows * n_vocab)?;
        self.logits.push(Arc::new(LogitsBuffer { device: Arc::clone(device), buffer, rows, n_vocab }));
        Ok(self.logits.len() - 1)
    }
}

impl<B: Backend> Logits for LogitsBuffer<B> {
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        BackendError::check_equal("logits", "length of the output", self.n_vocab, out.len())?;
        Ok(self.device.read(&self.buffer, row * self.n_vocab, out)?)
    }

    fn top_k(&self, rows: &mut [TopK<'_>]) -> Result<(), Error> {
        Ok(self.device.top_k(&self.buffer, self.n_vocab, rows)?)
    }
}

impl<B: Backend> LoadedModel for DeviceModel<B> {
    fn properties(&self) -> &ModelProperties {
        &self.properties
    }

    fn step(
        &self,
        batch: &[BatchEntry],
        entry: Entry<'_>,
        left: Option<&mut Vec<f32>>,
        queries: OnQueries<'_>,
    ) -> Result<Option<Arc<dyn Logits>>, Error> {
        let (PooledDevice { backend, pool }, decoder) = (&self.device, &self.decoder);
        let state = &mut *self.state();
        let n_logits: usize = batch.iter().map(|row| row.logits_for.count(row.n)).sum();
        assert!(n_logits == 0 || left.is_none(), "a step gives logits or what its rows have left");
        let index = match n_logits {
            0 => None,
            _ => Some(state.free_logits(backend, n_logits, decoder.n_vocab())?),
        };
        let mut logits = index.map(|index| state.logits.swap_remove(index));
        // Decoding one sequence allocates nothing.
        let (mut taken, mut alone, mut several) = (Vec::new(), None, Vec::new());
        let parts = match batch {
            [row] => {
                let caches = state.sequences.get_mut(&row.id).expect(STARTED);
                alone.insert([batch_sequence(&mut caches.model, row)]).as_mut_slice()
            }
            _ => {
                taken.extend(batch.iter().map(|row| state.sequences.remove(&row.id).expect(STARTED)));
                let parts = taken.iter_mut().zip(batch);
                several.extend(parts.map(|(caches, row)| batch_sequence(&mut caches.model, row)));
                &mut several
            }
        };
        let outputs = Outputs {
            logits: logits.as_mut().and_then(Arc::get_mut).map(|logits| &mut logits.buffer),
            queries: queries.map(|on_queries| on_queries as _),
        };
        let result = decoder
            .step(&**backend, pool, parts, &mut state.act, entry, outputs)
            .map_err(|error| roll_back(error, parts.iter_mut().map(|part| &mut *part.cache)));
        state.sequences.extend(batch.iter().map(|row| row.id).zip(taken));
        state.logits.extend(logits.clone());
        match (&result, entry) {
            (Ok(()), Entry::Tokens(tokens)) => state.record_step(&self.device, decoder, batch, tokens)?,
            _ => {
                for row in batch {
                    let SequenceCaches { model, head } = state.sequences.get_mut(&row.id).expect(STARTED);
                    head.iter_mut().for_each(|head| head.truncate(model.len()));
                }
            }
        }
        result?;
        if let Some(out) = left {
            let rows: usize = batch.iter().map(|row| row.n).sum();
            out.resize(rows * decoder.config().n_embd, 0.0);
            decoder.hidden_states(&**backend, &mut state.act, rows, out)?;
        }
        Ok(logits.map(|logits| logits as Arc<dyn Logits>))
    }

    fn load_beside(
        &self,
        config: Config,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        let whole = LayerRange::whole(config.layers.len());
        let PooledDevice { backend, pool } = &self.device;
        load_with(Arc::clone(backend), pool.with_shared_budget(), config, &whole, gguf, progress)
    }

    fn warm_up(&self, plan: &Plan) -> Result<usize, Error> {
        let device = &self.device.backend;
        let Some(rehearsal) = device.rehearsal() else { return Ok(0) };
        self.decoder.rehearse(&rehearsal, plan, self.properties.info.max_step_rows)?;
        Ok(device.load_kernels(&rehearsal)?)
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(self.device.backend.finish()?)
    }
}

impl<B: Backend> KvCaches for DeviceModel<B> {
    fn start(&self, id: SequenceId, mut plan: Plan, room: ContextSize) -> Result<(usize, Plan), Error> {
        let n_ctx = self.fit(&mut plan, room)?;
        let state = &mut *self.state();
        let layout = state.layout(&self.properties.kv_shape, &plan);
        let head = state.head.as_ref().map(|head| head.start(&plan, n_ctx));
        state.sequences.insert(id, SequenceCaches { model: Cache::new(layout, n_ctx), head });
        Ok((n_ctx, plan))
    }

    fn restore(
        &self,
        id: SequenceId,
        plan: Plan,
        n_ctx: usize,
        state: CacheState,
        next: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>,
    ) -> Result<(), Error> {
        let layout = self.state().layout(&self.properties.kv_shape, &plan);
        let PooledDevice { backend, pool } = &self.device;
        let model = Cache::from_pages(&**backend, pool, layout, n_ctx, state, next)?;
        self.state().sequences.insert(id, SequenceCaches { model, head: None });
        Ok(())
    }

    fn fork(&self, from: SequenceId, to: SequenceId) {
        let sequences = &mut self.state().sequences;
        let caches = sequences[&from].clone();
        sequences.insert(to, caches);
    }

    fn release(&self, id: SequenceId) {
        self.state().sequences.remove(&id);
    }

    fn visit(&self, id: SequenceId, f: &mut dyn FnMut(&mut dyn CacheOps)) {
        let State { sequences, head, .. } = &mut *self.state();
        let caches = sequences.get_mut(&id).expect(STARTED);
        f(&mut DeviceCache { device: &self.device, caches, head: head.as_mut() });
    }

    fn bytes_for(&self, plan: &Plan, tokens: usize) -> usize {
        self.sizes(plan)(tokens)
    }

    fn max_sequences(&self, plan: &Plan, tokens: usize) -> Result<usize, Error> {
        let free =
            usable_bytes(&*self.device.backend, &self.properties.config)?.or_else(limits::available_bytes);
        let usable = free.unwrap_or(isize::MAX as usize).saturating_add(self.pool_bytes());
        let logits = self.properties.n_vocab * size_of::<f32>();
        Ok(usable / self.bytes_for(plan, tokens).saturating_add(logits).max(1))
    }

    fn pool_bytes(&self) -> usize {
        self.device.pool.n_bytes()
    }

    fn set_budget(&self, bytes: usize) {
        self.device.pool.set_budget(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_of_experts_counts_every_buffer_as_a_power_of_two() {
        // 512 rows of Mixtral 8x7B: 56 MiB each of gates and products, 28 of halves, 16 of outputs.
        assert_eq!(expert_scratch_bytes(512 * 2, 14_336, 4096), (64 + 64 + 32 + 16) << 20);
    }
}
