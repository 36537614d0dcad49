//! A matrix unit gives the bits of the vectors beside it.

use super::*;

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
