//! xIELU of values.

use kvant_backend::{Backend, Xielu};

use crate::DeviceUnderTest;
use crate::judge::{Expected, roundings};
use crate::reference;
use crate::weights::gaussian;

/// Roundings of 1 in the exponential minus 1: six, if approximate, and a sum.
const EXPONENTIAL: usize = 7;
/// Roundings of the sum and the products behind it, and of either term in them.
const SUM: usize = 4;

/// Compares `xielu` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    // Numbers as in the first and the last layers of Apertus, and without a slope.
    let numbers = |[positive, negative, slope]: [f32; 3]| Xielu { positive, negative, slope, eps: -1e-6 };
    for len in [0, 1, 255, 256, 257, 8192, 20_000] {
        for (of, sigma) in [([0.8, 0.8, 0.5], 3.0), ([12.5, 0.6, 0.5], 30.0), ([0.3, 2.5, 0.0], 1e-6)] {
            equals_its_equation(subject, len, numbers(of), sigma);
        }
    }
    non_finite_values_never_become_finite(subject, numbers([0.8, 0.8, 0.5]));
    let result = subject.device().xielu(&mut subject.upload(&[0.0; 4]), 5, numbers([0.8, 0.8, 0.5]));
    subject.expect_refusal("xielu", "five values of four", result);
}

fn equals_its_equation<B: Backend>(subject: &DeviceUnderTest<B>, len: usize, numbers: Xielu, sigma: f64) {
    let what = || subject.case("xielu", format_args!("{len} values of spread {sigma}, {numbers:?}"));
    let values = gaussian(1, len, sigma);
    let mut x = subject.guarded(&values);
    let result = subject.device().xielu(&mut x, len, numbers);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let want = |x: &f32| {
        let x = f64::from(*x);
        let curved =
            if x > 0.0 { f64::from(numbers.positive) * x * x } else { f64::from(numbers.negative) * x };
        let terms = curved.abs() + (f64::from(numbers.slope) * x).abs();
        let of_exponential = if x > 0.0 { 0.0 } else { f64::from(numbers.negative) };
        let tolerance = roundings(EXPONENTIAL) * of_exponential + roundings(SUM) * terms;
        Expected { value: reference::xielu(x, numbers), tolerance }
    };
    subject.expect(&x, &values.iter().map(want).collect::<Vec<_>>(), &what);
}

fn non_finite_values_never_become_finite<B: Backend>(subject: &DeviceUnderTest<B>, numbers: Xielu) {
    let what = || subject.case("xielu", "bad numbers");
    let mut x = subject.guarded(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    subject.device().xielu(&mut x, 3, numbers).unwrap_or_else(|error| panic!("{}: {error}", what()));
    let got = subject.results(&x, 3, &what);
    assert!(got[0].is_nan() && got[1] == f32::INFINITY && !got[2].is_finite(), "{}: {got:?}", what());
}
