//! A factor on all values, and their sums.

use kvant_backend::Backend;

use crate::DeviceUnderTest;
use crate::judge::{Expected, roundings};
use crate::weights::gaussian;

/// Compares `scale` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    for len in [0, 1, 255, 256, 257, 4096, 20_000] {
        for by in [0.07, -3.5, 0.0] {
            let what = || subject.case("scale", format_args!("{len} values by {by}"));
            let values = gaussian(1, len, 20.0);
            let mut x = subject.guarded(&values);
            subject.device().scale(&mut x, len, by).unwrap_or_else(|error| panic!("{}: {error}", what()));
            let want = |x: &f32| {
                let value = f64::from(*x) * f64::from(by);
                Expected { value, tolerance: roundings(1) * value.abs() }
            };
            subject.expect(&x, &values.iter().map(want).collect::<Vec<_>>(), &what);
        }
    }
    let mut x = subject.guarded(&[1.0, f32::NAN, f32::INFINITY]);
    let what = || subject.case("scale", "bad numbers");
    subject.device().scale(&mut x, 3, 0.0).unwrap_or_else(|error| panic!("{}: {error}", what()));
    let got = subject.results(&x, 3, &what);
    assert!(got[1].is_nan() && got[2].is_nan(), "{}: {got:?}", what());
    let result = subject.device().scale(&mut subject.upload(&[1.0; 3]), 4, 1.0);
    subject.expect_refusal("scale", "four values of three", result);
}

/// Compares `add` with its equation.
pub fn add<B: Backend>(subject: &DeviceUnderTest<B>) {
    for len in [0, 1, 255, 256, 257, 4096, 20_000] {
        let what = || subject.case("add", format_args!("{len} values"));
        let (values, others) = (gaussian(1, len, 20.0), gaussian(2, len, 3.0));
        let mut x = subject.guarded(&values);
        let result = subject.device().add(&mut x, &subject.upload(&others), len);
        result.unwrap_or_else(|error| panic!("{}: {error}", what()));
        let want = |(x, y): (&f32, &f32)| Expected::exactly(x + y);
        subject.expect(&x, &values.iter().zip(&others).map(want).collect::<Vec<_>>(), &what);
    }
    let [mut long, short] = [4, 3].map(|n| subject.upload(&vec![1.0; n]));
    let result = subject.device().add(&mut long, &short, 4);
    subject.expect_refusal("add", "an operand one value short", result);
    let mut short = short;
    let result = subject.device().add(&mut short, &long, 4);
    subject.expect_refusal("add", "a sum one value short", result);
}
