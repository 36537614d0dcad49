//! Times attention over a filled cache, for each KV type: `cargo run --release -p kvant-cpu --example attend --
//! [tokens] [rows] [K:V ...]`.
//!
//! The shape is that of Qwen2.5-1.5B: 28 layers, 2 KV heads of 128, 6 query heads each. Layers are walked in turn, so
//! that the cache is read from memory as in decoding. Keys and values are random tiles, repeated. Each figure is the
//! best of several walks, since the machine may be shared.

use std::time::Instant;

use kvant_backend::{AttendParams, Backend, KvLayer, Place, Stream, StreamSpec};
use kvant_codec::random::Random;
use kvant_codec::{DType, Side, TILE};
use kvant_cpu::{CpuDevice, CpuPage, Isa};

const LAYERS: usize = 28;
const KV_HEADS: usize = 2;
const GROUP: usize = 6;
const DIM: usize = 128;
/// Tiles that are made; the rest repeat them.
const DISTINCT: usize = 31;

fn main() -> Result<(), Box<dyn std::error::Error>> {
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
        let layers =
            (0..LAYERS).map(|layer| filled(k, v, tokens, layer as u64)).collect::<Result<Vec<_>, _>>()?;
        for threads in [1, 2] {
            let device = CpuDevice::new(isa, threads);
            let seconds = best_walk(&device, &layers, tokens, rows)?;
            let pairs: usize = (tokens - rows + 1..=tokens).sum::<usize>() * KV_HEADS * GROUP * LAYERS;
            let streams = layers.iter().flat_map(|layer| layer.k.iter().chain(&layer.v));
            let bytes: usize =
                streams.map(|stream| tokens / TILE * stream.spec().main_layout().bytes()).sum();
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

/// A layer of `tokens` tokens in the main pages, all in whole tiles.
fn filled(
    k: DType,
    v: DType,
    tokens: usize,
    seed: u64,
) -> Result<KvLayer<CpuPage>, kvant_backend::BackendError> {
    let stream = |dtype, side, seed| {
        let mut alloc = |bytes| Ok(CpuPage::zeroed(bytes));
        let spec = StreamSpec { tail_tiles: 0, ..StreamSpec::new(dtype, side, DIM) };
        let mut stream = Stream::new(spec, &mut alloc)?;
        stream.reserve(tokens, &mut alloc)?;
        let mut random = Random::new(seed);
        let layout = spec.main_layout();
        let mut row = vec![0.0; spec.dim()];
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
            let (layout, page, offset) = stream.tile_mut(Place::Main(tile));
            page.as_mut_bytes()[offset..][..layout.bytes()].copy_from_slice(&tiles[tile % DISTINCT]);
        }
        let plan = stream.plan(tokens);
        stream.commit(plan);
        Ok(stream)
    };
    let heads = |dtype, side, seed: u64| {
        (0..KV_HEADS as u64).map(move |head| stream(dtype, side, 64 * seed + head)).collect::<Result<_, _>>()
    };
    Ok(KvLayer { k: heads(k, Side::K, 2 * seed)?, v: heads(v, Side::V, 2 * seed + 1)? })
}

/// Seconds of the fastest walk over all layers.
fn best_walk(
    device: &CpuDevice,
    layers: &[KvLayer<CpuPage>],
    tokens: usize,
    rows: usize,
) -> Result<f64, kvant_backend::BackendError> {
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
        first_row: 0,
        start: tokens - rows,
        rows,
    };
    let mut best = f64::INFINITY;
    let began = Instant::now();
    while best.is_infinite() || began.elapsed().as_secs_f64() < 3.0 {
        let walk = Instant::now();
        for layer in layers {
            device.attend(&params, &q, layer, &mut out)?;
        }
        best = best.min(walk.elapsed().as_secs_f64());
    }
    Ok(best)
}
