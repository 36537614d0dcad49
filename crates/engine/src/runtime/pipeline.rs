//! A model whose layers are split over devices (layer pipeline): the residual stream passes from
//! one to the next through host memory, `n_embd` values per token.
//!
//! A step of many rows passes in [micro-batches](micro_batch), so that all devices work at once.
//! Steps of different sequences on several threads overlap by themselves: each part runs one step
//! at a time.

mod micro_batch;
mod overlap;

use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use kvant_backend::DeviceInfo;
use kvant_gguf::Gguf;
use kvant_kv::{CacheState, Plan};
use kvant_model::{Config, Entry, OnQueries};

use super::cache::{CacheOps, shortest_if_unequal};
use super::{BatchEntry, ContextSize, KvCaches, LoadedModel, Logits, ModelProperties, SequenceId};
use crate::error::Error;

/// The parts of a model, in the order of their layers, each on a device.
pub(crate) struct LayerPipeline {
    parts: Vec<Arc<dyn LoadedModel>>,
    properties: ModelProperties,
    /// Unused buffers of the residual stream between two parts, each `[rows, n_embd]`.
    spare: Mutex<Vec<Vec<f32>>>,
}

impl LayerPipeline {
    /// Creates a model from its parts.
    pub fn new(parts: Vec<Arc<dyn LoadedModel>>) -> Self {
        assert!(!parts.is_empty(), "a model has at least one part");
        let properties = properties_of(&parts.iter().map(|part| part.properties()).collect::<Vec<_>>());
        Self { parts, properties, spare: Mutex::default() }
    }

    /// Iterates over the parts, each with the number of layers before it.
    pub(super) fn parts(&self) -> impl Iterator<Item = (usize, &Arc<dyn LoadedModel>)> {
        self.parts.iter().scan(0, |before, part| {
            let first = *before;
            *before += n_layers(part.properties());
            Some((first, part))
        })
    }

    /// Returns the plan of the layers of a part that begins with layer `first`.
    fn own(plan: &Plan, first: usize, part: &Arc<dyn LoadedModel>) -> Plan {
        plan.part(first..first + n_layers(part.properties()))
    }

    /// Takes a buffer of the residual stream.
    fn take_buffer(&self) -> Vec<f32> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    /// Gives a buffer of the residual stream back.
    fn reuse(&self, buffer: Vec<f32>) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }

    /// Runs a step through one part after the other; the output of one enters the next.
    fn forward(
        &self,
        batch: &[BatchEntry],
        entry: Entry<'_>,
        mut left: Option<&mut Vec<f32>>,
        mut queries: OnQueries<'_>,
    ) -> Result<Option<Arc<dyn Logits>>, Error> {
        let without_logits: Vec<_> = batch.iter().map(BatchEntry::without_logits).collect();
        let (mut entering, mut leaving) = (self.take_buffer(), self.take_buffer());
        let mut logits = None;
        for (index, (first, part)) in self.parts().enumerate() {
            let is_last = index + 1 == self.parts.len();
            let entry = if index == 0 { entry } else { Entry::Residual(&entering) };
            let (batch, left) =
                if is_last { (batch, left.take()) } else { (&without_logits[..], Some(&mut leaving)) };
            // A part numbers its own layers from 0.
            let mut on_queries =
                queries.as_mut().map(|on_queries| |layer: usize, q: &[f32]| on_queries(first + layer, q));
            logits = part.step(batch, entry, left, on_queries.as_mut().map(|on_queries| on_queries as _))?;
            mem::swap(&mut entering, &mut leaving);
        }
        self.reuse(entering);
        self.reuse(leaving);
        Ok(logits)
    }

    /// Truncates a sequence to at most `len` tokens, the same number in all parts.
    fn truncate(&self, id: SequenceId, len: usize) {
        self.visit(id, &mut |cache| _ = cache.truncate(len.min(cache.state().len)));
        // A part may have had to truncate further than the others.
        while let Some(shortest) = shortest_if_unequal(self, id) {
            self.visit(id, &mut |cache| _ = cache.truncate(shortest.min(cache.state().len)));
        }
    }

    /// Returns the number of tokens of a sequence.
    fn len(&self, id: SequenceId) -> usize {
        let mut len = 0;
        self.visit(id, &mut |cache| len = cache.state().len);
        len
    }
}

/// Returns the number of layers with a cache.
fn n_layers(properties: &ModelProperties) -> usize {
    properties.kv_shape.layers.len()
}

/// Returns the properties of a model with these parts.
fn properties_of(parts: &[&ModelProperties]) -> ModelProperties {
    // Tokens enter the first part.
    let first = parts[0];
    let name = |part: &&ModelProperties| format!("{} ({} layers)", part.info.name, n_layers(part));
    let info = DeviceInfo {
        name: parts.iter().map(name).collect::<Vec<_>>().join(" + "),
        kernels: parts.iter().map(|part| &*part.info.kernels).collect::<Vec<_>>().join(" + "),
        max_step_rows: parts.iter().map(|part| part.info.max_step_rows).min().unwrap_or(1),
        batch_invariant_rows: parts.iter().map(|part| part.info.batch_invariant_rows).min().unwrap_or(1),
        checks_finite_rows: parts.iter().all(|part| part.info.checks_finite_rows),
        selects_tokens: parts.iter().all(|part| part.info.selects_tokens),
        runs_encoders: parts.iter().all(|part| part.info.runs_encoders),
        // A GPU's are of another unit than the CPU's before it.
        n_threads: parts
            .iter()
            .filter(|part| part.info.thread_unit == first.info.thread_unit)
            .map(|part| part.info.n_threads)
            .sum(),
        ..first.info.clone()
    };
    ModelProperties {
        info,
        kernel_choices: parts.iter().flat_map(|part| part.kernel_choices.clone()).collect(),
        config: first.config.clone(),
        kv_shape: first.config.kv_shape(),
        n_vocab: first.n_vocab,
        soft_tokens: Arc::clone(&first.soft_tokens),
        weight_bytes: parts.iter().map(|part| part.weight_bytes).sum(),
        weight_bytes_per_token: parts.iter().map(|part| part.weight_bytes_per_token).sum(),
        // An MTP layer needs the whole model on its device.
        has_draft_head: false,
    }
}

impl LoadedModel for LayerPipeline {
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
        // Queries are those of the whole step.
        let micro_batches = match &queries {
            None => micro_batch::split(batch, self.parts.len()),
            Some(_) => Vec::new(),
        };
        // After an error completed parts roll back, so that all parts hold the same tokens again.
        if micro_batches.is_empty() {
            let result = self.forward(batch, entry, left, queries);
            return result.inspect_err(|_| batch.iter().for_each(|row| self.truncate(row.id, usize::MAX)));
        }
        let lens: Vec<_> = batch.iter().map(|row| self.len(row.id)).collect();
        let result = self.overlap(&micro_batches, entry, left);
        result.inspect_err(|_| batch.iter().zip(&lens).for_each(|(row, &len)| self.truncate(row.id, len)))
    }

    fn load_beside(
        &self,
        config: Config,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        self.parts[0].load_beside(config, gguf, progress)
    }

    fn warm_up(&self, plan: &Plan) -> Result<usize, Error> {
        self.parts().map(|(first, part)| part.warm_up(&Self::own(plan, first, part))).sum()
    }

    fn finish(&self) -> Result<(), Error> {
        self.parts.iter().try_for_each(|part| part.finish())
    }
}

impl KvCaches for LayerPipeline {
    fn start(&self, id: SequenceId, mut plan: Plan, room: ContextSize) -> Result<(usize, Plan), Error> {
        let mut min_n_ctx = usize::MAX;
        for (first, part) in self.parts() {
            // A part may have shortened the context, with a note.
            let started = part.start(id, Self::own(&plan, first, part), room);
            let (n_ctx, own) = started.inspect_err(|_| self.release(id))?;
            min_n_ctx = min_n_ctx.min(n_ctx);
            plan.notes.extend(own.notes);
        }
        self.visit(id, &mut |cache| cache.set_n_ctx(min_n_ctx));
        Ok((min_n_ctx, plan))
    }

    fn restore(
        &self,
        id: SequenceId,
        plan: Plan,
        n_ctx: usize,
        state: CacheState,
        next: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>,
    ) -> Result<(), Error> {
        let mut read = 0;
        for (first, part) in self.parts() {
            let before = read;
            let own = Self::own(&plan, first, part);
            let restored = part.restore(id, own, n_ctx, state, &mut |index| {
                read = before + index + 1;
                next(before + index)
            });
            restored.inspect_err(|_| self.release(id))?;
        }
        Ok(())
    }

    fn fork(&self, from: SequenceId, to: SequenceId) {
        self.parts.iter().for_each(|part| part.fork(from, to));
    }

    fn release(&self, id: SequenceId) {
        self.parts.iter().for_each(|part| part.release(id));
    }

    fn visit(&self, id: SequenceId, f: &mut dyn FnMut(&mut dyn CacheOps)) {
        self.parts.iter().for_each(|part| part.visit(id, f));
    }

    fn bytes_for(&self, plan: &Plan, tokens: usize) -> usize {
        let parts = self.parts().map(|(first, part)| part.bytes_for(&Self::own(plan, first, part), tokens));
        parts.fold(0, usize::saturating_add)
    }

    fn max_sequences(&self, plan: &Plan, tokens: usize) -> Result<usize, Error> {
        let parts =
            self.parts().map(|(first, part)| part.max_sequences(&Self::own(plan, first, part), tokens));
        parts.reduce(|least, part| Ok(least?.min(part?))).expect("a model has at least one part")
    }

    fn pool_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.pool_bytes()).sum()
    }

    fn set_budget(&self, bytes: usize) {
        // Each part gets the share of its layers.
        let n_all = n_layers(&self.properties).max(1);
        for part in &self.parts {
            part.set_budget(bytes / n_all * n_layers(part.properties()));
        }
    }
}
