//! Addition of a normalized branch to the residual stream.

use kvant_backend::{Backend, Norm};

use crate::DeviceUnderTest;
use crate::judge::{Expected, roundings};
use crate::reference::rms_norm;
use crate::weights::gaussian;

const EPS: f32 = 1e-6;
/// `(n, rows)`: below, at and above registers and thread blocks.
const SHAPES: [(usize, usize); 6] = [(1, 1), (31, 3), (256, 2), (257, 1), (640, 9), (1536, 70)];

/// Compares `add_normed` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    for (n, rows) in SHAPES {
        equals_its_equation(subject, n, rows);
    }
    short_buffers_are_refused(subject);
}

fn equals_its_equation<B: Backend>(subject: &DeviceUnderTest<B>, n: usize, rows: usize) {
    let what = || subject.case("add_normed", format_args!("{rows} rows of {n}"));
    let (x, y, gain) = (gaussian(1, rows * n, 3.0), gaussian(2, rows * n, 0.2), gaussian(3, n, 1.0));
    let (weight, mut sum) = (subject.upload(&gain), subject.guarded(&x));
    let norm = Norm { weight: &weight, eps: EPS };
    let result = subject.device().add_normed(&mut sum, &subject.upload(&y), rows, norm);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let y: Vec<f64> = y.into_iter().map(f64::from).collect();
    let normed = y.chunks_exact(n).flat_map(|row| rms_norm(row, &gain, EPS));
    // A sum of n squares in any order, halved by the root; the mean, eps, the root, its inverse and
    // two products.
    let relative = roundings(n.div_ceil(2) + 6);
    let want = |(x, normed): (&f32, f64)| {
        let value = f64::from(*x) + normed;
        let of_norm = relative * normed.abs();
        Expected { value, tolerance: of_norm + roundings(1) * (value.abs() + of_norm) }
    };
    subject.expect(&sum, &x.iter().zip(normed).map(want).collect::<Vec<_>>(), &what);
}

fn short_buffers_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let weight = subject.upload(&[1.0; 8]);
    let norm = Norm { weight: &weight, eps: EPS };
    let (mut long, short) = (subject.upload(&[1.0; 16]), subject.upload(&[1.0; 15]));
    let result = subject.device().add_normed(&mut long, &short, 2, norm);
    subject.expect_refusal("add_normed", "a branch one value short", result);
    let mut short = short;
    let result = subject.device().add_normed(&mut short, &long, 2, norm);
    subject.expect_refusal("add_normed", "a sum one value short", result);
}
