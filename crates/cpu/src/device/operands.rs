//! Operands of the ops as slices.

use kvant_backend::{Input, Norm, StateBatchEntry};

use super::CpuDevice;
use crate::host::buffer::CpuBuffer;
use crate::host::page::CpuPage;
use crate::ops::matmul::Operand;

/// Returns the rows of `input`, which have `n_in` columns.
pub(super) fn operand<'a>(input: &Input<'a, CpuDevice>, n_in: usize) -> Operand<'a> {
    let x = &input.x.as_slice()[input.first_row * n_in..][..input.rows * n_in];
    Operand { x, n_in, norm: input.norm.map(norm_parts) }
}

/// Returns the weight and eps of a norm.
pub(super) fn norm_parts(norm: Norm<'_, CpuBuffer>) -> (&[f32], f32) {
    (norm.weight.as_slice(), norm.eps)
}

/// Returns the values of a state.
pub(super) fn state_of<'a>(part: &'a mut StateBatchEntry<'_, CpuPage>) -> &'a mut [f32] {
    let bytes = part.n_values * size_of::<f32>();
    bytemuck::cast_slice_mut(&mut part.page.as_mut_bytes()[part.offset..][..bytes])
}
