//! Times attention over a filled cache, for each KV type: `cargo run --release -p kvant-cpu --example attend --
//! [tokens] [rows] [K:V ...]`.
//!
//! The shape is that of Qwen2.5-1.5B: 28 layers, 2 KV heads of 128, 6 query heads each. Layers are walked in turn, so
//! that the cache is read from memory as in decoding. Keys and values are random tiles, repeated. Each figure is the
//! best of several walks, since the machine may be shared.

mod fresh;

use std::time::Instant;

use kvant_backend::{
    AttendParams, Backend, KvLayer, KvMemory, KvPart, Place, Result, Rows, StreamSizes, StreamSpec,
    TOKENS_PER_BLOCK,
};
use kvant_codec::random::Random;
use kvant_codec::{DType, Side, TILE};
use kvant_cpu::{CpuDevice, CpuPage, Isa};

use fresh::Fresh;

const LAYERS: usize = 28;
const KV_HEADS: usize = 2;
const GROUP: usize = 6;
const DIM: usize = 128;
/// Tiles that are made; the rest repeat them.
const DISTINCT: usize = 31;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let tokens = args.next().map_or(Ok(32768), |s| s.parse())?;
    let rows = args.next().map_or(Ok(1), |s| s.parse())?;
    let mut pairs = Vec::new();
    for pair in args {
        let (k, v) = pair.split_once(':').ok_or("pairs are K:V")?;
        pairs.push((k.parse()?, v.parse()?));
    }
    if pairs.is_empty() {
        pairs = DType::KV.map(|dtype| (dtype, dtype)).to_vec();
        pairs.push((DType::Q8_0, DType::Turbo3));
    }
    let isa = Isa::from_env()?;
    println!("{tokens} tokens, {rows} rows, {} kernels", isa.name());
    println!("{:>16} {:>8} {:>14} {:>8}", "K/V", "threads", "ns/(q head,key)", "GB/s");
    for (k, v) in pairs {
        let mut layers: Vec<_> = (0..LAYERS).map(|layer| filled(k, v, tokens, layer as u64)).collect();
        for threads in [1, 2] {
            let device = CpuDevice::new(isa, threads).expect("threads");
            let seconds = best_walk(&device, &mut layers, tokens, rows)?;
            let pairs: usize = (tokens - rows + 1..=tokens).sum::<usize>() * KV_HEADS * GROUP * LAYERS;
            let streams = layers.iter().flat_map(|(layer, _)| layer.streams());
            let bytes: usize = streams.map(|stream| tokens / TILE * stream.spec.main_layout().bytes()).sum();
            println!(
                "{:>16} {threads:>8} {:>14.3} {:>8.1}",
                format!("{k}/{v}"),
                seconds * 1e9 / pairs as f64,
                bytes as f64 / seconds / 1e9
            );
        }
    }
    Ok(())
}

/// A layer and its memory.
type Filled = (KvLayer, KvMemory<CpuPage>);

/// A layer of `tokens` tokens in blocks, all in whole tiles.
fn filled(k: DType, v: DType, tokens: usize, seed: u64) -> Filled {
    let spec = |dtype, side| StreamSpec { tail_tiles: 0, ..StreamSpec::new(dtype, side, DIM) };
    let mut sizes = StreamSizes::default();
    let streams = |dtype, side| [spec(dtype, side); KV_HEADS];
    let layer = KvLayer::new(streams(k, Side::K), streams(v, Side::V), None, &mut sizes);
    let mut memory = KvMemory::new(sizes);
    let blocks = 0..tokens.div_ceil(TOKENS_PER_BLOCK);
    memory.reserve(blocks, false, &Fresh::default()).expect("memory");
    for (index, stream) in layer.streams().enumerate() {
        let mut random = Random::new(64 * seed + index as u64);
        let layout = stream.spec.main_layout();
        let mut row = vec![0.0; stream.spec.dim()];
        let tiles: Vec<Vec<u8>> = (0..DISTINCT)
            .map(|_| {
                let mut tile = vec![0; layout.bytes()];
                for slot in 0..TILE {
                    random.fill_gaussian(&mut row, 1.0);
                    layout.put(&mut tile, slot, &row);
                }
                tile
            })
            .collect();
        for tile in 0..tokens.div_ceil(TILE) {
            let (layout, offset) = stream.locate(Place::Main(tile));
            let page = memory.page_mut(Place::Main(tile));
            page.as_mut_bytes()[offset..][..layout.bytes()].copy_from_slice(&tiles[tile % DISTINCT]);
        }
    }
    (layer, memory)
}

/// Seconds of the fastest walk over all layers.
fn best_walk(device: &CpuDevice, layers: &mut [Filled], tokens: usize, rows: usize) -> Result<f64> {
    let len = rows * KV_HEADS * GROUP * DIM;
    let mut values = vec![0.0; len];
    Random::new(0).fill_gaussian(&mut values, 1.0);
    let (mut q, mut out) = (device.buffer(len)?, device.buffer(len)?);
    device.write(&mut q, &values)?;
    let params = AttendParams {
        n_heads: KV_HEADS * GROUP,
        n_kv_heads: KV_HEADS,
        k_head_dim: DIM,
        v_head_dim: DIM,
        scale: 1.0 / (DIM as f32).sqrt(),
        soft_cap: None,
    };
    let rows = Rows { first: 0, n: rows, start: tokens - rows, coded: 0 };
    let mut best = f64::INFINITY;
    let began = Instant::now();
    while best.is_infinite() || began.elapsed().as_secs_f64() < 3.0 {
        let walk = Instant::now();
        for (layer, memory) in layers.iter_mut() {
            let part = KvPart { rows, layer, memory, band: 0, balance: None };
            device.attend(&params, &[part], &q, None, None, &mut out)?;
        }
        best = best.min(walk.elapsed().as_secs_f64());
    }
    Ok(best)
}
