//! The kernel set of 2x2 matrix instructions.

use std::marker::PhantomData;
use std::ops::Range;

use super::{Bf16Loop, CodesLoop, KernelSet, MultiplyChunk, OfPair};
use crate::ops::matmul::bf16::HalvesTiles;
use crate::ops::matmul::kernels::{
    ArrangeBf16, ArrangeI8mm, BlockCodes, Chunk, HalvesPanels, MultiplyBfmmla, MultiplyI8mm, SQUARES_TILE,
    Sums,
};
use crate::ops::matmul::quantize::Tile;
use crate::simd::matmul::format::WeightFormat;
use crate::simd::matrix_unit::ROWS;
use crate::simd::tokens::{Bf16, I8mm, Neon};
use crate::simd::vec128::{Quad, Quads};

/// A kernel set: 2x2 matrix instructions for GEMMs of codes, and for those of float panels in bf16
/// where enabled and supported; the vectors of [`Neon`] for everything else.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::matmul) struct I8mmKernels {
    pub bytes: I8mm,
    pub halves: Option<Bf16>,
}

impl KernelSet for I8mmKernels {
    type Simd = Quads<Neon>;

    const TILE: usize = SQUARES_TILE;
    const CENTRED: bool = true;

    fn vectors(self) -> Self::Simd {
        Quads(self.bytes.into())
    }

    fn multiply_codes(self, gemm: impl CodesLoop) {
        gemm.run::<Self, SQUARES_TILE>(self);
    }

    fn multiply_halves(self, gemm: impl Bf16Loop, halves: HalvesTiles<'_>, rows: Range<usize>) {
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
        gemm.run(add);
    }
}

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
