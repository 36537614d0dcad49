//! Batch invariance of MoE layers: the expert output of a row does not depend on the other rows of
//! the batch, on their experts, or on the threads.

use kvant_backend::{ExpertWeights, Router, RouterScores, Routing};
use kvant_cpu::CpuExperts;

use super::*;

const N_EXPERTS: usize = 6;
const ROWS: [usize; 7] = [1, 2, 3, 5, 9, 13, 60];
const MAX_ROWS: usize = 60;

/// A layer for one device, and its input rows.
struct Case {
    experts: [CpuExperts; 3],
    n: usize,
    gain: CpuBuffer,
    x: Vec<f32>,
    logits: Vec<f32>,
}

impl Case {
    fn new(device: &CpuDevice, types: [DType; 3], n: usize, n_ff: usize) -> Self {
        Self::with_experts(types, n, n_ff, &|source| device.upload_experts(source, N_EXPERTS).unwrap())
    }

    /// Builds a case with experts that `take` creates.
    fn with_experts(
        [gate, up, down]: [DType; 3],
        n: usize,
        n_ff: usize,
        take: &dyn Fn(WeightSource) -> CpuExperts,
    ) -> Self {
        let experts = |dtype: DType, n_out: usize, n_in: usize, seed| {
            let mut bytes = vec![0; N_EXPERTS * n_out * dtype.row_bytes(n_in).unwrap()];
            kvant_codec::encode(dtype, &gaussian(seed, N_EXPERTS * n_out * n_in, 0.1), &mut bytes).unwrap();
            let source = WeightSource { dtype, n_out: N_EXPERTS * n_out, n_in, bytes: bytes.into() };
            take(source)
        };
        Self {
            experts: [experts(gate, n_ff, n, 50), experts(up, n_ff, n, 51), experts(down, n, n_ff, 52)],
            n,
            gain: buffer(&gaussian(53, n, 1.0)),
            x: gaussian(54, MAX_ROWS * n, 1.0),
            logits: gaussian(55, MAX_ROWS * N_EXPERTS, 2.0),
        }
    }

    /// Returns the results of `rows` rows, as bits.
    fn run(&self, device: &CpuDevice, first_row: usize, rows: usize) -> Vec<u32> {
        let mut x = buffer(&self.x[first_row * self.n..][..rows * self.n]);
        let logits = buffer(&self.logits[first_row * N_EXPERTS..][..rows * N_EXPERTS]);
        let [gate, up, down] = &self.experts;
        let activation = Activation::Silu;
        let weights = ExpertWeights { activation, gate, up, down, biases: None };
        let norm = Some(Norm { weight: &self.gain, eps: 1e-5 });
        let routing = Routing {
            n_used: 2,
            scores: RouterScores::Softmax,
            normalizes: true,
            scale: 1.0,
            expert_groups: None,
        };
        let choice = Router { routing, logits: &logits, selection_bias: None, scales: None, chosen: None };
        device.moe_ffn(&mut x, rows, norm, choice, weights, None).unwrap();
        x.as_slice().iter().map(|x| x.to_bits()).collect()
    }
}

#[test]
fn experts_that_stay_in_the_file_give_the_same_bits() {
    use DType::{F16, F32, Q4_0, Q4K, Q6K, Q8_0, TQ4_1S};
    for types in [[Q4_0; 3], [Q4K, Q4K, Q6K], [TQ4_1S, TQ4_1S, Q8_0], [Q8_0, F32, F16]] {
        for isa in Isa::available() {
            let device = CpuDevice::new(isa, 2).unwrap();
            let kept = Case::new(&device, types, 256, 256);
            let mapped =
                Case::with_experts(types, 256, 256, &|source| device.map_experts(source, N_EXPERTS).unwrap());
            for rows in [1, 3, MAX_ROWS] {
                assert_eq!(
                    mapped.run(&device, 0, rows),
                    kept.run(&device, 0, rows),
                    "{isa:?} {types:?}: {rows}"
                );
            }
        }
    }
}

#[test]
fn experts_are_batch_invariant() {
    use DType::{F16, F32, Q4_0, Q4K, Q6K, Q8_0, TQ4_1S};
    let types = [[Q4_0; 3], [Q4K, Q4K, Q6K], [F16; 3], [TQ4_1S, TQ4_1S, Q8_0], [Q8_0, F32, F16]];
    for (isa, types) in Isa::available().into_iter().flat_map(|isa| types.map(|types| (isa, types))) {
        let (n, n_ff) = if types == [F16; 3] { (70, 37) } else { (256, 256) };
        let device = CpuDevice::new(isa, 1).unwrap();
        let case = Case::new(&device, types, n, n_ff);
        let alone: Vec<_> = (0..MAX_ROWS).map(|row| case.run(&device, row, 1)).collect();
        for n_threads in [1, 2, 3, 17] {
            let device = CpuDevice::new(isa, n_threads).unwrap();
            let case = Case::new(&device, types, n, n_ff);
            for rows in ROWS {
                let first_row = (7 * rows) % (MAX_ROWS - rows + 1);
                let together = case.run(&device, first_row, rows);
                for (r, (got, alone)) in together.chunks(n).zip(&alone[first_row..]).enumerate() {
                    assert_eq!(got, alone, "{isa:?} {types:?}: row {r} of {rows}, {n_threads} threads");
                }
            }
        }
    }
}
