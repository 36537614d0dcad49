//! State of one thread, and its work on one block of tokens: scores, softmax weights, weighted
//! values.

use std::ops::Range;

use kvant_backend::KvTensorSpec;
use kvant_codec::tile::{TILE, TileBlock, TileLayout};

use super::centre::{AddPerQuery, CentreDot};
use super::codes::{CodeMeaning, Coding, Expanded, OCTET_DIMS};
use super::kernels::{
    AccumulateCodes, AccumulateFloats, BLOCK_TILES, Bytes, Lane, MAX_QUERIES, ScoreCodes, ScoreFloats, Scores,
};
use super::matrix_unit::MatrixPath;
use super::mla::{AddCentre, ScoreRows};
use super::panels::Panels;
use super::planes::Planes;
use super::prefetch::Prefetcher;
use super::query::{Queries, SLICE};
use super::softmax::{SoftCap, Softmax};
use super::split::QUERY_GROUP;
use super::stage::Stage;
use super::view::{Block, Run};
use super::weights::{RoundWeights, weight_planes};
use crate::simd::matrix_unit::ROWS;
use crate::simd::vec16::Lanes;

/// Octets of the largest block (turbo: 128 dims).
const BLOCK_OCTETS: usize = 4;

/// State of one thread.
#[derive(Debug)]
pub(super) struct ThreadState {
    /// The job whose queries are prepared.
    job: Option<usize>,
    pub(super) queries: Queries,
    /// The queries that are processed together, as a range of the prepared ones: *some* below, as
    /// many as there are scores.
    pub(super) active: Range<usize>,
    /// `[some]`
    pub(super) scores: Vec<Scores>,
    /// `q · centre` of the block, which every score lacks at first, `[some]` in sixteens.
    centre_dot: Vec<[f32; 16]>,
    /// Maxima of the scores of a block, `[some]` in sixteens.
    pub(super) max: Vec<[f32; 16]>,
    /// Sums of the weights of a block, `[some]` in sixteens.
    pub(super) sum: Vec<[f32; 16]>,
    /// Factor on the outputs so far, `[some]` in sixteens.
    pub(super) rescale_old: Vec<[f32; 16]>,
    /// Factor on the weights of a block, `[some]` in sixteens.
    pub(super) rescale_new: Vec<[f32; 16]>,
    /// Byte planes of the weights, `[some][planes]`, padded to whole tiles of a matrix unit.
    pub(super) weights: Vec<Bytes>,
    /// `-bias · Σ integers` of the weights, `[some]`.
    pub(super) starts: Vec<i32>,
    /// Value of one unit of weights times codes, `[some]`.
    pub(super) factors: Vec<f32>,
    /// Expanded octets: of the blocks of two tiles of keys, or of a column pair of a block of
    /// tokens.
    octets: Vec<Expanded>,
    /// Operands of the matrix path.
    pub(super) panels: Panels,
    /// A block of tokens of a shared-KV tensor in whole bytes, as its values are read:
    /// `[octets of a tile][8 tiles]`. Empty for other tensors.
    pub(super) unpacked: Vec<Expanded>,
    pub(super) is_joint: bool,
    /// Steps of the loops over a block of keys and values, for a chunk of queries.
    steps: usize,
    /// Blocks of dims of a coded tile of keys, and of values.
    pub(super) blocks: [Vec<TileBlock>; 2],
    /// One output `[v_dim]`.
    pub(super) row: Vec<f32>,
    /// How much of the tiles is read: everything, except in measurements.
    pub(super) stage: Stage,
}

impl ThreadState {
    /// Begins a call: queries prepared for another call are discarded.
    pub(super) fn begin(&mut self, stage: Stage) {
        (self.stage, self.job) = (stage, None);
    }

    /// Returns whether the prepared queries are not those of job `index`, and records `index` as
    /// the prepared job.
    pub(super) fn replace_job(&mut self, index: usize) -> bool {
        self.job.replace(index) != Some(index)
    }

    /// Resizes the buffers for queries of these keys and values.
    pub(super) fn reset(&mut self, streams: [&KvTensorSpec; 2]) {
        let [keys, values] = streams;
        self.steps = 0;
        for ((blocks, spec), dim) in self.blocks.iter_mut().zip(streams).zip([keys.dim(), values.value_dim()])
        {
            let layout = spec.main_layout();
            let per_octet = if Coding::of(layout.dtype()).is_some() { 1 } else { 2 };
            self.steps += per_octet * dim.div_ceil(OCTET_DIMS) * BLOCK_TILES / 2;
            blocks.clear();
            blocks.extend(layout.blocks().take_while(|block| block.dims.end <= dim));
        }
        self.panels.reset([keys.dim(), values.value_dim()]);
        self.is_joint = keys.shared_kv.is_some();
        let octets = if self.is_joint { values.value_dim().div_ceil(OCTET_DIMS) } else { 0 };
        self.unpacked.resize(octets * BLOCK_TILES, Expanded::ZERO);
        self.octets.resize((2 * BLOCK_OCTETS).max(BLOCK_TILES), Expanded::ZERO);
    }

    /// Selects some of the queries.
    pub(super) fn select_queries(&mut self, some: Range<usize>) {
        let n = some.len();
        self.active = some;
        self.scores.resize(n, Scores([[0.0; TILE]; BLOCK_TILES + 1]));
        // A matrix unit multiplies whole tiles of queries.
        self.weights.resize(2 * n.next_multiple_of(ROWS), Bytes([[0; 4]; 32]));
        self.starts.resize(n, 0);
        self.factors.resize(n, 0.0);
        for state in
            [&mut self.centre_dot, &mut self.max, &mut self.sum, &mut self.rescale_old, &mut self.rescale_new]
        {
            state.resize(n.div_ceil(16), [0.0; 16]);
        }
    }

    /// Returns a prefetcher for the blocks of `next`, spread over the steps of the loops on the
    /// current block of keys and values: one step for 32 dims of a pair of coded tiles, or for 512
    /// floats, each time they are read. For a shared-KV tensor it covers the first of `next` alone;
    /// in measurements of reading it covers nothing.
    pub(super) fn prefetcher<L: Lanes, B: MatrixPath>(
        &self,
        _: L,
        path: &Option<B>,
        n_queries: usize,
        next: &[Block],
    ) -> Prefetcher {
        let n = match self.stage.fetches() {
            false => 0,
            true if self.is_joint => 1,
            true => next.len(),
        };
        let times = match path {
            Some(_) => n_queries.div_ceil(QUERY_GROUP),
            None => n_queries.div_ceil(MAX_QUERIES) * 2 / L::WIDE,
        };
        Prefetcher::of(next[..n].iter(), self.steps * times)
    }

    /// Scores all queries against a block of keys. Coded keys go to the matrix path, if there is
    /// one.
    pub(super) fn score<L: Lanes, B: MatrixPath>(
        &mut self,
        lanes: L,
        path: &mut Option<B>,
        keys: &Block,
        prefetcher: &mut Prefetcher,
    ) {
        let (is_joint, n) = (self.is_joint, self.scores.len());
        // Unpacked codes have room for two tiles.
        let is_unpacked = |coding| is_joint || n > MAX_QUERIES && coding != Coding::Whole;
        for run in keys.runs() {
            let coding = Coding::of(run.layout.dtype());
            if let (Some(coding), Some(path)) = (coding, &mut *path) {
                self.score_panels(lanes, path, coding, &run, prefetcher);
                continue;
            }
            let together = if coding.is_none_or(is_unpacked) { 2 } else { run.tiles };
            for t in (0..run.tiles).step_by(together) {
                let tiles = t..run.tiles.min(t + together);
                match coding {
                    Some(coding) => self.score_codes(lanes, coding, &run, tiles, prefetcher),
                    None if self.is_joint => {
                        prefetcher.steps(run.layout.dim() / TILE);
                        for t in tiles {
                            self.score_rows(lanes, run.layout, run.tile(t), run.first + t);
                        }
                    }
                    None => self.score_floats(lanes, &run, t, prefetcher),
                }
            }
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

    fn score_floats<L: Lanes>(&mut self, lanes: L, run: &Run, t: usize, prefetcher: &mut Prefetcher) {
        let (layout, tiles, tile) = (run.layout, run.pair(t), run.first + t);
        let chunks = self.queries.of(&self.active, layout.dim()).chunks(MAX_QUERIES * layout.dim());
        for (queries, scores) in chunks.zip(self.scores.chunks_mut(MAX_QUERIES)) {
            ScoreFloats { dtype: layout.dtype(), tiles, queries, scores, tile, prefetcher }.run(lanes);
        }
    }

    fn score_rows<L: Lanes>(&mut self, lanes: L, layout: TileLayout, rows: &[u8], tile: usize) {
        let chunks = self.queries.of(&self.active, layout.dim()).chunks(MAX_QUERIES * layout.dim());
        for (queries, scores) in chunks.zip(self.scores.chunks_mut(MAX_QUERIES)) {
            ScoreRows { dtype: layout.dtype(), rows, queries, scores, tile }.run(lanes);
        }
    }

    /// Scores some tiles of a run: two at most where they are unpacked first.
    fn score_codes<L: Lanes>(
        &mut self,
        lanes: L,
        coding: Coding,
        run: &Run,
        tiles: Range<usize>,
        prefetcher: &mut Prefetcher,
    ) {
        let (tile, n_tiles, n) = (run.first + tiles.start, tiles.len(), self.scores.len());
        let (first, all) = (self.active.start, self.queries.n);
        let query_planes = CodeMeaning::of(run.layout.dtype()).expect("coded tiles").query_planes;
        let of_tiles = &run.bytes[tiles.start * run.tile_bytes..];
        for (block, TileBlock { dims, bytes }) in self.blocks[0].iter().enumerate() {
            let octets = dims.len() / OCTET_DIMS;
            let of_block = &of_tiles[bytes.start..];
            let (scales, scale_stride) = self.stage.scales(of_block, run.tile_bytes);
            let mut codes = self.staged(coding, of_block, bytes.len(), (run.tile_bytes, n_tiles), (0, 1));
            if self.is_joint || n > MAX_QUERIES && codes.coding != Coding::Whole {
                let at = dims.start / OCTET_DIMS * BLOCK_TILES + tile;
                let values = self.unpacked.get_mut(at..).unwrap_or_default();
                let values = self.is_joint.then_some(values);
                codes.expand_keys(lanes, (n_tiles, octets), &mut self.octets, values);
                codes = Planes::expanded(&self.octets, octets);
            }
            let slice = dims.start / SLICE;
            for from in (0..n).step_by(MAX_QUERIES) {
                let to = (from + MAX_QUERIES).min(n);
                let chunk = block * all + first + from..block * all + first + to;
                let query = slice * all + first + from;
                ScoreCodes {
                    coding: codes.coding,
                    scales,
                    scale_stride,
                    planes: codes.planes,
                    plane_bytes: codes.plane_bytes,
                    stride: codes.stride,
                    octets,
                    tiles: n_tiles,
                    rows: &self.queries.rows[query * query_planes..][..(to - from) * query_planes],
                    query_planes,
                    at: dims.start % SLICE / 4,
                    starts: &self.queries.starts[chunk.clone()],
                    factors: &self.queries.factors[chunk],
                    scores: &mut self.scores[from..to],
                    tile,
                    is_first: block == 0,
                    prefetcher,
                }
                .run(lanes);
            }
        }
    }

    /// Accumulates a block of values, weighted, into the outputs. Coded values go to the matrix
    /// path, if there is one.
    pub(super) fn accumulate_values<L: Lanes, B: MatrixPath>(
        &mut self,
        lanes: L,
        path: &mut Option<B>,
        values: &Block,
        prefetcher: &mut Prefetcher,
        out: &mut [Lane],
    ) {
        for run in values.runs() {
            match Coding::of(run.layout.dtype()) {
                Some(coding) => match path {
                    Some(path) => self.accumulate_panels(lanes, path, &run, prefetcher, out),
                    None => self.accumulate_codes(lanes, coding, &run, prefetcher, out),
                },
                None => self.accumulate_floats(lanes, &run, prefetcher, out),
            }
        }
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

    fn accumulate_floats<L: Lanes>(
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

    fn accumulate_codes<L: Lanes>(
        &mut self,
        lanes: L,
        coding: Coding,
        run: &Run,
        prefetcher: &mut Prefetcher,
        out: &mut [Lane],
    ) {
        let n = self.scores.len();
        let width = out.len() / n;
        for block in 0..self.blocks[1].len() {
            let TileBlock { dims, bytes: place } = self.blocks[1][block].clone();
            let bytes = &run.bytes[place.start..];
            let planes = self.round_weights(lanes, run, bytes);
            let octets = dims.len() / OCTET_DIMS;
            // Unpacked codes have room for one octet.
            let together = if self.is_joint || n > MAX_QUERIES { 1 } else { octets };
            for octet in (0..octets).step_by(together) {
                let at = dims.start / OCTET_DIMS + octet;
                let part = (octet / together, octets / together);
                let mut codes = self.staged(coding, bytes, place.len(), (run.tile_bytes, run.tiles), part);
                if self.is_joint && codes.coding != Coding::Whole {
                    // Unpacked when the block was scored.
                    codes = Planes::expanded(&self.unpacked[at * BLOCK_TILES + run.first..][..run.tiles], 1);
                }
                if n > MAX_QUERIES && codes.coding != Coding::Whole {
                    for (t, out) in self.octets.iter_mut().enumerate().take(run.tiles) {
                        lanes.run(codes.expand(t, out.halves()));
                    }
                    codes = Planes::expanded(&self.octets, 1);
                }
                for from in (0..n).step_by(MAX_QUERIES) {
                    let to = (from + MAX_QUERIES).min(n);
                    AccumulateCodes {
                        coding: codes.coding,
                        planes: codes.planes,
                        plane_bytes: codes.plane_bytes,
                        stride: codes.stride,
                        octet: codes.index,
                        octets: together,
                        tiles: run.tiles,
                        rows: &self.weights[planes * from..planes * to],
                        weight_planes: planes,
                        tile: run.first,
                        starts: &self.starts[from..to],
                        factors: &self.factors[from..to],
                        out: &mut out[from * width..to * width],
                        width,
                        lane: 2 * at,
                        prefetcher,
                    }
                    .run(lanes);
                }
            }
        }
    }
}

impl Default for ThreadState {
    fn default() -> Self {
        let (queries, stage) = (Queries::default(), Stage::All);
        let (scores, weights, starts, factors) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let [centre_dot, max, sum, rescale_old, rescale_new] = [const { Vec::new() }; 5];
        let (octets, panels, unpacked, row) = (Vec::new(), Panels::default(), Vec::new(), Vec::new());
        Self {
            job: None,
            queries,
            active: 0..0,
            scores,
            centre_dot,
            max,
            sum,
            rescale_old,
            rescale_new,
            weights,
            starts,
            factors,
            octets,
            panels,
            unpacked,
            is_joint: false,
            row,
            steps: 0,
            blocks: [const { Vec::new() }; 2],
            stage,
        }
    }
}
