//! Soft cap of values.

use kvant_backend::Backend;

use crate::DeviceUnderTest;
use crate::judge::{Expected, roundings};
use crate::reference;
use crate::weights::gaussian;

/// Roundings of 1 in tanh: six of an exponential of at most 1, if approximate, and as many of its
/// argument, two sums, a quotient of two more, a product.
const TANH: usize = 17;

/// Compares `soft_cap` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    for len in [0, 1, 255, 256, 257, 8192, 20_000] {
        for (cap, sigma) in [(30.0, 20.0), (0.5, 1e-3), (50.0, 400.0)] {
            equals_its_equation(subject, len, cap, sigma);
        }
    }
    let mut x = subject.upload(&[0.0; 4]);
    let result = subject.device().soft_cap(&mut x, 5, 30.0);
    subject.expect_refusal("soft_cap", "five values of four", result);
}

fn equals_its_equation<B: Backend>(subject: &DeviceUnderTest<B>, len: usize, cap: f32, sigma: f64) {
    let what = || subject.case("soft_cap", format_args!("{len} values of spread {sigma}, cap {cap}"));
    let values = gaussian(1, len, sigma);
    let mut x = subject.guarded(&values);
    let result = subject.device().soft_cap(&mut x, len, cap);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let want = |x: &f32| Expected {
        value: reference::soft_cap(f64::from(*x), cap),
        tolerance: roundings(TANH) * f64::from(cap),
    };
    subject.expect(&x, &values.iter().map(want).collect::<Vec<_>>(), &what);
}
