//! The allocations of a sequence, and how a step addresses them.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kvant_codec::tile::{TILE, TileLayout};

use super::{KvLayer, KvTensor, TILES_PER_BLOCK, TensorSizes, TileLocation};
use crate::device::{Page, PageTable, Result};

/// An allocation of cache memory, counted while it is alive.
#[derive(Debug)]
pub struct CountedPage<P: Page> {
    page: P,
    /// The counter of live bytes.
    live: Arc<AtomicUsize>,
}

impl<P: Page> CountedPage<P> {
    /// Adds the bytes of `page` to `live` until it is dropped.
    pub fn new(page: P, live: &Arc<AtomicUsize>) -> Self {
        live.fetch_add(page.n_bytes(), Ordering::Relaxed);
        Self { page, live: Arc::clone(live) }
    }

    /// Makes `page` an exclusively owned allocation of `bytes` bytes: allocates it, or copies it if
    /// shared. Returns whether the allocation changed.
    ///
    /// # Errors
    /// Those of `pages`.
    pub fn make_unique(
        page: &mut Option<Arc<Self>>,
        bytes: usize,
        pages: &dyn PageAllocator<P>,
    ) -> Result<bool> {
        let Some(there) = page else {
            if bytes > 0 {
                *page = Some(Arc::new(pages.page(bytes)?));
            }
            return Ok(bytes > 0);
        };
        let is_shared = Arc::get_mut(there).is_none();
        if is_shared {
            *there = Arc::new(pages.copy(there)?);
        }
        Ok(is_shared)
    }
}

impl<P: Page> Drop for CountedPage<P> {
    fn drop(&mut self) {
        self.live.fetch_sub(self.page.n_bytes(), Ordering::Relaxed);
    }
}

impl<P: Page> Deref for CountedPage<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.page
    }
}

impl<P: Page> DerefMut for CountedPage<P> {
    fn deref_mut(&mut self) -> &mut P {
        &mut self.page
    }
}

/// Allocator of cache pages.
pub trait PageAllocator<P: Page> {
    /// Allocates zeroed memory of `n_bytes`.
    ///
    /// # Errors
    /// When memory runs out.
    fn page(&self, n_bytes: usize) -> Result<CountedPage<P>>;

    /// Allocates a copy of `page`.
    ///
    /// # Errors
    /// When memory runs out.
    fn copy(&self, page: &P) -> Result<CountedPage<P>>;
}

/// The memory of one sequence for a group of layers. Clones share pages and copy them on write.
#[derive(Debug)]
pub struct KvMemory<P: Page> {
    sizes: TensorSizes,
    sink: Option<Arc<CountedPage<P>>>,
    /// KV blocks, `None` once outside every query's window.
    blocks: Vec<Option<Arc<CountedPage<P>>>>,
    tail: Option<Arc<CountedPage<P>>>,
    /// The device's index of `blocks`, updated with every change of that list.
    table: P::Table,
    /// See [`KvMemory::version`].
    version: u64,
}

/// Returns a number that no other memory has or had.
fn new_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl<P: Page> Clone for KvMemory<P> {
    fn clone(&self) -> Self {
        let Self { sizes, sink, blocks, tail, table, .. } = self;
        let (sink, blocks, tail, table) = (sink.clone(), blocks.clone(), tail.clone(), table.clone());
        Self { sizes: *sizes, sink, blocks, tail, table, version: new_version() }
    }
}

/// A tile as a kernel reads it: `layout.bytes()` bytes at `offset` of `page`.
#[derive(Debug, Clone, Copy)]
pub struct TileRef<'a, P> {
    /// Layout of the bytes.
    pub layout: TileLayout,
    /// The allocation of the tile.
    pub page: &'a P,
    /// Byte offset of the tile in it.
    pub offset: usize,
}

impl<P: Page> KvMemory<P> {
    /// Creates an empty memory for KV tensors of these sizes.
    pub fn new(sizes: TensorSizes) -> Self {
        let (blocks, table) = (Vec::new(), P::Table::default());
        Self { sizes, sink: None, blocks, tail: None, table, version: new_version() }
    }

    /// Returns the sizes of the allocations.
    pub fn sizes(&self) -> TensorSizes {
        self.sizes
    }

    /// Returns the sink, if written.
    pub fn sink(&self) -> Option<&Arc<CountedPage<P>>> {
        self.sink.as_ref()
    }

    /// Returns the KV blocks; `None` once outside every query's window.
    pub fn blocks(&self) -> &[Option<Arc<CountedPage<P>>>] {
        &self.blocks
    }

    /// Returns the tail, if written.
    pub fn tail(&self) -> Option<&Arc<CountedPage<P>>> {
        self.tail.as_ref()
    }

    /// Returns the device's index of the blocks.
    pub fn table(&self) -> &P::Table {
        &self.table
    }

    /// Returns a number that changes with the allocations and that no other memory has: what a
    /// device has planned with it stays right as long as the version is the same.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Makes the memory that a step writes exclusively owned: the sink (when `sink`), the tail, and
    /// the blocks `blocks`. Some of these, and blocks before them, may not exist yet.
    ///
    /// # Errors
    /// Those of `pages`. Existing contents are unchanged, except for copies made.
    pub fn reserve(&mut self, blocks: Range<usize>, sink: bool, pages: &dyn PageAllocator<P>) -> Result<()> {
        // Also before an error: some may have changed.
        self.version = new_version();
        if sink {
            CountedPage::make_unique(&mut self.sink, self.sizes.sink, pages)?;
        }
        CountedPage::make_unique(&mut self.tail, self.sizes.tail, pages)?;
        // A sink may cover the first blocks: they are never written, but they are counted.
        for index in blocks.start.min(self.blocks.len())..blocks.end {
            if index == self.blocks.len() {
                self.blocks.push(None);
            }
            if CountedPage::make_unique(&mut self.blocks[index], self.sizes.block, pages)? {
                self.update_table(index);
            }
        }
        Ok(())
    }

    /// Appends a block.
    pub fn push(&mut self, block: Option<Arc<CountedPage<P>>>) {
        self.blocks.push(block);
        self.update_table(self.blocks.len() - 1);
    }

    /// Puts back a block that was released, or appends it; leaves one that is there.
    pub fn restore(&mut self, index: usize, block: &Arc<CountedPage<P>>) {
        match self.blocks.get_mut(index) {
            Some(Some(_)) => return,
            Some(none) => *none = Some(Arc::clone(block)),
            None => self.blocks.push(Some(Arc::clone(block))),
        }
        self.update_table(index);
    }

    /// Replaces the sink by a shared one.
    pub fn set_sink(&mut self, sink: Option<Arc<CountedPage<P>>>) {
        self.version = new_version();
        self.sink = sink;
    }

    /// Replaces the tail by a shared one.
    pub fn set_tail(&mut self, tail: Option<Arc<CountedPage<P>>>) {
        self.version = new_version();
        self.tail = tail;
    }

    /// Releases all blocks but the first `n`.
    pub fn truncate(&mut self, n: usize) {
        self.version = new_version();
        self.blocks.truncate(n);
        self.table.truncate(n.min(self.blocks.len()));
    }

    /// Releases the blocks before `n`, which are outside every query's window.
    pub fn release_before(&mut self, n: usize) {
        let n = n.min(self.blocks.len());
        // Most of them were released before.
        for block in self.blocks[..n].iter_mut().rev().take_while(|block| block.is_some()) {
            *block = None;
        }
    }

    /// Returns every allocation.
    pub fn pages(&self) -> impl Iterator<Item = &Arc<CountedPage<P>>> {
        self.blocks.iter().flatten().chain(&self.sink).chain(&self.tail)
    }

    /// Returns the tile of `tensor` at `place`.
    ///
    /// # Panics
    /// When that tile has not been written.
    pub fn tile(&self, tensor: &KvTensor, place: TileLocation) -> TileRef<'_, P> {
        let (layout, offset) = tensor.locate(place);
        let page = match place {
            TileLocation::Sink(_) => self.sink.as_ref(),
            TileLocation::Main(tile) => self.blocks[tile / TILES_PER_BLOCK].as_ref(),
            TileLocation::Tail(_) => self.tail.as_ref(),
        };
        let page = page.expect("a tile that was written");
        TileRef { layout, page, offset }
    }

    /// Returns the allocation of `place` for writing.
    ///
    /// # Panics
    /// Unless it was [reserved](KvMemory::reserve).
    pub fn page_mut(&mut self, place: TileLocation) -> &mut P {
        let page = match place {
            TileLocation::Sink(_) => &mut self.sink,
            TileLocation::Main(tile) => &mut self.blocks[tile / TILES_PER_BLOCK],
            TileLocation::Tail(_) => &mut self.tail,
        };
        page.as_mut()
            .and_then(Arc::get_mut)
            .map(|held| &mut **held)
            .expect("memory that was reserved is there and not shared")
    }

    fn update_table(&mut self, index: usize) {
        self.version = new_version();
        if let Some(block) = &self.blocks[index] {
            self.table.set(index, block);
        }
    }
}

/// The tokens of a batch that belong to one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenSpan {
    /// Index of the first one in the batch.
    pub first: usize,
    /// Number of tokens.
    pub n: usize,
    /// Position of the first one: the sequence's length before the step.
    pub start: usize,
    /// Tiles before this one were in the sink or the blocks before the step.
    pub first_tail_tile: usize,
}

impl TokenSpan {
    /// Returns the sequence's length after the step.
    pub fn end(&self) -> usize {
        self.start + self.n
    }

    /// Returns the indices within the batch.
    pub fn range(&self) -> Range<usize> {
        self.first..self.first + self.n
    }

    /// Returns whether the tokens span several tiles, so that they do not all read the same tail.
    #[inline]
    pub fn spans_tiles(&self) -> bool {
        self.n > 0 && self.start / TILE != (self.end() - 1) / TILE
    }
}

/// One sequence of a step, as a recurrent layer processes it.
#[derive(Debug)]
pub struct StateBatchEntry<'a, P: Page> {
    /// Its tokens in the batch.
    pub rows: TokenSpan,
    /// The page with the layer's state: zero before the first token, updated by each row.
    pub page: &'a mut P,
    /// Byte offset of the state in it.
    pub offset: usize,
    /// Its length in f32 values.
    pub n_values: usize,
}

/// One sequence of a step, as one attention layer processes it.
#[derive(Debug)]
pub struct KvBatchEntry<'a, P: Page> {
    /// Its tokens in the batch.
    pub rows: TokenSpan,
    /// The layer's KV tensors.
    pub layer: &'a KvLayer,
    /// The sequence's memory.
    pub memory: &'a mut KvMemory<P>,
    /// Byte offset of its share of the step tiles.
    pub step_offset: usize,
    /// Channel scales, in the layout of [`ChannelScaleLayout`](super::ChannelScaleLayout), if any.
    pub channel_scales: Option<&'a P>,
}

impl<P: Page> KvBatchEntry<'_, P> {
    /// Returns the same sequence as the layer's index processes it; `None` without an index.
    pub fn index(&mut self) -> Option<KvBatchEntry<'_, P>> {
        let Self { rows, layer, memory, step_offset, .. } = self;
        let layer = layer.index.as_deref()?;
        let (rows, step_offset) = (*rows, *step_offset);
        Some(KvBatchEntry { rows, layer, memory, step_offset, channel_scales: None })
    }

    /// Returns the tiles of `tensor` that the rows read in f16 from the step tiles; empty when the
    /// tail holds all of them.
    pub fn step_tiles(&self, tensor: &KvTensor) -> Range<usize> {
        step_tiles(self.rows, tensor)
    }

    /// Returns the bytes of its share of the step tiles. Its index uses the same, before the layer
    /// does.
    #[inline]
    pub fn step_bytes(&self) -> usize {
        // A decode step stays within a tile.
        if self.rows.spans_tiles() { self.step_bytes_of_tiles() } else { 0 }
    }

    fn step_bytes_of_tiles(&self) -> usize {
        let of_layer = |layer: &KvLayer| {
            let tiles = layer.tensors().map(|tensor| self.step_tiles(tensor).len()).max();
            tiles.unwrap_or(0) * layer.step_tile_bytes
        };
        of_layer(self.layer).max(self.layer.index.as_deref().map_or(0, of_layer))
    }

    /// Returns the byte offset of tile `tile` of `tensor` in the step tiles.
    pub fn step_tile_offset(&self, tensor: &KvTensor, tile: usize) -> usize {
        let tiles = self.step_tiles(tensor);
        let bytes = tensor.spec.f16_layout().bytes();
        self.step_offset + tiles.len() * tensor.step_tile_offset + (tile - tiles.start) * bytes
    }
}

/// See [`KvBatchEntry::step_tiles`].
pub(super) fn step_tiles(rows: TokenSpan, tensor: &KvTensor) -> Range<usize> {
    if tensor.spec.tail_tiles == 0 || !rows.spans_tiles() {
        return 0..0;
    }
    let end = rows.end().div_ceil(TILE);
    tensor.spec.f16_window_start(rows.start / TILE).min(end)..end
}
