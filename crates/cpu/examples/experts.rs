//! Measures a MoE layer under a random router: GB/s of the selected experts for one token, GMAC/s
//! for 512 tokens.
//!
//! `cargo run --release -p kvant-cpu --example experts -- [threads] [type] [experts] [used]
//! [hidden size] [expert hidden size]`
//!
//! For one token, layers run in turn, more than a cache holds. Figures are the best of several
//! rounds.

use std::time::Instant;

use kvant_backend::{Activation, Backend, ExpertWeights, Router, RouterScores, Routing, WeightSource};
use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_cpu::{CpuDevice, CpuExperts};

/// Layers run in turn, so that no cache holds the weights.
const LAYERS: usize = 28;
const ROUNDS: usize = 15;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |i: usize, default: &str| words.get(i).cloned().unwrap_or_else(|| default.to_owned());
    let number = |i, default| word(i, default).parse::<usize>().expect("a number");
    let (threads, dtype): (_, DType) = (number(0, "1"), word(1, "q4_0").parse().expect("a weight type"));
    let [n_experts, n_used, n, n_ff] =
        [(2, "64"), (3, "8"), (4, "1024"), (5, "512")].map(|(i, default)| number(i, default));
    let device = CpuDevice::from_env(Some(threads)).expect("a CPU");
    let experts = |n_out: usize, n_in: usize| -> CpuExperts {
        let bytes = vec![0x3c; n_experts * n_out * dtype.row_bytes(n_in).expect("whole blocks")];
        let source = WeightSource { dtype, n_out: n_experts * n_out, n_in, bytes: bytes.into() };
        device.upload_experts(source, n_experts).expect("memory")
    };
    let layers: Vec<_> =
        (0..LAYERS).map(|_| [experts(n_ff, n), experts(n_ff, n), experts(n, n_ff)]).collect();
    let row_bytes = |n: usize| dtype.row_bytes(n).expect("whole blocks");
    let bytes = n_used * (2 * n_ff * row_bytes(n) + n * row_bytes(n_ff));
    let mut random = Random::new(1);
    for rows in [1, 512] {
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            let mut values = vec![0.0; rows * (n + n_experts)];
            random.fill_gaussian(&mut values, 1.0);
            let mut x = device.buffer(rows * n).expect("memory");
            let mut logits = device.buffer(rows * n_experts).expect("memory");
            device.write(&mut x, &values[..rows * n]).expect("room");
            device.write(&mut logits, &values[rows * n..]).expect("room");
            let routing = Routing {
                n_used,
                scores: RouterScores::Softmax,
                normalizes: true,
                scale: 0.0,
                expert_groups: None,
            };
            let used = if rows == 1 { LAYERS } else { 1 };
            let started = Instant::now();
            for [gate, up, down] in &layers[..used] {
                let weights = ExpertWeights { activation: Activation::Silu, gate, up, down, biases: None };
                let choice =
                    Router { routing, logits: &logits, selection_bias: None, scales: None, chosen: None };
                device.moe_ffn(&mut x, rows, None, choice, weights, None).expect("shapes agree");
            }
            best = best.min(started.elapsed().as_secs_f64() / used as f64);
        }
        let speed = match rows {
            1 => format!("{:.2} GB/s", bytes as f64 / best / 1e9),
            _ => format!("{:.1} GMAC/s", (3 * rows * n_used * n * n_ff) as f64 / best / 1e9),
        };
        println!("{dtype}, {threads} threads, {rows} rows: {:.3} ms a layer, {speed}", 1e3 * best);
    }
}
