//! Appending: what was fed reads back as the codec says, in 16 bit and in codes, whatever was fed with it.

use kvant_backend::Backend;
use kvant_codec::DType;

use crate::kv::{Batch, Shape, Tokens};
use crate::{Lacks, Subject};

/// Below, at and above blocks of 32, 64 and 128 dims, and several of them.
pub const HEAD_DIMS: [usize; 7] = [32, 64, 80, 96, 128, 192, 256];

/// Tokens that fill a block and begin another.
const TOKENS: usize = 200;

/// Holds `kv_append` to the codec.
pub fn run<B: Backend>(subject: &Subject<B>) -> Lacks {
    let mut lacks = Lacks::default();
    for dtype in DType::KV {
        let shape = Shape::new(dtype, dtype);
        for (has_tail, sink_tiles, extra_tail_tiles, alpha) in
            [(true, 0, 0, 1.0), (true, 1, 2, 1.02), (false, 0, 0, 1.0), (false, 2, 0, 0.9)]
        {
            let shape = Shape { has_tail, sink_tiles, extra_tail_tiles, alpha, ..shape };
            let shape = Shape { k_head_dim: 80, v_head_dim: 192, ..shape };
            any_chunks_hold_what_was_fed(subject, &Tokens::gaussian(shape, TOKENS, 1), &mut lacks);
            parts_are_what_they_are_alone(subject, Shape { n_kv_heads: 2, ..shape }, &mut lacks);
        }
        for (k_head_dim, v_head_dim) in HEAD_DIMS.into_iter().zip(HEAD_DIMS.into_iter().rev()) {
            let shape = Shape { k_head_dim, v_head_dim, n_kv_heads: 2, ..shape };
            fed_at_once_holds_what_was_fed(subject, &Tokens::gaussian(shape, 50, 2), &mut lacks);
        }
        bytes_do_not_depend_on_chunks(subject, Shape { k_head_dim: 64, sink_tiles: 1, ..shape }, &mut lacks);
        bad_numbers_are_stored_as_the_codec_stores_them(subject, shape, &mut lacks);
    }
    unequal_types_stand_side_by_side(subject, &mut lacks);
    what_is_not_there_is_refused(subject);
    lacks
}

fn any_chunks_hold_what_was_fed<B: Backend>(subject: &Subject<B>, tokens: &Tokens, lacks: &mut Lacks) {
    for chunk in [1, 7, 130] {
        let what = || subject.case("kv_append", format_args!("{:?} in chunks of {chunk}", tokens.shape));
        let Some(mut batch) = lacks.take(Batch::fed(subject, tokens, tokens.len(), chunk), &what) else {
            return;
        };
        batch.assert_holds_what_was_fed(&what);
    }
}

fn fed_at_once_holds_what_was_fed<B: Backend>(subject: &Subject<B>, tokens: &Tokens, lacks: &mut Lacks) {
    let what = || subject.case("kv_append", format_args!("{:?} at once", tokens.shape));
    if let Some(mut batch) = lacks.take(Batch::fed(subject, tokens, tokens.len(), tokens.len()), &what) {
        batch.assert_holds_what_was_fed(&what);
    }
}

/// Several parts of different lengths in one call: each has the bytes that it has when it is fed alone.
fn parts_are_what_they_are_alone<B: Backend>(subject: &Subject<B>, shape: Shape, lacks: &mut Lacks) {
    const STEPS: [[usize; 3]; 5] = [[40, 1, 17], [1, 1, 1], [3, 33, 16], [1, 20, 1], [1, 1, 1]];
    let tokens = [3, 4, 5].map(|seed| Tokens::gaussian(shape, 60, seed));
    let what = || subject.case("kv_append", format_args!("{shape:?} of three sequences"));
    let mut together = Batch::new(subject, &tokens.each_ref());
    let mut alone = tokens.each_ref().map(|tokens| Batch::new(subject, &[tokens]));
    for counts in STEPS {
        if lacks.take(together.append(&counts), &what).is_none() {
            return;
        }
        together.assert_holds_what_was_fed(&what);
        for (index, (alone, n)) in alone.iter_mut().zip(counts).enumerate() {
            alone.append(&[n]).unwrap_or_else(|error| panic!("{}: alone: {error}", what()));
            let is_same = alone.image(0) == together.image(index);
            assert!(is_same, "{}: sequence {index} has other bytes than alone", what());
        }
    }
}

/// Over a border of the window, to where no slot of the tail's ring is left from before.
fn bytes_do_not_depend_on_chunks<B: Backend>(subject: &Subject<B>, shape: Shape, lacks: &mut Lacks) {
    const LEN: usize = 608;
    let tokens = Tokens::gaussian(shape, LEN, 9);
    let what = |chunk| subject.case("kv_append", format_args!("{shape:?} in chunks of {chunk}"));
    let Some(mut one_by_one) = lacks.take(Batch::fed(subject, &tokens, LEN, 1), &|| what(1)) else { return };
    one_by_one.assert_holds_what_was_fed(&|| what(1));
    for chunk in [5, 16, 100, LEN] {
        let Some(batch) = lacks.take(Batch::fed(subject, &tokens, LEN, chunk), &|| what(chunk)) else {
            return;
        };
        assert!(batch.image(0) == one_by_one.image(0), "{}: other bytes than one by one", what(chunk));
    }
}

fn bad_numbers_are_stored_as_the_codec_stores_them<B: Backend>(
    subject: &Subject<B>,
    shape: Shape,
    lacks: &mut Lacks,
) {
    const DIM: usize = 96;
    let mut x = vec![0.5; 60 * DIM];
    x[3] = f32::NAN;
    x[DIM + 5] = f32::INFINITY;
    x[20 * DIM + 7] = -1e30;
    x[21 * DIM..22 * DIM].fill(0.0);
    x[22 * DIM..23 * DIM].fill(f32::from_bits(1));
    let shape = Shape { k_head_dim: DIM, v_head_dim: DIM, ..shape };
    for has_tail in [true, false] {
        let tokens = Tokens::new(Shape { has_tail, ..shape }, x.clone(), x.clone());
        fed_at_once_holds_what_was_fed(subject, &tokens, lacks);
    }
}

/// A type with a tail beside one without, rotated ones beside plain ones.
fn unequal_types_stand_side_by_side<B: Backend>(subject: &Subject<B>, lacks: &mut Lacks) {
    for (k, v) in [(DType::Q8_0, DType::Turbo3), (DType::Turbo4, DType::F16), (DType::BF16, DType::Q4_0)] {
        let shape = Shape { sink_tiles: 1, ..Shape::new(k, v) };
        any_chunks_hold_what_was_fed(subject, &Tokens::gaussian(shape, TOKENS, 6), lacks);
    }
}

fn what_is_not_there_is_refused<B: Backend>(subject: &Subject<B>) {
    let tokens = Tokens::gaussian(Shape::new(DType::F16, DType::F16), 4, 7);
    let mut batch = Batch::new(subject, &[&tokens]);
    let result = batch.append_from(&[4], &tokens.k[..511], &tokens.v);
    subject.expect_refusal("kv_append", "511 values of 4 keys of 128", result);
    let result = batch.append_from(&[4], &tokens.k, &tokens.v[..511]);
    subject.expect_refusal("kv_append", "511 values of 4 values of 128", result);
}
