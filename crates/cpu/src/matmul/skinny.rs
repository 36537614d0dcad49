//! Few rows: every panel is read once, strictly in order, and multiplied with all rows.

use std::ops::Range;

use kvant_codec::DType;

use super::gemm::Tiles;
use super::panel::{Line, PANEL, is_float, split, with_format, with_values};
use super::simd::Simd;
use super::work::Product;

/// The most rows that are multiplied together.
pub(super) const MAX_ROWS: usize = 8;
/// Registers of sums that keep the adders busy. A sum takes one column after the other, so that its bits do not depend on the
/// number of rows; where the sums of one float panel are fewer, several panels are multiplied side by side.
const SUMS: usize = 8;

/// Computes the outputs of some panels of `product` for all `rows` rows of the input, asking for weights `ahead` bytes before
/// their use.
pub(super) fn multiply<S: Simd>(
    simd: S,
    lent: &mut Vec<Line>,
    product: &Product<'_>,
    tiles: Tiles<'_>,
    panels: Range<usize>,
    rows: usize,
    ahead: usize,
) {
    match rows {
        1 => multiply_tile::<S, 1>(simd, lent, product, tiles, panels, rows, ahead),
        2 => multiply_tile::<S, 2>(simd, lent, product, tiles, panels, rows, ahead),
        3..=4 => multiply_tile::<S, 4>(simd, lent, product, tiles, panels, rows, ahead),
        5..=6 => multiply_tile::<S, 6>(simd, lent, product, tiles, panels, rows, ahead),
        _ => multiply_tile::<S, MAX_ROWS>(simd, lent, product, tiles, panels, rows, ahead),
    }
}

fn multiply_tile<S: Simd, const T: usize>(
    simd: S,
    lent: &mut Vec<Line>,
    product: &Product<'_>,
    tiles: Tiles<'_>,
    panels: Range<usize>,
    rows: usize,
    ahead: usize,
) {
    let mut first = panels.start;
    while first < panels.end {
        let wanted = if is_float(product.w.dtype) { SUMS / (T * S::PARTS) } else { 1 };
        let group = Group { lent, product, tiles, first, rows, ahead };
        first += match wanted.min(panels.end - first) {
            4.. => multiply_group::<S, 4, T>(simd, group),
            2.. => multiply_group::<S, 2, T>(simd, group),
            _ => multiply_group::<S, 1, T>(simd, group),
        };
    }
}

/// Panels that are multiplied side by side.
struct Group<'a, 'b> {
    lent: &'a mut Vec<Line>,
    product: &'a Product<'b>,
    tiles: Tiles<'a>,
    first: usize,
    rows: usize,
    ahead: usize,
}

/// Computes the outputs of `P` panels and returns `P`.
fn multiply_group<S: Simd, const P: usize, const T: usize>(simd: S, group: Group<'_, '_>) -> usize {
    let Group { lent, product, tiles, first, rows, ahead } = group;
    let (dtype, panels) = (product.w.dtype, first..first + P);
    let lines = product.w.panels(panels.clone(), lent);
    let mut sums: [[[f32; PANEL]; T]; P] = group_sums(simd, dtype, lines, tiles, ahead);
    if let Some(gate) = product.gate {
        let gate: [[_; T]; P] = group_sums(simd, dtype, gate.panels(panels, lent), tiles, ahead);
        let pairs = gate.as_flattened().iter().zip(sums.as_flattened_mut());
        pairs.for_each(|(gate, sums)| simd.gate(gate, sums));
    }
    for (p, sums) in sums.iter().enumerate() {
        for (row, sums) in sums[..rows].iter().enumerate() {
            product.put(row, (first + p) * PANEL, sums);
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
) -> [[[f32; PANEL]; T]; P] {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => {
            with_values!(dtype, V => simd.gemv_floats::<V, P, T>(lines, tiles.floats.tile(0), ahead))
        }
        dtype => {
            let tile = tiles.codes(dtype).tile(0);
            let panels = split::<P>(lines);
            with_format!(dtype, F => panels.map(|panel| simd.gemv::<F, T>(panel, tile, ahead)))
        }
    }
}
