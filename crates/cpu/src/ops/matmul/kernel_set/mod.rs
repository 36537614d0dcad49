//! Kernel sets as matmul dispatch sees them: vectors, and perhaps a matrix unit for GEMMs of codes.
//!
//! A set multiplies one chunk. The loops over chunks ([`gemm`](super::gemm)) are written once, as a
//! [`CodesLoop`] and a [`Bf16Loop`], and each set runs them with tiles of its own size.

pub(super) mod amx;
#[cfg(target_arch = "aarch64")]
pub(super) mod i8mm;
mod select;
mod vectors;

use std::iter::StepBy;
use std::ops::Range;
use std::slice;

use super::bf16::HalvesTiles;
use super::kernels::{BlockCodes, Chunk, HalvesPanels, Sums};
use super::quantize::Tile;
use crate::simd::matmul::Simd;
use crate::simd::matmul::format::WeightFormat;

pub(super) use select::{of_rows, with_set};

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

    /// Runs `gemm` with tiles of [`KernelSet::TILE`] rows.
    fn multiply_codes(self, gemm: impl CodesLoop);

    /// Runs `gemm` on the rows `rows` of `halves`, in sets with bf16 products; other sets receive
    /// no activations in bf16.
    fn multiply_halves(self, gemm: impl Bf16Loop, halves: HalvesTiles<'_>, rows: Range<usize>);
}

/// The loop of a GEMM of codes, for tiles of any number of rows.
pub(super) trait CodesLoop {
    /// Runs the loop with tiles of `T` rows.
    fn run<S: MultiplyChunk<T>, const T: usize>(self, set: S);
}

/// The loop of a GEMM in bf16, for tiles of any number of rows.
pub(super) trait Bf16Loop {
    /// Runs the loop with tiles of `T` rows: `add` adds the products of a chunk with these blocks
    /// of each tile to its sums.
    fn run<const T: usize>(self, add: impl FnMut(&mut [HalvesPanels], OfPair<'_, T>, Range<usize>));
}

/// The sums of one pair of panels, tile by tile.
pub(super) type OfPair<'a, const T: usize> = StepBy<slice::IterMut<'a, Sums<T>>>;

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
