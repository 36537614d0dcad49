//! Attention to pooled keys: the pools, the selection of keys, and attention over keys and tokens.

use kvant_backend::{AttendParams, Backend, PooledKeys, Selection, StateBatchEntry, TokenPool, TokenSpan};
use kvant_codec::DType;

use super::recurrent::{N_ROWS, STEPS, States};
use super::selected::{check_selection, score};
use crate::judge::{Expected, assert_close, roundings};
use crate::kv::{Answer, Batch, PooledTokens, Scaled, Shape, Tokens};
use crate::skipped::product;
use crate::weights::gaussian;
use crate::{Attention, DeviceUnderTest, Skipped};

/// A sequence and its last step.
#[derive(Debug, Clone, Copy)]
struct Case {
    /// Tokens of the sequence, and those of the step among them.
    n: usize,
    rows: usize,
    /// Tokens per pooled key.
    stride: usize,
}

/// Without a key, with the first in the step, and across tiles and blocks of tokens and of keys.
const CASES: [Case; 6] = [
    Case { n: 3, rows: 1, stride: 4 },
    Case { n: 9, rows: 9, stride: 8 },
    Case { n: 40, rows: 7, stride: 1 },
    Case { n: 140, rows: 20, stride: 3 },
    Case { n: 540, rows: 6, stride: 4 },
    Case { n: 260, rows: 10, stride: 128 },
];

/// Compares `pool_tokens` with its equation.
pub fn pool<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let pools = product(&[(1, 3), (4, 40), (8, 64), (128, 5)], &[false, true]);
    for (((stride, width), overlaps), steps) in skipped.combine(&pools, &STEPS) {
        check_pool(subject, TokenPool { stride, width, overlaps }, steps, &mut skipped);
    }
    let device = subject.device();
    let mut page = device.page(1024).expect("memory for a test");
    let [x, few, bias, mut y] = [96, 15, 32, 8].map(|n| subject.upload(&vec![0.0; n]));
    let usual = TokenPool { stride: 4, width: 4, overlaps: true };
    for (case, pool, [x, gates], rows, n_values) in [
        ("no tokens per row", TokenPool { stride: 0, ..usual }, [&x, &x], 2, 24),
        ("a bias for eight tokens", TokenPool { stride: 8, ..usual }, [&x, &x], 2, 24),
        ("rows beyond the input", usual, [&few, &x], 2, 24),
        ("rows beyond the gates", usual, [&x, &few], 2, 24),
        ("rows beyond the output", usual, [&x, &x], 12, 24),
        ("another state", usual, [&x, &x], 2, 12),
    ] {
        let rows = TokenSpan { first: 0, n: rows, start: 0, first_tail_tile: 0 };
        let mut entries = [StateBatchEntry { rows, page: &mut page, offset: 0, n_values }];
        let result = device.pool_tokens(&mut entries, pool, x, gates, &bias, &mut y);
        subject.expect_refusal("pool_tokens", case, result);
    }
    skipped
}

fn check_pool<B: Backend>(
    subject: &DeviceUnderTest<B>,
    pool: TokenPool,
    steps: &[[usize; 2]],
    skipped: &mut Skipped,
) {
    let what = || subject.case("pool_tokens", format_args!("{pool:?}, steps of {steps:?}"));
    let (TokenPool { stride, width, .. }, n_in) = (pool, pool.n_in());
    let [x, gates] = [3, 5].map(|seed| [0, 1].map(|i| gaussian(seed + i as u64, N_ROWS[i] * n_in, 2.0)));
    let bias = gaussian(7, stride * n_in, 1.0);
    let on_device = subject.upload(&bias);
    let feed = |steps| {
        States::new(subject, pool.n_state()).feed(steps, width, &what, |device, entries, step, y| {
            let [x, gates] = [&x, &gates].map(|of| step.rows(of, n_in));
            let spans: Vec<TokenSpan> = entries.iter().map(|entry| entry.rows).collect();
            let all = spans.iter().map(|&rows| TokenPool::completed(stride, rows).len()).sum::<usize>();
            let mut pooled = subject.poisoned(all * width);
            device.pool_tokens(entries, pool, &x, &gates, &on_device, &mut pooled)?;
            // Each becomes the result of the token that completes it.
            let of_span = |rows: TokenSpan| {
                let last = move |e: usize| rows.first + (e + 1) * stride - 1 - rows.start;
                TokenPool::completed(stride, rows).map(last)
            };
            for (i, row) in spans.into_iter().flat_map(of_span).enumerate() {
                device.copy(&pooled, i * width, y, row * width, width)?;
            }
            Ok(())
        })
    };
    let Some((got, states)) = skipped.take(feed(steps), &what) else { return };
    for i in 0..2 {
        let rows = [&x[i][..], &gates[i][..]];
        for (number, got) in got[i].chunks_exact(stride * width).enumerate() {
            let of_tokens = got.split_at((stride - 1) * width);
            assert!(of_tokens.0.iter().all(|x| x.is_nan()), "{}: row {number}", what());
            assert_close(of_tokens.1, &expected(pool, rows, &bias, number), &what);
        }
    }
    let Some(at_once) = skipped.take(feed(STEPS[0]), &what) else { return };
    let bits =
        |of: &[Vec<f32>; 2]| of.each_ref().map(|of| of.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    assert!(bits(&got) == bits(&at_once.0) && states == at_once.1, "{}: other bits than in one step", what());
}

/// Computes a pooled row. What changes its weight, and the total too: an error of a gate, the
/// rounding of its sum with the bias, the differences from the largest so far, which add up to that
/// of all, and the roundings of their exponentials, two for each token.
fn expected(pool: TokenPool, [x, gates]: [&[f32]; 2], bias: &[f32], number: usize) -> Vec<Expected> {
    let TokenPool { stride, width, overlaps } = pool;
    let n_in = pool.n_in();
    let of_channel = |channel: usize| {
        let term = |number: usize, half: usize, j: usize| {
            let column = half * width + channel;
            let at = (number * stride + j) * n_in + column;
            (f64::from(gates[at]) + f64::from(bias[j * n_in + column]), f64::from(x[at]))
        };
        let own = (0..stride).map(|j| term(number, usize::from(overlaps), j));
        let before = if overlaps && number > 0 { 0..stride } else { 0..0 };
        let terms: Vec<_> = before.map(|j| term(number - 1, 0, j)).chain(own).collect();
        let max = terms.iter().map(|(gate, _)| *gate).fold(f64::NEG_INFINITY, f64::max);
        let furthest = terms.iter().map(|(gate, _)| gate.abs() + max.abs()).fold(0.0, f64::max);
        let total: f64 = terms.iter().map(|(gate, _)| (gate - max).exp()).sum();
        let sum = |of: &dyn Fn(f64) -> f64| {
            terms.iter().map(|(gate, x)| (gate - max).exp() * of(*x)).sum::<f64>() / total
        };
        let relative = 2.0 * (roundings(9 * terms.len() + 5) + roundings(4) * furthest);
        Expected { value: sum(&|x| x), tolerance: relative * sum(&f64::abs) }
    };
    (0..width).map(of_channel).collect()
}

/// Compares `select_pooled` with its equation.
pub fn select<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let indexes = product(&[(128, 9), (40, 4)], &[1, 16]);
    for (dtype, (((dim, n_heads), n_used), case)) in skipped.combine(&DType::KV, &product(&indexes, &CASES)) {
        let shape = pooled_shape(Shape::shared_kv(dtype, dim, dim));
        let result = selects_the_largest(subject, shape, case, Selection { n_heads, n_used });
        if skipped.take(result, &|| subject.case("select_pooled", format_args!("{shape:?}"))).is_none() {
            return skipped;
        }
    }
    skipped
}

/// Returns the shape of pooled keys: rows are coded by themselves.
fn pooled_shape(shape: Shape) -> Shape {
    Shape { has_tail: false, centres: false, sink_tiles: 0, window: None, ..shape }
}

/// Tokens of two sequences, the second half as long, and the last rows of each as a step.
struct Steps {
    tokens: [Tokens; 2],
    keys: [Tokens; 2],
    rows: [usize; 2],
    stride: usize,
}

impl Steps {
    fn new(shape: Shape, Case { n, rows, stride }: Case) -> Self {
        let n = [n, n.div_ceil(2)];
        let tokens = [0, 1].map(|i| Tokens::gaussian(shape, n[i], 11 + i as u64));
        let keys = [0, 1].map(|i| Tokens::gaussian(pooled_shape(shape), n[i] / stride, 21 + i as u64));
        Self { tokens, keys, rows: n.map(|n| rows.min(n)), stride }
    }

    /// Creates the sequences on a device, and their pooled keys.
    fn batches<'a, B: Backend>(
        &'a self,
        subject: &'a DeviceUnderTest<B>,
        what: &dyn Fn() -> String,
    ) -> [Batch<'a, B>; 2] {
        let before = |i: usize| self.tokens[i].len() - self.rows[i];
        let fed = |tokens: &'a [Tokens; 2], before: [usize; 2]| {
            let mut batch = Batch::new(subject, &tokens.each_ref());
            let last = [0, 1].map(|i| tokens[i].len() - before[i]);
            let result = batch.feed(&before, 100).and_then(|()| batch.append(&last));
            result.unwrap_or_else(|error| panic!("{}: {error}", what()));
            batch
        };
        let before = [before(0), before(1)];
        [fed(&self.tokens, before), fed(&self.keys, before.map(|n| n / self.stride))]
    }
}

fn selects_the_largest<B: Backend>(
    subject: &DeviceUnderTest<B>,
    shape: Shape,
    case: Case,
    selection: Selection,
) -> kvant_backend::Result<()> {
    let what = || subject.case("select_pooled", format_args!("{shape:?}, {case:?}, {selection:?}"));
    let steps = Steps::new(shape, case);
    let Selection { n_heads, n_used } = selection;
    let [tokens, mut keys] = steps.batches(subject, &what);
    let (positions, dim) = (tokens.positions(), shape.k_head_dim);
    let q = gaussian(15, positions.len() * n_heads * dim, 1.0);
    let weights = gaussian(16, positions.len() * n_heads, 1.0);
    let mut selected = subject.poisoned(positions.len() * n_used);
    let [on_q, on_weights] = [&q, &weights].map(|values| subject.upload(values));
    let entries = keys.pooled(&tokens, steps.stride);
    subject.device().select_pooled(selection, &entries, &on_q, &on_weights, &mut selected)?;
    let selected = subject.results(&selected, positions.len() * n_used, &what);
    let of_rows = positions.iter().zip(selected.chunks_exact(n_used)).zip(q.chunks_exact(n_heads * dim));
    for ((((tokens, position), selected), q), weights) in of_rows.zip(weights.chunks_exact(n_heads)) {
        let what = || format!("{}: position {position}: {selected:?}", what());
        let n_seen = (position + 1) / steps.stride;
        if n_seen <= n_used {
            assert!(selected.iter().all(|number| number.is_nan()), "{}", what());
            continue;
        }
        let keys = &steps.keys[usize::from(std::ptr::eq(*tokens, &steps.tokens[1]))];
        let scores = (0..n_seen).map(|e| score(keys.keys[0].read_at(e, e).0, q, weights)).collect::<Vec<_>>();
        check_selection(&scores, selected, &what);
    }
    Ok(())
}

/// Compares `attend_pooled` with attention over tokens and keys, all and some.
pub fn attend<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let latent = Shape::shared_kv(DType::F16, 128, 128);
    let shapes = [
        Shape { group: 5, window: Some(32), sinks: Some([1.0, 0.5]), sink_tiles: 1, ..latent },
        Shape { k_head_dim: 256, v_head_dim: 256, group: 4, window: Some(128), ..latent },
        Shape { k_head_dim: 96, v_head_dim: 80, group: 1, scaled: Scaled::Keys, ..latent },
    ];
    for (dtype, ((shape, n_used), case)) in
        skipped.combine(&DType::KV, &product(&product(&shapes, &[None, Some(2)]), &CASES))
    {
        let shape = Shape { k: dtype, v: dtype, ..shape };
        let result = attends_to_both(subject, shape, case, n_used);
        if skipped.take(result, &|| subject.case("attend_pooled", format_args!("{shape:?}"))).is_none() {
            return skipped;
        }
    }
    let (x, mut out) = (subject.upload(&[0.0; 8]), subject.upload(&[0.0; 8]));
    let two = AttendParams { n_kv_heads: 2, ..latent.params() };
    let none = PooledKeys { parts: &[], selected: None, sinks: None };
    subject.expect_refusal(
        "attend_pooled",
        "two KV heads",
        subject.device().attend_pooled(&two, &[], &x, none, None, &mut out),
    );
    skipped
}

fn attends_to_both<B: Backend>(
    subject: &DeviceUnderTest<B>,
    shape: Shape,
    case: Case,
    n_used: Option<usize>,
) -> kvant_backend::Result<()> {
    let what = || subject.case("attend_pooled", format_args!("{shape:?}, {case:?}, {n_used:?} selected"));
    let steps = Steps::new(shape, case);
    let [mut tokens, mut keys] = steps.batches(subject, &what);
    let positions = tokens.positions();
    // The last of those seen, and every other one before.
    let selected_of = |n_seen: usize, n_used: usize| -> Vec<usize> {
        let step = if n_seen >= 2 * n_used { 2 } else { 1 };
        (0..n_used).map(|i| n_seen - 1 - (n_used - 1 - i) * step).collect()
    };
    let seen = |position: usize| (position + 1) / steps.stride;
    let numbers = n_used.map(|n_used| {
        let of_row = |&(_, position): &(&Tokens, usize)| match seen(position) {
            n if n > n_used => selected_of(n, n_used).into_iter().map(|e| e as f32).collect(),
            _ => vec![f32::NAN; n_used],
        };
        positions.iter().flat_map(of_row).collect::<Vec<f32>>()
    });
    let q = gaussian(17, positions.len() * shape.n_heads() * shape.k_head_dim, 1.0);
    let selected = numbers.as_deref().zip(n_used);
    let got = tokens.attend_pooled(&mut keys, steps.stride, &q, selected, &what)?;
    let mut heads = q.chunks_exact(shape.k_head_dim).zip(got.chunks_exact(shape.v_head_dim));
    for (tokens, position) in positions {
        let keys = &steps.keys[usize::from(std::ptr::eq(tokens, &steps.tokens[1]))];
        let numbers = match n_used {
            Some(n_used) if seen(position) > n_used => selected_of(seen(position), n_used),
            _ => (0..seen(position)).collect(),
        };
        let first = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
        for (head, (q, got)) in (0..shape.n_heads()).zip(&mut heads) {
            let pooled = PooledTokens { keys, numbers: &numbers };
            let answer =
                Answer::with_pooled(tokens, first..=position, pooled, position, head, q, Attention::Floats);
            if let Some(fault) = answer.fault(got) {
                panic!("{}: position {position}, head {head}: {fault}", what());
            }
        }
    }
    Ok(())
}
