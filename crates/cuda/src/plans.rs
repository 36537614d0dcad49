//! Plans that the layers of a step share.
//!
//! The layers of a step process the same rows in memory of one shape, or of a few: what an op plans
//! for one of them, and writes to the device, serves the others.

use std::sync::{Arc, Mutex, PoisonError};

use kvant_backend::KvBatchEntry;

use crate::{CudaPage, kv};

/// Maximum number of plans that are kept: those of a step, for some groups of layers.
const MAX_PLANS: usize = 8;

/// The plans of an op.
pub(crate) struct Plans<T> {
    known: Mutex<Vec<(PlanKey, Arc<T>)>>,
}

impl<T> Default for Plans<T> {
    fn default() -> Self {
        Self { known: Mutex::default() }
    }
}

impl<T> Plans<T> {
    /// Returns the plan for the rows and the memory of these sequences, and for what it depends on
    /// besides, made at its first use.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get<'a, E>(
        &self,
        of_layer: &[u64],
        sequences: impl Iterator<Item = &'a KvBatchEntry<'a, CudaPage>> + Clone,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        self.get_by(of_layer, sequences.map(words), make)
    }

    fn get_by<E>(
        &self,
        of_layer: &[u64],
        sequences: impl Iterator<Item = SequenceWords> + Clone,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let is_for =
            |key: &PlanKey| key.of_layer == of_layer && key.sequences.iter().copied().eq(sequences.clone());
        if let Some((_, plan)) = known.iter().find(|(key, _)| is_for(key)) {
            return Ok(Arc::clone(plan));
        }
        if known.len() == MAX_PLANS {
            known.remove(0);
        }
        let plan = Arc::new(make()?);
        let key = PlanKey { of_layer: of_layer.to_vec(), sequences: sequences.collect() };
        known.push((key, Arc::clone(&plan)));
        Ok(plan)
    }

    /// Forgets all plans, as a step begins: what a failed step should have written is unknown.
    pub fn forget(&self) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Everything that a plan depends on.
struct PlanKey {
    of_layer: Vec<u64>,
    sequences: Vec<SequenceWords>,
}

/// What a plan depends on of a sequence: rows and memory.
type SequenceWords = [u64; 7];

fn words(sequence: &KvBatchEntry<'_, CudaPage>) -> SequenceWords {
    let rows = sequence.rows;
    let [first, n, start] = [rows.first, rows.n, rows.start].map(|count| count as u64);
    let [tail, step_offset] = [rows.first_tail_tile, sequence.step_offset].map(|count| count as u64);
    [first, n, start, tail, step_offset, sequence.memory.version(), kv::balance(sequence)]
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    #[test]
    fn a_plan_is_made_once_for_a_key() {
        let (plans, mut made) = (Plans::default(), 0);
        let mut get = |word| {
            let plan = plans.get_by(&[word], iter::empty(), || {
                made += 1;
                if word == 0 { Err("no memory") } else { Ok(word) }
            });
            (plan.map(|plan| *plan), made)
        };
        assert_eq!(get(0), (Err("no memory"), 1));
        assert_eq!([get(0), get(1), get(1)], [(Err("no memory"), 2), (Ok(1), 3), (Ok(1), 3)]);
        // The oldest gives way.
        for word in 2..=MAX_PLANS as u64 + 1 {
            assert_eq!(get(word).0, Ok(word));
        }
        let made = MAX_PLANS + 3;
        assert_eq!([get(2), get(1)], [(Ok(2), made), (Ok(1), made + 1)]);
        plans.forget();
        assert!(plans.known.lock().unwrap().is_empty());
    }
}
