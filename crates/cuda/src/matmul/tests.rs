//! CUDA-specific tests of matrix products: levels of two bytes, tiles of two sizes, several
//! matrices in a launch.

use kvant_backend::{Backend, Input, Matrix, Output, WeightSource};
use kvant_codec::random::Random;
use kvant_codec::{Codebook, DType};

use super::Levels;
use super::gemm::{Plan, Shape};
use super::layout::half_scales;
use crate::{CudaDevice, CudaMatrix, emulator};

const N_IN: usize = 320;

/// Returns `n` weights or inputs.
fn gaussian(seed: u64, n: usize, sigma: f64) -> Vec<f32> {
    let mut values = vec![0.0; n];
    Random::new(seed).fill_gaussian(&mut values, sigma);
    values
}

/// Returns a matrix `[n_out, N_IN]`, the first rows of any larger one of the same seed.
fn matrix(device: &CudaDevice, dtype: DType, seed: u64, n_out: usize) -> CudaMatrix {
    let row_bytes = dtype.row_bytes(N_IN).unwrap();
    let mut bytes = vec![0; n_out * row_bytes];
    let w = gaussian(seed, n_out * N_IN, 0.1);
    for (row, code) in w.chunks_exact(N_IN).zip(bytes.chunks_exact_mut(row_bytes)) {
        kvant_codec::encode(dtype, row, code).unwrap();
    }
    device.upload_matrix(WeightSource { dtype, n_out, n_in: N_IN, bytes: bytes.into() }).unwrap()
}

/// Returns the bits of the products of `x` `[rows, N_IN]` with each matrix, queued together.
fn project(device: &CudaDevice, matrices: &[&CudaMatrix], x: &[f32]) -> Vec<Vec<u32>> {
    products(device, matrices, N_IN, x)
}

/// As [`project`], of `x` `[rows, n_in]`.
fn products(device: &CudaDevice, matrices: &[&CudaMatrix], n_in: usize, x: &[f32]) -> Vec<Vec<u32>> {
    let rows = x.len() / n_in;
    let mut input = device.buffer(x.len()).unwrap();
    device.write(&mut input, x).unwrap();
    let input = Input { x: &input, norm: None, first_row: 0, rows };
    let mut ys: Vec<_> = matrices.iter().map(|w| device.buffer(rows * w.n_out()).unwrap()).collect();
    let output = |(&w, y)| Output { w, bias: None, y, accumulate: false };
    let mut outputs: Vec<_> = matrices.iter().zip(&mut ys).map(output).collect();
    device.project(input, &mut outputs).unwrap();
    let read = |(w, y): (&&CudaMatrix, _)| {
        let mut got = vec![f32::NAN; rows * w.n_out()];
        device.read(y, 0, &mut got).unwrap();
        got.into_iter().map(f32::to_bits).collect()
    };
    matrices.iter().zip(&ys).map(read).collect()
}

/// Of 150 rows, 300 features take small tiles, and 100 of them large ones.
#[test]
fn a_sum_has_the_same_bits_in_large_tiles_as_in_small_ones() {
    let Some(device) = emulator::device(80) else { return };
    let (in_small, in_large) = (300, 100);
    let x = gaussian(2, 150 * N_IN, 1.0);
    for dtype in [DType::F16, DType::Q8_0, DType::Q4_1, DType::TQ4_1S] {
        let of = |n_out| project(&device, &[&matrix(&device, dtype, 1, n_out)], &x).remove(0);
        for (small, large) in of(in_small).chunks_exact(in_small).zip(of(in_large).chunks_exact(in_large)) {
            assert_eq!(small[..in_large], *large, "{dtype}");
        }
    }
}

/// Tiles of 32 to 256 rows, several of which a block takes in turn, and features and rows that do
/// not fill the last ones; no blocks share them. The interpreter adds warpgroup MMAs as it adds
/// those of warps.
#[test]
fn warpgroups_give_sums_the_bits_that_warps_do() {
    let Some(devices) = [80, 90].map(emulator::device).into_iter().collect::<Option<Vec<_>>>() else {
        return;
    };
    for (dtype, n_out, rows) in [
        (DType::Q4_0, 300, 150),
        (DType::F16, 1000, 257),
        (DType::Q5_1, 130, 255),
        (DType::BF16, 390, 128),
        (DType::Q4_1, 1000, 33),
        (DType::Q8_0, 1020, 17),
    ] {
        let x = gaussian(2, rows * N_IN, 1.0);
        let of = |device| project(device, &[&matrix(device, dtype, 1, n_out)], &x).remove(0);
        assert!(of(&devices[0]) == of(&devices[1]), "{dtype} [{n_out}], {rows} rows");
    }
}

/// Tiles of all matrices of a launch are counted together.
#[test]
fn warpgroups_match_warps_for_several_matrices() {
    let Some(devices) = [80, 90].map(emulator::device).into_iter().collect::<Option<Vec<_>>>() else {
        return;
    };
    let x = gaussian(5, 120 * N_IN, 1.0);
    let of = |device| {
        let matrices =
            [(1, 130), (2, 7), (3, 515)].map(|(seed, n_out)| matrix(device, DType::Q4_0, seed, n_out));
        project(device, &matrices.each_ref(), &x)
    };
    assert!(of(&devices[0]) == of(&devices[1]));
}

/// With a bias, and with accumulation, in tiles of 256, 128, 64 and 32 rows.
#[test]
fn warpgroups_add_to_what_is_there_as_warps_do() {
    let Some(devices) = [80, 90].map(emulator::device).into_iter().collect::<Option<Vec<_>>>() else {
        return;
    };
    for (n_out, rows) in [(300, 150), (257, 100), (200, 40), (200, 20)] {
        let (x, bias) = (gaussian(6, rows * N_IN, 1.0), gaussian(7, n_out, 1.0));
        let before = gaussian(8, rows * n_out, 1.0);
        let of = |device: &CudaDevice| {
            let buffer = |values: &[f32]| {
                let mut buffer = device.buffer(values.len()).unwrap();
                device.write(&mut buffer, values).unwrap();
                buffer
            };
            let (w, x, bias, mut y) =
                (matrix(device, DType::Q8_0, 1, n_out), buffer(&x), buffer(&bias), buffer(&before));
            let output = Output { w: &w, bias: Some(&bias), y: &mut y, accumulate: true };
            device.project(Input { x: &x, norm: None, first_row: 0, rows }, &mut [output]).unwrap();
            let mut got = vec![f32::NAN; rows * n_out];
            device.read(&y, 0, &mut got).unwrap();
            got
        };
        assert!(of(&devices[0]) == of(&devices[1]), "[{n_out}], {rows} rows");
    }
}

/// More than one launch takes, of two types, which need the inputs in three forms.
#[test]
fn batched_matrices_match_each_alone() {
    let Some(device) = emulator::device(80) else { return };
    let types = [DType::Q8_0, DType::F16, DType::Q8_0, DType::Q8_0, DType::F16, DType::Q8_0, DType::Q8_0];
    let sizes = [40, 7, 17, 64, 65, 1, 130];
    let matrices: Vec<_> =
        (0..).zip(types).zip(sizes).map(|((seed, dtype), n)| matrix(&device, dtype, seed, n)).collect();
    let all: Vec<_> = matrices.iter().collect();
    for rows in [1, 3, 20] {
        let x = gaussian(9, rows * N_IN, 1.0);
        let together = project(&device, &all, &x);
        let alone = all.iter().flat_map(|&w| project(&device, &[w], &x));
        assert!(alone.eq(together), "{rows} rows");
    }
}

/// Returns codes of `w`, times 2^15 by their scales: beyond f16, as writers hardly ever have them.
fn codes_beyond_halves(dtype: DType, w: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; dtype.row_bytes(w.len()).unwrap()];
    kvant_codec::encode(dtype, w, &mut bytes).unwrap();
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        if dtype == DType::MXFP4 {
            block[0] += 15;
        }
        for at in half_scales(dtype) {
            let scale = half::f16::from_le_bytes([block[*at], block[at + 1]]).to_f32();
            block[*at..at + 2].copy_from_slice(&half::f16::from_f32(scale * 32_768.0).to_le_bytes());
        }
    }
    bytes
}

/// Many rows take weights in f16.
#[test]
fn weights_beyond_halves_multiply_as_finite_numbers() {
    let Some(device) = emulator::device(80) else { return };
    let (n_in, n_out, rows) = (256, 20, 17);
    let (weights, x) = (gaussian(11, n_out * n_in, 1.0), gaussian(12, rows * n_in, 1.0));
    for dtype in [DType::Q8_0, DType::Q4_0, DType::Q4K, DType::Q2K, DType::Q6K, DType::MXFP4, DType::TQ4_1S] {
        let bytes = codes_beyond_halves(dtype, &weights);
        let mut w = vec![0.0; weights.len()];
        kvant_codec::decode(dtype, &bytes, &mut w).unwrap();
        let matrix = WeightSource { dtype, n_out, n_in, bytes: bytes.into() };
        let matrix = device.upload_matrix(matrix).unwrap();
        let mut input = device.buffer(x.len()).unwrap();
        device.write(&mut input, &x).unwrap();
        let (mut y, mut got) = (device.buffer(rows * n_out).unwrap(), vec![f32::NAN; rows * n_out]);
        let input = Input { x: &input, norm: None, first_row: 0, rows };
        let output = Output { w: &matrix, bias: None, y: &mut y, accumulate: false };
        device.project(input, &mut [output]).unwrap();
        device.read(&y, 0, &mut got).unwrap();
        for (i, got) in got.into_iter().enumerate() {
            let row = w[i % n_out * n_in..].iter().zip(&x[i / n_out * n_in..]).take(n_in);
            let terms: Vec<f64> = row.map(|(&w, &x)| f64::from(w) * f64::from(x)).collect();
            let size: f64 = terms.iter().map(|term| term.abs()).sum();
            // Both factors are rounded to 2^-11, after a rotation that keeps the sum of their
            // squares only; sums in f32 take far less.
            let tolerance = if dtype == DType::TQ4_1S { 4.0 } else { 1.0 } * size / 512.0;
            assert!((f64::from(got) - terms.iter().sum::<f64>()).abs() <= tolerance, "{dtype} {i}: {got}");
        }
    }
}

/// Few rows and quantized weights, up to 8 and up to 16 at once.
#[test]
fn small_batch_products_are_batch_invariant() {
    let Some(device) = emulator::device(80) else { return };
    let (n_out, max_rows) = (37, 16);
    let x = gaussian(5, max_rows * N_IN, 1.0);
    for dtype in [DType::Q4_0, DType::Q8_0, DType::NVFP4, DType::TQ4_1S] {
        let w = matrix(&device, dtype, 6, n_out);
        let all = project(&device, &[&w], &x).remove(0);
        for rows in [2, 7, 8, 9] {
            let some = project(&device, &[&w], &x[..rows * N_IN]).remove(0);
            assert_eq!(some, all[..rows * n_out], "{dtype}, {rows} rows");
        }
    }
}

/// The GEMV kernel holds its row in shared memory; longer rows take the GEMM.
#[test]
fn a_row_may_be_longer_than_shared_memory() {
    let Some(device) = emulator::device(80) else { return };
    let (dtype, n_in) = (DType::Q8_0, 1 << 17);
    let weights = gaussian(7, n_in, 0.1);
    let mut bytes = vec![0; dtype.row_bytes(n_in).unwrap()];
    kvant_codec::encode(dtype, &weights, &mut bytes).unwrap();
    let w = device.upload_matrix(WeightSource { dtype, n_out: 1, n_in, bytes: bytes.into() }).unwrap();
    let x = gaussian(8, n_in, 1.0);
    let mut input = device.buffer(n_in).unwrap();
    device.write(&mut input, &x).unwrap();
    let (mut y, mut got) = (device.buffer(1).unwrap(), [f32::NAN]);
    let input = Input { x: &input, norm: None, first_row: 0, rows: 1 };
    device.project(input, &mut [Output { w: &w, bias: None, y: &mut y, accumulate: false }]).unwrap();
    device.read(&y, 0, &mut got).unwrap();
    let terms = || x.iter().zip(&weights).map(|(&x, &w)| f64::from(x) * f64::from(w));
    let (want, norm) = (terms().sum::<f64>(), terms().map(|term| term * term).sum::<f64>().sqrt());
    // Bytes of either side are within half a step of 1 / 127 of the largest of 32, some 2.2 of
    // their deviation.
    assert!((f64::from(got[0]) - want).abs() <= 0.05 * norm, "{} for {want}, of {norm}", got[0]);
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

/// f16 ends at 65,504 and has few bits below 2^-14; the result is within three roundings of each
/// term to f16, by root mean square, and a fourth for the sum, of the sum of the unrounded weights
/// in f64.
#[test]
fn floats_of_any_size_keep_their_precision_as_halves() {
    let Some(device) = emulator::device(80) else { return };
    let (n_out, rows) = (5, 20);
    let x = gaussian(3, rows * N_IN, 1.0);
    for (dtype, bytes_of) in [
        (DType::F32, (|w| w.to_le_bytes().to_vec()) as fn(f32) -> Vec<u8>),
        (DType::BF16, |w| w.to_le_bytes()[2..].to_vec()),
    ] {
        for size in [1e-30, 1e-7, 1.0, 1e6, 1e30] {
            let mut w = gaussian(4, n_out * N_IN, size);
            // Values that bf16 represents, in f32 as well.
            w.iter_mut().for_each(|w| *w = f32::from_bits(w.to_bits() & 0xffff_0000));
            let bytes: Vec<u8> = w.iter().flat_map(|&w| bytes_of(w)).collect();
            let source = WeightSource { dtype, n_out, n_in: N_IN, bytes: bytes.into() };
            let got = project(&device, &[&device.upload_matrix(source).unwrap()], &x).remove(0);
            for (i, got) in got.into_iter().map(f32::from_bits).enumerate() {
                let (x, w) = (&x[i / n_out * N_IN..][..N_IN], &w[i % n_out * N_IN..][..N_IN]);
                let terms = || x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
                let (want, norm) =
                    (terms().sum::<f64>(), terms().map(|term| term * term).sum::<f64>().sqrt());
                let error = (f64::from(got) - want).abs();
                assert!(
                    error <= 4.0 * f64::exp2(-11.0) * norm,
                    "{dtype} of size {size}, {i}: {got} for {want}"
                );
            }
        }
    }
}

/// Returns weights or inputs that f16 represents, and so do q8_0 and q4_0 with a scale of 1.
fn integers(seed: u64, [rows, n_in]: [usize; 2], dtype: DType) -> Vec<f32> {
    let mut values = gaussian(seed, rows * n_in, 3.0);
    values.iter_mut().for_each(|value| *value = value.round().clamp(-7.0, 7.0));
    let largest = if dtype == DType::Q8_0 { 127.0 } else { -8.0 };
    values.iter_mut().step_by(32).for_each(|value| *value = largest);
    values
}

/// Sums of integers are exact in any order: one that loses or repeats a step is another.
#[test]
fn blocks_that_share_tiles_add_each_step_once() {
    let cases: [(u32, DType, usize, &[usize]); 9] = [
        (80, DType::Q4_0, 17, &[250, 250]),
        (89, DType::Q8_0, 31, &[250, 130, 3]),
        (90, DType::Q4_0, 33, &[250, 130, 3]),
        (80, DType::F16, 63, &[130, 3]),
        (90, DType::Q8_0, 64, &[250, 130, 3]),
        (80, DType::Q4_0, 65, &[250, 130, 3]),
        (90, DType::Q4_0, 65, &[130, 3]),
        (89, DType::Q8_0, 129, &[130, 3]),
        (90, DType::F16, 255, &[130, 3]),
    ];
    // Steps and tiles that are not full.
    let n_in = 1504;
    for (arch, dtype, rows, n_outs) in cases {
        let Some(device) = emulator::device(arch) else { return };
        let widths = std::array::from_fn(|i| n_outs.get(i).map_or(0, |&n| n as u32));
        let shape = Shape { n_outs: widths, n_in: n_in as u32, rows: rows as u32, expert_tiles: None };
        let plan = Plan::new(dtype, shape, &emulator::properties(arch));
        assert!(plan.share_bytes > 0, "{arch}, {dtype}, {rows} rows: {plan:?}");
        let x = integers(1, [rows, n_in], DType::Q4_0);
        let weights: Vec<_> = n_outs.iter().map(|&n_out| integers(2, [n_out, n_in], dtype)).collect();
        let upload = |weights: &Vec<f32>| {
            let (mut bytes, n_out) = (vec![0; dtype.row_bytes(weights.len()).unwrap()], weights.len() / n_in);
            kvant_codec::encode(dtype, weights, &mut bytes).unwrap();
            device.upload_matrix(WeightSource { dtype, n_out, n_in, bytes: bytes.into() }).unwrap()
        };
        let matrices: Vec<_> = weights.iter().map(upload).collect();
        let got = products(&device, &matrices.iter().collect::<Vec<_>>(), n_in, &x);
        for (got, weights) in got.into_iter().zip(&weights) {
            let n_out = weights.len() / n_in;
            for (i, got) in got.into_iter().map(f32::from_bits).enumerate() {
                let (x, w) = (&x[i / n_out * n_in..][..n_in], &weights[i % n_out * n_in..][..n_in]);
                let want: f32 = x.iter().zip(w).map(|(x, w)| x * w).sum();
                let at = [i / n_out, i % n_out];
                assert_eq!(got, want, "{arch}, {dtype} [{n_out}, {n_in}], {at:?} of {rows} rows");
            }
        }
    }
}
