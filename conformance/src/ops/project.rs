//! GEMMs of activations with weights, and their fused prologues and epilogues.

use kvant_backend::{Backend, Input, Norm, Output};
use kvant_codec::fields::FieldSpec;
use kvant_codec::random::Random;
use kvant_codec::{DType, Rotation};

use crate::judge::{Expected, roundings};
use crate::weights::{Activations, Weights, gaussian};
use crate::{Arithmetic, DeviceUnderTest, Skipped};

const EPS: f32 = 1e-5;

/// `(n_out, rows)`: below, at and above panels of 16 and tiles of 64 outputs, pairs of them, tiles
/// of 6, 8, 12, 16 and 64 rows, and row blocks.
const SHAPES: [(usize, usize); 15] = [
    (1, 1),
    (17, 1),
    (48, 2),
    (33, 3),
    (16, 5),
    (31, 6),
    (15, 7),
    (31, 8),
    (1, 9),
    (40, 12),
    (32, 13),
    (64, 16),
    (65, 17),
    (33, 33),
    (7, 65),
];
/// Maximum outputs of [`SHAPES`].
const MAX_FEATURES: usize = 65;

/// Row lengths that end within, at and beyond units and chunks of every kernel.
fn widths(dtype: DType) -> &'static [usize] {
    match dtype.block_len() {
        1 => &[1, 2, 7, 16, 129, 300],
        32 => &[32, 64, 96, 512, 544],
        64 => &[64, 128, 192, 512, 576],
        128 => &[128, 512, 1152],
        _ => &[256, 512, 1280],
    }
}

/// Compares `project` with sums in f64.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    for dtype in DType::weights() {
        let matrices: Vec<_> = widths(dtype)
            .iter()
            .map(|&n_in| Weights::gaussian(dtype, MAX_FEATURES, n_in, n_in as u64))
            .collect();
        let numbers: Vec<usize> = (0..matrices.len()).collect();
        for (number, (n_out, rows)) in skipped.combine(&numbers, &SHAPES) {
            products_are_sums(subject, &matrices[number], n_out, rows);
        }
        if FieldSpec::of(dtype).is_some() {
            for (n_out, rows) in [(17, 1), (2, 5), (15, 16), (33, 20)] {
                bytes_lose_nothing_of_whole_numbers(subject, dtype, n_out, rows);
            }
        }
        for (bad, rows) in skipped.combine(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY], &[2, 14, 20]) {
            bad_numbers_stay_visible(subject, dtype, bad, rows);
        }
    }
    for dtype in [DType::F16, DType::Q8_0, DType::Q4K, DType::IQ4NL, DType::TQ4_1S, DType::TQ3T] {
        for rows in [6, 20] {
            inputs_of_any_size_keep_their_precision(subject, dtype, rows);
        }
    }
    for rows in [1, 2, 11, 40] {
        norm_bias_and_residual_are_applied_in_order(subject, rows);
    }
    wrong_shapes_are_refused(subject);
    skipped
}

fn products_are_sums<B: Backend>(subject: &DeviceUnderTest<B>, weights: &Weights, n_out: usize, rows: usize) {
    let x = gaussian(2, rows * weights.n_in, 1.0);
    let activations: Vec<_> = x.chunks_exact(weights.n_in).map(Activations::new).collect();
    equals_sums(subject, weights, n_out, &x, &activations, "gaussian");
}

/// Multiplies integers with 127 among any 32, which are exact in bytes with one step per 32 values:
/// only the roundings of sums remain.
fn bytes_lose_nothing_of_whole_numbers<B: Backend>(
    subject: &DeviceUnderTest<B>,
    dtype: DType,
    n_out: usize,
    rows: usize,
) {
    let n_in = 2 * dtype.block_len();
    let mut random = Random::new(14);
    let mut x: Vec<f32> = (0..rows * n_in).map(|_| f32::from((random.bits() >> 40) as u8) - 128.0).collect();
    for group in x.as_chunks_mut::<32>().0 {
        group.iter_mut().for_each(|v| *v = v.max(-127.0));
        group[7] = 127.0;
        if FieldSpec::is_rotated(dtype) {
            Rotation::tq().inverse(group);
        }
    }
    let activations: Vec<_> = x.chunks_exact(n_in).map(Activations::integers).collect();
    equals_sums(subject, &Weights::gaussian(dtype, n_out, n_in, 15), n_out, &x, &activations, "whole");
}

/// Multiplies rows of millions beside ordinary ones, tiny rows and a row of zeros, each with an
/// outlier.
fn inputs_of_any_size_keep_their_precision<B: Backend>(
    subject: &DeviceUnderTest<B>,
    dtype: DType,
    rows: usize,
) {
    let (n_in, n_out) = (256, 3);
    let mut x = gaussian(16, rows * n_in, 1.0);
    for (row, size) in x.chunks_exact_mut(n_in).zip([1.0, 1e-6, 3e6, 0.0, 1e30, 1e-30].into_iter().cycle()) {
        row.iter_mut().for_each(|v| *v *= size);
        row[7] *= 1e3;
    }
    let activations: Vec<_> = x.chunks_exact(n_in).map(Activations::new).collect();
    equals_sums(subject, &Weights::gaussian(dtype, n_out, n_in, 17), n_out, &x, &activations, "of any size");
}

/// Compares the products of `x` `[rows, n_in]` with the first `n_out` rows with those of
/// `activations`.
fn equals_sums<B: Backend>(
    subject: &DeviceUnderTest<B>,
    weights: &Weights,
    n_out: usize,
    x: &[f32],
    activations: &[Activations],
    law: &str,
) {
    let (&Weights { dtype, n_in, .. }, rows) = (weights, activations.len());
    let w = subject.matrix(weights.source(n_out));
    let mut y = subject.poisoned(rows * n_out);
    let what = || subject.case("project", format_args!("{dtype} {n_out}x{n_in}, {rows} rows, {law}"));
    let input = Input { x: &subject.upload(x), norm: None, first_row: 0, rows };
    let outputs = &mut [Output { w: &w, bias: None, y: &mut y, accumulate: false }];
    subject.device().project(input, outputs).unwrap_or_else(|error| panic!("{}: {error}", what()));
    subject.expect(&y, &products(weights, n_out, activations, subject.arithmetic()), &what);
}

/// Returns every product of `x` with the first `n_out` rows, `[rows, n_out]`.
pub fn products(weights: &Weights, n_out: usize, x: &[Activations], arithmetic: Arithmetic) -> Vec<Expected> {
    let rows = x.len();
    x.iter().flat_map(|x| (0..n_out).map(move |row| weights.product(row, x, rows, arithmetic))).collect()
}

/// Checks that NaN or infinity in a row reaches every product of that row, and no other.
fn bad_numbers_stay_visible<B: Backend>(subject: &DeviceUnderTest<B>, dtype: DType, bad: f32, rows: usize) {
    let (n_in, n_out) = (256, 20);
    let weights = Weights::gaussian(dtype, n_out, n_in, 5);
    let w = subject.matrix(weights.source(n_out));
    let mut x = gaussian(6, rows * n_in, 1.0);
    // A nearly zero row, and the invalid one.
    x[..n_in].iter_mut().for_each(|v| *v *= 1e-40);
    x[n_in + 77] = bad;
    let mut y = subject.poisoned(rows * n_out);
    let what = || subject.case("project", format_args!("{dtype}, {bad} in row 1 of {rows}"));
    let input = Input { x: &subject.upload(&x), norm: None, first_row: 0, rows };
    let outputs = &mut [Output { w: &w, bias: None, y: &mut y, accumulate: false }];
    subject.device().project(input, outputs).unwrap_or_else(|error| panic!("{}: {error}", what()));
    for (row, y) in subject.download(&y, rows * n_out).chunks_exact(n_out).enumerate() {
        assert!(y.iter().all(|y| y.is_finite() == (row != 1)), "{}: row {row} is {y:?}", what());
    }
}

/// One output of a fused projection.
struct OutputCase {
    weights: Weights,
    n_out: usize,
    has_bias: bool,
    accumulate: bool,
}

/// Projects one normalized input, starting at its second row, to outputs of several types. Equals a
/// norm, a product, a sum with the bias and a sum with the previous content; each sum is one more
/// rounding of its terms.
fn norm_bias_and_residual_are_applied_in_order<B: Backend>(subject: &DeviceUnderTest<B>, rows: usize) {
    let n_in = 256;
    let case = |dtype, n_out, has_bias, accumulate| {
        let weights = Weights::gaussian(dtype, n_out, n_in, n_out as u64);
        OutputCase { weights, n_out, has_bias, accumulate }
    };
    let cases = [
        case(DType::F32, 20, true, true),
        case(DType::Q4_0, 7, true, false),
        case(DType::TQ4_1S, 33, false, true),
        case(DType::Q6K, 16, false, false),
        case(DType::BF16, 1, true, true),
    ];
    let x = gaussian(5, (rows + 1) * n_in, 4.0);
    let gain = gaussian(6, n_in, 1.0);
    let old: Vec<_> = cases.iter().map(|case| gaussian(7, rows * case.n_out, 1.0)).collect();
    let biases: Vec<_> = cases.iter().map(|case| gaussian(8, case.n_out, 1.0)).collect();

    let matrices: Vec<_> = cases.iter().map(|case| subject.matrix(case.weights.source(case.n_out))).collect();
    let on_device: Vec<_> = biases.iter().map(|bias| subject.upload(bias)).collect();
    let start = |(case, old): (&OutputCase, &Vec<f32>)| {
        if case.accumulate { subject.guarded(old) } else { subject.poisoned(old.len()) }
    };
    let mut ys: Vec<_> = cases.iter().zip(&old).map(start).collect();
    let operands = cases.iter().zip(&matrices).zip(&on_device).zip(&mut ys);
    let mut outputs: Vec<_> = operands
        .map(|(((case, w), bias), y)| Output {
            w,
            bias: case.has_bias.then_some(bias),
            y,
            accumulate: case.accumulate,
        })
        .collect();
    let weight = subject.upload(&gain);
    let norm = Some(Norm { weight: &weight, eps: EPS });
    let input = Input { x: &subject.upload(&x), norm, first_row: 1, rows };
    let what = |case: &OutputCase| {
        let OutputCase { weights, has_bias, accumulate, .. } = case;
        subject.case(
            "project",
            format_args!("norm, {rows} rows, {}, bias {has_bias}, accumulate {accumulate}", weights.dtype),
        )
    };
    subject
        .device()
        .project(input, &mut outputs)
        .unwrap_or_else(|error| panic!("{}: {error}", what(&cases[0])));

    let x: Vec<_> =
        x[n_in..].chunks_exact(n_in).map(|row| Activations::normalized(row, &gain, EPS)).collect();
    for (((case, y), old), bias) in cases.iter().zip(&ys).zip(&old).zip(&biases) {
        let mut want = products(&case.weights, case.n_out, &x, subject.arithmetic());
        for (i, want) in want.iter_mut().enumerate() {
            let bias = if case.has_bias { f64::from(bias[i % case.n_out]) } else { 0.0 };
            let old = if case.accumulate { f64::from(old[i]) } else { 0.0 };
            let added = want.value.abs() + want.tolerance + bias.abs() + old.abs();
            want.value += bias + old;
            want.tolerance += roundings(2) * added;
        }
        subject.expect(y, &want, &|| what(case));
    }
}

fn wrong_shapes_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let device = subject.device();
    let matrix = |n_in| subject.matrix(Weights::gaussian(DType::F32, 4, n_in, 12).source(4));
    let (w, other) = (matrix(8), matrix(9));
    let (x, five) = (subject.upload(&[0.0; 16]), subject.upload(&[0.0; 5]));
    let mut y = subject.upload(&[0.0; 8]);
    let mut project = |w, bias, norm, first_row, rows| {
        let input = Input { x: &x, norm, first_row, rows };
        device.project(input, &mut [Output { w, bias, y: &mut y, accumulate: false }])
    };
    let norm = Some(Norm { weight: &five, eps: EPS });
    subject.expect_refusal("project", "a row beyond the input", project(&w, None, None, 1, 2));
    subject.expect_refusal("project", "a row beyond the output", project(&w, None, None, 0, 3));
    subject.expect_refusal("project", "nine columns on eight", project(&other, None, None, 0, 2));
    subject.expect_refusal("project", "a bias of five", project(&w, Some(&five), None, 0, 1));
    subject.expect_refusal("project", "a norm of five", project(&w, None, norm, 0, 1));
    let mut ys = [subject.upload(&[0.0; 8]), subject.upload(&[0.0; 8])];
    let [a, b] = &mut ys;
    let mut outputs = [(&w, a), (&other, b)].map(|(w, y)| Output { w, bias: None, y, accumulate: false });
    let input = Input { x: &x, norm: None, first_row: 0, rows: 1 };
    subject.expect_refusal("project", "two widths on one input", device.project(input, &mut outputs));
}
