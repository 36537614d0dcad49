//! A matrix unit gives the bits of the vectors beside it.

use super::*;
use crate::matmul::kernels::PAIR;
use crate::matmul::panel::{GROUPS, Line};
use crate::matmul::quantise::Codes;
use crate::matmul::unit::{ROWS, SoftUnit, Tiles, Unit};

/// Sets with a matrix unit, and those of the vectors beside it.
fn pairs() -> Vec<[Isa; 2]> {
    let sets = Isa::available();
    let named = |name| sets.iter().copied().find(|isa| isa.name() == name);
    let pairs = [("soft", "avx2"), ("amx", "avx512")];
    pairs.into_iter().filter_map(|(unit, vectors)| Some([named(unit)?, named(vectors)?])).collect()
}

#[test]
fn a_matrix_unit_gives_the_bits_of_the_vectors_beside_it() {
    for (sets, dtype) in pairs().into_iter().flat_map(|sets| WEIGHTS.map(|dtype| (sets, dtype))) {
        let devices = sets.map(|isa| CpuDevice::new(isa, 2).unwrap());
        // A block alone, a chunk and a block, and panels that are odd in number and not full.
        let block = dtype.block_len().max(32);
        let widths = [block, 512 + block];
        for (n_out, n_in) in [1, 15, 31, 33].into_iter().zip(widths.into_iter().cycle()) {
            // Few rows are the vectors' on either side.
            for rows in [9, 33, 63].into_iter().chain(64..=81) {
                let x = gaussian(50, rows * n_in, 1.0);
                let [got, want] = [0, 1].map(|i| {
                    let (w, ..) = encoded(&devices[i], dtype, n_out, n_in, 51);
                    project(&devices[i], &w, &x)
                });
                let bits = |y: &CpuBuffer| y.as_slice().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&got), bits(&want), "{:?} {dtype} {n_out}x{n_in}, {rows} rows", sets[0]);
                assert!(got.as_slice().iter().all(|y| y.is_finite()), "{dtype}");
            }
        }
    }
}

#[test]
fn a_row_that_is_no_number_stays_alone_and_visible() {
    for device in pairs().into_iter().map(|[isa, _]| CpuDevice::new(isa, 1).unwrap()) {
        for dtype in [DType::Q4_0, DType::Q4K, DType::Q6K, DType::MXFP4, DType::TQ4_1S] {
            let (w, ..) = encoded(&device, dtype, 33, 256, 52);
            let mut x = gaussian(53, 70 * 256, 1.0);
            x[7 * 256 + 100] = f32::NAN;
            for (row, y) in project(&device, &w, &x).as_slice().chunks(33).enumerate() {
                assert!(y.iter().all(|y| y.is_finite() == (row != 7)), "{dtype} row {row}");
            }
        }
    }
}

/// The imitation adds what its definition says, and takes no liberties.
#[test]
fn the_imitation_adds_products_of_signed_bytes() {
    let rows: [Codes; ROWS] = std::array::from_fn(|m| {
        Codes(std::array::from_fn(|g| i32::from_le_bytes([m as u8, 0x80, g as u8, 0xff])))
    });
    let mut codes = [[Line::ZERO; PAIR]; GROUPS];
    for (g, lines) in codes.iter_mut().enumerate() {
        lines[1] = Line(std::array::from_fn(|i| (i as u8).wrapping_mul(37) ^ g as u8));
    }
    let mut tiles = SoftUnit.open(4);
    tiles.load_rows::<4>(&rows, 4);
    tiles.load_panel::<7>(&codes, 4, 1);
    tiles.zero::<2>();
    tiles.dot::<2, 4, 7>();
    tiles.store::<2>(5);
    let stored = *tiles.stored(5);
    for (m, n) in (0..ROWS).flat_map(|m| (0..16).map(move |n| (m, n))) {
        let product = |g: usize, j: usize| {
            let x = rows[m].0[g].to_le_bytes()[j] as i8;
            i32::from(x) * i32::from(codes[g][1].0[4 * n + j] as i8)
        };
        let want: i32 = (4..8).flat_map(|g| (0..4).map(move |j| (g, j))).map(|(g, j)| product(g, j)).sum();
        assert_eq!(i32::from_le_bytes(stored[m].0.as_chunks().0[n]), want, "{m} {n}");
    }
}

#[test]
#[should_panic = "rows"]
fn the_imitation_refuses_to_multiply_what_was_not_loaded() {
    let mut tiles = SoftUnit.open(8);
    tiles.zero::<0>();
    tiles.dot::<0, 4, 6>();
}

#[test]
#[should_panic = "configured twice"]
fn the_imitation_refuses_to_be_configured_twice() {
    let _tiles = SoftUnit.open(8);
    let _more = SoftUnit.open(4);
}
