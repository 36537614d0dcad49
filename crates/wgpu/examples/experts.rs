//! Times MoE feed-forward layers on an adapter.
//!
//! `cargo run --release -p kvant-wgpu --example experts -- [adapter] [n] [n_ff] [n_experts]
//! [n_used] [rounds] [ROWS ...]`
//!
//! Numbers of rows and types take turns, so that other load on the machine affects all of them
//! alike; figures are medians of the rounds. Experts are selected at random.

use std::time::Instant;

use kvant_backend::{
    Activation, Backend, ExpertWeights, Result, Router, RouterScores, Routing, WeightSource,
};
use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_wgpu::{WgpuBuffer, WgpuDevice, WgpuExperts};

const TYPES: [DType; 4] = [DType::Q4_0, DType::Q8_0, DType::Q4K, DType::F16];

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut number = |or: usize| args.next().map_or(Ok(or), |text| text.parse::<usize>());
    let (adapter, n, n_ff) = (number(0)?, number(512)?, number(512)?);
    let (n_experts, n_used, rounds) = (number(16)?, number(4)?, number(5)?);
    let mut all_rows: Vec<usize> = args.map(|text| text.parse()).collect::<std::result::Result<_, _>>()?;
    if all_rows.is_empty() {
        all_rows = vec![1, 4, 8, 16, 32, 64];
    }
    let device = WgpuDevice::open(adapter)?;
    println!("{}, {n_used} of {n_experts} experts of {n_ff} features, rows of {n}", device.info().kernels);
    let layers = TYPES.map(|dtype| Layer::new(&device, dtype, [n, n_ff, n_experts]));
    let layers = layers.into_iter().collect::<Result<Vec<_>>>()?;
    let max_rows = all_rows.iter().copied().max().unwrap_or_default();
    let logits = filled(&device, max_rows * n_experts)?;
    let (mut x, mut y) = (filled(&device, max_rows * n)?, device.buffer(max_rows * n)?);
    let mut seconds = vec![vec![Vec::new(); layers.len()]; all_rows.len()];
    for round in 0..=rounds {
        for (&rows, seconds) in all_rows.iter().zip(&mut seconds) {
            for (layer, seconds) in layers.iter().zip(seconds) {
                let start = Instant::now();
                layer.run(&device, n_used, rows, &logits, [&mut x, &mut y])?;
                device.finish()?;
                // Kernels are compiled in the first round.
                if round > 0 {
                    seconds.push(start.elapsed().as_secs_f64());
                }
            }
        }
    }
    println!("{:>6} {:>6} {:>10} {:>10}", "type", "rows", "ms", "GMAC/s");
    for (rows, seconds) in all_rows.iter().zip(seconds) {
        for (dtype, seconds) in TYPES.iter().zip(seconds) {
            let median = median(seconds);
            let macs = (3 * rows * n_used * n * n_ff) as f64 / median / 1e9;
            println!("{:>6} {rows:>6} {:>10.3} {macs:>10.2}", dtype.name(), 1e3 * median);
        }
    }
    Ok(())
}

/// Gate, up and down of all experts.
struct Layer([WgpuExperts; 3]);

impl Layer {
    fn new(device: &WgpuDevice, dtype: DType, [n, n_ff, n_experts]: [usize; 3]) -> Result<Self> {
        let experts = |n_out: usize, n_in: usize, seed| {
            let mut values = vec![0.0; n_experts * n_out * n_in];
            Random::new(seed).fill_gaussian(&mut values, 0.02);
            let mut bytes = vec![0; n_experts * n_out * dtype.row_bytes(n_in).expect("rows of whole blocks")];
            kvant_codec::encode(dtype, &values, &mut bytes).expect("sizes agree");
            let source = WeightSource { dtype, n_out: n_experts * n_out, n_in, bytes: bytes.into() };
            device.upload_experts(source, n_experts)
        };
        Ok(Self([experts(n_ff, n, 1)?, experts(n_ff, n, 2)?, experts(n, n_ff, 3)?]))
    }

    /// Runs the layer on the first `rows` of `x`; writes `y`.
    fn run(
        &self,
        device: &WgpuDevice,
        n_used: usize,
        rows: usize,
        logits: &WgpuBuffer,
        [x, y]: [&mut WgpuBuffer; 2],
    ) -> Result<()> {
        let [gate, up, down] = &self.0;
        let weights = ExpertWeights { activation: Activation::Silu, gate, up, down, biases: None };
        let routing = Routing {
            n_used,
            scores: RouterScores::Softmax,
            normalizes: true,
            scale: 1.0,
            expert_groups: None,
        };
        let choice = Router { routing, logits, selection_bias: None, scales: None, chosen: None };
        device.moe_ffn(x, rows, None, choice, weights, Some(y))
    }
}

/// Returns a buffer of Gaussian values.
fn filled(device: &WgpuDevice, len: usize) -> Result<WgpuBuffer> {
    let mut values = vec![0.0; len];
    Random::new(7).fill_gaussian(&mut values, 1.0);
    let mut buffer = device.buffer(len)?;
    device.write(&mut buffer, &values)?;
    Ok(buffer)
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
