//! Attention over every kind of cache equals attention over its decoded rows.

use kvant_backend::Stream;
use kvant_codec::random::Random;
use kvant_codec::tile::restore_row;
use kvant_codec::{DType, Rotation};

use super::{Scratch, attend};
use crate::append::fixture::{Case, Filled, Rows};
use crate::{CpuPage, Isa, Pool};

/// Un-rotated rows, cut to the head's size.
fn restored(streams: &[Stream<CpuPage>], rows_of_heads: &[Rows]) -> Vec<Rows> {
    let restore = |(stream, rows): (&Stream<CpuPage>, &Rows)| {
        let rotation = stream.spec().rotates().then(Rotation::kv);
        let one = |row: &Vec<f32>| {
            let (mut row, mut out) = (row.clone(), vec![0.0; stream.spec().head_dim]);
            restore_row(rotation.as_ref(), &mut row, &mut out);
            out
        };
        rows.iter().map(one).collect()
    };
    streams.iter().zip(rows_of_heads).map(restore).collect()
}

/// Two passes over decoded rows in f64; and for each output row the bound of what a reader that keeps f32 precision
/// may differ by. A score is off by at most e = 2⁻²⁰ · scale · |q| max|k| (the rotation's seven f32 additions on each
/// of q and k), so each weight by a factor exp(±2e), and the output by at most 4e max|v|, plus f32 rounding of v.
fn naive(filled: &Filled, q: &[f32], start: usize, rows: usize) -> (Vec<f32>, Vec<f64>) {
    let case = filled.case;
    let n_heads = case.n_kv_heads * case.group;
    let scale = f64::from(1.0 / (case.k_head_dim as f32).sqrt());
    let all_keys = restored(&filled.layer.k, &filled.keys);
    let all_values = restored(&filled.layer.v, &filled.values);
    let (mut out, mut bounds) = (Vec::new(), Vec::new());
    for row in 0..rows {
        for head in 0..n_heads {
            let (keys, values) = (&all_keys[head / case.group], &all_values[head / case.group]);
            let query = &q[(row * n_heads + head) * case.k_head_dim..][..case.k_head_dim];
            let dot =
                |k: &[f32]| query.iter().zip(k).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
            let scores: Vec<f64> = keys[..=start + row].iter().map(|k| scale * dot(k)).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for dim in 0..case.v_head_dim {
                let mixed: f64 = weights.iter().zip(values).map(|(w, v)| w * f64::from(v[dim])).sum();
                out.push((mixed / sum) as f32);
            }
            let norm = |x: &[f32]| x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
            let most = |rows: &[Vec<f32>]| rows.iter().map(|r| norm(r)).fold(0.0, f64::max);
            let e = scale * norm(query) * most(&keys[..=start + row]) / f64::from(1 << 20);
            bounds.push((4.0 * e + 1e-6) * most(&values[..=start + row]));
        }
    }
    (out, bounds)
}

fn queries(case: Case, rows: usize, seed: u64) -> Vec<f32> {
    let mut q = vec![0.0; rows * case.n_kv_heads * case.group * case.k_head_dim];
    Random::new(seed).fill_gaussian(&mut q, 1.0);
    q
}

fn run(isa: Isa, filled: &Filled, q: &[f32], start: usize, rows: usize) -> Vec<f32> {
    let case = filled.case;
    let mut out = vec![f32::NAN; rows * case.n_kv_heads * case.group * case.v_head_dim];
    let params = case.params(start + rows, rows);
    attend(isa, &Pool::new(2), &mut Scratch::default(), &params, q, &filled.layer, &mut out).unwrap();
    out
}

fn assert_reference_is_exact(case: Case, tokens: usize, rows: usize) {
    let filled = Filled::gaussian(case, Isa::Scalar, tokens, 33, 1);
    let q = queries(case, rows, 2);
    let got = run(Isa::Scalar, &filled, &q, tokens - rows, rows);
    let (want, bounds) = naive(&filled, &q, tokens - rows, rows);
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
            let filled = Filled::gaussian(case, Isa::Scalar, 40, 40, 3);
            for bad in [f32::NAN, f32::INFINITY] {
                let mut q = queries(case, 2, 4);
                q[128 * 5 + 17] = bad;
                let out = run(isa, &filled, &q, 38, 2);
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

#[test]
fn wrong_sizes_are_refused() {
    let case = Case::new(DType::Turbo3, DType::F16);
    let filled = Filled::gaussian(case, Isa::Scalar, 20, 20, 5);
    let (mut q, pool) = (queries(case, 2, 6), Pool::new(1));
    let mut out = vec![0.0; q.len()];
    let refused = |params, q: &[f32], out: &mut [f32]| {
        attend(Isa::Scalar, &pool, &mut Scratch::default(), &params, q, &filled.layer, out).is_err()
    };
    let params = case.params(20, 2);
    assert!(!refused(params, &q, &mut out));
    assert!(refused(case.params(21, 2), &q, &mut out));
    assert!(refused(super::AttendParams { n_heads: 5, ..params }, &q, &mut out));
    assert!(refused(super::AttendParams { v_head_dim: 64, ..params }, &q, &mut out));
    assert!(refused(params, &q, &mut out[1..]));
    q.pop();
    assert!(refused(params, &q, &mut out));
}
