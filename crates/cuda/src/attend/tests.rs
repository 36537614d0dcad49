//! Attention on the device against attention in f64 over the rows that the codec decodes.

use kvant_backend::{AttendParams, Backend, Stream};
use kvant_codec::random::Random;
use kvant_codec::tile::{TILE, restore_row};
use kvant_codec::{DType, Rotation};

use crate::kv::fixture::{Case, HostPage, Twins};
use crate::{CudaDevice, emulator};

/// Every row of a stream, un-rotated and cut to the head's size.
fn rows(stream: &Stream<HostPage>) -> Vec<Vec<f32>> {
    let spec = stream.spec();
    let rotation = spec.rotates().then(Rotation::kv);
    let row = |token: usize| {
        let tile = stream.tile(token / TILE);
        let (mut stored, mut row) = (vec![0.0; spec.dim()], vec![0.0; spec.head_dim]);
        tile.layout.get(&tile.page.0[tile.offset..][..tile.layout.bytes()], token % TILE, &mut stored);
        restore_row(rotation.as_ref(), &mut stored, &mut row);
        row
    };
    (0..stream.len()).map(row).collect()
}

/// The equation in f64, and the sum of squared errors to expect.
///
/// Where a key is off by a relative variance e, its score is off by a variance e · scale² |q|² |k|² / dims, and by at most
/// √e times itself, since levels are off the same way everywhere; the output moves by the weight times the distance of
/// the value from it, and a value that is off adds its own share. Codebooks in bytes are off by what `ByteBook` says, halves (queries, keys, scales; weights, values, scales) by at most 2^-11 each,
/// a variance of 2^-22 / 3.
fn reference(p: &AttendParams, q: &[f32], twins: &Twins) -> (Vec<f64>, f64) {
    let group = p.n_heads / p.n_kv_heads;
    let (mut out, mut expected) = (vec![f64::NAN; p.rows * p.n_heads * p.v_head_dim], 0.0);
    let squares = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
    let halves = 3.0 * (2.0_f64).powi(-22) / 3.0;
    let [of_k, of_v] = [twins.case.k, twins.case.v].map(of_codebook);
    for head in 0..p.n_kv_heads {
        let (keys, values) = (rows(&twins.host.k[head]), rows(&twins.host.v[head]));
        for (row, of_group) in (0..p.rows).flat_map(|row| (0..group).map(move |g| (row, g))) {
            let at = row * p.n_heads + head * group + of_group;
            let q = &q[at * p.k_head_dim..][..p.k_head_dim];
            let products = |key: &[f32]| {
                q.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).collect::<Vec<_>>()
            };
            let keys = &keys[..p.start + row + 1];
            let scale = f64::from(p.scale);
            let scores: Vec<f64> = keys.iter().map(|key| scale * products(key).iter().sum::<f64>()).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp() / sum).collect();
            let out = &mut out[at * p.v_head_dim..][..p.v_head_dim];
            for (dim, out) in out.iter_mut().enumerate() {
                *out = weights.iter().zip(&values).map(|(w, value)| w * f64::from(value[dim])).sum();
            }
            for (((key, value), w), score) in keys.iter().zip(&values).zip(&weights).zip(&scores) {
                let independent = scale * scale * squares(q) * squares(key) / p.k_head_dim as f64;
                let coded = of_k * (independent + score * score);
                let rounded = halves * scale * scale * products(key).iter().map(|x| x * x).sum::<f64>();
                let away: f64 = value.iter().zip(&*out).map(|(&v, out)| (f64::from(v) - out).powi(2)).sum();
                expected += w * w * (coded + rounded) * away;
                expected += w * w * (of_v + halves) * squares(value);
            }
        }
    }
    (out, expected)
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

fn run(device: &CudaDevice, p: &AttendParams, q: &[f32], twins: &Twins) -> Vec<f32> {
    let mut on_q = device.buffer(q.len()).unwrap();
    device.write(&mut on_q, q).unwrap();
    let len = p.rows * p.n_heads * p.v_head_dim;
    // Reading a value that no kernel has written is an error.
    let mut on_out = emulator::poisoned(device.context(), len);
    device.attend(p, &on_q, &twins.device, &mut on_out).unwrap();
    let mut out = vec![f32::NAN; len];
    device.read(&on_out, 0, &mut out).unwrap();
    out
}

fn assert_attends(device: &CudaDevice, twins: &Twins, rows: usize, seed: u64) {
    let p = twins.case.params(twins.host.len(), rows);
    let mut q = vec![0.0; rows * p.n_heads * p.k_head_dim];
    Random::new(seed).fill_gaussian(&mut q, 1.0);
    let (got, (want, expected)) = (run(device, &p, &q, twins), reference(&p, &q, twins));
    let error: f64 = got.iter().zip(&want).map(|(&got, want)| (f64::from(got) - want).powi(2)).sum();
    // Few outputs scatter.
    let what = || format!("{:?}, {} tokens, {rows} rows", twins.case, twins.host.len());
    assert!(error <= 3.0 * expected, "{}: {error:.2e}, expected {expected:.2e}", what());
}

#[test]
fn every_pair_of_types_attends() {
    let Some(device) = emulator::device(80) else { return };
    for k in DType::KV {
        for v in DType::KV {
            let mut twins = Twins::new(&device, Case { n_kv_heads: 1, ..Case::new(k, v) }, 5);
            twins.append(&device, 70);
            // Enough queries for the kernels that take any pair; those for few queries are compiled for each, and see
            // every type on either side below.
            assert_attends(&device, &twins, 5, 6);
        }
    }
}

/// Sequences of other lengths and types, in one buffer of queries and one of outputs, whose rows they do not share out in
/// order; more heads than a launch takes.
#[test]
fn sequences_attend_together_as_each_does_alone() {
    let Some(device) = emulator::device(80) else { return };
    let types = [
        (DType::Turbo3, DType::Turbo3),
        (DType::Turbo3, DType::Turbo3),
        (DType::Q8_0, DType::F16),
        (DType::Turbo3, DType::Turbo3),
    ];
    for (rows, n_kv_heads) in [(1, 9), (2, 1), (12, 1)] {
        let case = |(k, v)| Case { n_kv_heads, group: 2, k_head_dim: 64, v_head_dim: 64, ..Case::new(k, v) };
        let twins: Vec<_> = (0..)
            .zip(types)
            .map(|(seed, types)| {
                let mut twins = Twins::new(&device, case(types), seed);
                twins.append(&device, [40, 200, 17, 12][seed as usize]);
                twins
            })
            .collect();
        let parts: Vec<_> = (0..)
            .zip(&twins)
            .map(|(i, twins)| {
                let first_row = (types.len() - 1 - i) * rows;
                (AttendParams { first_row, ..twins.case.params(twins.host.len(), rows) }, &twins.device)
            })
            .collect();
        let width = n_kv_heads * 2 * 64;
        let mut q = vec![0.0; types.len() * rows * width];
        Random::new(7).fill_gaussian(&mut q, 1.0);
        let mut on_q = device.buffer(q.len()).unwrap();
        device.write(&mut on_q, &q).unwrap();
        let mut on_out = emulator::poisoned(device.context(), q.len());
        device.attend_together(&parts, &on_q, &mut on_out).unwrap();
        let mut got = vec![f32::NAN; q.len()];
        device.read(&on_out, 0, &mut got).unwrap();
        for ((p, _), twins) in parts.iter().zip(&twins) {
            let mine = p.first_row * width..(p.first_row + rows) * width;
            let (want, expected) = reference(p, &q[mine.clone()], twins);
            let squares = got[mine].iter().zip(&want).map(|(&got, want)| (f64::from(got) - want).powi(2));
            let error: f64 = squares.sum();
            assert!(error <= 3.0 * expected, "{p:?}: {error:.2e}, expected {expected:.2e}");
        }
    }
}

/// Up to 40,000, and down to a tenth of a thousandth; in each of the three kernels.
#[test]
fn values_of_any_size_keep_their_precision() {
    let Some(device) = emulator::device(80) else { return };
    for v in DType::KV {
        for v_gain in [0.01, 1e3] {
            let case = Case { n_kv_heads: 1, group: 4, ..Case::new(DType::Q8_0, v) };
            let mut twins = Twins::new(&device, case, 5);
            twins.v_gain = v_gain;
            twins.append(&device, 70);
            for rows in [1, 5, 20] {
                assert_attends(&device, &twins, rows, 6);
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
        let case = Case { n_kv_heads: 1, sink_tiles: 1, ..Case::new(k, v) };
        let mut twins = Twins::new(&device, case, 23);
        for step in [5, 160] {
            twins.append(&device, step);
            assert_attends(&device, &twins, 1, 24);
            assert_attends(&device, &twins, 4, 24);
        }
    }
}

#[test]
fn every_number_of_tokens_and_rows_attends() {
    let Some(device) = emulator::device(90) else { return };
    for (case, steps) in [
        (Case::new(DType::Turbo3, DType::Turbo3), &[1, 14, 1, 1, 110, 1, 1, 1, 200][..]),
        (Case { sink_tiles: 1, alpha: 1.02, ..Case::new(DType::Q8_0, DType::Turbo4) }, &[17, 130]),
        (Case { has_tail: false, ..Case::new(DType::Turbo2, DType::Q4_0) }, &[33, 96]),
    ] {
        let mut twins = Twins::new(&device, case, 7);
        for &step in steps {
            twins.append(&device, step);
            let tokens = twins.host.len();
            for rows in [1, 2, 8, 9, 12, 30].into_iter().filter(|&rows| rows <= tokens) {
                assert_attends(&device, &twins, rows, 8);
            }
        }
        let tokens = twins.host.len();
        assert_attends(&device, &twins, tokens.min(70), 9);
    }
}

#[test]
fn every_shape_of_heads_attends() {
    let Some(device) = emulator::device(89) else { return };
    for (group, n_kv_heads) in [(1, 5), (4, 2), (6, 1), (7, 1), (8, 1), (16, 1), (1, 26)] {
        let small = Case { k_head_dim: 32, v_head_dim: 48, ..Case::new(DType::F16, DType::Q8_0) };
        let mut twins = Twins::new(&device, Case { group, n_kv_heads, ..small }, 11);
        twins.append(&device, 40);
        assert_attends(&device, &twins, 1, 12);
        assert_attends(&device, &twins, 5, 12);
    }
    for (k_head_dim, v_head_dim) in [(64, 64), (80, 96), (96, 80), (128, 64), (192, 128), (256, 256)] {
        for (k, v) in [(DType::Turbo3, DType::Turbo4), (DType::Q4_0, DType::BF16)] {
            let case = Case { k_head_dim, v_head_dim, n_kv_heads: 1, ..Case::new(k, v) };
            let mut twins = Twins::new(&device, case, 13);
            twins.append(&device, 50);
            assert_attends(&device, &twins, 1, 14);
            assert_attends(&device, &twins, 25, 14);
        }
    }
}

#[test]
fn a_long_context_is_split_and_joined() {
    let Some(device) = emulator::device(80) else { return };
    let mut twins =
        Twins::new(&device, Case { n_kv_heads: 1, ..Case::new(DType::Turbo3, DType::Turbo3) }, 15);
    twins.append(&device, 1500);
    assert_attends(&device, &twins, 1, 16);
    assert_attends(&device, &twins, 14, 16);
}

#[test]
fn nan_in_a_query_reaches_its_output_and_no_other() {
    let Some(device) = emulator::device(80) else { return };
    let mut twins = Twins::new(&device, Case::new(DType::Turbo3, DType::Q8_0), 17);
    twins.append(&device, 60);
    let p = twins.case.params(60, 2);
    let mut q = vec![0.5; 2 * p.n_heads * p.k_head_dim];
    let bad = p.n_heads + 1;
    q[bad * p.k_head_dim] = f32::NAN;
    for (head, out) in run(&device, &p, &q, &twins).chunks_exact(p.v_head_dim).enumerate() {
        assert!(out.iter().all(|x| x.is_nan() == (head == bad)), "{head}");
    }
}

/// A key far above all others takes all the weight, wherever it is: the output is its value, but for what all others weigh
/// together. Weight and sum are the same power of two, within the same 2 ulp; joining shares multiplies both by the same
/// factor, twice (warps, splits), and a division ends it: two products and a sum of each, and a quotient.
#[test]
fn a_huge_score_takes_all_the_weight() {
    let Some(device) = emulator::device(80) else { return };
    let mut twins =
        Twins::new(&device, Case { n_kv_heads: 1, group: 1, ..Case::new(DType::F16, DType::F16) }, 19);
    twins.append(&device, 200);
    let p = twins.case.params(200, 1);
    let (keys, values) = (rows(&twins.host.k[0]), rows(&twins.host.v[0]));
    let largest = values.iter().flatten().fold(0.0, |most: f32, v| most.max(v.abs()));
    for token in [0, 15, 130, 199] {
        let q: Vec<f32> = keys[token].iter().map(|k| 100.0 * k).collect();
        let score = |key: &[f32]| p.scale * q.iter().zip(key).map(|(q, k)| q * k).sum::<f32>();
        let others = keys.iter().enumerate().filter(|&(other, _)| other != token);
        let of_others: f32 = others.map(|(_, key)| (score(key) - score(&keys[token])).exp()).sum();
        assert!(of_others < f32::EPSILON, "{token} is far above all others: {of_others}");
        let roundings = 2.0 + 2.0 * 3.0 + 1.0;
        let got = run(&device, &p, &q, &twins);
        for (got, want) in got.iter().zip(&values[token]) {
            let tol = roundings * f32::EPSILON * want.abs() + 2.0 * of_others * largest;
            assert!((got - want).abs() <= tol, "{token}: {got} {want}");
        }
    }
}

#[test]
fn heads_that_are_too_large_are_refused() {
    let Some(device) = emulator::device(80) else { return };
    let case = Case { n_kv_heads: 1, v_head_dim: 512, ..Case::new(DType::F16, DType::F16) };
    let mut twins = Twins::new(&device, case, 21);
    twins.append(&device, 2);
    let p = twins.case.params(2, 1);
    let q = device.buffer(p.n_heads * p.k_head_dim).unwrap();
    let mut out = device.buffer(p.n_heads * p.v_head_dim).unwrap();
    let error = device.attend(&p, &q, &twins.device, &mut out).unwrap_err().to_string();
    assert!(error.contains("512") && error.contains("256"), "{error}");
}
