//! Where the tokens of one head live: the sequence of tiles of one (layer, KV head, K or V).
//!
//! ```text
//! token   0 ........ n_sink ............... main_end ........ len
//!         [ sink: f16 ][ main: the stream's type ][ tail: f16  ]
//!           tiles        pages of tiles             ring of tiles
//! ```
//!
//! Every boundary but `len` is a multiple of [`TILE`] tokens. New tokens enter the tail (or the sink) in 16 bit and
//! are encoded into the main pages a whole tile at a time, oldest first, when the tail has no room left. A stream
//! whose type is not coded (f32, f16, bf16), or whose tail is switched off, has no tail: tokens are written to their
//! slot in the main pages at once.
//!
//! The f16 parts of a rotated stream hold rotated values, so one query serves all three parts.
//!
//! Everything here is arithmetic on token numbers; bytes are moved by the device.

use std::ops::Range;
use std::sync::Arc;

use kvant_codec::DType;
use kvant_codec::tile::{Side, TILE, TileLayout, padded_dim};

use crate::device::{Page, PageTable, Result};

/// Tokens in one main page. Pages of a shared prefix are shared; a page is copied before it is written.
pub const TOKENS_PER_PAGE: usize = 128;
/// Tiles in the tail of a coded stream. With two, a token stays in 16 bit until at least 16 younger ones are there: with
/// one, every sixteenth step would see all but its own token encoded.
const TAIL_TILES: usize = 2;
const TILES_PER_PAGE: usize = TOKENS_PER_PAGE / TILE;

/// What one stream stores and how much of it stays in 16 bit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamSpec {
    /// Type of the main pages.
    pub dtype: DType,
    /// Keys or values.
    pub side: Side,
    /// True size of a head.
    pub head_dim: usize,
    /// First tokens kept in f16, in tiles.
    pub sink_tiles: usize,
    /// Youngest tokens kept in f16, in tiles; 0 switches the tail off.
    pub tail_tiles: usize,
    /// Factor on every encoded vector (1 for none); tokens in 16 bit are not scaled.
    pub alpha: f32,
}

impl StreamSpec {
    /// A stream with no sink, the tail its type has by default and no scaling.
    ///
    /// # Panics
    /// When `dtype` is not a KV type; a plan checks that before it makes streams.
    pub fn new(dtype: DType, side: Side, head_dim: usize) -> Self {
        assert!(dtype.is_kv(), "{KV_ONLY}");
        let tail_tiles = if is_coded(dtype) { TAIL_TILES } else { 0 };
        Self { dtype, side, head_dim, sink_tiles: 0, tail_tiles, alpha: 1.0 }
    }

    /// Values per token as stored: the head padded for the stream's type.
    pub fn dim(&self) -> usize {
        padded_dim(self.dtype, self.head_dim).expect(KV_ONLY)
    }

    /// Layout of a main tile.
    pub fn main_layout(&self) -> TileLayout {
        TileLayout::new(self.dtype, self.side, self.dim()).expect(KV_ONLY)
    }

    /// Layout of a sink or tail tile.
    pub fn f16_layout(&self) -> TileLayout {
        TileLayout::new(DType::F16, self.side, self.dim()).expect(KV_ONLY)
    }

    /// Bytes that a stream of `tokens` tokens allocates: whole pages, sink and tail.
    pub fn n_bytes(&self, tokens: usize) -> usize {
        let main_end = Append::new(self, 0, self.sink_tiles * TILE, tokens).new_main_end;
        let pages = (main_end - self.sink_tiles * TILE).div_ceil(TOKENS_PER_PAGE);
        let f16_tiles = self.sink_tiles + self.tail_tiles;
        pages * self.page_bytes() + f16_tiles * self.f16_layout().bytes()
    }

    /// Bytes of one main page.
    fn page_bytes(&self) -> usize {
        TILES_PER_PAGE * self.main_layout().bytes()
    }

    /// Whether a stream of this kind can hold `len` tokens with the main pages ending at token `main_end`.
    pub fn admits(&self, len: usize, main_end: usize) -> bool {
        let n_sink = self.sink_tiles * TILE;
        match self.tail_tiles {
            0 => main_end == len.max(n_sink),
            _ if len <= n_sink => main_end == n_sink,
            tail_tiles => {
                main_end.is_multiple_of(TILE)
                    && (n_sink..=len).contains(&main_end)
                    && len - main_end <= tail_tiles * TILE
            }
        }
    }

    /// Whether rows are rotated before they are stored, in all three parts.
    pub fn rotates(&self) -> bool {
        self.dtype.is_turbo()
    }
}

const KV_ONLY: &str = "a stream stores KV types only";

fn is_coded(dtype: DType) -> bool {
    !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Which part of a stream a tile lies in; indices count tiles within that part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Tile of the sink.
    Sink(usize),
    /// Tile of the main pages.
    Main(usize),
    /// Tile of the tail's ring.
    Tail(usize),
}

/// A tile as a kernel reads it: `layout.bytes()` bytes at `offset` of `page`.
#[derive(Debug, Clone, Copy)]
pub struct TileRef<'a, P> {
    /// How to read the bytes.
    pub layout: TileLayout,
    /// The allocation the tile lies in.
    pub page: &'a P,
    /// Where in the page it starts, in bytes.
    pub offset: usize,
}

/// The tile sequence of one (layer, KV head, K or V).
#[derive(Debug)]
pub struct Stream<P: Page> {
    spec: StreamSpec,
    sink: Option<P>,
    pages: Vec<Arc<P>>,
    /// The device's index of `pages`; told of every change of that list.
    table: P::Table,
    tail: Option<P>,
    len: usize,
    main_end: usize,
}

/// The streams of one layer.
#[derive(Debug)]
pub struct KvLayer<P: Page> {
    /// Keys, `[n_kv_heads]`.
    pub k: Vec<Stream<P>>,
    /// Values, `[n_kv_heads]`.
    pub v: Vec<Stream<P>>,
}

impl<P: Page> KvLayer<P> {
    /// Tokens stored in this layer.
    pub fn len(&self) -> usize {
        self.k.first().map_or(0, |stream| stream.len)
    }

    /// Whether no token is stored.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A second layer with the same tokens, as [`Stream::fork`].
    pub fn fork(&self) -> Result<Self> {
        let fork = |streams: &[Stream<P>]| streams.iter().map(Stream::fork).collect::<Result<_>>();
        Ok(Self { k: fork(&self.k)?, v: fork(&self.v)? })
    }
}

impl<P: Page> Stream<P> {
    /// An empty stream. `alloc` is asked for the f16 parts at once: their size does not depend on the context.
    pub fn new(spec: StreamSpec, alloc: &mut dyn FnMut(usize) -> Result<P>) -> Result<Self> {
        let mut f16_tiles = |tiles: usize| match tiles {
            0 => Ok(None),
            _ => alloc(tiles * spec.f16_layout().bytes()).map(Some),
        };
        let sink = f16_tiles(spec.sink_tiles)?;
        let tail = f16_tiles(spec.tail_tiles)?;
        let (pages, table) = (Vec::new(), P::Table::default());
        Ok(Self { spec, sink, pages, table, tail, len: 0, main_end: spec.sink_tiles * TILE })
    }

    /// A stream that holds `len` tokens, those before `main_end` in the main pages: the shape of one that was taken
    /// down. Its tiles are zeros; the caller writes them, each to its [`Stream::place`].
    ///
    /// # Panics
    /// Unless `spec` [admits](StreamSpec::admits) such a stream.
    pub fn restored(
        spec: StreamSpec,
        len: usize,
        main_end: usize,
        alloc: &mut dyn FnMut(usize) -> Result<P>,
    ) -> Result<Self> {
        assert!(spec.admits(len, main_end), "{len} tokens, main pages to {main_end}: {spec:?}");
        let mut stream = Self::new(spec, alloc)?;
        (stream.len, stream.main_end) = (len, main_end);
        stream.reserve(0, alloc)?;
        Ok(stream)
    }

    /// A second stream with the same tokens. The main pages are shared until one side makes room to write to them.
    pub fn fork(&self) -> Result<Self> {
        let Self { spec, len, main_end, .. } = *self;
        let sink = self.sink.as_ref().map(P::duplicate).transpose()?;
        let tail = self.tail.as_ref().map(P::duplicate).transpose()?;
        let (pages, table) = (self.pages.clone(), self.table.clone());
        Ok(Self { spec, sink, pages, table, tail, len, main_end })
    }

    /// What this stream stores.
    pub fn spec(&self) -> &StreamSpec {
        &self.spec
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens `n_sink .. main_end` are in the main pages, later ones in the tail.
    pub fn main_end(&self) -> usize {
        self.main_end
    }

    /// Bytes allocated: sink, pages and tail. Shared pages are counted in each stream that holds them.
    pub fn n_bytes(&self) -> usize {
        let pages = self.pages.iter().map(|page| page.n_bytes());
        let f16 = self.sink.iter().chain(&self.tail).map(Page::n_bytes);
        pages.chain(f16).sum()
    }

    /// Makes room for `n` more tokens in the main pages, in pages that no other stream shares.
    pub fn reserve(&mut self, n: usize, alloc: &mut dyn FnMut(usize) -> Result<P>) -> Result<()> {
        let plan = self.plan(n);
        let main_tokens = plan.new_main_end.saturating_sub(self.n_sink());
        while self.pages.len() < main_tokens.div_ceil(TOKENS_PER_PAGE) {
            let page = alloc(self.spec.page_bytes())?;
            self.table.set(self.pages.len(), &page);
            self.pages.push(Arc::new(page));
        }
        for write in plan.writes() {
            let Place::Main(tile) = write.place else { continue };
            let index = tile / TILES_PER_PAGE;
            if Arc::get_mut(&mut self.pages[index]).is_none() {
                let page = self.pages[index].duplicate()?;
                self.table.set(index, &page);
                self.pages[index] = Arc::new(page);
            }
        }
        Ok(())
    }

    /// Where `n` more tokens go, without writing anything.
    pub fn plan(&self, n: usize) -> Append {
        Append::new(&self.spec, self.len, self.main_end, self.len + n)
    }

    /// Marks the tokens of `plan` as stored; the device calls it after writing them.
    pub fn commit(&mut self, plan: Append) {
        (self.len, self.main_end) = (plan.end, plan.new_main_end);
    }

    /// Forgets everything, keeping the memory of the f16 parts and releasing the pages.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.table.truncate(0);
        (self.len, self.main_end) = (0, self.n_sink());
    }

    /// The memory of the sink, where there is one.
    pub fn sink(&self) -> Option<&P> {
        self.sink.as_ref()
    }

    /// The memory of the tail, where there is one.
    pub fn tail(&self) -> Option<&P> {
        self.tail.as_ref()
    }

    /// The device's index of the main pages.
    pub fn table(&self) -> &P::Table {
        &self.table
    }

    /// Part and index of tile `index` (tokens `16 index ..`) as things stand.
    pub fn place(&self, index: usize) -> Place {
        self.plan(0).place(index)
    }

    /// Number of tiles that hold at least one token.
    pub fn n_tiles(&self) -> usize {
        self.len.div_ceil(TILE)
    }

    /// The tile that holds tokens `16 index .. 16 index + 16`.
    ///
    /// # Panics
    /// When `index >= n_tiles()`.
    pub fn tile(&self, index: usize) -> TileRef<'_, P> {
        assert!(index < self.n_tiles(), "tile {index} of {}", self.n_tiles());
        self.tile_at(self.place(index))
    }

    /// The tile at a place named by a plan.
    ///
    /// # Panics
    /// When that part of the stream has no such tile.
    pub fn tile_at(&self, place: Place) -> TileRef<'_, P> {
        let (layout, page, tile) = match place {
            Place::Sink(tile) => {
                (self.spec.f16_layout(), self.sink.as_ref().expect("sink tile without a sink"), tile)
            }
            Place::Tail(tile) => {
                (self.spec.f16_layout(), self.tail.as_ref().expect("tail tile without a tail"), tile)
            }
            Place::Main(tile) => {
                (self.spec.main_layout(), &*self.pages[tile / TILES_PER_PAGE], tile % TILES_PER_PAGE)
            }
        };
        TileRef { layout, page, offset: tile * layout.bytes() }
    }

    /// Layout, page and byte offset of a tile that is about to be written.
    ///
    /// # Panics
    /// When that part of the stream has no such tile, or its page is shared; main pages come from [`Stream::reserve`].
    pub fn tile_mut(&mut self, place: Place) -> (TileLayout, &mut P, usize) {
        let spec = self.spec;
        let (layout, page, tile) = match place {
            Place::Sink(tile) => {
                (spec.f16_layout(), self.sink.as_mut().expect("sink tile without a sink"), tile)
            }
            Place::Tail(tile) => {
                (spec.f16_layout(), self.tail.as_mut().expect("tail tile without a tail"), tile)
            }
            Place::Main(tile) => {
                let page = Arc::get_mut(&mut self.pages[tile / TILES_PER_PAGE]);
                let page = page.expect("a page that was reserved is not shared");
                (spec.main_layout(), page, tile % TILES_PER_PAGE)
            }
        };
        (layout, page, tile * layout.bytes())
    }

    /// Cuts the stream to its first `n` tokens without moving any: the part of it that needs no re-encoding.
    /// Returns the tokens that now lie in a main tile beyond the cut's last whole tile and must be brought back to
    /// the tail by the caller, as `(place, slots)`; `None` when the cut is clean.
    ///
    /// # Panics
    /// When `n > len()`.
    pub fn truncate(&mut self, n: usize) -> Option<(Place, Range<usize>)> {
        assert!(n <= self.len, "cannot cut {} tokens to {n}", self.len);
        let torn = n % TILE;
        let tail_is_on = self.spec.tail_tiles > 0;
        let moved = (tail_is_on && n < self.main_end && n > self.n_sink() && torn != 0)
            .then(|| (self.place(n / TILE), 0..torn));
        self.len = n;
        self.main_end = match tail_is_on {
            _ if n <= self.n_sink() => self.n_sink(),
            true => self.main_end.min(n - torn),
            false => n,
        };
        let main_tokens = self.main_end - self.n_sink();
        let keep = (main_tokens + if moved.is_some() { TILE } else { 0 }).div_ceil(TOKENS_PER_PAGE);
        self.pages.truncate(keep);
        self.table.truncate(keep);
        moved
    }

    fn n_sink(&self) -> usize {
        self.spec.sink_tiles * TILE
    }
}

/// Where the next tokens of a stream go. Plain numbers, so that a device can walk it while it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Append {
    sink_tiles: usize,
    tail_tiles: usize,
    start: usize,
    end: usize,
    main_end: usize,
    new_main_end: usize,
}

/// One tile to write: `from_tail` slots are moved (encoded) from the same token's old place in the tail, `from_rows`
/// slots come from the new rows, the first of which is row `first_row`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileWrite {
    /// The tile to write.
    pub place: Place,
    /// Slots filled from the tail, and the tail tile they come from; the same slots there.
    pub from_tail: Option<(Place, Range<usize>)>,
    /// Slots filled from new rows.
    pub from_rows: Range<usize>,
    /// Row that goes into slot `from_rows.start`.
    pub first_row: usize,
}

impl Append {
    fn new(spec: &StreamSpec, start: usize, main_end: usize, end: usize) -> Self {
        let new_main_end = match spec.tail_tiles * TILE {
            0 => end.max(spec.sink_tiles * TILE),
            tail => end.saturating_sub(tail).next_multiple_of(TILE).max(main_end),
        };
        let StreamSpec { sink_tiles, tail_tiles, .. } = *spec;
        Self { sink_tiles, tail_tiles, start, end, main_end, new_main_end }
    }

    /// The tiles to write, oldest first. That order is safe: a ring tile is read before it is overwritten.
    pub fn writes(self) -> Writes {
        Writes { plan: self, tile: self.tiles().start }
    }

    /// The tiles from the first that is written to the last; some between may stay as they are.
    pub fn tiles(&self) -> Range<usize> {
        let spills = self.new_main_end > self.main_end && self.start > self.main_end && self.tail_tiles > 0;
        let first = if spills { self.main_end } else { self.start };
        first / TILE..self.end.div_ceil(TILE)
    }

    /// Part and index of tile `index` once the plan is carried out.
    pub fn place(&self, index: usize) -> Place {
        let token = index * TILE;
        if index < self.sink_tiles {
            Place::Sink(index)
        } else if token < self.new_main_end || self.tail_tiles == 0 {
            Place::Main(index - self.sink_tiles)
        } else {
            Place::Tail(index % self.tail_tiles)
        }
    }
}

/// Iterator over the tiles of an [`Append`].
#[derive(Debug, Clone)]
pub struct Writes {
    plan: Append,
    tile: usize,
}

impl Iterator for Writes {
    type Item = TileWrite;

    fn next(&mut self) -> Option<TileWrite> {
        let plan = &self.plan;
        loop {
            let first = self.tile * TILE;
            if first >= plan.end {
                return None;
            }
            let (index, last) = (self.tile, (first + TILE).min(plan.end));
            self.tile += 1;
            let place = plan.place(index);
            // A token moves when it lay in the tail before and its tile lies in the main pages now.
            let moves = matches!(place, Place::Main(_)) && plan.tail_tiles > 0 && first >= plan.main_end;
            let old = first..plan.start.clamp(first, last);
            let from_tail =
                (moves && !old.is_empty()).then(|| (Place::Tail(index % plan.tail_tiles), 0..old.len()));
            let from_rows = plan.start.clamp(first, last) - first..last - first;
            if from_tail.is_none() && from_rows.is_empty() {
                continue;
            }
            let first_row = (first + from_rows.start).saturating_sub(plan.start);
            return Some(TileWrite { place, from_tail, from_rows, first_row });
        }
    }
}

#[cfg(test)]
mod tests;
