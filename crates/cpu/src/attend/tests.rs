//! Attention over every kind of cache equals attention over its decoded rows.

use kvant_backend::KvStream;
use kvant_codec::random::Random;
use kvant_codec::tile::{prepare_query, restore_row};
use kvant_codec::{DType, Levels};

use super::Stage;
use crate::Isa;
use crate::append::fixture::{Case, Filled, Record};

/// What a query at `position` sees of a stream: rows un-rotated and cut to the head's size, from the oldest on.
fn seen(filled: &Filled, stream: &KvStream, record: &Record, position: usize) -> Vec<Vec<f32>> {
    let restore = |token| {
        let mut row = record.seen(&stream.spec, position, token).to_vec();
        let mut out = vec![0.0; stream.spec.head_dim];
        restore_row(stream.spec.rotates, &mut row, &mut out);
        out
    };
    (filled.layer.oldest(position)..=position).map(restore).collect()
}

/// Two passes over decoded rows in f64; and for each output row the bound of what a reader that keeps f32 precision
/// may differ by. A score is off by at most e = 2⁻²⁰ · scale · |q| max|k| (the rotation's seven f32 additions on each
/// of q and k), so each weight by a factor exp(±2e), and the output by at most 4e max|v|, plus f32 rounding of v.
fn naive(filled: &Filled, q: &[f32]) -> (Vec<f32>, Vec<f64>) {
    let case = filled.case;
    let n_heads = case.n_kv_heads * case.group;
    let scale = f64::from(1.0 / (case.k_head_dim as f32).sqrt());
    let (mut out, mut bounds) = (Vec::new(), Vec::new());
    for row in 0..filled.rows.n {
        for head in 0..n_heads {
            let (kv_head, position) = (head / case.group, filled.rows.start + row);
            let keys = seen(filled, &filled.layer.k[kv_head], &filled.keys[kv_head], position);
            let values = seen(filled, &filled.layer.v[kv_head], &filled.values[kv_head], position);
            let query = &q[(row * n_heads + head) * case.k_head_dim..][..case.k_head_dim];
            let dot =
                |k: &[f32]| query.iter().zip(k).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
            let scores: Vec<f64> = keys.iter().map(|k| scale * dot(k)).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for dim in 0..case.v_head_dim {
                let mixed: f64 = weights.iter().zip(&values).map(|(w, v)| w * f64::from(v[dim])).sum();
                out.push((mixed / sum) as f32);
            }
            let norm = |x: &[f32]| x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
            let most = |rows: &[Vec<f32>]| rows.iter().map(|r| norm(r)).fold(0.0, f64::max);
            let e = scale * norm(query) * most(&keys) / f64::from(1 << 20);
            bounds.push((4.0 * e + 1e-6) * most(&values));
        }
    }
    (out, bounds)
}

fn queries(case: Case, rows: usize, seed: u64) -> Vec<f32> {
    let mut q = vec![0.0; rows * case.n_kv_heads * case.group * case.k_head_dim];
    Random::new(seed).fill_gaussian(&mut q, 1.0);
    q
}

/// A cache of `tokens` gaussian tokens, the last `rows` of them fed in one step.
fn filled(case: Case, tokens: usize, rows: usize, seed: u64) -> Filled {
    let mut filled = Filled::gaussian(case, Isa::Scalar, tokens - rows, 33, seed);
    filled.append_gaussian(Isa::Scalar, rows, rows, seed + 1);
    filled
}

fn run(isa: Isa, filled: &mut Filled, q: &[f32]) -> Vec<f32> {
    filled.attend(isa, 2, Stage::All, q)
}

fn assert_reference_is_exact(case: Case, tokens: usize, rows: usize) {
    let mut filled = filled(case, tokens, rows, 1);
    let q = queries(case, rows, 2);
    let got = run(Isa::Scalar, &mut filled, &q);
    let (want, bounds) = naive(&filled, &q);
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let err = f64::from((got - want).abs());
        let bound = bounds[i / case.v_head_dim];
        assert!(err <= bound, "{case:?} {tokens} {rows} at {i}: {got} {want}, bound {bound}");
    }
}

#[test]
fn reference_equals_naive_attention_for_every_pair_of_types() {
    for k in DType::KV {
        for v in DType::KV {
            let case = Case { sink_tiles: 1, extra_tail_tiles: 1, alpha: 1.02, ..Case::new(k, v) };
            assert_reference_is_exact(case, 70, 2);
            assert_reference_is_exact(Case { window: Some(21), n_kv_heads: 1, ..case }, 70, 40);
        }
    }
}

#[test]
fn reference_equals_naive_attention_for_every_shape() {
    for (head_dim, group) in [(64, 1), (80, 2), (96, 3), (128, 6), (192, 8), (256, 12)] {
        for (tokens, rows) in [(1, 1), (15, 15), (16, 1), (17, 2), (65, 33), (129, 3)] {
            let case = Case::new(DType::Turbo3, DType::Q4_0);
            let case = Case { k_head_dim: head_dim, v_head_dim: head_dim, group, ..case };
            assert_reference_is_exact(case, tokens, rows);
            assert_reference_is_exact(Case { v_head_dim: 64, n_kv_heads: 1, ..case }, tokens, rows);
        }
    }
}

#[test]
fn nan_in_a_query_reaches_its_output_and_no_other() {
    for isa in Isa::available() {
        for dtype in DType::KV {
            let case = Case::new(dtype, dtype);
            let mut filled = filled(case, 40, 2, 3);
            for bad in [f32::NAN, f32::INFINITY] {
                let mut q = queries(case, 2, 4);
                q[128 * 5 + 17] = bad;
                let out = run(isa, &mut filled, &q);
                for (head, values) in out.chunks(128).enumerate() {
                    assert!(
                        values.iter().all(|v| v.is_nan() == (head == 5)),
                        "{isa:?} {dtype} {bad} head {head}"
                    );
                }
            }
        }
    }
}

/// Whoever else is in the step, and however many threads work: the bits of a row are those of the row alone.
#[test]
fn a_row_has_the_bits_that_it_has_alone() {
    let pairs = [
        (DType::Turbo3, DType::Turbo3),
        (DType::Q8_0, DType::Turbo2),
        (DType::F16, DType::Q4_0),
        (DType::Turbo4, DType::F32),
        (DType::BF16, DType::BF16),
    ];
    for isa in Isa::available() {
        for (k, v) in pairs {
            for (tokens, rows, window, sink_tiles) in
                [(700, 150, None, 0), (90, 90, None, 1), (700, 60, Some(100), 0), (1100, 40, Some(600), 1)]
            {
                let case = Case { k_head_dim: 96, n_kv_heads: 1, window, sink_tiles, ..Case::new(k, v) };
                for case in
                    [case, Case { tail: false, group: 3, ..case }, Case { extra_tail_tiles: 7, ..case }]
                {
                    let q = queries(case, rows, 4);
                    let mut alone = Filled::gaussian(case, isa, tokens - rows, 100, 3);
                    let mut together = Filled::gaussian(case, isa, tokens - rows, 100, 3);
                    together.append_gaussian(isa, rows, rows, 5);
                    let all = together.attend(isa, 1, Stage::All, &q);
                    for n_threads in [2, 3] {
                        assert!(
                            together.attend(isa, n_threads, Stage::All, &q) == all,
                            "{isa:?} {n_threads}"
                        );
                    }
                    let mut by_one = Vec::new();
                    let width = case.group * case.k_head_dim;
                    let mut random = Random::new(5);
                    for row in 0..rows {
                        let mut k = vec![0.0; case.k_head_dim];
                        let mut v = vec![0.0; case.v_head_dim];
                        random.fill_gaussian(&mut k, 1.0);
                        random.fill_gaussian(&mut v, 1.0);
                        alone.append(isa, &k, &v, 1);
                        by_one.extend(alone.attend(isa, 2, Stage::All, &q[row * width..][..width]));
                    }
                    let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                    let first = all.iter().zip(&by_one).position(|pair| !same(pair));
                    assert_eq!(first, None, "{isa:?} {case:?} {tokens} {rows}");
                }
            }
        }
    }
}

/// What the rounding of a vectorised variant may cost: the variance of one query's output, summed over its dims.
///
/// Scores: each byte of a query is off by up to half a unit, u = max|q| / MAX over a block, so a score by a sum of
/// independent errors of variance u²/12 · |k|²; and the bytes of a turbo codebook lose l |k|² of a key (see
/// `ByteBook`), l |k|² / 128 in each dim. A score off by δ moves the output by w δ (v - out). Values: weights are off
/// by up to half a unit, max(w) / MAX, each token's by another: variance u²/12 · |v|²; and codebooks lose w² l |v|².
/// To this the rounding of f32 is added.
fn variance(isa: Isa, filled: &Filled, q: &[f32], out: &[f32], row: usize, head: usize) -> f64 {
    let case = filled.case;
    let (max_byte, max_split) = match isa {
        Isa::Scalar => unreachable!("the reference"),
        Isa::Avx2(_) => (64.0, 8191.0),
        Isa::AvxVnni(_) | Isa::Avx512(_) => (127.0, 32639.0),
    };
    let kv_head = head / case.group;
    let (k_stream, v_stream) = (&filled.layer.k[kv_head], &filled.layer.v[kv_head]);
    let position = filled.rows.start + row;
    let tokens = || filled.layer.oldest(position)..=position;
    let keys: Vec<&[f32]> =
        tokens().map(|token| filled.keys[kv_head].seen(&k_stream.spec, position, token)).collect();
    let values: Vec<&[f32]> =
        tokens().map(|token| filled.values[kv_head].seen(&v_stream.spec, position, token)).collect();
    let square = |x: &[f32]| x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
    let codebook_loss = |dtype| match dtype {
        DType::Turbo2 => 1e-7,
        DType::Turbo3 => 4e-6,
        DType::Turbo4 => 3.1e-5,
        _ => 0.0,
    };

    let mut query = vec![0.0; k_stream.spec.dim()];
    prepare_query(k_stream.spec.rotates, q, &mut query);
    let scale = f64::from(1.0 / (case.k_head_dim as f32).sqrt());
    let scores: Vec<f64> = keys
        .iter()
        .map(|k| scale * query.iter().zip(*k).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>())
        .collect();
    let max = scores.iter().copied().fold(f64::MIN, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = weights.iter().sum();

    let limit = if case.k == DType::Q8_0 { max_split } else { max_byte };
    let unit = f64::from(query.iter().fold(0.0f32, |m, x| m.max(x.abs()))) / limit;
    let rounds = super::codes::Coding::of(case.k).is_some();
    let score_variance = |k: &[f32]| {
        let rounding = if rounds { unit * unit } else { 0.0 };
        scale * scale * square(k) * (rounding / 12.0 + codebook_loss(case.k) * square(&query) / 128.0)
    };
    let mut padded = vec![0.0; v_stream.spec.dim()];
    prepare_query(v_stream.spec.rotates, out, &mut padded);
    let mut variance = 0.0;
    let weight_unit = 1.0 / max_split / sum;
    for ((k, v), w) in keys.iter().zip(&values).zip(&weights) {
        let w = w / sum;
        let away: f64 = v.iter().zip(&padded).map(|(&v, &o)| f64::from(v - o).powi(2)).sum();
        variance += w * w * score_variance(k) * away;
        variance += square(v) * (weight_unit.powi(2) / 12.0 + w * w * codebook_loss(case.v));
    }
    let norm = keys.iter().map(|k| square(k)).fold(0.0, f64::max).sqrt() * square(&query).sqrt() * scale;
    let most = values.iter().map(|v| square(v)).fold(0.0, f64::max);
    variance + (1e-6 * (1.0 + norm)).powi(2) * most
}

/// Every query's error within five standard deviations of what rounding may cost.
fn assert_variants_agree(filled: &mut Filled, q: &[f32]) {
    let case = filled.case;
    let want = run(Isa::Scalar, filled, q);
    let n_heads = case.n_kv_heads * case.group;
    for isa in Isa::available().into_iter().skip(1) {
        let got = run(isa, filled, q);
        for (i, (got, want)) in got.chunks(case.v_head_dim).zip(want.chunks(case.v_head_dim)).enumerate() {
            let query = &q[i * case.k_head_dim..][..case.k_head_dim];
            let err: f64 = got.iter().zip(want).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let bound = 25.0 * variance(isa, filled, query, want, i / n_heads, i % n_heads);
            assert!(err <= bound, "{isa:?} {case:?} {:?}, query {i}: {err} of {bound}", filled.rows);
        }
    }
}

fn assert_variants_agree_on_gaussian(case: Case, tokens: usize, rows: usize) {
    assert_variants_agree(&mut filled(case, tokens, rows, 7), &queries(case, rows, 8));
}

#[test]
fn variants_equal_the_reference_for_every_pair_of_types() {
    for k in DType::KV {
        for v in DType::KV {
            let case = Case { group: 3, ..Case::new(k, v) };
            assert_variants_agree_on_gaussian(case, 150, 1);
            let mixed = Case { sink_tiles: 1, extra_tail_tiles: 2, alpha: 1.02, n_kv_heads: 1, ..case };
            assert_variants_agree_on_gaussian(mixed, 150, 5);
            assert_variants_agree_on_gaussian(Case { window: Some(50), ..mixed }, 150, 20);
        }
    }
}

#[test]
fn variants_equal_the_reference_for_every_number_of_tokens_and_rows() {
    for (k, v) in [(DType::Turbo3, DType::Turbo3), (DType::Q8_0, DType::Turbo2), (DType::F16, DType::Q4_0)] {
        for tail in [true, false] {
            let case = Case { n_kv_heads: 1, tail, ..Case::new(k, v) };
            for tokens in [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 700] {
                for rows in [1, 2, 3, 7, 33] {
                    if rows <= tokens {
                        assert_variants_agree_on_gaussian(case, tokens, rows);
                    }
                }
            }
        }
    }
}

#[test]
fn variants_equal_the_reference_for_every_shape_of_heads() {
    for dtype in DType::KV {
        for head_dim in [32, 64, 80, 96, 128, 192, 256] {
            let case = Case { k_head_dim: head_dim, v_head_dim: head_dim, ..Case::new(dtype, dtype) };
            for group in [1, 2, 6, 8, 12] {
                assert_variants_agree_on_gaussian(Case { group, ..case }, 70, 1);
            }
            assert_variants_agree_on_gaussian(Case { v_head_dim: 128, ..case }, 33, 9);
        }
    }
}

/// Keys along one direction: `scores[t]` is what the query [1, 0, ..] · √dim makes of token t, before the codec.
fn with_scores(case: Case, scores: &[f32], value: impl Fn(usize, usize) -> f32) -> (Filled, Vec<f32>) {
    let mut filled = Filled::empty(case);
    let mut k = vec![0.0; scores.len() * case.k_head_dim];
    let mut v = vec![0.0; scores.len() * case.v_head_dim];
    for (t, &score) in scores.iter().enumerate() {
        k[t * case.k_head_dim] = score;
        (0..case.v_head_dim).for_each(|dim| v[t * case.v_head_dim + dim] = value(t, dim));
    }
    let last = scores.len() - 1;
    let (k, last_k) = k.split_at(last * case.k_head_dim);
    let (v, last_v) = v.split_at(last * case.v_head_dim);
    if last > 0 {
        filled.append(Isa::Scalar, k, v, last);
    }
    filled.append(Isa::Scalar, last_k, last_v, 1);
    let mut q = vec![0.0; case.group * case.k_head_dim];
    q.iter_mut().step_by(case.k_head_dim).for_each(|x| *x = (case.k_head_dim as f32).sqrt());
    (filled, q)
}

fn gaussian_value(t: usize, dim: usize) -> f32 {
    Random::new((1000 * t + dim) as u64).gaussian() as f32
}

fn one_head(k: DType, v: DType) -> Case {
    Case { n_kv_heads: 1, ..Case::new(k, v) }
}

#[test]
fn a_huge_score_takes_all_the_weight() {
    for dtype in DType::KV {
        for (at, huge) in [(3, 3000.0), (200, 3000.0), (299, -3000.0)] {
            let mut scores = vec![0.1; 300];
            scores[at] = huge;
            let (mut filled, q) = with_scores(one_head(dtype, dtype), &scores, gaussian_value);
            assert_variants_agree(&mut filled, &q);
        }
    }
}

#[test]
fn equal_scores_give_the_mean() {
    for dtype in DType::KV {
        for tokens in [1, 16, 128, 500] {
            let case = one_head(dtype, dtype);
            let (mut filled, q) = with_scores(case, &vec![0.7; tokens], gaussian_value);
            assert_variants_agree(&mut filled, &q);
        }
    }
}

/// One token outweighs each other one 60,000 times, but all of those together only ten times. Weights are rounded
/// beside the largest of their block of 128, so only those in the block of the large one are rounded away: at most
/// half a unit each, 127 / 2 / MAX_SPLIT of the output.
#[test]
fn thousands_of_tiny_weights_beside_a_large_one_keep_their_mass() {
    for v in DType::KV {
        for large in [0, 3000, 6143] {
            let mut scores = vec![0.0; 6144];
            scores[large] = 11.0;
            let value = |t, dim| if t == large { 0.0 } else { 1.0 + (dim % 3) as f32 };
            let (mut filled, q) = with_scores(one_head(DType::F32, v), &scores, value);
            let want = run(Isa::Scalar, &mut filled, &q);
            assert!(want.iter().sum::<f32>() > 0.08 * 2.0 * want.len() as f32, "the tiny ones have mass");
            for isa in Isa::available().into_iter().skip(1) {
                let max_split = if matches!(isa, Isa::Avx2(_)) { 8191.0 } else { 32639.0 };
                // A tenth of the weight is on values, 2.2 in the mean, that all have the same error: five standard
                // deviations of what a codebook in bytes loses.
                let is_book = v.code().is_some_and(|code| matches!(code.levels, Levels::Book(_)));
                let codebook = if is_book { 0.1 * 5.0 * 2.2 * 3.1e-5f32.sqrt() } else { 0.0 };
                for (got, want) in run(isa, &mut filled, &q).iter().zip(&want) {
                    let bound = 128.0 / 2.0 / max_split * 3.0 + codebook + 1e-5;
                    assert!(
                        (got - want).abs() <= bound,
                        "{isa:?} {v} at {large}: {got} {want}, bound {bound}"
                    );
                }
            }
        }
    }
}

/// Stages that leave something out compute with other numbers, but read within the tiles and stay finite.
#[test]
fn stages_are_finite_and_the_last_is_attention() {
    for k in DType::KV {
        for (tokens, group, v) in [(150, 3, k), (40, 8, DType::Turbo3)] {
            let mut filled = filled(Case { group, ..Case::new(k, v) }, tokens, 1, 4);
            let q = queries(filled.case, 1, 5);
            for isa in Isa::available().into_iter().skip(1) {
                let want = run(isa, &mut filled, &q);
                for stage in Stage::ALL {
                    let out = filled.attend(isa, 2, stage, &q);
                    assert!(out.iter().all(|x| x.is_finite()), "{isa:?} {k}/{v} {stage:?}");
                    if stage == Stage::All {
                        assert_eq!(out, want, "{isa:?} {k}/{v}");
                    }
                }
            }
        }
    }
}
