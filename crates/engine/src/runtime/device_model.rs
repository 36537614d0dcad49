//! A model, or a part of one, on one device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvant_backend::autotune::median;
use kvant_backend::{Backend, BackendError, Candidate, DeviceInfo, KernelChoice, Page, limits};
use kvant_codec::Side;
use kvant_codec::random::Random;
use kvant_gguf::Gguf;
use kvant_kv::{BlockKey, BlockPool, Cache, CacheState, KvShape, Layout, Plan};
use kvant_model::{
    Activations, BatchSequence, Config, Decoder, Entry, LayerRange, LayerSpec, LogitsFor, OnQueries, Outputs,
    SoftTokens, StepError, Weights,
};

use super::mtp::Mtp;
use super::{BatchEntry, ContextSize, KvCaches, LoadedModel, Logits, MAX_ROWS, OnDraft, SequenceId};
use crate::Error;
use crate::profile::StageTime;

/// Device memory reserved for the scratch of ops, in bytes.
const RESERVED_BYTES: usize = 256 << 20;

/// A device, the weights on it, and its sequences.
struct DeviceModel<B: Backend> {
    device: Arc<B>,
    decoder: Decoder<B>,
    pool: BlockPool<B::Page>,
    state: Mutex<State<B>>,
}

/// The mutable state of steps.
struct State<B: Backend> {
    caches: HashMap<SequenceId, Cache<B::Page>>,
    act: Activations<B>,
    /// Buffers of logits; those without a borrower are reused.
    logits: Vec<Arc<LogitsBuffer<B>>>,
    /// The MTP layer.
    mtp: Option<Mtp<B>>,
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
    check_weights(&*device, part, config.layers.len(), gguf)?;
    let weights = Weights::load(gguf, &config, part, &*device, progress)?;
    // Speculative decoding needs batch invariance.
    let mtp = match device.info().is_batch_invariant {
        true => weights.load_mtp(gguf, &config, &*device)?,
        false => None,
    };
    let decoder = Decoder::new(config, weights);
    let mtp = Mtp::new(&*device, &decoder, mtp)?;
    let act = decoder.activations(&*device, MAX_ROWS)?;
    let state = Mutex::new(State { caches: HashMap::new(), act, logits: Vec::new(), mtp });
    Ok(Arc::new(DeviceModel { device, decoder, pool, state }))
}

/// Rejects weights that do not fit before any of them is copied.
fn check_weights<B: Backend>(
    device: &B,
    part: &LayerRange,
    n_layers: usize,
    gguf: &Gguf,
) -> Result<(), Error> {
    let needed = part.n_bytes(gguf);
    let Some(usable) = usable_bytes(device)? else { return Ok(()) };
    if needed <= usable {
        return Ok(());
    }
    let split_off = |n| {
        let [_, last] = LayerRange::split(n_layers, n_layers - n);
        last.with_weights(part.weights()).with_loras(part.loras().to_vec())
    };
    let last = |n| if n < n_layers { split_off(n).n_bytes(gguf) } else { usize::MAX };
    let fitting = largest(n_layers, |n| n == 0 || last(n) <= usable);
    Err(Error::WeightMemory { device: device.info().name, needed, usable, fitting, n_layers })
}

/// Returns the memory for weights and caches, where the device has memory of its own.
fn usable_bytes<B: Backend>(device: &B) -> Result<Option<usize>, Error> {
    Ok(device.free_bytes()?.map(|free| free.saturating_sub(RESERVED_BYTES)))
}

/// Returns the largest number up to `max` for which `holds` is true, by binary search; `holds` is
/// true up to some number and false beyond it.
fn largest(max: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, max);
    while low < high {
        let middle = high - (high - low) / 2;
        if holds(middle) { low = middle } else { high = middle - 1 }
    }
    low
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
    fn state(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `f` with a sequence's cache.
    fn with<T>(&self, id: SequenceId, f: impl FnOnce(&mut Cache<B::Page>) -> T) -> T {
        f(self.state().caches.get_mut(&id).expect("a sequence that was started and not released"))
    }

    /// Calls `f` with the MTP layer, to apply a change of a sequence.
    fn follow(&self, f: impl FnOnce(&mut Mtp<B>)) {
        if let Some(mtp) = &mut self.state().mtp {
            f(mtp);
        }
    }

    /// Returns a function from tokens to the bytes of the caches with `plan`, that of the MTP layer
    /// included.
    fn sizes(&self, plan: &Plan) -> impl Fn(usize) -> usize + use<B> {
        let layout = Layout::new(&self.decoder.kv_shape(), plan.clone());
        let beside = self.state().mtp.as_ref().map(|mtp| mtp.layout(plan));
        move |tokens| {
            let beside = beside.as_ref().map_or(0, |beside| beside.n_bytes(tokens));
            layout.n_bytes(tokens).saturating_add(beside)
        }
    }

    /// Returns the context length that fits memory: the device's, or the machine's, which is
    /// allocated as tokens arrive.
    fn fit(&self, plan: &mut Plan, room: ContextSize) -> Result<usize, Error> {
        let (ContextSize::Exactly(requested) | ContextSize::UpTo(requested)) = room;
        let free = usable_bytes(&*self.device)?.or_else(limits::machine_bytes);
        let usable = [free, self.device.max_page_bytes()].into_iter().flatten().min();
        let usable = usable.unwrap_or(isize::MAX as usize);
        let n_bytes = self.sizes(plan);
        let needed = n_bytes(requested);
        if needed <= usable {
            return Ok(requested);
        }
        let fitting = largest(requested, |tokens| n_bytes(tokens) <= usable);
        match room {
            ContextSize::UpTo(_) if fitting > 0 => {
                plan.notes.push(format!("context of {fitting} tokens: {requested} do not fit"));
                Ok(fitting)
            }
            _ => {
                let device = self.device.info().name;
                Err(Error::CacheMemory { device, tokens: requested, needed, usable, fitting })
            }
        }
    }
}

/// One sequence of a step with its cache.
fn part<'a, P: Page>(cache: &'a mut Cache<P>, row: &'a BatchEntry) -> BatchSequence<'a, P> {
    BatchSequence {
        cache,
        n: row.n,
        logits_for: row.logits_for,
        lora_scales: row.lora_scales.as_deref(),
        places: row.positions.as_deref(),
    }
}

impl<B: Backend> State<B> {
    /// Calls `f` with the caches of a batch, in its order, each with its rows.
    fn parts(
        &mut self,
        batch: &[BatchEntry],
        f: impl FnOnce(&mut [BatchSequence<'_, B::Page>], &mut Activations<B>),
    ) {
        let known = "a sequence that was started and not released";
        // Decoding one sequence allocates nothing.
        if let [row] = batch {
            let cache = self.caches.get_mut(&row.id).expect(known);
            return f(&mut [part(cache, row)], &mut self.act);
        }
        let mut taken: Vec<_> = batch.iter().map(|row| self.caches.remove(&row.id).expect(known)).collect();
        let mut parts: Vec<_> = taken.iter_mut().zip(batch).map(|(cache, row)| part(cache, row)).collect();
        f(&mut parts, &mut self.act);
        self.caches.extend(batch.iter().map(|row| row.id).zip(taken));
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

    fn top_k(&self, row: usize, k: usize, out: &mut Vec<Candidate>) -> Result<(), Error> {
        Ok(self.device.top_k(&self.buffer, row * self.n_vocab, self.n_vocab, k, out)?)
    }
}

impl<B: Backend> LoadedModel for DeviceModel<B> {
    fn info(&self) -> DeviceInfo {
        self.device.info()
    }

    fn kernel_choices(&self) -> Vec<KernelChoice> {
        self.device.kernel_choices()
    }

    fn config(&self) -> &Config {
        self.decoder.config()
    }

    fn kv_shape(&self) -> KvShape {
        self.decoder.kv_shape()
    }

    fn n_vocab(&self) -> usize {
        self.decoder.n_vocab()
    }

    fn soft_tokens(&self) -> &Arc<SoftTokens> {
        self.decoder.extra()
    }

    fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes() + self.state().mtp.as_ref().map_or(0, Mtp::weight_bytes)
    }

    fn weight_bytes_per_token(&self) -> usize {
        self.decoder.weight_bytes_per_token()
    }

    fn step(
        &self,
        batch: &[BatchEntry],
        entry: Entry<'_>,
        left: Option<&mut Vec<f32>>,
        queries: OnQueries<'_>,
    ) -> Result<Option<Arc<dyn Logits>>, Error> {
        let (device, decoder) = (&*self.device, &self.decoder);
        let state = &mut *self.state();
        let starts: Vec<_> = match state.mtp {
            Some(_) => batch.iter().map(|row| state.caches[&row.id].len()).collect(),
            None => Vec::new(),
        };
        let n_logits: usize = batch.iter().map(|row| row.logits_for.count(row.n)).sum();
        assert!(n_logits == 0 || left.is_none(), "a step gives logits or what its rows have left");
        let index = match n_logits {
            0 => None,
            _ => Some(state.free_logits(&self.device, n_logits, decoder.n_vocab())?),
        };
        let mut logits = index.map(|index| state.logits.swap_remove(index));
        let mut result = Ok(());
        state.parts(batch, |parts, act| {
            let logits = logits.as_mut().and_then(Arc::get_mut).map(|logits| &mut logits.buffer);
            result = decoder
                .step(
                    device,
                    &self.pool,
                    parts,
                    act,
                    entry,
                    Outputs { logits, queries: queries.map(|on_queries| on_queries as _) },
                )
                .map_err(|error| roll_back(error, parts.iter_mut().map(|part| &mut *part.cache)));
        });
        state.logits.extend(logits.clone());
        let State { caches, act, mtp, .. } = state;
        if let Some(mtp) = mtp {
            match (&result, entry) {
                (Ok(()), Entry::Tokens(tokens)) => {
                    mtp.commit_step((device, &self.pool), (decoder, act), (batch, &starts), tokens)?;
                }
                _ => batch.iter().for_each(|row| mtp.truncate(row.id, caches[&row.id].len())),
            }
        }
        result?;
        if let Some(out) = left {
            let rows: usize = batch.iter().map(|row| row.n).sum();
            out.resize(rows * decoder.config().n_embd, 0.0);
            decoder.hidden_states(device, &mut state.act, rows, out)?;
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
        load_with(Arc::clone(&self.device), self.pool.with_shared_budget(), config, &whole, gguf, progress)
    }

    fn predicts(&self) -> bool {
        self.state().mtp.is_some()
    }

    fn predict(&self, id: SequenceId, at: usize, next: u32, on_prediction: OnDraft<'_>) {
        self.follow(|mtp| mtp.predict((&*self.device, &self.pool), (id, at), next, on_prediction));
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(self.device.finish()?)
    }

    fn append_random(&self, id: SequenceId, n: usize, random: &mut Random) -> Result<(), Error> {
        let State { caches, act, .. } = &mut *self.state();
        let cache = caches.get_mut(&id).expect("a sequence that was started and not released");
        let part = BatchSequence { cache, n, logits_for: LogitsFor::None, lora_scales: None, places: None };
        let result = self.decoder.append_random(&*self.device, &self.pool, part, act, random);
        result.map_err(|error| roll_back(error, [cache]))
    }

    fn profile_attention(&self, id: SequenceId, repetitions: usize) -> Result<Vec<StageTime>, Error> {
        let stages = self.device.attend_stages();
        if stages.len() < 2 {
            let DeviceInfo { name, kernels, .. } = self.info();
            let wanted = "attention in stages".to_owned();
            let has = format!("none with the {kernels} kernels of {name}");
            return Err(BackendError::Unsupported { op: "attend", requested: wanted, has }.into());
        }
        let layers = self.decoder.layers();
        let mut seconds = vec![Vec::new(); stages.len()];
        let mut random = Random::new(1);
        let widest = |width: fn(&LayerSpec) -> usize| layers.iter().map(width).max().unwrap_or(0);
        let mut values = vec![0.0; widest(LayerSpec::n_q)];
        random.fill_gaussian(&mut values, 1.0);
        let mut q = self.device.buffer(values.len())?;
        self.device.write(&mut q, &values)?;
        let mut out = self.device.buffer(widest(LayerSpec::n_out))?;
        let (mut tokens, mut pairs) = (0, 0);
        self.with(id, |cache| {
            tokens = cache.len();
            let attend = layers.iter().filter(|layer| layer.attends());
            pairs = tokens * attend.map(|layer| layer.heads.n_heads).sum::<usize>();
            // Stages alternate, so that background load of the machine affects all of them alike.
            for repetition in 0..=repetitions {
                for (stage, seconds) in seconds.iter_mut().enumerate() {
                    let started = Instant::now();
                    for (index, layer) in layers.iter().enumerate() {
                        let Some(kv) = self.decoder.kv_layer(index) else { continue };
                        let params = layer.attend_params();
                        let part = cache.part(kv, cache.last_rows(1), 0);
                        self.device.attend_staged(stage, &params, &[part], &q, None, &mut out)?;
                    }
                    self.device.finish()?;
                    // The first round warms up.
                    if repetition > 0 {
                        seconds.push(started.elapsed().as_secs_f64());
                    }
                }
            }
            Ok::<_, Error>(())
        })?;
        let times = stages.iter().zip(seconds);
        Ok(times.map(|(stage, seconds)| StageTime { stage, seconds: median(seconds), pairs }).collect())
    }
}

impl<B: Backend> KvCaches for DeviceModel<B> {
    fn start(&self, id: SequenceId, mut plan: Plan, room: ContextSize) -> Result<(usize, Plan), Error> {
        let n_ctx = self.fit(&mut plan, room)?;
        let layout = Arc::new(Layout::new(&self.decoder.kv_shape(), plan.clone()));
        self.state().caches.insert(id, Cache::new(layout, n_ctx));
        self.follow(|mtp| mtp.start(id, &plan, n_ctx));
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
        let layout = Arc::new(Layout::new(&self.decoder.kv_shape(), plan));
        let cache = Cache::from_pages(&*self.device, &self.pool, layout, n_ctx, state, next)?;
        self.state().caches.insert(id, cache);
        Ok(())
    }

    fn fork(&self, from: SequenceId, to: SequenceId) {
        let cache = self.with(from, |cache| cache.clone());
        self.state().caches.insert(to, cache);
        self.follow(|mtp| mtp.fork(from, to));
    }

    fn release(&self, id: SequenceId) {
        self.state().caches.remove(&id);
        self.follow(|mtp| mtp.release(id));
    }

    fn state(&self, id: SequenceId) -> CacheState {
        self.with(id, |cache| cache.state())
    }

    fn set_n_ctx(&self, id: SequenceId, n_ctx: usize) {
        self.with(id, |cache| cache.set_n_ctx(n_ctx));
        self.follow(|mtp| mtp.with(id, |cache| cache.set_n_ctx(n_ctx)));
    }

    fn max_rows(&self, id: SequenceId) -> usize {
        self.with(id, |cache| cache.max_rows())
    }

    fn reserve_draft(&self, id: SequenceId, known: usize, max: usize) -> usize {
        self.with(id, |cache| cache.reserve_draft(&*self.device, &self.pool, known, max))
    }

    fn release_scratch(&self, id: SequenceId) {
        self.with(id, Cache::release_scratch);
        self.follow(|mtp| mtp.with(id, Cache::release_scratch));
    }

    fn truncate(&self, id: SequenceId, n: usize) -> usize {
        // The MTP cache needs no recomputation where the model's cache may.
        self.follow(|mtp| mtp.truncate(id, n));
        self.with(id, |cache| cache.truncate(n))
    }

    fn set_checkpoint(&self, id: SequenceId) {
        self.with(id, Cache::set_checkpoint);
        self.follow(|mtp| mtp.set_checkpoint(&*self.device, &self.pool, id));
    }

    fn set_prefix_root(&self, id: SequenceId, root: BlockKey) {
        self.with(id, |cache| cache.set_prefix_root(root));
        self.follow(|mtp| mtp.set_prefix_root(id, root));
    }

    fn register_prefix(&self, id: SequenceId, tokens: &[u32]) {
        self.with(id, |cache| cache.register_prefix(&self.pool, tokens));
        self.follow(|mtp| mtp.register_prefix(&self.pool, id, tokens));
    }

    fn attach_prefix(&self, id: SequenceId, tokens: &[u32], max: usize) -> usize {
        let max = tokens.len().min(max.saturating_add(1));
        let n = self.with(id, |cache| cache.attach_prefix(&self.pool, &tokens[..max]));
        self.follow(|mtp| mtp.attach_prefix(&self.pool, id, &tokens[..n]));
        n
    }

    fn rows(&self, id: SequenceId, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error> {
        Ok(self.with(id, |cache| cache.decoded_rows(&*self.device, layer, head, side))?)
    }

    fn page_bytes(&self, id: SequenceId) -> Vec<usize> {
        self.with(id, |cache| cache.page_bytes().collect())
    }

    fn pages(
        &self,
        id: SequenceId,
        visit: &mut dyn FnMut(Vec<u8>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // The copy shares all memory, and other sequences can run while it is read.
        let cache = self.with(id, |cache| cache.clone());
        cache.pages(&*self.device).try_for_each(|image| visit(image?))
    }

    fn n_bytes(&self, id: SequenceId) -> usize {
        let beside = self.state().mtp.as_ref().map_or(0, |mtp| mtp.n_bytes(id));
        self.with(id, |cache| cache.n_bytes()) + beside
    }

    fn bytes_for(&self, plan: &Plan, tokens: usize) -> usize {
        self.sizes(plan)(tokens)
    }

    fn pool_bytes(&self) -> usize {
        self.pool.n_bytes()
    }

    fn set_budget(&self, bytes: usize) {
        self.pool.set_budget(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_that_holds_is_found() {
        for (max, limit) in [(0, 5), (1, 0), (1, 1), (100, 0), (100, 37), (100, 99), (100, 100), (100, 500)] {
            assert_eq!(largest(max, |n| n <= limit), max.min(limit));
        }
    }
}
