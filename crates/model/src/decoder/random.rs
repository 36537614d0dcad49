//! Contexts of random K and V, for measuring speed.

use kvant_backend::{Backend, BackendError, batch_rows};
use kvant_codec::random::Random;
use kvant_kv::BlockPool;

use super::batch_entries::pooled_entries;
use super::index::index_entries;
use super::shared_kv::KeysOf;
use super::{Activations, BatchSequence, Decoder, Entry, StepError, kv_entries};
use crate::{LayerSpec, LayerState};

/// Period of the random numbers of [`Decoder::append_random`]; odd, so that no two rows become
/// equal.
const RANDOM_PERIOD: usize = 65_537;

impl<B: Backend> Decoder<B> {
    /// Appends `rows` tokens (at most `max_rows`) with random K and V: fills a context of any depth
    /// quickly, for speed measurements. The model's output is meaningless afterwards.
    ///
    /// # Errors
    ///
    /// As [`Decoder::step`].
    pub fn append_random(
        &self,
        backend: &B,
        pool: &BlockPool<B::Page>,
        part: BatchSequence<'_, B::Page>,
        act: &mut Activations<B>,
        random: &mut Random,
    ) -> Result<(), StepError> {
        let rows = part.n;
        assert!(rows <= act.max_rows, "{rows} tokens in a step of at most {}", act.max_rows);
        let parts = &mut [part];
        self.prepare(backend, pool, parts, act, Entry::Residual(&[])).map_err(StepError::Refused)?;
        self.append_random_slices(backend, parts, act, random)
            .map_err(|error| StepError::Broken(error.into()))?;
        parts[0].cache.commit(rows);
        Ok(())
    }

    /// Appends K and V to each layer as random slices of one random buffer: generating all numbers
    /// would take longer than storing them.
    fn append_random_slices(
        &self,
        backend: &B,
        parts: &mut [BatchSequence<'_, B::Page>],
        act: &mut Activations<B>,
        random: &mut Random,
    ) -> Result<(), BackendError> {
        let rows = parts[0].n;
        let own = self.layers().iter().enumerate().filter(|(_, spec)| spec.state == LayerState::Own);
        let own: Vec<_> = own.filter_map(|(index, spec)| Some((self.kv_layer(index)?, spec))).collect();
        let width = |spec: &LayerSpec| spec.n_k().max(spec.n_v()).max(spec.heads.index.unwrap_or(0));
        let max_len = rows * own.iter().map(|(_, spec)| width(spec)).max().unwrap_or(0);
        let (mut numbers, mut drawn) =
            (backend.buffer(2 * max_len)?, vec![0.0; RANDOM_PERIOD.min(2 * max_len)]);
        random.fill_gaussian(&mut drawn, 1.0);
        let repeated: Vec<f32> = drawn.iter().copied().cycle().take(2 * max_len).collect();
        backend.write(&mut numbers, &repeated)?;
        for (kv, spec) in own {
            for (width, buffer) in [(spec.n_k(), &mut act.k), (spec.n_v(), &mut act.v)] {
                let start = (random.uniform() * max_len as f64) as usize;
                backend.copy(&numbers, start, buffer, 0, rows * width)?;
            }
            let (k, v, step_tiles) = (&act.k, &act.v, act.step_tiles.as_mut());
            let entries = &mut kv_entries(parts, kv, act.step_tile_offsets[kv]);
            backend.kv_append(entries, k, v, step_tiles)?;
            let start = (random.uniform() * max_len as f64) as usize;
            match (spec.heads.index, spec.heads.pool) {
                (_, Some(_)) => self.append_random_pooled(backend, parts, kv, &numbers, start)?,
                (Some(dim), None) => {
                    let [_, keys] = &mut act.index_k;
                    backend.copy(&numbers, start, keys, 0, rows * dim)?;
                    backend.kv_append(&mut index_entries(entries), keys, keys, act.step_tiles.as_mut())?;
                }
                (None, None) => {}
            }
        }
        Ok(())
    }

    /// Appends the pooled keys that the tokens complete, as slices of the random numbers.
    fn append_random_pooled(
        &self,
        backend: &B,
        parts: &mut [BatchSequence<'_, B::Page>],
        kv: usize,
        numbers: &B::Buffer,
        start: usize,
    ) -> Result<(), BackendError> {
        let mut pooled = pooled_entries(parts, kv);
        for keys in [KeysOf::Attention, KeysOf::Index] {
            let entries = pooled.iter_mut().filter_map(|entry| Some(keys.entry(entry)?.keys));
            let mut entries: Vec<_> = entries.filter(|entry| entry.rows.n > 0).collect();
            let Some(width) = entries.first().map(|entry| entry.layer.k[0].spec.head_dim) else { continue };
            let n = batch_rows(&entries) * width;
            let mut rows = backend.buffer(n)?;
            backend.copy(numbers, start, &mut rows, 0, n)?;
            backend.kv_append(&mut entries, &rows, &rows, None)?;
        }
        Ok(())
    }
}
