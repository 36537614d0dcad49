//! The steps that choose the kernels of a model: run on a device that computes nothing, they name
//! them ([`Backend::rehearsal`]), and no list of kernels has to be kept.

use std::sync::Arc;

use kvant_backend::{Backend, TopK};
use kvant_kv::{BlockPool, Cache, Layout, Plan};

use super::{Activations, BatchSequence, Decoder, Entry, LogitsFor, Outputs, StepError};
use crate::error::ModelError;

/// Up to here every number of rows may choose another kernel; beyond, multiples of it.
const FEW_ROWS: usize = 32;
/// Tokens of a context that attention splits.
const LONG: usize = 8192;
/// Candidates of the samplers' usual top-k.
const TOP_K: usize = 40;

/// The memory of steps on a device that computes nothing.
struct Rehearsal<'a, B: Backend> {
    device: &'a B,
    pool: BlockPool<B::Page>,
    act: Activations<B>,
    logits: B::Buffer,
    /// Inputs of a step `[max_rows, n_embd]`, for a part without the embedding matrix.
    residual: Vec<f32>,
}

impl<B: Backend> Decoder<B> {
    /// Runs steps of up to `max_rows` rows with caches of `plan` on `device`, a rehearsal: one
    /// sequence and two, of every number of rows that may choose other kernels, with nothing
    /// before them and behind a long context.
    ///
    /// # Errors
    ///
    /// An op or a KV type that the device lacks.
    pub fn rehearse(&self, device: &B, plan: &Plan, max_rows: usize) -> Result<(), ModelError> {
        let layout = Arc::new(Layout::new(&self.kv_shape(), plan.clone()));
        let mut rehearsal = Rehearsal {
            device,
            pool: BlockPool::default(),
            act: self.activations(device, max_rows)?,
            logits: device.buffer(2 * self.n_vocab())?,
            residual: vec![0.0; max_rows * self.config.n_embd],
        };
        let short = Cache::new(layout, LONG + max_rows);
        let mut long = short.clone();
        while long.len() + max_rows <= LONG {
            rehearsal.step(self, [&mut long], max_rows)?;
        }
        let rows = (1..FEW_ROWS.min(max_rows)).chain((FEW_ROWS..=max_rows).step_by(FEW_ROWS));
        for (rows, cache) in rows.flat_map(|rows| [(rows, &short), (rows, &long)]) {
            rehearsal.step(self, [&mut cache.clone()], rows)?;
            if 2 * rows <= max_rows {
                rehearsal.step(self, [&mut short.clone(), &mut long.clone()], rows)?;
            }
        }
        // The input of the next part of a split model, and of embeddings.
        let states = &mut rehearsal.residual[..self.config.n_embd];
        self.hidden_states(device, &mut rehearsal.act, 1, states)
    }
}

impl<B: Backend> Rehearsal<'_, B> {
    /// Runs a step of `n` rows for each sequence, with logits where this part computes them.
    fn step<const N: usize>(
        &mut self,
        decoder: &Decoder<B>,
        caches: [&mut Cache<B::Page>; N],
        n: usize,
    ) -> Result<(), ModelError> {
        let Self { device, pool, act, logits, residual } = self;
        let [is_first, is_last] = [decoder.weights.part.is_first(), decoder.weights.part.is_last()];
        let tokens = vec![0; N * n];
        let entry = match is_first {
            true => Entry::Tokens(&tokens),
            false => Entry::Residual(&residual[..N * n * decoder.config.n_embd]),
        };
        let logits_for = if is_last { LogitsFor::Last } else { LogitsFor::None };
        let sequence = |cache| BatchSequence {
            cache,
            n,
            logits_for,
            lora_scales: None,
            places: None,
            tokens_before: &[],
        };
        let outputs = Outputs::logits(is_last.then_some(&mut *logits));
        let result = decoder.step(*device, pool, &mut caches.map(sequence), act, entry, outputs);
        result.map_err(|error| match error {
            StepError::Refused(error) | StepError::Broken(error) => error,
        })?;
        if is_last {
            let mut rows = [TopK { row: 0, k: TOP_K, out: &mut Vec::new() }];
            device.top_k(logits, decoder.n_vocab(), &mut rows)?;
        }
        Ok(())
    }
}
