//! GEMM for many rows, blocked for the caches.
//!
//! For two panels at a time, a *chunk* of their columns is unpacked once to memory that stays in
//! the L1 cache, and every tile of a *row block* is multiplied with it. Several pairs of panels are
//! multiplied with one chunk of activations before the next, so that it is loaded to the L2 cache
//! once for all of them: the activations as a whole may be larger than that. The sums of the row
//! block stay in f32 between chunks. The innermost loop multiplies registers of codes with one
//! broadcast word of each row of the tile: with two registers and 6 rows, 12 accumulators, and 8
//! loads for 12 products.

use std::marker::PhantomData;
use std::ops::Range;

use kvant_codec::DType;

use super::bf16::HalvesTiles;
use super::floats::FloatTiles;
use super::kernel_set::{Bf16Loop, CodesLoop, KernelSet, MultiplyChunk, OfPair};
use super::kernels::{
    CHUNK_BLOCKS, CHUNK_COLS, Chunk, CodesToHalves, FloatChunk, FloatScales, FloatsToHalves, HALVES_BLOCKS,
    HalvesChunk, HalvesPanels, MIN_GROUP, MultiplyFloats, Register, Sums, Unpack, UnpackFloats,
};
use super::panel::Line;
use super::partition::PAIR;
use super::quantize::QuantizedTiles;
use crate::simd::matmul::Simd;
use crate::simd::matmul::format::{
    BLOCK, Values, WeightFormat, has_halves, is_float, is_rotated, with_format, with_values,
};

/// Rows that are whole tiles of every kernel set.
const WHOLE_TILES: usize = 48;
/// Maximum rows of a row block: 512, the usual micro-batch, in whole tiles. The more rows share an
/// unpacked chunk the better; its sums (64 KiB for a pair) and a chunk of its activations (256 KiB)
/// stay in the L2 cache.
const MAX_ROW_BLOCK: usize = 11 * WHOLE_TILES;
/// Maximum pairs that are multiplied together. Each has sums of its own in the L2 cache.
pub(super) const MAX_PAIRS: usize = 8;

/// Returns the number of rows that are whole tiles of `S`, of codes and of floats.
const fn whole_tiles<S: KernelSet>() -> usize {
    let mut rows = S::TILE;
    while !rows.is_multiple_of(S::Simd::FLOAT_TILE) {
        rows += S::TILE;
    }
    assert!(WHOLE_TILES.is_multiple_of(rows));
    rows
}

/// Returns the rows per row block for `rows` rows: at most `max_rows` and the size of a workspace,
/// and for at least `min_blocks` blocks where there are enough tiles.
pub(super) fn row_block<S: KernelSet>(rows: usize, max_rows: usize, min_blocks: usize) -> usize {
    let whole_tiles = const { whole_tiles::<S>() };
    let n_blocks = rows.div_ceil(max_rows.clamp(whole_tiles, MAX_ROW_BLOCK)).max(min_blocks);
    rows.div_ceil(n_blocks).next_multiple_of(whole_tiles)
}

/// Buffers that a thread reuses between items.
#[derive(Clone)]
pub(super) struct Workspace {
    chunk: Chunk,
    float_chunk: FloatChunk,
    float_scales: FloatScales,
    halves: HalvesChunk,
    /// Sums of a row block, `[tile][pair][panel][row of the tile]`.
    sums: Vec<Register>,
}

impl Workspace {
    pub const EMPTY: Self = Self {
        chunk: Chunk::ZERO,
        float_chunk: [[Register::ZERO; PAIR]; CHUNK_COLS],
        float_scales: [[Register::ZERO; PAIR]; CHUNK_COLS / MIN_GROUP],
        halves: [[[Line::ZERO; BLOCK / 2]; PAIR]; HALVES_BLOCKS],
        sums: Vec::new(),
    };
}

/// Pairs of panels of one type and width: of one matrix, or a panel each of the two matrices of a
/// gated layer.
#[derive(Clone, Copy)]
pub(super) struct Pairs<'a> {
    pub dtype: DType,
    pub n_in: usize,
    /// At least one.
    pub panels: &'a [[&'a [Line]; PAIR]],
}

/// The sums of some pairs for the rows `rows` in tiles of `T`.
struct Totals<'a, const T: usize> {
    rows: Range<usize>,
    n_pairs: usize,
    /// `[tile][pair]`.
    sums: &'a mut [Sums<T>],
}

impl<'a, const T: usize> Totals<'a, T> {
    /// Returns sums of zero in `memory`.
    fn new(memory: &'a mut Vec<Register>, rows: Range<usize>, pairs: Pairs<'_>) -> Self {
        let n_pairs = pairs.panels.len();
        memory.clear();
        memory.resize(rows.len().div_ceil(T) * n_pairs * PAIR * T, Register::ZERO);
        Self { rows, n_pairs, sums: memory.as_chunks_mut().0.as_chunks_mut().0 }
    }

    fn of_pair(&mut self, pair: usize) -> OfPair<'_, T> {
        self.sums[pair..].iter_mut().step_by(self.n_pairs)
    }

    /// Passes the sums to `put(rows of a tile, their sums)`, `[pair][panel][row of the tile]`.
    fn put(self, mut put: impl FnMut(Range<usize>, &mut [Register])) {
        for (first, sums) in self.rows.clone().step_by(T).zip(self.sums.chunks_exact_mut(self.n_pairs)) {
            put(first..self.rows.end.min(first + T), sums.as_flattened_mut().as_flattened_mut());
        }
    }
}

/// The activations in the forms that panels require.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    pub quantized: QuantizedTiles<'a>,
    /// For the rotated formats.
    pub rotated: QuantizedTiles<'a>,
    pub floats: FloatTiles<'a>,
    /// In bf16, for bf16 products.
    pub halves: Option<Rounded<'a>>,
}

/// Activations in bf16.
#[derive(Clone, Copy)]
pub(super) struct Rounded<'a> {
    /// Unrotated, and rotated.
    pub tiles: [HalvesTiles<'a>; 2],
    /// Whether coded panels use them too.
    pub of_codes: bool,
}

impl<'a> Tiles<'a> {
    /// Returns the activations for coded panels of this type.
    pub fn codes(&self, dtype: DType) -> QuantizedTiles<'a> {
        if is_rotated(dtype) { self.rotated } else { self.quantized }
    }

    /// Returns the activations for panels of this type in bf16, if they are multiplied so.
    fn halves(&self, dtype: DType) -> Option<HalvesTiles<'a>> {
        let halves = self.halves.filter(|halves| has_halves(dtype, halves.of_codes))?;
        Some(halves.tiles[usize::from(is_rotated(dtype))])
    }
}

/// Multiplies `pairs` with the rows `rows` (within one row block) and passes the results to
/// `put(rows of a tile, their sums)`, `[pair][panel][row of the tile]`.
pub(super) fn multiply<S: KernelSet>(
    set: S,
    workspace: &mut Workspace,
    pairs: Pairs<'_>,
    tiles: Tiles<'_>,
    rows: Range<usize>,
    put: impl FnMut(Range<usize>, &mut [Register]),
) {
    if let Some(halves) = tiles.halves(pairs.dtype) {
        let gemm = Bf16Gemm { simd: set.vectors(), workspace, pairs, rows: rows.clone(), put };
        return set.multiply_halves(gemm, halves, rows);
    }
    if !is_float(pairs.dtype) {
        let quantized = tiles.codes(pairs.dtype);
        return set.multiply_codes(CodesGemm { workspace, pairs, quantized, rows, put });
    }
    let simd = set.vectors();
    match S::Simd::FLOAT_TILE {
        6 => multiply_floats::<S::Simd, 6>(simd, workspace, pairs, tiles.floats, rows, put),
        12 => multiply_floats::<S::Simd, 12>(simd, workspace, pairs, tiles.floats, rows, put),
        rows => unreachable!("no tiles of {rows} rows"),
    }
}

/// Does the work of [`multiply`] for coded panels.
struct CodesGemm<'a, P> {
    workspace: &'a mut Workspace,
    pairs: Pairs<'a>,
    quantized: QuantizedTiles<'a>,
    rows: Range<usize>,
    put: P,
}

impl<P: FnMut(Range<usize>, &mut [Register])> CodesLoop for CodesGemm<'_, P> {
    fn run<S: MultiplyChunk<T>, const T: usize>(self, set: S) {
        let Self { workspace: Workspace { chunk, sums, .. }, pairs, quantized, rows, put } = self;
        let mut totals = Totals::<T>::new(sums, rows, pairs);
        with_format!(pairs.dtype, F => add_codes::<S, F, T>(set, chunk, &mut totals, pairs, quantized));
        totals.put(put);
    }
}

/// Adds the products of some pairs to their sums.
fn add_codes<S: MultiplyChunk<T>, F: WeightFormat, const T: usize>(
    set: S,
    chunk: &mut Chunk,
    totals: &mut Totals<'_, T>,
    pairs: Pairs<'_>,
    quantized: QuantizedTiles<'_>,
) {
    let (layout, format) = (F::LAYOUT, PhantomData::<F>);
    let n_blocks = pairs.n_in / BLOCK;
    let chunk_lines = CHUNK_BLOCKS * BLOCK / layout.unit * layout.unit_lines(layout.unit);
    let first_tile = totals.rows.start / T;
    for (index, first) in (0..n_blocks).step_by(CHUNK_BLOCKS).enumerate() {
        let blocks = first..n_blocks.min(first + CHUNK_BLOCKS);
        for (pair, panels) in pairs.panels.iter().enumerate() {
            for (p, panel) in panels.iter().enumerate() {
                let lines = &panel[index * chunk_lines..panel.len().min((index + 1) * chunk_lines)];
                let centred = S::CENTRED;
                set.vectors().run(Unpack { lines, n_blocks: blocks.len(), p, centred, chunk, format });
            }
            set.arrange(&mut chunk.codes[..blocks.len()]);
            let tiles = (first_tile..).map(|tile| quantized.tile(tile).blocks(blocks.clone()));
            set.multiply_chunk::<F>(chunk, totals.of_pair(pair).zip(tiles));
        }
    }
}

fn multiply_floats<S: Simd, const T: usize>(
    simd: S,
    workspace: &mut Workspace,
    pairs: Pairs<'_>,
    floats: FloatTiles<'_>,
    rows: Range<usize>,
    put: impl FnMut(Range<usize>, &mut [Register]),
) {
    let Workspace { float_chunk, float_scales, sums, .. } = workspace;
    let mut totals = Totals::<T>::new(sums, rows, pairs);
    with_values!(pairs.dtype, V => {
        add_floats::<S, V, T>(simd, float_chunk, float_scales, &mut totals, pairs, floats);
    });
    totals.put(put);
}

/// Adds the products of some pairs to their sums.
fn add_floats<S: Simd, V: Values, const T: usize>(
    simd: S,
    chunk: &mut FloatChunk,
    scales: &mut FloatScales,
    totals: &mut Totals<'_, T>,
    pairs: Pairs<'_>,
    floats: FloatTiles<'_>,
) {
    let first_tile = totals.rows.start / T;
    for first in (0..pairs.n_in).step_by(CHUNK_COLS) {
        let cols = first..pairs.n_in.min(first + CHUNK_COLS);
        for (pair, panels) in pairs.panels.iter().enumerate() {
            for (p, panel) in panels.iter().enumerate() {
                let lines = &panel[V::lines(first)..V::lines(cols.end)];
                let (n_cols, scales) = (cols.len(), Some(&mut *scales));
                simd.run(UnpackFloats { lines, n_cols, p, chunk, scales, values: PhantomData::<V> });
            }
            for (tile, sums) in (first_tile..).zip(totals.of_pair(pair)) {
                let x = &floats.tile(tile)[cols.clone()];
                let scales = V::GROUP.map(|_| &*scales);
                simd.run(MultiplyFloats { chunk, scales, x, sums, values: PhantomData::<V> });
            }
        }
    }
}

/// Does the work of [`multiply`] in bf16.
struct Bf16Gemm<'a, S, P> {
    simd: S,
    workspace: &'a mut Workspace,
    pairs: Pairs<'a>,
    rows: Range<usize>,
    put: P,
}

impl<S: Simd, P: FnMut(Range<usize>, &mut [Register])> Bf16Loop for Bf16Gemm<'_, S, P> {
    fn run<const T: usize>(self, mut add: impl FnMut(&mut [HalvesPanels], OfPair<'_, T>, Range<usize>)) {
        let Self { simd, workspace, pairs, rows, put } = self;
        let Workspace { chunk, float_chunk, halves: unpacked, sums, .. } = workspace;
        let mut totals = Totals::<T>::new(sums, rows, pairs);
        let n_blocks = pairs.n_in.div_ceil(BLOCK);
        for first in (0..n_blocks).step_by(HALVES_BLOCKS) {
            let blocks = first..n_blocks.min(first + HALVES_BLOCKS);
            let unpacked = &mut unpacked[..blocks.len()];
            for (pair, panels) in pairs.panels.iter().enumerate() {
                if is_float(pairs.dtype) {
                    let n_in = pairs.n_in;
                    with_values!(pairs.dtype, V => floats_to_halves::<S, V>(simd, float_chunk, panels, n_in, first, unpacked));
                } else {
                    with_format!(pairs.dtype, F => codes_to_halves::<S, F>(simd, chunk, panels, first, unpacked));
                }
                add(unpacked, totals.of_pair(pair), blocks.clone());
            }
        }
        drop(add);
        totals.put(put);
    }
}

/// Unpacks the blocks of a chunk from block `first` on, with scales applied.
fn codes_to_halves<S: Simd, F: WeightFormat>(
    simd: S,
    chunk: &mut Chunk,
    panels: &[&[Line]; PAIR],
    first: usize,
    halves: &mut [HalvesPanels],
) {
    let (layout, format, n_blocks) = (F::LAYOUT, PhantomData::<F>, halves.len());
    let chunk_lines = HALVES_BLOCKS * BLOCK / layout.unit * layout.unit_lines(layout.unit);
    for (p, panel) in panels.iter().enumerate() {
        let at = first / HALVES_BLOCKS * chunk_lines;
        let lines = &panel[at..panel.len().min(at + chunk_lines)];
        simd.run(Unpack { lines, n_blocks, p, centred: true, chunk, format });
    }
    simd.run(CodesToHalves { chunk, halves, format });
}

/// Rounds the columns of a chunk from block `first` on, and pads with zeros after the last one.
fn floats_to_halves<S: Simd, V: Values>(
    simd: S,
    chunk: &mut FloatChunk,
    panels: &[&[Line]; PAIR],
    n_in: usize,
    first: usize,
    halves: &mut [HalvesPanels],
) {
    for (i, halves) in halves.chunks_mut(CHUNK_COLS / BLOCK).enumerate() {
        let first = first * BLOCK + i * CHUNK_COLS;
        let cols = first..n_in.min(first + CHUNK_COLS);
        for (p, panel) in panels.iter().enumerate() {
            let (lines, n_cols) = (&panel[V::lines(first)..V::lines(cols.end)], cols.len());
            simd.run(UnpackFloats { lines, n_cols, p, chunk, scales: None, values: PhantomData::<V> });
        }
        chunk[cols.len()..].fill([Register::ZERO; PAIR]);
        simd.run(FloatsToHalves { chunk, halves });
    }
}
