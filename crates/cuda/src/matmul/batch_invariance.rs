//! A row of up to [`INVARIANT_ROWS`] has the bits that it has alone.

use std::ops::Range;

use kvant_backend::{
    Activation, Backend, ExpertWeights, Input, Norm, Output, Router, RouterScores, Routing, WeightSource,
};
use kvant_codec::DType;
use kvant_codec::random::Random;

use super::{INVARIANT_ROWS, TYPES};
use crate::{CudaBuffer, CudaDevice, CudaExperts, CudaMatrix, emulator};

const N_OUT: [usize; 2] = [18, 3];

fn gaussian(seed: u64, n: usize) -> Vec<f32> {
    let mut values = vec![0.0; n];
    Random::new(seed).fill_gaussian(&mut values, 1.0);
    values
}

/// Returns a number of inputs that ends within a window of every class, and for small blocks within
/// a stage.
fn n_in_of(dtype: DType) -> usize {
    2144_usize.next_multiple_of(dtype.block_len())
}

fn encoded(dtype: DType, seed: u64, [n_out, n_in]: [usize; 2]) -> Vec<u8> {
    let row_bytes = dtype.row_bytes(n_in).unwrap();
    let mut bytes = vec![0; n_out * row_bytes];
    for (row, code) in gaussian(seed, n_out * n_in).chunks(n_in).zip(bytes.chunks_exact_mut(row_bytes)) {
        kvant_codec::encode(dtype, row, code).unwrap();
    }
    bytes
}

fn buffer(device: &CudaDevice, values: &[f32]) -> CudaBuffer {
    let mut buffer = device.buffer(values.len()).unwrap();
    device.write(&mut buffer, values).unwrap();
    buffer
}

fn bits(device: &CudaDevice, y: &CudaBuffer, n: usize) -> Vec<u32> {
    let mut got = vec![f32::NAN; n];
    device.read(y, 0, &mut got).unwrap();
    got.into_iter().map(f32::to_bits).collect()
}

/// A layer: two matrices of one type, the second with a bias and added to what is there, and both
/// as gate and product of a feed-forward layer.
struct Layer<'d> {
    device: &'d CudaDevice,
    n_in: usize,
    matrices: [CudaMatrix; 2],
    gate: CudaMatrix,
    bias: CudaBuffer,
    norm: CudaBuffer,
}

impl<'d> Layer<'d> {
    fn new(device: &'d CudaDevice, dtype: DType, n_in: usize) -> Self {
        let matrix = |seed, n_out| {
            let bytes = encoded(dtype, seed, [n_out, n_in]).into();
            device.upload_matrix(WeightSource { dtype, n_out, n_in, bytes }).unwrap()
        };
        let [first, second] = N_OUT;
        Self {
            device,
            n_in,
            matrices: [matrix(1, first), matrix(2, second)],
            gate: matrix(3, first),
            bias: buffer(device, &gaussian(4, second)),
            norm: buffer(device, &gaussian(5, n_in)),
        }
    }

    /// Returns the bits of each row of `x` `[rows, n_in]` behind the layer.
    fn rows(&self, x: &[f32]) -> Vec<Vec<u32>> {
        let (rows, [first, second]) = (x.len() / self.n_in, N_OUT);
        let x = buffer(self.device, x);
        let norm = Some(Norm { weight: &self.norm, eps: 1e-5 });
        let input = || Input { x: &x, norm, first_row: 0, rows };
        let mut ys = [first, second].map(|n| buffer(self.device, &vec![0.75; rows * n]));
        let [y, z] = &mut ys;
        let mut outputs = [
            Output { w: &self.matrices[0], bias: None, y, accumulate: false },
            Output { w: &self.matrices[1], bias: Some(&self.bias), y: z, accumulate: true },
        ];
        self.device.project(input(), &mut outputs).unwrap();
        let mut gated = self.device.buffer(rows * first).unwrap();
        self.device.gated_ffn(input(), Activation::Gelu, &self.gate, &self.matrices[0], &mut gated).unwrap();
        let [y, z] = &ys;
        let all =
            [(y, first), (z, second), (&gated, first)].map(|(y, n)| (bits(self.device, y, rows * n), n));
        (0..rows).map(|row| all.iter().flat_map(|(y, n)| y[row * n..][..*n].to_vec()).collect()).collect()
    }
}

/// Holds that rows of a step have the bits that each has alone, with weights of these types.
fn hold(arch: u32, dtypes: impl Iterator<Item = DType>) {
    let Some(device) = emulator::device(arch) else { return };
    for dtype in dtypes {
        let n_in = n_in_of(dtype);
        let layer = Layer::new(&device, dtype, n_in);
        let x = gaussian(6, INVARIANT_ROWS * n_in);
        let alone = |row: usize| layer.rows(&x[row * n_in..][..n_in]).remove(0);
        let expected = [0, 1, 4, 8, 15].map(|row| (row, alone(row)));
        for rows in [2, 5, 8, 9, 16] {
            let together = layer.rows(&x[..rows * n_in]);
            for (row, expected) in expected.iter().filter(|(row, _)| *row < rows) {
                let differing = together[*row].iter().zip(expected).filter(|(a, b)| a != b).count();
                assert_eq!(differing, 0, "{dtype} [{n_in}], row {row} of {rows}, of {}", expected.len());
            }
        }
    }
}

#[test]
fn rows_of_small_blocks_are_batch_invariant() {
    hold(80, TYPES.into_iter().filter(|dtype| dtype.block_len() <= 32));
}

#[test]
fn rows_of_large_blocks_are_batch_invariant() {
    hold(80, TYPES.into_iter().filter(|dtype| dtype.block_len() > 32));
}

/// Shared memory is so small that four and eight blocks share a tile.
#[test]
fn rows_of_many_splits_are_batch_invariant() {
    hold(89, [DType::Q4_0, DType::Q6K].into_iter());
}

/// Rows that two blocks per multiprocessor keep whole, and in which a block takes several tiles.
#[test]
fn rows_of_several_tiles_are_batch_invariant() {
    let Some(device) = emulator::device(90) else { return };
    let (dtype, n_in, n_out) = (DType::Q4_0, 320, 700);
    let bytes = encoded(dtype, 1, [n_out, n_in]).into();
    let w = device.upload_matrix(WeightSource { dtype, n_out, n_in, bytes }).unwrap();
    let x = gaussian(2, 3 * n_in);
    let product = |x: &[f32]| {
        let (rows, x) = (x.len() / n_in, buffer(&device, x));
        let mut y = device.buffer(rows * n_out).unwrap();
        let output = Output { w: &w, bias: None, y: &mut y, accumulate: false };
        device.project(Input { x: &x, norm: None, first_row: 0, rows }, &mut [output]).unwrap();
        bits(&device, &y, rows * n_out)
    };
    let alone: Vec<_> = x.chunks_exact(n_in).flat_map(product).collect();
    assert!(product(&x) == alone);
}

#[test]
fn rows_of_experts_are_batch_invariant() {
    let Some(device) = emulator::device(80) else { return };
    let (dtype, n_in, n_out, n_experts) = (DType::Q4K, 256, 9, 3);
    let bytes = (0..n_experts).map(|seed| encoded(dtype, seed, [n_out, n_in])).collect::<Vec<_>>().concat();
    let source = WeightSource { dtype, n_out: n_experts as usize * n_out, n_in, bytes: bytes.into() };
    let w: CudaExperts = device.upload_experts(source, n_experts as usize).unwrap();
    let (of_x, of_y) = (n_experts as usize * n_in, n_experts as usize * n_out);
    let x = gaussian(7, INVARIANT_ROWS * of_x);
    let product = |x: &[f32]| {
        let (rows, x) = (x.len() / of_x, buffer(&device, x));
        let mut y = device.buffer(rows * of_y).unwrap();
        device.project_per_expert(&x, rows, &w, &mut y).unwrap();
        bits(&device, &y, rows * of_y)
    };
    let alone: Vec<_> = x.chunks_exact(of_x).flat_map(product).collect();
    assert!(product(&x) == alone);
}

/// A layer of five experts, of which each row uses two.
#[test]
fn slots_that_share_experts_are_batch_invariant() {
    // Shared memory for half of the inputs of 16 rows.
    let Some(device) = emulator::device(89) else { return };
    let (dtype, n, n_ff, n_experts) = (DType::Q4_0, 1056, 64, 5);
    let upload = |seed, [n_out, n_in]: [usize; 2]| -> CudaExperts {
        let of = |expert| encoded(dtype, seed + expert, [n_out, n_in]);
        let bytes = (0..n_experts as u64).flat_map(of).collect::<Vec<_>>();
        let source = WeightSource { dtype, n_out: n_experts * n_out, n_in, bytes: bytes.into() };
        device.upload_experts(source, n_experts).unwrap()
    };
    let [gate, up, down] =
        [(10, [n_ff, n]), (20, [n_ff, n]), (30, [n, n_ff])].map(|(seed, of)| upload(seed, of));
    let biases = [n_ff, n_ff, n].map(|n_out| buffer(&device, &gaussian(40, n_experts * n_out)));
    let norm = buffer(&device, &gaussian(41, n));
    let (x, logits) = (gaussian(42, INVARIANT_ROWS * n), gaussian(43, INVARIANT_ROWS * n_experts));
    let layer = |rows: Range<usize>| {
        let mut y = buffer(&device, &x[rows.start * n..rows.end * n]);
        let logits = buffer(&device, &logits[rows.start * n_experts..rows.end * n_experts]);
        let routing = Routing {
            n_used: 2,
            scores: RouterScores::Softmax,
            normalizes: true,
            scale: 1.0,
            expert_groups: None,
        };
        let router = Router { routing, logits: &logits, selection_bias: None, scales: None, chosen: None };
        let weights = ExpertWeights {
            activation: Activation::Silu,
            gate: &gate,
            up: &up,
            down: &down,
            biases: Some(biases.each_ref()),
        };
        let norm = Some(Norm { weight: &norm, eps: 1e-5 });
        device.moe_ffn(&mut y, rows.len(), norm, router, weights, None).unwrap();
        bits(&device, &y, rows.len() * n)
    };
    let alone = [0, 1, 15].map(|row| (row, layer(row..row + 1)));
    for rows in [2, 16] {
        let together = layer(0..rows);
        for (row, alone) in alone.iter().filter(|(row, _)| *row < rows) {
            assert!(together[row * n..][..n] == *alone, "row {row} of {rows}");
        }
    }
}
