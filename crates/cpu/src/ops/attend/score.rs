//! Scores of some queries against a block of keys, and their softmax weights.

use std::marker::PhantomData;
use std::ops::Range;

use kvant_codec::tile::{TILE, TileBlock, TileLayout};

use super::centre::{AddPerQuery, CentreDot};
use super::codes::{CodeMeaning, Coding, OCTET_DIMS, Whole, with_codes};
use super::kernels::{KeyBlock, ScoreCodes, ScoreFloats};
use super::matrix_unit::{AddScores, MatrixPath, Operands};
use super::mla::ScoreRows;
use super::planes::{Part, Planes, StoredBlock};
use super::prefetch::Prefetcher;
use super::shape::{BLOCK_TILES, MAX_QUERIES, SLICE, with_n};
use super::softmax::{SoftCap, Softmax};
use super::thread_state::ThreadState;
use super::view::Run;
use crate::simd::vec16::Lanes;

impl ThreadState {
    /// Scores some queries against a run of float keys.
    pub(super) fn score_floats<L: Lanes>(&mut self, lanes: L, run: &Run, prefetcher: &mut Prefetcher) {
        let (layout, dtype) = (run.layout, run.layout.dtype());
        for t in (0..run.tiles).step_by(2) {
            if self.is_shared_kv {
                prefetcher.steps(layout.dim() / TILE);
                for t in t..run.tiles.min(t + 2) {
                    self.score_rows(lanes, layout, run.tile(t), run.first + t);
                }
                continue;
            }
            let (tiles, tile) = (run.pair(t), run.first + t);
            let chunks = self.queries.of(&self.active, layout.dim()).chunks(MAX_QUERIES * layout.dim());
            for (queries, scores) in chunks.zip(self.scores.chunks_mut(MAX_QUERIES)) {
                ScoreFloats { dtype, tiles, queries, scores, tile, prefetcher }.run(lanes);
            }
        }
    }

    fn score_rows<L: Lanes>(&mut self, lanes: L, layout: TileLayout, rows: &[u8], tile: usize) {
        let chunks = self.queries.of(&self.active, layout.dim()).chunks(MAX_QUERIES * layout.dim());
        for (queries, scores) in chunks.zip(self.scores.chunks_mut(MAX_QUERIES)) {
            ScoreRows { dtype: layout.dtype(), rows, queries, scores, tile }.run(lanes);
        }
    }

    /// Scores some queries against a run of coded keys.
    pub(super) fn score_codes<L: Lanes>(
        &mut self,
        lanes: L,
        coding: Coding,
        run: &Run,
        prefetcher: &mut Prefetcher,
    ) {
        let (n, is_shared_kv) = (self.scores.len(), self.is_shared_kv);
        let query_planes = CodeMeaning::of(run.layout.dtype()).expect("coded tiles").query_planes;
        let is_unpacked = |coding| is_shared_kv || n > MAX_QUERIES && coding != Coding::Whole;
        // Unpacked codes have room for two tiles.
        let together = if is_unpacked(coding) { 2 } else { run.tiles };
        for t in (0..run.tiles).step_by(together) {
            let (tile, tiles) = (run.first + t, together.min(run.tiles - t));
            let of_tiles = &run.bytes[t * run.tile_bytes..];
            for (block, TileBlock { dims, bytes: place }) in self.blocks[0].iter().enumerate() {
                let octets = dims.len() / OCTET_DIMS;
                let (bytes, stride) = (&of_tiles[place.start..], run.tile_bytes);
                let (scales, scale_stride) = self.stage.scales(bytes, stride);
                let stored = StoredBlock { bytes, len: place.len(), stride, tiles };
                let mut codes = Planes::staged(self.stage, coding, stored, Part::WHOLE);
                if is_unpacked(codes.coding) {
                    let at = dims.start / OCTET_DIMS * BLOCK_TILES + tile;
                    let values = self.unpacked.get_mut(at..).unwrap_or_default();
                    let values = is_shared_kv.then_some(values);
                    codes.expand_keys(lanes, tiles, octets, &mut self.octets, values);
                    codes = Planes::expanded(&self.octets, octets);
                }
                let (at, is_first) = (dims.start % SLICE / 4, block == 0);
                let keys = &KeyBlock { codes, scales, scale_stride, octets, tiles, tile, is_first, at };
                for from in (0..n).step_by(MAX_QUERIES) {
                    let to = (from + MAX_QUERIES).min(n);
                    let some = self.active.start + from..self.active.start + to;
                    let queries = self.queries.chunk(block, dims.start / SLICE, some, query_planes);
                    let scores = &mut self.scores[from..to];
                    macro_rules! score {
                        ($C:ty, $planes:literal) => {
                            with_n!(to - from, N => {
                                let coding = PhantomData::<$C>;
                                lanes.run(ScoreCodes::<_, N, $planes> { keys, queries, scores, prefetcher, coding })
                            })
                        };
                    }
                    match (codes.coding, query_planes) {
                        (Coding::Whole, 2) => score!(Whole, 2),
                        (coding, 1) => with_codes!(coding, C => score!(C, 1)),
                        (coding, planes) => unreachable!("{coding:?} against {planes} planes"),
                    }
                }
            }
        }
    }

    /// Does the work of [`Self::score_codes`] on the matrix path.
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
            if self.is_shared_kv || codes.coding != Coding::Whole {
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

    /// Computes the products of all queries with the centre of a block of keys.
    pub(super) fn dot_centre<L: Lanes>(&mut self, lanes: L, centre: &[u8]) {
        let queries = self.queries.of(&self.active, centre.len() / 2);
        CentreDot { queries, centre, dots: self.centre_dot.as_flattened_mut() }.run(lanes);
    }

    /// Adds these products to the scores of some tiles.
    pub(super) fn add_centre_dot<L: Lanes>(&mut self, lanes: L, tiles: Range<usize>) {
        lanes.run(AddPerQuery { scores: &mut self.scores, tiles, by: self.centre_dot.as_flattened() });
    }

    /// Adds these products to the maxima.
    pub(super) fn add_centre_dot_to_max(&mut self) {
        let dots = self.centre_dot.as_flattened();
        self.max.as_flattened_mut().iter_mut().zip(dots).for_each(|(max, dot)| *max += dot);
    }

    /// Applies the soft cap `cap` to the scores of some tiles; it carries the factor of the scores.
    pub(super) fn soft_cap<L: Lanes>(&mut self, lanes: L, cap: f32, tiles: Range<usize>) {
        lanes.run(SoftCap { scores: &mut self.scores, tiles, cap });
    }

    /// Applies the softmax to the scores of some tiles: replaces them by weights, and sets their
    /// maxima and sums.
    pub(super) fn softmax<L: Lanes>(&mut self, lanes: L, tiles: Range<usize>) {
        lanes.run(Softmax {
            scores: &mut self.scores,
            tiles,
            max: self.max.as_flattened_mut(),
            sum: self.sum.as_flattened_mut(),
        });
    }
}
