//! Few rows: every panel is read once, strictly in order, and multiplied with all rows.

use std::ops::Range;

use kvant_codec::DType;

use super::Store;
use super::gemm::Tiles;
use super::panel::{PANEL, Panels, with_format, with_values};
use super::simd::Simd;
use super::work::Product;

/// The most rows that are multiplied together.
pub(super) const MAX_ROWS: usize = 8;

/// Computes the outputs of some panels of `w`, the weights of `product`, for all `rows` rows of the input.
pub(super) fn multiply<S: Simd>(
    simd: S,
    product: &Product<'_>,
    w: &Panels,
    tiles: Tiles<'_>,
    panels: Range<usize>,
    rows: usize,
) {
    match rows {
        1 => multiply_tile::<S, 1>(simd, product, w, tiles, panels, rows),
        2 => multiply_tile::<S, 2>(simd, product, w, tiles, panels, rows),
        3..=4 => multiply_tile::<S, 4>(simd, product, w, tiles, panels, rows),
        5..=6 => multiply_tile::<S, 6>(simd, product, w, tiles, panels, rows),
        _ => multiply_tile::<S, MAX_ROWS>(simd, product, w, tiles, panels, rows),
    }
}

fn multiply_tile<S: Simd, const T: usize>(
    simd: S,
    product: &Product<'_>,
    w: &Panels,
    tiles: Tiles<'_>,
    panels: Range<usize>,
    rows: usize,
) {
    let dtype = product.w.dtype;
    for panel in panels {
        let mut sums = panel_sums::<S, T>(simd, dtype, w, tiles, panel);
        if let Some(Store::Panels(gate)) = product.gate.map(|gate| &gate.store) {
            let gate = panel_sums::<S, T>(simd, dtype, gate, tiles, panel);
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
    w: &Panels,
    tiles: Tiles<'_>,
    panel: usize,
) -> [[f32; PANEL]; T] {
    let lines = w.panel(panel);
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => {
            with_values!(dtype, V => simd.gemv_floats::<V, T>(lines, tiles.floats.tile(0)))
        }
        dtype => with_format!(dtype, F => simd.gemv::<F, T>(lines, tiles.quantised.tile(0))),
    }
}
