//! Attention over the cache: what attention in f64 makes of what each query sees.

use kvant_backend::Backend;
use kvant_codec::DType;

use super::kv_append::HEAD_DIMS;
use crate::kv::{Answer, Batch, Shape, Tokens};
use crate::weights::gaussian;
use crate::{Lacks, Subject};

/// Holds `attend` to its equation for every pair of types.
pub fn types<B: Backend>(subject: &Subject<B>) -> Lacks {
    let mut lacks = Lacks::default();
    for (k, v) in DType::KV.into_iter().flat_map(|k| DType::KV.map(|v| (k, v))) {
        let shape = Shape { group: 3, ..Shape::new(k, v) };
        let plain = Tokens::gaussian(Shape { n_kv_heads: 2, ..shape }, 90, 1);
        equals_its_equation(subject, &plain, 90, 1, &mut lacks);
        let kept = Shape { sink_tiles: 1, extra_tail_tiles: 1, alpha: 1.02, ..shape };
        equals_its_equation(subject, &Tokens::gaussian(kept, 90, 2), 90, 5, &mut lacks);
        let windowed = Shape { window: Some(50), ..shape };
        equals_its_equation(subject, &Tokens::gaussian(windowed, 90, 3), 90, 20, &mut lacks);
    }
    lacks
}

/// Holds `attend` to its equation for every size of heads and of groups.
pub fn heads<B: Backend>(subject: &Subject<B>) -> Lacks {
    let mut lacks = Lacks::default();
    for (k, v) in [
        (DType::Turbo3, DType::Turbo4),
        (DType::Turbo2, DType::Turbo2),
        (DType::Q8_0, DType::Q4_0),
        (DType::F16, DType::BF16),
    ] {
        for head_dim in HEAD_DIMS {
            let shape = Shape { k_head_dim: head_dim, v_head_dim: head_dim, ..Shape::new(k, v) };
            for group in [1, 2, 6, 8] {
                let tokens = Tokens::gaussian(Shape { group, n_kv_heads: 2, ..shape }, 55, 4);
                equals_its_equation(subject, &tokens, 55, 1, &mut lacks);
                equals_its_equation(subject, &tokens, 37, 9, &mut lacks);
            }
            let unequal = Tokens::gaussian(Shape { v_head_dim: 128, ..shape }, 40, 5);
            equals_its_equation(subject, &unequal, 40, 3, &mut lacks);
        }
    }
    lacks
}

/// Holds `attend` to its equation for every number of tokens and rows, with windows, over tiles, blocks and borders.
pub fn steps<B: Backend>(subject: &Subject<B>) -> Lacks {
    let mut lacks = Lacks::default();
    for (k, v) in [(DType::Turbo3, DType::Turbo3), (DType::Q8_0, DType::Turbo2), (DType::F16, DType::Q4_0)] {
        let shape = Shape::new(k, v);
        for shape in [
            shape,
            Shape { has_tail: false, ..shape },
            Shape { extra_tail_tiles: 7, sink_tiles: 1, ..shape },
            Shape { window: Some(21), ..shape },
            Shape { window: Some(100), sink_tiles: 1, ..shape },
        ] {
            let tokens = Tokens::gaussian(shape, 580, 6);
            for n in [1, 15, 16, 17, 33, 127, 128, 129, 300, 512, 513, 529, 580] {
                for rows in [1, 2, 33] {
                    if rows <= n {
                        equals_its_equation(subject, &tokens, n, rows, &mut lacks);
                    }
                }
            }
        }
    }
    what_is_not_there_is_refused(subject);
    lacks
}

/// Holds `attend` to its equation where scores, of spread 1, are bounded: so that they bend, and so that they hardly do.
pub fn capped<B: Backend>(subject: &Subject<B>) -> Lacks {
    let mut lacks = Lacks::default();
    for (k, v) in [
        (DType::Turbo3, DType::Turbo3),
        (DType::Q8_0, DType::Turbo2),
        (DType::F16, DType::Q4_0),
        (DType::Turbo4, DType::F32),
    ] {
        for (head_dim, cap, window) in [(128, 1.0, None), (256, 1.5, Some(40)), (256, 50.0, None)] {
            let heads = Shape { k_head_dim: head_dim, v_head_dim: head_dim, group: 4, ..Shape::new(k, v) };
            let tokens = Tokens::gaussian(Shape { soft_cap: Some(cap), window, ..heads }, 150, 8);
            for (n, rows) in [(1, 1), (70, 2), (150, 1), (150, 7), (150, 40)] {
                equals_its_equation(subject, &tokens, n, rows, &mut lacks);
            }
        }
    }
    lacks
}

/// The first `n` of `tokens`, the last `rows` of them fed in one step.
fn equals_its_equation<B: Backend>(
    subject: &Subject<B>,
    tokens: &Tokens,
    n: usize,
    rows: usize,
    lacks: &mut Lacks,
) {
    let shape = tokens.shape;
    let what = || subject.case("attend", format_args!("{shape:?}, {n} tokens, {rows} rows"));
    let q = gaussian(8, rows * shape.n_heads() * shape.k_head_dim, 1.0);
    let fed = Batch::fed(subject, tokens, n - rows, 100).and_then(|mut batch| {
        batch.append(&[rows])?;
        let got = batch.attend(&q, &what)?;
        Ok((batch, got))
    });
    if let Some((batch, got)) = lacks.take(fed, &what) {
        assert_answers(subject, &batch, &q, &got, &what);
    }
}

/// Holds what the rows `q` of the last step of `batch` got to what each must get.
pub fn assert_answers<B: Backend>(
    subject: &Subject<B>,
    batch: &Batch<'_, B>,
    q: &[f32],
    got: &[f32],
    what: &dyn Fn() -> String,
) {
    let Shape { k_head_dim, v_head_dim, .. } = batch.shape();
    let n_heads = batch.shape().n_heads();
    let asked = batch.rows().flat_map(|row| (0..n_heads).map(move |head| (row, head)));
    let (mut queries, mut outs) = (q.chunks_exact(k_head_dim), got.chunks_exact(v_head_dim));
    for ((tokens, position), head) in asked {
        let (q, got) = queries.next().zip(outs.next()).expect("a query and an output for each row and head");
        let answer = Answer::new(tokens, batch.oldest(position), position, head, q, subject.attention());
        if let Some(fault) = answer.fault(got) {
            panic!("{}: position {position}, head {head}: {fault}", what());
        }
    }
}

fn what_is_not_there_is_refused<B: Backend>(subject: &Subject<B>) {
    let what = || subject.case("attend", "too few queries");
    let tokens = Tokens::gaussian(Shape::new(DType::F16, DType::F16), 4, 7);
    let mut batch = Batch::fed(subject, &tokens, 4, 4).unwrap_or_else(|error| panic!("{}: {error}", what()));
    subject.expect_refusal("attend", "queries of three rows for four", batch.attend(&[0.0; 3 * 256], &what));
}
