//! Attention over the cache, compared with reference attention in f64.

use kvant_backend::{Backend, Result};
use kvant_codec::DType;

use super::kv_append::HEAD_DIMS;
use crate::kv::{Batch, Scaled, Shape, Tokens};
use crate::skipped::product;
use crate::weights::gaussian;
use crate::{DeviceUnderTest, Skipped};

/// Compares `attend` with its equation for every pair of types: for one row, for some of a tile and
/// for some that cross tiles.
pub fn types<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let shape = Shape { group: 3, ..Shape::new(DType::F16, DType::F16) };
    let steps = [
        (Shape { n_kv_heads: 2, ..shape }, 1),
        (Shape { sink_tiles: 1, extra_tail_tiles: 1, alpha: 1.02, ..shape }, 5),
        (Shape { window: Some(50), ..shape }, 20),
    ];
    for ((k, v), (shape, rows)) in product(&skipped.combine(&DType::KV, &DType::KV), &steps) {
        let tokens = Tokens::gaussian(Shape { k, v, ..shape }, 90, rows as u64);
        equals_its_equation(subject, &tokens, 90, rows, &mut skipped);
    }
    skipped
}

/// Compares `attend` with its equation for every size of heads and groups.
pub fn heads<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let types = [
        (DType::Turbo3, DType::Turbo4),
        (DType::Turbo2, DType::Turbo2),
        (DType::Q8_0, DType::Q4_0),
        (DType::F16, DType::BF16),
    ];
    // Number of tokens, and rows of the step among them.
    let sizes = product(&HEAD_DIMS, &[(55, 1), (37, 9)]);
    let types_and_groups = skipped.combine(&types, &[1, 2, 6, 8, 12]);
    for ((dim, (n, rows)), ((k, v), group)) in skipped.combine(&sizes, &types_and_groups) {
        let shape = Shape { k_head_dim: dim, v_head_dim: dim, group, n_kv_heads: 2, ..Shape::new(k, v) };
        equals_its_equation(subject, &Tokens::gaussian(shape, n, 4), n, rows, &mut skipped);
    }
    for ((k, v), k_head_dim) in skipped.combine(&types, &HEAD_DIMS) {
        let shape = Shape { k_head_dim, v_head_dim: 128, ..Shape::new(k, v) };
        equals_its_equation(subject, &Tokens::gaussian(shape, 40, 5), 40, 3, &mut skipped);
    }
    // Heads of several slices of 128, with K and V of other sizes.
    let large =
        [(512, 512, 8, (150, 1)), (512, 64, 1, (37, 9)), (96, 512, 6, (55, 20)), (352, 288, 3, (33, 1))];
    for ((k, v), (k_head_dim, v_head_dim, group, (n, rows))) in skipped.combine(&types, &large) {
        let shape = Shape { k_head_dim, v_head_dim, group, n_kv_heads: 2, ..Shape::new(k, v) };
        equals_its_equation(subject, &Tokens::gaussian(shape, n, 5), n, rows, &mut skipped);
    }
    skipped
}

/// Compares `attend` with its equation for every number of tokens and rows, with windows, across
/// tiles, blocks and prefix boundaries.
pub fn steps<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let types = [(DType::Turbo3, DType::Turbo3), (DType::Q8_0, DType::Turbo2), (DType::F16, DType::Q4_0)];
    let shape = Shape::new(DType::F16, DType::F16);
    let shapes = [
        shape,
        // Without a tail, a centre depends on the chunks.
        Shape { has_tail: false, centres: false, ..shape },
        Shape { scaled: Scaled::All, sink_tiles: 1, ..shape },
        Shape { extra_tail_tiles: 7, sink_tiles: 1, scaled: Scaled::Keys, ..shape },
        Shape { window: Some(21), ..shape },
        Shape { window: Some(100), sink_tiles: 1, ..shape },
    ];
    let lengths = [1, 15, 16, 17, 33, 127, 128, 129, 161, 512, 513, 529, 580];
    let mut steps = product(&lengths, &[1, 2, 33]);
    // After a few tiles, two rows test the same as one or many.
    steps.retain(|(n, rows)| rows <= n && (*rows != 2 || *n <= 33));
    for (((k, v), shape), (n, rows)) in skipped.combine(&product(&types, &shapes), &steps) {
        let tokens = Tokens::gaussian(Shape { k, v, ..shape }, n, 6);
        equals_its_equation(subject, &tokens, n, rows, &mut skipped);
    }
    wrong_sizes_are_refused(subject);
    skipped
}

/// Compares `attend` with its equation with soft caps, on scores of spread 1: strongly and hardly
/// bent ones.
pub fn capped<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let types = [
        (DType::Turbo3, DType::Turbo3),
        (DType::Q8_0, DType::Turbo2),
        (DType::F16, DType::Q4_0),
        (DType::Turbo4, DType::F32),
    ];
    let caps = [(128, 1.0, None), (256, 1.5, Some(40)), (256, 50.0, None)];
    let steps = [(1, 1), (70, 2), (150, 1), (150, 7), (150, 40)];
    for (((k, v), (head_dim, cap, window)), (n, rows)) in skipped.combine(&product(&types, &caps), &steps) {
        let heads = Shape { k_head_dim: head_dim, v_head_dim: head_dim, group: 4, ..Shape::new(k, v) };
        let tokens = Tokens::gaussian(Shape { soft_cap: Some(cap), window, ..heads }, n, 8);
        equals_its_equation(subject, &tokens, n, rows, &mut skipped);
    }
    skipped
}

/// Compares `attend` with its equation with attention sinks of little, most and nearly all of the
/// weight, different per head.
pub fn sinks<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let types = [
        (DType::Turbo3, DType::Turbo3),
        (DType::Q8_0, DType::Turbo2),
        (DType::F16, DType::Q4_0),
        (DType::F32, DType::F32),
    ];
    let sinks = [
        (64, [-3.0, 1.0], None, None),
        (64, [4.0, 0.5], Some(40), None),
        (128, [60.0, -30.0], None, Some(2.0)),
    ];
    let steps = [(1, 1), (70, 2), (150, 1), (150, 7), (150, 40)];
    for (((k, v), (head_dim, sinks, window, soft_cap)), (n, rows)) in
        skipped.combine(&product(&types, &sinks), &steps)
    {
        let heads =
            Shape { k_head_dim: head_dim, v_head_dim: head_dim, group: 4, n_kv_heads: 2, ..Shape::new(k, v) };
        let tokens = Tokens::gaussian(Shape { sinks: Some(sinks), window, soft_cap, ..heads }, n, 9);
        equals_its_equation(subject, &tokens, n, rows, &mut skipped);
    }
    too_few_sinks_are_refused(subject);
    skipped
}

/// Compares `attend` with its equation where values are a prefix of their keys (MLA), for every
/// type: heads as in MLA, values that end within and at the end of a slice, few queries and many,
/// across tiles, blocks and prefix boundaries.
pub fn shared_kv<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let heads = [(576, 512, 16), (40, 32, 4), (224, 192, 7), (96, 80, 1)];
    let shape = Shape::new(DType::F16, DType::F16);
    // Without a tail, a centre depends on the chunks.
    let at_once = Shape { has_tail: false, centres: false, ..shape };
    let after_sink = Shape { scaled: Scaled::All, sink_tiles: 1, alpha: 1.02, ..shape };
    let windowed = Shape { window: Some(50), soft_cap: Some(2.0), extra_tail_tiles: 1, ..shape };
    let with_sinks = Shape { sinks: Some([1.0, 0.5]), sink_tiles: 3, n_kv_heads: 2, ..shape };
    let cases = [
        (shape, (170, 5)),
        (windowed, (170, 1)),
        (at_once, (150, 1)),
        (shape, (1, 1)),
        (after_sink, (150, 1)),
        (with_sinks, (150, 9)),
        (after_sink, (300, 20)),
        (shape, (540, 33)),
        (windowed, (70, 20)),
        (at_once, (33, 2)),
    ];
    let shapes = skipped.combine(&heads, &cases);
    for (dtype, ((k_head_dim, v_head_dim, group), (storage, (n, rows)))) in
        skipped.combine(&DType::KV, &shapes)
    {
        let (k, v) = (dtype, dtype);
        let shape = Shape { k, v, shared_kv: true, k_head_dim, v_head_dim, group, ..storage };
        equals_its_equation(subject, &Tokens::gaussian(shape, n, 10), n, rows, &mut skipped);
    }
    skipped
}

fn too_few_sinks_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let sinks = subject.upload(&[0.0]);
    let (q, mut out) = (subject.upload(&[0.0; 256]), subject.upload(&[0.0; 256]));
    let params = Shape::new(DType::F16, DType::F16).params();
    let result = subject.device().attend(&params, &[], &q, Some(&sinks), None, &mut out);
    subject.expect_refusal("attend", "one sink for two heads", result);
}

/// Checks attention after the first `n` of `tokens`, the last `rows` of them appended in one step.
fn equals_its_equation<B: Backend>(
    subject: &DeviceUnderTest<B>,
    tokens: &Tokens,
    n: usize,
    rows: usize,
    skipped: &mut Skipped,
) {
    let shape = tokens.shape;
    let what = || subject.case("attend", format_args!("{shape:?}, {n} tokens, {rows} rows"));
    let q = gaussian(8, rows * shape.n_heads() * shape.k_head_dim, 1.0);
    if let Some((batch, got)) = skipped.take(attended(subject, tokens, n, rows, &q, &what), &what) {
        batch.assert_answers(&q, &got, &what);
    }
}

/// Appends the first `n` of `tokens`, the last `rows` of them in one step, and computes their
/// attention.
pub fn attended<'a, B: Backend>(
    subject: &'a DeviceUnderTest<B>,
    tokens: &'a Tokens,
    n: usize,
    rows: usize,
    q: &[f32],
    what: &dyn Fn() -> String,
) -> Result<(Batch<'a, B>, Vec<f32>)> {
    let mut batch = Batch::fed(subject, tokens, n - rows, 100)?;
    batch.append(&[rows])?;
    let got = batch.attend(q, what)?;
    Ok((batch, got))
}

fn wrong_sizes_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let what = || subject.case("attend", "too few queries");
    let tokens = Tokens::gaussian(Shape::new(DType::F16, DType::F16), 4, 7);
    let mut batch = Batch::fed(subject, &tokens, 4, 4).unwrap_or_else(|error| panic!("{}: {error}", what()));
    subject.expect_refusal("attend", "queries of three rows for four", batch.attend(&[0.0; 3 * 256], &what));
}
