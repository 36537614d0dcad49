//! Measures the cost of encoding the KV cache: `cargo run --release -p kvant-cpu --example append`.
//!
//! Appends 512 tokens at once to one layer of 2 KV heads of dimension 128 (Qwen2.5-1.5B has 28 such
//! layers) on one thread, in f16 and in each coded KV type. Each figure is the best of many runs.

mod fresh;

use std::time::Instant;

use kvant_backend::{
    Backend, KvBatchEntry, KvLayer, KvMemory, KvTensorSpec, Result, TOKENS_PER_BLOCK, TensorSizes, TokenSpan,
};
use kvant_codec::random::Random;
use kvant_codec::{DType, Side};
use kvant_cpu::{CpuDevice, Isa};

use fresh::Fresh;

const KV_HEADS: usize = 2;
const DIM: usize = 128;
const TOKENS: usize = 512;
/// Runs per type.
const TIMES: usize = 40;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let isa = Isa::from_env()?;
    let device = CpuDevice::new(isa, 1)?;
    println!("{} kernels, one thread\n{:>10} {:>12}", isa.name(), "type", "ns per value");
    for dtype in DType::KV {
        println!(
            "{:>10} {:>12.2}",
            dtype.name(),
            append(&device, dtype)? * 1e9 / (2 * KV_HEADS * DIM * TOKENS) as f64
        );
    }
    Ok(())
}

/// Returns the seconds that one append takes.
fn append(device: &CpuDevice, dtype: DType) -> Result<f64> {
    let spec = |side| KvTensorSpec { tail_tiles: 0, centres: false, ..KvTensorSpec::new(dtype, side, DIM) };
    let mut sizes = TensorSizes::default();
    let tensors = |side| [spec(side); KV_HEADS];
    let layer = KvLayer::new(tensors(Side::K), tensors(Side::V), None, &mut sizes);
    let mut memory = KvMemory::new(sizes);
    memory.reserve(0..TOKENS / TOKENS_PER_BLOCK, false, &Fresh::default())?;
    let mut values = vec![0.0; TOKENS * KV_HEADS * DIM];
    Random::new(1).fill_gaussian(&mut values, 1.0);
    let (mut k, mut v) = (device.buffer(values.len())?, device.buffer(values.len())?);
    device.write(&mut k, &values)?;
    device.write(&mut v, &values)?;
    let rows = TokenSpan { first: 0, n: TOKENS, start: 0, first_tail_tile: 0 };
    let mut best = f64::INFINITY;
    for _ in 0..TIMES {
        let part =
            KvBatchEntry { rows, layer: &layer, memory: &mut memory, step_offset: 0, channel_scales: None };
        let start = Instant::now();
        device.kv_append(&mut [part], &k, &v, None)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}
