//! GPU micro-benchmark, timed by the device clock: copy bandwidth, attention per KV cache type by
//! context, products per weight type by rows, the memory that pages take, and the speed at which
//! they go to the host and back.
//!
//! `cargo run --release -p kvant-cuda --example bench -- [contexts] [index] [KV types] [weight
//! types]`, for example `8192,65536 0 f16,q8_0/turbo3 q4_0`. An omitted type list means all types,
//! and `-` means none.
//!
//! Attention has the shape of Llama-3-8B: 8 KV heads of 128, 4 query heads each. Layers take turns,
//! so that the cache is read from memory as in decoding. Each figure is the best of several passes.
//! A time is a fixed cost and that of bytes, T = a + bytes / s, which are fitted: for attention
//! over the contexts, for products of as many rows over the matrices.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

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
/// Layers of the model, whose blocks share a page, and bytes of pages that are allocated: enough
/// that the last slab, which they fill in part, is a small share.
const MODEL_LAYERS: usize = 32;
const PAGE_BYTES: usize = 4 << 30;
/// Pages that go to the host and back: those of 16,384 tokens.
const TRANSFERRED_PAGES: usize = 128;
const DIM: usize = 128;
/// Tokens per append while a cache is filled.
const CHUNK: usize = 512;
const REPEATS: usize = 10;
/// Prefill batch: tokens that go through attention and the GEMMs together.
const PREFILL: usize = 512;
/// Tokens of a prompt that is prefilled from position 0.
const PROMPT: usize = 8192;

/// Tokens in the cache.
const CONTEXTS: [usize; 3] = [8192, 65_536, 131_072];
/// Rows of the products.
const ROWS: [usize; 11] = [1, 2, 4, 8, 16, 17, 32, 64, 128, 256, PREFILL];

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let contexts = args.next().map_or_else(|| Ok(CONTEXTS.to_vec()), |text| list(&text, str::parse))?;
    let device = CudaDevice::open(args.next().map_or(Ok(0), |text| text.parse())?)?;
    let pairs = args.next().map_or_else(|| Ok(all_pairs()), |text| list(&text, pair))?;
    let weights =
        args.next().map_or_else(|| Ok(DType::weights().collect()), |text| list(&text, str::parse))?;
    let bandwidth = device.copy_bandwidth()?;
    let info = device.info();
    println!("{}, {}: copies at {:.0} GB/s\n", info.name, info.kernels, bandwidth / 1e9);
    memory(&device, &pairs)?;
    transfers(&device)?;
    attention(&device, &contexts, &pairs, bandwidth)?;
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

/// Prints what pages take of the device: blocks of 128 tokens of [`MODEL_LAYERS`] layers.
fn memory(device: &CudaDevice, pairs: &[Pair]) -> Result<()> {
    println!("pages of {MODEL_LAYERS} layers: number, MiB told, MiB that the device lost");
    for &(k, v) in pairs {
        let block = layer_of(k, v).1.block * MODEL_LAYERS;
        let free = || Ok::<_, BackendError>(device.free_bytes()?.unwrap_or(0));
        let before = free()?;
        let pages = (0..PAGE_BYTES / block).map(|_| device.page(block)).collect::<Result<Vec<_>>>()?;
        let told: usize = pages.iter().map(Page::n_bytes).sum();
        let [told, lost] = [told, before - free()?].map(|bytes| bytes as f64 / f64::from(1 << 20));
        let (n, more) = (pages.len(), 100.0 * (lost / told - 1.0));
        println!("{:>14} {n:>6} {told:>9.1} {lost:>9.1} ({more:+.1} %)", format!("{k}/{v}"));
    }
    println!();
    Ok(())
}

/// Prints how fast pages go to the host and back, as `--kv-ram` moves them.
fn transfers(device: &CudaDevice) -> Result<()> {
    let block = layer_of(DType::Turbo3, DType::Turbo3).1.block * MODEL_LAYERS;
    let mut pages = (0..TRANSFERRED_PAGES).map(|_| device.page(block)).collect::<Result<Vec<_>>>()?;
    let mut host = vec![0; block];
    let speed = |started: Instant| (TRANSFERRED_PAGES * block) as f64 / started.elapsed().as_secs_f64() / 1e9;
    let started = Instant::now();
    pages.iter().try_for_each(|page| device.read_page(page, &mut host))?;
    let out = speed(started);
    let started = Instant::now();
    pages.iter_mut().try_for_each(|page| device.write_page(page, &host))?;
    // Writes are queued: this waits for them.
    device.read_page(&pages[0], &mut host)?;
    println!("pages of {block} bytes: to the host at {out:.1} GB/s, back at {:.1}\n", speed(started));
    Ok(())
}

/// Lays out the tensors of a layer.
fn layer_of(k: DType, v: DType) -> (KvLayer, TensorSizes) {
    let mut sizes = TensorSizes::default();
    let specs = |dtype, side| [KvTensorSpec::new(dtype, side, DIM); KV_HEADS];
    (KvLayer::new(specs(k, Side::K), specs(v, Side::V), None, &mut sizes), sizes)
}

/// Seconds of work on so many bytes.
#[derive(Clone, Copy)]
struct Point {
    bytes: f64,
    seconds: f64,
}

/// Returns a in microseconds and s in GB/s of T = a + bytes / s, by least squares; `-` where all
/// points have as many bytes.
fn fitted(points: &[Point]) -> [String; 2] {
    let n = points.len() as f64;
    let [bytes, seconds] =
        [|p: &Point| p.bytes, |p: &Point| p.seconds].map(|of| points.iter().map(of).sum::<f64>() / n);
    let sum = |of: &dyn Fn(&Point) -> f64| points.iter().map(of).sum::<f64>();
    let spread = sum(&|p| (p.bytes - bytes).powi(2));
    if spread == 0.0 {
        return ["-", "-"].map(str::to_owned);
    }
    let slope = sum(&|p| (p.bytes - bytes) * (p.seconds - seconds)) / spread;
    [format!("{:.1}", (seconds - slope * bytes) * 1e6), format!("{:.0}", 1e-9 / slope)]
}

fn attention(device: &CudaDevice, contexts: &[usize], pairs: &[Pair], bandwidth: f64) -> Result<()> {
    println!("attention of one layer: us of one row by context, its fit, and ms of prefill");
    print!("{:>14}", "K/V");
    contexts.iter().for_each(|tokens| print!(" {tokens:>9}"));
    println!(" {:>7} {:>7} {:>8} {:>9} {:>11}", "a, us", "s, GB/s", "of copy", "last 512", "first 8192");
    for &(k, v) in pairs {
        print!("{:>14}", format!("{k}/{v}"));
        match attention_of(device, k, v, contexts) {
            Ok(AttentionTimes { decode, last, first }) => {
                decode.iter().for_each(|point| print!(" {:>9.1}", point.seconds * 1e6));
                let [fixed, speed] = fitted(&decode);
                let of_copy = decode.last().map_or(0.0, |p| 100.0 * p.bytes / p.seconds / bandwidth);
                let [last, first] = [last, first].map(|seconds| seconds * 1e3);
                println!(" {fixed:>7} {speed:>7} {of_copy:>7.0}% {last:>9.3} {first:>11.3}");
            }
            Err(error) => println!(" {error}"),
        }
    }
    println!();
    Ok(())
}

/// Times of attention of one layer.
struct AttentionTimes {
    /// One row, by context.
    decode: Vec<Point>,
    /// Seconds of the last [`PREFILL`] tokens of the longest context.
    last: f64,
    /// Seconds of the first [`PROMPT`], in chunks of that size.
    first: f64,
}

fn attention_of(device: &CudaDevice, k: DType, v: DType, contexts: &[usize]) -> Result<AttentionTimes> {
    let tokens = contexts.iter().copied().max().unwrap_or(0).max(1);
    let mut layers =
        (0..LAYERS as u64).map(|seed| Filled::new(device, k, v, tokens, seed)).collect::<Result<Vec<_>>>()?;
    let bytes: usize = layers[0].memory.pages().map(|page| page.n_bytes()).sum();
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
        let seconds = best(device, || {
            for filled in &mut layers {
                for &start in starts {
                    let (entry, step_tiles) = filled.entry(start, n);
                    device.attend(&params, &[entry], &q, None, Some(step_tiles), &mut out)?;
                }
            }
            Ok(())
        })?;
        Ok::<_, BackendError>(seconds / LAYERS as f64)
    };
    let mut decode = |&context: &usize| {
        let bytes = bytes as f64 * context as f64 / tokens as f64;
        Ok(Point { bytes, seconds: time(1, &[context - 1])? })
    };
    let decode = contexts.iter().map(&mut decode).collect::<Result<_>>()?;
    let rows = PREFILL.min(tokens);
    let prompt: Vec<_> = (0..PROMPT.min(tokens) / rows).map(|i| i * rows).collect();
    Ok(AttentionTimes { decode, last: time(rows, &[tokens - rows])?, first: time(rows, &prompt)? })
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
        let (layer, sizes) = layer_of(k, v);
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
    // [dtypes][shapes][rows]
    let mut times = vec![Vec::new(); dtypes.len()];
    for shape in SHAPES {
        println!("product with {shape:?}: us by rows");
        print_head("type", "of copy");
        let x = random(device, PREFILL * shape[1], 4)?;
        for (&dtype, times) in dtypes.iter().zip(&mut times) {
            match matmuls_of(device, dtype, shape, &x) {
                Ok(points) => {
                    print!("{:>10}", dtype.name());
                    points.iter().for_each(|point| print!(" {:>8.1}", point.seconds * 1e6));
                    println!(" {:>7.0}%", 100.0 * points[0].bytes / points[0].seconds / bandwidth);
                    times.push(points);
                }
                Err(error) => println!("{:>10} {error}", dtype.name()),
            }
        }
        println!();
    }
    println!("fit over these matrices: a in us, and s in GB/s, by rows");
    print_head("type", "");
    for (dtype, times) in dtypes.iter().zip(&times).filter(|(_, times)| times.len() == SHAPES.len()) {
        let fits =
            (0..ROWS.len()).map(|row| fitted(&times.iter().map(|points| points[row]).collect::<Vec<_>>()));
        let fits: Vec<_> = fits.collect();
        for (part, unit) in ["a", "s"].into_iter().enumerate() {
            print!("{:>10}", format!("{} {unit}", dtype.name()));
            fits.iter().for_each(|fit| print!(" {:>8}", fit[part]));
            println!();
        }
    }
    Ok(())
}

/// Prints the head of a table by rows, `of copy` of which is that of one.
fn print_head(first: &str, last: &str) {
    print!("{first:>10}");
    ROWS.iter().for_each(|rows| print!(" {rows:>8}"));
    println!(" {last:>8}");
}

/// Returns the time of a product with the first rows of `x`, by their number, with the bytes of its
/// weights.
fn matmuls_of(
    device: &CudaDevice,
    dtype: DType,
    [n_out, n_in]: [usize; 2],
    x: &CudaBuffer,
) -> Result<Vec<Point>> {
    let weights = matrices(device, dtype, [n_out, n_in])?;
    let bytes = (dtype.row_bytes(n_in).expect("they were encoded") * n_out) as f64;
    ROWS.iter()
        .map(|&rows| Ok(Point { bytes, seconds: matmul_seconds(device, &weights, x, rows)? }))
        .collect()
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
fn matmul_seconds(device: &CudaDevice, weights: &[CudaMatrix], x: &CudaBuffer, rows: usize) -> Result<f64> {
    let mut y = device.buffer(rows * weights[0].n_out())?;
    let seconds = best(device, || {
        weights.iter().try_for_each(|w| {
            let input = Input { x, norm: None, first_row: 0, rows };
            device.project(input, &mut [Output { w, bias: None, y: &mut y, accumulate: false }])
        })
    })?;
    Ok(seconds / weights.len() as f64)
}
