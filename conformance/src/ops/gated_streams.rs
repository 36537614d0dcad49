//! Gated residual streams, and values of n-grams that are added to them.

use kvant_backend::{Backend, GatedStreams, NgramInjection, StateBatchEntry, TokenSpan};

use super::recurrent::{N_ROWS, STEPS, States};
use crate::judge::{Expected, assert_close, roundings};
use crate::reference;
use crate::skipped::product;
use crate::weights::gaussian;
use crate::{DeviceUnderTest, Skipped};

const EPS: f32 = 1e-5;
/// Roundings of the logistic function: three of exp, a sum, a quotient of three.
const SIGMOID: usize = 7;

/// Compares `gate_streams` with its equation, with and without coefficients of what is written.
pub fn gate<B: Backend>(subject: &DeviceUnderTest<B>) {
    let [x, mut y, mut rest] = [8, 4, 6].map(|n| subject.upload(&vec![1.0; n]));
    let of =
        |n, width, norms, gates, products| GatedStreams { n, width, norms, norm_eps: EPS, gates, products };
    if !subject.device().info().selects_tokens {
        let result = subject.device().gate_streams(of(1, 8, &x, &x, &x), &x, 1, &mut y, None);
        return subject.expect_refusal("gate_streams", "any streams", result);
    }
    for ((n, width), rows) in product(&product(&[2, 4], &[1, 40, 96]), &[1, 7]) {
        reading_equals_its_equation(subject, [n, width, rows]);
    }
    let [two, four] = [2, 4].map(|n| subject.upload(&vec![1.0; n]));
    let mut refused = |case: &str, of, rows| {
        let result = subject.device().gate_streams(of, &x, rows, &mut y, Some(&mut rest));
        subject.expect_refusal("gate_streams", case, result);
    };
    refused("no streams", of(0, 2, &two, &x, &x), 1);
    refused("streams without values", of(2, 0, &two, &x, &x), 1);
    refused("norms of three streams", of(3, 2, &four, &x, &x), 1);
    refused("four gates of twelve", of(2, 2, &four, &four, &x), 3);
    refused("twelve values of eight", of(2, 2, &four, &x, &x), 3);
    refused("two products of four", of(2, 2, &four, &x, &two), 2);
    refused("sixteen coefficients of six", of(2, 2, &four, &x, &x), 2);
}

fn reading_equals_its_equation<B: Backend>(subject: &DeviceUnderTest<B>, [n, width, rows]: [usize; 3]) {
    let what = || subject.case("gate_streams", format_args!("{rows} rows, {n} streams of {width}"));
    let streams = gaussian(1, n * rows * width, 3.0);
    let [norms, gates, products] =
        [(2, n * width), (3, rows * n * width), (4, rows * n)].map(|(seed, len)| gaussian(seed, len, 2.0));
    let [on_streams, on_norms, on_gates, on_products] =
        [&streams, &norms, &gates, &products].map(|of| subject.upload(of));
    let of =
        GatedStreams { n, width, norms: &on_norms, norm_eps: EPS, gates: &on_gates, products: &on_products };
    let term = |row: usize, j: usize, c: usize| {
        let h = &streams[(j * rows + row) * width..][..width];
        let gate = sigmoid(f64::from(gates[(row * n + j) * width + c]));
        gate * f64::from(norms[j * width + c]) * f64::from(h[c]) / rms(h)
    };
    let value = |row: usize, c: usize| {
        let terms: Vec<f64> = (0..n).map(|j| term(row, j, c)).collect();
        let size: f64 = terms.iter().map(|term| term.abs()).sum();
        // Half of those of a sum of squares; the mean, the root, a quotient and three products.
        let tolerance = roundings(width.div_ceil(2) + 8 + SIGMOID + n) * size;
        Expected { value: terms.iter().sum(), tolerance }
    };
    let want: Vec<_> = (0..rows * width).map(|at| value(at / width, at % width)).collect();
    let write = |at: usize| {
        let (row, i, j) = (at / (n * (n + 2)), at / (n + 2) % n, at % (n + 2));
        let out = 2.0 * sigmoid(f64::from(products[row * n + i]));
        let value = match j.checked_sub(n) {
            None => f64::from(u8::from(i == j)),
            Some(0) => -out,
            Some(_) => out,
        };
        Expected { value, tolerance: if j < n { 0.0 } else { roundings(SIGMOID + 1) * out } }
    };
    let coefs: Vec<_> = (0..rows * n * (n + 2)).map(write).collect();
    for is_written in [true, false] {
        let mut x = subject.guarded(&vec![f32::NAN; rows * width]);
        let mut writes = subject.guarded(&vec![f32::NAN; coefs.len()]);
        let to = is_written.then_some(&mut writes);
        let result = subject.device().gate_streams(of, &on_streams, rows, &mut x, to);
        result.unwrap_or_else(|error| panic!("{}: {error}", what()));
        subject.expect(&x, &want, &what);
        if is_written {
            subject.expect(&writes, &coefs, &what);
        }
    }
}

/// Compares `inject_ngrams` with its equation: results are independent of chunks and of other
/// sequences in the batch.
pub fn inject<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let sizes = [(2, 16, 3, 2), (4, 70, 4, 3), (1, 1, 1, 1)];
    for ((n, width, taps, dilation), steps) in skipped.combine(&sizes, &STEPS) {
        check_inject(subject, [n, width, taps, dilation], steps, &mut skipped);
    }
    let device = subject.device();
    let mut page = device.page(1024).expect("memory for a test");
    let [x, norm, kernel, few, mut streams] = [32, 8, 24, 7, 16].map(|n| subject.upload(&vec![1.0; n]));
    let usual = NgramInjection {
        n: 2,
        width: 4,
        norms: [&norm; 3],
        norm_eps: EPS,
        kernel: &kernel,
        taps: 3,
        dilation: 2,
    };
    for (case, injection, values, rows, n_values) in [
        ("no streams", NgramInjection { n: 0, ..usual }, &x, 2, 0),
        ("streams without values", NgramInjection { width: 0, ..usual }, &x, 2, 0),
        ("a kernel without rows", NgramInjection { taps: 0, ..usual }, &x, 2, 0),
        ("rows of a kernel at one token", NgramInjection { dilation: 0, ..usual }, &x, 2, 0),
        ("a norm of seven", NgramInjection { norms: [&norm, &few, &norm], ..usual }, &x, 2, 32),
        ("a kernel of eight", NgramInjection { kernel: &norm, ..usual }, &x, 2, 32),
        ("values for one row", usual, &few, 2, 32),
        ("rows beyond the streams", usual, &x, 3, 32),
        ("another state", usual, &x, 2, 24),
    ] {
        let span = TokenSpan { first: 0, n: rows, start: 0, first_tail_tile: 0 };
        let mut entries = [StateBatchEntry { rows: span, page: &mut page, offset: 0, n_values }];
        let result = device.inject_ngrams(&mut entries, injection, &x, values, rows, &mut streams);
        subject.expect_refusal("inject_ngrams", case, result);
    }
    skipped
}

fn check_inject<B: Backend>(
    subject: &DeviceUnderTest<B>,
    sizes: [usize; 4],
    steps: &[[usize; 2]],
    skipped: &mut Skipped,
) {
    let [n, width, taps, dilation] = sizes;
    let what = || {
        let of_them =
            format_args!("{n} streams of {width}, {taps} taps {dilation} apart, steps of {steps:?}");
        subject.case("inject_ngrams", of_them)
    };
    let all = n * width;
    let rows_of = |seed: u64, width: usize, by: f32| {
        [0, 1].map(|i| gaussian(seed + i as u64, N_ROWS[i] * width, f64::from(by)))
    };
    let (keys, values, streams) = (rows_of(31, all, 1.0), rows_of(33, width, 2.0), rows_of(35, all, 3.0));
    let norms = [37, 38, 39].map(|seed| gaussian(seed, all, 1.0));
    let kernel = gaussian(40, taps * all, 0.7);
    let on_norms = norms.each_ref().map(|norm| subject.upload(norm));
    let on_kernel = subject.upload(&kernel);
    let injection = NgramInjection {
        n,
        width,
        norms: on_norms.each_ref(),
        norm_eps: EPS,
        kernel: &on_kernel,
        taps,
        dilation,
    };
    let feed = |steps| {
        let states = States::new(subject, NgramInjection::n_state(taps, dilation, all));
        states.feed(steps, all, &what, |device, entries, step, y| {
            let rows = step.n[0] + step.n[1];
            let (keys, values) = (step.rows(&keys, all), step.rows(&values, width));
            let by_row = step.rows(&streams, all);
            let mut by_stream = subject.poisoned(rows * all);
            // From rows to streams and back.
            for (row, j) in product(&(0..rows).collect::<Vec<_>>(), &(0..n).collect::<Vec<_>>()) {
                let (from, to) = ((row * n + j) * width, (j * rows + row) * width);
                device.copy(&by_row, from, &mut by_stream, to, width)?;
            }
            device.inject_ngrams(entries, injection, &keys, &values, rows, &mut by_stream)?;
            for (row, j) in product(&(0..rows).collect::<Vec<_>>(), &(0..n).collect::<Vec<_>>()) {
                let (to, from) = ((row * n + j) * width, (j * rows + row) * width);
                device.copy(&by_stream, from, y, to, width)?;
            }
            Ok(())
        })
    };
    let Some((got, states)) = skipped.take(feed(steps), &what) else { return };
    for i in 0..2 {
        let rows = InjectedRows { keys: &keys[i], values: &values[i], streams: &streams[i] };
        assert_close(&got[i], &rows.expected(sizes, &norms, &kernel), &what);
    }
    let Some(at_once) = skipped.take(feed(STEPS[0]), &what) else { return };
    let bits =
        |of: &[Vec<f32>; 2]| of.each_ref().map(|of| of.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    assert!(bits(&got) == bits(&at_once.0) && states == at_once.1, "{}: other bits than in one step", what());
}

/// The rows of a sequence, `[rows, n, width]`, and values `[rows, width]`.
struct InjectedRows<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    streams: &'a [f32],
}

impl InjectedRows<'_> {
    /// Returns the streams that the op leaves, `[rows, n, width]`.
    fn expected(
        &self,
        [n, width, taps, dilation]: [usize; 4],
        norms: &[Vec<f32>; 3],
        kernel: &[f32],
    ) -> Vec<Expected> {
        let (all, rows) = (n * width, self.values.len() / width);
        let gates: Vec<_> = (0..rows * n).map(|at| self.gate(at, n, width, norms)).collect();
        let entered = |row: usize, channel: usize| {
            let gate = gates[row * n + channel / width];
            let value = &self.values[row * width..][..width];
            let mean = value.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
            let root = (mean * gate.value.powi(2) + f64::from(EPS)).sqrt();
            let entered = gate.value * f64::from(value[channel % width]) / root;
            let entered = entered * f64::from(norms[2][channel]);
            // Of the gate, and half of those of a sum of squares of products with it.
            let relative = 2.0 * gate.tolerance / gate.value + roundings(width.div_ceil(2) + 12);
            Expected { value: entered, tolerance: relative * entered.abs() }
        };
        let of = |at: usize| {
            let (row, channel) = (at / all, at % all);
            let (h, gate) = (f64::from(self.streams[at]), gates[row * n + channel / width]);
            let value = f64::from(self.values[row * width + channel % width]);
            let g = Expected {
                value: gate.value * value,
                tolerance: (gate.tolerance + roundings(1)) * value.abs(),
            };
            let (mut y, mut off) = (0.0, 0.0);
            for tap in 0..taps {
                let Some(from) = row.checked_sub((taps - 1 - tap) * dilation) else { continue };
                let (weight, read) = (f64::from(kernel[tap * all + channel]), entered(from, channel));
                y += weight * read.value;
                off += weight.abs() * (read.tolerance + roundings(taps + 1) * read.value.abs());
            }
            let silu = y * sigmoid(y);
            let off = 1.1 * off + roundings(SIGMOID + 1) * silu.abs();
            let size = h.abs() + g.value.abs() + silu.abs();
            Expected { value: h + g.value + silu, tolerance: off + g.tolerance + roundings(3) * size }
        };
        (0..rows * all).map(of).collect()
    }

    /// Returns the gate of stream `at % n` of row `at / n`.
    fn gate(&self, at: usize, n: usize, width: usize, norms: &[Vec<f32>; 3]) -> Expected {
        let of_row = |of: &[f32]| -> Vec<f32> { of[at * width..][..width].to_vec() };
        let (key, h, j) = (of_row(self.keys), of_row(self.streams), at % n);
        let by = rms(&key) * rms(&h) * (width as f64).sqrt();
        let term = |c: usize| {
            let weights = f64::from(norms[0][j * width + c]) * f64::from(norms[1][j * width + c]);
            weights * f64::from(key[c]) * f64::from(h[c]) / by
        };
        let score: f64 = (0..width).map(term).sum();
        let off = roundings(2 * width + 20) * (0..width).map(|c| term(c).abs()).sum::<f64>();
        let magnitude = score.abs().max(f64::from(NgramInjection::MIN_SCORE));
        // The root of a score near 0 changes much, and its sign may.
        let of_root = match score.abs() > 4.0 * off {
            true => off / magnitude.sqrt(),
            false => 2.0 * (magnitude + off).sqrt(),
        };
        let gate = sigmoid(score.signum() * magnitude.sqrt());
        Expected { value: gate, tolerance: 0.25 * of_root + roundings(SIGMOID + 2) * gate }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns the root mean square of a row, with the epsilon of norms.
fn rms(x: &[f32]) -> f64 {
    (reference::norm(x).powi(2) / x.len() as f64 + f64::from(EPS)).sqrt()
}
