//! A matrix unit, and 2x2 matrix instructions, give the bits of the vectors beside them.

use kvant_backend::BackendError;
use kvant_cpu::PrefillPrecision;

use super::*;
use crate::matrix_sets;

/// Returns the sets that multiply bf16.
fn of_bf16() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().filter(|isa| isa.multiplies_bf16())
}

#[test]
fn matrix_gemms_give_the_bits_of_vectors() {
    for (sets, dtype) in matrix_sets().into_iter().flat_map(|sets| WEIGHTS.map(|dtype| (sets, dtype))) {
        let devices = sets.map(|isa| CpuDevice::new(isa, 2).unwrap());
        // A block alone, a chunk and a block, and panels that are odd in number and partial.
        let block = dtype.block_len().max(32);
        let widths = [block, 512 + block];
        for (n_out, n_in) in [1, 15, 31, 33].into_iter().zip(widths.into_iter().cycle()) {
            let ws = devices.each_ref().map(|device| encoded(device, dtype, n_out, n_in, 51).0);
            let x = gaussian(50, 81 * n_in, 1.0);
            // For few rows a matrix unit defers to vectors.
            for rows in (9..=14).chain([33, 63]).chain(64..=81) {
                let [got, want] = [0, 1].map(|i| project(&devices[i], &ws[i], &x[..rows * n_in]));
                let bits = |y: &CpuBuffer| y.as_slice().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&got), bits(&want), "{:?} {dtype} {n_out}x{n_in}, {rows} rows", sets[0]);
                assert!(got.as_slice().iter().all(|y| y.is_finite()), "{dtype}");
            }
        }
    }
}

#[test]
fn a_nan_row_stays_nan_and_affects_no_other_row() {
    for device in matrix_sets().into_iter().map(|[isa, _]| CpuDevice::new(isa, 1).unwrap()) {
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

/// Rounds a value to bf16.
fn in_bf16(x: f32) -> f64 {
    half::bf16::from_f32(x).to_f64()
}

/// Returns the product of rounded operands, and the maximum distance of f32 sums from it: those of
/// a matrix unit are 16 additions deep in a block of columns, and blocks are added one after the
/// other; 2x2 matrix instructions add two columns at a time, rounded to odd. Weights within a
/// rounding of f32 (of their scales) from a rounding boundary of bf16 may round the other way.
fn in_halves(isa: Isa, x: &[f32], w: &[f32]) -> Want {
    let (mut value, mut all, mut other) = (0.0, 0.0, 0.0);
    for (x, &w) in x.iter().map(|&x| in_bf16(x)).zip(w) {
        value += x * in_bf16(w);
        all += (x * in_bf16(w)).abs();
        let [above, below] = [1.0, -1.0].map(|sign| in_bf16(w * (1.0 + sign * 2f32.powi(-22))));
        other += (x * (above - below)).abs();
    }
    // Rounding to odd may be off by twice as much.
    let depth = if isa.has_matrix_unit() { 18 + x.len().div_ceil(32) } else { x.len() + 8 };
    Want { value, bound: 1.01 * depth as f64 * 2f64.powi(-24) * all + other + 1e-30 }
}

#[test]
fn prompts_in_bf16_are_products_of_rounded_operands() {
    for (isa, dtype) in of_bf16().flat_map(|isa| WEIGHTS.map(|dtype| (isa, dtype))) {
        let exact = CpuDevice::new(isa, 1).unwrap();
        let device = CpuDevice::new(isa, 1).unwrap().with_prefill_precision(PrefillPrecision::Bf16).unwrap();
        for (&n_in, (n_out, rows)) in
            widths(dtype).iter().zip([(1, 64), (33, 81), (16, 96), (70, 100), (15, 65)].into_iter().cycle())
        {
            let (w, weights, bytes) = encoded(&device, dtype, n_out, n_in, 61);
            let x = gaussian(60, rows * n_in, 1.0);
            let got = project(&device, &w, &x);
            if dtype == DType::F32 || !isa.has_matrix_unit() && FieldSpec::of(dtype).is_some() {
                assert!(got.as_slice() == project(&exact, &w, &x).as_slice(), "{dtype} weights are left");
                continue;
            }
            let mut turned = x.clone();
            if is_rotated(dtype) {
                turned.chunks_exact_mut(32).for_each(|block| Rotation::tq().forward(block));
            }
            let row_bytes = dtype.row_bytes(n_in).unwrap();
            for (o, row) in weights.chunks_exact(n_in).enumerate() {
                let seen = effective_weights(isa, dtype, &bytes[o * row_bytes..][..row_bytes], row);
                for (r, x) in turned.chunks_exact(n_in).enumerate() {
                    let what = || format!("{isa:?} {dtype} {n_out}x{n_in}, {rows} rows, row {r} output {o}");
                    assert_within(got.as_slice()[r * n_out + o], in_halves(isa, x, &seen), &what);
                }
            }
        }
    }
}

#[test]
fn bf16_is_for_many_rows_and_propagates_non_finite_values() {
    for isa in of_bf16() {
        let exact = CpuDevice::new(isa, 1).unwrap();
        let device = CpuDevice::new(isa, 1).unwrap().with_prefill_precision(PrefillPrecision::Bf16).unwrap();
        assert!(device.info().kernels.ends_with(", prefill in bf16"), "{}", device.info().kernels);
        for dtype in [DType::F16, DType::Q8_0, DType::Q4K, DType::TQ4_1S] {
            let (w, ..) = encoded(&device, dtype, 33, 256, 62);
            let mut x = gaussian(63, 70 * 256, 1.0);
            let few = &x[..8 * 256];
            assert!(project(&device, &w, few).as_slice() == project(&exact, &w, few).as_slice(), "{dtype}");
            for bad in [f32::NAN, f32::INFINITY] {
                x[7 * 256 + 100] = bad;
                for (row, y) in project(&device, &w, &x).as_slice().chunks(33).enumerate() {
                    assert!(y.iter().all(|y| y.is_finite() == (row != 7)), "{dtype} row {row}");
                }
            }
        }
    }
}

#[test]
fn bf16_is_rejected_without_bf16_products() {
    for isa in Isa::available().into_iter().filter(|isa| !isa.multiplies_bf16()) {
        let error =
            CpuDevice::new(isa, 1).unwrap().with_prefill_precision(PrefillPrecision::Bf16).err().unwrap();
        let message = error.to_string();
        assert!(matches!(error, BackendError::Setting { name: "prefill_precision", .. }), "{message}");
        assert!(
            message.contains("matrix unit") && message.contains(isa.name()) && !message.contains('\n'),
            "{message}"
        );
        assert!(CpuDevice::new(isa, 1).unwrap().with_prefill_precision(PrefillPrecision::Exact).is_ok());
    }
}
