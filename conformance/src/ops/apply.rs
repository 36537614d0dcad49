//! Activations of encoders, value by value.

use kvant_backend::Backend;
use kvant_backend::host_ops::Pointwise;

use crate::DeviceUnderTest;
use crate::judge::{Expected, roundings};
use crate::reference::{self, gelu_exponent};
use crate::weights::gaussian;

const ALL: [Pointwise; 5] =
    [Pointwise::GeluTanh, Pointwise::Gelu, Pointwise::Silu, Pointwise::Relu, Pointwise::Tanh];

/// Compares `apply` with its equations.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    for f in ALL {
        for len in [0, 1, 255, 256, 257, 8192, 20_000] {
            for sigma in [1e-3, 3.0, 30.0] {
                equals_its_equation(subject, f, len, sigma);
            }
        }
        bad_numbers_stay_bad(subject, f);
    }
    let result = subject.device().apply(&mut subject.upload(&[0.0; 4]), 5, Pointwise::Silu);
    subject.expect_refusal("apply", "five values of four", result);
}

fn equals_its_equation<B: Backend>(subject: &DeviceUnderTest<B>, f: Pointwise, len: usize, sigma: f64) {
    let what = || subject.case("apply", format_args!("{f:?}, {len} values of spread {sigma}"));
    let values = gaussian(1, len, sigma);
    let mut x = subject.guarded(&values);
    subject.device().apply(&mut x, len, f).unwrap_or_else(|error| panic!("{}: {error}", what()));
    let want = values.iter().map(|&x| expected(f, f64::from(x)));
    subject.expect(&x, &want.collect::<Vec<_>>(), &what);
}

/// An exponential is within six roundings, and a sum, a quotient and a product follow; five
/// roundings of GELU's z move it by as many times |z|. Where it leaves f32, it is replaced by a
/// number near 0. The error function is within 5e-7, and five roundings of 1 + erf follow; tanh is
/// within four.
fn expected(f: Pointwise, x: f64) -> Expected {
    let value = reference::apply(f, x);
    let of_exponential =
        |z_roundings: f64| (roundings(9) + z_roundings * roundings(1)) * value.abs() + x.abs() * 1e-37;
    let tolerance = match f {
        Pointwise::GeluTanh => of_exponential(5.0 * gelu_exponent(x).abs()),
        Pointwise::Gelu => x.abs() / 2.0 * (5e-7 + roundings(5)),
        Pointwise::Silu => of_exponential(0.0),
        Pointwise::Relu => 0.0,
        Pointwise::Tanh => roundings(4) * value.abs(),
    };
    Expected { value, tolerance }
}

fn bad_numbers_stay_bad<B: Backend>(subject: &DeviceUnderTest<B>, f: Pointwise) {
    let what = || subject.case("apply", format_args!("{f:?} of bad numbers"));
    let mut x = subject.guarded(&[f32::NAN, f32::INFINITY]);
    subject.device().apply(&mut x, 2, f).unwrap_or_else(|error| panic!("{}: {error}", what()));
    let got = subject.results(&x, 2, &what);
    let limit = if f == Pointwise::Tanh { 1.0 } else { f32::INFINITY };
    assert!(got[0].is_nan() && got[1] == limit, "{}: {got:?}", what());
}
