//! Measures GEMV and GEMM over the weights: GB/s for 1 to 8 rows, GMAC/s for more, beside the plain
//! read bandwidth of memory.
//!
//! `cargo run --release -p kvant-cpu --example weights -- [threads] [n_out] [n_in] [types, or all]
//! [MiB]`
//!
//! Matrices fill the given memory: 256 MiB by default, more than a cache holds. 0 selects a single
//! matrix, so that a small shape shows the kernels without memory latency. Figures are the best of
//! several runs; GB/s counts the bytes of the file's format.

use std::time::Instant;

use kvant_backend::{Backend, Input, Output, SharedBytes, WeightSource};
use kvant_codec::random::Random;
use kvant_codec::{DType, encode};
use kvant_cpu::{CpuDevice, CpuMatrix};

fn best_seconds(runs: usize, mut job: impl FnMut()) -> f64 {
    let timed = (0..runs).map(|_| {
        let start = Instant::now();
        job();
        start.elapsed().as_secs_f64()
    });
    timed.fold(f64::INFINITY, f64::min)
}

/// Returns matrices of one random panel repeated, at least one and as many as `n_bytes` hold, and
/// the seconds that packing them took.
fn matrices(
    device: &CpuDevice,
    dtype: DType,
    n_out: usize,
    n_in: usize,
    n_bytes: usize,
) -> (Vec<CpuMatrix>, f64) {
    let mut values = vec![0.0; 16 * n_in];
    Random::new(1).fill_gaussian(&mut values, 0.02);
    let row_bytes = dtype.row_bytes(n_in).expect("n_in is a multiple of 256");
    let mut panel = vec![0; 16 * row_bytes];
    encode(dtype, &values, &mut panel).expect("sizes match");
    let bytes: Vec<u8> = panel.iter().copied().cycle().take(n_out * row_bytes).collect();
    let bytes = SharedBytes::from(bytes);
    let n = n_bytes.div_ceil(bytes.len()).max(1);
    let start = Instant::now();
    let source = || WeightSource { dtype, n_out, n_in, bytes: bytes.clone() };
    let matrices = (0..n).map(|_| device.upload_matrix(source()).expect("a weight type")).collect();
    (matrices, start.elapsed().as_secs_f64())
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default| args.get(i).map_or(default, |v| v.parse().expect("a number"));
    let (threads, n_out, n_in) = (number(0, 1), number(1, 8960), number(2, 1536));
    let mib = number(4, 256);
    let selected = |dtype: &DType| match args.get(3) {
        Some(list) if list != "all" => list.split(',').any(|name| name == dtype.name()),
        _ => dtype.is_weight() && !matches!(dtype, DType::TQ3_1S | DType::TQ4_1S),
    };
    let device = CpuDevice::from_env(Some(threads)).expect("a kernel set of this CPU");
    println!(
        "{threads} threads, {} kernels, {n_out} x {n_in}; plain read {:.1} GB/s",
        device.isa().name(),
        device.read_bandwidth().expect("memory") / 1e9
    );
    println!(
        "{:8} {:>9} {:>7} {:>7} {:>7} {:>7} | {:>7} {:>7} {:>7}",
        "", "load GB/s", "1", "2", "4", "8", "16", "64", "512"
    );
    for dtype in DType::ALL.into_iter().filter(selected) {
        let (weights, load) = matrices(&device, dtype, n_out, n_in, mib << 20);
        let bytes = weights.len() * n_out * dtype.row_bytes(n_in).expect("checked above");
        print!("{:8} {:9.2}", dtype.name(), bytes as f64 / load / 1e9);
        for rows in [1, 2, 4, 8, 16, 64, 512] {
            let mut x = device.buffer(rows * n_in).expect("memory");
            let mut values = vec![0.0; rows * n_in];
            Random::new(2).fill_gaussian(&mut values, 1.0);
            device.write(&mut x, &values).expect("sizes match");
            let mut y = device.buffer(rows * n_out).expect("memory");
            let used = if rows > 8 { &weights[..1] } else { &weights };
            let seconds = best_seconds(if mib == 0 { 300 } else { 7 }, || {
                for w in used {
                    let input = Input { x: &x, norm: None, first_row: 0, rows };
                    let output = Output { w, bias: None, y: &mut y, accumulate: false };
                    device.project(input, &mut [output]).expect("shapes match");
                }
            });
            if rows > 8 {
                print!(
                    "{} {:7.1}",
                    if rows == 16 { " |" } else { "" },
                    (rows * n_out * n_in) as f64 / seconds / 1e9
                );
            } else {
                print!(" {:7.1}", bytes as f64 / seconds / 1e9);
            }
        }
        println!();
    }
}
