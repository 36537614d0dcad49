//! Codes of a block of tokens as panels, the operands of the matrix path: unpacked once for all
//! queries of a pass. A panel is a tile of keys, or a column of sixteen dims of values.

use kvant_backend::TILES_PER_BLOCK;
use kvant_codec::tile::TileBlock;

use super::codes::{CodeMeaning, Coding, Expanded, OCTET_DIMS};
use super::kernels::{BLOCK_TILES, Lane};
use super::matrix_unit::{AccumulateOutputs, AddScores, MatrixPath, Operands};
use super::planes::{COLUMNS, Planes, halves};
use super::prefetch::Prefetcher;
use super::query::SLICE;
use super::thread_state::ThreadState;
use super::view::{Block, Run};
use super::weights::weight_planes;
use crate::simd::matrix_unit::{MAX_WORDS, Row};
use crate::simd::vec16::{Lanes, Op};

/// Bytes of a line of codes.
const LINE: usize = 64;
/// Bytes of a column.
const COLUMN_BYTES: usize = COLUMNS / 2 * size_of::<Expanded>();

/// The unpacked codes of a block of tokens.
#[derive(Debug, Default)]
pub(super) struct Panels {
    /// `[blocks of dims][tiles][octets]`. Whole bytes are multiplied in place, except those of a
    /// shared-KV tensor.
    keys: Vec<Expanded>,
    /// `[columns][tiles][4 groups]`
    values: Vec<Expanded>,
    /// Sums of all codes of each column, for weights of one byte plane.
    sums: Vec<Row>,
}

impl Panels {
    /// Resizes the buffers for blocks of so many dims of keys and of values.
    pub(super) fn reset(&mut self, [k_dim, v_dim]: [usize; 2]) {
        self.keys.resize(k_dim.div_ceil(OCTET_DIMS) * BLOCK_TILES, Expanded::ZERO);
        let octets = v_dim.div_ceil(OCTET_DIMS);
        self.values.resize(octets * COLUMNS, Expanded::ZERO);
        self.sums.resize(octets * 2, Row::ZERO);
    }
}

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
            if self.is_joint {
                let values = self.unpacked.get_mut(at + run.first..).unwrap_or_default();
                codes.expand_keys(lanes, (run.tiles, octets), panels, Some(values));
            } else if codes.coding != Coding::Whole {
                codes.expand_keys(lanes, (run.tiles, octets), panels, None);
            }
        }
    }

    /// Returns a block of dims of a run of keys.
    fn keys<'a>(&self, coding: Coding, run: &Run<'a>, block: &TileBlock) -> Planes<'a> {
        let bytes = &run.bytes[block.bytes.start..];
        self.staged(coding, bytes, block.bytes.len(), (run.tile_bytes, run.tiles), (0, 1))
    }

    fn unpack_values<L: Lanes>(&mut self, lanes: L, coding: Coding, run: &Run) {
        let meaning = CodeMeaning::of(run.layout.dtype()).expect("coded tiles");
        for TileBlock { dims, bytes: place } in &self.blocks[1] {
            let octets = dims.len() / OCTET_DIMS;
            for octet in 0..octets {
                let (at, bytes) = (dims.start / OCTET_DIMS + octet, &run.bytes[place.start..]);
                let part = (octet, octets);
                let mut codes = self.staged(coding, bytes, place.len(), (run.tile_bytes, run.tiles), part);
                if self.is_joint && codes.coding != Coding::Whole {
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

    /// Scores some queries against a run of coded keys.
    pub(super) fn score_panels<L: Lanes, B: MatrixPath>(
        &mut self,
        lanes: L,
        path: &mut B,
        coding: Coding,
        run: &Run,
        prefetcher: &mut Prefetcher,
    ) {
        let query_planes = CodeMeaning::of(run.layout.dtype()).expect("coded tiles").query_planes;
        for (index, block) in self.blocks[0].iter().enumerate() {
            let (dims, octets) = (&block.dims, block.dims.len() / OCTET_DIMS);
            let mut codes = self.keys(coding, run, block);
            if self.is_joint || codes.coding != Coding::Whole {
                let at = dims.start / OCTET_DIMS * BLOCK_TILES + run.first * octets;
                codes = Planes::expanded(&self.panels.keys[at..][..run.tiles * octets], octets);
            }
            let first_row = (dims.start / SLICE * self.queries.n + self.active.start) * query_planes;
            let of = Operands {
                panels: codes.planes,
                stride: codes.stride,
                n_panels: run.tiles,
                groups: dims.len() / 4,
                rows: &self.queries.rows[first_row..],
                at: dims.start % SLICE / 4,
                queries: self.active.len(),
            };
            let (scales, scale_stride) = self.stage.scales(&run.bytes[block.bytes.start..], run.tile_bytes);
            let first = index * self.queries.n + self.active.start;
            let take = AddScores {
                scales,
                scale_stride,
                starts: &self.queries.starts[first..],
                factors: &self.queries.factors[first..],
                scores: &mut self.scores,
                tile: run.first,
                is_first: index == 0,
            };
            prefetcher.steps(octets * run.tiles.div_ceil(2));
            path.multiply(lanes, of, query_planes, take);
        }
    }

    /// Accumulates a run of coded values, weighted, into the outputs of some queries.
    pub(super) fn accumulate_panels<L: Lanes, B: MatrixPath>(
        &mut self,
        lanes: L,
        path: &mut B,
        run: &Run,
        prefetcher: &mut Prefetcher,
        out: &mut [Lane],
    ) {
        let (width, halves) = (out.len() / self.active.len(), halves(run));
        for block in 0..self.blocks[1].len() {
            let TileBlock { dims, bytes } = self.blocks[1][block].clone();
            let planes = self.round_weights(lanes, run, &run.bytes[bytes.start..]);
            let (at, octets) = (dims.start / OCTET_DIMS, dims.len() / OCTET_DIMS);
            let columns: &[u8] =
                bytemuck::cast_slice(&self.panels.values[at * COLUMNS..][..octets * COLUMNS]);
            let of = Operands {
                panels: &columns[MAX_WORDS * LINE * halves.start..],
                stride: COLUMN_BYTES,
                n_panels: 2 * octets,
                groups: MAX_WORDS * halves.len(),
                rows: &self.weights,
                at: MAX_WORDS * halves.start,
                queries: self.active.len(),
            };
            let (starts, factors, all) = (&self.starts, &self.factors, &self.panels.sums[2 * at..]);
            prefetcher.steps(octets * run.tiles.div_ceil(2));
            let take = AccumulateOutputs { starts, factors, out, width, lane: 2 * at, all };
            path.multiply(lanes, of, planes, take);
        }
    }
}

/// Sums all codes of a column.
struct SumCodes<'a> {
    groups: &'a [[u8; LINE]],
    sums: &'a mut Row,
}

impl Op for SumCodes<'_> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let mut sums = lanes.splat_i(0);
        for codes in self.groups {
            sums = lanes.dot(sums, lanes.codes_8(codes), [1; 4]);
        }
        lanes.store_codes(sums, &mut self.sums.0);
    }
}
