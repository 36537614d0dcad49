//! Locates the tiles of a KV tensor.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use kvant_backend::{CountedPage, KvBatchEntry, KvTensor, TILES_PER_BLOCK, TileLocation};
use kvant_codec::tile::{self, TILE, TileLayout};

use crate::host::page::CpuPage;
use crate::simd::vec16::prefetch_line;

/// The form in which tokens are read that are stored in two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenForm {
    /// As stored in the blocks: tokens older than the window of a query.
    Main,
    /// In 16 bit, if the KV tensor has a tail: tokens of the window.
    Window,
}

/// K or V of one head of a sequence. Layouts are computed once, not for each block.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) tensor: &'a KvTensor,
    part: &'a KvBatchEntry<'a, CpuPage>,
    step_tiles: &'a [u8],
    /// Range of tiles that are read from the step tiles.
    step_tile_range: (usize, usize),
    main: (TileLayout, usize),
    f16: (TileLayout, usize),
}

impl<'a> View<'a> {
    pub(super) fn new(
        part: &'a KvBatchEntry<'a, CpuPage>,
        tensor: &'a KvTensor,
        step_tiles: Option<&'a CpuPage>,
    ) -> Self {
        let with_bytes = |layout: TileLayout| (layout, layout.bytes());
        let Range { start, end } = part.step_tiles(tensor);
        Self {
            tensor,
            part,
            step_tiles: step_tiles.map_or(&[], CpuPage::as_bytes),
            step_tile_range: (start, end),
            main: with_bytes(tensor.spec.main_layout()),
            f16: with_bytes(tensor.spec.f16_layout()),
        }
    }

    /// Returns the layout and the bytes per tile of tile `tile`, the memory from this tile on, and
    /// the number of tiles there.
    fn tiles(&self, tile: usize, form: TokenForm) -> (TileLayout, usize, &'a [u8], usize) {
        let coded = match form {
            TokenForm::Main => usize::MAX,
            TokenForm::Window => 0,
        };
        let (tensor, memory) = (self.tensor, &self.part.memory);
        let bytes = |page: Option<&'a Arc<CountedPage<CpuPage>>>, at: usize| {
            &page.expect("a tile that was written").as_bytes()[at..]
        };
        let (layout, f16_bytes) = self.f16;
        match tensor.spec.location(tile, coded) {
            TileLocation::Sink(t) => {
                let left = tensor.spec.sink_tiles - t;
                (layout, f16_bytes, bytes(memory.sink(), tensor.sink + t * f16_bytes), left)
            }
            TileLocation::Main(t) => {
                let ((layout, main_bytes), slot) = (self.main, t % TILES_PER_BLOCK);
                let block = memory.blocks()[t / TILES_PER_BLOCK].as_ref();
                (layout, main_bytes, bytes(block, tensor.main + slot * main_bytes), TILES_PER_BLOCK - slot)
            }
            // One at a time: contiguous in the step tiles, perhaps not in the ring, and the order
            // of sums must be the same.
            TileLocation::Tail(_) if self.step_tile_range.0 <= tile && tile < self.step_tile_range.1 => {
                (layout, f16_bytes, &self.step_tiles[self.part.step_tile_offset(tensor, tile)..], 1)
            }
            TileLocation::Tail(t) => {
                (layout, f16_bytes, bytes(memory.tail(), tensor.tail + t * f16_bytes), 1)
            }
        }
    }

    /// Returns the centre of the block that contains tile `tile`, `[dim]` in f16, if codes are
    /// relative to centres.
    pub(super) fn centre(&self, tile: usize) -> Option<&'a [u8]> {
        let (tensor, spec) = (self.tensor, &self.tensor.spec);
        let block =
            || self.part.memory.blocks()[tile / TILES_PER_BLOCK].as_ref().expect("a tile that was written");
        spec.centres.then(|| &block().as_bytes()[tensor.centre..][..spec.centre_bytes()])
    }

    /// Prefetches the header that locates the block with tile `tile`: it has left the cache since
    /// the last pass.
    pub(super) fn prefetch_block(&self, tile: usize) {
        if let Some(Some(block)) = self.part.memory.blocks().get(tile / TILES_PER_BLOCK) {
            prefetch_line(ptr::from_ref::<CountedPage<CpuPage>>(block).cast());
        }
    }

    /// Returns the values of a row as stored.
    pub(super) fn dim(&self) -> usize {
        self.tensor.spec.stored_dim()
    }

    /// Decodes the row of `token` as a query in tile `tile` sees it.
    pub(super) fn read(&self, tile: usize, token: usize, row: &mut [f32]) {
        let StoredTile { layout, bytes, centre } = self.stored(tile, token / TILE);
        layout.get(bytes, token % TILE, row);
        if let Some(centre) = centre {
            row.iter_mut().zip(tile::centre(centre)).for_each(|(v, c)| *v += c);
        }
    }

    /// Returns tile `tile` as a query in tile `of_query` reads it.
    pub(super) fn stored(&self, of_query: usize, tile: usize) -> StoredTile<'a> {
        let in_window = tile >= self.tensor.spec.f16_window_start(of_query);
        let (layout, bytes) = self.tile(tile, if in_window { TokenForm::Window } else { TokenForm::Main });
        let has_codes = layout.dtype().code().is_some();
        StoredTile { layout, bytes, centre: if has_codes { self.centre(tile) } else { None } }
    }

    /// Returns the bytes of one tile.
    pub(super) fn tile(&self, tile: usize, form: TokenForm) -> (TileLayout, &'a [u8]) {
        let (layout, tile_bytes, bytes, _) = self.tiles(tile, form);
        (layout, &bytes[..tile_bytes])
    }
}

/// A tile in memory.
#[derive(Clone, Copy)]
pub(super) struct StoredTile<'a> {
    pub(super) layout: TileLayout,
    pub(super) bytes: &'a [u8],
    /// What its codes are relative to, `[dim]` in f16.
    pub(super) centre: Option<&'a [u8]>,
}

/// Contiguous tiles of one layout.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    pub(super) layout: TileLayout,
    /// `[tiles][tile_bytes]`
    pub(super) bytes: &'a [u8],
    /// `layout.bytes()`
    pub(super) tile_bytes: usize,
    /// Index of the first tile, counted from the start of the block.
    pub(super) first: usize,
    pub(super) tiles: usize,
}

impl<'a> Run<'a> {
    pub(super) fn tile(&self, t: usize) -> &'a [u8] {
        &self.bytes[t * self.tile_bytes..][..self.tile_bytes]
    }

    /// Returns tile `t` and the next. A last one without a neighbour is paired with itself; its
    /// second scores go to the slack or are overwritten.
    pub(super) fn pair(&self, t: usize) -> [&'a [u8]; 2] {
        [t, (t + 1).min(self.tiles - 1)].map(|t| self.tile(t))
    }
}

/// Some tiles of a block of tokens. Their runs are computed at each use: nearly always there is one
/// run, and filling an array of the maximum number costs more than finding it.
pub(super) struct Block<'a> {
    view: &'a View<'a>,
    /// The first tile of the block.
    pub(super) first: usize,
    pub(super) form: TokenForm,
    /// The tiles, counted from the start of the block.
    pub(super) tiles: Range<usize>,
}

/// The centre that the coded tiles of a block are relative to.
#[derive(Clone, Copy)]
pub(super) struct Centre<'a> {
    /// `[dim]` in f16.
    pub(super) bytes: &'a [u8],
    /// The first tile it applies to, counted from the start of the block: 0 unless the sink reaches
    /// into the block.
    pub(super) first: usize,
}

impl<'a> Block<'a> {
    /// Returns tiles `tiles` of the block that begins with tile `first`.
    pub(super) fn new(view: &'a View<'a>, first: usize, tiles: Range<usize>, form: TokenForm) -> Self {
        Self { view, first, form, tiles }
    }

    /// Returns the centre of its codes, if any.
    pub(super) fn centre(&self) -> Option<Centre<'a>> {
        let first = self.view.tensor.spec.sink_tiles.saturating_sub(self.first);
        let has_codes = self.form == TokenForm::Main && self.tiles.start.max(first) < self.tiles.end;
        let bytes = if has_codes { self.view.centre(self.first)? } else { return None };
        Some(Centre { bytes, first })
    }

    /// Returns the runs of contiguous tiles. A run ends with a page of memory, or with a region of
    /// the KV tensor.
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
