//! Gated feed-forward layer: `a(gate x) * (up x)`, a the activation.

use kvant_backend::{Activation, Backend, Input, Norm};
use kvant_codec::DType;

use super::project::products;
use crate::judge::{Expected, roundings};
use crate::reference;
use crate::skipped::product;
use crate::weights::{Activations, Weights, gaussian};
use crate::{DeviceUnderTest, Skipped};

const EPS: f32 = 1e-5;
const N_IN: usize = 256;

/// Equal types, which a device may fuse; unequal ones; quantized with rotated.
const TYPES: [(DType, DType); 9] = [
    (DType::Q8_0, DType::Q8_0),
    (DType::Q4K, DType::Q4K),
    (DType::F16, DType::F16),
    (DType::F32, DType::BF16),
    (DType::Q4K, DType::Q6K),
    (DType::Q5_1, DType::F32),
    (DType::Q8_0, DType::TQ4_1S),
    (DType::IQ4XS, DType::MXFP4),
    (DType::TQ3_1S, DType::TQ3_1S),
];

/// `(n_ff, rows)`.
const SHAPES: [(usize, usize); 8] = [(1, 1), (40, 1), (33, 3), (16, 8), (17, 9), (48, 13), (9, 17), (31, 66)];
/// Maximum features of [`SHAPES`].
const MAX_FEATURES: usize = 48;

/// What varies besides types and shapes.
#[derive(Debug, Clone, Copy)]
struct Case {
    has_norm: bool,
    activation: Activation,
    /// Whether the up projection gates itself.
    is_ungated: bool,
}

const fn case(has_norm: bool, activation: Activation, is_ungated: bool) -> Case {
    Case { has_norm, activation, is_ungated }
}

const CASES: [Case; 12] = [
    case(false, Activation::Silu, false),
    case(true, Activation::Silu, false),
    case(false, Activation::Gelu, false),
    case(true, Activation::Gelu, false),
    case(false, Activation::Bounded, true),
    case(true, Activation::Bounded, false),
    case(false, Activation::Relu, false),
    case(true, Activation::Relu, true),
    case(true, Activation::NormalCdf, true),
    case(false, Activation::Limited { limit: 3.0 }, false),
    case(true, Activation::Limited { limit: 7.0 }, true),
    case(false, Activation::Clamped { limit: 2.0 }, false),
];

/// Numbers of values of `activate`.
const LENGTHS: [usize; 5] = [0, 1, 255, 257, 5000];

/// Roundings of `g / (1 + exp(-z)) * u` besides those of g and u: three of exp, six for an
/// approximate one, a sum, a quotient, a product; an approximate quotient two more.
const GATE_ROUNDINGS: usize = 11;

/// Compares `gated_ffn` with its equation.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let weights = TYPES.map(|(gate, up)| {
        [(gate, 9), (up, 10)].map(|(dtype, seed)| Weights::gaussian(dtype, MAX_FEATURES, N_IN, seed))
    });
    for (types, ((n_ff, rows), case)) in skipped.combine(&weights.each_ref(), &product(&SHAPES, &CASES)) {
        equals_its_equation(subject, types.each_ref(), n_ff, rows, case);
    }
    wrong_shapes_are_refused(subject);
    skipped
}

fn equals_its_equation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    weights: [&Weights; 2],
    n_ff: usize,
    rows: usize,
    Case { has_norm, activation, is_ungated }: Case,
) {
    // Gates of magnitude up to ten, where activations are nonlinear.
    let x = gaussian(11, (rows + 1) * N_IN, 10.0);
    let gain = gaussian(12, N_IN, 10.0);
    let matrices = weights.map(|weights| subject.matrix(weights.source(n_ff)));
    let weight = subject.upload(&gain);
    let norm = has_norm.then_some(Norm { weight: &weight, eps: EPS });
    let input = Input { x: &subject.upload(&x), norm, first_row: 1, rows };
    let mut y = subject.poisoned(rows * n_ff);
    let what = || {
        let [gate, up] = weights.map(|weights| weights.dtype);
        let suffix = if is_ungated { ", of the first alone" } else { "" };
        let shape =
            format_args!("{gate} {up} {n_ff}x{N_IN}, {rows} rows, norm {has_norm}, {activation:?}{suffix}");
        subject.case("gated_ffn", shape)
    };
    let up = usize::from(!is_ungated);
    let result = subject.device().gated_ffn(input, activation, &matrices[0], &matrices[up], &mut y);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));

    let activations =
        |x: &[f32]| if has_norm { Activations::normalized(x, &gain, EPS) } else { Activations::new(x) };
    let x: Vec<_> = x[N_IN..].chunks_exact(N_IN).map(activations).collect();
    let products = weights.map(|weights| products(weights, n_ff, &x, subject.arithmetic()));
    let (gates, ups) = (&products[0], &products[up]);
    let want: Vec<Expected> = gates.iter().zip(ups).map(|(&g, &u)| gated(activation, g, u)).collect();
    subject.expect(&y, &want, &what);
}

/// Compares `activate` with its equation.
pub fn activate<B: Backend>(subject: &DeviceUnderTest<B>) {
    let all = [
        Activation::Silu,
        Activation::Gelu,
        Activation::Bounded,
        Activation::Relu,
        Activation::NormalCdf,
        Activation::Limited { limit: 3.0 },
        Activation::Clamped { limit: 3.0 },
    ];
    for (len, activation) in product(&LENGTHS, &all) {
        activates(subject, len, activation);
    }
    let (mut y, four) = (subject.upload(&[1.0; 5]), subject.upload(&[0.0; 4]));
    let result = subject.device().activate(&mut y, 5, &four, Activation::Silu);
    subject.expect_refusal("activate", "five gates of four", result);
}

fn activates<B: Backend>(subject: &DeviceUnderTest<B>, len: usize, activation: Activation) {
    let what = || subject.case("activate", format_args!("{len} values, {activation:?}"));
    let (values, gates) = (gaussian(13, len, 5.0), gaussian(14, len, 5.0));
    let mut y = subject.guarded(&values);
    let result = subject.device().activate(&mut y, len, &subject.upload(&gates), activation);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let exact = |value: &f32| Expected { value: f64::from(*value), tolerance: 0.0 };
    let want = |(g, u)| {
        let of = gated(activation, exact(g), exact(u));
        // Exponentials beyond f32 give zero.
        Expected { tolerance: of.tolerance + f64::from(f32::MIN_POSITIVE) * 1e3, ..of }
    };
    subject.expect(&y, &gates.iter().zip(&values).map(want).collect::<Vec<_>>(), &what);
}

/// Compares both ops with the equation of one activation, for some types and shapes.
pub(super) fn of_activation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    activation: Activation,
    skipped: &mut Skipped,
) {
    LENGTHS.into_iter().for_each(|len| activates(subject, len, activation));
    let weights = TYPES.map(|(gate, up)| {
        [(gate, 9), (up, 10)].map(|(dtype, seed)| Weights::gaussian(dtype, MAX_FEATURES, N_IN, seed))
    });
    for (types, ((n_ff, rows), has_norm)) in
        skipped.combine(&weights.each_ref(), &product(&SHAPES, &[false, true]))
    {
        equals_its_equation(subject, types.each_ref(), n_ff, rows, case(has_norm, activation, false));
    }
}

/// Expects that a device refuses an activation in both ops.
pub(super) fn refuses<B: Backend>(subject: &DeviceUnderTest<B>, activation: Activation) {
    let matrix = subject.matrix(Weights::gaussian(DType::F32, 4, 8, 12).source(4));
    let [x, mut y] = [8, 4].map(|n| subject.upload(&vec![0.0; n]));
    let input = Input { x: &x, norm: None, first_row: 0, rows: 1 };
    let result = subject.device().gated_ffn(input, activation, &matrix, &matrix, &mut y);
    subject.expect_refusal("gated_ffn", "an activation that the device lacks", result);
    let result = subject.device().activate(&mut y, 4, &x, activation);
    subject.expect_refusal("activate", "an activation that the device lacks", result);
}

/// Returns `a(g) * u` of two uncertain numbers.
pub fn gated(activation: Activation, g: Expected, u: Expected) -> Expected {
    let (slope, of_z) = match activation {
        // The largest slope, at 2.4: 1.0998.
        Activation::Silu | Activation::Limited { .. } | Activation::Clamped { .. } => (1.1, 0.0),
        Activation::Relu => (1.0, 0.0),
        // As SiLU, whose slope is unchanged by a rate in z: `a(g) = silu(r g) / r`. A rounding of z
        // changes it by `z^2 s (1 - s) / r`, at most 0.258 (r = 1.702).
        Activation::Bounded => (1.1, 0.26 * roundings(1)),
        // The largest, at 1.4: 1.129. With s = 1 / (1 + exp(-z)), a rounding of z changes `g s` by
        // `g z s (1 - s)`, at most 0.255 (at 1.3) relative; z takes five.
        Activation::Gelu => (1.13, 0.26 * roundings(5)),
        // The largest, at 0: the normal density, 0.399. A rounding of z changes s by
        // `z s (1 - s)`, at most 0.224 (at 1.54).
        Activation::NormalCdf => (0.4, 0.23 * roundings(5)),
        // At most that of SiLU. The hyperbolic tangent is off by six roundings of one, and two of
        // its argument.
        Activation::Situ { limit, .. } => (1.1, roundings(8) * f64::from(limit)),
    };
    // A clamp increases no error, and 1 + u is one more rounding.
    let u = match activation {
        Activation::Bounded => {
            let limit = f64::from(Activation::BOUNDED[1]);
            let value = 1.0 + u.value.clamp(-limit, limit);
            Expected { value, tolerance: u.tolerance + roundings(1) * value.abs() }
        }
        Activation::Limited { limit } | Activation::Clamped { limit } => {
            Expected { value: u.value.clamp(-f64::from(limit), f64::from(limit)), ..u }
        }
        Activation::Situ { up_limit: Some(limit), .. } => Expected {
            value: reference::soft_cap(u.value, limit),
            tolerance: u.tolerance + roundings(9) * f64::from(limit),
        },
        _ => u,
    };
    let gate = reference::activate(activation, g.value);
    let gate_error = slope * g.tolerance + of_z;
    let value = gate * u.value;
    let tolerance = gate_error * u.value.abs() + (gate.abs() + gate_error) * u.tolerance;
    Expected { value, tolerance: tolerance + roundings(GATE_ROUNDINGS) * (value.abs() + tolerance) }
}

fn wrong_shapes_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let matrix = |n_out, n_in| subject.matrix(Weights::gaussian(DType::F32, n_out, n_in, 12).source(n_out));
    let (w, taller, wider) = (matrix(4, 8), matrix(5, 8), matrix(4, 9));
    let x = subject.upload(&[0.0; 16]);
    let mut y = subject.upload(&[0.0; 8]);
    let mut ffn = |gate, up, first_row, rows| {
        let input = Input { x: &x, norm: None, first_row, rows };
        subject.device().gated_ffn(input, Activation::Gelu, gate, up, &mut y)
    };
    subject.expect_refusal("gated_ffn", "five features up of four", ffn(&w, &taller, 0, 1));
    subject.expect_refusal("gated_ffn", "nine columns up of eight", ffn(&w, &wider, 0, 1));
    subject.expect_refusal("gated_ffn", "a row beyond the input", ffn(&w, &w, 1, 2));
    subject.expect_refusal("gated_ffn", "a row beyond the output", ffn(&w, &w, 0, 3));
}
