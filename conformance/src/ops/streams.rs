//! Layers with several residual streams, and sparse feed-forward layers beside them.

use kvant_backend::{Activation, Backend, HyperConnections, StreamAttention, StreamMixing, Streams};

use crate::DeviceUnderTest;
use crate::judge::{Expected, roundings};
use crate::reference;
use crate::weights::gaussian;

/// `(width, rows)`: below, at and above registers and thread blocks.
const SHAPES: [(usize, usize); 7] = [(1, 1), (8, 0), (31, 3), (256, 2), (257, 1), (640, 9), (1536, 33)];
/// Roundings of GELU times a number, as of a gate, without those of its exponent.
const GATE_ROUNDINGS: usize = 11;

/// Compares `mix_streams` with its equation.
pub fn mix<B: Backend>(subject: &DeviceUnderTest<B>) {
    for (width, rows) in SHAPES {
        for (n_in, n_out) in [(1, 1), (5, 4), (2, 3)] {
            mixed_streams_equal_their_equation(subject, rows, Streams { n_in, n_out, width });
        }
    }
    let [mut y, x, coefs] = [6, 6, 3].map(|n| subject.upload(&vec![1.0; n]));
    let mut refused = |case: &str, rows, [n_in, n_out, width]: [usize; 3]| {
        let streams = Streams { n_in, n_out, width };
        let result = subject.device().mix_streams(&coefs, &x, rows, streams, &mut y);
        subject.expect_refusal("mix_streams", case, result);
    };
    refused("four coefficients of three", 1, [2, 2, 1]);
    refused("seven inputs of six", 1, [1, 1, 7]);
    refused("nine outputs of six", 1, [1, 3, 3]);
}

fn mixed_streams_equal_their_equation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    rows: usize,
    streams: Streams,
) {
    let what = || subject.case("mix_streams", format_args!("{rows} rows, {streams:?}"));
    let Streams { n_in, n_out, width } = streams;
    let (coefs, x) = (gaussian(1, rows * n_out * n_in, 1.0), gaussian(2, n_in * rows * width, 3.0));
    let mut y = subject.guarded(&vec![f32::NAN; n_out * rows * width]);
    let (on_coefs, on_x) = (subject.upload(&coefs), subject.upload(&x));
    let result = subject.device().mix_streams(&on_coefs, &on_x, rows, streams, &mut y);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let want = |at: usize| {
        let (i, row, col) = (at / (rows * width), at / width % rows, at % width);
        let term = |j: usize| {
            let c = coefs[(row * n_out + i) * n_in + j];
            f64::from(c) * f64::from(x[(j * rows + row) * width + col])
        };
        let (value, sizes) =
            (0..n_in).map(term).fold((0.0, 0.0), |(sum, sizes), x| (sum + x, sizes + x.abs()));
        Expected { value, tolerance: roundings(n_in + 1) * sizes }
    };
    subject.expect(&y, &(0..n_out * rows * width).map(want).collect::<Vec<_>>(), &what);
}

/// Roundings of a gate: a product with the scale, a sum, an exponential, a sum and a quotient, the
/// epsilon and the factor.
const CONNECTION_ROUNDINGS: usize = 12;

/// Compares `connect_streams` with its equation, with and without writing.
pub fn connect<B: Backend>(subject: &DeviceUnderTest<B>) {
    if !subject.device().info().selects_tokens {
        let [x, mut y] = [8, 8].map(|n| subject.upload(&vec![1.0; n]));
        let connections = connections([2, 2], StreamMixing::None, &x);
        let result = subject.device().connect_streams(connections, &x, &x, 1, &mut y, None);
        return subject.expect_refusal("connect_streams", "any connections", result);
    }
    for (width, rows) in SHAPES {
        for n in [1, 2, 4, 5] {
            for mixing in MIXINGS {
                connections_equal_their_equation(subject, [n, width, rows], mixing, true);
            }
            connections_equal_their_equation(subject, [n, width, rows], StreamMixing::None, false);
        }
    }
    let [x, numbers, mut reads, mut writes] = [8, 6, 4, 12].map(|n| subject.upload(&vec![1.0; n]));
    let mut refused = |case: &str, [n, width, rows]: [usize; 3], is_written: bool| {
        let writes = is_written.then_some(&mut writes);
        let connections = connections([n, width], StreamMixing::None, &numbers);
        let result = subject.device().connect_streams(connections, &x, &x, rows, &mut reads, writes);
        subject.expect_refusal("connect_streams", case, result);
    };
    refused("no streams", [0, 1, 1], true);
    refused("six numbers of three", [2, 1, 1], false);
    refused("ten values of eight", [2, 5, 1], true);
    refused("twelve products of eight", [2, 1, 3], true);
}

const MIXINGS: [StreamMixing; 3] =
    [StreamMixing::None, StreamMixing::Sinkhorn { iterations: 1 }, StreamMixing::Sinkhorn { iterations: 20 }];

/// Returns connections of n streams of a width with these numbers.
fn connections<Buffer>(
    [n, width]: [usize; 2],
    mixing: StreamMixing,
    numbers: &Buffer,
) -> HyperConnections<'_, Buffer> {
    HyperConnections { n, width, numbers, norm_eps: 1e-5, eps: 1e-6, write_eps: 1e-3, magnitude: 2.5, mixing }
}

fn connections_equal_their_equation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    [n, width, rows]: [usize; 3],
    mixing: StreamMixing,
    is_written: bool,
) {
    let of_them = format_args!("{rows} rows, {n} streams of {width}, {mixing:?}, written: {is_written}");
    let what = || subject.case("connect_streams", of_them);
    let (n_products, n_scales) = (mixing.n_products(n, is_written), mixing.n_scales(is_written));
    let (products, streams) = (gaussian(1, rows * n_products, 2.0), gaussian(2, n * rows * width, 3.0));
    let numbers = gaussian(3, n_scales + n_products, 1.0);
    let mut reads = subject.guarded(&vec![f32::NAN; rows * n]);
    let mut writes = subject.guarded(&vec![f32::NAN; rows * n * (n + 1)]);
    let [on_products, on_streams, on_numbers] = [&products, &streams, &numbers].map(|x| subject.upload(x));
    let connections = connections([n, width], mixing, &on_numbers);
    let (to, written) = (&mut reads, is_written.then_some(&mut writes));
    let result = subject.device().connect_streams(connections, &on_products, &on_streams, rows, to, written);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let root = |row: usize| {
        let of = |stream: usize| reference::norm(&streams[(stream * rows + row) * width..][..width]).powi(2);
        ((0..n).map(of).sum::<f64>() / (n * width) as f64 + 1e-5).sqrt()
    };
    let argument = |row: usize, kind: usize, i: usize| {
        let [product, scale, base] =
            [products[row * n_products + i], numbers[kind], numbers[n_scales + i]].map(f64::from);
        let scaled = product / root(row) * scale;
        let tolerance = roundings(width.div_ceil(2) + n + 4) * scaled.abs() + roundings(2) * base.abs();
        Expected { value: scaled + base, tolerance }
    };
    // The argument of a gate has an absolute error, of which the gate has at most its whole.
    let gate = |row: usize, kind: usize, i: usize| {
        let Expected { value, tolerance } = argument(row, kind, kind * n + i);
        let value = 1.0 / (1.0 + (-value).exp());
        Expected { value, tolerance: (tolerance + roundings(CONNECTION_ROUNDINGS)) * value }
    };
    let read = |row: usize, j: usize| {
        let Expected { value, tolerance } = gate(row, 0, j);
        Expected { value: value + f64::from(connections.eps), tolerance }
    };
    let want: Vec<_> = (0..rows * n).map(|at| read(at / n, at % n)).collect();
    subject.expect(&reads, &want, &what);
    if !is_written {
        return;
    }
    let mixes: Vec<Vec<Expected>> = (0..rows)
        .map(|row| match mixing {
            StreamMixing::None => (0..n * n)
                .map(|at| Expected { value: f64::from(u8::from(at / n == at % n)), tolerance: 0.0 })
                .collect(),
            StreamMixing::Sinkhorn { iterations } => {
                let logits: Vec<_> = (0..n * n).map(|i| argument(row, 2, 2 * n + i)).collect();
                mixing_matrix(&logits, n, f64::from(connections.eps), iterations)
            }
        })
        .collect();
    let write = |at: usize| {
        let (row, i, j) = (at / (n * (n + 1)), at / (n + 1) % n, at % (n + 1));
        let Expected { value, tolerance } = gate(row, 1, i);
        let magnitude = f64::from(connections.magnitude);
        let out = magnitude * value + f64::from(connections.write_eps);
        let off = magnitude * tolerance + roundings(1) * out;
        if j == n {
            return Expected { value: out, tolerance: off };
        }
        let Expected { value: read, tolerance } = read(row, j);
        let mix = mixes[row][j * n + i];
        let sizes = mix.value.abs() + out * read;
        let tolerance = mix.tolerance + off * read + out * tolerance + roundings(2) * sizes;
        Expected { value: mix.value - out * read, tolerance }
    };
    subject.expect(&writes, &(0..rows * n * (n + 1)).map(write).collect::<Vec<_>>(), &what);
}

/// Returns the matrix that mixes streams. An error of its logits changes every entry by at most
/// twice as much of it in the softmax, and a division by sums of entries that are all off by some
/// factor leaves them off by at most that factor twice; but the matrix depends on ratios of
/// logits alone, which divisions of rows and columns preserve, so that their error stays, and each
/// division adds its roundings.
fn mixing_matrix(logits: &[Expected], n: usize, eps: f64, iterations: usize) -> Vec<Expected> {
    let off = logits.iter().fold(0.0f64, |max, logit| max.max(logit.tolerance));
    let mut matrix: Vec<f64> = logits.iter().map(|logit| logit.value).collect();
    for row in matrix.chunks_exact_mut(n) {
        reference::softmax(row);
        row.iter_mut().for_each(|x| *x += eps);
    }
    for iteration in 0..iterations {
        if iteration > 0 {
            for row in matrix.chunks_exact_mut(n) {
                let sum = row.iter().sum::<f64>() + eps;
                row.iter_mut().for_each(|x| *x /= sum);
            }
        }
        for column in 0..n {
            let sum = matrix.iter().skip(column).step_by(n).sum::<f64>() + eps;
            matrix.iter_mut().skip(column).step_by(n).for_each(|x| *x /= sum);
        }
    }
    let relative = 4.0 * n as f64 * off + roundings((2 * iterations + 1) * (n + 2) + CONNECTION_ROUNDINGS);
    matrix.into_iter().map(|value| Expected { value, tolerance: relative * value.max(eps) }).collect()
}

/// Roundings of a weight besides those of the scores: a difference, an exponential of three, a sum
/// of a few, and a quotient.
const WEIGHT_ROUNDINGS: usize = 12;

/// Compares `attend_streams` with its equation, with and without a rest.
pub fn attend<B: Backend>(subject: &DeviceUnderTest<B>) {
    let [x, mut y, mut rest] = [8, 4, 6].map(|n| subject.upload(&vec![1.0; n]));
    if !subject.device().info().selects_tokens {
        let result = subject.device().attend_streams(attention(1, &x, true), &x, 1, &mut y, None);
        return subject.expect_refusal("attend_streams", "any streams", result);
    }
    for (width, rows) in SHAPES {
        for n in [1, 2, 5] {
            for continues in [false, true] {
                attention_to_streams_equals_its_equation(subject, [n, width, rows], continues);
            }
        }
    }
    let two = subject.upload(&[1.0; 2]);
    let mut refused = |case: &str, n, rows, scores: &B::Buffer| {
        let result =
            subject.device().attend_streams(attention(n, scores, true), &x, rows, &mut y, Some(&mut rest));
        subject.expect_refusal("attend_streams", case, result);
    };
    refused("no streams", 0, 1, &two);
    refused("streams without values", 1, 1, &subject.upload(&[]));
    refused("ten values of eight", 5, 1, &two);
    refused("five weights of four", 1, 5, &subject.upload(&[1.0]));
    refused("eight coefficients of six", 1, 4, &two);
}

/// Returns the attention to n streams with these scores.
fn attention<Buffer>(n: usize, scores: &Buffer, continues: bool) -> StreamAttention<'_, Buffer> {
    StreamAttention { n, scores, norm_eps: 1e-5, continues }
}

fn attention_to_streams_equals_its_equation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    [n, width, rows]: [usize; 3],
    continues: bool,
) {
    let of_them = format_args!("{rows} rows, {n} streams of {width}, continues: {continues}");
    let what = || subject.case("attend_streams", of_them);
    let streams = gaussian(1, n * rows * width, 3.0);
    let scores = gaussian(2, width, 1.5 / (width as f64).sqrt());
    let mut reads = subject.guarded(&vec![f32::NAN; rows * n]);
    let mut writes = subject.guarded(&vec![f32::NAN; rows * (n + 1)]);
    let (on_streams, on_scores) = (subject.upload(&streams), subject.upload(&scores));
    let attention = attention(n, &on_scores, continues);
    let device = subject.device();
    let result = device.attend_streams(attention, &on_streams, rows, &mut reads, Some(&mut writes));
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let score = |row: usize, j: usize| {
        let x = &streams[(j * rows + row) * width..][..width];
        let root = (reference::norm(x).powi(2) / width as f64 + 1e-5).sqrt();
        let terms = || x.iter().zip(&scores).map(|(x, w)| f64::from(*x) * f64::from(*w) / root);
        let sizes: f64 = terms().map(f64::abs).sum();
        Expected { value: terms().sum(), tolerance: roundings(width + 8) * sizes }
    };
    let of_row = |row: usize| -> Vec<Expected> {
        let scores: Vec<_> = (0..n).map(|j| score(row, j)).collect();
        let mut weights: Vec<_> = scores.iter().map(|score| score.value).collect();
        reference::softmax(&mut weights);
        // Any weight depends on the largest error of a score, twice, and on that of its own.
        let off = scores.iter().map(|s| s.tolerance + roundings(2) * s.value.abs()).fold(0.0, f64::max);
        let tolerance = |weight: f64| weight * (2.5 * off + roundings(WEIGHT_ROUNDINGS + n));
        weights.into_iter().map(|value| Expected { value, tolerance: tolerance(value) }).collect()
    };
    let all: Vec<_> = (0..rows).map(of_row).collect();
    subject.expect(&reads, &all.iter().flatten().copied().collect::<Vec<_>>(), &what);
    let rest = |weights: &Vec<Expected>| -> Vec<Expected> {
        let of = |j: usize| match weights.get(j) {
            None => Expected { value: 1.0, tolerance: 0.0 },
            Some(&Expected { value, tolerance }) => {
                let value = f64::from(u8::from(continues && j == n - 1)) - value;
                Expected { value, tolerance: tolerance + roundings(1) }
            }
        };
        (0..=n).map(of).collect()
    };
    subject.expect(&writes, &all.iter().flat_map(rest).collect::<Vec<_>>(), &what);
}

/// Compares `scale_by_rms` with its equation.
pub fn scale<B: Backend>(subject: &DeviceUnderTest<B>) {
    for (width, rows) in SHAPES {
        let what = || subject.case("scale_by_rms", format_args!("{rows} rows of {width}"));
        let (values, like) = (gaussian(1, rows * width, 1.0), gaussian(2, rows * width, 40.0));
        let mut x = subject.guarded(&values);
        let result = subject.device().scale_by_rms(&mut x, &subject.upload(&like), rows, width);
        result.unwrap_or_else(|error| panic!("{}: {error}", what()));
        let want = |(x, like): (&[f32], &[f32])| -> Vec<Expected> {
            let rms = reference::norm(like) / (width as f64).sqrt();
            let value = |x: &f32| f64::from(*x) * rms;
            // A sum of squares in any order, halved by the root; the mean, the root, a product.
            let tolerance = roundings(width.div_ceil(2) + 4);
            x.iter().map(|x| Expected { value: value(x), tolerance: tolerance * value(x).abs() }).collect()
        };
        let rows = values.chunks(width).zip(like.chunks(width));
        subject.expect(&x, &rows.flat_map(want).collect::<Vec<_>>(), &what);
    }
    let [mut long, short] = [8, 7].map(|n| subject.upload(&vec![1.0; n]));
    let result = subject.device().scale_by_rms(&mut long, &short, 2, 4);
    subject.expect_refusal("scale_by_rms", "rows one value short", result);
    let mut short = short;
    let result = subject.device().scale_by_rms(&mut short, &long, 2, 4);
    subject.expect_refusal("scale_by_rms", "a result one value short", result);
}

/// Compares `gate_sparsely` with its equation.
pub fn gate<B: Backend>(subject: &DeviceUnderTest<B>) {
    for (width, rows) in SHAPES {
        for deviations in [1.645, 0.0, -0.5] {
            sparse_gates_equal_their_equation(subject, rows, width, deviations);
        }
    }
    let what = || subject.case("gate_sparsely", "a NaN");
    let mut y = subject.guarded(&[1.0; 8]);
    let gates = subject.upload(&[0.0, 1.0, f32::NAN, 2.0, 0.0, 1.0, 2.0, 9.0]);
    subject.device().gate_sparsely(&mut y, &gates, 2, 4, 0.0).unwrap_or_else(|e| panic!("{}: {e}", what()));
    let got = subject.results(&y, 8, &what);
    assert!(got[2].is_nan() && got[4] == 0.0 && got[7] > 1.0, "{}: {got:?}", what());
    let [mut long, short] = [8, 7].map(|n| subject.upload(&vec![1.0; n]));
    let result = subject.device().gate_sparsely(&mut long, &short, 2, 4, 0.0);
    subject.expect_refusal("gate_sparsely", "gates one value short", result);
    let mut short = short;
    let result = subject.device().gate_sparsely(&mut short, &long, 2, 4, 0.0);
    subject.expect_refusal("gate_sparsely", "a result one value short", result);
}

fn sparse_gates_equal_their_equation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    rows: usize,
    width: usize,
    deviations: f32,
) {
    let what =
        || subject.case("gate_sparsely", format_args!("{rows} rows of {width}, {deviations} deviations"));
    let (values, mut gates) = (gaussian(1, rows * width, 3.0), gaussian(2, rows * width, 1.5));
    // A mean besides zero.
    gates.iter_mut().for_each(|g| *g += 0.7);
    let mut y = subject.guarded(&values);
    let result = subject.device().gate_sparsely(&mut y, &subject.upload(&gates), rows, width, deviations);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let want = |(y, gates): (&[f32], &[f32])| -> Vec<Expected> {
        let g: Vec<f64> = gates.iter().map(|g| f64::from(*g)).collect();
        let mean = g.iter().sum::<f64>() / width as f64;
        let deviation = (g.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / width as f64).sqrt();
        let cutoff = mean + f64::from(deviations) * deviation;
        // Sums in any order of the values, and of the squares of their distances; a root, products
        // and a difference. GELU has a slope of at most 1.2.
        let size = g.iter().map(|g| g.abs()).sum::<f64>() / width as f64;
        let of_cutoff = roundings(width + 4) * (size + f64::from(deviations.abs()) * (deviation + size));
        let each = |(y, g): (&f32, f64)| {
            let (y, above) = (f64::from(*y), (g - cutoff).max(0.0));
            let value = y * reference::activate(Activation::Gelu, above);
            let of_gate = roundings(GATE_ROUNDINGS) + roundings(5) * reference::gelu_exponent(above).abs();
            let of_above = 1.2 * (of_cutoff + roundings(1) * above) * y.abs();
            Expected { value, tolerance: of_gate * value.abs() + of_above }
        };
        y.iter().zip(g).map(each).collect()
    };
    let rows = values.chunks(width).zip(gates.chunks(width));
    subject.expect(&y, &rows.flat_map(want).collect::<Vec<_>>(), &what);
}
