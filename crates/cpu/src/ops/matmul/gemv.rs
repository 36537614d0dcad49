//! GEMV for few rows: reads every panel once, strictly in order, and multiplies it with all rows.

use std::marker::PhantomData;

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

/// Calls a generic function with the rows of the smallest tile that holds `$rows`, at most
/// [`MAX_ROWS`], as the constant `$T`.
macro_rules! with_tile_rows {
    ($rows:expr, $T:ident => $body:expr) => {
        match $rows {
            1 => {
                const $T: usize = 1;
                $body
            }
            2 => {
                const $T: usize = 2;
                $body
            }
            3..=4 => {
                const $T: usize = 4;
                $body
            }
            5..=6 => {
                const $T: usize = 6;
                $body
            }
            _ => {
                const $T: usize = $crate::ops::matmul::gemv::MAX_ROWS;
                $body
            }
        }
    };
}
pub(super) use with_tile_rows;

/// Computes `outputs` for all rows of the input, one tile of `T`, and prefetches weights
/// `prefetch_distance` bytes before their use. Coded panels are multiplied one after the other.
pub(super) fn multiply<S: Simd, const T: usize>(
    simd: S,
    mut outputs: Outputs<'_, '_>,
    tiles: Tiles<'_>,
    prefetch_distance: usize,
) {
    if is_float(outputs.product.w.dtype) {
        return multiply_floats::<S, T>(simd, outputs, tiles, prefetch_distance);
    }
    let all = outputs.panels.clone();
    for first in all.clone().step_by(RUN) {
        let panels = first..all.end.min(first + RUN);
        let product = |w: &CpuMatrix| {
            let (mut sums, tile) = ([[Register::ZERO; T]; RUN], tiles.codes(w.dtype).tile(0));
            for (panel, sums) in panels.clone().zip(&mut sums) {
                let panel = w.panel(panel);
                *sums = with_format!(w.dtype, F => simd.run(Gemv::<F, T> { panel, tile, prefetch_distance, format: PhantomData }));
            }
            sums
        };
        let mut sums = product(outputs.product.w);
        let mut gates = outputs.product.gate.map(|gating| product(gating.w));
        let n = panels.len();
        finish(simd, &mut outputs, first, &mut sums[..n], gates.as_mut().map(|gates| &mut gates[..n]));
    }
}

/// Computes outputs of float panels for a tile of `T` rows.
fn multiply_floats<S: Simd, const T: usize>(
    simd: S,
    mut outputs: Outputs<'_, '_>,
    tiles: Tiles<'_>,
    prefetch_distance: usize,
) {
    let mut rest = outputs.panels.clone();
    while !rest.is_empty() {
        let (first, outputs) = (rest.start, &mut outputs);
        rest.start += match (SUMS / (T * S::PARTS)).min(rest.len()) {
            4.. => multiply_beside::<S, 4, T>(simd, outputs, first, tiles, prefetch_distance),
            2.. => multiply_beside::<S, 2, T>(simd, outputs, first, tiles, prefetch_distance),
            _ => multiply_beside::<S, 1, T>(simd, outputs, first, tiles, prefetch_distance),
        };
    }
}

/// Computes the outputs of `P` panels of floats side by side, from panel `first`, and returns `P`.
fn multiply_beside<S: Simd, const P: usize, const T: usize>(
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
