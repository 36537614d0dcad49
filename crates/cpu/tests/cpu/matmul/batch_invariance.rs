//! Batch invariance of products: the result of a row does not depend on the other rows of the
//! batch, on the threads, or on the location of the weights.

use kvant_backend::Gate;

use super::*;

/// Batch sizes: one, below, at and above every tile, and more than a row block.
const ROWS: [usize; 10] = [1, 2, 3, 5, 8, 9, 13, 37, 130, 520];
const MAX_ROWS: usize = 520;

/// All products of one row, by kind: `[rows, n_out]` each, as bits.
struct Bits {
    plain: Vec<u32>,
    with_bias: Vec<u32>,
    accumulated: Vec<u32>,
    gated: Vec<u32>,
}

/// One shape with its weights and input, for one device.
struct Case {
    w: CpuMatrix,
    gate: CpuMatrix,
    bias: CpuBuffer,
    gain: CpuBuffer,
    x: CpuBuffer,
}

impl Case {
    fn new(device: &CpuDevice, dtype: DType, n_out: usize, n_in: usize) -> Self {
        let (w, ..) = encoded(device, dtype, n_out, n_in, 40);
        let (gate, ..) = encoded(device, dtype, n_out, n_in, 41);
        let random = |seed, len| buffer(&gaussian(seed, len, 1.0));
        Self { w, gate, bias: random(42, n_out), gain: random(43, n_in), x: random(44, MAX_ROWS * n_in) }
    }

    fn products(&self, device: &CpuDevice, first_row: usize, rows: usize) -> Bits {
        let n_out = self.w.n_out();
        let old = vec![0.3; rows * n_out];
        let mut ys = [0; 4].map(|_| buffer(&old));
        let [plain, with_bias, accumulated, gated] = &mut ys;
        let norm = |is_there: bool| is_there.then_some(Norm { weight: &self.gain, eps: 1e-5 });
        let input = |is_normed| Input { x: &self.x, norm: norm(is_normed), first_row, rows };
        let output = |y, bias, accumulate| Output { w: &self.w, bias, y, accumulate };
        device.project(input(false), &mut [output(plain, None, false)]).unwrap();
        let mut outputs =
            [output(with_bias, Some(&self.bias), false), output(accumulated, Some(&self.bias), true)];
        device.project(input(true), &mut outputs).unwrap();
        device.gated_ffn(input(true), Activation::Gelu, &self.gate, &self.w, gated).unwrap();
        let [plain, with_bias, accumulated, gated] = ys.map(|y| bits(y.as_slice()));
        Bits { plain, with_bias, accumulated, gated }
    }

    /// Computes the gated layer from its unfused products.
    fn gated_apart(&self, device: &CpuDevice, row: usize) -> Vec<u32> {
        let n_out = self.w.n_out();
        let (mut g, mut u) = (buffer(&vec![0.0; n_out]), buffer(&vec![0.0; n_out]));
        let norm = Some(Norm { weight: &self.gain, eps: 1e-5 });
        let input = Input { x: &self.x, norm, first_row: row, rows: 1 };
        let output = |w, y| Output { w, bias: None, y, accumulate: false };
        device.project(input, &mut [output(&self.gate, &mut g), output(&self.w, &mut u)]).unwrap();
        device.gate(&mut u, n_out, &g, Gate::Gelu).unwrap();
        bits(u.as_slice())
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Returns a random shape: panels odd and even in number, the last one rarely full, rows rarely a
/// whole number of units.
fn random_shape(random: &mut Random, dtype: DType) -> (usize, usize) {
    let mut below = |n: u64| (random.bits() % n) as usize;
    let n_in = match dtype.block_len() {
        1 => 1 + below(300),
        32 => 32 * (1 + below(9)),
        len => len * (1 + below(3)),
    };
    (1 + below(70), n_in)
}

#[test]
fn products_are_batch_invariant() {
    let mut random = Random::new(45);
    for (isa, dtype) in Isa::available().into_iter().flat_map(|isa| WEIGHTS.map(|dtype| (isa, dtype))) {
        let (n_out, n_in) = random_shape(&mut random, dtype);
        let alone_device = CpuDevice::new(isa, 1).unwrap();
        let case = Case::new(&alone_device, dtype, n_out, n_in);
        let rows_alone: Vec<_> = (0..MAX_ROWS).map(|row| case.products(&alone_device, row, 1)).collect();
        for n_threads in 1..=4 {
            let device = CpuDevice::new(isa, n_threads).unwrap();
            let case = Case::new(&device, dtype, n_out, n_in);
            for rows in ROWS {
                let first_row = (random.bits() % (MAX_ROWS - rows + 1) as u64) as usize;
                let together = case.products(&device, first_row, rows);
                for (r, alone) in rows_alone[first_row..][..rows].iter().enumerate() {
                    let what = |op: &str| {
                        let row = first_row + r;
                        format!(
                            "{isa:?} {dtype} {n_out}x{n_in} {op}: row {row} among {rows}, {n_threads} threads"
                        )
                    };
                    let row = r * n_out..(r + 1) * n_out;
                    assert_eq!(together.plain[row.clone()], alone.plain, "{}", what("product"));
                    assert_eq!(together.with_bias[row.clone()], alone.with_bias, "{}", what("bias"));
                    assert_eq!(
                        together.accumulated[row.clone()],
                        alone.accumulated,
                        "{}",
                        what("accumulate")
                    );
                    assert_eq!(together.gated[row], alone.gated, "{}", what("gate"));
                }
            }
        }
        for (row, alone) in rows_alone.iter().enumerate().step_by(37) {
            assert_eq!(alone.gated, case.gated_apart(&alone_device, row), "{isa:?} {dtype} {row}");
        }
    }
}

/// As for Q, K and V, on more threads than there are cores and pairs of panels.
#[test]
fn fused_products_have_the_same_bits_on_any_number_of_threads() {
    for (isa, dtype) in
        Isa::available().into_iter().flat_map(|isa| [DType::Q4_0, DType::F16].map(|dtype| (isa, dtype)))
    {
        for rows in [1, 9, 130] {
            let products = |n_threads| {
                let (device, n_in) = (CpuDevice::new(isa, n_threads).unwrap(), 96);
                let weights = [200, 72, 16].map(|n_out| encoded(&device, dtype, n_out, n_in, 46).0);
                let x = buffer(&gaussian(47, rows * n_in, 1.0));
                let mut ys = weights.each_ref().map(|w| buffer(&vec![f32::NAN; rows * w.n_out()]));
                let outputs = weights.iter().zip(&mut ys);
                let mut outputs: Vec<_> =
                    outputs.map(|(w, y)| Output { w, bias: None, y, accumulate: false }).collect();
                device.project(Input { x: &x, norm: None, first_row: 0, rows }, &mut outputs).unwrap();
                ys.map(|y| bits(y.as_slice()))
            };
            let alone = products(1);
            for n_threads in [2, 3, 17, 33] {
                assert_eq!(products(n_threads), alone, "{isa:?} {dtype} {rows} rows, {n_threads} threads");
            }
        }
    }
}
