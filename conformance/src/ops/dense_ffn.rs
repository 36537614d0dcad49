//! Dense feed-forward layer: adds the product with the gated values to each row.

use kvant_backend::{Activation, Backend, FfnWeights, Norm};
use kvant_codec::DType;

use super::gated_ffn::gated;
use super::project::products;
use crate::judge::{Expected, roundings};
use crate::skipped::product;
use crate::weights::{Activations, Weights, gaussian};
use crate::{DeviceUnderTest, Skipped};

const EPS: f32 = 1e-5;

/// Types of gate, up and down; hidden size and width. Widths of floats end within every step.
const MATRICES: [([DType; 3], usize, usize); 7] = [
    ([DType::F32; 3], 7, 33),
    ([DType::F16, DType::F16, DType::BF16], 40, 130),
    ([DType::Q8_0; 3], 64, 96),
    ([DType::Q4_0, DType::Q4_0, DType::F16], 32, 65),
    ([DType::Q4K, DType::Q4K, DType::Q6K], 256, 256),
    ([DType::Q4K, DType::Q6K, DType::Q4K], 256, 512),
    ([DType::TQ3_1S, DType::TQ3_1S, DType::TQ4_1S], 256, 256),
];

/// Below, at and above tiles and the minimum of tensor cores.
const ROWS: [usize; 6] = [1, 2, 9, 16, 17, 66];

/// What varies besides matrices and rows.
#[derive(Debug, Clone, Copy)]
struct Case {
    activation: Activation,
    /// Whether the up projection gates itself.
    is_ungated: bool,
    has_norm: bool,
    has_bias: bool,
    /// Whether the sum goes to a separate buffer.
    has_separate_output: bool,
}

const fn case(
    activation: Activation,
    [is_ungated, has_norm, has_bias, has_separate_output]: [bool; 4],
) -> Case {
    Case { activation, is_ungated, has_norm, has_bias, has_separate_output }
}

const CASES: [Case; 6] = [
    case(Activation::Silu, [false, true, false, false]),
    case(Activation::Gelu, [false, true, true, true]),
    case(Activation::Relu, [true, false, true, false]),
    case(Activation::Bounded, [false, false, false, true]),
    case(Activation::NormalCdf, [true, true, false, true]),
    case(Activation::Clamped { limit: 2.0 }, [false, false, true, false]),
];

/// Compares `dense_ffn` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    for ((types, n, n_ff), (rows, case)) in skipped.combine(&MATRICES, &product(&ROWS, &CASES)) {
        equals_its_equation(subject, types, [n, n_ff, rows], case);
    }
    for rows in [1, 3, 20] {
        a_bad_number_reaches_its_row_and_no_other(subject, rows);
    }
    wrong_shapes_are_refused(subject);
    skipped
}

/// Returns the weights of gate, up and down.
fn weights(types: [DType; 3], [n, n_ff]: [usize; 2]) -> [Weights; 3] {
    let [gate, up, down] = types;
    [(gate, n_ff, n, 9), (up, n_ff, n, 10), (down, n, n_ff, 11)]
        .map(|(dtype, n_out, n_in, seed)| Weights::gaussian(dtype, n_out, n_in, seed))
}

fn equals_its_equation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    types: [DType; 3],
    [n, n_ff, rows]: [usize; 3],
    case: Case,
) {
    let what = || {
        let [gate, up, down] = types;
        let shape = format_args!("{gate} {up} {down} {n} {n_ff}, {rows} rows, {case:?}");
        subject.case("dense_ffn", shape)
    };
    let Case { activation, is_ungated, has_norm, has_bias, has_separate_output } = case;
    let weights = weights(types, [n, n_ff]);
    let n_outs = [n_ff, n_ff, n];
    let [gate, up, down] = [0, 1, 2].map(|i| subject.matrix(weights[i].source(n_outs[i])));
    let (x, gain, offsets) = (gaussian(12, rows * n, 3.0), gaussian(13, n, 3.0), gaussian(14, n, 2.0));
    let (weight, bias) = (subject.upload(&gain), subject.upload(&offsets));
    let norm = has_norm.then_some(Norm { weight: &weight, eps: EPS });
    let (gate, bias) = (if is_ungated { &up } else { &gate }, has_bias.then_some(&bias));
    let on_device = FfnWeights { activation, gate, up: &up, down: &down, bias };
    let (mut y, mut hidden) = (subject.guarded(&x), subject.poisoned(rows * n_ff));
    let mut separate = has_separate_output.then(|| subject.poisoned(rows * n));
    let result = subject.device().dense_ffn(&mut y, rows, norm, on_device, &mut hidden, separate.as_mut());
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    // Reads the guard values behind it too.
    subject.results(&hidden, rows * n_ff, &what);
    if has_separate_output {
        assert_eq!(subject.results(&y, rows * n, &what), x, "{}: the stream is left as it is", what());
    }

    let activations = |x: &[f32]| match has_norm {
        true => Activations::normalized(x, &gain, EPS),
        false => Activations::new(x),
    };
    let inputs: Vec<_> = x.chunks_exact(n).map(activations).collect();
    let product = |i: usize, x: &[Activations]| products(&weights[i], n_outs[i], x, subject.arithmetic());
    let pairs = product(usize::from(is_ungated), &inputs).into_iter().zip(product(1, &inputs));
    let hidden: Vec<_> = pairs.map(|(g, u)| gated(activation, g, u)).collect();
    let rows: Vec<_> = hidden.chunks_exact(n_ff).map(Activations::from_expected).collect();
    let begins = x.iter().zip(offsets.iter().cycle()).map(|(&x, &offset)| {
        let parts = [(offset, has_bias), (x, !has_separate_output)];
        parts.map(|(value, is_added)| if is_added { f64::from(value) } else { 0.0 })
    });
    let add = |(y, begins): (Expected, [f64; 2])| {
        let value = y.value + begins[0] + begins[1];
        // Two sums, in either order.
        let magnitude = y.value.abs() + y.tolerance + begins.iter().map(|of| of.abs()).sum::<f64>();
        Expected { value, tolerance: y.tolerance + roundings(2) * magnitude }
    };
    let want: Vec<_> = product(2, &rows).into_iter().zip(begins).map(add).collect();
    subject.expect(separate.as_ref().unwrap_or(&y), &want, &what);
}

/// Checks that NaN or infinity in a row reaches that row only.
fn a_bad_number_reaches_its_row_and_no_other<B: Backend>(subject: &DeviceUnderTest<B>, rows: usize) {
    let shapes = [([DType::F32; 3], 40, 33), ([DType::Q4_0; 3], 64, 64)];
    for ((types, n, n_ff), bad) in product(&shapes, &[f32::NAN, f32::INFINITY]) {
        let what = || subject.case("dense_ffn", format_args!("{bad} in a row of {rows}, {}", types[0]));
        let (weights, n_outs) = (weights(types, [n, n_ff]), [n_ff, n_ff, n]);
        let [gate, up, down] = [0, 1, 2].map(|i| subject.matrix(weights[i].source(n_outs[i])));
        let (mut x, row) = (gaussian(12, rows * n, 1.0), rows / 2);
        x[row * n + 17] = bad;
        let (mut y, mut hidden) = (subject.guarded(&x), subject.poisoned(rows * n_ff));
        let (gate, up, down) = (&gate, &up, &down);
        let weights = FfnWeights { activation: Activation::Silu, gate, up, down, bias: None };
        let result = subject.device().dense_ffn(&mut y, rows, None, weights, &mut hidden, None);
        result.unwrap_or_else(|error| panic!("{}: {error}", what()));
        for (r, y) in subject.results(&y, rows * n, &what).chunks_exact(n).enumerate() {
            assert!(y.iter().all(|y| y.is_finite() == (r != row)), "{}: row {r} is {y:?}", what());
        }
    }
}

fn wrong_shapes_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let matrix = |n_out, n_in| subject.matrix(Weights::gaussian(DType::F32, n_out, n_in, 12).source(n_out));
    let (up, down, wide, tall) = (matrix(4, 8), matrix(8, 4), matrix(8, 5), matrix(9, 4));
    let (weight, bias) = (subject.upload(&[1.0; 8]), subject.upload(&[1.0; 7]));
    let mut x = subject.upload(&[0.0; 16]);
    let mut ffn = |down, bias, [n_hidden, n_out]: [usize; 2], rows| {
        let [mut hidden, mut to] = [n_hidden, n_out].map(|n| subject.upload(&vec![0.0; n]));
        let norm = Some(Norm { weight: &weight, eps: EPS });
        let weights = FfnWeights { activation: Activation::Silu, gate: &up, up: &up, down, bias };
        subject.device().dense_ffn(&mut x, rows, norm, weights, &mut hidden, Some(&mut to))
    };
    for (case, result) in [
        ("five columns down of four", ffn(&wide, None, [8, 16], 2)),
        ("nine features down of eight", ffn(&tall, None, [8, 18], 2)),
        ("a bias of seven", ffn(&down, Some(&bias), [8, 16], 2)),
        ("seven hidden values of eight", ffn(&down, None, [7, 16], 2)),
        ("a row beyond the output", ffn(&down, None, [8, 15], 2)),
        ("a row beyond the input", ffn(&down, None, [12, 24], 3)),
    ] {
        subject.expect_refusal("dense_ffn", case, result);
    }
}
