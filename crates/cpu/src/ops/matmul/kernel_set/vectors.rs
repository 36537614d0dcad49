//! The kernel sets of vectors: every [`Simd`] is one.

use std::marker::PhantomData;
use std::ops::Range;

use super::{Bf16Loop, CodesLoop, KernelSet, MultiplyChunk};
use crate::ops::matmul::bf16::HalvesTiles;
use crate::ops::matmul::kernels::{Chunk, Multiply, Sums};
use crate::ops::matmul::quantize::Tile;
use crate::simd::matmul::Simd;
use crate::simd::matmul::format::WeightFormat;

/// Rows of a tile of quantized activations in a GEMM of vectors: with [`Simd::across`], as many
/// sums as registers hold beside the operands.
const VECTOR_TILE: usize = 6;

impl<S: Simd> KernelSet for S {
    type Simd = S;

    const TILE: usize = VECTOR_TILE;
    const CENTRED: bool = false;

    fn vectors(self) -> S {
        self
    }

    fn multiply_codes(self, gemm: impl CodesLoop) {
        gemm.run::<S, VECTOR_TILE>(self);
    }

    fn multiply_halves(self, _: impl Bf16Loop, _: HalvesTiles<'_>, _: Range<usize>) {
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
