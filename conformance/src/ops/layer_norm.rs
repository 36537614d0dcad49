//! LayerNorm: subtracts the mean of a row before normalization.

use kvant_backend::{Backend, Norm};

use crate::DeviceUnderTest;
use crate::judge::{Expected, roundings};
use crate::reference::layer_norm;
use crate::weights::gaussian;

const EPS: f32 = 1e-5;
/// `(n, rows)`: below, at and above registers and thread blocks.
const SHAPES: [(usize, usize); 6] = [(1, 1), (31, 3), (256, 2), (257, 1), (640, 9), (1536, 70)];
/// Means of the rows, with a spread of 3: from zero to one that dominates the row.
const MEANS: [f32; 3] = [0.0, -2.0, 300.0];

/// Compares `layer_norm` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    let has_bias = subject.device().info().runs_encoders;
    for (n, rows) in SHAPES {
        for mean in MEANS {
            equals_its_equation(subject, n, rows, mean, None);
        }
        if has_bias {
            equals_its_equation(subject, n, rows, MEANS[1], Some(&gaussian(5, n, 1.0)));
        }
    }
    if !has_bias {
        a_bias_is_refused(subject);
    }
    bad_numbers_stay_in_their_rows(subject);
    short_buffers_are_refused(subject);
}

fn equals_its_equation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    n: usize,
    rows: usize,
    mean: f32,
    bias: Option<&[f32]>,
) {
    let with = if bias.is_some() { " with a bias" } else { "" };
    let what = || subject.case("layer_norm", format_args!("{rows} rows of {n} around {mean}{with}"));
    let (mut x, gain) = (gaussian(1, rows * n, 3.0), gaussian(3, n, 1.0));
    x.iter_mut().for_each(|v| *v += mean);
    let (weight, mut y) = (subject.upload(&gain), subject.poisoned(rows * n));
    let norm = Norm { weight: &weight, eps: EPS };
    let on_device = bias.map(|bias| subject.upload(bias));
    let result = subject.device().layer_norm(&subject.upload(&x), rows, norm, on_device.as_ref(), &mut y);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let x: Vec<f64> = x.into_iter().map(f64::from).collect();
    let mut want: Vec<Expected> = x.chunks_exact(n).flat_map(|row| expected_row(row, &gain)).collect();
    for (want, &bias) in want.iter_mut().zip(bias.unwrap_or_default().iter().cycle()) {
        want.value += f64::from(bias);
        want.tolerance += roundings(1) * (want.value.abs() + want.tolerance);
    }
    subject.expect(&y, &want, &what);
}

/// A mean of n values in any order is off by `roundings(n + 1)` of the mean magnitude, a difference
/// from it by that and one rounding; each square by twice its difference times that. Their mean
/// adds n roundings, eps one; the root halves the relative error, which is counted whole here for
/// second-order terms. The root, its inverse and two products take four more.
fn expected_row(row: &[f64], gain: &[f32]) -> Vec<Expected> {
    let n = row.len() as f64;
    let mean = row.iter().sum::<f64>() / n;
    let mean_error = roundings(row.len() + 1) * row.iter().map(|v| v.abs()).sum::<f64>() / n;
    let error = |v: f64| mean_error + roundings(1) * ((v - mean).abs() + mean_error);
    let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n + f64::from(EPS);
    let squares_error = row.iter().map(|&v| (2.0 * (v - mean).abs() + error(v)) * error(v)).sum::<f64>() / n;
    let relative = squares_error / variance + roundings(row.len() + 6);
    let values = layer_norm(row, gain, EPS).into_iter().zip(row).zip(gain);
    let want = |((value, &v), &w): ((f64, &f64), &f32)| Expected {
        value,
        tolerance: relative * value.abs()
            + (1.0 + relative) * error(v) * f64::from(w).abs() / variance.sqrt(),
    };
    values.map(want).collect()
}

fn a_bias_is_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let (x, mut y) = (subject.upload(&[1.0; 8]), subject.upload(&[1.0; 8]));
    let norm = Norm { weight: &x, eps: EPS };
    subject.expect_refusal(
        "layer_norm",
        "a bias",
        subject.device().layer_norm(&x, 1, norm, Some(&x), &mut y),
    );
}

fn bad_numbers_stay_in_their_rows<B: Backend>(subject: &DeviceUnderTest<B>) {
    let (n, rows) = (257, 3);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = gaussian(4, rows * n, 1.0);
        x[n + 100] = bad;
        let (weight, mut y) = (subject.upload(&vec![1.0; n]), subject.poisoned(rows * n));
        let norm = Norm { weight: &weight, eps: EPS };
        subject.device().layer_norm(&subject.upload(&x), rows, norm, None, &mut y).expect("shapes match");
        let y = subject.download(&y, rows * n);
        for (i, row) in y.chunks_exact(n).enumerate() {
            let what = || subject.case("layer_norm", format_args!("{bad} in row 1, seen in row {i}"));
            assert_eq!(row.iter().all(|v| v.is_finite()), i != 1, "{}", what());
            assert!(i != 1 || row.iter().all(|v| v.is_nan()), "{}", what());
        }
    }
}

fn short_buffers_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let weight = subject.upload(&[1.0; 8]);
    let norm = Norm { weight: &weight, eps: EPS };
    let (long, short) = (subject.upload(&[1.0; 16]), subject.upload(&[1.0; 15]));
    let mut y = subject.upload(&[1.0; 16]);
    let result = subject.device().layer_norm(&short, 2, norm, None, &mut y);
    subject.expect_refusal("layer_norm", "rows one value short", result);
    let mut y = subject.upload(&[1.0; 15]);
    let result = subject.device().layer_norm(&long, 2, norm, None, &mut y);
    subject.expect_refusal("layer_norm", "a result one value short", result);
}
