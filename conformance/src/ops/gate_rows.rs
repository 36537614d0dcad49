//! Gates of whole rows.

use kvant_backend::Backend;

use crate::DeviceUnderTest;
use crate::judge::{Expected, roundings};
use crate::weights::gaussian;

/// Roundings of `y / (1 + exp(-g))`: three of exp, six for an approximate one, a sum, a quotient;
/// an approximate quotient two more.
const GATE_ROUNDINGS: usize = 10;

/// Compares `gate_rows` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    for (rows, cols) in [(0, 8), (1, 1), (1, 257), (3, 31), (9, 640), (70, 256)] {
        equals_its_equation(subject, rows, cols);
    }
    let (mut y, gates) = (subject.upload(&[1.0; 8]), subject.upload(&[0.0; 2]));
    let device = subject.device();
    subject.expect_refusal("gate_rows", "three rows of two", device.gate_rows(&mut y, 3, 2, &gates));
    subject.expect_refusal("gate_rows", "nine values of eight", device.gate_rows(&mut y, 1, 9, &gates));
}

fn equals_its_equation<B: Backend>(subject: &DeviceUnderTest<B>, rows: usize, cols: usize) {
    let what = || subject.case("gate_rows", format_args!("{rows} rows of {cols}"));
    let (values, mut gates) = (gaussian(1, rows * cols, 3.0), gaussian(2, rows, 10.0));
    // A closed gate, and a NaN.
    if let [_, shut, bad, ..] = &mut gates[..] {
        (*shut, *bad) = (-1e30, f32::NAN);
    }
    let mut y = subject.guarded(&values);
    let result = subject.device().gate_rows(&mut y, rows, cols, &subject.upload(&gates));
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let got = subject.results(&y, rows * cols, &what);
    for ((got, values), gate) in got.chunks(cols).zip(values.chunks(cols)).zip(gates) {
        for (&got, &value) in got.iter().zip(values) {
            let value = f64::from(value) / (1.0 + (-f64::from(gate)).exp());
            let want = Expected {
                value,
                tolerance: roundings(GATE_ROUNDINGS) * value.abs() + f64::from(f32::MIN_POSITIVE) * 1e3,
            };
            let is_expected = if gate.is_nan() { got.is_nan() } else { want.admits(got) };
            assert!(is_expected, "{}: gate {gate}: {got}, want {want:?}", what());
        }
    }
}
