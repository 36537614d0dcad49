//! Which tiles of a stream a step writes, and where their tokens come from.

use std::ops::Range;

use kvant_codec::tile::TILE;

use super::{Place, Rows, StreamSpec};

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
    /// Every slot that is read or new.
    pub fn slots(&self) -> Range<usize> {
        if self.old.is_empty() { self.new.clone() } else { self.old.start..self.old.end.max(self.new.end) }
    }
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
        let (start, end) = (self.rows.start, self.rows.end());
        loop {
            let (tile, first) = (self.tile, self.tile * TILE);
            if first >= end {
                return None;
            }
            self.tile += 1;
            let last = (first + TILE).min(end);
            let place = self.spec.place(tile, self.coded);
            let new = start.clamp(first, last) - first..last - first;
            let in_band = tile >= self.band;
            let moves = self.spec.tail_tiles > 0 && matches!(place, Place::Main(_));
            let old = 0..if moves || in_band { new.start } else { 0 };
            if old.is_empty() && new.is_empty() {
                continue;
            }
            let first_row = (first + new.start).saturating_sub(start);
            return Some(TileWrite { tile, place, old, new, first_row, in_band });
        }
    }
}
