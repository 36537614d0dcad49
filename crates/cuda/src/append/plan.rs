//! Plans an append: the list of tile writes that the kernel executes.

use std::ops::Range;

use kvant_backend::{KvBatchEntry, KvTensor, KvTensorSpec, Result, TileLocation, TileWrite};

use super::{OP, tensors_of};
use crate::CudaPage;
use crate::kv::{has_centres, small};

/// `Plan`, `Write` or `Centre` of `append.cu`.
pub(super) type Entry = [u32; 4];

/// Flag of a write that also goes to the step tiles.
const IN_BAND: u32 = 4;
/// Unit of the field of the flags that holds the next write of a chain.
const NEXT: u32 = 8;

/// Upper bound on the kinds of KV tensors of a launch.
pub(super) const MAX_PLAN_KEYS: usize = 1 << 8;

/// The fields of a spec that determine the writes of a KV tensor and its range of step tiles: sink
/// tiles and tail tiles.
type WriteKind = [usize; 2];

pub(super) fn write_kind(spec: &KvTensorSpec) -> WriteKind {
    [spec.sink_tiles, spec.tail_tiles]
}

/// The write list of a launch: for each sequence one plan per kind of KV tensor, for each plan its
/// tiles, and the centres to set.
pub(super) struct WritePlan {
    kinds: Vec<WriteKind>,
    entries: Vec<Entry>,
    max_chains: u32,
    first_centre: usize,
}

impl WritePlan {
    /// Plans a step for the KV tensors of some heads, for all sequences, which share one layer.
    ///
    /// # Errors
    /// [`Unsupported`](kvant_backend::BackendError::Unsupported) beyond 32 bits.
    pub fn new(sequences: &[&KvBatchEntry<'_, CudaPage>], heads: &Range<usize>) -> Result<Self> {
        let layer = sequences[0].layer;
        let mut tensors: Vec<&KvTensor> = Vec::new();
        for tensor in tensors_of(layer, heads) {
            if tensors.iter().all(|known| write_kind(&known.spec) != write_kind(&tensor.spec)) {
                tensors.push(tensor);
            }
        }
        let kinds = tensors.iter().map(|tensor| write_kind(&tensor.spec)).collect();
        let n_plans = sequences.len() * tensors.len();
        let mut list = Self { kinds, entries: vec![[0; 4]; n_plans], max_chains: 0, first_centre: 0 };
        for (index, sequence) in sequences.iter().enumerate() {
            for (plan_index, tensor) in tensors.iter().enumerate() {
                let first = small(OP, "tiles", list.entries.len())?;
                let step_tiles = sequence.step_tiles(tensor);
                let chains = list.push(&tensor.spec, sequence)?;
                list.entries[index * tensors.len() + plan_index] =
                    [first, chains, small(OP, "tiles", step_tiles.start)?, step_tiles.len() as u32];
                list.max_chains = list.max_chains.max(chains);
            }
        }
        list.first_centre = list.entries.len();
        let specs = tensors_of(layer, heads).map(|tensor| &tensor.spec);
        for plan_index in 0..tensors.len() {
            let has_plan =
                |spec: &&KvTensorSpec| has_centres(spec) && write_kind(spec) == list.kinds[plan_index];
            let Some(spec) = specs.clone().find(has_plan) else { continue };
            for (index, sequence) in sequences.iter().enumerate() {
                list.push_centres(spec, sequence, [index, plan_index])?;
            }
        }
        Ok(list)
    }

    /// Adds the centres that a step sets in the tensors of plan `plan_index` of sequence `index`.
    fn push_centres(
        &mut self,
        spec: &KvTensorSpec,
        sequence: &KvBatchEntry<'_, CudaPage>,
        [index, plan_index]: [usize; 2],
    ) -> Result<()> {
        for write in spec.writes(sequence.rows) {
            let Some([own, next]) = spec.centre_rows(&write, sequence.rows) else { continue };
            // Both tiles are filled from their first slots, so that the rows are contiguous.
            let n_rows = own.new.end + next.new.end;
            self.entries.push([
                small(OP, "tiles", own.tile)?,
                (index * MAX_PLAN_KEYS + plan_index) as u32,
                n_rows as u32,
                small(OP, "tokens", sequence.rows.end())? - sequence.rows.n as u32,
            ]);
        }
        Ok(())
    }

    /// Returns the index of the first centre among the entries, and the number of centres.
    pub fn centres(&self) -> (usize, usize) {
        (self.first_centre, self.entries.len() - self.first_centre)
    }

    /// Adds the tiles of one plan: the heads of the chains, then the others. Returns the number of
    /// chains.
    fn push(&mut self, spec: &KvTensorSpec, sequence: &KvBatchEntry<'_, CudaPage>) -> Result<u32> {
        let chains = chains(spec.writes(sequence.rows), spec.tail_tiles);
        let n_chains = small(OP, "tiles", chains.len())?;
        let mut next = n_chains;
        let mut rest = Vec::new();
        for chain in &chains {
            for (i, write) in chain.iter().enumerate() {
                let is_last = i + 1 == chain.len();
                let entry = entry(write, if is_last { 0 } else { next })?;
                next += u32::from(!is_last);
                if i == 0 { self.entries.push(entry) } else { rest.push(entry) }
            }
        }
        self.entries.append(&mut rest);
        Ok(n_chains)
    }

    /// Returns all entries: the plans of each sequence, then their tiles, then the centres.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the index, among the plans of a sequence, of the plan for `spec`.
    pub fn plan_of(&self, spec: &KvTensorSpec) -> u16 {
        let index = self.kinds.iter().position(|&known| known == write_kind(spec));
        index.expect("the kinds of all KV tensors are listed") as u16
    }

    /// Returns the index of the first plan of sequence `index`.
    pub fn plans_of_sequence(&self, index: usize) -> u32 {
        (index * self.kinds.len()) as u32
    }

    /// Returns the maximum number of chains of a plan.
    pub fn max_chains(&self) -> u32 {
        self.max_chains
    }
}

/// Groups the writes into chains: tiles that share a slot of the tail ring, where one is read and
/// the next is written, run in sequence; all others are chains of one.
fn chains(writes: impl Iterator<Item = TileWrite>, tail_tiles: usize) -> Vec<Vec<TileWrite>> {
    let ring = |write: &TileWrite| {
        let touches = !write.old.is_empty() || matches!(write.place, TileLocation::Tail(_));
        touches.then(|| write.tile % tail_tiles)
    };
    let mut chains: Vec<Vec<TileWrite>> = Vec::new();
    for write in writes {
        let slot = ring(&write);
        match chains.iter_mut().find(|chain| slot.is_some() && ring(&chain[0]) == slot) {
            Some(chain) => chain.push(write),
            None => chains.push(vec![write]),
        }
    }
    chains
}

fn entry(write: &TileWrite, next: u32) -> Result<Entry> {
    let location = match write.place {
        TileLocation::Sink(_) => 0,
        TileLocation::Main(_) => 1,
        TileLocation::Tail(_) => 2,
    };
    let step_tiles = if write.in_step_tiles { IN_BAND } else { 0 };
    let slots = [write.old.start, write.old.end, write.new.start, write.new.end].map(|slot| slot as u8);
    Ok([
        small(OP, "tiles", write.tile)?,
        location | step_tiles | (next * NEXT),
        u32::from_le_bytes(slots),
        small(OP, "rows", write.first_row)?,
    ])
}
