//! Which tiles of a stream a step writes, and where their tokens come from.

use std::ops::Range;

use kvant_codec::tile::TILE;

use super::{Place, Rows, StreamSpec, TILES_PER_BLOCK};

/// One tile to write. Its first slots wait in the tail, or stay as they are; the others are new rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileWrite {
    /// The tile, counted from token 0.
    pub tile: usize,
    /// Where it goes.
    pub place: Place,
    /// Slots that lie in the tail, where this tile has its place there, and are to be read; none when they stay as they are.
    pub old: Range<usize>,
    /// Slots filled from new rows.
    pub new: Range<usize>,
    /// Row of the sequence's rows that goes into slot `new.start`.
    pub first_row: usize,
    /// Whether the band wants it too, its old slots and its new ones.
    pub in_band: bool,
}

impl TileWrite {
    /// Where its rows are.
    pub fn rows(&self) -> TileRows {
        let TileWrite { tile, old, new, first_row, .. } = self.clone();
        TileRows { tile, old, new, first_row }
    }

    /// Every slot that is read or new.
    pub fn slots(&self) -> Range<usize> {
        if self.old.is_empty() { self.new.clone() } else { self.old.start..self.old.end.max(self.new.end) }
    }
}

/// Where the rows of a tile are while a step is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileRows {
    /// The tile, counted from token 0.
    pub tile: usize,
    /// Slots that lie in the tail.
    pub old: Range<usize>,
    /// Slots of new rows.
    pub new: Range<usize>,
    /// Row of the sequence's rows that belongs in slot `new.start`.
    pub first_row: usize,
}

/// Iterator over the tiles that a step writes, oldest first. That order is safe: a tile of the ring is read before it is
/// overwritten.
#[derive(Debug, Clone)]
pub struct Writes {
    spec: StreamSpec,
    rows: Rows,
    /// Tiles before this one are in the sink or the blocks after the step.
    coded: usize,
    /// The first tile that the band wants.
    band: usize,
    tile: usize,
}

impl StreamSpec {
    /// Whose mean is the centre of a block, where this write of a step of `rows` is the one that sets it: the rows of its tile and
    /// of the one after, which is in the tail or comes with the step. A centre of 32 tokens is nearer to that of their block
    /// than one of 16.
    ///
    /// A write sets the centre if it is of the first coded tile of its block, from its first slot on. In a stream with a tail
    /// both tiles are complete then; without, as many rows count as the step brings, so that what is stored depends on how
    /// tokens are fed.
    pub fn centre_rows(&self, write: &TileWrite, rows: Rows) -> Option<[TileRows; 2]> {
        let of_block = write.tile / TILES_PER_BLOCK * TILES_PER_BLOCK;
        let sets = self.centres
            && matches!(write.place, Place::Main(_))
            && write.tile == of_block.max(self.sink_tiles)
            && write.slots().start == 0;
        sets.then(|| [write.rows(), self.tile_rows(write.tile + 1, rows)])
    }

    /// Where the rows of tile `tile` are.
    fn tile_rows(&self, tile: usize, rows: Rows) -> TileRows {
        let first = tile * TILE;
        let last = (first + TILE).min(rows.end()).max(first);
        let new = rows.start.clamp(first, last) - first..last - first;
        let old = 0..if self.tail_tiles > 0 { new.start } else { 0 };
        TileRows { tile, old, new: new.clone(), first_row: (first + new.start).saturating_sub(rows.start) }
    }

    /// The tiles that a step of `rows` writes.
    pub fn writes(&self, rows: Rows) -> Writes {
        let first = rows.start / TILE;
        let waiting = if self.tail_tiles > 0 { rows.coded.min(first) } else { first };
        let crosses = self.tail_tiles > 0 && rows.cross();
        let band = if crosses { self.window(first) } else { usize::MAX };
        let coded = self.coded_tiles(rows.end());
        Writes { spec: *self, rows, coded, band, tile: waiting }
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
            let place = self.spec.place(tile, self.coded);
            let in_band = tile >= self.band;
            let TileRows { old, new, first_row, .. } = self.spec.tile_rows(tile, self.rows);
            // Others that wait stay where they are.
            let old = if matches!(place, Place::Main(_)) || in_band { old } else { 0..0 };
            if old.is_empty() && new.is_empty() {
                continue;
            }
            return Some(TileWrite { tile, place, old, new, first_row, in_band });
        }
    }
}
