//! GEMV for few rows: reads every panel once, strictly in order, and multiplies it with all rows.

use std::marker::PhantomData;
use std::ops::Range;

use kvant_codec::DType;

use super::gemm::Tiles;
use super::kernels::{Gemv, GemvFloats, Register};
use super::matrix::CpuMatrix;
use super::outputs::Outputs;
use crate::simd::matmul::Simd;
use crate::simd::matmul::format::{PANEL, is_float, with_format, with_values};

/// Maximum rows that are multiplied together.
pub(super) const MAX_ROWS: usize = 8;
/// Registers of sums that hide the latency of additions. A sum takes one column after the other, so
/// that its bits do not depend on the number of rows; where one float panel has fewer sums, several
/// panels are multiplied side by side.
const SUMS: usize = 8;
/// Panels of codes that are multiplied before those of their gate: short alternation between two
/// memory regions is slower than one after the other (by a fifth on Zen 4).
const RUN: usize = 8;

/// Computes `outputs` for all rows of the input, and prefetches weights `prefetch_distance` bytes
/// before their use.
pub(super) fn multiply<S: Simd>(
    simd: S,
    outputs: Outputs<'_, '_>,
    tiles: Tiles<'_>,
    prefetch_distance: usize,
) {
    match outputs.rows.len() {
        1 => multiply_tile::<S, 1>(simd, outputs, tiles, prefetch_distance),
        2 => multiply_tile::<S, 2>(simd, outputs, tiles, prefetch_distance),
        3..=4 => multiply_tile::<S, 4>(simd, outputs, tiles, prefetch_distance),
        5..=6 => multiply_tile::<S, 6>(simd, outputs, tiles, prefetch_distance),
        _ => multiply_tile::<S, MAX_ROWS>(simd, outputs, tiles, prefetch_distance),
    }
}

fn multiply_tile<S: Simd, const T: usize>(
    simd: S,
    mut outputs: Outputs<'_, '_>,
    tiles: Tiles<'_>,
    prefetch_distance: usize,
) {
    let mut rest = outputs.panels.clone();
    while !rest.is_empty() {
        let (first, outputs) = (rest.start, &mut outputs);
        rest.start += if is_float(outputs.product.w.dtype) {
            match (SUMS / (T * S::PARTS)).min(rest.len()) {
                4.. => multiply_floats::<S, 4, T>(simd, outputs, first, tiles, prefetch_distance),
                2.. => multiply_floats::<S, 2, T>(simd, outputs, first, tiles, prefetch_distance),
                _ => multiply_floats::<S, 1, T>(simd, outputs, first, tiles, prefetch_distance),
            }
        } else {
            let panels = first..first + RUN.min(rest.len());
            multiply_codes::<S, T>(simd, outputs, panels, tiles, prefetch_distance)
        };
    }
}

/// Computes the outputs of `P` panels of floats side by side, from panel `first`, and returns `P`.
fn multiply_floats<S: Simd, const P: usize, const T: usize>(
    simd: S,
    outputs: &mut Outputs<'_, '_>,
    first: usize,
    tiles: Tiles<'_>,
    prefetch_distance: usize,
) -> usize {
    let panels = first..first + P;
    let product = |w: &CpuMatrix| -> [[Register; T]; P] {
        let (lines, x) = (w.panels(panels.clone()), tiles.floats.tile(0));
        with_values!(w.dtype, V => {
            simd.run(GemvFloats::<V, P, T> { panels: lines, x, prefetch_distance, values: PhantomData })
        })
    };
    let mut sums = product(outputs.product.w);
    let mut gates = outputs.product.gate.map(|gating| product(gating.w));
    finish(simd, outputs, first, &mut sums, gates.as_mut().map(|gates| &mut gates[..]));
    P
}

/// Computes the outputs of at most [`RUN`] panels of codes one after the other, and returns how
/// many.
fn multiply_codes<S: Simd, const T: usize>(
    simd: S,
    outputs: &mut Outputs<'_, '_>,
    panels: Range<usize>,
    tiles: Tiles<'_>,
    prefetch_distance: usize,
) -> usize {
    let product = |w: &CpuMatrix| {
        let (mut sums, tile) = ([[Register::ZERO; T]; RUN], tiles.codes(w.dtype).tile(0));
        for (panel, sums) in panels.clone().zip(&mut sums) {
            let panel = w.panels(panel..panel + 1);
            *sums = with_format!(w.dtype, F => simd.run(Gemv::<F, T> { panel, tile, prefetch_distance, format: PhantomData }));
        }
        sums
    };
    let mut sums = product(outputs.product.w);
    let mut gates = outputs.product.gate.map(|gating| product(gating.w));
    let n = panels.len();
    finish(simd, outputs, panels.start, &mut sums[..n], gates.as_mut().map(|gates| &mut gates[..n]));
    n
}

/// Gates the sums of panels from `first` on, if they have gates, and writes them to the outputs.
fn finish<S: Simd, const T: usize>(
    simd: S,
    outputs: &mut Outputs<'_, '_>,
    first: usize,
    sums: &mut [[Register; T]],
    gates: Option<&mut [[Register; T]]>,
) {
    if let (Some(gating), Some(gates)) = (outputs.product.gate, gates) {
        for (panel, (gates, sums)) in (first..).zip(gates.iter_mut().zip(&mut *sums)) {
            gating.apply(simd, panel, gates, sums);
        }
    }
    for (panel, sums) in (first..).zip(&*sums) {
        for (row, sums) in outputs.rows.clone().zip(sums) {
            outputs.put(row, panel * PANEL, &sums.0);
        }
    }
}
