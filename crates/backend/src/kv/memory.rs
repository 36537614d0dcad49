//! The allocations of a sequence, and how a step addresses them.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant_codec::tile::{TILE, TileLayout};

use super::{KvLayer, KvStream, Place, StreamSizes, TILES_PER_BLOCK};
use crate::device::{Page, PageTable, Result};

/// An allocation of cache memory, counted while it lives.
#[derive(Debug)]
pub struct Held<P: Page> {
    page: P,
    /// What it is counted in.
    live: Arc<AtomicUsize>,
}

impl<P: Page> Held<P> {
    /// Holds `page`, whose bytes are added to `live` until it is dropped.
    pub fn new(page: P, live: &Arc<AtomicUsize>) -> Self {
        live.fetch_add(page.n_bytes(), Ordering::Relaxed);
        Self { page, live: Arc::clone(live) }
    }

    /// Makes `page` one of `bytes` bytes that nobody else has or knows of; says whether it is another one now.
    ///
    /// # Errors
    /// Those of `pages`.
    pub fn own(page: &mut Option<Arc<Self>>, bytes: usize, pages: &dyn Pages<P>) -> Result<bool> {
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

impl<P: Page> Drop for Held<P> {
    fn drop(&mut self) {
        self.live.fetch_sub(self.page.n_bytes(), Ordering::Relaxed);
    }
}

impl<P: Page> Deref for Held<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.page
    }
}

impl<P: Page> DerefMut for Held<P> {
    fn deref_mut(&mut self) -> &mut P {
        &mut self.page
    }
}

/// Where memory of the cache comes from.
pub trait Pages<P: Page> {
    /// Zeroed memory of so many bytes.
    ///
    /// # Errors
    /// When there is none.
    fn page(&self, n_bytes: usize) -> Result<Held<P>>;

    /// A second allocation with the same bytes.
    ///
    /// # Errors
    /// When there is no memory.
    fn copy(&self, page: &P) -> Result<Held<P>>;
}

/// The memory of one sequence for a group of layers. Cloning shares it; whoever writes copies first.
#[derive(Debug)]
pub struct KvMemory<P: Page> {
    sizes: StreamSizes,
    sink: Option<Arc<Held<P>>>,
    /// Blocks, `None` where no query can see one any more.
    blocks: Vec<Option<Arc<Held<P>>>>,
    tail: Option<Arc<Held<P>>>,
    /// The device's index of `blocks`; told of every change of that list.
    table: P::Table,
}

impl<P: Page> Clone for KvMemory<P> {
    fn clone(&self) -> Self {
        let Self { sizes, sink, blocks, tail, table } = self;
        let (sink, blocks, tail, table) = (sink.clone(), blocks.clone(), tail.clone(), table.clone());
        Self { sizes: *sizes, sink, blocks, tail, table }
    }
}

/// A tile as a kernel reads it: `layout.bytes()` bytes at `offset` of `page`.
#[derive(Debug, Clone, Copy)]
pub struct TileRef<'a, P> {
    /// How to read the bytes.
    pub layout: TileLayout,
    /// The allocation the tile lies in.
    pub page: &'a P,
    /// Where in it the tile starts, in bytes.
    pub offset: usize,
}

impl<P: Page> KvMemory<P> {
    /// No memory yet, for streams of these sizes.
    pub fn new(sizes: StreamSizes) -> Self {
        Self { sizes, sink: None, blocks: Vec::new(), tail: None, table: P::Table::default() }
    }

    /// The sizes of the allocations.
    pub fn sizes(&self) -> StreamSizes {
        self.sizes
    }

    /// The sink, if it has been written.
    pub fn sink(&self) -> Option<&Arc<Held<P>>> {
        self.sink.as_ref()
    }

    /// The blocks; `None` where no query can see one any more.
    pub fn blocks(&self) -> &[Option<Arc<Held<P>>>] {
        &self.blocks
    }

    /// The tail, if it has been written.
    pub fn tail(&self) -> Option<&Arc<Held<P>>> {
        self.tail.as_ref()
    }

    /// The device's index of the blocks.
    pub fn table(&self) -> &P::Table {
        &self.table
    }

    /// Makes everything that a step writes its own: the sink (when `sink`), the tail, and the blocks `blocks`, of which some may not
    /// exist yet, nor those before.
    ///
    /// # Errors
    /// Those of `pages`. What there was stays as it was, but for copies.
    pub fn reserve(&mut self, blocks: Range<usize>, sink: bool, pages: &dyn Pages<P>) -> Result<()> {
        if sink {
            Held::own(&mut self.sink, self.sizes.sink, pages)?;
        }
        Held::own(&mut self.tail, self.sizes.tail, pages)?;
        // A sink may reach over the first blocks: nothing of theirs is ever written, but they are counted.
        for index in blocks.start.min(self.blocks.len())..blocks.end {
            if index == self.blocks.len() {
                self.blocks.push(None);
            }
            if Held::own(&mut self.blocks[index], self.sizes.block, pages)? {
                self.tell(index);
            }
        }
        Ok(())
    }

    /// Takes a block in, after those there are.
    pub fn push(&mut self, block: Option<Arc<Held<P>>>) {
        self.blocks.push(block);
        self.tell(self.blocks.len() - 1);
    }

    /// Takes another sink, shared.
    pub fn set_sink(&mut self, sink: Option<Arc<Held<P>>>) {
        self.sink = sink;
    }

    /// Takes another tail, shared.
    pub fn set_tail(&mut self, tail: Option<Arc<Held<P>>>) {
        self.tail = tail;
    }

    /// Lets go of all blocks but the first `n`.
    pub fn truncate(&mut self, n: usize) {
        self.blocks.truncate(n);
        self.table.truncate(n.min(self.blocks.len()));
    }

    /// Lets go of the blocks before `n`, which no query sees any more.
    pub fn forget(&mut self, n: usize) {
        let n = n.min(self.blocks.len());
        // Most of them have been let go of before.
        for block in self.blocks[..n].iter_mut().rev().take_while(|block| block.is_some()) {
            *block = None;
        }
    }

    /// Every allocation.
    pub fn pages(&self) -> impl Iterator<Item = &Arc<Held<P>>> {
        self.blocks.iter().flatten().chain(&self.sink).chain(&self.tail)
    }

    /// The tile of `stream` at `place`.
    ///
    /// # Panics
    /// When that part has not been written.
    pub fn tile(&self, stream: &KvStream, place: Place) -> TileRef<'_, P> {
        let (layout, offset) = stream.locate(place);
        let page = match place {
            Place::Sink(_) => self.sink.as_ref(),
            Place::Main(tile) => self.blocks[tile / TILES_PER_BLOCK].as_ref(),
            Place::Tail(_) => self.tail.as_ref(),
        };
        let page = page.expect("a tile that was written");
        TileRef { layout, page, offset }
    }

    /// The allocation in which `place` lies, to be written.
    ///
    /// # Panics
    /// Unless it was [reserved](KvMemory::reserve).
    pub fn page_mut(&mut self, place: Place) -> &mut P {
        let page = match place {
            Place::Sink(_) => &mut self.sink,
            Place::Main(tile) => &mut self.blocks[tile / TILES_PER_BLOCK],
            Place::Tail(_) => &mut self.tail,
        };
        page.as_mut()
            .and_then(Arc::get_mut)
            .map(|held| &mut **held)
            .expect("memory that was reserved is there and not shared")
    }

    fn tell(&mut self, index: usize) {
        if let Some(block) = &self.blocks[index] {
            self.table.set(index, block);
        }
    }
}

/// Rows of a step that belong to one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// The first of them, among the rows of the step.
    pub first: usize,
    /// How many.
    pub n: usize,
    /// Position of the first one: tokens that the sequence held before the step.
    pub start: usize,
    /// Tiles before this one were in the sink or the blocks before the step.
    pub coded: usize,
}

impl Rows {
    /// Tokens that the sequence holds after the step.
    pub fn end(&self) -> usize {
        self.start + self.n
    }

    /// The rows within the step.
    pub fn range(&self) -> Range<usize> {
        self.first..self.first + self.n
    }

    /// Whether they lie in several tiles, so that they do not all see the same tail.
    pub fn cross(&self) -> bool {
        self.n > 0 && self.start / TILE != (self.end() - 1) / TILE
    }
}

/// One sequence of a step, as a recurrent layer sees it.
#[derive(Debug)]
pub struct StatePart<'a, P: Page> {
    /// Its rows.
    pub rows: Rows,
    /// Where the layer's state lies: zero before the first token, changed by each row.
    pub page: &'a mut P,
    /// Where in it the state begins, in bytes.
    pub offset: usize,
    /// Its length in f32 values.
    pub n_values: usize,
}

/// One sequence of a step, as one layer with keys and values sees it.
#[derive(Debug)]
pub struct KvPart<'a, P: Page> {
    /// Its rows.
    pub rows: Rows,
    /// Its streams.
    pub layer: &'a KvLayer,
    /// Its memory.
    pub memory: &'a mut KvMemory<P>,
    /// Where its share of the band begins, in bytes.
    pub band: usize,
    /// What rows are multiplied by, as [`BalanceLayout`](super::BalanceLayout) says; nothing when there is none.
    pub balance: Option<&'a P>,
}

impl<P: Page> KvPart<'_, P> {
    /// Tiles of `stream` that the rows see in 16 bit and that go to the band; none when the tail holds all of them.
    pub fn band_tiles(&self, stream: &KvStream) -> Range<usize> {
        band_tiles(self.rows, stream)
    }

    /// Bytes of its share of the band.
    pub fn band_bytes(&self) -> usize {
        let tiles = self.layer.streams().map(|stream| self.band_tiles(stream).len()).max();
        tiles.unwrap_or(0) * self.layer.band_bytes
    }

    /// Where tile `tile` of the band of `stream` starts in the band, in bytes.
    pub fn band_offset(&self, stream: &KvStream, tile: usize) -> usize {
        let tiles = self.band_tiles(stream);
        let bytes = stream.spec.f16_layout().bytes();
        self.band + tiles.len() * stream.band + (tile - tiles.start) * bytes
    }
}

/// See [`KvPart::band_tiles`].
pub(super) fn band_tiles(rows: Rows, stream: &KvStream) -> Range<usize> {
    if stream.spec.tail_tiles == 0 || !rows.cross() {
        return 0..0;
    }
    let end = rows.end().div_ceil(TILE);
    stream.spec.window(rows.start / TILE).min(end)..end
}
