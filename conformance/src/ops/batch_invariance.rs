//! Batch invariance: attention of a row is bit-identical for any other rows of its sequence, up to
//! as many as the device promises, and any other sequences, in the step.

use kvant_backend::Backend;
use kvant_codec::DType;

use crate::kv::{Batch, Scaled, Shape, Tokens};
use crate::skipped::product;
use crate::weights::gaussian;
use crate::{DeviceUnderTest, Skipped};

/// Tokens of the sequence before the step and rows in it; and those of the other sequences.
const STEPS: [[(usize, usize); 3]; 3] =
    [[(0, 40), (33, 1), (150, 20)], [(90, 7), (33, 1), (140, 20)], [(500, 30), (33, 1), (520, 20)]];

/// Checks that `attend`, after `kv_append`, is batch-invariant.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    if subject.invariant_rows() < usize::MAX {
        let rows = subject.invariant_rows();
        skipped.leave_out(format!("batch invariance within a sequence beyond {rows} rows is not promised"));
    }
    let types = [
        (DType::Turbo3, DType::Turbo3),
        (DType::Q8_0, DType::Turbo2),
        (DType::F16, DType::Q4_0),
        (DType::Turbo4, DType::F32),
        (DType::BF16, DType::BF16),
    ];
    let shape = Shape { k_head_dim: 96, ..Shape::new(DType::F16, DType::F16) };
    let shapes = [
        shape,
        Shape { sink_tiles: 1, window: Some(100), ..shape },
        Shape { has_tail: false, centres: false, group: 3, ..shape },
        Shape { scaled: Scaled::All, sink_tiles: 1, window: Some(150), ..shape },
        Shape {
            extra_tail_tiles: 7,
            scaled: Scaled::Keys,
            window: Some(400),
            n_kv_heads: 2,
            group: 1,
            ..shape
        },
    ];
    for ((shape, steps), (k, v)) in skipped.combine(&product(&shapes, &STEPS), &types) {
        rows_have_the_bits_they_have_alone(subject, Shape { k, v, ..shape }, steps, &mut skipped);
    }
    let shared_kv = [DType::Turbo3, DType::Q8_0, DType::F16];
    for (dtype, steps) in skipped.combine(&shared_kv, &STEPS) {
        let shape = Shape { group: 5, sink_tiles: 1, ..Shape::shared_kv(dtype, 160, 128) };
        rows_have_the_bits_they_have_alone(subject, shape, steps, &mut skipped);
    }
    skipped
}

/// Compares rows processed one by one and in one step, and rows in one step and in one among rows
/// of other sequences.
fn rows_have_the_bits_they_have_alone<B: Backend>(
    subject: &DeviceUnderTest<B>,
    shape: Shape,
    [(n, rows), (first, first_rows), (second, second_rows)]: [(usize, usize); 3],
    skipped: &mut Skipped,
) {
    let of = |n, seed| Tokens::gaussian(shape, n, seed);
    let [tokens, before, after] =
        [&of(n + rows, 1), &of(first + first_rows, 2), &of(second + second_rows, 3)];
    let what = || subject.case("attend", format_args!("{shape:?}, {n} tokens, then {rows} rows"));
    let width = shape.n_heads() * shape.k_head_dim;
    let q = gaussian(4, rows * width, 1.0);
    let in_steps_of = |step: usize, rows: usize| {
        let mut batch = Batch::fed(subject, tokens, n, 100)?;
        let mut outs = Vec::new();
        for q in q[..rows * width].chunks(step * width) {
            batch.append(&[q.len() / width])?;
            outs.extend(batch.attend(q, &what)?);
        }
        Ok(outs)
    };
    let outs = (|| {
        let few = rows.min(subject.invariant_rows());
        let (one_by_one, few) = (in_steps_of(1, few)?, in_steps_of(few, few)?);
        let together = in_steps_of(rows, rows)?;

        let mut mixed = Batch::new(subject, &[before, tokens, after]);
        mixed.feed(&[first, n, second], 100)?;
        mixed.append(&[first_rows, rows, second_rows])?;
        let [before, after] =
            [(5, first_rows), (6, second_rows)].map(|(seed, rows)| gaussian(seed, rows * width, 1.0));
        let q = [&before[..], &q, &after].concat();
        let got = mixed.attend(&q, &what)?;
        mixed.assert_answers(&q, &got, &what);
        let skip = first_rows * shape.n_heads() * shape.v_head_dim;
        let mixed = got[skip..skip + together.len()].to_vec();
        Ok([("other rows", one_by_one, few), ("other sequences", together, mixed)])
    })();
    let Some(outs) = skipped.take(outs, &what) else { return };
    for (others, alone, got) in outs {
        let differs = |(alone, got): (&f32, &f32)| alone.to_bits() != got.to_bits();
        if let Some(i) = alone.iter().zip(&got).position(differs) {
            panic!("{}, among {others}: [{i}] is {}, alone {}", what(), got[i], alone[i]);
        }
        assert!(alone.iter().all(|x| x.is_finite()), "{}: {alone:?}", what());
    }
}
