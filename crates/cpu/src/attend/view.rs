//! Where the tiles of a stream lie that a walk reads.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use kvant_backend::{Held, KvPart, KvStream, Place, TILES_PER_BLOCK};
use kvant_codec::tile::TileLayout;

use crate::CpuPage;
use crate::lanes::prefetch_line;

/// In which form a walk reads tokens that are there in two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// As they lie in the blocks: what is older than the window of a query.
    Main,
    /// In 16 bit where the stream has a tail: the window.
    Window,
}

/// One side of a KV head of a part. Layouts are worked out once, not for each block.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) stream: &'a KvStream,
    part: &'a KvPart<'a, CpuPage>,
    band: &'a [u8],
    /// Tiles that lie in the band.
    in_band: (usize, usize),
    main: (TileLayout, usize),
    f16: (TileLayout, usize),
}

impl<'a> View<'a> {
    pub(super) fn new(
        part: &'a KvPart<'a, CpuPage>,
        stream: &'a KvStream,
        band: Option<&'a CpuPage>,
    ) -> Self {
        let with_bytes = |layout: TileLayout| (layout, layout.bytes());
        let Range { start, end } = part.band_tiles(stream);
        Self {
            stream,
            part,
            band: band.map_or(&[], CpuPage::as_bytes),
            in_band: (start, end),
            main: with_bytes(stream.spec.main_layout()),
            f16: with_bytes(stream.spec.f16_layout()),
        }
    }

    /// Tile `tile`: its layout and bytes per tile, the bytes of it and of what follows in memory, and how many tiles of these
    /// there are.
    fn tiles(&self, tile: usize, form: Form) -> (TileLayout, usize, &'a [u8], usize) {
        let coded = match form {
            Form::Main => usize::MAX,
            Form::Window => 0,
        };
        let (stream, memory) = (self.stream, &self.part.memory);
        let bytes = |page: Option<&'a Arc<Held<CpuPage>>>, at: usize| {
            &page.expect("a tile that was written").as_bytes()[at..]
        };
        let (layout, f16_bytes) = self.f16;
        match stream.spec.place(tile, coded) {
            Place::Sink(t) => {
                let left = stream.spec.sink_tiles - t;
                (layout, f16_bytes, bytes(memory.sink(), stream.sink + t * f16_bytes), left)
            }
            Place::Main(t) => {
                let ((layout, main_bytes), slot) = (self.main, t % TILES_PER_BLOCK);
                let block = memory.blocks()[t / TILES_PER_BLOCK].as_ref();
                (layout, main_bytes, bytes(block, stream.main + slot * main_bytes), TILES_PER_BLOCK - slot)
            }
            // One at a time: in the band they lie side by side, in the ring they may not, and sums are to be the same.
            Place::Tail(_) if self.in_band.0 <= tile && tile < self.in_band.1 => {
                (layout, f16_bytes, &self.band[self.part.band_offset(stream, tile)..], 1)
            }
            Place::Tail(t) => (layout, f16_bytes, bytes(memory.tail(), stream.tail + t * f16_bytes), 1),
        }
    }

    /// The centre of the block that tile `tile` lies in, `[dim]` in f16, where codes of it are of what that leaves.
    pub(super) fn centre(&self, tile: usize) -> Option<&'a [u8]> {
        let (stream, spec) = (self.stream, &self.stream.spec);
        let block =
            || self.part.memory.blocks()[tile / TILES_PER_BLOCK].as_ref().expect("a tile that was written");
        spec.centres.then(|| &block().as_bytes()[stream.centre..][..spec.centre_bytes()])
    }

    /// Asks for what tells where the block with tile `tile` lies: it has left the cache since the last walk came by.
    pub(super) fn ask_for_place(&self, tile: usize) {
        if let Some(Some(block)) = self.part.memory.blocks().get(tile / TILES_PER_BLOCK) {
            prefetch_line(ptr::from_ref::<Held<CpuPage>>(block).cast());
        }
    }

    /// The bytes of one tile.
    pub(super) fn tile(&self, tile: usize, form: Form) -> (TileLayout, &'a [u8]) {
        let (layout, tile_bytes, bytes, _) = self.tiles(tile, form);
        (layout, &bytes[..tile_bytes])
    }
}

/// Tiles of one layout that lie one after the other.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    pub(super) layout: TileLayout,
    /// `[tiles][tile_bytes]`
    pub(super) bytes: &'a [u8],
    /// `layout.bytes()`
    pub(super) tile_bytes: usize,
    /// First of them, counted from the start of the block.
    pub(super) first: usize,
    pub(super) tiles: usize,
}

impl<'a> Run<'a> {
    pub(super) fn tile(&self, t: usize) -> &'a [u8] {
        &self.bytes[t * self.tile_bytes..][..self.tile_bytes]
    }

    /// Tile `t` and the next. A last one without a neighbour is its own; what that scores lands in the slack or is overwritten.
    pub(super) fn pair(&self, t: usize) -> [&'a [u8]; 2] {
        [t, (t + 1).min(self.tiles - 1)].map(|t| self.tile(t))
    }
}

/// Some tiles of a block of tokens. Where they lie is told anew each time: nearly always it is one run, and room for the most that
/// there may be costs more to fill than one costs to find.
pub(super) struct Block<'a> {
    view: &'a View<'a>,
    /// The tile that the block begins with.
    pub(super) first: usize,
    pub(super) form: Form,
    /// The tiles, counted from the start of the block.
    pub(super) tiles: Range<usize>,
}

/// What the coded tiles of a block are relative to.
#[derive(Clone, Copy)]
pub(super) struct Centre<'a> {
    /// `[dim]` in f16.
    pub(super) bytes: &'a [u8],
    /// The first tile it is for, counted from the start of the block: 0 unless the sink reaches into the block.
    pub(super) first: usize,
}

impl<'a> Block<'a> {
    /// Tiles `tiles` of the block that begins with tile `first`.
    pub(super) fn new(view: &'a View<'a>, first: usize, tiles: Range<usize>, form: Form) -> Self {
        Self { view, first, form, tiles }
    }

    /// What codes of it were taken from, if anything.
    pub(super) fn centre(&self) -> Option<Centre<'a>> {
        let first = self.view.stream.spec.sink_tiles.saturating_sub(self.first);
        let has_codes = self.form == Form::Main && self.tiles.start.max(first) < self.tiles.end;
        let bytes = if has_codes { self.view.centre(self.first)? } else { return None };
        Some(Centre { bytes, first })
    }

    /// Where the tiles lie. A run ends with a block of memory, or with a part of the stream.
    pub(super) fn runs(&self) -> impl Iterator<Item = Run<'a>> {
        let mut tiles = self.tiles.clone();
        std::iter::from_fn(move || {
            let first = tiles.start;
            let (layout, tile_bytes, bytes, left) =
                (!tiles.is_empty()).then(|| self.view.tiles(self.first + first, self.form))?;
            let tiles_here = left.min(tiles.len());
            tiles.start += tiles_here;
            Some(Run {
                layout,
                bytes: &bytes[..tiles_here * tile_bytes],
                tile_bytes,
                first,
                tiles: tiles_here,
            })
        })
    }
}
