//! What products of this device have of their own: levels of two bytes, tiles of two sizes.

use kvant_backend::{Backend, Input, Output, WeightSource};
use kvant_codec::random::Random;
use kvant_codec::{Codebook, DType};

use super::Levels;
use crate::{CudaDevice, emulator};

/// `x` `[rows, n_in]` times `n_out` rows of weights, by the kernels.
fn project(device: &CudaDevice, source: WeightSource, x: &[f32]) -> Vec<u32> {
    let (n_out, rows) = (source.n_out, x.len() / source.n_in);
    let w = device.matrix(source).unwrap();
    let (mut input, mut y) = (device.buffer(x.len()).unwrap(), device.buffer(rows * n_out).unwrap());
    device.write(&mut input, x).unwrap();
    let input = Input { x: &input, norm: None, first_row: 0, rows };
    let output = Output { w: &w, bias: None, y: &mut y, accumulate: false };
    device.project(input, &mut [output]).unwrap();
    let mut got = vec![f32::NAN; rows * n_out];
    device.read(&y, 0, &mut got).unwrap();
    got.into_iter().map(f32::to_bits).collect()
}

/// 300 features of 150 rows are enough for large tiles on a device of four multiprocessors, 100 of them are not.
#[test]
fn a_sum_has_the_same_bits_in_large_tiles_as_in_small_ones() {
    let Some(device) = emulator::device(80) else { return };
    let (n_in, rows, n_out, few) = (320, 150, 300, 100);
    for dtype in [DType::F16, DType::Q8_0, DType::Q4_1, DType::TQ4_1S] {
        let (mut w, mut x) = (vec![0.0; n_out * n_in], vec![0.0; rows * n_in]);
        Random::new(1).fill_gaussian(&mut w, 0.1);
        Random::new(2).fill_gaussian(&mut x, 1.0);
        let row_bytes = dtype.row_bytes(n_in).unwrap();
        let mut bytes = vec![0; n_out * row_bytes];
        for (row, code) in w.chunks_exact(n_in).zip(bytes.chunks_exact_mut(row_bytes)) {
            kvant_codec::encode(dtype, row, code).unwrap();
        }
        let source =
            |n_out| WeightSource { dtype, n_out, n_in, bytes: bytes[..n_out * row_bytes].to_vec().into() };
        let (large, small) = (project(&device, source(n_out), &x), project(&device, source(few), &x));
        for (large, small) in large.chunks_exact(n_out).zip(small.chunks_exact(few)) {
            assert_eq!(large[..few], *small, "{dtype}");
        }
    }
}

#[test]
fn levels_of_two_bytes_are_within_half_a_unit() {
    for (dtype, book) in [(DType::TQ3_1S, Codebook::TQ3), (DType::TQ4_1S, Codebook::GAUSS4)] {
        let levels = Levels::of(dtype);
        for (i, &level) in book.levels().iter().enumerate() {
            let byte = |table: [u32; 4]| f32::from((table[i / 4] >> (i % 4 * 8)) as u8 as i8);
            let got = (256.0 * byte(levels.high) + byte(levels.low)) * levels.unit;
            assert!((got - level).abs() <= 0.501 * levels.unit, "{dtype} {i}: {got} for {level}");
        }
    }
}
