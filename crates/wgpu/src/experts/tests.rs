//! Rows of a prefill compared with each of them alone.

use kvant_backend::{Activation, Backend, ExpertWeights, Norm, Router, RouterScores, Routing, WeightSource};
use kvant_codec::DType;
use kvant_conformance::weights::{Weights, gaussian};

use crate::{WgpuBuffer, WgpuDevice, WgpuExperts, tests};

const EXPERTS: usize = 5;
const USED: usize = 2;

/// An MoE layer of one type, with biases and a norm.
struct Layer<'a> {
    device: &'a WgpuDevice,
    n: usize,
    weights: [WgpuExperts; 3],
    biases: [WgpuBuffer; 3],
    gain: WgpuBuffer,
}

impl<'a> Layer<'a> {
    /// Creates a layer with rows of `n` values and `n_ff` features.
    fn new(device: &'a WgpuDevice, dtype: DType, [n, n_ff]: [usize; 2]) -> Self {
        let experts = |n_out: usize, n_in: usize, seed| {
            let rows = Weights::gaussian(dtype, EXPERTS * n_out, n_in, seed).source(EXPERTS * n_out);
            device.upload_experts(WeightSource { dtype, ..rows }, EXPERTS).unwrap()
        };
        let weights = [experts(n_ff, n, 1), experts(n_ff, n, 2), experts(n, n_ff, 3)];
        let biases = [n_ff, n_ff, n].map(|n_out| upload(device, &gaussian(4, EXPERTS * n_out, 1.0)));
        Self { device, n, weights, biases, gain: upload(device, &gaussian(5, n, 1.0)) }
    }

    /// Returns the output for the rows of `x` with these logits.
    fn run(&self, x: &[f32], logits: &[f32]) -> Vec<f32> {
        let Self { device, n, weights: [gate, up, down], biases, gain } = self;
        let routing = Routing {
            n_used: USED,
            scores: RouterScores::Softmax,
            normalizes: true,
            scale: 1.0,
            expert_groups: None,
        };
        let (mut y, logits) = (upload(device, x), upload(device, logits));
        let choice = Router { routing, logits: &logits, selection_bias: None, scales: None, chosen: None };
        let activation = Activation::Silu;
        let weights = ExpertWeights { activation, gate, up, down, biases: Some(biases.each_ref()) };
        let norm = Some(Norm { weight: gain, eps: 1e-5 });
        device.moe_ffn(&mut y, x.len() / n, norm, choice, weights, None).unwrap();
        let mut sums = vec![f32::NAN; x.len()];
        device.read(&y, 0, &mut sums).unwrap();
        sums
    }
}

fn upload(device: &WgpuDevice, values: &[f32]) -> WgpuBuffer {
    let mut buffer = device.buffer(values.len()).unwrap();
    device.write(&mut buffer, values).unwrap();
    buffer
}

/// Every type, in the shapes for software adapters and in those for GPUs, with random routing and
/// with all rows on the same two experts: enough rows that their slots are ordered, unlike those of
/// one row.
#[test]
fn rows_of_a_prompt_have_the_bits_that_they_have_alone() {
    let Some(device) = tests::device() else { return };
    let other_shapes = WgpuDevice::open_with_other_shapes().unwrap();
    let rows = 13;
    for dtype in DType::weights() {
        let shape = if dtype.block_len() > 1 { [512, 256] } else { [255, 70] };
        let [n, n_ff] = shape.map(|n| n / dtype.block_len() * dtype.block_len());
        let x = gaussian(6, rows * n, 1.0);
        let random_logits = gaussian(7, rows * EXPERTS, 2.0);
        let equal_logits: Vec<f32> = (0..rows * EXPERTS).map(|i| (i % EXPERTS) as f32).collect();
        for device in [&device, &other_shapes] {
            let layer = Layer::new(device, dtype, [n, n_ff]);
            for logits in [&random_logits, &equal_logits] {
                let together = layer.run(&x, logits);
                let each = x.chunks_exact(n).zip(logits.chunks_exact(EXPERTS));
                let alone: Vec<f32> = each.flat_map(|(x, logits)| layer.run(x, logits)).collect();
                assert!(together.iter().all(|y| y.is_finite()), "{dtype}: {together:?}");
                let other = together.iter().zip(&alone).position(|(y, alone)| y.to_bits() != alone.to_bits());
                assert_eq!(other, None, "{dtype}: the first value, rows of {n}, with other bits than alone");
            }
        }
    }
}
