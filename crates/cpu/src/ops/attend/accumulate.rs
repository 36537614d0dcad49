//! Accumulation of a block of values, weighted, into the outputs of some queries.

use std::marker::PhantomData;
use std::ops::Range;

use kvant_codec::tile::TileBlock;

use super::codes::{CodeMeaning, Codes, Coding, OCTET_DIMS, Turbo2, Whole, with_codes};
use super::kernels::{AccumulateCodes, AccumulateFloats, ByteChunk, ValueBlock};
use super::matrix_unit::{AccumulateOutputs, MatrixPath, Operands};
use super::mla::AddCentre;
use super::panels::{COLUMN_BYTES, LINE};
use super::planes::{COLUMNS, Part, Planes, StoredBlock, halves};
use super::prefetch::Prefetcher;
use super::shape::{BLOCK_TILES, Lane, MAX_QUERIES, with_n};
use super::thread_state::ThreadState;
use super::view::Run;
use super::weights::{RoundWeights, weight_planes};
use crate::simd::matrix_unit::MAX_WORDS;
use crate::simd::vec16::Lanes;

impl ThreadState {
    /// Accumulates a run of coded values, weighted, into the outputs of some queries.
    pub(super) fn accumulate_codes<L: Lanes>(
        &mut self,
        lanes: L,
        coding: Coding,
        run: &Run,
        prefetcher: &mut Prefetcher,
        out: &mut [Lane],
    ) {
        let n = self.scores.len();
        for block in 0..self.blocks[1].len() {
            let TileBlock { dims, bytes: place } = self.blocks[1][block].clone();
            let bytes = &run.bytes[place.start..];
            let planes = self.round_weights(lanes, run, bytes);
            let octets = dims.len() / OCTET_DIMS;
            // Unpacked codes have room for one octet.
            let together = if self.is_shared_kv || n > MAX_QUERIES { 1 } else { octets };
            for octet in (0..octets).step_by(together) {
                let at = dims.start / OCTET_DIMS + octet;
                let stored =
                    StoredBlock { bytes, len: place.len(), stride: run.tile_bytes, tiles: run.tiles };
                let part = Part { index: octet / together, of: octets / together };
                let mut codes = Planes::staged(self.stage, coding, stored, part);
                if self.is_shared_kv && codes.coding != Coding::Whole {
                    // Unpacked when the block was scored.
                    codes = Planes::expanded(&self.unpacked[at * BLOCK_TILES + run.first..][..run.tiles], 1);
                }
                if n > MAX_QUERIES && codes.coding != Coding::Whole {
                    for (t, out) in self.octets.iter_mut().enumerate().take(run.tiles) {
                        lanes.run(codes.expand(t, out.halves()));
                    }
                    codes = Planes::expanded(&self.octets, 1);
                }
                let (octets, tiles, tile) = (together, run.tiles, run.first);
                let values = ValueBlock { codes, octets, tiles, tile, lane: 2 * at };
                self.accumulate_block(lanes, &values, planes, prefetcher, out);
            }
        }
    }

    /// Accumulates a block of coded values, a chunk of queries at a time, with weights of `planes`
    /// byte planes.
    fn accumulate_block<L: Lanes>(
        &self,
        lanes: L,
        values: &ValueBlock,
        planes: usize,
        prefetcher: &mut Prefetcher,
        out: &mut [Lane],
    ) {
        let n = self.scores.len();
        let width = out.len() / n;
        for from in (0..n).step_by(MAX_QUERIES) {
            let to = (from + MAX_QUERIES).min(n);
            let weights = ByteChunk {
                rows: &self.weights[planes * from..planes * to],
                starts: &self.starts[from..to],
                factors: &self.factors[from..to],
            };
            let out = &mut out[from * width..to * width];
            macro_rules! accumulate {
                ($C:ty, $planes:literal) => {
                    with_n!(to - from, N => {
                        let coding = PhantomData::<$C>;
                        lanes.run(AccumulateCodes::<_, N, $planes> { values, weights, out, width, prefetcher, coding })
                    })
                };
            }
            match (values.codes.coding, planes) {
                // Codes of another type: expanded, or reduced to its low bits
                // ([`Stage::LowBits`](super::Stage)).
                (Coding::Whole, 1) => accumulate!(Whole, 1),
                (Coding::Turbo2, 2) => accumulate!(Turbo2, 2),
                // Only one of the two branches is compiled.
                (coding, _) => with_codes!(coding, C => {
                    if const { weight_planes::<L>(C::LOSS) == 1 } { accumulate!(C, 1) } else { accumulate!(C, 2) }
                }),
            }
        }
    }

    /// Accumulates a run of float values, weighted, into the outputs of some queries.
    pub(super) fn accumulate_floats<L: Lanes>(
        &self,
        lanes: L,
        run: &Run,
        prefetcher: &mut Prefetcher,
        out: &mut [Lane],
    ) {
        let (width, row_width) = (out.len() / self.scores.len(), run.layout.dim() / 16);
        let chunks = self.scores.chunks(MAX_QUERIES).zip(self.rescale_new.as_flattened().chunks(MAX_QUERIES));
        for ((p, factors), out) in chunks.zip(out.chunks_mut(MAX_QUERIES * width)) {
            let (values, tiles, tile, factors) = (run.bytes, run.tiles, run.first, &factors[..p.len()]);
            let dtype = run.layout.dtype();
            AccumulateFloats { dtype, values, tiles, p, tile, factors, out, width, row_width, prefetcher }
                .run(lanes);
        }
    }

    /// Does the work of [`Self::accumulate_codes`] on the matrix path.
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

    /// Rounds the weights of a block of dims of some tiles to bytes. Returns the number of byte
    /// planes.
    pub(super) fn round_weights<L: Lanes>(&mut self, lanes: L, run: &Run, of_block: &[u8]) -> usize {
        let (scales, stride) = self.stage.scales(of_block, run.tile_bytes);
        let meaning = CodeMeaning::of(run.layout.dtype()).expect("coded tiles");
        let planes = weight_planes::<L>(meaning.loss);
        lanes.run(RoundWeights {
            p: &self.scores,
            scales,
            stride,
            tiles: run.tiles,
            tile: run.first,
            meaning,
            rescale_new: self.rescale_new.as_flattened(),
            rows: &mut self.weights[..planes * self.scores.len()],
            starts: &mut self.starts,
            factors: &mut self.factors,
        });
        planes
    }

    /// Adds the centre of a block of a shared-KV tensor, times the weights of these tiles.
    pub(super) fn accumulate_centre<L: Lanes>(
        &self,
        lanes: L,
        centre: &[u8],
        tiles: Range<usize>,
        out: &mut [Lane],
    ) {
        let (p, rescale_new) = (&self.scores, self.rescale_new.as_flattened());
        lanes.run(AddCentre { centre, p, tiles, rescale_new, out });
    }
}
