//! Where the tiles of a stream lie that a walk reads.

use std::ops::Range;

use kvant_backend::{KvPart, KvStream, Place, TILES_PER_BLOCK, TileRef};
use kvant_codec::tile::TileLayout;

use super::kernels::BLOCK_TILES;
use crate::CpuPage;
use crate::lanes::prefetch;

/// In which form a walk reads tokens that are there in two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// As they lie in the blocks: what is older than the window of a query.
    Main,
    /// In 16 bit where the stream has a tail: the window.
    Window,
}

/// One side of a KV head of a part.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) stream: &'a KvStream,
    part: &'a KvPart<'a, CpuPage>,
    band: &'a [u8],
}

impl<'a> View<'a> {
    pub(super) fn new(
        part: &'a KvPart<'a, CpuPage>,
        stream: &'a KvStream,
        band: Option<&'a CpuPage>,
    ) -> Self {
        Self { stream, part, band: band.map_or(&[], CpuPage::as_bytes) }
    }

    /// Tile `tile`, its layout and its bytes and those of the tiles that follow it in memory, how many there are of these.
    fn tiles(&self, tile: usize, form: Form) -> (TileLayout, &'a [u8], usize) {
        let spec = &self.stream.spec;
        let coded = match form {
            Form::Main => usize::MAX,
            Form::Window => 0,
        };
        let place = spec.place(tile, coded);
        let left = match place {
            Place::Sink(tile) => spec.sink_tiles - tile,
            Place::Main(tile) => TILES_PER_BLOCK - tile % TILES_PER_BLOCK,
            // One at a time: in the band they lie side by side, in the ring they may not, and sums are to be the same.
            Place::Tail(_) => 1,
        };
        if matches!(place, Place::Tail(_)) && self.part.band_tiles(self.stream).contains(&tile) {
            return (spec.f16_layout(), &self.band[self.part.band_offset(self.stream, tile)..], left);
        }
        let TileRef { layout, page, offset } = self.part.memory.tile(self.stream, place);
        (layout, &page.as_bytes()[offset..], left)
    }

    /// The bytes of one tile.
    pub(super) fn tile(&self, tile: usize, form: Form) -> (TileLayout, &'a [u8]) {
        let (layout, bytes, _) = self.tiles(tile, form);
        (layout, &bytes[..layout.bytes()])
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
}

/// Where some tiles of a block of tokens lie. A run ends with a block of memory, or with a part of the stream.
pub(super) struct Block<'a> {
    runs: [Option<Run<'a>>; BLOCK_TILES],
    /// The tiles, counted from the start of the block.
    pub(super) tiles: Range<usize>,
}

impl<'a> Block<'a> {
    /// Tiles `tiles` of the block that begins with tile `first`.
    pub(super) fn new(view: View<'a>, first: usize, tiles: Range<usize>, form: Form) -> Self {
        let mut runs = [None; BLOCK_TILES];
        let mut at = tiles.start;
        for run in &mut runs {
            if at >= tiles.end {
                break;
            }
            let (layout, bytes, left) = view.tiles(first + at, form);
            let (tile_bytes, n) = (layout.bytes(), left.min(tiles.end - at));
            *run = Some(Run { layout, bytes: &bytes[..n * tile_bytes], tile_bytes, first: at, tiles: n });
            at += n;
        }
        Self { runs, tiles }
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = &Run<'a>> {
        self.runs.iter().map_while(Option::as_ref)
    }

    /// Asks for some tiles to be brought to the cache.
    pub(super) fn fetch(&self, tiles: Range<usize>) {
        for run in self.runs() {
            let of_run = |tile: usize| tile.saturating_sub(run.first).min(run.tiles) * run.tile_bytes;
            prefetch(&run.bytes[of_run(tiles.start)..of_run(tiles.end)]);
        }
    }
}
