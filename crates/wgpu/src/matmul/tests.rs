//! Matrix products compared with those of the CPU.

use kvant_backend::{Backend, Buffer, Input, Norm, Output, WeightSource};
use kvant_codec::DType;
use kvant_codec::fields::FieldSpec;
use kvant_conformance::weights::{Weights, gaussian};
use kvant_cpu::{CpuDevice, Isa};

use crate::{WgpuDevice, tests};

/// Returns `y = W norm(x)` for some rows, `[rows, n_out]`.
fn project<B: Backend>(
    device: &B,
    source: WeightSource,
    x: &[f32],
    gain: &[f32],
    has_norm: bool,
) -> Vec<f32> {
    let (n_in, n_out) = (source.n_in, source.n_out);
    let buffer = |values: &[f32]| {
        let mut buffer = device.buffer(values.len()).unwrap();
        device.write(&mut buffer, values).unwrap();
        buffer
    };
    let (x, gain, rows) = (buffer(x), buffer(gain), x.len() / n_in);
    let mut y = device.buffer(rows * n_out).unwrap();
    let norm = has_norm.then_some(Norm { weight: &gain, eps: 1e-5 });
    let input = Input { x: &x, norm, first_row: 0, rows };
    let w = device.upload_matrix(source).unwrap();
    device.project(input, &mut [Output { w: &w, bias: None, y: &mut y, accumulate: false }]).unwrap();
    let mut values = vec![f32::NAN; y.n_values()];
    device.read(&y, 0, &mut values).unwrap();
    values
}

/// Returns the largest difference of two lists; NaN if one is NaN.
fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let errors = got.iter().zip(want).map(|(got, want)| (got - want).abs());
    errors.fold(0.0, |worst, error| if error > worst || error.is_nan() { error } else { worst })
}

/// Activations are rounded to the same bytes as on the CPU's vector sets, so that only the rounding
/// of sums remains: of at most a scale and a minimum for each of 48 halves of a group, `48 · 4` of
/// them, and of sums of 768 terms of which none is larger than 0.1 · 5 and most are a hundredth of
/// that. A different byte would add a step of 5 / 127 times a weight, some 1e-3.
#[test]
fn codes_meet_activations_rounded_as_on_the_cpu() {
    let Some(device) = tests::device() else { return };
    if !device.report().is_software {
        return tests::skipped("the adapter need not divide as the CPU does");
    }
    let isa = Isa::from_env().unwrap();
    if isa == Isa::Scalar {
        return tests::skipped("this CPU has no set of vectors, and rounds no activations");
    }
    let cpu = CpuDevice::new(isa, 1).unwrap();
    let (n_in, n_out) = (768, 40);
    let tol = 192.0 / (1 << 24) as f32 * 4.0;
    for dtype in DType::ALL.into_iter().filter(|dtype| FieldSpec::of(*dtype).is_some()) {
        let weights = Weights::gaussian(dtype, n_out, n_in, 3);
        for (rows, has_norm) in [(1, false), (1, true), (9, false), (9, true)] {
            let [x, gain] = [rows, 1].map(|rows| gaussian(4, rows * n_in, 1.0));
            let got = project(&device, weights.source(n_out), &x, &gain, has_norm);
            let want = project(&cpu, weights.source(n_out), &x, &gain, has_norm);
            let error = distance(&got, &want);
            assert!(error <= tol, "{dtype}, {rows} rows, {has_norm}: {error:e} of {tol:e}");
        }
    }
}

/// In the shapes for GPUs and in those for software adapters, of which the first adapter is one: a
/// row has the bits that it has alone, and the shapes agree except for the order of sums.
#[test]
fn products_are_the_same_in_every_shape() {
    let Some(device) = tests::device() else { return };
    let other_shapes = WgpuDevice::open_with_other_shapes().unwrap();
    let (n_out, rows) = (70, 11);
    for dtype in DType::weights() {
        let n_in = (if FieldSpec::of(dtype).is_some() { 1280 } else { 1279 }) / dtype.block_len()
            * dtype.block_len();
        let weights = Weights::gaussian(dtype, n_out, n_in, 3);
        let [x, gain] = [rows, 1].map(|rows| gaussian(4, rows * n_in, 1.0));
        let all = [&device, &other_shapes].map(|device| {
            let all = project(device, weights.source(n_out), &x, &gain, true);
            let alone = project(device, weights.source(n_out), &x[..n_in], &gain, true);
            assert!(all[..n_out] == alone, "{dtype}: the first row has other bits than alone");
            all
        });
        let tol = 320.0 / (1 << 24) as f32 * 4.0;
        let error = distance(&all[0], &all[1]);
        assert!(error <= tol, "{dtype}: {error:e} of {tol:e}");
    }
}
