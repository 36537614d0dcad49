//! Attention on the device against the CPU's scalar code, over the same tokens.

use kvant_backend::{Backend, BackendError, StreamSpec};
use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_codec::tile::{Side, prepare_query};

use crate::kv::fixture::{Case, Record, Step, Twins, buffer};
use crate::{CudaDevice, emulator};

fn squares(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum()
}

/// Padded, and rotated as the stream is.
fn prepared(spec: &StreamSpec, x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; spec.dim()];
    prepare_query(spec.rotates, x, &mut out);
    out
}

/// The sum of squared errors to expect of one output, which is `out` `[v_head_dim]` for `q`.
///
/// Where a key is off by a relative variance e, its score is off by a variance e · scale² |q|² |k|² / dims, and by at most
/// √e times itself, since levels are off the same way everywhere; the output moves by the weight times the distance of
/// the value from it, and a value that is off adds its own share. Codebooks in bytes are off by what `ByteBook` says, halves
/// (queries, keys, scales; weights, values, scales) by at most 2^-11 each, a variance of 2^-22 / 3.
fn expected(twins: &Twins, row: usize, head: usize, q: &[f32], out: &[f32]) -> f64 {
    let (case, p) = (twins.case, twins.case.params());
    let (kv_head, position) = (head / case.group, twins.rows.start + row);
    let (k, v) = (case.spec(Side::K), case.spec(Side::V));
    let (q, out) = (prepared(&k, q), prepared(&v, out));
    let seen = |record: &'_ Record, spec: &StreamSpec, dtype: DType| -> Vec<(Vec<f32>, f64)> {
        let tokens = twins.layer.oldest(position)..=position;
        let rows = tokens.map(|token| record.seen(spec, position, token));
        rows.map(|(row, is_code)| (row.to_vec(), if is_code { of_codebook(dtype) } else { 0.0 })).collect()
    };
    let keys = seen(&twins.keys[kv_head], &k, case.k);
    let values = seen(&twins.values[kv_head], &v, case.v);
    let products =
        |key: &[f32]| q.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).collect::<Vec<_>>();
    let scale = f64::from(p.scale);
    let capped = |score: f64| match p.soft_cap.map(f64::from) {
        Some(cap) => cap * (score / cap).tanh(),
        None => score,
    };
    let scores: Vec<f64> =
        keys.iter().map(|(key, _)| capped(scale * products(key).iter().sum::<f64>())).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
    let halves = 3.0 * (2.0_f64).powi(-22) / 3.0;
    let mut expected = 0.0;
    for (((key, of_k), (value, of_v)), score) in keys.iter().zip(&values).zip(&scores) {
        let w = (score - most).exp() / sum;
        let independent = scale * scale * squares(&q) * squares(key) / p.k_head_dim as f64;
        let coded = of_k * (independent + score * score);
        let rounded = halves * scale * scale * products(key).iter().map(|x| x * x).sum::<f64>();
        let away: f64 = value.iter().zip(&out).map(|(v, out)| f64::from(v - out).powi(2)).sum();
        expected += w * w * (coded + rounded) * away;
        expected += w * w * (of_v + halves) * squares(value);
    }
    expected
}

/// Squared error of a type's codebook in bytes, for a variance of 1.
fn of_codebook(dtype: DType) -> f64 {
    match dtype {
        DType::Turbo2 => 1e-7,
        DType::Turbo3 => 4e-6,
        DType::Turbo4 => 3.1e-5,
        _ => 0.0,
    }
}

fn queries(twins: &[&mut Twins], seed: u64) -> Vec<f32> {
    let p = twins[0].case.params();
    let rows: usize = twins.iter().map(|twins| twins.rows.n).sum();
    let mut q = vec![0.0; rows * p.n_heads * p.k_head_dim];
    Random::new(seed).fill_gaussian(&mut q, 1.0);
    q
}

/// Attends with what the last step has appended. Few outputs scatter: a sum of them, and more so those of one row, may exceed
/// what is expected of it. A tile that is read in another form, or not at all, does so a hundred times and more.
fn assert_step_attends(device: &CudaDevice, step: &Step, twins: &mut [&mut Twins], seed: u64) {
    let q = queries(twins, seed);
    let [got, want] = step.attend(device, twins, &q);
    let p = twins[0].case.params();
    let (mut all, mut all_expected) = (0.0, 0.0);
    for twins in twins {
        for row in 0..twins.rows.n {
            let (mut of_row, mut of_row_expected) = (0.0, 0.0);
            for head in 0..p.n_heads {
                let at = (twins.rows.first + row) * p.n_heads + head;
                let (q, at) = (&q[at * p.k_head_dim..][..p.k_head_dim], at * p.v_head_dim);
                let (got, want) = (&got[at..][..p.v_head_dim], &want[at..][..p.v_head_dim]);
                of_row += got.iter().zip(want).map(|(got, want)| f64::from(got - want).powi(2)).sum::<f64>();
                of_row_expected += expected(twins, row, head, q, want);
            }
            let what = || format!("{:?}, {:?}, row {row}", twins.case, twins.rows);
            assert!(
                of_row <= 10.0 * of_row_expected,
                "{}: {of_row:.2e}, expected {of_row_expected:.2e}",
                what()
            );
            (all, all_expected) = (all + of_row, all_expected + of_row_expected);
        }
    }
    assert!(all <= 3.0 * all_expected, "{all:.2e}, expected {all_expected:.2e}");
}

/// Appends `rows` more tokens, and attends for them.
fn assert_attends(device: &CudaDevice, twins: &mut Twins, rows: usize, seed: u64) {
    let step = twins.append(device, rows);
    assert_step_attends(device, &step, &mut [twins], seed);
}

#[test]
fn every_pair_of_types_attends() {
    let Some(device) = emulator::device(80) else { return };
    for k in DType::KV {
        for v in DType::KV {
            let mut twins = Twins::new(Case { n_kv_heads: 1, ..Case::new(k, v) }, 5);
            twins.fill(&device, 65, 65);
            // Enough queries for the kernels that take any pair; those for few queries are compiled for each, and see
            // every type on either side below.
            assert_attends(&device, &mut twins, 5, 6);
            assert_attends(&device, &mut twins, 26, 6);
        }
    }
}

/// Sequences of other lengths, each with a number of rows of its own; more than a launch takes, and more heads than that.
#[test]
fn sequences_attend_together_as_each_does_alone() {
    let Some(device) = emulator::device(80) else { return };
    let base = Case { group: 2, k_head_dim: 64, v_head_dim: 64, ..Case::new(DType::Turbo3, DType::Turbo3) };
    for (case, lens, ns) in [
        (Case { n_kv_heads: 25, ..base }, &[40, 30][..], &[1, 1][..]),
        (Case { n_kv_heads: 1, ..base }, &[40, 700, 17, 130, 12], &[1, 1, 9, 70, 5]),
        (Case { n_kv_heads: 1, window: Some(40), sink_tiles: 1, ..base }, &[90, 3, 30], &[1, 40, 1]),
        (Case { n_kv_heads: 1, ..base }, &[9; 18], &[1; 18]),
    ] {
        let mut twins: Vec<_> = (0..).zip(lens).map(|(seed, _)| Twins::new(case, seed)).collect();
        twins.iter_mut().zip(lens).for_each(|(twins, &len)| twins.fill(&device, len, len));
        let mut twins: Vec<_> = twins.iter_mut().collect();
        let step = Step::append(&device, &mut twins, ns);
        assert_step_attends(&device, &step, &mut twins, 7);
        let q = queries(&twins, 7);
        let [together, _] = step.attend(&device, &mut twins, &q);
        let width = case.n_kv_heads * case.group * 64;
        for twins in twins {
            let rows = twins.rows.range();
            let alone = step.attend_alone(&device, twins, &q);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(
                bits(&alone) == bits(&together[rows.start * width..rows.end * width]),
                "{case:?}, {rows:?}"
            );
        }
    }
}

/// Chunks of a prompt that are cut elsewhere are walked otherwise; each way keeps to what is expected of it.
#[test]
fn prompts_attend_whatever_their_chunks() {
    let Some(device) = emulator::device(80) else { return };
    for (sink_tiles, tail_tiles, window) in [(0, 2, None), (1, 9, None), (0, 0, None), (1, 2, Some(30))] {
        let base = Case::new(DType::Turbo3, DType::Turbo2);
        let case = Case { n_kv_heads: 1, group: 2, sink_tiles, tail_tiles, window, ..base };
        for chunk in [1, 7, 16, 50, 150] {
            let mut twins = Twins::new(case, 3);
            let most = if chunk == 1 { 40 } else { 150 };
            for from in (0..most).step_by(chunk) {
                assert_attends(&device, &mut twins, chunk.min(most - from), from as u64);
            }
        }
    }
}

/// At a multiple of 512 tokens all that was before is in codes.
#[test]
fn the_window_begins_anew_at_a_border() {
    let Some(device) = emulator::device(80) else { return };
    let case = Case { n_kv_heads: 1, group: 2, ..Case::new(DType::Turbo3, DType::Turbo3) };
    let mut twins = Twins::new(case, 4);
    twins.fill(&device, 500, 500);
    for rows in [11, 1, 1, 1, 40] {
        assert_attends(&device, &mut twins, rows, 5);
    }
    let mut twins = Twins::new(case, 4);
    twins.fill(&device, 490, 490);
    assert_attends(&device, &mut twins, 60, 5);
}

/// Blocks that no query sees any more are gone.
#[test]
fn a_window_reads_nothing_before_it() {
    let Some(device) = emulator::device(80) else { return };
    for (group, rows) in [(1, 1), (3, 3), (3, 60), (12, 1)] {
        let base = Case::new(DType::Turbo3, DType::F16);
        let mut twins = Twins::new(Case { n_kv_heads: 1, group, window: Some(40), ..base }, 6);
        twins.fill(&device, 330, 330);
        twins.device.forget(twins.layer.oldest(330) / 128);
        assert!(twins.device.blocks()[1].is_none());
        assert_attends(&device, &mut twins, rows, 7);
    }
}

/// Up to 40,000, and down to a tenth of a thousandth; in each of the three kernels.
#[test]
fn values_of_any_size_keep_their_precision() {
    let Some(device) = emulator::device(80) else { return };
    for v in DType::KV {
        for v_gain in [0.01, 1e3] {
            let case = Case { n_kv_heads: 1, group: 4, ..Case::new(DType::Q8_0, v) };
            let mut twins = Twins::new(case, 5);
            twins.v_gain = v_gain;
            twins.fill(&device, 70, 70);
            for rows in [1, 5, 20] {
                assert_attends(&device, &mut twins, rows, 6);
            }
        }
    }
}

/// Beyond f16, most of them: they are clipped at 65,504, and what their codes stand for is no more than that. In each of the
/// three kernels.
#[test]
fn keys_and_values_at_the_edge_of_f16_give_numbers() {
    let Some(device) = emulator::device(80) else { return };
    for dtype in DType::KV {
        let case = Case { n_kv_heads: 1, group: 4, ..Case::new(dtype, dtype) };
        for [k_gain, v_gain] in [[1e6, 1.0], [1.0, 1e6]] {
            let mut twins = Twins::new(case, 5);
            (twins.k_gain, twins.v_gain) = (k_gain, v_gain);
            twins.fill(&device, 70, 70);
            for rows in [1, 5, 20] {
                let step = twins.append(&device, rows);
                let q = queries(&[&mut twins], 6);
                let [got, _] = step.attend(&device, &mut [&mut twins], &q);
                let at = got.iter().position(|x| !x.is_finite());
                assert_eq!(at, None, "{dtype}, gains {k_gain} and {v_gain}, {rows} rows");
            }
        }
    }
}

#[test]
fn few_queries_attend_over_every_type() {
    let Some(device) = emulator::device(80) else { return };
    for (i, k) in DType::KV.into_iter().enumerate() {
        let v = DType::KV[(i + 3) % DType::KV.len()];
        // A sink and a tail that begin within a unit of eight tiles, and a unit with no main tile.
        let case = Case { n_kv_heads: 1, group: 2, sink_tiles: 1, ..Case::new(k, v) };
        let mut twins = Twins::new(case, 23);
        for step in [4, 160] {
            twins.fill(&device, step, step);
            assert_attends(&device, &mut twins, 1, 24);
            assert_attends(&device, &mut twins, 4, 24);
        }
    }
}

#[test]
fn every_number_of_tokens_and_rows_attends() {
    let Some(device) = emulator::device(90) else { return };
    for case in [
        Case::new(DType::Turbo3, DType::Turbo3),
        Case { sink_tiles: 1, alpha: 1.02, ..Case::new(DType::Q8_0, DType::Turbo4) },
        Case { tail_tiles: 0, sink_tiles: 2, ..Case::new(DType::Turbo2, DType::Q4_0) },
        Case { tail_tiles: 9, ..Case::new(DType::F16, DType::Turbo3) },
    ] {
        let mut twins = Twins::new(Case { n_kv_heads: 1, ..case }, 7);
        for rows in [1, 14, 1, 1, 1, 2, 8, 9, 12, 30, 1, 70, 3, 1, 129, 1] {
            assert_attends(&device, &mut twins, rows, 8);
        }
    }
}

#[test]
fn every_shape_of_heads_attends() {
    let Some(device) = emulator::device(89) else { return };
    for (group, n_kv_heads) in [(1, 5), (4, 2), (6, 1), (7, 1), (8, 1), (16, 1), (1, 26)] {
        let small = Case { k_head_dim: 32, v_head_dim: 48, ..Case::new(DType::F16, DType::Q8_0) };
        let mut twins = Twins::new(Case { group, n_kv_heads, ..small }, 11);
        twins.fill(&device, 39, 39);
        assert_attends(&device, &mut twins, 1, 12);
        assert_attends(&device, &mut twins, 5, 12);
    }
    for (k_head_dim, v_head_dim) in
        [(64, 64), (80, 96), (96, 80), (128, 64), (192, 128), (160, 192), (256, 256)]
    {
        for (k, v) in
            [(DType::Turbo3, DType::Turbo4), (DType::Q4_0, DType::BF16), (DType::F16, DType::Turbo3)]
        {
            let case = Case { k_head_dim, v_head_dim, n_kv_heads: 1, group: 2, ..Case::new(k, v) };
            let mut twins = Twins::new(case, 13);
            twins.fill(&device, 50, 50);
            assert_attends(&device, &mut twins, 1, 14);
            assert_attends(&device, &mut twins, 25, 14);
        }
    }
}

/// In each of the three kernels, so that scores bend and so that they hardly do. A cap moves scores together, so that no more is
/// to be expected of them than without.
#[test]
fn scores_are_bounded_by_a_soft_cap() {
    let Some(device) = emulator::device(80) else { return };
    for (k, v, head_dim, cap) in [
        (DType::Turbo3, DType::Turbo3, 256, 1.0),
        (DType::Q8_0, DType::F16, 128, 2.0),
        (DType::F16, DType::Turbo4, 256, 50.0),
    ] {
        let case =
            Case { k_head_dim: head_dim, v_head_dim: head_dim, n_kv_heads: 1, group: 4, ..Case::new(k, v) };
        let mut twins = Twins::new(Case { soft_cap: Some(cap), window: Some(90), ..case }, 25);
        twins.fill(&device, 140, 140);
        for rows in [1, 5, 20] {
            assert_attends(&device, &mut twins, rows, 26);
        }
    }
}

#[test]
fn a_long_context_is_split_and_joined() {
    let Some(device) = emulator::device(80) else { return };
    let case = Case { n_kv_heads: 1, ..Case::new(DType::Turbo3, DType::Turbo3) };
    let mut twins = Twins::new(case, 15);
    twins.fill(&device, 2600, 2600);
    assert_attends(&device, &mut twins, 1, 16);
    assert_attends(&device, &mut twins, 5, 16);
    assert_attends(&device, &mut twins, 14, 16);
}

#[test]
fn nan_in_a_query_reaches_its_output_and_no_other() {
    let Some(device) = emulator::device(80) else { return };
    let mut twins = Twins::new(Case::new(DType::Turbo3, DType::Q8_0), 17);
    twins.fill(&device, 58, 58);
    for rows in [1, 2, 20] {
        let step = twins.append(&device, rows);
        let p = twins.case.params();
        let mut q = vec![0.5; rows * p.n_heads * p.k_head_dim];
        let bad = (rows - 1) * p.n_heads + 1;
        q[bad * p.k_head_dim] = f32::NAN;
        let [got, _] = step.attend(&device, &mut [&mut twins], &q);
        for (head, out) in got.chunks_exact(p.v_head_dim).enumerate() {
            assert!(out.iter().all(|x| x.is_nan() == (head == bad)), "{rows} rows, {head}");
        }
    }
}

/// A key far above all others takes all the weight, wherever it is: the output is its value, but for what all others weigh
/// together. Weight and sum are the same power of two, within the same 2 ulp; joining shares multiplies both by the same
/// factor, twice (warps, splits), and a division ends it: two products and a sum of each, and a quotient.
#[test]
fn a_huge_score_takes_all_the_weight() {
    let Some(device) = emulator::device(80) else { return };
    let case = Case { n_kv_heads: 1, group: 1, ..Case::new(DType::F16, DType::F16) };
    let mut twins = Twins::new(case, 19);
    twins.fill(&device, 199, 199);
    let step = twins.append(&device, 1);
    let (p, spec) = (case.params(), case.spec(Side::K));
    let of =
        |record: &Record| (0..200).map(|token| record.seen(&spec, 199, token).0.to_vec()).collect::<Vec<_>>();
    let (keys, values) = (of(&twins.keys[0]), of(&twins.values[0]));
    let largest = values.iter().flatten().fold(0.0, |most: f32, v| most.max(v.abs()));
    for token in [0, 15, 130, 199] {
        let q: Vec<f32> = keys[token].iter().map(|k| 100.0 * k).collect();
        let score = |key: &[f32]| p.scale * q.iter().zip(key).map(|(q, k)| q * k).sum::<f32>();
        let others = keys.iter().enumerate().filter(|&(other, _)| other != token);
        let of_others: f32 = others.map(|(_, key)| (score(key) - score(&keys[token])).exp()).sum();
        assert!(of_others < f32::EPSILON, "{token} is far above all others: {of_others}");
        let roundings = 2.0 + 2.0 * 3.0 + 1.0;
        let [got, _] = step.attend(&device, &mut [&mut twins], &q);
        for (got, want) in got.iter().zip(&values[token]) {
            let tol = roundings * f32::EPSILON * want.abs() + 2.0 * of_others * largest;
            assert!((got - want).abs() <= tol, "{token}: {got} {want}");
        }
    }
}

/// What no kernel can read is refused by name.
#[test]
fn heads_that_are_too_large_and_tails_that_differ_are_refused() {
    let Some(device) = emulator::device(80) else { return };
    let refused = |twins: &mut Twins, words: [&str; 2]| {
        let step = twins.append(&device, 2);
        let p = twins.case.params();
        let q = buffer(&device, &vec![0.0; 2 * p.n_heads * p.k_head_dim]);
        let mut out = device.buffer(2 * p.n_heads * p.v_head_dim).unwrap();
        let error = device.attend(&p, &[twins.on_device()], &q, Some(&step.device), &mut out).unwrap_err();
        assert!(matches!(error, BackendError::Unsupported { op: "attend", .. }), "{error}");
        let error = error.to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    let case = Case { n_kv_heads: 1, ..Case::new(DType::Turbo3, DType::Turbo3) };
    refused(&mut Twins::new(Case { v_head_dim: 512, ..case }, 21), ["512", "256"]);
    refused(&mut Twins::with(case, 21, |layer| layer.v[0].spec.tail_tiles = 1), ["2 tiles", "1 of values"]);
}
