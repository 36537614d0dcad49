//! CUDA-specific tests of attention: split launches, KV splits, and formats that no kernel reads.
//! The conformance suites cover everything else.

use kvant_backend::TensorSizes;
use kvant_codec::Side;
use kvant_conformance::kv::{Batch, Shape, Tokens};
use kvant_conformance::weights::gaussian;

use super::*;
use crate::conformance::{hold, on_emulator};

/// Kernels multiply codes with scales in f16.
#[test]
fn codes_are_finite_halves_at_the_largest_scale() {
    use kvant_codec::block32::Q8_0_MAX_SCALE;
    use kvant_codec::finite::F16_MAX;
    for (book, dtype) in BOOKS.iter().zip(TYPES) {
        let (code, scale) = match dtype {
            DType::F32 | DType::F16 | DType::BF16 => continue,
            DType::Q8_0 => (127.0, Q8_0_MAX_SCALE),
            DType::Q4_0 => (8.0, F16_MAX / 8.0),
            _ => (127.0, F16_MAX),
        };
        let scale = half::f16::from_f32(scale * book.step).to_f32();
        assert!(half::f16::from_f32(code * scale).is_finite(), "{dtype}: {code} of {scale}");
    }
}

/// Sequences of different lengths, each with its own number of tokens; more than a launch takes,
/// and more heads than that.
#[test]
fn sequences_attend_together_as_each_does_alone() {
    together_as_alone(80);
}

#[test]
fn sequences_attend_together_as_each_does_alone_with_warpgroups() {
    together_as_alone(90);
}

fn together_as_alone(arch: u32) {
    let Some(subject) = on_emulator(arch) else { return };
    let base = Shape { k_head_dim: 64, v_head_dim: 64, ..Shape::new(DType::Turbo3, DType::Turbo3) };
    for (shape, lens, counts) in [
        (Shape { n_kv_heads: 25, ..base }, &[40, 30][..], &[1, 1][..]),
        (base, &[40, 700, 17, 130, 12], &[1, 1, 9, 70, 5]),
        (base, &[9; 18], &[1; 18]),
    ] {
        let what = || format!("{shape:?}, {counts:?} rows after {lens:?}");
        let tokens = (0..).zip(lens.iter().zip(counts));
        let tokens: Vec<_> = tokens.map(|(seed, (len, n))| Tokens::gaussian(shape, len + n, seed)).collect();
        let mut together = Batch::new(&subject, &tokens.iter().collect::<Vec<_>>());
        together.feed(lens, 700).unwrap();
        together.append(counts).unwrap();
        let q = gaussian(7, counts.iter().sum::<usize>() * shape.n_heads() * 64, 1.0);
        let got = together.attend(&q, &what).unwrap();
        together.assert_answers(&q, &got, &what);
        let mut first = 0;
        for (tokens, (&len, &n)) in tokens.iter().zip(lens.iter().zip(counts)) {
            let rows = first..first + n * shape.n_heads() * 64;
            let mut alone = Batch::fed(&subject, tokens, len, 700).unwrap();
            alone.append(&[n]).unwrap();
            let alone = alone.attend(&q[rows.clone()], &what).unwrap();
            let is_same = alone.iter().zip(&got[rows.clone()]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(is_same, "{}: {n} rows after {len} tokens", what());
            first = rows.end;
        }
    }
}

#[test]
fn a_long_context_is_split_and_joined() {
    const TOKENS: usize = 2600;
    let Some(subject) = on_emulator(80) else { return };
    let shape = Shape { group: 3, ..Shape::new(DType::Turbo3, DType::Turbo3) };
    let tokens = Tokens::gaussian(shape, TOKENS + 20, 15);
    let mut batch = Batch::fed(&subject, &tokens, TOKENS, TOKENS).unwrap();
    for n in [1, 5, 14] {
        let what = || format!("{n} rows after {TOKENS} tokens");
        batch.append(&[n]).unwrap();
        let q = gaussian(16, n * shape.n_heads() * 128, 1.0);
        let got = batch.attend(&q, &what).unwrap();
        batch.assert_answers(&q, &got, &what);
    }
}

/// A row has the bits that it has alone, in a step with up to seven others, within a tile and
/// across tiles, with tiles of columns that rows and heads share, windows, and tokens of later rows
/// in coded tiles.
#[test]
fn few_rows_have_the_bits_they_have_alone() {
    let Some(subject) = on_emulator(80) else { return };
    let base = Shape { k_head_dim: 64, v_head_dim: 64, group: 3, ..Shape::new(DType::Turbo3, DType::Turbo3) };
    let shapes = [
        base,
        Shape { group: 12, window: Some(100), ..base },
        Shape { has_tail: false, centres: false, ..base },
        Shape { k: DType::Turbo4, v: DType::Q8_0, sink_tiles: 1, ..base },
    ];
    for (shape, (len, rows)) in shapes.into_iter().zip([(188, 8), (123, 3), (65, 8), (139, 6)]) {
        let tokens = Tokens::gaussian(shape, len + rows, 51);
        let what = || format!("{shape:?}, {rows} rows after {len} tokens");
        let width = shape.n_heads() * shape.k_head_dim;
        let q = gaussian(52, rows * width, 1.0);
        let mut together = Batch::fed(&subject, &tokens, len, len).unwrap();
        together.append(&[rows]).unwrap();
        let together = together.attend(&q, &what).unwrap();
        let mut alone = Batch::fed(&subject, &tokens, len, len).unwrap();
        let mut one_by_one = Vec::new();
        for q in q.chunks_exact(width) {
            alone.append(&[1]).unwrap();
            one_by_one.extend(alone.attend(q, &what).unwrap());
        }
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&together), bits(&one_by_one), "{}", what());
    }
}

/// Suites with more than 32 queries per KV head, as `attend_steps` has.
#[test]
fn warpgroups_hold_the_suites() {
    for op in ["attend_types", "attend_capped"] {
        hold(on_emulator(90), op);
    }
}

/// Warpgroups with all, one and none of their queries, over more steps than there are stages,
/// without splits.
#[test]
fn warpgroups_share_steps_for_any_number_of_queries() {
    const TOKENS: usize = 400;
    let Some(subject) = on_emulator(90) else { return };
    let base = Shape { n_kv_heads: 4, group: 1, ..Shape::new(DType::Turbo3, DType::Turbo3) };
    let shapes = [
        base,
        Shape { sink_tiles: 3, extra_tail_tiles: 5, ..base },
        Shape { k_head_dim: 64, window: Some(300), ..base },
        Shape {
            v_head_dim: 64,
            soft_cap: Some(2.0),
            n_kv_heads: 4,
            group: 1,
            ..Shape::new(DType::F16, DType::Q8_0)
        },
        Shape { k_head_dim: 256, v_head_dim: 256, n_kv_heads: 2, ..base },
        Shape {
            k_head_dim: 256,
            v_head_dim: 256,
            n_kv_heads: 1,
            group: 3,
            window: Some(100),
            soft_cap: Some(2.0),
            ..Shape::new(DType::Q8_0, DType::F16)
        },
        Shape { k_head_dim: 192, n_kv_heads: 1, ..base },
        Shape { v_head_dim: 256, n_kv_heads: 1, ..Shape::new(DType::Turbo4, DType::Turbo4) },
    ];
    for (shape, rows) in shapes.into_iter().zip([129, 193, 64, 65, 129, 43, 193, 128]) {
        let tokens = Tokens::gaussian(shape, TOKENS + rows, 31);
        let mut batch = Batch::fed(&subject, &tokens, TOKENS, TOKENS).unwrap();
        let what = || format!("{shape:?}, {rows} rows after {TOKENS} tokens");
        batch.append(&[rows]).unwrap();
        let q = gaussian(32, rows * shape.n_heads() * shape.k_head_dim, 1.0);
        let got = batch.attend(&q, &what).unwrap();
        batch.assert_answers(&q, &got, &what);
    }
}

/// With 64 dims or fewer two lanes share 16 dims of values, whose rows each type divides in its own
/// way: in whole units, tiles and 16 bit.
#[test]
fn small_heads_of_every_type_decode() {
    const TOKENS: usize = 209;
    let Some(subject) = on_emulator(80) else { return };
    let small = [(DType::Turbo3, 32), (DType::Turbo2T, 32)];
    for (dtype, dim) in TYPES.map(|dtype| (dtype, 64)).into_iter().chain(small) {
        let shape =
            Shape { k_head_dim: dim, v_head_dim: dim, n_kv_heads: 1, group: 4, ..Shape::new(dtype, dtype) };
        let tokens = Tokens::gaussian(shape, TOKENS + 1, 21);
        let mut batch = Batch::fed(&subject, &tokens, TOKENS, TOKENS).unwrap();
        batch.append(&[1]).unwrap();
        let q = gaussian(22, shape.n_heads() * dim, 1.0);
        let what = || format!("{shape:?}");
        let got = batch.attend(&q, &what).unwrap();
        batch.assert_answers(&q, &got, &what);
    }
}

/// With a window, units of eight tiles begin anywhere, so that a unit may span two centres; a sink
/// has none.
#[test]
fn centres_are_those_of_the_block_wherever_a_window_begins() {
    let Some(subject) = on_emulator(80) else { return };
    let base =
        Shape { k_head_dim: 64, v_head_dim: 32, window: Some(150), ..Shape::new(DType::Turbo3, DType::Q8_0) };
    for (shape, len) in
        [(base, 330), (Shape { sink_tiles: 9, ..base }, 250), (Shape { soft_cap: Some(2.0), ..base }, 330)]
    {
        // Keys with an offset that alternates from block to block.
        let k = gaussian(3, (len + 60) * 64, 1.0);
        let k =
            k.iter().enumerate().map(|(i, x)| x + if i / 64 / 128 % 2 == 0 { 2.0 } else { -2.0 }).collect();
        let tokens = Tokens::new(shape, k, gaussian(4, (len + 60) * 32, 1.0));
        let mut batch = Batch::fed(&subject, &tokens, len, 100).unwrap();
        // One kernel each.
        for n in [1, 10, 40] {
            let what = || format!("{shape:?}, {n} rows after {len} tokens and more");
            batch.append(&[n]).unwrap();
            let q = gaussian(7, n * shape.n_heads() * 64, 1.0);
            let got = batch.attend(&q, &what).unwrap();
            batch.assert_answers(&q, &got, &what);
        }
    }
}

/// The error names the format that no kernel reads.
#[test]
fn heads_that_are_too_large_and_tails_that_differ_are_refused() {
    // Of compute capability 8.9, which has the least.
    const SHARED: usize = 99 << 10;
    let refused = |shape: Shape, change: fn(&mut KvLayer), words: [&str; 2]| {
        let specs = |side| vec![shape.spec(side)];
        let values = if shape.shared_kv { Vec::new() } else { specs(Side::V) };
        let mut layer = KvLayer::new(specs(Side::K), values, None, &mut TensorSizes::default());
        change(&mut layer);
        let error = check(&shape.params(), &layer, SHARED).unwrap_err();
        assert!(matches!(error, BackendError::Unsupported { op: "attend", .. }), "{error}");
        let error = error.to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    let shape = Shape::new(DType::Turbo3, DType::Turbo3);
    refused(Shape { v_head_dim: 640, ..shape }, |_| (), ["640", "608"]);
    refused(Shape::shared_kv(DType::F16, 640, 512), |_| (), ["640", "608"]);
    refused(shape, |layer| layer.v[0].spec.tail_tiles = 1, ["2 tiles", "1 of values"]);
}
