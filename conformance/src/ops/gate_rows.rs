//! Gates of whole rows.

use kvant_backend::{Backend, Gate};

use crate::DeviceUnderTest;
use crate::judge::{Expected, roundings};
use crate::reference;
use crate::skipped::product;
use crate::weights::gaussian;

/// Roundings of a gate times a number: three of exp, six for an approximate one, a sum, a quotient
/// or a logarithm of three, another sum, a product.
const GATE_ROUNDINGS: usize = 12;
const SHAPES: [[usize; 2]; 6] = [[0, 8], [1, 1], [1, 257], [3, 31], [9, 640], [70, 256]];

/// Compares `gate_rows` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    for ([rows, cols], gate) in product(&SHAPES, &[Gate::Sigmoid, Gate::Softplus, Gate::Silu, Gate::Plain]) {
        equals_its_equation(subject, rows, cols, gate);
    }
    let (mut y, gates) = (subject.upload(&[1.0; 8]), subject.upload(&[0.0; 2]));
    let device = subject.device();
    let mut gate = |rows, cols| device.gate_rows(&mut y, rows, cols, &gates, Gate::Sigmoid);
    subject.expect_refusal("gate_rows", "three rows of two", gate(3, 2));
    subject.expect_refusal("gate_rows", "nine values of eight", gate(1, 9));
}

fn equals_its_equation<B: Backend>(subject: &DeviceUnderTest<B>, rows: usize, cols: usize, by: Gate) {
    let what = || subject.case("gate_rows", format_args!("{rows} rows of {cols}, {by:?}"));
    let (values, mut gates) = (gaussian(1, rows * cols, 3.0), gaussian(2, rows, 10.0));
    // A gate far below 0, and a NaN.
    if let [_, shut, bad, ..] = &mut gates[..] {
        // Exponentials of some devices end at e^-87.
        (*shut, *bad) = (if by == Gate::Silu { -80.0 } else { -1e30 }, f32::NAN);
    }
    let mut y = subject.guarded(&values);
    let result = subject.device().gate_rows(&mut y, rows, cols, &subject.upload(&gates), by);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let got = subject.results(&y, rows * cols, &what);
    for ((got, values), gate) in got.chunks(cols).zip(values.chunks(cols)).zip(gates) {
        for (&got, &value) in got.iter().zip(values) {
            let value = f64::from(value) * reference::gate(by, f64::from(gate));
            let want = Expected {
                value,
                tolerance: roundings(GATE_ROUNDINGS) * value.abs() + f64::from(f32::MIN_POSITIVE) * 1e3,
            };
            let is_expected = if gate.is_nan() { got.is_nan() } else { want.admits(got) };
            assert!(is_expected, "{}: gate {gate}: {got}, want {want:?}", what());
        }
    }
}
