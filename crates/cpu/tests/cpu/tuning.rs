//! Tuning changes the time of products, and nothing else.

use kvant_backend::{Backend, Input, Output, WeightSource};
use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_cpu::{CpuDevice, Isa, Tuning};

/// The products are the same bits for all numbers, even absurd ones.
#[test]
fn tuning_changes_no_result() {
    for isa in Isa::available() {
        let products = |tuning| {
            let device = CpuDevice::new(isa, 3).unwrap().with_tuning(tuning);
            let mut values = vec![0.0; 40 * 256];
            Random::new(2).fill_gaussian(&mut values, 1.0);
            let mut bytes = vec![0; 70 * DType::Q4_0.row_bytes(256).unwrap()];
            kvant_codec::encode(DType::Q4_0, &values.repeat(2)[..70 * 256], &mut bytes).unwrap();
            let source = WeightSource { dtype: DType::Q4_0, n_out: 70, n_in: 256, bytes: bytes.into() };
            let w = device.upload_matrix(source).unwrap();
            let mut x = device.buffer(values.len()).unwrap();
            device.write(&mut x, &values).unwrap();
            [1, 5, 40].map(|rows| {
                let mut y = device.buffer(rows * 70).unwrap();
                let input = Input { x: &x, norm: None, first_row: 0, rows };
                let output = Output { w: &w, bias: None, y: &mut y, accumulate: false };
                device.project(input, &mut [output]).unwrap();
                y.as_slice().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            })
        };
        let want = products(Tuning::default());
        for (prefetch, items_per_thread, row_block) in [(0, 1, 1), (1 << 40, 1000, 24), (64, 3, 1 << 40)] {
            let got = products(Tuning { prefetch, items_per_thread, row_block });
            assert_eq!(got, want, "{isa:?} {prefetch} {items_per_thread} {row_block}");
        }
    }
}
