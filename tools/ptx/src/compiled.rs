//! Tests with kernels that NVRTC 13.0 compiled for `compute_80`: each `.ptx` of `kernels/` is
//! beside its `.cu`.

use crate::{Fault, Grid, Machine};

/// Inputs in device memory, then the output, then numbers: the fields of the kernels' structs.
struct Launched {
    machine: Machine,
    params: Vec<u8>,
}

impl Launched {
    fn new() -> Self {
        Self { machine: Machine::new(), params: Vec::new() }
    }

    fn input(mut self, bytes: &[u8]) -> Self {
        let address = self.machine.alloc(bytes.len());
        self.machine.write(address, bytes).unwrap();
        self.params.extend(address.to_le_bytes());
        self
    }

    fn output(mut self, bytes: usize) -> Self {
        self.params.extend(self.machine.alloc(bytes).to_le_bytes());
        self
    }

    fn number(mut self, bits: u32) -> Self {
        self.params.extend(bits.to_le_bytes());
        self
    }

    /// Runs the one kernel of `ptx`; returns the bytes of the output, whose address is parameter
    /// `output`.
    fn run(
        mut self,
        ptx: &str,
        name: &str,
        blocks: [u32; 3],
        threads: u32,
        output: usize,
        bytes: usize,
    ) -> Result<Vec<u8>, Fault> {
        let module = self.machine.load(ptx).unwrap();
        self.params.resize(self.params.len().next_multiple_of(8), 0);
        let grid = Grid { blocks, threads: [threads, 1, 1], shared_bytes: 0 };
        self.machine.launch(&module, name, grid, &self.params)?;
        let mut out = vec![0; bytes];
        let address = u64::from_le_bytes(self.params[8 * output..8 * output + 8].try_into().unwrap());
        self.machine.read(address, &mut out).unwrap();
        Ok(out)
    }
}

fn bytes<const N: usize, T: Copy>(values: &[T], to_bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| to_bytes(value)).collect()
}

#[test]
fn a_reduction_sums_in_the_order_of_its_shuffles() {
    let x: Vec<f32> = (0..777).map(|i| ((i * 31 % 97) as f32 - 48.0) / 16.0).collect();
    let launched = Launched::new().input(&bytes(&x, f32::to_le_bytes)).output(4);
    let launched = launched.number(x.len() as u32).number(0.5_f32.to_bits());
    let got = launched.run(include_str!("../kernels/reduce.ptx"), "reduce", [1, 1, 1], 96, 1, 4).unwrap();
    // Multiples of 1/32 below 2^12: every order of addition is exact.
    let want: f32 = x.iter().map(|x| x * 0.5).sum();
    assert_eq!(f32::from_le_bytes(got.try_into().unwrap()), want);
}

const MATMUL: &str = include_str!("../kernels/matmul.ptx");

/// Returns `[32, k] x [k, 24]` as computed by `ptx`, and the expected product.
fn matmul(ptx: &str, k: usize) -> Result<(Vec<f32>, Vec<f32>), Fault> {
    let (m, n) = (32, 24);
    let values = |len: usize, seed: usize| -> Vec<half::f16> {
        (0..len).map(|i| half::f16::from_f32((i * seed % 23) as f32 - 11.0)).collect()
    };
    let (a, b) = (values(m * k, 7), values(n * k, 13));
    let launched = Launched::new().input(&bytes(&a, half::f16::to_le_bytes));
    let launched = launched.input(&bytes(&b, half::f16::to_le_bytes)).output(4 * m * n);
    let launched = launched.number(n as u32).number(k as u32);
    let grid = [n as u32 / 8, m as u32 / 16, 1];
    let got = launched.run(ptx, "matmul", grid, 32, 2, 4 * m * n)?;
    let got = got.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
    let dot = |i: usize| -> f32 {
        let rows = a[i / n * k..].iter().zip(&b[i % n * k..]).take(k);
        rows.map(|(a, b)| a.to_f32() * b.to_f32()).sum()
    };
    Ok((got, (0..m * n).map(dot).collect()))
}

#[test]
fn tensor_cores_multiply_what_copies_bring() {
    for k in [16, 32, 80] {
        let (got, want) = matmul(MATMUL, k).unwrap();
        assert_eq!(got, want, "k {k}");
    }
}

/// Returns `ptx` without the last line that contains `what`.
fn without(ptx: &str, what: &str) -> String {
    let at = ptx.rfind(what).unwrap();
    format!("{}//{}", &ptx[..at], &ptx[at..])
}

#[test]
fn a_kernel_that_forgets_a_barrier_or_a_wait_is_found_out() {
    for forgotten in ["bar.sync", "cp.async.wait_group", "cp.async.wait_all"] {
        let fault = matmul(&without(MATMUL, forgotten), 80).unwrap_err();
        let is_reported = ["a race", "copied by thread"].iter().any(|what| fault.what.contains(what));
        assert!(is_reported && fault.line > 0, "without {forgotten}: {fault}");
    }
}

fn mixed(x: i32) -> i64 {
    const PRIMES: [i64; 8] = [2, 3, 5, 7, 11, 13, 17, 19];
    let digits: Vec<i64> = match x {
        0 => Vec::new(),
        x => x.unsigned_abs().to_string().bytes().rev().map(|digit| i64::from(digit - b'0')).collect(),
    };
    let n = digits.len();
    let sum: i64 = (0..n).map(|at| digits[(at * 5 + 1) % n] * PRIMES[at % 8] * 1_000_000_007).sum();
    let x64 = i64::from(x);
    match x & 7 {
        0 => sum ^ x64,
        1 => sum - i64::from(x.count_ones()),
        2 => sum + 3 * i64::from(x.leading_zeros()),
        3 => sum % 1009,
        4 => sum + (x as f32 * 0.5).floor() as i64,
        5 => -sum,
        6 => sum + f64::from(x & 0xffff).sqrt().round_ties_even() as i64,
        _ => sum + x64.min(100) + x64.max(-100),
    }
}

#[test]
fn switches_tables_local_arrays_and_wide_integers_work() {
    let mut x: Vec<i32> = vec![0, 1, -1, i32::MAX, i32::MIN, 16_777_217];
    x.extend((0..200).map(|i: i32| i.wrapping_mul(0x0765_4321) >> (i % 24)));
    let launched = Launched::new().input(&bytes(&x, i32::to_le_bytes)).output(8 * x.len());
    let launched = launched.number(x.len() as u32);
    let ptx = include_str!("../kernels/mixed.ptx");
    let got = launched.run(ptx, "mixed", [4, 1, 1], 64, 1, 8 * x.len()).unwrap();
    let got: Vec<i64> = got.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word)).collect();
    for (&x, got) in x.iter().zip(got) {
        assert_eq!(got, mixed(x), "{x}");
    }
}
