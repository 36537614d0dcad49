//! Many rows: products blocked for the caches.
//!
//! Two panels at a time, a *chunk* of their columns is unpacked once to memory that stays in the first-level cache, and
//! every tile of a *row block* is multiplied with it. The sums of the row block wait in f32 between chunks. In the
//! innermost loop registers of codes meet one broadcast word of each row of the tile: with two registers and 6 rows, 12
//! accumulators, and 8 loads for 12 products.

use std::marker::PhantomData;
use std::ops::Range;

use kvant_codec::DType;

use super::floats::FloatTiles;
use super::halves::HalvesTiles;
use super::kernels::{
    CHUNK_BLOCKS, CHUNK_COLS, Chunk, CodesToHalves, FloatChunk, FloatsToHalves, HalvesChunk, HalvesPanels,
    MultiplyFloats, PAIR, Register, Sums, Unpack, UnpackFloats,
};
use super::panel::{BLOCK, Format, Line, Values, has_halves, is_float, is_rotated, with_format, with_values};
use super::quantise::QuantisedTiles;
use super::set::{MultiplyChunk, Set};
use super::simd::Simd;

/// Rows that are whole tiles of every kernel set.
const WHOLE_TILES: usize = 48;
/// The most rows of a row block: 512, the usual micro-batch, in whole tiles. The more rows share an unpacked chunk the
/// better; its sums (64 KiB) and a chunk of its activations (256 KiB) stay in the second-level cache.
const MAX_ROW_BLOCK: usize = 11 * WHOLE_TILES;

/// Rows that are whole tiles of `S`, of codes and of floats.
const fn whole_tiles<S: Set>() -> usize {
    let mut rows = S::TILE;
    while !rows.is_multiple_of(S::Simd::FLOAT_TILE) {
        rows += S::TILE;
    }
    assert!(WHOLE_TILES.is_multiple_of(rows));
    rows
}

/// Rows of the row blocks that `rows` rows are cut into: at most `most` and what a workspace holds, for at least `least`
/// blocks where there are tiles enough.
pub(super) fn row_block<S: Set>(rows: usize, most: usize, least: usize) -> usize {
    let whole_tiles = const { whole_tiles::<S>() };
    let n_blocks = rows.div_ceil(most.clamp(whole_tiles, MAX_ROW_BLOCK)).max(least);
    rows.div_ceil(n_blocks).next_multiple_of(whole_tiles)
}

/// What a thread keeps between items.
#[derive(Clone)]
pub(super) struct Workspace {
    chunk: Chunk,
    float_chunk: FloatChunk,
    halves: HalvesChunk,
    /// Of a row block, `[tile][panel][row of the tile]`.
    sums: [Register; PAIR * MAX_ROW_BLOCK],
}

impl Workspace {
    pub const EMPTY: Self = Self {
        chunk: Chunk::ZERO,
        float_chunk: [[Register::ZERO; PAIR]; CHUNK_COLS],
        halves: [[[Line::ZERO; BLOCK / 2]; PAIR]; CHUNK_BLOCKS],
        sums: [Register::ZERO; PAIR * MAX_ROW_BLOCK],
    };
}

/// The sums of `rows` rows in tiles of `T`.
fn in_tiles<const T: usize>(sums: &mut [Register], rows: usize) -> &mut [Sums<T>] {
    &mut sums.as_chunks_mut().0.as_chunks_mut().0[..rows.div_ceil(T)]
}

/// Two panels of one type and width: of one matrix, or of the two matrices of a gated layer.
#[derive(Clone, Copy)]
pub(super) struct Pair<'a> {
    pub dtype: DType,
    pub n_in: usize,
    pub panels: [&'a [Line]; PAIR],
}

/// The activations in the forms that panels want.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    pub quantised: QuantisedTiles<'a>,
    /// For the rotated formats.
    pub rotated: QuantisedTiles<'a>,
    pub floats: FloatTiles<'a>,
    /// In bf16, where they are multiplied so.
    pub halves: Option<Rounded<'a>>,
}

/// Activations in bf16.
#[derive(Clone, Copy)]
pub(super) struct Rounded<'a> {
    /// As they are, and rotated.
    pub tiles: [HalvesTiles<'a>; 2],
    /// Whether they are for coded panels too.
    pub of_codes: bool,
}

impl<'a> Tiles<'a> {
    /// What coded panels of this type meet.
    pub fn codes(&self, dtype: DType) -> QuantisedTiles<'a> {
        if is_rotated(dtype) { self.rotated } else { self.quantised }
    }

    /// What panels of this type meet where they are multiplied in bf16.
    fn halves(&self, dtype: DType) -> Option<HalvesTiles<'a>> {
        let halves = self.halves.filter(|halves| has_halves(dtype, halves.of_codes))?;
        Some(halves.tiles[usize::from(is_rotated(dtype))])
    }
}

/// Multiplies `pair` with the rows `rows` (within one row block) and hands `put(rows of a tile, their sums of each panel)` the results.
pub(super) fn multiply<S: Set>(
    set: S,
    workspace: &mut Workspace,
    pair: Pair<'_>,
    tiles: Tiles<'_>,
    rows: Range<usize>,
    put: impl FnMut(Range<usize>, [&mut [Register]; PAIR]),
) {
    if let Some(halves) = tiles.halves(pair.dtype) {
        return set.multiply_halves(workspace, pair, halves, rows, put);
    }
    if !is_float(pair.dtype) {
        return set.multiply_codes(workspace, pair, tiles, rows, put);
    }
    let simd = set.vectors();
    match S::Simd::FLOAT_TILE {
        6 => multiply_floats::<S::Simd, 6>(simd, workspace, pair, tiles.floats, rows, put),
        12 => multiply_floats::<S::Simd, 12>(simd, workspace, pair, tiles.floats, rows, put),
        rows => unreachable!("no tiles of {rows} rows"),
    }
}

/// As [`multiply`], of coded panels with tiles of `T` rows.
pub(super) fn multiply_codes<S: MultiplyChunk<T>, const T: usize>(
    set: S,
    workspace: &mut Workspace,
    pair: Pair<'_>,
    tiles: Tiles<'_>,
    rows: Range<usize>,
    put: impl FnMut(Range<usize>, [&mut [Register]; PAIR]),
) {
    let sums = in_tiles::<T>(&mut workspace.sums, rows.len());
    let (chunk, quantised) = (&mut workspace.chunk, tiles.codes(pair.dtype));
    with_format!(pair.dtype, F => add_codes::<S, F, T>(set, chunk, sums, pair, quantised, rows.start / T));
    put_sums(sums, rows, put);
}

/// Adds the products of a pair with the tiles from `first_tile` to `sums`.
fn add_codes<S: MultiplyChunk<T>, F: Format, const T: usize>(
    set: S,
    chunk: &mut Chunk,
    sums: &mut [Sums<T>],
    pair: Pair<'_>,
    quantised: QuantisedTiles<'_>,
    first_tile: usize,
) {
    let (layout, format) = (F::LAYOUT, PhantomData::<F>);
    let n_blocks = pair.n_in / BLOCK;
    let chunk_lines = CHUNK_BLOCKS * BLOCK / layout.unit * layout.unit_lines(layout.unit);
    sums.fill([[Register::ZERO; T]; PAIR]);
    for (index, first) in (0..n_blocks).step_by(CHUNK_BLOCKS).enumerate() {
        let blocks = first..n_blocks.min(first + CHUNK_BLOCKS);
        for (p, panel) in pair.panels.iter().enumerate() {
            let lines = &panel[index * chunk_lines..panel.len().min((index + 1) * chunk_lines)];
            let centred = S::CENTRED;
            set.vectors().run(Unpack { lines, n_blocks: blocks.len(), p, centred, chunk, format });
        }
        set.arrange(&mut chunk.codes[..blocks.len()]);
        let tiles = (first_tile..).map(|tile| quantised.tile(tile).blocks(blocks.clone()));
        set.multiply_chunk::<F>(chunk, sums.iter_mut().zip(tiles));
    }
}

fn multiply_floats<S: Simd, const T: usize>(
    simd: S,
    workspace: &mut Workspace,
    pair: Pair<'_>,
    floats: FloatTiles<'_>,
    rows: Range<usize>,
    put: impl FnMut(Range<usize>, [&mut [Register]; PAIR]),
) {
    let sums = in_tiles::<T>(&mut workspace.sums, rows.len());
    let chunk = &mut workspace.float_chunk;
    with_values!(pair.dtype, V => add_floats::<S, V, T>(simd, chunk, sums, pair, floats, rows.start / T));
    put_sums(sums, rows, put);
}

/// Adds the products of a pair with the tiles from `first_tile` to `sums`.
fn add_floats<S: Simd, V: Values, const T: usize>(
    simd: S,
    chunk: &mut FloatChunk,
    sums: &mut [Sums<T>],
    pair: Pair<'_>,
    floats: FloatTiles<'_>,
    first_tile: usize,
) {
    sums.fill([[Register::ZERO; T]; PAIR]);
    for first in (0..pair.n_in).step_by(CHUNK_COLS) {
        let cols = first..pair.n_in.min(first + CHUNK_COLS);
        for (p, panel) in pair.panels.iter().enumerate() {
            let lines = &panel[first / V::PER_LINE..cols.end.div_ceil(V::PER_LINE)];
            simd.run(UnpackFloats { lines, n_cols: cols.len(), p, chunk, values: PhantomData::<V> });
        }
        for (tile, sums) in (first_tile..).zip(sums.iter_mut()) {
            let x = &floats.tile(tile)[cols.clone()];
            simd.run(MultiplyFloats { chunk, x, sums });
        }
    }
}

/// As [`multiply`], in bf16 with tiles of `T` rows: `add` adds the products of a chunk with these blocks of each tile to its sums.
pub(super) fn multiply_halves<S: Simd, const T: usize>(
    simd: S,
    workspace: &mut Workspace,
    pair: Pair<'_>,
    rows: Range<usize>,
    mut add: impl FnMut(&mut [HalvesPanels], &mut [Sums<T>], Range<usize>),
    put: impl FnMut(Range<usize>, [&mut [Register]; PAIR]),
) {
    let Workspace { chunk, float_chunk, halves: panels, sums } = workspace;
    let sums = in_tiles::<T>(sums, rows.len());
    sums.fill([[Register::ZERO; T]; PAIR]);
    let n_blocks = pair.n_in.div_ceil(BLOCK);
    for first in (0..n_blocks).step_by(CHUNK_BLOCKS) {
        let blocks = first..n_blocks.min(first + CHUNK_BLOCKS);
        let panels = &mut panels[..blocks.len()];
        if is_float(pair.dtype) {
            with_values!(pair.dtype, V => floats_to_halves::<S, V>(simd, float_chunk, pair, first, panels));
        } else {
            with_format!(pair.dtype, F => codes_to_halves::<S, F>(simd, chunk, pair, first, panels));
        }
        add(panels, sums, blocks);
    }
    drop(add);
    put_sums(sums, rows, put);
}

/// Unpacks the blocks of a chunk from block `first` on, scales in them.
fn codes_to_halves<S: Simd, F: Format>(
    simd: S,
    chunk: &mut Chunk,
    pair: Pair<'_>,
    first: usize,
    halves: &mut [HalvesPanels],
) {
    let (layout, format, n_blocks) = (F::LAYOUT, PhantomData::<F>, halves.len());
    let chunk_lines = CHUNK_BLOCKS * BLOCK / layout.unit * layout.unit_lines(layout.unit);
    for (p, panel) in pair.panels.iter().enumerate() {
        let at = first / CHUNK_BLOCKS * chunk_lines;
        let lines = &panel[at..panel.len().min(at + chunk_lines)];
        simd.run(Unpack { lines, n_blocks, p, centred: true, chunk, format });
    }
    simd.run(CodesToHalves { chunk, halves, format });
}

/// Rounds the columns of a chunk from block `first` on, and zeros behind the last one.
fn floats_to_halves<S: Simd, V: Values>(
    simd: S,
    chunk: &mut FloatChunk,
    pair: Pair<'_>,
    first: usize,
    halves: &mut [HalvesPanels],
) {
    for (i, halves) in halves.chunks_mut(CHUNK_COLS / BLOCK).enumerate() {
        let first = first * BLOCK + i * CHUNK_COLS;
        let cols = first..pair.n_in.min(first + CHUNK_COLS);
        for (p, panel) in pair.panels.iter().enumerate() {
            let lines = &panel[first / V::PER_LINE..cols.end.div_ceil(V::PER_LINE)];
            simd.run(UnpackFloats { lines, n_cols: cols.len(), p, chunk, values: PhantomData::<V> });
        }
        chunk[cols.len()..].fill([Register::ZERO; PAIR]);
        simd.run(FloatsToHalves { chunk, halves });
    }
}

fn put_sums<const T: usize>(
    sums: &mut [Sums<T>],
    rows: Range<usize>,
    mut put: impl FnMut(Range<usize>, [&mut [Register]; PAIR]),
) {
    for (first, sums) in rows.clone().step_by(T).zip(sums) {
        let rows = first..rows.end.min(first + T);
        put(rows.clone(), sums.each_mut().map(|sums| &mut sums[..rows.len()]));
    }
}
