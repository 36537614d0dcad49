//! Ops of recurrent layers: results are independent of chunks and of other sequences in the batch.

use kvant_backend::{
    Backend, ConvForm, Gate, KeySharing, Page, Result, ShortConv, StateBatchEntry, StateHeads, StateInputs,
    StateRule, TokenSpan,
};

use crate::judge::{Expected, assert_close, roundings};
use crate::reference;
use crate::skipped::product;
use crate::weights::gaussian;
use crate::{DeviceUnderTest, Skipped};

/// Guard bytes before and after a state, which must stay unchanged.
const MARGIN: usize = 64;
/// Their content.
const STALE: u8 = 0x3c;
/// Roundings of `1 / (1 + exp(-g))` times a number: three of exp, six for an approximate one, a
/// sum, a quotient of three, a product.
const GATE_ROUNDINGS: usize = 11;

/// Rows of two sequences in each step: 41 and 37 of them in all.
pub(super) const STEPS: [&[[usize; 2]]; 3] =
    [&[[41, 37]], &[[1, 0], [0, 1], [5, 20], [2, 3], [33, 13]], &[[17, 1], [1, 17], [23, 19]]];
const GATES: [Gate; 5] = [Gate::Sigmoid, Gate::Silu, Gate::Gelu, Gate::Plain, Gate::Softplus];
pub(super) const N_ROWS: [usize; 2] = [41, 37];

/// Compares `gate` with its equation.
pub fn gate<B: Backend>(subject: &DeviceUnderTest<B>) {
    for (len, gate) in product(&[0, 1, 255, 257, 5000], &GATES) {
        let what = || subject.case("gate", format_args!("{len} values, {gate:?}"));
        let (values, gates) = (gaussian(1, len, 3.0), gaussian(2, len, 5.0));
        let mut y = subject.guarded(&values);
        let result = subject.device().gate(&mut y, len, &subject.upload(&gates), gate);
        result.unwrap_or_else(|error| panic!("{}: {error}", what()));
        let want = |(value, g): (&f32, &f32)| {
            let (value, g) = (f64::from(*value), f64::from(*g));
            // A rounding of GELU's z changes its exponential by |z| times as much; z takes five.
            let of_z = match gate {
                Gate::Gelu => roundings(5) * reference::gelu_exponent(g).abs(),
                _ => 0.0,
            };
            let value = value * reference::gate(gate, g);
            // Exponentials beyond f32 give zero.
            let underflow = f64::from(f32::MIN_POSITIVE) * 1e3;
            Expected { value, tolerance: (roundings(GATE_ROUNDINGS) + of_z) * value.abs() + underflow }
        };
        subject.expect(&y, &values.iter().zip(&gates).map(want).collect::<Vec<_>>(), &what);
    }
    let (mut y, four, nine) =
        (subject.upload(&[1.0; 5]), subject.upload(&[0.0; 4]), subject.upload(&[0.0; 9]));
    let mut gate = |len, gates| subject.device().gate(&mut y, len, gates, Gate::Silu);
    subject.expect_refusal("gate", "five gates of four", gate(5, &four));
    subject.expect_refusal("gate", "six values of five", gate(6, &nine));
}

/// Compares `short_conv` with its equation.
pub fn short_conv<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let forms = [ConvForm::Gated, ConvForm::Silu];
    for ((channels, taps), (form, steps)) in
        skipped.combine(&product(&[1, 64, 65, 300], &[2, 3, 4, 8]), &product(&forms, &STEPS))
    {
        check_short_conv(subject, ShortConv { channels, taps, form }, steps, &mut skipped);
    }
    let device = subject.device();
    let mut page = device.page(256).expect("memory for a test");
    let (x, mut y) = (subject.upload(&[0.0; 64]), subject.upload(&[0.0; 64]));
    let usual = ShortConv { channels: 4, taps: 3, form: ConvForm::Silu };
    for (case, conv, rows, n_values) in [
        ("one tap", ShortConv { taps: 1, ..usual }, 2, 0),
        ("nine taps", ShortConv { taps: 9, ..usual }, 2, 32),
        ("a kernel that is too short", ShortConv { channels: 40, ..usual }, 1, 80),
        ("rows beyond the output", usual, 17, 8),
        ("another state", usual, 2, 12),
        ("rows beyond the input", ShortConv { form: ConvForm::Gated, ..usual }, 6, 8),
    ] {
        let rows = TokenSpan { first: 0, n: rows, start: 0, first_tail_tile: 0 };
        let mut entries = [StateBatchEntry { rows, page: &mut page, offset: 0, n_values }];
        subject.expect_refusal("short_conv", case, device.short_conv(&mut entries, conv, &x, &x, &mut y));
    }
    skipped
}

/// Compares `recur` with its equations.
pub fn recur<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let heads = [(1, 1, KeySharing::Grouped), (2, 4, KeySharing::Grouped), (2, 6, KeySharing::Tiled)];
    let dims = [(16, 16), (32, 48), (128, 64), (128, 128), (48, 80)];
    let cases =
        product(&heads, &[Rule::GatedDeltaNet, Rule::KimiDelta, Rule::BoundedKimiDelta, Rule::Mamba2]);
    for ((cases, steps), (k_dim, v_dim)) in skipped.combine(&product(&cases, &STEPS), &dims) {
        let ((n_k_heads, n_v_heads, sharing), rule) = cases;
        let heads = StateHeads { n_k_heads, n_v_heads, k_dim, v_dim, sharing };
        check_linear_attention(subject, heads, rule, steps, &mut skipped);
    }
    let device = subject.device();
    let mut page = device.page(1 << 12).expect("memory for a test");
    let (x, mut y, one) =
        (subject.upload(&[0.0; 200]), subject.upload(&[0.0; 32]), subject.upload(&[0.0; 1]));
    let usual = StateHeads { n_k_heads: 1, n_v_heads: 2, k_dim: 16, v_dim: 16, sharing: KeySharing::Grouped };
    let delta = StateRule::GatedDeltaNet { write: &x, eps: 1e-6 };
    for (case, heads, rule, rows, n_values) in [
        ("no key head", StateHeads { n_k_heads: 0, ..usual }, delta, 1, 512),
        ("three value heads for two", StateHeads { n_k_heads: 2, n_v_heads: 3, ..usual }, delta, 1, 768),
        ("heads of 24", StateHeads { k_dim: 24, ..usual }, delta, 1, 768),
        ("keys of 272", StateHeads { k_dim: 272, ..usual }, delta, 0, 272 * 32),
        ("rows beyond the output", usual, delta, 2, 512),
        ("another state", usual, delta, 1, 256),
        ("a state beyond the page", StateHeads { n_v_heads: 6, ..usual }, delta, 0, 6 * 256),
        ("a gate for two heads", usual, StateRule::GatedDeltaNet { write: &one, eps: 1e-6 }, 1, 512),
        ("a skip for two heads", usual, StateRule::Mamba2 { skip: &one }, 1, 512),
        ("steps of 7 x 32 dims", usual, Rule::KimiDelta.of(&x, &x), 7, 512),
    ] {
        let rows = TokenSpan { first: 0, n: rows, start: 0, first_tail_tile: 0 };
        let mut entries = [StateBatchEntry { rows, page: &mut page, offset: 0, n_values }];
        let inputs = StateInputs { qkv: &x, step: &x, bias: &x, decay: &x, rule };
        subject.expect_refusal("recur", case, device.linear_attention(&mut entries, heads, inputs, &mut y));
    }
    skipped
}

/// The rule of a state, without its inputs.
#[derive(Debug, Clone, Copy)]
enum Rule {
    GatedDeltaNet,
    KimiDelta,
    BoundedKimiDelta,
    Mamba2,
}

impl Rule {
    /// Returns the rule with its inputs.
    fn of<T>(self, write: T, skip: T) -> StateRule<T> {
        match self {
            Self::GatedDeltaNet => StateRule::GatedDeltaNet { write, eps: 1e-6 },
            Self::KimiDelta => StateRule::KimiDelta { write, eps: 1e-6, bound: None },
            Self::BoundedKimiDelta => StateRule::KimiDelta { write, eps: 1e-6, bound: Some(-5.0) },
            Self::Mamba2 => StateRule::Mamba2 { skip },
        }
    }
}

/// A step of two sequences.
pub(super) struct Step<'a, B: Backend> {
    subject: &'a DeviceUnderTest<B>,
    /// Rows of each before it, and in it.
    fed: [usize; 2],
    pub(super) n: [usize; 2],
}

impl<B: Backend> Step<'_, B> {
    /// Uploads the step's rows of both sequences, `width` values each.
    pub(super) fn rows(&self, of: &[Vec<f32>; 2], width: usize) -> B::Buffer {
        let rows_of = |i: usize| &of[i][self.fed[i] * width..(self.fed[i] + self.n[i]) * width];
        self.subject.upload(&[rows_of(0), rows_of(1)].concat())
    }
}

/// Results of the rows of two sequences, and the states at the end.
pub(super) type Fed = ([Vec<f32>; 2], Vec<Vec<u8>>);

/// The states of two sequences on a device.
pub(super) struct States<'a, B: Backend> {
    subject: &'a DeviceUnderTest<B>,
    pages: [B::Page; 2],
    n_values: usize,
}

impl<'a, B: Backend> States<'a, B> {
    pub(super) fn new(subject: &'a DeviceUnderTest<B>, n_values: usize) -> Self {
        let page = || {
            let mut page = subject.device().page(2 * MARGIN + 4 * n_values).expect("memory for a test");
            let mut bytes = vec![STALE; page.n_bytes()];
            bytes[MARGIN..MARGIN + 4 * n_values].fill(0);
            subject.device().write_page(&mut page, &bytes).expect("the page accepts its size");
            page
        };
        Self { subject, pages: [page(), page()], n_values }
    }

    /// Runs both sequences in the chunks of `steps`; `run` computes a step. Returns the results of
    /// each sequence, `width` values per row, and the states at the end.
    pub(super) fn feed(
        mut self,
        steps: &[[usize; 2]],
        width: usize,
        what: &dyn Fn() -> String,
        run: impl Fn(&B, &mut [StateBatchEntry<'_, B::Page>], &Step<'_, B>, &mut B::Buffer) -> Result<()>,
    ) -> Result<Fed> {
        let (mut fed, mut results) = ([0; 2], [Vec::new(), Vec::new()]);
        for step in steps {
            let (subject, total) = (self.subject, step[0] + step[1]);
            let mut y = subject.poisoned(total * width);
            let rows = [0, 1].map(|i| TokenSpan {
                first: if i == 0 { 0 } else { step[0] },
                n: step[i],
                start: fed[i],
                first_tail_tile: 0,
            });
            let step_of = Step { subject, fed, n: *step };
            let pages = self.pages.iter_mut().zip(rows).filter(|(_, rows)| rows.n > 0);
            let n_values = self.n_values;
            let mut entries: Vec<_> =
                pages.map(|(page, rows)| StateBatchEntry { rows, page, offset: MARGIN, n_values }).collect();
            run(subject.device(), &mut entries, &step_of, &mut y)?;
            let y = subject.results(&y, total * width, what);
            let (first, second) = y.split_at(step[0] * width);
            results[0].extend_from_slice(first);
            results[1].extend_from_slice(second);
            (0..2).for_each(|i| fed[i] += step[i]);
        }
        assert_eq!(fed, N_ROWS, "{}", what());
        Ok((results, self.states(what)))
    }

    /// Returns the bytes of both states, after checking their guard bytes.
    fn states(&self, what: &dyn Fn() -> String) -> Vec<Vec<u8>> {
        let of_page = |page: &B::Page| {
            let bytes = self.subject.page_bytes(page);
            let (before, rest) = bytes.split_at(MARGIN);
            let (state, after) = rest.split_at(4 * self.n_values);
            let is_unchanged = before.iter().chain(after).all(|&byte| byte == STALE);
            assert!(is_unchanged, "{}: bytes around the state are written", what());
            state.to_vec()
        };
        self.pages.iter().map(of_page).collect()
    }
}

fn check_short_conv<B: Backend>(
    subject: &DeviceUnderTest<B>,
    conv: ShortConv,
    steps: &[[usize; 2]],
    skipped: &mut Skipped,
) {
    let what = || subject.case("short_conv", format_args!("{conv:?}, steps of {steps:?}"));
    let ShortConv { channels, taps, form } = conv;
    let x = [0, 1].map(|i| gaussian(3 + i as u64, N_ROWS[i] * conv.n_in(), 1.0));
    let kernel = gaussian(5, (taps + 1) * channels, 1.0);
    let on_device = subject.upload(&kernel);
    let feed = |steps| {
        States::new(subject, conv.n_state()).feed(steps, channels, &what, |device, entries, step, y| {
            device.short_conv(entries, conv, &step.rows(&x, conv.n_in()), &on_device, y)
        })
    };
    let Some((got, states)) = skipped.take(feed(steps), &what) else { return };
    for (x, got) in x.iter().zip(&got) {
        let want: Vec<Expected> = (0..x.len() / conv.n_in() * channels)
            .map(|at| {
                let (sum, magnitude) = reference::short_conv(conv, x, &kernel, at / channels, at % channels);
                // The input, each product and sum.
                let error = roundings(taps + 3) * magnitude;
                match form {
                    ConvForm::Gated => {
                        let c = f64::from(x[at / channels * conv.n_in() + channels + at % channels]);
                        Expected {
                            value: sum * c,
                            tolerance: (error + roundings(1) * (sum.abs() + error)) * c.abs(),
                        }
                    }
                    ConvForm::Silu => {
                        let value = sum * reference::gate(Gate::Sigmoid, sum);
                        // The largest slope of SiLU is 1.0998.
                        Expected {
                            value,
                            tolerance: 1.1 * error + roundings(GATE_ROUNDINGS) * (value.abs() + error),
                        }
                    }
                }
            })
            .collect();
        assert_close(got, &want, &what);
    }
    // For any chunks.
    let Some(at_once) = skipped.take(feed(STEPS[0]), &what) else { return };
    assert!(got == at_once.0 && states == at_once.1, "{}: other bits than in one step", what());
}

fn check_linear_attention<B: Backend>(
    subject: &DeviceUnderTest<B>,
    heads: StateHeads,
    rule: Rule,
    steps: &[[usize; 2]],
    skipped: &mut Skipped,
) {
    let what = || subject.case("recur", format_args!("{heads:?}, {rule:?}, steps of {steps:?}"));
    let (n_v, n_steps) = (heads.n_v_heads, rule.of((), ()).n_steps(&heads));
    let of = |seed: u64, n: usize, sigma| [0, 1].map(|i| gaussian(seed + i as u64, N_ROWS[i] * n, sigma));
    let (qkv, write, step) = (of(11, heads.n_qkv(), 1.0), of(13, n_v, 2.0), of(15, n_steps, 2.0));
    let (bias, rate, skip) = (gaussian(17, n_steps, 1.0), gaussian(18, n_v, 1.0), gaussian(19, n_v, 1.0));
    let rate: Vec<f32> = rate.iter().map(|x| -x.abs()).collect();
    let [on_bias, on_rate, on_skip] = [&bias, &rate, &skip].map(|values| subject.upload(values));
    let feed = |steps| {
        States::new(subject, heads.n_state()).feed(steps, heads.n_out(), &what, |device, entries, fed, y| {
            let (qkv, write, step) =
                (fed.rows(&qkv, heads.n_qkv()), fed.rows(&write, n_v), fed.rows(&step, n_steps));
            let rule = rule.of(&write, &on_skip);
            let inputs = StateInputs { qkv: &qkv, step: &step, bias: &on_bias, decay: &on_rate, rule };
            device.linear_attention(entries, heads, inputs, y)
        })
    };
    let Some((got, states)) = skipped.take(feed(steps), &what) else { return };
    for i in 0..2 {
        let rule = rule.of(&write[i][..], &skip[..]);
        let inputs = StateInputs { qkv: &qkv[i][..], step: &step[i], bias: &bias, decay: &rate, rule };
        assert_close(&got[i], &reference::linear_attention(&heads, inputs), &what);
    }
    let Some(at_once) = skipped.take(feed(STEPS[0]), &what) else { return };
    assert!(got == at_once.0 && states == at_once.1, "{}: other bits than in one step", what());
}
