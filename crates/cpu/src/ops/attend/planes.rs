//! Codes of some tiles in their stored layout, and their expansion to whole bytes.

use std::ops::Range;

use kvant_codec::Side;
use kvant_codec::tile::SCALE_BYTES;

use super::codes::{Coding, Expand, Expanded};
use super::mla::Unpack;
use super::shape::{BLOCK, BLOCK_TILES};
use super::stage::Stage;
use super::view::Run;
use crate::simd::vec16::Lanes;

/// Expanded octets in the space of two columns of sixteen dims of a block of tokens.
pub(super) const COLUMNS: usize = 2 * 16 * BLOCK / size_of::<Expanded>();

/// Tiles of half a block of tokens.
const HALF: usize = BLOCK_TILES / 2;

/// A block of dims of each of some tiles, or one octet of it.
#[derive(Clone, Copy)]
pub(super) struct Planes<'a> {
    pub(super) coding: Coding,
    /// Planes of the first tile's block, `plane_bytes` of them; the next tile's are `stride` bytes
    /// further.
    pub(super) planes: &'a [u8],
    pub(super) plane_bytes: usize,
    pub(super) stride: usize,
    /// Index of the octet within the block; 0 for all octets.
    pub(super) index: usize,
}

/// A block of dims of some tiles, as it is stored.
#[derive(Clone, Copy)]
pub(super) struct StoredBlock<'a> {
    /// Memory that begins with the block in the first tile.
    pub(super) bytes: &'a [u8],
    /// Bytes of the block in a tile.
    pub(super) len: usize,
    /// Bytes from a tile to the next.
    pub(super) stride: usize,
    pub(super) tiles: usize,
}

/// Part `index` of `of` equal parts of a block, each at least an octet.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) index: usize,
    pub(super) of: usize,
}

impl Part {
    pub(super) const WHOLE: Self = Self { index: 0, of: 1 };
}

impl<'a> Planes<'a> {
    /// Returns the planes of expanded tiles with `octets` octets each.
    pub(super) fn expanded(tiles: &'a [Expanded], octets: usize) -> Self {
        let bytes = octets * size_of::<Expanded>();
        let planes = bytemuck::cast_slice(tiles);
        Self { coding: Coding::Whole, planes, plane_bytes: bytes, stride: bytes, index: 0 }
    }

    /// Returns the planes to read, at `stage`, as a part of a block.
    pub(super) fn staged(stage: Stage, coding: Coding, block: StoredBlock<'a>, part: Part) -> Self {
        let (StoredBlock { bytes, len, stride, tiles }, Part { index, of }) = (block, part);
        let plane_bytes = len - SCALE_BYTES;
        if !stage.is_blank() {
            let (coding, planes) = stage.planes(coding, &bytes[SCALE_BYTES..]);
            return Self { coding, planes, plane_bytes, stride, index };
        }
        let share = plane_bytes / of;
        let mut blank = stage.planes(coding, &[]);
        for t in 0..tiles {
            let planes = &bytes[t * stride + SCALE_BYTES..];
            blank = stage.planes(coding, &planes[index * share..][..share]);
        }
        Self { coding: blank.0, planes: blank.1, plane_bytes: blank.1.len(), stride: 0, index: 0 }
    }

    /// Returns the planes of the block of tile `t`.
    fn tile(&self, t: usize) -> &'a [u8] {
        &self.planes[t * self.stride..][..self.plane_bytes]
    }

    /// Expands `tiles` tiles of keys to whole bytes, `[tiles][octets]`. For a shared-KV tensor,
    /// writes the values too, as far as `values` has room, with a stride of eight octets. Codes of
    /// whole bytes are read as values in place.
    pub(super) fn expand_keys<L: Lanes>(
        &self,
        lanes: L,
        tiles: usize,
        octets: usize,
        keys: &mut [Expanded],
        mut values: Option<&mut [Expanded]>,
    ) {
        for (t, keys) in keys.chunks_exact_mut(octets).enumerate().take(tiles) {
            let (coding, planes) = (self.coding, self.tile(t));
            for (octet, keys) in keys.iter_mut().enumerate() {
                match &mut values {
                    None => lanes.run(Expand { coding, planes, octet, side: Side::K, out: keys.halves() }),
                    Some(values) => {
                        let of_values = values.get_mut(octet * BLOCK_TILES + t);
                        let values = of_values.filter(|_| coding != Coding::Whole);
                        lanes.run(Unpack { coding, planes, octet, values, keys });
                    }
                }
            }
        }
    }

    /// Returns the expansion of tile `t` to whole bytes, as an octet of values.
    pub(super) fn expand<'b>(&self, t: usize, out: [&'b mut [[u8; 64]; 4]; 2]) -> Expand<'b>
    where
        'a: 'b,
    {
        let planes = self.tile(t);
        Expand { coding: self.coding, planes, octet: self.index, side: Side::V, out }
    }

    /// Expands the tiles of `run` to two columns of a block of tokens, one after the other, and
    /// writes zeros to the rest of the same halves of the block.
    pub(super) fn expand_across<L: Lanes>(&self, lanes: L, run: &Run, columns: &mut [Expanded]) {
        let (first, second) = columns.split_at_mut(COLUMNS / 2);
        let [first, second] = [first, second].map(|column| column.iter_mut().flat_map(Expanded::halves));
        let halves = halves(run);
        for (tile, column) in first.zip(second).enumerate().take(HALF * halves.end).skip(HALF * halves.start)
        {
            match tile.checked_sub(run.first).filter(|t| *t < run.tiles) {
                Some(t) => lanes.run(self.expand(t, column.into())),
                None => (*column.0, *column.1) = ([[0; 64]; 4], [[0; 64]; 4]),
            }
        }
    }
}

/// Returns the halves of a block of tokens that a run touches.
pub(super) fn halves(run: &Run) -> Range<usize> {
    run.first / HALF..(run.first + run.tiles).div_ceil(HALF)
}
