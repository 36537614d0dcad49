//! Times matrix products on an adapter, and copies of the same bytes.
//!
//! `cargo run --release -p kvant-wgpu --example matmul -- [adapter] [n_in] [n_out] [rounds] [ROWS
//! ...]`
//!
//! Types and copies take turns, so that other load on the machine affects all of them alike;
//! figures are medians of the rounds. A copy is a kernel that moves one value per thread from one
//! buffer to another, of as many bytes as the weights have in the file.

use std::time::Instant;

use kvant_backend::autotune::median;
use kvant_backend::{Backend, Columns, Input, Output, Result, WeightSource};
use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_wgpu::{WgpuBuffer, WgpuDevice, WgpuMatrix};

const TYPES: [DType; 5] = [DType::Q4_0, DType::Q8_0, DType::Q4K, DType::Q6K, DType::F16];
/// Launches per measurement.
const LAUNCHES: usize = 4;

/// Weights, and buffers of the same size.
struct Case {
    dtype: DType,
    w: WgpuMatrix,
    bytes: usize,
    from: WgpuBuffer,
    to: WgpuBuffer,
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut number = |or: usize| args.next().map_or(Ok(or), |text| text.parse::<usize>());
    let (adapter, n_in, n_out, rounds) = (number(0)?, number(1536)?, number(1536)?, number(7)?);
    let mut rows: Vec<usize> = args.map(|text| text.parse()).collect::<std::result::Result<_, _>>()?;
    if rows.is_empty() {
        rows = vec![1, 2, 4, 8, 64];
    }
    let device = WgpuDevice::open(adapter)?;
    println!("{}, weights [{n_out}, {n_in}]", device.info().kernels);
    let cases = TYPES.map(|dtype| case(&device, dtype, [n_out, n_in]));
    let mut cases = cases.into_iter().collect::<Result<Vec<_>>>()?;
    println!(
        "{:>6} {:>6} {:>10} {:>10} {:>12} {:>10}",
        "type", "rows", "ms", "copy, ms", "of a copy", "GMAC/s"
    );
    for rows in rows {
        let x = device.buffer(rows * n_in)?;
        let mut y = device.buffer(rows * n_out)?;
        let mut seconds = vec![[Vec::new(), Vec::new()]; cases.len()];
        for round in 0..=rounds {
            for (case, seconds) in cases.iter_mut().zip(&mut seconds) {
                let product = time(&device, || {
                    let input = Input { x: &x, norm: None, first_row: 0, rows };
                    let output = Output { w: &case.w, bias: None, y: &mut y, accumulate: false };
                    device.project(input, &mut [output])
                })?;
                let copy = time(&device, || {
                    let n = case.bytes / 4;
                    device.copy_columns(&case.from, [1, n], &mut case.to, Columns { width: n, first: 0 })
                })?;
                // Kernels are compiled in the first round.
                if round > 0 {
                    seconds[0].push(product);
                    seconds[1].push(copy);
                }
            }
        }
        for (case, seconds) in cases.iter().zip(seconds) {
            let [product, copy] = seconds.map(median);
            let macs = (rows * n_in * n_out) as f64 / product / 1e9;
            let (dtype, share, [product_ms, copy_ms]) =
                (case.dtype.name(), copy / product, [1e3 * product, 1e3 * copy]);
            println!("{dtype:>6} {rows:>6} {product_ms:>10.3} {copy_ms:>10.3} {share:>12.2} {macs:>10.2}");
        }
    }
    Ok(())
}

fn case(device: &WgpuDevice, dtype: DType, [n_out, n_in]: [usize; 2]) -> Result<Case> {
    let mut values = vec![0.0; n_out * n_in];
    Random::new(1).fill_gaussian(&mut values, 0.02);
    let mut bytes = vec![0; n_out * dtype.row_bytes(n_in).expect("rows of whole blocks")];
    kvant_codec::encode(dtype, &values, &mut bytes).expect("sizes agree");
    let n_bytes = bytes.len();
    let w = device.upload_matrix(WeightSource { dtype, n_out, n_in, bytes: bytes.into() })?;
    Ok(Case { dtype, w, bytes: n_bytes, from: device.buffer(n_bytes / 4)?, to: device.buffer(n_bytes / 4)? })
}

/// Returns the seconds of one launch.
fn time(device: &WgpuDevice, mut launch: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    (0..LAUNCHES).try_for_each(|_| launch())?;
    device.finish()?;
    Ok(start.elapsed().as_secs_f64() / LAUNCHES as f64)
}
