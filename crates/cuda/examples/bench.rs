//! GPU micro-benchmark, timed by the device clock: copy bandwidth, decode and prefill attention per
//! KV cache type, and GEMV/GEMM per weight type.
//!
//! `cargo run --release -p kvant-cuda --example bench -- [tokens] [index] [KV types] [weight
//! types]`, for example `65536 0 f16,q8_0/turbo3 q4_0`. An omitted type list means all types, and
//! `-` means none.
//!
//! Attention has the shape of Llama-3-8B: 8 KV heads of 128, 4 query heads each. Layers take turns,
//! so that the cache is read from memory as in decoding. Each figure is the best of several passes.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvant_backend::{
    AttendParams, Backend, BackendError, CountedPage, Input, KvBatchEntry, KvLayer, KvMemory, KvTensorSpec,
    Matrix as _, Output, Page, PageAllocator, TOKENS_PER_BLOCK, TensorSizes, TokenSpan, WeightSource,
};
use kvant_codec::random::Random;
use kvant_codec::tile::TILE;
use kvant_codec::{DType, Side};
use kvant_cuda::{CudaBuffer, CudaDevice, CudaMatrix, CudaPage};

/// Types of keys and values.
type Pair = (DType, DType);

type Result<T> = std::result::Result<T, BackendError>;

/// More layers than the L2 cache holds, even at 2 bits.
const LAYERS: usize = 4;
const KV_HEADS: usize = 8;
const GROUP: usize = 4;
const DIM: usize = 128;
/// Tokens per append while a cache is filled.
const CHUNK: usize = 512;
const REPEATS: usize = 10;
/// Prefill batch: tokens that go through attention and the GEMMs together.
const PREFILL: usize = 512;
/// Tokens of a prompt that is prefilled from position 0.
const PROMPT: usize = 8192;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let tokens = args.next().map_or(Ok(65_536), |text| text.parse())?;
    let device = CudaDevice::open(args.next().map_or(Ok(0), |text| text.parse())?)?;
    let pairs = args.next().map_or_else(|| Ok(all_pairs()), |text| list(&text, pair))?;
    let weights =
        args.next().map_or_else(|| Ok(DType::weights().collect()), |text| list(&text, str::parse))?;
    let bandwidth = device.copy_bandwidth()?;
    let info = device.info();
    println!("{}, {}: copies at {:.0} GB/s\n", info.name, info.kernels, bandwidth / 1e9);
    attention(&device, tokens, &pairs, bandwidth)?;
    matmuls(&device, &weights, bandwidth)?;
    Ok(())
}

/// Every type with itself, and a mixed pair.
fn all_pairs() -> Vec<Pair> {
    let alike = DType::KV.into_iter().map(|dtype| (dtype, dtype));
    alike.chain([(DType::Q8_0, DType::Turbo3)]).collect()
}

fn list<T, E>(
    text: &str,
    parse: impl Fn(&str) -> std::result::Result<T, E>,
) -> std::result::Result<Vec<T>, E> {
    text.split(',').filter(|&name| name != "-").map(parse).collect()
}

/// Parses `turbo3`, or keys and values as `q8_0/turbo3`.
fn pair(text: &str) -> std::result::Result<Pair, kvant_codec::CodecError> {
    let (k, v) = text.split_once('/').unwrap_or((text, text));
    Ok((k.parse()?, v.parse()?))
}

/// Returns the best time of `work` in seconds; the first run compiles and warms up.
fn best(device: &CudaDevice, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    work()?;
    (0..REPEATS).try_fold(f64::INFINITY, |best, _| Ok(best.min(device.timed(&mut work)?)))
}

fn random(device: &CudaDevice, len: usize, seed: u64) -> Result<CudaBuffer> {
    let (mut buffer, mut values) = (device.buffer(len)?, vec![0.0; len]);
    Random::new(seed).fill_gaussian(&mut values, 1.0);
    device.write(&mut buffer, &values)?;
    Ok(buffer)
}

fn attention(device: &CudaDevice, tokens: usize, pairs: &[Pair], bandwidth: f64) -> Result<()> {
    println!("attention over {tokens} tokens, {LAYERS} layers");
    println!(
        "{:>14} {:>10} {:>8} {:>8} {:>16} {:>16}",
        "K/V", "ms/layer", "GB/s", "of copy", "last 512, ms", "first 8192, ms"
    );
    for &(k, v) in pairs {
        match attention_of(device, k, v, tokens) {
            Ok((bytes, [decode, last, first])) => {
                let speed = bytes as f64 / decode;
                println!(
                    "{:>14} {:>10.4} {:>8.0} {:>7.0}% {:>16.3} {:>16.3}",
                    format!("{k}/{v}"),
                    decode * 1e3 / LAYERS as f64,
                    speed / 1e9,
                    100.0 * speed / bandwidth,
                    last * 1e3 / LAYERS as f64,
                    first * 1e3 / LAYERS as f64
                );
            }
            Err(error) => println!("{:>14} {error}", format!("{k}/{v}")),
        }
    }
    println!();
    Ok(())
}

/// Returns the bytes of the caches, and the seconds over all layers of one decoded token, of the
/// last [`PREFILL`] tokens, and of the first [`PROMPT`] in chunks of that size.
fn attention_of(device: &CudaDevice, k: DType, v: DType, tokens: usize) -> Result<(usize, [f64; 3])> {
    let mut layers =
        (0..LAYERS as u64).map(|seed| Filled::new(device, k, v, tokens, seed)).collect::<Result<Vec<_>>>()?;
    let bytes = layers.iter().flat_map(|filled| filled.memory.pages()).map(|page| page.n_bytes()).sum();
    let params = AttendParams {
        n_heads: KV_HEADS * GROUP,
        n_kv_heads: KV_HEADS,
        k_head_dim: DIM,
        v_head_dim: DIM,
        scale: 1.0 / (DIM as f32).sqrt(),
        soft_cap: None,
    };
    let mut time = |n: usize, starts: &[usize]| {
        let q = random(device, n * KV_HEADS * GROUP * DIM, 1)?;
        let mut out = device.buffer(n * KV_HEADS * GROUP * DIM)?;
        best(device, || {
            for filled in &mut layers {
                for &start in starts {
                    let (entry, step_tiles) = filled.entry(start, n);
                    device.attend(&params, &[entry], &q, None, Some(step_tiles), &mut out)?;
                }
            }
            Ok(())
        })
    };
    let rows = PREFILL.min(tokens);
    let prompt: Vec<_> = (0..PROMPT.min(tokens) / rows).map(|i| i * rows).collect();
    Ok((bytes, [time(1, &[tokens - 1])?, time(rows, &[tokens - rows])?, time(rows, &prompt)?]))
}

/// The KV cache of one layer, filled with random tokens.
struct Filled {
    layer: KvLayer,
    memory: KvMemory<CudaPage>,
    step_tiles: CudaPage,
}

/// Allocator without a budget.
struct Fresh<'a>(&'a CudaDevice, Arc<AtomicUsize>);

impl PageAllocator<CudaPage> for Fresh<'_> {
    fn page(&self, n_bytes: usize) -> Result<CountedPage<CudaPage>> {
        Ok(CountedPage::new(self.0.page(n_bytes)?, &self.1))
    }

    fn copy(&self, page: &CudaPage) -> Result<CountedPage<CudaPage>> {
        Ok(CountedPage::new(page.duplicate()?, &self.1))
    }
}

impl Filled {
    /// Appends `tokens` random tokens, in chunks as a model would.
    fn new(device: &CudaDevice, k: DType, v: DType, tokens: usize, seed: u64) -> Result<Self> {
        let mut sizes = TensorSizes::default();
        let specs = |dtype, side| [KvTensorSpec::new(dtype, side, DIM); KV_HEADS];
        let layer = KvLayer::new(specs(k, Side::K), specs(v, Side::V), None, &mut sizes);
        // Tiles of a chunk and the two before it.
        let step_tiles = device.page((CHUNK / TILE + 3) * layer.step_tile_bytes.max(1))?;
        let mut filled = Self { layer, memory: KvMemory::new(sizes), step_tiles };
        let keys = random(device, CHUNK * KV_HEADS * DIM, 2 * seed)?;
        let values = random(device, CHUNK * KV_HEADS * DIM, 2 * seed + 1)?;
        for start in (0..tokens).step_by(CHUNK) {
            let rows = rows(start, CHUNK.min(tokens - start), &filled.layer);
            let blocks = start / TOKENS_PER_BLOCK..rows.end().div_ceil(TOKENS_PER_BLOCK);
            let first = blocks.start.saturating_sub(1).min(filled.memory.blocks().len());
            filled.memory.reserve(first..blocks.end, false, &Fresh(device, Arc::default()))?;
            let entry = KvBatchEntry {
                rows,
                layer: &filled.layer,
                memory: &mut filled.memory,
                step_offset: 0,
                channel_scales: None,
            };
            device.kv_append(&mut [entry], &keys, &values, Some(&mut filled.step_tiles))?;
        }
        Ok(filled)
    }

    /// Returns the `n` tokens from `start` on as a step that has just been appended. The contents
    /// of the step tiles do not affect the timing.
    fn entry(&mut self, start: usize, n: usize) -> (KvBatchEntry<'_, CudaPage>, &CudaPage) {
        let rows = rows(start, n, &self.layer);
        (
            KvBatchEntry {
                rows,
                layer: &self.layer,
                memory: &mut self.memory,
                step_offset: 0,
                channel_scales: None,
            },
            &self.step_tiles,
        )
    }
}

fn rows(start: usize, n: usize, layer: &KvLayer) -> TokenSpan {
    let coded = layer.tensors().map(|stream| stream.spec).find(|spec| spec.tail_tiles > 0);
    TokenSpan { first: 0, n, start, first_tail_tile: coded.map_or(0, |spec| spec.first_tail_tile(start)) }
}

/// GEMM shapes `[n_out, n_in]` of Llama-3-8B: gate or up, attention output, down.
const SHAPES: [[usize; 2]; 3] = [[14_336, 4096], [4096, 4096], [4096, 14_336]];

fn matmuls(device: &CudaDevice, dtypes: &[DType], bandwidth: f64) -> Result<()> {
    for [n_out, n_in] in SHAPES {
        println!("products of [{n_out}, {n_in}]");
        println!("{:>10} {:>6} {:>10} {:>8} {:>8} {:>8}", "type", "rows", "us", "GB/s", "of copy", "TFLOP/s");
        for &dtype in dtypes {
            matmuls_of(device, dtype, [n_out, n_in], bandwidth)?;
        }
        println!();
    }
    Ok(())
}

/// Prints one line for each batch size.
fn matmuls_of(device: &CudaDevice, dtype: DType, [n_out, n_in]: [usize; 2], bandwidth: f64) -> Result<()> {
    let weights = match matrices(device, dtype, [n_out, n_in]) {
        Ok(weights) => weights,
        Err(error) => {
            println!("{:>10} {error}", dtype.name());
            return Ok(());
        }
    };
    let bytes = dtype.row_bytes(n_in).expect("they were encoded") * n_out;
    for rows in [1, 4, 8, 16, PREFILL] {
        let seconds = matmul_seconds(device, &weights, rows)?;
        let speed = bytes as f64 / seconds;
        println!(
            "{:>10} {rows:>6} {:>10.1} {:>8.0} {:>7.0}% {:>8.1}",
            dtype.name(),
            seconds * 1e6,
            speed / 1e9,
            100.0 * speed / bandwidth,
            2.0 * (rows * n_out * n_in) as f64 / seconds / 1e12
        );
    }
    Ok(())
}

/// Uploads enough matrices that none stays in the L2 cache when they take turns.
fn matrices(device: &CudaDevice, dtype: DType, [n_out, n_in]: [usize; 2]) -> Result<Vec<CudaMatrix>> {
    /// Several times the L2 cache.
    const ALL_BYTES: usize = 256 << 20;
    let unsupported = |error: kvant_codec::CodecError| BackendError::Unsupported {
        op: "matrix",
        requested: error.to_string(),
        has: "whole blocks".to_owned(),
    };
    let row_bytes = dtype.row_bytes(n_in).map_err(unsupported)?;
    let mut row = vec![0.0; n_in];
    Random::new(3).fill_gaussian(&mut row, 0.02);
    let mut row_code = vec![0; row_bytes];
    kvant_codec::encode(dtype, &row, &mut row_code).map_err(unsupported)?;
    let bytes = row_code.repeat(n_out);
    let source = || WeightSource { dtype, n_out, n_in, bytes: bytes.clone().into() };
    (0..ALL_BYTES.div_ceil(bytes.len())).map(|_| device.upload_matrix(source())).collect()
}

/// Returns the seconds of one matrix product with `rows` input rows.
fn matmul_seconds(device: &CudaDevice, weights: &[CudaMatrix], rows: usize) -> Result<f64> {
    let (n_out, n_in) = (weights[0].n_out(), weights[0].n_in());
    let x = random(device, rows * n_in, 4)?;
    let mut y = device.buffer(rows * n_out)?;
    let seconds = best(device, || {
        weights.iter().try_for_each(|w| {
            let input = Input { x: &x, norm: None, first_row: 0, rows };
            device.project(input, &mut [Output { w, bias: None, y: &mut y, accumulate: false }])
        })
    })?;
    Ok(seconds / weights.len() as f64)
}
