//! The forms in which kernels read the input of a product.

use kvant_codec::DType;

use super::bf16::Bf16Rows;
use super::floats::Floats;
use super::gemm::Tiles;
use super::gemv;
use super::kernel_set::{KernelSet, with_set};
use super::matrix::uses_panels;
use super::partition::MIN_PARALLEL_VALUES;
use super::product::Operand;
use super::quantize::Quantized;
use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::ops::norm::rms_norm;
use crate::simd::isa::Isa;
use crate::simd::matmul::Simd;
use crate::simd::matmul::format::{has_halves, is_float, is_rotated};

/// The form of the input for a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InputForm {
    /// Unchanged.
    Rows,
    /// Tiles of f32.
    Floats,
    /// Tiles in 8 bits.
    Codes,
    /// Tiles in 8 bits, rotated.
    Rotated,
    /// Tiles in bf16.
    Halves,
    /// Tiles in bf16, rotated.
    RotatedHalves,
}

impl InputForm {
    pub fn of(isa: Isa, dtype: DType) -> Self {
        match dtype {
            _ if !uses_panels(isa) => Self::Rows,
            dtype if is_float(dtype) => Self::Floats,
            dtype if is_rotated(dtype) => Self::Rotated,
            _ => Self::Codes,
        }
    }

    /// Returns the form for a run whose GEMMs are in bf16, or not.
    pub fn of_run(isa: Isa, dtype: DType, in_halves: bool) -> Self {
        match dtype {
            dtype if !in_halves || !has_halves(dtype, isa.has_matrix_unit()) => Self::of(isa, dtype),
            dtype if is_rotated(dtype) => Self::RotatedHalves,
            _ => Self::Halves,
        }
    }
}

/// The input in the forms that kernels require.
#[derive(Default)]
pub(super) struct Forms {
    pub quantized: Quantized,
    pub rotated: Quantized,
    pub floats: Floats,
    /// In bf16, unrotated and rotated.
    pub halves: [Bf16Rows; 2],
}

impl Forms {
    /// Returns tiles of 8-bit codes and of f32, each given by its first row and its rows per tile.
    pub fn tiles(&self, [codes, floats]: [(usize, usize); 2]) -> Tiles<'_> {
        Tiles {
            quantized: self.quantized.tiles(codes.0, codes.1),
            rotated: self.rotated.tiles(codes.0, codes.1),
            floats: self.floats.tiles(floats.0, floats.1),
            halves: None,
        }
    }
}

/// Returns the rows of a tile for `rows` input rows, in the set that
/// [`of_rows`](super::kernel_set::of_rows) returns.
pub(super) fn tile_rows(isa: Isa, rows: usize, is_float: bool) -> usize {
    fn blocked<S: KernelSet>(_: S, is_float: bool) -> usize {
        if is_float { S::Simd::FLOAT_TILE } else { S::TILE }
    }
    match rows {
        _ if !uses_panels(isa) => 1,
        0..=2 => rows.max(1),
        3..=4 => 4,
        5..=6 => 6,
        7..=gemv::MAX_ROWS => gemv::MAX_ROWS,
        _ => {
            with_set!(isa, set => blocked(set, is_float), _ => unreachable!("{} reads file rows", isa.name()))
        }
    }
}

/// Returns the rows of the operand, normalized into `normed` when a norm is given.
pub(super) fn normalize<'a>(pool: &Pool, normed: &'a mut Vec<f32>, input: Operand<'a>) -> &'a [f32] {
    let Some((weight, eps)) = input.norm else { return input.x };
    let (n_in, rows) = (input.n_in, input.rows());
    if normed.len() < input.x.len() {
        normed.resize(input.x.len(), 0.0);
    }
    let out = DisjointMut::new(normed);
    let job = |r: usize| {
        let row = r * n_in..(r + 1) * n_in;
        // SAFETY: one call of this job writes each row.
        rms_norm(&input.x[row.clone()], weight, eps, unsafe { out.part(row) });
    };
    if rows * n_in < MIN_PARALLEL_VALUES {
        (0..rows).for_each(job);
    } else {
        pool.for_each(rows, &job);
    }
    &normed[..input.x.len()]
}
