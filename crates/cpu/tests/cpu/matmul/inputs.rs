//! Statistics of inputs: the squares of what a matrix is multiplied with, and nothing else changes.

use std::sync::Arc;

use kvant_backend::{ExpertWeights, InputSquares, Router, RouterScores, Routing};

use super::*;

const ROWS: usize = 11;
const N: usize = 64;
const N_FF: usize = 96;
const N_EXPERTS: usize = 5;
const N_USED: usize = 2;
const EPS: f32 = 1e-5;

/// Returns the sums of squares of `rows`, by column.
fn squares(rows: &[Vec<f64>]) -> Vec<f64> {
    let n = rows.first().map_or(0, Vec::len);
    (0..n).map(|i| rows.iter().map(|row| row[i] * row[i]).sum()).collect()
}

/// Rows are f32, summed in f64: relative errors are those of the norm, a few roundings.
fn assert_close(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= 2e-5 * want.abs() + 1e-9, "{what}: {got}, expected {want}");
    }
}

fn normed(x: &[f32], gain: &[f32]) -> Vec<Vec<f64>> {
    let row = |x: &[f32]| {
        let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
        let by = (mean + f64::from(EPS)).sqrt().recip();
        x.iter().zip(gain).map(|(&v, &g)| f64::from(v) * by * f64::from(g)).collect()
    };
    x.chunks_exact(N).map(row).collect()
}

fn source(dtype: DType, seed: u64, n_out: usize, n_in: usize) -> WeightSource {
    let mut bytes = vec![0; n_out * dtype.row_bytes(n_in).unwrap()];
    kvant_codec::encode(dtype, &gaussian(seed, n_out * n_in, 0.1), &mut bytes).unwrap();
    WeightSource { dtype, n_out, n_in, bytes: bytes.into() }
}

#[test]
fn watched_matrices_report_their_normalized_inputs() {
    let (x, gain) = (gaussian(1, ROWS * N, 1.0), gaussian(2, N, 1.0));
    let want = squares(&normed(&x, &gain));
    for (isa, dtype) in
        Isa::available().into_iter().flat_map(|isa| [DType::F16, DType::Q4_0].map(|dtype| (isa, dtype)))
    {
        let device = CpuDevice::new(isa, 2).unwrap();
        let upload = |seed| device.upload_matrix(source(dtype, seed, N_FF, N)).unwrap();
        let (x, gain) = (buffer(&x), buffer(&gain));
        let input = || {
            let norm = Some(Norm { weight: &gain, eps: EPS });
            Input { x: &x, norm, first_row: 0, rows: ROWS }
        };
        let run = |gate: &CpuMatrix, up: &CpuMatrix| {
            let mut outputs = [0; 3].map(|_| buffer(&[0.0; ROWS * N_FF]));
            let [y, z, gated] = &mut outputs;
            let output = |w, y| Output { w, bias: None, y, accumulate: false };
            device.project(input(), &mut [output(gate, y), output(up, z)]).unwrap();
            device.gated_ffn(input(), Activation::Silu, gate, up, gated).unwrap();
            outputs.map(|of| of.as_slice().iter().map(|v| v.to_bits()).collect::<Vec<_>>())
        };
        let (mut gate, mut up) = (upload(3), upload(4));
        let plain = run(&gate, &up);
        let sums = [0; 2].map(|_| Arc::new(InputSquares::new(N, 1)));
        device.watch_inputs(&mut gate, &sums[0]).unwrap();
        device.watch_inputs(&mut up, &sums[1]).unwrap();
        assert_eq!(run(&gate, &up), plain, "{isa:?} {dtype}");
        for sums in sums {
            let [of] = &sums.matrices()[..] else { panic!("one matrix") };
            assert_eq!(of.n_rows, 2 * ROWS as u64, "{isa:?} {dtype}");
            let twice: Vec<f64> = want.iter().map(|sum| 2.0 * sum).collect();
            assert_close(&of.sums, &twice, &format!("{isa:?} {dtype}"));
        }
        let other = Arc::new(InputSquares::new(N + 1, 1));
        let refused = device.watch_inputs(&mut up, &other).unwrap_err().to_string();
        assert!(refused.contains("columns of the sums"), "{refused}");
    }
}

#[test]
fn watched_experts_report_the_rows_routed_to_them() {
    let (x, gain) = (gaussian(5, ROWS * N, 1.0), gaussian(6, N, 1.0));
    // No row goes to the last expert.
    let mut logits = gaussian(7, ROWS * N_EXPERTS, 2.0);
    logits.chunks_exact_mut(N_EXPERTS).for_each(|row| row[N_EXPERTS - 1] = -100.0);
    let inputs = normed(&x, &gain);
    let routed = |expert: usize| -> Vec<Vec<f64>> {
        let is_chosen = |row: &[f32]| row.iter().filter(|&&v| v > row[expert]).count() < N_USED;
        let rows = logits.chunks_exact(N_EXPERTS).zip(&inputs);
        rows.filter(|(row, _)| is_chosen(row)).map(|(_, x)| x.clone()).collect()
    };
    let weights = [(8, N_FF, N), (9, N_FF, N), (10, N, N_FF)];
    let values = weights.map(|(seed, n_out, n_in)| gaussian(seed, N_EXPERTS * n_out * n_in, 0.1));
    let hidden = |expert: usize, x: &[f64]| -> Vec<f64> {
        let product = |w: &[f32], o: usize| -> f64 {
            w[(expert * N_FF + o) * N..][..N].iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()
        };
        let silu = |g: f64| g / (1.0 + (-g).exp());
        (0..N_FF).map(|o| silu(product(&values[0], o)) * product(&values[1], o)).collect()
    };
    for (isa, is_mapped) in Isa::available().into_iter().flat_map(|isa| [(isa, false), (isa, true)]) {
        let device = CpuDevice::new(isa, 2).unwrap();
        let sums = [N, N, N_FF].map(|n_in| Arc::new(InputSquares::new(n_in, N_EXPERTS)));
        let experts: Vec<_> = weights
            .iter()
            .zip(&sums)
            .map(|(&(seed, n_out, n_in), sums)| {
                let source = source(DType::F32, seed, N_EXPERTS * n_out, n_in);
                let mut experts = match is_mapped {
                    true => device.map_experts(source, N_EXPERTS).unwrap(),
                    false => device.upload_experts(source, N_EXPERTS).unwrap(),
                };
                device.watch_expert_inputs(&mut experts, sums).unwrap();
                experts
            })
            .collect();
        let (mut x, gain, logits) = (buffer(&x), buffer(&gain), buffer(&logits));
        let activation = Activation::Silu;
        let weights =
            ExpertWeights { activation, gate: &experts[0], up: &experts[1], down: &experts[2], biases: None };
        let routing = Routing {
            n_used: N_USED,
            scores: RouterScores::Softmax,
            normalizes: true,
            scale: 1.0,
            expert_groups: None,
        };
        let choice = Router { routing, logits: &logits, selection_bias: None, scales: None, chosen: None };
        let norm = Some(Norm { weight: &gain, eps: EPS });
        device.moe_ffn(&mut x, ROWS, norm, choice, weights, None).unwrap();
        for expert in 0..N_EXPERTS {
            let rows = routed(expert);
            let hidden: Vec<_> = rows.iter().map(|x| hidden(expert, x)).collect();
            for (part, (sums, want)) in sums.iter().zip([&rows, &rows, &hidden]).enumerate() {
                let of = &sums.matrices()[expert];
                let what = format!("{isa:?}, mapped: {is_mapped}, expert {expert}, matrix {part}");
                assert_eq!(of.n_rows, rows.len() as u64, "{what}");
                let want = if want.is_empty() { vec![0.0; of.sums.len()] } else { squares(want) };
                assert_close(&of.sums, &want, &what);
            }
        }
        assert_eq!(sums[0].matrices()[N_EXPERTS - 1].n_rows, 0);
    }
}
