//! What a thread works with, and its work on one block of tokens: scores, weights, mixed values.

use std::ops::Range;

use kvant_backend::StreamSpec;
use kvant_codec::Side;
use kvant_codec::tile::{SCALE_BYTES, TILE, TileBlock, TileLayout};

use super::ahead::Ahead;
use super::centre::{Meet, Shift};
use super::codes::{Coding, Expand, Expanded, Meaning, OCTET_DIMS};
use super::joint::{AddCentre, ScoreRows, Unpack};
use super::kernels::{
    BLOCK, BLOCK_TILES, Bytes, Lane, MOST_QUERIES, MixCodes, MixFloats, ScoreCodes, ScoreFloats, Scores,
    SoftCap, Softmax,
};
use super::query::{Queries, SLICE};
use super::stage::Stage;
use super::tiles::{AddMixed, AddScores, Beside, Operands};
use super::view::{Block, Run};
use super::weights::{ONES, RoundWeights, weight_planes};
use crate::lanes::Lanes;
use crate::unit::{MOST_WORDS, ROWS, Row};

/// Octets of the largest block (turbo: 128 dims).
const BLOCK_OCTETS: usize = 4;
/// Bytes of sixteen dims of a block of tokens.
const COLUMN_BYTES: usize = 16 * BLOCK;

/// What a thread works with.
#[derive(Debug)]
pub(super) struct Local {
    /// The job whose queries are prepared.
    job: Option<usize>,
    pub(super) queries: Queries,
    /// `[queries]`
    pub(super) scores: Vec<Scores>,
    /// What every score of the block misses without it, `[queries]` in sixteens.
    met: Vec<[f32; 16]>,
    /// Of the scores of a block, `[queries]` in sixteens.
    pub(super) max: Vec<[f32; 16]>,
    /// Of the weights of a block, `[queries]` in sixteens.
    pub(super) sum: Vec<[f32; 16]>,
    /// Factor on the outputs so far, `[queries]` in sixteens.
    pub(super) keep: Vec<[f32; 16]>,
    /// Factor on the weights of a block, `[queries]` in sixteens.
    pub(super) shrink: Vec<[f32; 16]>,
    /// Byte planes of the weights, `[queries][2]`, or a row of ones and `[queries]`; and some behind them.
    weights: Vec<Bytes>,
    /// `-bias · Σ integers` of the weights, `[queries]`.
    starts: Vec<i32>,
    /// What one unit of weights times codes stands for, `[queries]`.
    factors: Vec<f32>,
    /// Expanded octets: of the blocks of two tiles of keys, or of a column pair of a block of tokens; or these two columns, one after
    /// the other.
    octets: Vec<Expanded>,
    /// Of a joint stream, a block of tokens in whole bytes, as its values are read: `[octets of a tile][8 tiles]`. None of another.
    unpacked: Vec<Expanded>,
    is_joint: bool,
    /// Steps of the loops over a block of keys and values, for a chunk of queries.
    steps: usize,
    /// Blocks of dims of a coded tile of keys, and of values.
    blocks: [Vec<TileBlock>; 2],
    /// One output `[v_dim]`.
    pub(super) row: Vec<f32>,
    /// How much of the tiles is read: everything, but while it is measured.
    stage: Stage,
}

impl Local {
    /// Begins a call: what was prepared belongs to another.
    pub(super) fn begin(&mut self, stage: Stage) {
        (self.stage, self.job) = (stage, None);
    }

    /// Whether the queries that are prepared are not those of job `index`; from now on they are.
    pub(super) fn is_for_another(&mut self, index: usize) -> bool {
        self.job.replace(index) != Some(index)
    }

    /// Makes room for so many queries of these keys and values.
    pub(super) fn reset(&mut self, queries: usize, streams: [&StreamSpec; 2]) {
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
        self.is_joint = keys.joint.is_some();
        let octets = if self.is_joint { values.value_dim().div_ceil(OCTET_DIMS) } else { 0 };
        self.unpacked.resize(octets * BLOCK_TILES, Expanded::ZERO);
        self.scores.resize(queries, Scores([[0.0; TILE]; BLOCK_TILES + 1]));
        // A matrix unit reads whole tiles of queries.
        self.weights.resize(2 * (queries + ROWS - 1), Bytes([[0; 4]; 32]));
        self.starts.resize(queries, 0);
        self.factors.resize(queries, 0.0);
        for state in [&mut self.met, &mut self.max, &mut self.sum, &mut self.keep, &mut self.shrink] {
            state.resize(queries.div_ceil(16), [0.0; 16]);
        }
        self.octets.resize(2 * BLOCK_OCTETS.max(BLOCK_TILES), Expanded::ZERO);
    }

    /// What to ask for while a block of keys and values is worked on, in as many steps as the loops over it take: one for 32 dims of a pair
    /// of coded tiles, or for 512 floats, each time they are read. Of a joint stream the first of `next` is all; while it is measured
    /// what reading takes, there is nothing.
    pub(super) fn ahead<L: Lanes, B: Beside>(&self, _: L, beside: &Option<B>, next: &[Block]) -> Ahead {
        let n = match self.stage.fetches() {
            false => 0,
            true if self.is_joint => 1,
            true => next.len(),
        };
        let times = match beside {
            Some(_) => 1,
            None => self.scores.len().div_ceil(MOST_QUERIES) * 2 / L::WIDE,
        };
        Ahead::of(next[..n].iter(), self.steps * times)
    }

    /// Scores of all queries with a block of keys. Coded keys are the work of what stands `beside`, if anything does.
    pub(super) fn score<L: Lanes, B: Beside>(
        &mut self,
        lanes: L,
        beside: &mut Option<B>,
        keys: &Block,
        ahead: &mut Ahead,
    ) {
        let (is_joint, is_beside, n) = (self.is_joint, beside.is_some(), self.scores.len());
        // What is unpacked beside the products has room for two tiles.
        let is_unpacked = |coding| is_joint || is_beside || n > MOST_QUERIES && coding != Coding::Whole;
        for run in keys.runs() {
            let coding = Coding::of(run.layout.dtype());
            let together = if coding.is_none_or(is_unpacked) { 2 } else { run.tiles };
            for t in (0..run.tiles).step_by(together) {
                let tiles = t..run.tiles.min(t + together);
                match coding {
                    Some(coding) => self.score_codes(lanes, beside, coding, &run, tiles, ahead),
                    None if self.is_joint => {
                        ahead.steps(run.layout.dim() / TILE);
                        for t in tiles {
                            self.score_rows(lanes, run.layout, run.tile(t), run.first + t);
                        }
                    }
                    None => self.score_floats(lanes, &run, t, ahead),
                }
            }
        }
    }

    /// The products of all queries with the centre of a block of keys.
    pub(super) fn meet<L: Lanes>(&mut self, lanes: L, centre: &[u8]) {
        Meet { queries: &self.queries.floats, centre, met: self.met.as_flattened_mut() }.run(lanes);
    }

    /// Adds them to the scores of some tiles.
    pub(super) fn add_met<L: Lanes>(&mut self, lanes: L, tiles: Range<usize>) {
        lanes.run(Shift { scores: &mut self.scores, tiles, by: self.met.as_flattened() });
    }

    /// Adds them to the maxima.
    pub(super) fn raise_by_met(&mut self) {
        let met = self.met.as_flattened();
        self.max.as_flattened_mut().iter_mut().zip(met).for_each(|(max, met)| *max += met);
    }

    /// Bounds the scores of some tiles by `cap`, which carries the scores' factor.
    pub(super) fn soft_cap<L: Lanes>(&mut self, lanes: L, cap: f32, tiles: Range<usize>) {
        lanes.run(SoftCap { scores: &mut self.scores, tiles, cap });
    }

    /// Turns the scores of some tiles into weights, with their maxima and sums.
    pub(super) fn soften<L: Lanes>(&mut self, lanes: L, tiles: Range<usize>) {
        lanes.run(Softmax {
            scores: &mut self.scores,
            tiles,
            max: self.max.as_flattened_mut(),
            sum: self.sum.as_flattened_mut(),
        });
    }

    fn score_floats<L: Lanes>(&mut self, lanes: L, run: &Run, t: usize, ahead: &mut Ahead) {
        let (layout, tiles, tile) = (run.layout, run.pair(t), run.first + t);
        let chunks = self.queries.floats.chunks(MOST_QUERIES * layout.dim());
        for (queries, scores) in chunks.zip(self.scores.chunks_mut(MOST_QUERIES)) {
            ScoreFloats { dtype: layout.dtype(), tiles, queries, scores, tile, ahead }.run(lanes);
        }
    }

    fn score_rows<L: Lanes>(&mut self, lanes: L, layout: TileLayout, rows: &[u8], tile: usize) {
        let chunks = self.queries.floats.chunks(MOST_QUERIES * layout.dim());
        for (queries, scores) in chunks.zip(self.scores.chunks_mut(MOST_QUERIES)) {
            ScoreRows { dtype: layout.dtype(), rows, queries, scores, tile }.run(lanes);
        }
    }

    /// Scores of some tiles of a run: two at most where they are unpacked first.
    fn score_codes<L: Lanes, B: Beside>(
        &mut self,
        lanes: L,
        beside: &mut Option<B>,
        coding: Coding,
        run: &Run,
        tiles: Range<usize>,
        ahead: &mut Ahead,
    ) {
        let (tile, n_tiles, n) = (run.first + tiles.start, tiles.len(), self.scores.len());
        let query_planes = Meaning::of(run.layout.dtype()).expect("coded tiles").query_planes;
        let of_tiles = &run.bytes[tiles.start * run.tile_bytes..];
        for (block, TileBlock { dims, bytes }) in self.blocks[0].iter().enumerate() {
            let octets = dims.len() / OCTET_DIMS;
            let of_block = &of_tiles[bytes.start..];
            let (scales, scale_stride) = self.stage.scales(of_block, run.tile_bytes);
            let mut codes = self.staged(coding, of_block, bytes.len(), (run.tile_bytes, n_tiles), (0, 1));
            if self.is_joint || (n > MOST_QUERIES || beside.is_some()) && codes.coding != Coding::Whole {
                for (t, keys) in self.octets.chunks_exact_mut(octets).enumerate().take(n_tiles) {
                    let (coding, planes) = (codes.coding, codes.tile(t));
                    if self.is_joint {
                        let at = dims.start / OCTET_DIMS * BLOCK_TILES + tile + t;
                        let values = self.unpacked.get_mut(at..).unwrap_or_default();
                        unpack(lanes, coding, planes, keys, values);
                        continue;
                    }
                    for (octet, out) in keys.iter_mut().enumerate() {
                        let out = out.halves();
                        lanes.run(Expand { coding, planes, octet, side: Side::K, out });
                    }
                }
                codes = Planes::expanded(&self.octets, octets);
            }
            let slice = dims.start / SLICE;
            if let Some(beside) = beside {
                let pair = [0, n_tiles - 1];
                let of = Operands {
                    panels: pair.map(|t| codes.tile(t)),
                    n_panels: n_tiles,
                    groups: dims.len() / 4,
                    rows: &self.queries.rows[slice * n * query_planes..],
                    at: dims.start % SLICE / 4,
                    queries: n,
                };
                let take = AddScores {
                    scales: pair.map(|t| scales[t * scale_stride..].first_chunk().expect("16 scales")),
                    starts: &self.queries.starts[block * n..(block + 1) * n],
                    factors: &self.queries.factors[block * n..(block + 1) * n],
                    scores: &mut self.scores,
                    tile,
                    is_first: block == 0,
                };
                ahead.steps(octets);
                beside.multiply(lanes, of, query_planes, take);
                continue;
            }
            for from in (0..n).step_by(MOST_QUERIES) {
                let to = (from + MOST_QUERIES).min(n);
                let chunk = block * n + from..block * n + to;
                ScoreCodes {
                    coding: codes.coding,
                    scales,
                    scale_stride,
                    planes: codes.planes,
                    plane_bytes: codes.plane_bytes,
                    stride: codes.stride,
                    octets,
                    tiles: n_tiles,
                    rows: &self.queries.rows
                        [(slice * n + from) * query_planes..(slice * n + to) * query_planes],
                    query_planes,
                    at: dims.start % SLICE / 4,
                    starts: &self.queries.starts[chunk.clone()],
                    factors: &self.queries.factors[chunk],
                    scores: &mut self.scores[from..to],
                    tile,
                    is_first: block == 0,
                    ahead,
                }
                .run(lanes);
            }
        }
    }

    /// Adds a block of values, weighted, to the outputs. Coded values are the work of what stands `beside`, if anything does.
    pub(super) fn mix<L: Lanes, B: Beside>(
        &mut self,
        lanes: L,
        beside: &mut Option<B>,
        values: &Block,
        ahead: &mut Ahead,
        out: &mut [Lane],
    ) {
        for run in values.runs() {
            match Coding::of(run.layout.dtype()) {
                Some(coding) => self.mix_codes(lanes, beside, coding, &run, ahead, out),
                None => self.mix_floats(lanes, &run, ahead, out),
            }
        }
    }

    /// Adds the centre of a block of a joint stream, as the weights of these tiles say.
    pub(super) fn mix_centre<L: Lanes>(
        &self,
        lanes: L,
        centre: &[u8],
        tiles: Range<usize>,
        out: &mut [Lane],
    ) {
        let (p, shrink) = (&self.scores, self.shrink.as_flattened());
        lanes.run(AddCentre { centre, p, tiles, shrink, out });
    }

    fn mix_floats<L: Lanes>(&self, lanes: L, run: &Run, ahead: &mut Ahead, out: &mut [Lane]) {
        let (width, row_width) = (out.len() / self.scores.len(), run.layout.dim() / 16);
        let chunks = self.scores.chunks(MOST_QUERIES).zip(self.shrink.as_flattened().chunks(MOST_QUERIES));
        for ((p, factors), out) in chunks.zip(out.chunks_mut(MOST_QUERIES * width)) {
            let (values, tiles, tile, factors) = (run.bytes, run.tiles, run.first, &factors[..p.len()]);
            let dtype = run.layout.dtype();
            MixFloats { dtype, values, tiles, p, tile, factors, out, width, row_width, ahead }.run(lanes);
        }
    }

    fn mix_codes<L: Lanes, B: Beside>(
        &mut self,
        lanes: L,
        beside: &mut Option<B>,
        coding: Coding,
        run: &Run,
        ahead: &mut Ahead,
        out: &mut [Lane],
    ) {
        let (layout, stride, n) = (run.layout, run.tile_bytes, self.scores.len());
        let meaning = Meaning::of(layout.dtype()).expect("coded tiles");
        let planes = weight_planes::<L>(meaning);
        let n_ones = 2 - planes;
        self.weights[..n_ones].fill(ONES);
        let width = out.len() / n;
        for TileBlock { dims, bytes: place } in &self.blocks[1] {
            let bytes = &run.bytes[place.start..];
            let block_bytes = place.len();
            let (scales, scale_stride) = self.stage.scales(bytes, stride);
            lanes.run(RoundWeights {
                p: &self.scores,
                scales,
                stride: scale_stride,
                tiles: run.tiles,
                tile: run.first,
                meaning,
                shrink: self.shrink.as_flattened(),
                rows: &mut self.weights[n_ones..n_ones + planes * n],
                starts: &mut self.starts,
                factors: &mut self.factors,
            });
            let octets = dims.len() / OCTET_DIMS;
            // What is unpacked beside the products has room for one octet.
            let is_unpacked = self.is_joint || beside.is_some() || n > MOST_QUERIES;
            let together = if is_unpacked { 1 } else { octets };
            for octet in (0..octets).step_by(together) {
                let at = dims.start / OCTET_DIMS + octet;
                let part = (octet / together, octets / together);
                let mut codes = self.staged(coding, bytes, block_bytes, (stride, run.tiles), part);
                if self.is_joint && codes.coding != Coding::Whole {
                    // When it was scored.
                    codes = Planes::expanded(&self.unpacked[at * BLOCK_TILES + run.first..][..run.tiles], 1);
                }
                if let Some(beside) = beside {
                    let halves = codes.expand_across(lanes, run, &mut self.octets);
                    let columns: &[u8] = bytemuck::cast_slice(&self.octets);
                    let column = |c| &columns[c * COLUMN_BYTES..][MOST_WORDS * 64 * halves.start..];
                    let of = Operands {
                        panels: [column(0), column(1)],
                        n_panels: 2,
                        groups: MOST_WORDS * halves.len(),
                        rows: &self.weights,
                        at: MOST_WORDS * halves.start,
                        queries: n_ones + n,
                    };
                    let (starts, factors) = (&self.starts, &self.factors);
                    ahead.steps(run.tiles.div_ceil(2));
                    let take = AddMixed { starts, factors, out, width, lane: 2 * at, all: Row::ZERO };
                    beside.multiply(lanes, of, planes, take);
                    continue;
                }
                if n > MOST_QUERIES && codes.coding != Coding::Whole {
                    for (t, out) in self.octets.iter_mut().enumerate().take(run.tiles) {
                        lanes.run(codes.expand(t, out.halves()));
                    }
                    codes = Planes::expanded(&self.octets, 1);
                }
                for from in (0..n).step_by(MOST_QUERIES) {
                    let to = (from + MOST_QUERIES).min(n);
                    MixCodes {
                        coding: codes.coding,
                        planes: codes.planes,
                        plane_bytes: codes.plane_bytes,
                        stride: codes.stride,
                        octet: codes.index,
                        octets: together,
                        tiles: run.tiles,
                        rows: &self.weights[n_ones..][planes * from..planes * to],
                        weight_planes: planes,
                        tile: run.first,
                        starts: &self.starts[from..to],
                        factors: &self.factors[from..to],
                        out: &mut out[from * width..to * width],
                        width,
                        lane: 2 * at,
                        ahead,
                    }
                    .run(lanes);
                }
            }
        }
    }
}

/// Unpacks a block of dims of a tile of a joint stream: as keys, octet by octet, and as values to every eighth place, of those there
/// are. Whole bytes are read as values where they lie.
fn unpack<L: Lanes>(lanes: L, coding: Coding, planes: &[u8], keys: &mut [Expanded], values: &mut [Expanded]) {
    for (octet, keys) in keys.iter_mut().enumerate() {
        let values = if coding == Coding::Whole { None } else { values.get_mut(octet * BLOCK_TILES) };
        lanes.run(Unpack { coding, planes, octet, values, keys });
    }
}

impl Default for Local {
    fn default() -> Self {
        let (queries, stage) = (Queries::default(), Stage::All);
        let (scores, weights, starts, factors) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let [met, max, sum, keep, shrink] = [const { Vec::new() }; 5];
        let (octets, unpacked, row) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            job: None,
            queries,
            scores,
            met,
            max,
            sum,
            keep,
            shrink,
            weights,
            starts,
            factors,
            octets,
            unpacked,
            is_joint: false,
            row,
            steps: 0,
            blocks: [const { Vec::new() }; 2],
            stage,
        }
    }
}

/// A block of dims of each of some tiles, or one octet of it.
#[derive(Clone, Copy)]
struct Planes<'a> {
    coding: Coding,
    /// Planes of the first tile's block, `plane_bytes` of them; the next tile's are `stride` bytes further.
    planes: &'a [u8],
    plane_bytes: usize,
    stride: usize,
    /// Which octet of the block; the first where all of them are meant.
    index: usize,
}

impl<'a> Planes<'a> {
    /// What was expanded, tile by tile, so many octets of each.
    fn expanded(tiles: &'a [Expanded], octets: usize) -> Self {
        let bytes = octets * size_of::<Expanded>();
        let planes = bytemuck::cast_slice(tiles);
        Self { coding: Coding::Whole, planes, plane_bytes: bytes, stride: bytes, index: 0 }
    }

    /// Planes of the block of tile `t`.
    fn tile(&self, t: usize) -> &'a [u8] {
        &self.planes[t * self.stride..][..self.plane_bytes]
    }

    /// Writes that of tile `t` as whole bytes.
    fn expand<'b>(&self, t: usize, out: [&'b mut [[u8; 64]; 4]; 2]) -> Expand<'b>
    where
        'a: 'b,
    {
        let planes = self.tile(t);
        Expand { coding: self.coding, planes, octet: self.index, side: Side::V, out }
    }

    /// Writes the tiles of `run` as two columns of a block of tokens, one after the other, and zeros beside them. Gives the halves of
    /// the block that they lie in.
    fn expand_across<L: Lanes>(&self, lanes: L, run: &Run, columns: &mut [Expanded]) -> Range<usize> {
        const HALF: usize = BLOCK_TILES / 2;
        let halves = run.first / HALF..(run.first + run.tiles).div_ceil(HALF);
        let (first, rest) = columns.split_at_mut(COLUMN_BYTES / size_of::<Expanded>());
        let [first, second] = [first, rest].map(|column| column.iter_mut().flat_map(Expanded::halves));
        let tiles = HALF * halves.start..HALF * halves.end;
        for (tile, column) in first.zip(second).enumerate().take(tiles.end).skip(tiles.start) {
            match tile.checked_sub(run.first).filter(|t| *t < run.tiles) {
                Some(t) => lanes.run(self.expand(t, column.into())),
                None => (*column.0, *column.1) = ([[0; 64]; 4], [[0; 64]; 4]),
            }
        }
        halves
    }
}

impl Local {
    /// What to read as part `index` of `parts` in a block of dims of some tiles, of which an octet is the least: the block takes
    /// `block_bytes` and begins with `bytes` in the first tile, the next are `stride` bytes further.
    fn staged<'a>(
        &self,
        coding: Coding,
        bytes: &'a [u8],
        block_bytes: usize,
        (stride, tiles): (usize, usize),
        (index, parts): (usize, usize),
    ) -> Planes<'a> {
        let plane_bytes = block_bytes - SCALE_BYTES;
        if !self.stage.is_blank() {
            let (coding, planes) = self.stage.planes(coding, &bytes[SCALE_BYTES..]);
            return Planes { coding, planes, plane_bytes, stride, index };
        }
        let share = plane_bytes / parts;
        let mut blank = self.stage.planes(coding, &[]);
        for t in 0..tiles {
            let planes = &bytes[t * stride + SCALE_BYTES..];
            blank = self.stage.planes(coding, &planes[index * share..][..share]);
        }
        Planes { coding: blank.0, planes: blank.1, plane_bytes: blank.1.len(), stride: 0, index: 0 }
    }
}
