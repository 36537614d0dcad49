//! Compares kernel sets on the GEMMs of one layer of a 1.5B model. Sets alternate, so that other
//! load on the machine affects all of them alike.
//!
//! `cargo run --release -p kvant-cpu --example sets -- [sets] [threads] [types] [rows] [rounds]`,
//! lists with commas: `avx512,amx 1 q4_0,q8_0 16,512 21`. The suffix `+bf16` on a set selects bf16
//! GEMMs for prefill.
//!
//! Milliseconds are medians; ratios are to the first set, medians over the rounds. With one thread
//! they count CPU time of that thread (Linux on x86-64), so that it needs no core of its own.

use std::time::Instant;

use kvant_backend::autotune::median;
use kvant_backend::{Activation, Backend, Input, Output, SharedBytes, WeightSource};
use kvant_codec::random::Random;
use kvant_codec::{DType, encode};
use kvant_cpu::{CpuBuffer, CpuDevice, CpuMatrix, Isa, PrefillPrecision};

/// Hidden size of the layer, its FFN size, and the total size of its KV heads.
const N: usize = 1536;
const N_FF: usize = 8960;
const N_KV: usize = 256;

fn output<'a>(w: &'a CpuMatrix, y: &'a mut CpuBuffer) -> Output<'a, CpuDevice> {
    Output { w, bias: None, y, accumulate: false }
}

struct Layer {
    device: CpuDevice,
    /// Query, key and value projections.
    attention: [CpuMatrix; 3],
    out: CpuMatrix,
    gate: CpuMatrix,
    up: CpuMatrix,
    down: CpuMatrix,
}

impl Layer {
    fn new(isa: Isa, math: PrefillPrecision, threads: usize, dtype: DType) -> Self {
        let device = CpuDevice::new(isa, threads).expect("threads");
        let device = device.with_prefill_precision(math).expect("a set that multiplies bf16");
        let matrix = |n_out, n_in| random_matrix(&device, dtype, n_out, n_in);
        let attention = [matrix(N, N), matrix(N_KV, N), matrix(N_KV, N)];
        let (out, gate, up, down) = (matrix(N, N), matrix(N_FF, N), matrix(N_FF, N), matrix(N, N_FF));
        Self { device, attention, out, gate, up, down }
    }

    /// Returns the seconds of all products for `rows` rows of `x`.
    fn seconds(&self, rows: usize, x: &CpuBuffer, hidden: &mut CpuBuffer, ys: &mut [CpuBuffer; 3]) -> f64 {
        let input = |x| Input { x, norm: None, first_row: 0, rows };
        let threads = self.device.info().n_threads;
        let origin = Instant::now();
        let started = seconds(threads, origin);
        let [q, k, v] = ys;
        let [wq, wk, wv] = &self.attention;
        self.device.project(input(x), &mut [output(wq, q), output(wk, k), output(wv, v)]).expect("shapes");
        self.device.project(input(x), &mut [output(&self.out, &mut *q)]).expect("shapes");
        self.device.gated_ffn(input(x), Activation::Silu, &self.gate, &self.up, hidden).expect("shapes");
        self.device.project(input(hidden), &mut [output(&self.down, q)]).expect("shapes");
        seconds(threads, origin) - started
    }
}

/// Returns the CPU time of this thread in seconds, or wall time where several threads work or the
/// system does not report CPU time.
#[cfg_attr(
    not(all(target_arch = "x86_64", target_os = "linux")),
    expect(unused_variables, reason = "one clock for all")
)]
fn seconds(threads: usize, origin: Instant) -> f64 {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if threads == 1 {
        let mut ran = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes to `ran` alone.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut ran) }, 0);
        return ran.tv_sec as f64 + ran.tv_nsec as f64 / 1e9;
    }
    origin.elapsed().as_secs_f64()
}

/// Returns a matrix of one random panel, repeated.
fn random_matrix(device: &CpuDevice, dtype: DType, n_out: usize, n_in: usize) -> CpuMatrix {
    let mut values = vec![0.0; 16 * n_in];
    Random::new(1).fill_gaussian(&mut values, 0.02);
    let row_bytes = dtype.row_bytes(n_in).expect("n_in is a multiple of 256");
    let mut panel = vec![0; 16 * row_bytes];
    encode(dtype, &values, &mut panel).expect("sizes match");
    let bytes: Vec<u8> = panel.iter().copied().cycle().take(n_out * row_bytes).collect();
    let source = WeightSource { dtype, n_out, n_in, bytes: SharedBytes::from(bytes) };
    device.upload_matrix(source).expect("a weight type")
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or_else(|| default.to_owned());
    let number = |text: &str| text.parse::<usize>().expect("a number");
    let list = |text: String| text.split(',').map(str::to_owned).collect::<Vec<_>>();
    let (threads, rounds) = (number(&arg(1, "1")), number(&arg(4, "21")));
    let rows: Vec<usize> = list(arg(3, "512")).iter().map(|rows| number(rows)).collect();
    let sets = list(arg(0, "avx512,amx"));
    let set = |name: &String| {
        let (name, math) = match name.strip_suffix("+bf16") {
            Some(name) => (name, PrefillPrecision::Bf16),
            None => (name.as_str(), PrefillPrecision::Exact),
        };
        (*Isa::available().iter().find(|isa| isa.name() == name).expect("a kernel set of this CPU"), math)
    };
    println!("{threads} threads, {rounds} rounds; ms, and speedup over {}", sets[0]);
    for name in list(arg(2, "q4_0,q8_0,q4_K,q6_K")) {
        let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name).expect("a type");
        let layer = |name: &String| {
            let (isa, math) = set(name);
            Layer::new(isa, math, threads, dtype)
        };
        let layers: Vec<Layer> = sets.iter().map(layer).collect();
        for &rows in &rows {
            let device = &layers[0].device;
            let mut x = device.buffer(rows * N).expect("memory");
            let mut values = vec![0.0; rows * N];
            Random::new(2).fill_gaussian(&mut values, 1.0);
            device.write(&mut x, &values).expect("sizes match");
            let mut hidden = device.buffer(rows * N_FF).expect("memory");
            let mut ys = [N, N_KV, N_KV].map(|n| device.buffer(rows * n).expect("memory"));
            let mut timed = vec![Vec::with_capacity(rounds); layers.len()];
            for _ in 0..rounds {
                for (layer, timed) in layers.iter().zip(&mut timed) {
                    timed.push(layer.seconds(rows, &x, &mut hidden, &mut ys));
                }
            }
            print!("{name:8} {rows:5} rows");
            for (set, of_set) in sets.iter().zip(&timed) {
                let ratio = median(timed[0].iter().zip(of_set).map(|(first, own)| first / own));
                let min = of_set.iter().copied().fold(f64::INFINITY, f64::min);
                let ms = 1e3 * median(of_set.iter().copied());
                print!(" | {set} {ms:8.2} (least {:8.2}) {ratio:5.2}", 1e3 * min);
            }
            println!();
        }
    }
}
