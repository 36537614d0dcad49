//! Few rows: every panel is read once, strictly in order, and multiplied with all rows.

use std::marker::PhantomData;

use kvant_codec::DType;

use super::gemm::Tiles;
use super::kernels::{Gemv, GemvFloats, Register};
use super::outputs::Outputs;
use super::panel::{Line, PANEL, is_float, split, with_format, with_values};
use super::simd::Simd;

/// The most rows that are multiplied together.
pub(super) const MAX_ROWS: usize = 8;
/// Registers of sums that keep the adders busy. A sum takes one column after the other, so that its bits do not depend on the
/// number of rows; where the sums of one float panel are fewer, several panels are multiplied side by side.
const SUMS: usize = 8;

/// Computes `outputs` for all rows of the input, asking for weights `ahead` bytes before their use.
pub(super) fn multiply<S: Simd>(simd: S, outputs: Outputs<'_, '_>, tiles: Tiles<'_>, ahead: usize) {
    match outputs.rows.len() {
        1 => multiply_tile::<S, 1>(simd, outputs, tiles, ahead),
        2 => multiply_tile::<S, 2>(simd, outputs, tiles, ahead),
        3..=4 => multiply_tile::<S, 4>(simd, outputs, tiles, ahead),
        5..=6 => multiply_tile::<S, 6>(simd, outputs, tiles, ahead),
        _ => multiply_tile::<S, MAX_ROWS>(simd, outputs, tiles, ahead),
    }
}

fn multiply_tile<S: Simd, const T: usize>(
    simd: S,
    mut outputs: Outputs<'_, '_>,
    tiles: Tiles<'_>,
    ahead: usize,
) {
    let mut rest = outputs.panels.clone();
    while !rest.is_empty() {
        let wanted = if is_float(outputs.product.w.dtype) { SUMS / (T * S::PARTS) } else { 1 };
        let (first, outputs) = (rest.start, &mut outputs);
        rest.start += match wanted.min(rest.len()) {
            4.. => multiply_group::<S, 4, T>(simd, outputs, first, tiles, ahead),
            2.. => multiply_group::<S, 2, T>(simd, outputs, first, tiles, ahead),
            _ => multiply_group::<S, 1, T>(simd, outputs, first, tiles, ahead),
        };
    }
}

/// Computes the outputs of `P` panels side by side, from panel `first`, and returns `P`.
fn multiply_group<S: Simd, const P: usize, const T: usize>(
    simd: S,
    outputs: &mut Outputs<'_, '_>,
    first: usize,
    tiles: Tiles<'_>,
    ahead: usize,
) -> usize {
    let (w, panels) = (outputs.product.w, first..first + P);
    let mut sums = group_sums::<S, P, T>(simd, w.dtype, w.panels(panels.clone()), tiles, ahead);
    if let Some(gating) = outputs.product.gate {
        let gates = group_sums::<S, P, T>(simd, w.dtype, gating.w.panels(panels.clone()), tiles, ahead);
        for (panel, (mut gates, sums)) in panels.zip(gates.into_iter().zip(&mut sums)) {
            gating.apply(simd, panel, &mut gates, sums);
        }
    }
    for (panel, sums) in (first..).zip(&sums) {
        for (row, sums) in outputs.rows.clone().zip(sums) {
            outputs.put(row, panel * PANEL, &sums.0);
        }
    }
    P
}

fn group_sums<S: Simd, const P: usize, const T: usize>(
    simd: S,
    dtype: DType,
    lines: &[Line],
    tiles: Tiles<'_>,
    ahead: usize,
) -> [[Register; T]; P] {
    if is_float(dtype) {
        let x = tiles.floats.tile(0);
        return with_values!(dtype, V => {
            simd.run(GemvFloats::<V, P, T> { panels: lines, x, ahead, values: PhantomData })
        });
    }
    let tile = tiles.codes(dtype).tile(0);
    let panels = split::<P>(lines);
    with_format!(dtype, F => {
        panels.map(|panel| simd.run(Gemv::<F, T> { panel, tile, ahead, format: PhantomData }))
    })
}
