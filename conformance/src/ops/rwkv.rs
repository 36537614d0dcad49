//! Ops of RWKV-7: results are independent of chunks and of other sequences in the batch.

use std::iter;

use kvant_backend::{
    Backend, FirstValues, Gate, Heads, StateBatchEntry, TokenShift, TokenSpan, Wkv7Inputs, Wkv7Weights,
};

use super::recurrent::{N_ROWS, STEPS, States};
use crate::judge::{Expected, assert_close, roundings};
use crate::reference::gate;
use crate::skipped::product;
use crate::weights::gaussian;
use crate::{DeviceUnderTest, Skipped};

/// Roundings of the logistic function: three of exp, a sum, a quotient of three.
const SIGMOID: usize = 7;

/// Compares `shift_tokens` with its equation.
pub fn shift_tokens<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    for ((channels, n_mixes), steps) in skipped.combine(&product(&[1, 17, 256], &[1, 6]), &STEPS) {
        check_shift_tokens(subject, channels, n_mixes, steps, &mut skipped);
    }
    let device = subject.device();
    let mut page = device.page(256).expect("memory for a test");
    let (x, mut y) = (subject.upload(&[0.0; 64]), subject.upload(&[0.0; 64]));
    let usual = TokenShift { channels: 8, n_mixes: 2, rows: 2 };
    for (case, shift, n_values) in [
        ("rows beyond the output", TokenShift { rows: 5, ..usual }, 8),
        ("rows beyond the input", TokenShift { rows: 9, n_mixes: 0, ..usual }, 8),
        ("amounts that are too short", TokenShift { n_mixes: 9, rows: 0, ..usual }, 8),
        ("fewer rows than the part has", TokenShift { rows: 1, ..usual }, 8),
        ("another state", usual, 16),
    ] {
        let rows = TokenSpan { first: 0, n: shift.rows.max(2), start: 0, first_tail_tile: 0 };
        let mut entries = [StateBatchEntry { rows, page: &mut page, offset: 0, n_values }];
        subject.expect_refusal(
            "shift_tokens",
            case,
            device.shift_tokens(&mut entries, shift, &x, &x, &mut y),
        );
    }
    skipped
}

fn check_shift_tokens<B: Backend>(
    subject: &DeviceUnderTest<B>,
    channels: usize,
    n_mixes: usize,
    steps: &[[usize; 2]],
    skipped: &mut Skipped,
) {
    let what =
        || subject.case("shift_tokens", format_args!("{n_mixes} of {channels} channels, steps of {steps:?}"));
    let x = [0, 1].map(|i| gaussian(3 + i as u64, N_ROWS[i] * channels, 1.0));
    let amounts = gaussian(5, n_mixes * channels, 1.0);
    let on_device = subject.upload(&amounts);
    // One mix at a time is in the order of rows that the results of two sequences have.
    for mix in 0..n_mixes {
        let fed = States::new(subject, channels).feed(steps, channels, &what, |device, entries, step, y| {
            let rows = step.n[0] + step.n[1];
            let shift = TokenShift { channels, n_mixes, rows };
            let mut all = subject.poisoned(n_mixes * rows * channels);
            device.shift_tokens(entries, shift, &step.rows(&x, channels), &on_device, &mut all)?;
            device.copy(&all, mix * rows * channels, y, 0, rows * channels)
        });
        let Some((got, states)) = skipped.take(fed, &what) else { return };
        let amounts = &amounts[mix * channels..][..channels];
        for ((x, got), state) in x.iter().zip(&got).zip(&states) {
            let before = iter::repeat_n(&0.0, channels).chain(x);
            let want = x.iter().zip(before).zip(amounts.iter().cycle()).map(|((x, before), amount)| {
                let [x, before, amount] = [x, before, amount].map(|&x| f64::from(x));
                let change = amount * (before - x);
                let tolerance = roundings(3) * (x.abs() + change.abs());
                Expected { value: x + change, tolerance }
            });
            assert_close(got, &want.collect::<Vec<_>>(), &what);
            let last: Vec<u8> = x[x.len() - channels..].iter().flat_map(|x| x.to_le_bytes()).collect();
            assert!(*state == last, "{}: the state is not the last row", what());
        }
    }
}

/// Compares `wkv7` with its equation.
pub fn wkv7<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let cases = product(&[(1, 16), (3, 64), (2, 48), (1, 256)], &[true, false]);
    for ((heads, has_first), steps) in skipped.combine(&cases, &STEPS) {
        let heads = Heads { n: heads.0, dim: heads.1 };
        check_wkv7(subject, heads, has_first, steps, &mut skipped);
    }
    let device = subject.device();
    let mut page = device.page(1 << 12).expect("memory for a test");
    let (x, mut y, few) =
        (subject.upload(&[0.0; 64]), subject.upload(&[0.0; 64]), subject.upload(&[0.0; 31]));
    let usual = Heads { n: 2, dim: 16 };
    let of = |value, share, norm| {
        inputs_of([&x, &x, value, &x, &x, &x], Some([&x, share]), [&x, &x, &x, norm, &x])
    };
    for (case, heads, inputs, rows, n_values) in [
        ("no head", Heads { n: 0, dim: 16 }, of(&x, &x, &x), 1, 0),
        ("heads of 24", Heads { n: 1, dim: 24 }, of(&x, &x, &x), 1, 576),
        ("heads of 272", Heads { n: 1, dim: 272 }, of(&x, &x, &x), 0, 272 * 272),
        ("rows beyond the inputs", usual, of(&x, &x, &x), 3, 512),
        ("values for no row", usual, of(&few, &x, &x), 1, 512),
        ("shares for no row", usual, of(&x, &few, &x), 1, 512),
        ("a norm of 31", usual, of(&x, &x, &few), 1, 512),
        ("another state", usual, of(&x, &x, &x), 1, 256),
    ] {
        let rows = TokenSpan { first: 0, n: rows, start: 0, first_tail_tile: 0 };
        let mut entries = [StateBatchEntry { rows, page: &mut page, offset: 0, n_values }];
        subject.expect_refusal("wkv7", case, device.wkv7(&mut entries, heads, inputs, &mut y));
    }
    skipped
}

/// Returns inputs in the order of their fields.
fn inputs_of<T>(rows: [T; 6], first: Option<[T; 2]>, weights: [T; 5]) -> Wkv7Inputs<T> {
    let [receptance, key, value, decay, rate, gate] = rows;
    let first = first.map(|[values, share]| FirstValues { values, share });
    let [removal, replacement, bonus, norm, norm_bias] = weights;
    let weights = Wkv7Weights { removal, replacement, bonus, norm, norm_bias };
    Wkv7Inputs { receptance, key, value, decay, rate, gate, first, weights }
}

fn check_wkv7<B: Backend>(
    subject: &DeviceUnderTest<B>,
    heads: Heads,
    has_first: bool,
    steps: &[[usize; 2]],
    skipped: &mut Skipped,
) {
    let what =
        || subject.case("wkv7", format_args!("{heads:?}, first values {has_first}, steps of {steps:?}"));
    let width = heads.n * heads.dim;
    let of = |seed: u64| [0, 1].map(|i| gaussian(seed + i as u64, N_ROWS[i] * width, 1.5));
    let rows = [11, 13, 15, 17, 19, 21].map(of);
    let first = has_first.then(|| [23, 25].map(of));
    let weights = [27, 28, 29, 30, 31].map(|seed| gaussian(seed, width, 1.0));
    let on_device = weights.each_ref().map(|values| subject.upload(values));
    let feed = |steps| {
        States::new(subject, width * heads.dim).feed(steps, width, &what, |device, entries, step, y| {
            let rows = rows.each_ref().map(|of| step.rows(of, width));
            let first = first.as_ref().map(|first| first.each_ref().map(|of| step.rows(of, width)));
            let first = first.as_ref().map(|first| first.each_ref());
            device.wkv7(entries, heads, inputs_of(rows.each_ref(), first, on_device.each_ref()), y)
        })
    };
    let Some((got, states)) = skipped.take(feed(steps), &what) else { return };
    for i in 0..2 {
        let rows = rows.each_ref().map(|of| &of[i][..]);
        let first = first.as_ref().map(|first| first.each_ref().map(|of| &of[i][..]));
        let inputs = inputs_of(rows, first, weights.each_ref().map(|of| &of[..]));
        assert_close(&got[i], &expected(heads, inputs), &what);
    }
    let Some(at_once) = skipped.take(feed(STEPS[0]), &what) else { return };
    assert!(got == at_once.0 && states == at_once.1, "{}: other bits than in one step", what());
}

/// A head's part of a row, in f64.
struct Row {
    receptance: Vec<f64>,
    key: Vec<f64>,
    value: Vec<f64>,
    decay: Vec<f64>,
    removal: Vec<f64>,
    loss: Vec<f64>,
}

impl Row {
    /// Computes the part of head `head` in row `row`.
    fn of(heads: Heads, inputs: &Wkv7Inputs<&[f32]>, row: usize, head: usize) -> Self {
        let dim = heads.dim;
        let part = |of: &[f32], row: usize| -> Vec<f64> {
            of[(row * heads.n + head) * dim..][..dim].iter().map(|&x| f64::from(x)).collect()
        };
        let [keys, mut value] = [inputs.key, inputs.value].map(|of| part(of, row));
        if let Some(FirstValues { values, share }) = inputs.first {
            for ((v, first), share) in value.iter_mut().zip(part(values, row)).zip(part(share, row)) {
                *v += (first - *v) * sigmoid(share);
            }
        }
        let [removal, replacement] =
            [inputs.weights.removal, inputs.weights.replacement].map(|of| part(of, 0));
        let removal: Vec<f64> = keys.iter().zip(removal).map(|(k, factor)| k * factor).collect();
        let length = norm_of(&removal);
        let removal: Vec<f64> = removal.iter().map(|n| n / length).collect();
        let rate: Vec<f64> = part(inputs.rate, row).into_iter().map(sigmoid).collect();
        let key = keys.iter().zip(&rate).zip(replacement).map(|((k, a), by)| k * (1.0 + (a - 1.0) * by));
        Self {
            key: key.collect(),
            value,
            decay: part(inputs.decay, row)
                .into_iter()
                .map(|w| (-sigmoid(w) * (-0.5_f64).exp()).exp())
                .collect(),
            loss: removal.iter().zip(&rate).map(|(n, a)| n * a).collect(),
            receptance: part(inputs.receptance, row),
            removal,
        }
    }

    /// Applies what the row does to a column of a state, apart from what it writes.
    fn turn(&self, column: &[f64]) -> Vec<f64> {
        let lost: f64 = column.iter().zip(&self.removal).map(|(s, n)| s * n).sum();
        column.iter().zip(&self.decay).zip(&self.loss).map(|((s, w), loss)| s * w - loss * lost).collect()
    }

    /// Returns how much it may lengthen a column: the largest singular value of `turn`, by power
    /// iteration, and 1 % more for what that misses.
    fn growth(&self) -> f64 {
        let mut x: Vec<f64> = (0..self.removal.len()).map(|i| 1.0 + 0.1 * (i as f64).sin()).collect();
        let mut growth = 0.0;
        for _ in 0..200 {
            let length = norm_of(&x);
            x.iter_mut().for_each(|x| *x /= length);
            let turned = self.turn(&x);
            growth = norm_of(&turned);
            // The transpose.
            let lost: f64 = turned.iter().zip(&self.loss).map(|(y, loss)| y * loss).sum();
            x = turned
                .iter()
                .zip(&self.decay)
                .zip(&self.removal)
                .map(|((y, w), n)| y * w - n * lost)
                .collect();
        }
        1.01 * growth
    }
}

/// Computes [`Backend::wkv7`] for each of the first rows of a sequence.
///
/// An error of a column of the state grows as the column does. A row adds the roundings of what it
/// multiplies: of three vectors, of which the removed keys are divided by a root of `dim` squares
/// and the others pass at most two logistic functions, and of two sums of `dim` products.
fn expected(heads: Heads, inputs: Wkv7Inputs<&[f32]>) -> Vec<Expected> {
    let (dim, n_rows) = (heads.dim, inputs.key.len() / (heads.n * heads.dim));
    let mut expected = vec![Expected { value: 0.0, tolerance: 0.0 }; inputs.key.len()];
    let of_row = roundings(2 * dim + 3 * SIGMOID + 20);
    for head in 0..heads.n {
        let weight =
            |of: &[f32]| -> Vec<f64> { of[head * dim..][..dim].iter().map(|&x| f64::from(x)).collect() };
        let Wkv7Weights { bonus, norm, norm_bias, .. } = inputs.weights;
        let [bonus, norm, norm_bias] = [bonus, norm, norm_bias].map(weight);
        let (mut state, mut errors) = (vec![vec![0.0; dim]; dim], vec![0.0; dim]);
        for at in 0..n_rows {
            let row = Row::of(heads, &inputs, at, head);
            let (growth, readable) = (row.growth(), norm_of(&row.receptance));
            let (mut read, mut error) = (vec![0.0; dim], 0.0_f64);
            for (column, state) in state.iter_mut().enumerate() {
                let magnitude = norm_of(state) * (1.0 + norm_of(&row.loss))
                    + 2.0 * norm_of(&row.key) * row.value[column].abs();
                errors[column] = growth * errors[column] + of_row * magnitude;
                let turned = row.turn(state);
                *state = turned.iter().zip(&row.key).map(|(s, k)| s + k * row.value[column]).collect();
                read[column] = state.iter().zip(&row.receptance).map(|(s, r)| s * r).sum();
                let of_sum = roundings(2 * dim) * norm_of(state) * readable;
                error = error.max(errors[column] * readable + of_sum);
            }
            let mean = read.iter().sum::<f64>() / dim as f64;
            let variance = read.iter().map(|z| (z - mean).powi(2)).sum::<f64>() / dim as f64;
            let deviation = (variance + f64::from(Wkv7Inputs::<()>::NORM_EPS)).sqrt();
            let reads = || row.key.iter().zip(&row.receptance).zip(&bonus).map(|((k, r), b)| k * r * b);
            let (own, own_magnitude) = (reads().sum::<f64>(), reads().map(f64::abs).sum::<f64>());
            for (i, z) in read.iter().enumerate() {
                let normed = (z - mean) / deviation;
                // The mean and the deviation are off by no more than all values are.
                let of_norm = (2.0 + normed.abs()) * error / deviation
                    + roundings(dim + 12) * ((z.abs() + mean.abs()) / deviation + normed.abs());
                let of_own = roundings(dim + 3 * SIGMOID + 20) * own_magnitude * row.value[i].abs();
                let index = (at * heads.n + head) * dim + i;
                let gate = f64::from(inputs.gate[index]);
                let sum = normed * norm[i] + norm_bias[i] + own * row.value[i];
                let of_sum = roundings(5)
                    * ((normed * norm[i]).abs() + norm_bias[i].abs() + own_magnitude * row.value[i].abs());
                let tolerance = (of_norm * norm[i].abs() + of_own + of_sum) * gate.abs();
                expected[index] = Expected { value: sum * gate, tolerance };
            }
        }
    }
    expected
}

fn sigmoid(x: f64) -> f64 {
    gate(Gate::Sigmoid, x)
}

fn norm_of(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}
