//! Contexts of random K and V, for measuring speed.

use kvant_backend::{Backend, BackendError};
use kvant_codec::random::Random;
use kvant_kv::BlockPool;

use super::index::index_entries;
use super::{Activations, BatchSequence, Decoder, Entry, StepError, kv_entries};
use crate::LayerState;

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
        let max_len = rows * own.iter().map(|(_, spec)| spec.n_k().max(spec.n_v())).max().unwrap_or(0);
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
            if let Some(dim) = spec.heads.index {
                let [_, keys] = &mut act.index_k;
                backend.copy(&numbers, 0, keys, 0, rows * dim)?;
                backend.kv_append(&mut index_entries(entries), keys, keys, act.step_tiles.as_mut())?;
            }
        }
        Ok(())
    }
}
