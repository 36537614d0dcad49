//! Kernel sets as matmul dispatch sees them: vectors, and perhaps a matrix unit for GEMMs of codes.

use std::marker::PhantomData;
use std::ops::Range;

use super::bf16::HalvesTiles;
use super::gemm::{OfPair, Pairs, Tiles, Workspace, multiply_codes, multiply_halves};
#[cfg(target_arch = "aarch64")]
use super::kernels::{ArrangeBf16, ArrangeI8mm, MultiplyBfmmla, MultiplyI8mm, SQUARES_TILE};
use super::kernels::{
    BlockCodes, Chunk, HalvesPanels, Multiply, MultiplyTiles, Register, Sums,
    multiply_bf16 as multiply_halves_chunk, subs,
};
use super::quantize::Tile;
use crate::simd::matmul::Simd;
use crate::simd::matmul::format::{GROUPS, WeightFormat};
use crate::simd::matrix_unit::{MAX_WORDS, ROWS, Unit};
#[cfg(target_arch = "aarch64")]
use crate::simd::vec128::{Quad, Quads};

/// Rows of a tile of quantized activations in a GEMM of vectors: with [`Simd::across`], as many
/// sums as registers hold beside the operands.
const VECTOR_TILE: usize = 6;

/// A kernel set.
pub(super) trait KernelSet: Copy + Send + Sync {
    /// Its vectors.
    type Simd: Simd;

    /// Rows of a tile of quantized activations in a GEMM.
    const TILE: usize;
    /// Whether chunks are [centred](super::kernels::Unpack).
    const CENTRED: bool;
    /// Whether large results are written with non-temporal stores.
    const NON_TEMPORAL: bool = false;

    fn vectors(self) -> Self::Simd;

    /// Does the work of [`gemm::multiply`](super::gemm::multiply) for coded panels.
    fn multiply_codes(
        self,
        workspace: &mut Workspace,
        pairs: Pairs<'_>,
        tiles: Tiles<'_>,
        rows: Range<usize>,
        put: impl FnMut(Range<usize>, &mut [Register]),
    );

    /// Does the same in bf16, in sets with bf16 products; other sets receive no activations in
    /// bf16.
    fn multiply_halves(
        self,
        workspace: &mut Workspace,
        pairs: Pairs<'_>,
        halves: HalvesTiles<'_>,
        rows: Range<usize>,
        put: impl FnMut(Range<usize>, &mut [Register]),
    );
}

/// Multiplies a chunk with tiles of `T` rows.
pub(super) trait MultiplyChunk<const T: usize>: KernelSet {
    /// Arranges the codes of a chunk's blocks for its products.
    fn arrange(self, codes: &mut [BlockCodes]) {
        let _ = codes;
    }

    /// Adds the products of a chunk with tiles of as many blocks to the sums of each.
    fn multiply_chunk<'a, F: WeightFormat>(
        self,
        chunk: &Chunk,
        tiles: impl Iterator<Item = (&'a mut Sums<T>, Tile<'a, T>)>,
    );
}

impl<S: Simd> KernelSet for S {
    type Simd = S;

    const TILE: usize = VECTOR_TILE;
    const CENTRED: bool = false;

    fn vectors(self) -> S {
        self
    }

    fn multiply_codes(
        self,
        workspace: &mut Workspace,
        pairs: Pairs<'_>,
        tiles: Tiles<'_>,
        rows: Range<usize>,
        put: impl FnMut(Range<usize>, &mut [Register]),
    ) {
        multiply_codes::<S, VECTOR_TILE>(self, workspace, pairs, tiles, rows, put);
    }

    fn multiply_halves(
        self,
        _: &mut Workspace,
        _: Pairs<'_>,
        _: HalvesTiles<'_>,
        _: Range<usize>,
        _: impl FnMut(Range<usize>, &mut [Register]),
    ) {
        unreachable!("vector sets receive no activations in bf16");
    }
}

impl<S: Simd> MultiplyChunk<VECTOR_TILE> for S {
    fn multiply_chunk<'a, F: WeightFormat>(
        self,
        chunk: &Chunk,
        tiles: impl Iterator<Item = (&'a mut Sums<VECTOR_TILE>, Tile<'a, VECTOR_TILE>)>,
    ) {
        for (sums, tile) in tiles {
            self.run(Multiply { chunk, tile, sums, format: PhantomData::<F> });
        }
    }
}

/// A kernel set: 2x2 matrix instructions for GEMMs of codes, and for those of float panels in bf16
/// where enabled and supported; the vectors of [`Neon`](crate::simd::isa::Neon) for everything else.
#[cfg(target_arch = "aarch64")]
#[derive(Debug, Clone, Copy)]
pub(super) struct I8mmKernels {
    pub bytes: crate::simd::isa::I8mm,
    pub halves: Option<crate::simd::isa::Bf16>,
}

#[cfg(target_arch = "aarch64")]
impl KernelSet for I8mmKernels {
    type Simd = Quads<crate::simd::isa::Neon>;

    const TILE: usize = SQUARES_TILE;
    const CENTRED: bool = true;

    fn vectors(self) -> Self::Simd {
        Quads(self.bytes.into())
    }

    fn multiply_codes(
        self,
        workspace: &mut Workspace,
        pairs: Pairs<'_>,
        tiles: Tiles<'_>,
        rows: Range<usize>,
        put: impl FnMut(Range<usize>, &mut [Register]),
    ) {
        multiply_codes::<Self, SQUARES_TILE>(self, workspace, pairs, tiles, rows, put);
    }

    fn multiply_halves(
        self,
        workspace: &mut Workspace,
        pairs: Pairs<'_>,
        halves: HalvesTiles<'_>,
        rows: Range<usize>,
        put: impl FnMut(Range<usize>, &mut [Register]),
    ) {
        let quad = self.halves.expect("a set that multiplies bf16");
        // A partial tile repeats its last two rows for the missing ones; their sums are not read.
        let last = (rows.end - 1) / 2 * 2;
        let add = |chunk: &mut [HalvesPanels], sums: OfPair<'_, SQUARES_TILE>, blocks: Range<usize>| {
            quad.run(ArrangeBf16 { quad, chunk });
            for (first, sums) in rows.clone().step_by(SQUARES_TILE).zip(sums) {
                let rows = [first, first + 2, first + 4].map(|row| {
                    let row = row.min(last);
                    (&halves.tile(row / ROWS)[blocks.clone()], row % ROWS)
                });
                quad.run(MultiplyBfmmla { quad, chunk, rows, sums });
            }
        };
        multiply_halves(self.vectors(), workspace, pairs, rows.clone(), add, put);
    }
}

#[cfg(target_arch = "aarch64")]
impl MultiplyChunk<SQUARES_TILE> for I8mmKernels {
    fn arrange(self, codes: &mut [BlockCodes]) {
        self.bytes.run(ArrangeI8mm { quad: self.bytes, codes });
    }

    fn multiply_chunk<'a, F: WeightFormat>(
        self,
        chunk: &Chunk,
        tiles: impl Iterator<Item = (&'a mut Sums<SQUARES_TILE>, Tile<'a, SQUARES_TILE>)>,
    ) {
        for (sums, tile) in tiles {
            self.bytes.run(MultiplyI8mm { quad: self.bytes, chunk, tile, sums, format: PhantomData::<F> });
        }
    }
}

/// A kernel set: a matrix unit for GEMMs of codes, and vectors for everything else.
#[derive(Debug, Clone, Copy)]
pub(super) struct AmxKernels<S, U> {
    pub vectors: S,
    pub unit: U,
}

impl<S: Simd, U: Unit> KernelSet for AmxKernels<S, U> {
    type Simd = S;

    const TILE: usize = ROWS;
    const CENTRED: bool = true;
    /// A written line would be read from memory first, and the CPUs with such a unit are far from
    /// their last-level cache: 3 to 6 % of a layer (docs/benchmarks/2026-11-25-amx.md).
    const NON_TEMPORAL: bool = true;

    fn vectors(self) -> S {
        self.vectors
    }

    fn multiply_codes(
        self,
        workspace: &mut Workspace,
        pairs: Pairs<'_>,
        tiles: Tiles<'_>,
        rows: Range<usize>,
        put: impl FnMut(Range<usize>, &mut [Register]),
    ) {
        multiply_codes::<Self, ROWS>(self, workspace, pairs, tiles, rows, put);
    }

    fn multiply_halves(
        self,
        workspace: &mut Workspace,
        pairs: Pairs<'_>,
        halves: HalvesTiles<'_>,
        rows: Range<usize>,
        put: impl FnMut(Range<usize>, &mut [Register]),
    ) {
        let mut unit = self.unit.open(MAX_WORDS);
        let first = rows.start / ROWS;
        let add = move |chunk: &mut [HalvesPanels], sums: OfPair<'_, ROWS>, blocks: Range<usize>| {
            let tiles = (first..).map(|tile| &halves.tile(tile)[blocks.clone()]);
            multiply_halves_chunk(&mut unit, chunk, sums.zip(tiles));
        };
        multiply_halves(self.vectors, workspace, pairs, rows, add, put);
    }
}

impl<S: Simd, U: Unit> MultiplyChunk<ROWS> for AmxKernels<S, U> {
    fn multiply_chunk<'a, F: WeightFormat>(
        self,
        chunk: &Chunk,
        tiles: impl Iterator<Item = (&'a mut Sums<ROWS>, Tile<'a, ROWS>)>,
    ) {
        let unit = &mut self.unit.open(GROUPS / subs::<F>());
        for (sums, tile) in tiles {
            self.vectors.run(MultiplyTiles { unit, chunk, tile, sums, format: PhantomData::<F> });
        }
    }
}
