//! Unpacks a block of tokens to panels, for the matrix path.

use kvant_backend::TILES_PER_BLOCK;
use kvant_codec::tile::TileBlock;

use super::codes::{CodeMeaning, Coding, OCTET_DIMS};
use super::panels::SumCodes;
use super::planes::{COLUMNS, Part, Planes, StoredBlock, halves};
use super::shape::BLOCK_TILES;
use super::thread_state::ThreadState;
use super::view::{Block, Run};
use super::weights::weight_planes;
use crate::simd::matrix_unit::MAX_WORDS;
use crate::simd::vec16::Lanes;

impl ThreadState {
    /// Unpacks the coded tiles of a block of tokens.
    pub(super) fn unpack<L: Lanes>(&mut self, lanes: L, keys: &Block, values: &Block) {
        // The coded tiles of a block of tokens are contiguous.
        const { assert!(TILES_PER_BLOCK.is_multiple_of(BLOCK_TILES)) };
        for run in keys.runs() {
            if let Some(coding) = Coding::of(run.layout.dtype()) {
                self.unpack_keys(lanes, coding, &run);
            }
        }
        for run in values.runs() {
            if let Some(coding) = Coding::of(run.layout.dtype()) {
                self.unpack_values(lanes, coding, &run);
            }
        }
    }

    fn unpack_keys<L: Lanes>(&mut self, lanes: L, coding: Coding, run: &Run) {
        for block in &self.blocks[0] {
            let codes = self.keys(coding, run, block);
            let (octets, at) = (block.dims.len() / OCTET_DIMS, block.dims.start / OCTET_DIMS * BLOCK_TILES);
            let panels = &mut self.panels.keys[at + run.first * octets..];
            if self.is_shared_kv {
                let values = self.unpacked.get_mut(at + run.first..).unwrap_or_default();
                codes.expand_keys(lanes, run.tiles, octets, panels, Some(values));
            } else if codes.coding != Coding::Whole {
                codes.expand_keys(lanes, run.tiles, octets, panels, None);
            }
        }
    }

    fn unpack_values<L: Lanes>(&mut self, lanes: L, coding: Coding, run: &Run) {
        let meaning = CodeMeaning::of(run.layout.dtype()).expect("coded tiles");
        for TileBlock { dims, bytes: place } in &self.blocks[1] {
            let octets = dims.len() / OCTET_DIMS;
            for octet in 0..octets {
                let (at, bytes) = (dims.start / OCTET_DIMS + octet, &run.bytes[place.start..]);
                let stored =
                    StoredBlock { bytes, len: place.len(), stride: run.tile_bytes, tiles: run.tiles };
                let mut codes = Planes::staged(self.stage, coding, stored, Part { index: octet, of: octets });
                if self.is_shared_kv && codes.coding != Coding::Whole {
                    // Unpacked together with the keys.
                    codes = Planes::expanded(&self.unpacked[at * BLOCK_TILES + run.first..][..run.tiles], 1);
                }
                let columns = &mut self.panels.values[at * COLUMNS..][..COLUMNS];
                codes.expand_across(lanes, run, columns);
                if weight_planes::<L>(meaning.loss) == 1 {
                    for (column, sums) in
                        columns.chunks_exact(COLUMNS / 2).zip(&mut self.panels.sums[2 * at..])
                    {
                        let halves = halves(run);
                        let groups =
                            &bytemuck::cast_slice(column)[MAX_WORDS * halves.start..MAX_WORDS * halves.end];
                        lanes.run(SumCodes { groups, sums });
                    }
                }
            }
        }
    }

    /// Returns a block of dims of a run of keys.
    pub(super) fn keys<'a>(&self, coding: Coding, run: &Run<'a>, block: &TileBlock) -> Planes<'a> {
        let bytes = &run.bytes[block.bytes.start..];
        let (len, stride, tiles) = (block.bytes.len(), run.tile_bytes, run.tiles);
        Planes::staged(self.stage, coding, StoredBlock { bytes, len, stride, tiles }, Part::WHOLE)
    }
}
