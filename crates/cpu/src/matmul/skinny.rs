//! Few rows: every panel is read once, strictly in order, and multiplied with all rows.

use std::ops::Range;

use kvant_codec::DType;

use super::gemm::Tiles;
use super::panel::{Line, PANEL, with_format, with_values};
use super::simd::Simd;
use super::work::Product;

/// The most rows that are multiplied together.
pub(super) const MAX_ROWS: usize = 8;

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
    let dtype = product.w.dtype;
    for panel in panels {
        let mut sums = panel_sums::<S, T>(simd, dtype, product.w.panel(panel, lent), tiles, ahead);
        if let Some(gate) = product.gate {
            let gate = panel_sums::<S, T>(simd, dtype, gate.panel(panel, lent), tiles, ahead);
            gate.iter().zip(&mut sums).for_each(|(gate, sums)| simd.gate(gate, sums));
        }
        for (row, sums) in sums[..rows].iter().enumerate() {
            product.put(row, panel * PANEL, sums);
        }
    }
}

fn panel_sums<S: Simd, const T: usize>(
    simd: S,
    dtype: DType,
    lines: &[Line],
    tiles: Tiles<'_>,
    ahead: usize,
) -> [[f32; PANEL]; T] {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => {
            with_values!(dtype, V => simd.gemv_floats::<V, T>(lines, tiles.floats.tile(0), ahead))
        }
        dtype => with_format!(dtype, F => simd.gemv::<F, T>(lines, tiles.codes(dtype).tile(0), ahead)),
    }
}
