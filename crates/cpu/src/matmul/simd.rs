//! The kernels that a vector instruction set brings for panels.

use super::gemm::{Chunk, FLOAT_TILE, FloatChunk, Sums, TILE};
use super::panel::{Format, Line, PANEL, Values};
use super::quantise::Tile;

/// A capability token with panel kernels. Every product is that of the equation in [`super`], with activations as the
/// tile gives them. Sums are in f32, one for each row of weights and of activations, and take the columns in their order: so a
/// row's bits do not depend on the rows that are multiplied with it.
pub(super) trait Simd: Copy + Sync {
    /// Registers that sixteen floats fill.
    const PARTS: usize;

    /// Products of one coded panel with one tile: one value for each row of the tile and of the panel. Asks for what lies
    /// `ahead` bytes further in memory, unless that is 0.
    fn gemv<F: Format, const T: usize>(
        self,
        panel: &[Line],
        tile: Tile<'_, T>,
        ahead: usize,
    ) -> [[f32; PANEL]; T];

    /// Unpacks `n_blocks` blocks from `lines`, which start at a unit, as panel `p` of a chunk.
    fn unpack<F: Format>(self, lines: &[Line], n_blocks: usize, p: usize, chunk: &mut Chunk);

    /// Adds the products of a chunk of format `F` with a tile of as many blocks to `sums`.
    fn multiply<F: Format>(self, chunk: &Chunk, tile: Tile<'_, TILE>, sums: &mut Sums<TILE>);

    /// Products of `P` float panels, one after the other, with one tile `[n_in]`; `ahead` as in [`Simd::gemv`].
    fn gemv_floats<V: Values, const P: usize, const T: usize>(
        self,
        panels: &[Line],
        x: &[[f32; T]],
        ahead: usize,
    ) -> [[[f32; PANEL]; T]; P];

    /// Widens `n_cols` columns from `lines` as panel `p` of a chunk.
    fn unpack_floats<V: Values>(self, lines: &[Line], n_cols: usize, p: usize, chunk: &mut FloatChunk);

    /// Adds the products of the first columns of a chunk with a tile of as many columns to `sums`.
    fn multiply_floats(self, chunk: &FloatChunk, x: &[[f32; FLOAT_TILE]], sums: &mut Sums<FLOAT_TILE>);

    /// `u *= silu(g)` for each value.
    fn gate(self, g: &[f32; PANEL], u: &mut [f32; PANEL]);
}

/// Implements [`Simd`] for a token by the functions of a module, which need no more than the token proves.
#[cfg(target_arch = "x86_64")]
macro_rules! simd {
    ($token:ty, $kernels:ident, $parts:literal) => {
        impl Simd for $token {
            const PARTS: usize = $parts;

            fn gemv<F: Format, const T: usize>(
                self,
                panel: &[Line],
                tile: Tile<'_, T>,
                ahead: usize,
            ) -> [[f32; PANEL]; T] {
                // SAFETY: the token proves the features that the kernel is compiled for.
                unsafe { $kernels::gemv::<F, T>(panel, tile, ahead) }
            }

            fn unpack<F: Format>(self, lines: &[Line], n_blocks: usize, p: usize, chunk: &mut Chunk) {
                // SAFETY: as above.
                unsafe { $kernels::unpack_chunk::<F>(lines, n_blocks, p, chunk) }
            }

            fn multiply<F: Format>(self, chunk: &Chunk, tile: Tile<'_, TILE>, sums: &mut Sums<TILE>) {
                // SAFETY: as above.
                unsafe { $kernels::multiply::<F>(chunk, tile, sums) }
            }

            fn gemv_floats<V: Values, const P: usize, const T: usize>(
                self,
                panels: &[Line],
                x: &[[f32; T]],
                ahead: usize,
            ) -> [[[f32; PANEL]; T]; P] {
                // SAFETY: as above.
                unsafe { $kernels::gemv_floats::<V, P, T>(panels, x, ahead) }
            }

            fn unpack_floats<V: Values>(
                self,
                lines: &[Line],
                n_cols: usize,
                p: usize,
                chunk: &mut FloatChunk,
            ) {
                // SAFETY: as above.
                unsafe { $kernels::unpack_floats::<V>(lines, n_cols, p, chunk) }
            }

            fn multiply_floats(
                self,
                chunk: &FloatChunk,
                x: &[[f32; FLOAT_TILE]],
                sums: &mut Sums<FLOAT_TILE>,
            ) {
                // SAFETY: as above.
                unsafe { $kernels::multiply_floats(chunk, x, sums) }
            }

            fn gate(self, g: &[f32; PANEL], u: &mut [f32; PANEL]) {
                // SAFETY: as above.
                unsafe { $kernels::gate(g, u) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::isa::{Avx2, Avx512, AvxVnni};
    use crate::matmul::panel::{avx_vnni, avx2, avx512};

    simd!(Avx2, avx2, 2);
    simd!(AvxVnni, avx_vnni, 2);
    simd!(Avx512, avx512, 1);
}
