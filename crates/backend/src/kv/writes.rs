//! The tiles that a step writes, and the sources of their tokens.

use std::ops::Range;

use kvant_codec::tile::TILE;

use super::{KvTensorSpec, TILES_PER_BLOCK, TileLocation, TokenSpan};

/// One tile to write. Its first slots come from the tail, or are unchanged; the others are new
/// rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileWrite {
    /// The tile, counted from token 0.
    pub tile: usize,
    /// Destination.
    pub place: TileLocation,
    /// Slots to read from the tail; empty when they are unchanged.
    pub old: Range<usize>,
    /// Slots filled from new rows.
    pub new: Range<usize>,
    /// Index, within the sequence's rows, of the row for slot `new.start`.
    pub first_row: usize,
    /// Whether the step tiles receive its old and new slots too.
    pub in_step_tiles: bool,
}

impl TileWrite {
    /// Returns the sources of its rows.
    pub fn rows(&self) -> TileRows {
        let TileWrite { tile, old, new, first_row, .. } = self.clone();
        TileRows { tile, old, new, first_row }
    }

    /// Returns every slot that is read or new.
    pub fn slots(&self) -> Range<usize> {
        if self.old.is_empty() { self.new.clone() } else { self.old.start..self.old.end.max(self.new.end) }
    }
}

/// The sources of a tile's rows while a step is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileRows {
    /// The tile, counted from token 0.
    pub tile: usize,
    /// Slots in the tail.
    pub old: Range<usize>,
    /// Slots of new rows.
    pub new: Range<usize>,
    /// Index, within the sequence's rows, of the row for slot `new.start`.
    pub first_row: usize,
}

/// Iterator over the tiles that a step writes, oldest first. This order is safe: a tile of the ring
/// is read before it is overwritten.
#[derive(Debug, Clone)]
pub struct Writes {
    spec: KvTensorSpec,
    rows: TokenSpan,
    /// Tiles before this one are in the sink or the blocks after the step.
    first_tail_tile: usize,
    /// The first of the step tiles.
    first_step_tile: usize,
    tile: usize,
}

impl KvTensorSpec {
    /// Returns the rows whose mean is the centre of a block, if this write of a step of `rows` sets
    /// it: the rows of its tile and of the next tile, which is in the tail or part of the step. A
    /// centre of 32 tokens is closer to the mean of the block than one of 16.
    ///
    /// A write sets the centre if it writes the first coded tile of its block from its first slot
    /// on. In a tensor with a tail both tiles are complete then; without a tail only the rows of
    /// this step count, so that the stored bits depend on the step sizes.
    pub fn centre_rows(&self, write: &TileWrite, rows: TokenSpan) -> Option<[TileRows; 2]> {
        let of_block = write.tile / TILES_PER_BLOCK * TILES_PER_BLOCK;
        let sets = self.centres
            && matches!(write.place, TileLocation::Main(_))
            && write.tile == of_block.max(self.sink_tiles)
            && write.slots().start == 0;
        sets.then(|| [write.rows(), self.tile_rows(write.tile + 1, rows)])
    }

    /// Returns the sources of the rows of tile `tile`.
    fn tile_rows(&self, tile: usize, rows: TokenSpan) -> TileRows {
        let first = tile * TILE;
        let last = (first + TILE).min(rows.end()).max(first);
        let new = rows.start.clamp(first, last) - first..last - first;
        let old = 0..if self.tail_tiles > 0 { new.start } else { 0 };
        TileRows { tile, old, new: new.clone(), first_row: (first + new.start).saturating_sub(rows.start) }
    }

    /// Returns the tiles that a step of `rows` writes.
    pub fn writes(&self, rows: TokenSpan) -> Writes {
        let first = rows.start / TILE;
        let waiting = if self.tail_tiles > 0 { rows.first_tail_tile.min(first) } else { first };
        let crosses = self.tail_tiles > 0 && rows.spans_tiles();
        let first_step_tile = if crosses { self.f16_window_start(first) } else { usize::MAX };
        let coded = self.first_tail_tile(rows.end());
        Writes { spec: *self, rows, first_tail_tile: coded, first_step_tile, tile: waiting }
    }
}

impl Iterator for Writes {
    type Item = TileWrite;

    fn next(&mut self) -> Option<TileWrite> {
        loop {
            let tile = self.tile;
            if tile * TILE >= self.rows.end() {
                return None;
            }
            self.tile += 1;
            let place = self.spec.location(tile, self.first_tail_tile);
            let in_step_tiles = tile >= self.first_step_tile;
            let TileRows { old, new, first_row, .. } = self.spec.tile_rows(tile, self.rows);
            // Other tiles stay in the tail.
            let old = if matches!(place, TileLocation::Main(_)) || in_step_tiles { old } else { 0..0 };
            if old.is_empty() && new.is_empty() {
                continue;
            }
            return Some(TileWrite { tile, place, old, new, first_row, in_step_tiles });
        }
    }
}
