//! Every product is held to sums in f64 over weights that the codec decodes.

use kvant_backend::{Backend, Input, Norm, Output, WeightSource};
use kvant_codec::random::Random;
use kvant_codec::{DType, decode, encode};

use crate::{CpuBuffer, CpuDevice, CpuMatrix, Isa};

pub(super) const WEIGHTS: [DType; 15] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2K,
    DType::Q3K,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
    DType::TQ3_1S,
    DType::TQ4_1S,
];

pub(super) fn gaussian(seed: u64, len: usize, sigma: f64) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Random::new(seed).fill_gaussian(&mut values, sigma);
    values
}

/// A random matrix on `device` and the values it stands for.
pub(super) fn matrix(
    device: &CpuDevice,
    dtype: DType,
    n_out: usize,
    n_in: usize,
    seed: u64,
) -> (CpuMatrix, Vec<f32>) {
    let mut values = gaussian(seed, n_out * n_in, 0.02);
    let mut bytes = vec![0; n_out * dtype.row_bytes(n_in).unwrap()];
    encode(dtype, &values, &mut bytes).unwrap();
    decode(dtype, &bytes, &mut values).unwrap();
    let source = WeightSource { dtype, n_out, n_in, bytes: bytes.into() };
    (device.matrix(source).unwrap(), values)
}

pub(super) fn buffer(values: &[f32]) -> CpuBuffer {
    let mut buffer = CpuBuffer::zeroed(values.len()).unwrap();
    buffer.as_mut_slice().copy_from_slice(values);
    buffer
}

/// A sum and the largest error its evaluation may have.
#[derive(Clone, Copy)]
pub(super) struct Want {
    pub value: f64,
    pub bound: f64,
}

/// `w · x` in f64. A kernel that rounds nothing but its f32 sums stays within
/// `n · eps · Σ|w x|`, whatever order it adds in.
pub(super) fn exact(w: &[f32], x: &[f32]) -> Want {
    let (mut value, mut magnitude) = (0.0, 0.0);
    for (&w, &x) in w.iter().zip(x) {
        let product = f64::from(w) * f64::from(x);
        value += product;
        magnitude += product.abs();
    }
    Want { value, bound: (w.len() + 2) as f64 * f64::from(f32::EPSILON) * magnitude }
}

#[track_caller]
pub(super) fn assert_within(got: f32, want: Want, what: &dyn Fn() -> String) {
    let err = (f64::from(got) - want.value).abs();
    assert!(err <= want.bound, "{}: {got}, want {} within {}", what(), want.value, want.bound);
}

fn scalar() -> CpuDevice {
    CpuDevice::new(Isa::Scalar, 2)
}

#[test]
fn the_reference_equals_sums_in_f64_for_every_weight_type() {
    let device = scalar();
    for dtype in WEIGHTS {
        let step = dtype.block_len();
        let sizes = if step == 1 { vec![1, 7, 16, 300] } else { vec![step, 3 * step, 512] };
        for n_in in sizes {
            for (n_out, rows) in [(1, 1), (17, 3), (33, 65)] {
                let (w, values) = matrix(&device, dtype, n_out, n_in, 1);
                let x = gaussian(2, rows * n_in, 1.0);
                let mut y = buffer(&vec![f32::NAN; rows * n_out]);
                let input = Input { x: &buffer(&x), norm: None, first_row: 0, rows };
                let output = Output { w: &w, bias: None, y: &mut y, accumulate: false };
                device.project(input, &mut [output]).unwrap();
                for (r, y) in y.as_slice().chunks(n_out).enumerate() {
                    for (o, &got) in y.iter().enumerate() {
                        let want = exact(&values[o * n_in..][..n_in], &x[r * n_in..][..n_in]);
                        assert_within(got, want, &|| format!("{dtype} {n_out}x{n_in} row {r} out {o}"));
                    }
                }
            }
        }
    }
}

#[test]
fn bias_norm_first_row_and_accumulation_are_applied_in_order() {
    let device = scalar();
    let (n_in, n_out) = (64, 20);
    let (w, _) = matrix(&device, DType::F32, n_out, n_in, 3);
    let (v, _) = matrix(&device, DType::Q4_0, 7, n_in, 4);
    let x = buffer(&gaussian(5, 3 * n_in, 1.0));
    let (gain, bias) = (buffer(&gaussian(6, n_in, 1.0)), buffer(&gaussian(7, n_out, 1.0)));
    let norm = Norm { weight: &gain, eps: 1e-5 };
    let old = gaussian(8, 2 * n_out, 1.0);
    let (mut y, mut z) = (buffer(&old), buffer(&[f32::NAN; 14]));
    let input = Input { x: &x, norm: Some(norm), first_row: 1, rows: 2 };
    let mut outputs = [
        Output { w: &w, bias: Some(&bias), y: &mut y, accumulate: true },
        Output { w: &v, bias: None, y: &mut z, accumulate: false },
    ];
    device.project(input, &mut outputs).unwrap();

    let mut normed = vec![0.0; 2 * n_in];
    for (r, row) in normed.chunks_mut(n_in).enumerate() {
        crate::norm::rms_norm(&x.as_slice()[(r + 1) * n_in..][..n_in], gain.as_slice(), 1e-5, row);
    }
    let plain = |w: &CpuMatrix, len| {
        let mut y = CpuBuffer::zeroed(len).unwrap();
        let input = Input { x: &buffer(&normed), norm: None, first_row: 0, rows: 2 };
        device.project(input, &mut [Output { w, bias: None, y: &mut y, accumulate: false }]).unwrap();
        y
    };
    for (i, product) in plain(&w, 2 * n_out).as_slice().iter().enumerate() {
        assert_eq!(y.as_slice()[i], old[i] + (product + bias.as_slice()[i % n_out]));
    }
    assert_eq!(z.as_slice(), plain(&v, 14).as_slice());
}

#[test]
fn the_gated_ffn_equals_its_unfused_parts() {
    let device = scalar();
    let (n_in, n_ff, rows) = (32, 40, 3);
    let (gate, _) = matrix(&device, DType::Q8_0, n_ff, n_in, 9);
    let (up, _) = matrix(&device, DType::F16, n_ff, n_in, 10);
    let x = buffer(&gaussian(11, rows * n_in, 30.0));
    let input = || Input { x: &x, norm: None, first_row: 0, rows };
    let (mut g, mut u) = (CpuBuffer::zeroed(rows * n_ff).unwrap(), CpuBuffer::zeroed(rows * n_ff).unwrap());
    let mut outputs = [
        Output { w: &gate, bias: None, y: &mut g, accumulate: false },
        Output { w: &up, bias: None, y: &mut u, accumulate: false },
    ];
    device.project(input(), &mut outputs).unwrap();
    let mut y = buffer(&vec![f32::NAN; rows * n_ff]);
    device.gated_ffn(input(), &gate, &up, &mut y).unwrap();
    for ((g, u), y) in g.as_slice().iter().zip(u.as_slice()).zip(y.as_slice()) {
        assert_eq!(*y, g / (1.0 + (-g).exp()) * u);
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let device = scalar();
    let source =
        |dtype, n_out, n_in, len: usize| WeightSource { dtype, n_out, n_in, bytes: vec![0; len].into() };
    assert!(device.matrix(source(DType::Q4_0, 2, 33, 36)).is_err());
    assert!(device.matrix(source(DType::Q4_0, 2, 32, 35)).is_err());
    assert!(device.matrix(source(DType::F32, 2, 0, 0)).is_err());
    assert!(device.matrix(source(DType::Turbo3, 1, 128, 50)).is_err());

    let (w, _) = matrix(&device, DType::F32, 4, 8, 12);
    let (other, _) = matrix(&device, DType::F32, 4, 9, 12);
    let (x, bias) = (buffer(&[0.0; 16]), buffer(&[0.0; 5]));
    let mut y = buffer(&[0.0; 8]);
    let mut project = |w, bias, first_row, rows| {
        let input = Input { x: &x, norm: None, first_row, rows };
        device.project(input, &mut [Output { w, bias, y: &mut y, accumulate: false }])
    };
    assert!(project(&w, None, 0, 2).is_ok());
    assert!(project(&w, None, 1, 2).is_err());
    assert!(project(&w, None, 0, 3).is_err());
    assert!(project(&other, None, 0, 2).is_err());
    assert!(project(&w, Some(&bias), 0, 1).is_err());
}

#[test]
fn embedding_rows_are_what_the_codec_decodes() {
    let device = scalar();
    for dtype in WEIGHTS {
        let (table, values) = matrix(&device, dtype, 35, 256, 13);
        let mut out = buffer(&vec![f32::NAN; 3 * 256]);
        device.embed(&table, &[34, 0, 16], &mut out).unwrap();
        for (out, row) in out.as_slice().chunks(256).zip([34, 0, 16]) {
            assert_eq!(out, &values[row * 256..][..256], "{dtype} row {row}");
        }
        assert!(device.embed(&table, &[35], &mut out).is_err());
    }
}
