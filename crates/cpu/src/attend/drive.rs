//! Walks the cache: which thread takes which queries and tokens, block by block, and how their shares join.

use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant_backend::{AttendParams, KvLayer, Place, Stream, TOKENS_PER_PAGE, TileRef};
use kvant_codec::tile::{SCALE_BYTES, TILE, TileLayout};

use super::codes::{Coding, EXPANDED_BYTES, Expand, Meaning, OCTET_DIMS};
use super::kernels::{
    BLOCK, BLOCK_TILES, Bytes, HIDDEN, Join, Lane, MOST_QUERIES, MixCodes, MixFloats, RoundWeights,
    ScoreCodes, ScoreFloats, Scores, Softmax,
};
use super::query::Queries;
use super::stage::Stage;
use crate::lanes::{Lanes, Rotate, Way, prefetch};
use crate::shards::Shards;
use crate::{CpuPage, Pool};

/// Queries that share one walk over the tokens: with 48 of them, unpacking a tile costs little beside reading it, and
/// their scores and outputs still fit the second level of cache.
const QUERIES: usize = 48;

/// Octets of the largest block (turbo: 128 dims).
const BLOCK_OCTETS: usize = 4;

/// Memory that one call leaves to the next, so that decoding allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// `[threads]`
    threads: Vec<Local>,
    /// Shares of the items in work: `[items]` where tokens are split, else `[threads]`.
    shares: Vec<Share>,
    /// Parts of the tokens that are done, `[KV heads · query blocks]`.
    done: Vec<AtomicUsize>,
    /// How much of the tiles is read: everything, but while it is measured.
    pub(super) stage: Stage,
}

/// The softmax so far: `out / sum` is the mean of the values seen, weighted by 2^(score - max).
#[derive(Debug, Default)]
struct Share {
    /// `[queries]`, in sixteens.
    max: Vec<[f32; 16]>,
    /// `[queries]`, in sixteens.
    sum: Vec<[f32; 16]>,
    /// `[queries][v_dim / 16]`
    out: Vec<Lane>,
}

/// What a thread works with.
#[derive(Debug, Default)]
struct Local {
    queries: Queries,
    /// `[queries]`
    scores: Vec<Scores>,
    /// Of the scores of a block, `[queries]` in sixteens.
    max: Vec<[f32; 16]>,
    /// Of the weights of a block, `[queries]` in sixteens.
    sum: Vec<[f32; 16]>,
    /// Factor on the outputs so far, `[queries]` in sixteens.
    keep: Vec<[f32; 16]>,
    /// Factor on the weights of a block, `[queries]` in sixteens.
    shrink: Vec<[f32; 16]>,
    /// Byte planes of the weights, `[queries][2]`.
    weights: Vec<Bytes>,
    /// `-bias · Σ integers` of the weights, `[queries]`.
    starts: Vec<i32>,
    /// What one unit of weights times codes stands for, `[queries]`.
    factors: Vec<f32>,
    /// Expanded octets: of the blocks of two tiles of keys, or of a column pair of a block of tokens.
    octets: Vec<[u8; EXPANDED_BYTES]>,
    /// One output `[v_dim]`.
    row: Vec<f32>,
    stage: Stage,
}

/// How a step is cut into items: (KV head, block of queries, part of the tokens).
struct Cut {
    /// Query heads per KV head.
    group: usize,
    query_blocks: usize,
    parts: usize,
    part_tokens: usize,
}

impl Cut {
    fn new(p: &AttendParams, n_threads: usize) -> Self {
        let group = p.n_heads / p.n_kv_heads.max(1);
        let query_blocks = (p.rows * group).div_ceil(QUERIES);
        let whole = (p.n_kv_heads * query_blocks).max(1);
        // Four parts for each thread, so that one that is held up holds up little; long ones, since each prepares the
        // queries anew, unless threads would have nothing to do.
        let least = if whole >= n_threads { 8 * BLOCK } else { BLOCK };
        let most = (p.start + p.rows).div_ceil(least);
        let wanted = if n_threads == 1 { 1 } else { (4 * n_threads).div_ceil(whole) };
        let part_tokens = (p.start + p.rows).div_ceil(wanted.min(most).max(1)).next_multiple_of(BLOCK);
        let parts = (p.start + p.rows).div_ceil(part_tokens.max(1));
        Self { group, query_blocks, parts, part_tokens }
    }
}

/// See [`super::attend`], which has checked the shapes.
pub(super) fn attend<L: Lanes>(
    lanes: L,
    pool: &Pool,
    scratch: &mut Scratch,
    p: &AttendParams,
    q: &[f32],
    layer: &KvLayer<CpuPage>,
    out: &mut [f32],
) {
    let cut = Cut::new(p, pool.n_threads());
    let n_items = p.n_kv_heads * cut.query_blocks * cut.parts;
    let n_threads = pool.n_threads();
    scratch.threads.resize_with(n_threads.max(scratch.threads.len()), Local::default);
    let n_shares = if cut.parts > 1 { n_items } else { n_threads };
    scratch.shares.resize_with(n_shares.max(scratch.shares.len()), Share::default);
    scratch.threads.iter_mut().for_each(|local| local.stage = scratch.stage);
    scratch.done.clear();
    scratch.done.resize_with(p.n_kv_heads * cut.query_blocks, AtomicUsize::default);

    let (locals, shares) = (Shards::new(&mut scratch.threads), Shards::new(&mut scratch.shares));
    let (done, out, next) = (&scratch.done, Shards::new(out), AtomicUsize::new(0));
    let work = |thread: usize| {
        // SAFETY: each thread of the region has its own number.
        let local = unsafe { &mut locals.part(thread..thread + 1)[0] };
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= n_items {
                return;
            }
            let (whole, part) = (item / cut.parts, item % cut.parts);
            // The last queries see the most tokens: they come first, so that the threads finish together.
            let (block, head) = (cut.query_blocks - 1 - whole / p.n_kv_heads, whole % p.n_kv_heads);
            let task = Task {
                p,
                group: cut.group,
                head,
                queries: QUERIES * block,
                keys: &layer.k[head],
                values: &layer.v[head],
            };
            let tokens = part * cut.part_tokens..(part + 1) * cut.part_tokens;
            let index = if cut.parts > 1 { item } else { thread };
            // SAFETY: without parts, the share is this thread's; with parts, it is this item's.
            let share = unsafe { &mut shares.part(index..index + 1)[0] };
            task.walk(lanes, local, share, q, tokens);
            if cut.parts == 1 {
                task.finish(lanes, share, &mut local.row, &out);
            } else if done[whole].fetch_add(1, Ordering::AcqRel) + 1 == cut.parts {
                // SAFETY: all parts of these queries are done, and the counter's ordering makes their shares visible;
                // nobody else looks at them.
                let parts = unsafe { shares.part(whole * cut.parts..(whole + 1) * cut.parts) };
                let (first, rest) = parts.split_first_mut().expect("at least two parts");
                let queries = task.rows().count();
                rest.iter().for_each(|other| first.join_share(lanes, other, local, queries));
                task.finish(lanes, first, &mut local.row, &out);
            }
        }
    };
    if n_items == 1 { work(0) } else { pool.run(&work) }
}

impl Share {
    fn reset(&mut self, queries: usize, width: usize) {
        self.max.clear();
        self.max.resize(queries.div_ceil(16), [f32::NEG_INFINITY; 16]);
        self.sum.clear();
        self.sum.resize(queries.div_ceil(16), [0.0; 16]);
        self.out.clear();
        self.out.resize(queries * width, Lane([0.0; 16]));
    }

    /// Joins maxima and sums, and brings the outputs to the new maxima. Leaves in `shrink` the factors on outputs that
    /// belong to what was joined.
    fn join<L: Lanes>(
        &mut self,
        lanes: L,
        (more_max, more_sum): (&[[f32; 16]], &[[f32; 16]]),
        keep: &mut [[f32; 16]],
        shrink: &mut [[f32; 16]],
        queries: usize,
    ) {
        let (max, sum) = (&mut self.max, &mut self.sum);
        lanes.run(Join { max, sum, more_max, more_sum, keep: &mut *keep, shrink });
        let width = self.out.len() / queries;
        for (out, &keep) in self.out.chunks_exact_mut(width).zip(keep.as_flattened()) {
            // Maxima seldom rise after the first blocks. A NaN is not 1.
            if keep != 1.0 {
                out.iter_mut().flat_map(|lane| &mut lane.0).for_each(|x| *x *= keep);
            }
        }
    }

    /// Joins what another thread found for the same queries.
    fn join_share<L: Lanes>(&mut self, lanes: L, other: &Self, local: &mut Local, queries: usize) {
        self.join(lanes, (&other.max, &other.sum), &mut local.keep, &mut local.shrink, queries);
        let width = self.out.len() / queries;
        let outs = self.out.chunks_exact_mut(width).zip(other.out.chunks_exact(width));
        for ((out, other), &shrink) in outs.zip(local.shrink.as_flattened()) {
            for (lane, other) in out.iter_mut().zip(other) {
                lane.0.iter_mut().zip(other.0).for_each(|(x, other)| *x += shrink * other);
            }
        }
    }
}

/// A block of queries of one KV head.
struct Task<'a> {
    p: &'a AttendParams,
    group: usize,
    head: usize,
    /// First query; query i is head `i mod group` of the group, of row `i / group`.
    queries: usize,
    keys: &'a Stream<CpuPage>,
    values: &'a Stream<CpuPage>,
}

impl Task<'_> {
    /// (row, query head) of each query.
    fn rows(&self) -> impl Iterator<Item = (usize, usize)> {
        let (group, head) = (self.group, self.head);
        let end = (self.queries + QUERIES).min(self.p.rows * group);
        (self.queries..end).map(move |i| (i / group, head * group + i % group))
    }

    /// Attends over `tokens`.
    fn walk<L: Lanes>(
        &self,
        lanes: L,
        local: &mut Local,
        share: &mut Share,
        q: &[f32],
        tokens: Range<usize>,
    ) {
        let p = self.p;
        let queries =
            self.rows().map(|(row, head)| &q[(row * p.n_heads + head) * p.k_head_dim..][..p.k_head_dim]);
        local.queries.prepare(lanes, self.keys.spec(), p.scale * LOG2_E, queries);
        let n = self.rows().count();
        local.reset(n);
        share.reset(n, self.values.spec().dim() / 16);

        let last_row = self.rows().last().map_or(0, |(row, _)| row);
        let end = tokens.end.min(p.start + last_row + 1);
        let block =
            |stream, first: usize| Block::new(stream, first / TILE..(first + BLOCK).min(end).div_ceil(TILE));
        let mut keys = block(self.keys, tokens.start);
        for first in (tokens.start..end).step_by(BLOCK) {
            let values = block(self.values, first);
            local.score(lanes, &keys, &values);
            for ((row, _), scores) in self.rows().zip(&mut local.scores) {
                let visible = (p.start + row + 1).saturating_sub(first);
                if visible < values.tiles * TILE {
                    scores.0.as_flattened_mut()[visible..].fill(HIDDEN);
                }
            }
            lanes.run(Softmax {
                scores: &mut local.scores,
                tiles: values.tiles,
                max: local.max.as_flattened_mut(),
                sum: local.sum.as_flattened_mut(),
            });
            share.join(lanes, (&local.max, &local.sum), &mut local.keep, &mut local.shrink, n);
            keys = block(self.keys, first + BLOCK);
            local.mix(lanes, &values, &keys, &mut share.out);
        }
    }

    /// Divides by the sums, un-rotates and writes the outputs.
    fn finish<L: Lanes>(&self, lanes: L, share: &Share, row: &mut Vec<f32>, out: &Shards<f32>) {
        let p = self.p;
        let width = self.values.spec().dim() / 16;
        for (i, (query_row, head)) in self.rows().enumerate() {
            let by = 1.0 / share.sum.as_flattened()[i];
            row.clear();
            for lane in &share.out[i * width..(i + 1) * width] {
                row.extend_from_slice(&lane.0.map(|x| x * by));
            }
            if self.values.spec().rotates() {
                lanes.run(Rotate { slices: row, way: Way::Inverse });
            }
            let at = (query_row * p.n_heads + head) * p.v_head_dim;
            // SAFETY: each (row, query head) is finished once, by the thread that completes its block of queries.
            unsafe { out.part(at..at + p.v_head_dim) }.copy_from_slice(&row[..p.v_head_dim]);
        }
    }
}

impl Local {
    fn reset(&mut self, queries: usize) {
        self.scores.resize(queries, Scores([[0.0; TILE]; BLOCK_TILES + 1]));
        self.weights.resize(2 * queries, Bytes([[0; 4]; 32]));
        self.starts.resize(queries, 0);
        self.factors.resize(queries, 0.0);
        for state in [&mut self.max, &mut self.sum, &mut self.keep, &mut self.shrink] {
            state.resize(queries.div_ceil(16), [0.0; 16]);
        }
        self.octets.resize(2 * BLOCK_OCTETS.max(BLOCK_TILES), [0; EXPANDED_BYTES]);
    }

    /// Scores of all queries with a block of keys; fetches the values that come next.
    fn score<L: Lanes>(&mut self, lanes: L, keys: &Block, next: &Block) {
        for run in keys.runs() {
            for t in (0..run.tiles).step_by(2) {
                self.fetch(next, run.first + t..run.first + t + 2);
                // A last tile without a neighbour is its own; what that scores lands in the slack or is overwritten.
                let pair = [t, (t + 1).min(run.tiles - 1)].map(|t| run.tile(t));
                match Coding::of(run.layout.dtype()) {
                    Some(coding) => self.score_codes(lanes, coding, run.layout, pair, run.first + t),
                    None => self.score_floats(lanes, run.layout, pair, run.first + t),
                }
            }
        }
    }

    fn fetch(&self, block: &Block, tiles: Range<usize>) {
        if self.stage.fetches() {
            block.fetch(tiles);
        }
    }

    fn score_floats<L: Lanes>(&mut self, lanes: L, layout: TileLayout, tiles: [&[u8]; 2], tile: usize) {
        let chunks = self.queries.floats.chunks(MOST_QUERIES * layout.dim());
        for (queries, scores) in chunks.zip(self.scores.chunks_mut(MOST_QUERIES)) {
            ScoreFloats { dtype: layout.dtype(), tiles, queries, scores, tile }.run(lanes);
        }
    }

    fn score_codes<L: Lanes>(
        &mut self,
        lanes: L,
        coding: Coding,
        layout: TileLayout,
        tiles: [&[u8]; 2],
        tile: usize,
    ) {
        let n = self.scores.len();
        let (block_dims, block_bytes) = (layout.block_dims(), layout.block_bytes());
        let octets = block_dims / OCTET_DIMS;
        let query_planes = self.queries.rows.len() / (n * layout.dim().div_ceil(BLOCK));
        for block in 0..layout.n_blocks() {
            let blocks = tiles.map(|tile| &tile[block * block_bytes..][..block_bytes]);
            let scales = blocks.map(|block| self.stage.scales(block));
            let staged = blocks.map(|block| self.stage.planes(coding, &block[SCALE_BYTES..]));
            let (mut read_as, mut planes) = (staged[0].0, staged.map(|(_, planes)| planes));
            if n > MOST_QUERIES && read_as != Coding::Whole {
                let (first, second) = self.octets.split_at_mut(octets);
                for (planes, expanded) in planes.into_iter().zip([&mut *first, &mut *second]) {
                    for (octet, out) in expanded.iter_mut().enumerate().take(octets) {
                        lanes.run(Expand { coding: read_as, planes, octet, out });
                    }
                }
                planes = [first, second].map(|octets| octets.as_flattened());
                read_as = Coding::Whole;
            }
            let slice = block * block_dims / BLOCK;
            for from in (0..n).step_by(MOST_QUERIES) {
                let to = (from + MOST_QUERIES).min(n);
                let chunk = block * n + from..block * n + to;
                ScoreCodes {
                    coding: read_as,
                    scales,
                    planes,
                    octets,
                    rows: &self.queries.rows
                        [(slice * n + from) * query_planes..(slice * n + to) * query_planes],
                    query_planes,
                    at: block * block_dims % BLOCK / 4,
                    starts: &self.queries.starts[chunk.clone()],
                    factors: &self.queries.factors[chunk],
                    scores: &mut self.scores[from..to],
                    tile,
                    is_first: block == 0,
                }
                .run(lanes);
            }
        }
    }

    /// Adds a block of values, weighted, to the outputs; fetches the keys that come next.
    fn mix<L: Lanes>(&mut self, lanes: L, values: &Block, next: &Block, out: &mut [Lane]) {
        for run in values.runs() {
            match Coding::of(run.layout.dtype()) {
                Some(coding) => self.mix_codes(lanes, coding, run, next, out),
                None => self.mix_floats(lanes, run, next, out),
            }
        }
    }

    fn mix_floats<L: Lanes>(&self, lanes: L, run: &Run, next: &Block, out: &mut [Lane]) {
        self.fetch(next, run.first..run.first + run.tiles);
        let width = run.layout.dim() / 16;
        let chunks = self.scores.chunks(MOST_QUERIES).zip(self.shrink.as_flattened().chunks(MOST_QUERIES));
        for ((p, factors), out) in chunks.zip(out.chunks_mut(MOST_QUERIES * width)) {
            let (values, tiles, tile, factors) = (run.bytes, run.tiles, run.first, &factors[..p.len()]);
            MixFloats { dtype: run.layout.dtype(), values, tiles, p, tile, factors, out, width }.run(lanes);
        }
    }

    fn mix_codes<L: Lanes>(&mut self, lanes: L, coding: Coding, run: &Run, next: &Block, out: &mut [Lane]) {
        let (layout, stride, n) = (run.layout, run.tile_bytes, self.scores.len());
        let meaning = Meaning::of(layout.dtype()).expect("coded tiles");
        let width = layout.dim() / 16;
        let (octets, block_bytes) = (layout.block_dims() / OCTET_DIMS, layout.block_bytes());
        for block in 0..layout.n_blocks() {
            let bytes = &run.bytes[block * block_bytes..];
            let (scales, scale_stride) = match self.stage {
                Stage::Nothing => (&self.stage.scales(bytes)[..], 0),
                _ => (bytes, stride),
            };
            lanes.run(RoundWeights {
                p: &self.scores,
                scales,
                stride: scale_stride,
                tiles: run.tiles,
                tile: run.first,
                meaning,
                shrink: self.shrink.as_flattened(),
                rows: &mut self.weights,
                starts: &mut self.starts,
                factors: &mut self.factors,
            });
            for octet in 0..octets {
                let (at, of) = (block * octets + octet, width / 2);
                self.fetch(next, run.first + at * run.tiles / of..run.first + (at + 1) * run.tiles / of);
                let mut codes = self.staged_octet(coding, bytes, run, octet);
                if n > MOST_QUERIES && codes.0 != Coding::Whole {
                    let (coding, planes, ..) = codes;
                    for (t, out) in self.octets.iter_mut().enumerate().take(run.tiles) {
                        lanes.run(Expand { coding, planes: &planes[t * stride..], octet, out });
                    }
                    codes = (Coding::Whole, self.octets.as_flattened(), EXPANDED_BYTES, 0);
                }
                for from in (0..n).step_by(MOST_QUERIES) {
                    let to = (from + MOST_QUERIES).min(n);
                    MixCodes {
                        coding: codes.0,
                        planes: codes.1,
                        stride: codes.2,
                        octet: codes.3,
                        tiles: run.tiles,
                        rows: &self.weights[2 * from..2 * to],
                        tile: run.first,
                        starts: &self.starts[from..to],
                        factors: &self.factors[from..to],
                        out: &mut out[from * width..to * width],
                        width,
                        lane: 2 * (block * octets + octet),
                    }
                    .run(lanes);
                }
            }
        }
    }
}

impl Local {
    /// Coding, planes, stride from tile to tile and index of the octet to read, for a block of values at `bytes`.
    fn staged_octet<'a>(
        &self,
        coding: Coding,
        bytes: &'a [u8],
        run: &Run,
        octet: usize,
    ) -> (Coding, &'a [u8], usize, usize) {
        if !self.stage.is_blank() {
            let (coding, planes) = self.stage.planes(coding, &bytes[SCALE_BYTES..]);
            return (coding, planes, run.tile_bytes, octet);
        }
        let octets = run.layout.block_dims() / OCTET_DIMS;
        let share = (run.layout.block_bytes() - SCALE_BYTES) / octets;
        let mut blank = self.stage.planes(coding, &[]);
        for t in 0..run.tiles {
            let planes = &bytes[t * run.tile_bytes + SCALE_BYTES..];
            blank = self.stage.planes(coding, &planes[octet * share..][..share]);
        }
        (blank.0, blank.1, 0, 0)
    }
}

/// Tiles of one layout that lie one after the other.
#[derive(Clone, Copy)]
struct Run<'a> {
    layout: TileLayout,
    /// `[tiles][tile_bytes]`
    bytes: &'a [u8],
    /// `layout.bytes()`
    tile_bytes: usize,
    /// First of them, counted from the start of the block.
    first: usize,
    tiles: usize,
}

impl<'a> Run<'a> {
    fn tile(&self, t: usize) -> &'a [u8] {
        &self.bytes[t * self.tile_bytes..][..self.tile_bytes]
    }
}

/// Where the tiles of a block lie. A run ends with a page, with a part of the stream, or where the tail's ring wraps.
struct Block<'a> {
    runs: [Option<Run<'a>>; BLOCK_TILES],
    tiles: usize,
}

impl<'a> Block<'a> {
    fn new(stream: &'a Stream<CpuPage>, tiles: Range<usize>) -> Self {
        const TILES_PER_PAGE: usize = TOKENS_PER_PAGE / TILE;
        let spec = stream.spec();
        let mut runs = [None; BLOCK_TILES];
        let mut at = tiles.start;
        for run in &mut runs {
            if at >= tiles.end {
                break;
            }
            let place = stream.place(at);
            let left = match place {
                Place::Sink(tile) => spec.sink_tiles - tile,
                Place::Main(tile) => {
                    (TILES_PER_PAGE - tile % TILES_PER_PAGE).min(stream.main_end().div_ceil(TILE) - at)
                }
                Place::Tail(tile) => spec.tail_tiles - tile,
            };
            let n = left.min(tiles.end - at);
            let TileRef { layout, page, offset } = stream.tile_at(place);
            let tile_bytes = layout.bytes();
            let bytes = &page.as_bytes()[offset..][..n * tile_bytes];
            *run = Some(Run { layout, bytes, tile_bytes, first: at - tiles.start, tiles: n });
            at += n;
        }
        Self { runs, tiles: tiles.len() }
    }

    fn runs(&self) -> impl Iterator<Item = &Run<'a>> {
        self.runs.iter().map_while(Option::as_ref)
    }

    /// Asks for some tiles to be brought to the cache.
    fn fetch(&self, tiles: Range<usize>) {
        for run in self.runs() {
            let of_run = |tile: usize| tile.saturating_sub(run.first).min(run.tiles) * run.tile_bytes;
            prefetch(&run.bytes[of_run(tiles.start)..of_run(tiles.end)]);
        }
    }
}
