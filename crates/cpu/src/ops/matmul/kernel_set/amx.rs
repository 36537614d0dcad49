//! The kernel sets with a matrix unit.

use std::marker::PhantomData;
use std::ops::Range;

use super::{Bf16Loop, CodesLoop, KernelSet, MultiplyChunk, OfPair};
use crate::ops::matmul::bf16::HalvesTiles;
use crate::ops::matmul::kernels::{Chunk, HalvesPanels, MultiplyTiles, Sums, multiply_bf16, subs};
use crate::ops::matmul::quantize::Tile;
use crate::simd::matmul::Simd;
use crate::simd::matmul::format::{GROUPS, WeightFormat};
use crate::simd::matrix_unit::{MAX_WORDS, ROWS, Unit};

/// A kernel set: a matrix unit for GEMMs of codes, and vectors for everything else.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::matmul) struct AmxKernels<S, U> {
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

    fn multiply_codes(self, gemm: impl CodesLoop) {
        gemm.run::<Self, ROWS>(self);
    }

    fn multiply_halves(self, gemm: impl Bf16Loop, halves: HalvesTiles<'_>, rows: Range<usize>) {
        let mut unit = self.unit.open(MAX_WORDS);
        let first = rows.start / ROWS;
        let add = move |chunk: &mut [HalvesPanels], sums: OfPair<'_, ROWS>, blocks: Range<usize>| {
            let tiles = (first..).map(|tile| &halves.tile(tile)[blocks.clone()]);
            multiply_bf16(&mut unit, chunk, sums.zip(tiles));
        };
        gemm.run(add);
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
