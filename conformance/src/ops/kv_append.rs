//! Appending to the cache: rows read back as encoded by the codec, in 16 bits and quantized,
//! independent of the batch.

use kvant_backend::Backend;
use kvant_codec::DType;

use crate::kv::{Batch, Scaled, Shape, Tokens};
use crate::skipped::product;
use crate::{DeviceUnderTest, Skipped};

/// Below, at and above blocks of 32, 64 and 128 dimensions, and several of them.
pub const HEAD_DIMS: [usize; 7] = [32, 64, 80, 96, 128, 192, 256];

/// Tokens that fill a block and begin another.
const TOKENS: usize = 150;
/// Tokens that fill a block and cross a boundary of the window, so that no old slot of the tail's
/// ring remains.
const WHOLE_TILES: usize = 160;
const PAST_A_WINDOW: usize = 608;

/// Compares `kv_append` with the codec, with and without a tail, a sink and a balance.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let shape = |dtype| Shape { k_head_dim: 80, v_head_dim: 192, ..Shape::new(dtype, dtype) };
    let storage = [(true, 0, 0, 1.0), (true, 1, 2, 1.02), (false, 0, 0, 1.0), (false, 2, 0, 0.9)];
    let storage = storage.map(|(has_tail, sink_tiles, extra_tail_tiles, alpha)| {
        // Without a tail, a centre depends on the chunks.
        move |shape| Shape { has_tail, centres: has_tail, sink_tiles, extra_tail_tiles, alpha, ..shape }
    });
    for (dtype, (storage, chunk)) in skipped.combine(&DType::KV, &product(&storage, &[1, 7, 130])) {
        let tokens = Tokens::gaussian(storage(shape(dtype)), TOKENS, 1);
        chunks_hold_what_was_fed(subject, &tokens, chunk, &mut skipped);
    }
    for (dtype, sink_tiles) in skipped.combine(&DType::KV, &[0, 2, 9]) {
        let shape = Shape { has_tail: false, sink_tiles, scaled: Scaled::All, ..shape(dtype) };
        chunks_hold_what_was_fed(subject, &Tokens::gaussian(shape, TOKENS, 8), TOKENS, &mut skipped);
        let shape = Shape { has_tail: true, n_kv_heads: 2, scaled: Scaled::Keys, ..shape };
        chunks_hold_what_was_fed(subject, &Tokens::gaussian(shape, TOKENS, 8), 33, &mut skipped);
    }
    for (dtype, storage) in skipped.combine(&DType::KV, &storage) {
        batches_equal_single_sequences(
            subject,
            Shape { n_kv_heads: 2, ..storage(shape(dtype)) },
            &mut skipped,
        );
    }
    for dtype in DType::KV {
        bad_numbers_are_stored_as_the_codec_stores_them(subject, Shape::new(dtype, dtype), &mut skipped);
    }
    unequal_types_stand_side_by_side(subject, &mut skipped);
    different_layers_share_a_step(subject, &mut skipped);
    wrong_sizes_are_refused(subject);
    skipped
}

/// Compares `kv_append` with the codec for heads of every size, and for shared KV tensors.
pub fn heads<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let dims: Vec<_> = HEAD_DIMS.into_iter().zip(HEAD_DIMS.into_iter().rev()).chain([(16, 96)]).collect();
    for (dtype, (k_head_dim, v_head_dim)) in skipped.combine(&DType::KV, &dims) {
        let shape = Shape { k_head_dim, v_head_dim, n_kv_heads: 2, ..Shape::new(dtype, dtype) };
        chunks_hold_what_was_fed(subject, &Tokens::gaussian(shape, 50, 2), 50, &mut skipped);
    }
    for (dtype, chunk) in skipped.combine(&DType::KV, &[7, 130]) {
        let shape = Shape { n_kv_heads: 2, scaled: Scaled::All, ..Shape::shared_kv(dtype, 96, 64) };
        chunks_hold_what_was_fed(subject, &Tokens::gaussian(shape, TOKENS, 10), chunk, &mut skipped);
        let shape = Shape { n_kv_heads: 1, ..shape };
        bytes_do_not_depend_on_chunks(subject, shape, WHOLE_TILES, chunk, &mut skipped);
    }
    skipped
}

/// Checks that `kv_append` writes the same bytes for any chunks.
pub fn chunks<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let shape = |dtype| Shape { k_head_dim: 64, sink_tiles: 1, ..Shape::new(dtype, dtype) };
    for (dtype, chunk) in skipped.combine(&DType::KV, &[5, 16, 100, WHOLE_TILES]) {
        bytes_do_not_depend_on_chunks(subject, shape(dtype), WHOLE_TILES, chunk, &mut skipped);
    }
    // The start of the window is independent of the type.
    for (dtype, chunk) in skipped.combine(&[DType::Turbo3, DType::Q4_0], &[16, 100, PAST_A_WINDOW]) {
        bytes_do_not_depend_on_chunks(subject, shape(dtype), PAST_A_WINDOW, chunk, &mut skipped);
    }
    skipped
}

fn chunks_hold_what_was_fed<B: Backend>(
    subject: &DeviceUnderTest<B>,
    tokens: &Tokens,
    chunk: usize,
    skipped: &mut Skipped,
) {
    let what = || subject.case("kv_append", format_args!("{:?} in chunks of {chunk}", tokens.shape));
    if let Some(mut batch) = skipped.take(Batch::fed(subject, tokens, tokens.len(), chunk), &what) {
        batch.assert_stored_tokens(&what);
    }
}

/// Compares several parts of different lengths in one call with each appended alone.
fn batches_equal_single_sequences<B: Backend>(
    subject: &DeviceUnderTest<B>,
    shape: Shape,
    skipped: &mut Skipped,
) {
    const STEPS: [[usize; 3]; 5] = [[40, 1, 17], [1, 1, 1], [3, 33, 16], [1, 20, 1], [1, 1, 1]];
    let tokens = [3, 4, 5].map(|seed| Tokens::gaussian(shape, 60, seed));
    let what = || subject.case("kv_append", format_args!("{shape:?} of three sequences"));
    let mut together = Batch::new(subject, &tokens.each_ref());
    let mut alone = tokens.each_ref().map(|tokens| Batch::new(subject, &[tokens]));
    for counts in STEPS {
        if skipped.take(together.append(&counts), &what).is_none() {
            return;
        }
        together.assert_stored_tokens(&what);
        for (index, (alone, n)) in alone.iter_mut().zip(counts).enumerate() {
            alone.append(&[n]).unwrap_or_else(|error| panic!("{}: alone: {error}", what()));
            let is_same = alone.memory_bytes(0) == together.memory_bytes(index);
            assert!(is_same, "{}: sequence {index} has other bytes than alone", what());
        }
    }
}

/// Appends alternating sequences whose layers have different storage.
fn different_layers_share_a_step<B: Backend>(subject: &DeviceUnderTest<B>, skipped: &mut Skipped) {
    let shape = Shape { n_kv_heads: 2, k_head_dim: 64, ..Shape::new(DType::Turbo3, DType::Q8_0) };
    let other = Shape { k: DType::F16, v: DType::Turbo2, sink_tiles: 1, ..shape };
    let shapes = [shape, shape, other, shape, other];
    let tokens: Vec<_> = (0..).zip(shapes).map(|(seed, shape)| Tokens::gaussian(shape, 80, seed)).collect();
    let mut batch = Batch::new(subject, &tokens.iter().collect::<Vec<_>>());
    for counts in [[20, 1, 33, 7, 1], [1, 1, 1, 1, 1], [30, 40, 2, 1, 17]] {
        let what = || subject.case("kv_append", format_args!("{shape:?} with {other:?}, {counts:?} rows"));
        if skipped.take(batch.append(&counts), &what).is_some() {
            batch.assert_stored_tokens(&what);
        }
    }
}

/// Compares one step and single tokens at the end with chunks from the start.
fn bytes_do_not_depend_on_chunks<B: Backend>(
    subject: &DeviceUnderTest<B>,
    shape: Shape,
    n: usize,
    chunk: usize,
    skipped: &mut Skipped,
) {
    const ONE_BY_ONE: usize = 110;
    let tokens = Tokens::gaussian(shape, n, 9);
    let what =
        || subject.case("kv_append", format_args!("{shape:?}, {n} in chunks of {chunk}, and one by one"));
    let fed = Batch::fed(subject, &tokens, n - ONE_BY_ONE, n).and_then(|mut one_by_one| {
        one_by_one.feed(&[ONE_BY_ONE], 1)?;
        Ok(one_by_one)
    });
    let Some(mut one_by_one) = skipped.take(fed, &what) else { return };
    one_by_one.assert_stored_tokens(&what);
    let Some(in_chunks) = skipped.take(Batch::fed(subject, &tokens, n, chunk), &what) else { return };
    assert!(in_chunks.memory_bytes(0) == one_by_one.memory_bytes(0), "{}: other bytes", what());
}

fn bad_numbers_are_stored_as_the_codec_stores_them<B: Backend>(
    subject: &DeviceUnderTest<B>,
    shape: Shape,
    skipped: &mut Skipped,
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
        chunks_hold_what_was_fed(subject, &tokens, tokens.len(), skipped);
    }
}

/// Combines a type with a tail and one without, and rotated with plain types.
fn unequal_types_stand_side_by_side<B: Backend>(subject: &DeviceUnderTest<B>, skipped: &mut Skipped) {
    for (k, v) in [(DType::Q8_0, DType::Turbo3), (DType::Turbo4, DType::F16), (DType::BF16, DType::Q4_0)] {
        let shape = Shape { sink_tiles: 1, ..Shape::new(k, v) };
        chunks_hold_what_was_fed(subject, &Tokens::gaussian(shape, TOKENS, 6), 7, skipped);
    }
}

fn wrong_sizes_are_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let tokens = Tokens::gaussian(Shape::new(DType::F16, DType::F16), 4, 7);
    let mut batch = Batch::new(subject, &[&tokens]);
    let result = batch.append_from(&[4], &tokens.k[..511], &tokens.v);
    subject.expect_refusal("kv_append", "511 values of 4 keys of 128", result);
    let result = batch.append_from(&[4], &tokens.k, &tokens.v[..511]);
    subject.expect_refusal("kv_append", "511 values of 4 values of 128", result);
}
