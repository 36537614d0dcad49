//! Attention with extreme weights, values or queries, and with released blocks outside the window.

use kvant_backend::Backend;
use kvant_codec::DType;

use super::attend::attended;
use crate::kv::{Batch, Shape, Tokens};
use crate::skipped::product;
use crate::weights::gaussian;
use crate::{DeviceUnderTest, Skipped};

/// Compares `attend` with its equation for scores and values of any size.
pub fn sizes<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    // One token far above or below all others, at any position; and all alike.
    let scores = [(300, Some((3, 3000.0))), (300, Some((200, 3000.0))), (300, Some((299, -3000.0)))];
    let scores = [&scores[..], &[1, 16, 128, 500].map(|n| (n, None))].concat();
    for (dtype, (n, far)) in skipped.combine(&DType::KV, &scores) {
        let mut scores = vec![0.7; n];
        if let Some((token, score)) = far {
            scores[token] = score;
        }
        weights_are_those_of_scores(subject, Shape::new(dtype, dtype), &scores, &mut skipped);
    }
    for ((v, gain), rows) in skipped.combine(&product(&DType::KV, &[0.01, 1e3]), &[1, 5, 20]) {
        values_of_any_size_keep_their_precision(
            subject,
            Shape { group: 4, ..Shape::new(DType::Q8_0, v) },
            gain,
            rows,
            &mut skipped,
        );
    }
    skipped
}

/// Checks that keys and values beyond f16 give finite outputs: they are clipped, and their decoded
/// codes are within f16 too.
pub fn clipped<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    const TOKENS: usize = 70;
    let mut skipped = subject.skipped();
    for (dtype, (gains, rows)) in
        skipped.combine(&DType::KV, &product(&[[1e6, 1.0], [1.0, 1e6]], &[1, 5, 20]))
    {
        let shape = Shape { group: 4, ..Shape::new(dtype, dtype) };
        let what = || subject.case("attend", format_args!("{shape:?}, gains {gains:?}, {rows} rows"));
        let dims = [shape.k_head_dim, shape.v_head_dim];
        let [k, v] = [0, 1].map(|side| gaussian(13 + side as u64, TOKENS * dims[side], gains[side]));
        let q = gaussian(15, rows * shape.n_heads() * shape.k_head_dim, 1.0);
        let tokens = Tokens::new(shape, k, v);
        if let Some((_, got)) = skipped.take(attended(subject, &tokens, TOKENS, rows, &q, &what), &what) {
            assert_eq!(got.iter().position(|x| !x.is_finite()), None, "{}", what());
        }
    }
    skipped
}

/// Checks that NaN or infinity in a query reaches the output of that query only.
pub fn bad_queries<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    for (dtype, (bad, rows)) in skipped.combine(&DType::KV, &product(&[f32::NAN, f32::INFINITY], &[1, 2, 20]))
    {
        let shape = Shape { n_kv_heads: 2, ..Shape::new(dtype, dtype) };
        let what = || subject.case("attend", format_args!("{shape:?}, {bad} in one query of {rows} rows"));
        let tokens = Tokens::gaussian(shape, 58 + rows, 3);
        let mut q = gaussian(4, rows * shape.n_heads() * shape.k_head_dim, 1.0);
        let head = (rows - 1) * shape.n_heads() + 1;
        q[head * shape.k_head_dim + 17] = bad;
        let Some(got) = skipped.take(attended(subject, &tokens, tokens.len(), rows, &q, &what), &what) else {
            continue;
        };
        for (index, out) in got.1.chunks_exact(shape.v_head_dim).enumerate() {
            assert!(out.iter().all(|x| x.is_nan() == (index == head)), "{}: output {index}: {out:?}", what());
        }
    }
    skipped
}

/// Checks that windowed attention reads no earlier blocks: those outside every window are released.
pub fn forgotten<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let types = [(DType::Turbo3, DType::F16), (DType::Q8_0, DType::Turbo4)];
    for ((k, v), (group, rows)) in skipped.combine(&types, &[(1, 1), (3, 3), (3, 60), (12, 1)]) {
        let shape = Shape { group, window: Some(40), ..Shape::new(k, v) };
        let what = || subject.case("attend", format_args!("{shape:?}, {rows} rows, old blocks gone"));
        let tokens = Tokens::gaussian(shape, 330 + rows, 6);
        let q = gaussian(7, rows * shape.n_heads() * shape.k_head_dim, 1.0);
        let result = Batch::fed(subject, &tokens, 330, 330).and_then(|mut batch| {
            batch.forget();
            batch.append(&[rows])?;
            let got = batch.attend(&q, &what)?;
            Ok((batch, got))
        });
        if let Some((batch, got)) = skipped.take(result, &what) {
            batch.assert_answers(&q, &got, &what);
        }
    }
    skipped
}

/// Checks that the stages of `attend` are finite, since they read within the tiles, and that the
/// last equals attention.
pub fn stages<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let stages = subject.device().attend_stages();
    if stages.is_empty() {
        return skipped;
    }
    for (k, (n, group, v)) in skipped.combine(&DType::KV, &[(150, 3, None), (40, 8, Some(DType::Turbo3))]) {
        let shape = Shape { group, n_kv_heads: 2, ..Shape::new(k, v.unwrap_or(k)) };
        let what = || subject.case("attend_staged", format_args!("{shape:?}, {n} tokens"));
        let tokens = Tokens::gaussian(shape, n, 4);
        let q = gaussian(5, shape.n_heads() * shape.k_head_dim, 1.0);
        let Some((mut batch, want)) =
            skipped.take(attended(subject, &tokens, tokens.len(), 1, &q, &what), &what)
        else {
            continue;
        };
        for (stage, name) in stages.iter().enumerate() {
            let result = batch.attend_staged(stage, &q, &what);
            let out = result.unwrap_or_else(|error| panic!("{}: {name}: {error}", what()));
            assert!(out.iter().all(|x| x.is_finite()), "{}: {name}: {out:?}", what());
            assert!(stage + 1 < stages.len() || out == want, "{}: the last stage is not attention", what());
        }
    }
    skipped
}

/// Creates keys along one direction: `scores[t]` is the score of token t, before the codec.
fn weights_are_those_of_scores<B: Backend>(
    subject: &DeviceUnderTest<B>,
    shape: Shape,
    scores: &[f32],
    skipped: &mut Skipped,
) {
    let dim = shape.k_head_dim;
    let mut k = vec![0.0; scores.len() * dim];
    k.iter_mut().step_by(dim).zip(scores).for_each(|(k, score)| *k = *score);
    let v = gaussian(9, scores.len() * shape.v_head_dim, 1.0);
    let mut q = vec![0.0; shape.n_heads() * dim];
    q.iter_mut().step_by(dim).for_each(|q| *q = (dim as f32).sqrt());
    let what = || subject.case("attend", format_args!("{shape:?}, scores of {scores:?}"));
    let tokens = Tokens::new(shape, k, v);
    if let Some((batch, got)) = skipped.take(attended(subject, &tokens, tokens.len(), 1, &q, &what), &what) {
        batch.assert_answers(&q, &got, &what);
    }
}

fn values_of_any_size_keep_their_precision<B: Backend>(
    subject: &DeviceUnderTest<B>,
    shape: Shape,
    gain: f64,
    rows: usize,
    skipped: &mut Skipped,
) {
    const TOKENS: usize = 90;
    let what = || subject.case("attend", format_args!("{shape:?}, values of {gain}, {rows} rows"));
    let (k, v) =
        (gaussian(10, TOKENS * shape.k_head_dim, 1.0), gaussian(11, TOKENS * shape.v_head_dim, gain));
    let q = gaussian(12, rows * shape.n_heads() * shape.k_head_dim, 1.0);
    let tokens = Tokens::new(shape, k, v);
    if let Some((batch, got)) = skipped.take(attended(subject, &tokens, tokens.len(), rows, &q, &what), &what)
    {
        batch.assert_answers(&q, &got, &what);
    }
}
