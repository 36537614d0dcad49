//! State of one thread: its queries, and the buffers of its work on one block of tokens
//! ([`score`](super::score), [`accumulate`](super::accumulate)).

use std::ops::Range;

use kvant_backend::KvTensorSpec;
use kvant_codec::tile::{TILE, TileBlock};

use super::codes::{Coding, Expanded, OCTET_DIMS};
use super::matrix_unit::MatrixPath;
use super::panels::Panels;
use super::prefetch::Prefetcher;
use super::query::Queries;
use super::selection::Masks;
use super::shape::{BLOCK_TILES, Bytes, MAX_QUERIES, QUERY_GROUP, Scores};
use super::stage::Stage;
use super::view::Block;
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
    pub(super) centre_dot: Vec<[f32; 16]>,
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
    pub(super) octets: Vec<Expanded>,
    /// Operands of the matrix path.
    pub(super) panels: Panels,
    /// A block of tokens of a shared-KV tensor in whole bytes, as its values are read:
    /// `[octets of a tile][8 tiles]`. Empty for other tensors.
    pub(super) unpacked: Vec<Expanded>,
    pub(super) is_shared_kv: bool,
    /// The tokens that rows attend to, of a KV split.
    pub(super) masks: Masks,
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
    pub(super) fn reset(&mut self, tensors: [&KvTensorSpec; 2]) {
        let [keys, values] = tensors;
        self.steps = 0;
        for ((blocks, spec), dim) in
            self.blocks.iter_mut().zip(tensors).zip([keys.stored_dim(), values.stored_value_dim()])
        {
            let layout = spec.main_layout();
            let per_octet = if Coding::of(layout.dtype()).is_some() { 1 } else { 2 };
            self.steps += per_octet * dim.div_ceil(OCTET_DIMS) * BLOCK_TILES / 2;
            blocks.clear();
            blocks.extend(layout.blocks().take_while(|block| block.dims.end <= dim));
        }
        self.panels.reset([keys.stored_dim(), values.stored_value_dim()]);
        self.is_shared_kv = keys.shared_kv.is_some();
        let octets = if self.is_shared_kv { values.stored_value_dim().div_ceil(OCTET_DIMS) } else { 0 };
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
            true if self.is_shared_kv => 1,
            true => next.len(),
        };
        let times = match path {
            Some(_) => n_queries.div_ceil(QUERY_GROUP),
            None => n_queries.div_ceil(MAX_QUERIES) * 2 / L::WIDE,
        };
        Prefetcher::of(next[..n].iter(), self.steps * times)
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
            is_shared_kv: false,
            masks: Masks::default(),
            row,
            steps: 0,
            blocks: [const { Vec::new() }; 2],
            stage,
        }
    }
}
