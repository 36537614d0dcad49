//! The KV memory that several threads write in a step: each KV tensor belongs to one thread.

use std::ops::Range;

use kvant_backend::{KvBatchEntry, KvTensor, TILES_PER_BLOCK, TileLocation, TokenSpan};
use kvant_codec::tile::TileLayout;

use crate::host::page::CpuPage;

/// An allocation that threads divide among themselves.
#[derive(Debug, Clone, Copy)]
struct Raw {
    start: *mut u8,
    len: usize,
}

// SAFETY: a `Raw` is an address; the contract of [`Targets::of`] determines which thread writes
// which bytes.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Raw {
    const NONE: Self = Self { start: std::ptr::null_mut(), len: 0 };

    fn of(page: &mut CpuPage) -> Self {
        let bytes = page.as_mut_bytes();
        Self { start: bytes.as_mut_ptr(), len: bytes.len() }
    }

    /// Returns the bytes of `range`.
    ///
    /// # Safety
    /// The allocation is alive and borrowed for writing, and nothing else reads or writes these
    /// bytes while they are borrowed.
    unsafe fn bytes<'a>(self, range: Range<usize>) -> &'a mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: within the allocation by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// The allocations that one sequence writes.
#[derive(Debug)]
struct PageAddresses {
    sink: Raw,
    tail: Raw,
    /// Blocks from `first_block` on, as a range of the blocks of all sequences.
    blocks: Range<usize>,
    first_block: usize,
}

/// The allocations of all sequences. Reused between steps, so that decode does not allocate.
#[derive(Debug, Default)]
pub(super) struct Targets {
    parts: Vec<PageAddresses>,
    blocks: Vec<Raw>,
    step_tiles: Option<Raw>,
}

impl Targets {
    /// Records the address of every allocation that `parts` and their step tiles write.
    pub(super) fn fill(&mut self, parts: &mut [KvBatchEntry<'_, CpuPage>], step_tiles: Option<&mut CpuPage>) {
        self.parts.clear();
        self.blocks.clear();
        self.step_tiles = step_tiles.map(Raw::of);
        for part in parts {
            let n_blocks = part.memory.blocks().len();
            let first = part.layer.tensors().filter_map(|tensor| first_block(tensor, part.rows)).min();
            let first_block = first.unwrap_or(n_blocks);
            let from = self.blocks.len();
            for block in first_block..n_blocks {
                self.blocks.push(Raw::of(part.memory.page_mut(TileLocation::Main(block * TILES_PER_BLOCK))));
            }
            let writes_sink = part.layer.tensors().any(|tensor| {
                tensor.spec.writes(part.rows).any(|write| matches!(write.place, TileLocation::Sink(_)))
            });
            self.parts.push(PageAddresses {
                sink: if writes_sink {
                    Raw::of(part.memory.page_mut(TileLocation::Sink(0)))
                } else {
                    Raw::NONE
                },
                tail: match part.memory.tail() {
                    Some(_) => Raw::of(part.memory.page_mut(TileLocation::Tail(0))),
                    None => Raw::NONE,
                },
                blocks: from..self.blocks.len(),
                first_block,
            });
        }
    }

    /// Returns what `part`, the `index`-th recorded sequence, writes of `tensor`.
    ///
    /// # Safety
    /// The sequences and the step tiles are still borrowed for writing, and no other target of this
    /// KV tensor of this sequence exists.
    pub(super) unsafe fn of<'a>(
        &'a self,
        index: usize,
        part: &'a KvBatchEntry<'_, CpuPage>,
        tensor: &'a KvTensor,
    ) -> Target<'a> {
        let bases = &self.parts[index];
        let step_tiles = match part.step_tiles(tensor) {
            tiles if tiles.is_empty() => Raw::NONE,
            _ => self.step_tiles.expect("a step_tiles, as the shapes have been checked"),
        };
        Target { tensor, bases, blocks: &self.blocks[bases.blocks.clone()], step_tiles, part }
    }
}

fn first_block(tensor: &KvTensor, rows: TokenSpan) -> Option<usize> {
    tensor.spec.writes(rows).find_map(|write| match write.place {
        TileLocation::Main(tile) => Some(tile / TILES_PER_BLOCK),
        _ => None,
    })
}

/// One KV tensor of a sequence, to be written.
pub(super) struct Target<'a> {
    tensor: &'a KvTensor,
    part: &'a KvBatchEntry<'a, CpuPage>,
    bases: &'a PageAddresses,
    blocks: &'a [Raw],
    step_tiles: Raw,
}

impl Target<'_> {
    /// Returns the tile at `place`.
    pub(super) fn tile(&mut self, place: TileLocation) -> (TileLayout, &mut [u8]) {
        let (layout, offset) = self.tensor.locate(place);
        let raw = match place {
            TileLocation::Sink(_) => self.bases.sink,
            TileLocation::Tail(_) => self.bases.tail,
            TileLocation::Main(tile) => self.blocks[tile / TILES_PER_BLOCK - self.bases.first_block],
        };
        // SAFETY: the bytes belong to this KV tensor alone, which is this target's by the contract
        // of `Targets::of`.
        (layout, unsafe { raw.bytes(offset..offset + layout.bytes()) })
    }

    /// Returns the centre of the block that contains tile `tile`.
    pub(super) fn centre(&mut self, tile: usize) -> &mut [u8] {
        let (offset, raw) =
            (self.tensor.centre, self.blocks[tile / TILES_PER_BLOCK - self.bases.first_block]);
        // SAFETY: as above: the centre follows the tensor's own tiles.
        unsafe { raw.bytes(offset..offset + self.tensor.spec.centre_bytes()) }
    }

    /// Returns step tile `tile`.
    pub(super) fn step_tile(&mut self, tile: usize) -> (TileLayout, &mut [u8]) {
        let (layout, offset) = (self.tensor.spec.f16_layout(), self.part.step_tile_offset(self.tensor, tile));
        // SAFETY: as above: KV tensors do not overlap in the step tiles, nor do sequences.
        (layout, unsafe { self.step_tiles.bytes(offset..offset + layout.bytes()) })
    }
}
