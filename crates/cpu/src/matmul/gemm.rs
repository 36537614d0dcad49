//! Many rows: products blocked for the caches.
//!
//! Two panels at a time, a *chunk* of their columns is unpacked once to memory that stays in the first-level cache, and
//! every tile of a *row block* is multiplied with it. The sums of the row block wait in f32 between chunks. In the
//! innermost loop one register of codes of each panel meets one broadcast word of each of 6 rows: 12 accumulators, and
//! 8 loads for 12 products.

use std::ops::Range;

use kvant_codec::DType;

use super::floats::Floats;
use super::panel::{BLOCK, Format, GROUPS, Line, PANEL, Values, is_rotated, with_format, with_values};
use super::quantise::Quantised;
use super::simd::Simd;

/// Panels multiplied together.
pub(crate) const PAIR: usize = 2;
/// Rows of a tile of quantised activations.
pub(crate) const TILE: usize = 6;
/// Rows of a tile of f32 activations.
pub(crate) const FLOAT_TILE: usize = 12;
/// The most rows of a row block: 512, the usual micro-batch, in whole tiles of both kinds. The more rows share an unpacked
/// chunk the better; its sums (64 KiB) and a chunk of its activations (256 KiB) stay in the second-level cache.
pub(crate) const MAX_ROW_BLOCK: usize = 516;
/// Blocks of 32 columns in a chunk: whole units of every format.
const CHUNK_BLOCKS: usize = 16;
/// Columns in a chunk of floats: whole lines of every format.
const CHUNK_COLS: usize = 128;

/// One register of floats.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Register(pub [f32; PANEL]);

impl Register {
    const ZERO: Self = Self([0.0; PANEL]);
}

/// Rows of the row blocks that `rows` rows are cut into: at most `most` and what a workspace holds, for at least `least`
/// blocks where there are tiles enough.
pub(super) fn row_block(rows: usize, most: usize, least: usize) -> usize {
    let n_blocks = rows.div_ceil(most.clamp(FLOAT_TILE, MAX_ROW_BLOCK)).max(least);
    rows.div_ceil(n_blocks).next_multiple_of(FLOAT_TILE)
}

/// Codes, one to a byte, and scales of some columns of two panels.
#[derive(Clone)]
pub(crate) struct Chunk {
    /// `[block][group][panel]`.
    pub codes: [[[Line; PAIR]; GROUPS]; CHUNK_BLOCKS],
    /// `[block][sub-block][panel]`.
    pub scales: [[[Register; PAIR]; 2]; CHUNK_BLOCKS],
    /// What a minimum adds, as the scales.
    pub mins: [[[Register; PAIR]; 2]; CHUNK_BLOCKS],
}

/// Values of some columns of two panels, `[column][panel]`.
pub(crate) type FloatChunk = [[Register; PAIR]; CHUNK_COLS];

/// Sums of one tile, `[panel][row of the tile]`, with one value for each row of the panel.
pub(crate) type Sums<const T: usize> = [[Register; T]; PAIR];

/// What a thread keeps between items.
#[derive(Clone)]
pub(super) struct Workspace {
    /// Panels of weights that are not kept in panels.
    pub lent: [Vec<Line>; PAIR],
    chunk: Chunk,
    float_chunk: FloatChunk,
    sums: [Sums<TILE>; MAX_ROW_BLOCK / TILE],
    float_sums: [Sums<FLOAT_TILE>; MAX_ROW_BLOCK / FLOAT_TILE],
}

impl Workspace {
    pub const EMPTY: Self = Self {
        lent: [const { Vec::new() }; PAIR],
        chunk: Chunk {
            codes: [[[Line::ZERO; PAIR]; GROUPS]; CHUNK_BLOCKS],
            scales: [[[Register::ZERO; PAIR]; 2]; CHUNK_BLOCKS],
            mins: [[[Register::ZERO; PAIR]; 2]; CHUNK_BLOCKS],
        },
        float_chunk: [[Register::ZERO; PAIR]; CHUNK_COLS],
        sums: [[[Register::ZERO; TILE]; PAIR]; MAX_ROW_BLOCK / TILE],
        float_sums: [[[Register::ZERO; FLOAT_TILE]; PAIR]; MAX_ROW_BLOCK / FLOAT_TILE],
    };
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
    pub quantised: &'a Quantised,
    /// For the rotated formats.
    pub rotated: &'a Quantised,
    pub floats: &'a Floats,
}

impl<'a> Tiles<'a> {
    /// What coded panels of this type meet.
    pub fn codes(&self, dtype: DType) -> &'a Quantised {
        if is_rotated(dtype) { self.rotated } else { self.quantised }
    }
}

/// Multiplies `pair` with the rows `rows` (within one row block) and hands `put(row, sums of each panel)` the results.
pub(super) fn multiply<S: Simd>(
    simd: S,
    workspace: &mut Workspace,
    pair: Pair<'_>,
    tiles: Tiles<'_>,
    rows: Range<usize>,
    put: impl FnMut(usize, [&[f32; PANEL]; PAIR]),
) {
    match pair.dtype {
        dtype @ (DType::F32 | DType::F16 | DType::BF16) => {
            with_values!(dtype, V => multiply_floats::<S, V>(simd, workspace, pair, tiles.floats, &rows));
            put_sums(&workspace.float_sums, rows, put);
        }
        dtype => {
            with_format!(dtype, F => multiply_codes::<S, F>(simd, workspace, pair, tiles.codes(dtype), &rows));
            put_sums(&workspace.sums, rows, put);
        }
    }
}

fn multiply_codes<S: Simd, F: Format>(
    simd: S,
    workspace: &mut Workspace,
    pair: Pair<'_>,
    quantised: &Quantised,
    rows: &Range<usize>,
) {
    let layout = F::LAYOUT;
    let n_blocks = pair.n_in / BLOCK;
    let chunk_lines = CHUNK_BLOCKS * BLOCK / layout.unit * layout.unit_lines(layout.unit);
    let sums = &mut workspace.sums[..rows.len().div_ceil(TILE)];
    sums.fill([[Register::ZERO; TILE]; PAIR]);
    for (index, first) in (0..n_blocks).step_by(CHUNK_BLOCKS).enumerate() {
        let blocks = first..n_blocks.min(first + CHUNK_BLOCKS);
        for (p, panel) in pair.panels.iter().enumerate() {
            let lines = &panel[index * chunk_lines..panel.len().min((index + 1) * chunk_lines)];
            simd.unpack::<F>(lines, blocks.len(), p, &mut workspace.chunk);
        }
        for (t, sums) in sums.iter_mut().enumerate() {
            let tile = quantised.tile(rows.start / TILE + t).blocks(blocks.clone());
            simd.multiply::<F>(&workspace.chunk, tile, sums);
        }
    }
}

fn multiply_floats<S: Simd, V: Values>(
    simd: S,
    workspace: &mut Workspace,
    pair: Pair<'_>,
    floats: &Floats,
    rows: &Range<usize>,
) {
    let sums = &mut workspace.float_sums[..rows.len().div_ceil(FLOAT_TILE)];
    sums.fill([[Register::ZERO; FLOAT_TILE]; PAIR]);
    for first in (0..pair.n_in).step_by(CHUNK_COLS) {
        let cols = first..pair.n_in.min(first + CHUNK_COLS);
        for (p, panel) in pair.panels.iter().enumerate() {
            let lines = &panel[first / V::PER_LINE..cols.end.div_ceil(V::PER_LINE)];
            simd.unpack_floats::<V>(lines, cols.len(), p, &mut workspace.float_chunk);
        }
        for (t, sums) in sums.iter_mut().enumerate() {
            let tile = &floats.tile(rows.start / FLOAT_TILE + t)[cols.clone()];
            simd.multiply_floats(&workspace.float_chunk, tile, sums);
        }
    }
}

fn put_sums<const T: usize>(
    sums: &[Sums<T>],
    rows: Range<usize>,
    mut put: impl FnMut(usize, [&[f32; PANEL]; PAIR]),
) {
    for (i, row) in rows.enumerate() {
        let sums = &sums[i / T];
        put(row, [&sums[0][i % T].0, &sums[1][i % T].0]);
    }
}
