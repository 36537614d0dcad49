//! Measures attention over a filled KV cache, for each KV type:
//! `cargo run --release -p kvant-cpu --example attend -- [tokens] [rows] [K:V ...] [latent:K:V ...]
//! [latent:TYPE ...]`.
//!
//! The default shape is that of Qwen2.5-1.5B: 28 layers, 2 KV heads of dimension 128, grouped-query
//! attention with 6 query heads each. `latent` selects the shape of DeepSeek-V2-Lite (MLA): 27
//! layers, 16 query heads on one latent vector of 512 followed by 64 RoPE values, stored separately
//! as keys and as values, or once as a shared-KV tensor of one type. Layers run in turn, so that
//! the cache is read from memory as in decode. Keys and values are random tiles, repeated. Each
//! figure is the best of several passes, since the machine may be shared.

mod fresh;

use std::time::Instant;

use kvant_backend::{
    AttendParams, Backend, KvBatchEntry, KvLayer, KvMemory, KvTensorSpec, Result, TOKENS_PER_BLOCK,
    TensorSizes, TileLocation, TokenSpan,
};
use kvant_codec::random::Random;
use kvant_codec::{DType, Side, TILE};
use kvant_cpu::{CpuDevice, CpuPage, Isa};

use fresh::Fresh;

/// An attention shape: query heads, and the KV cache they read.
struct Shape {
    layers: usize,
    n_kv_heads: usize,
    group: usize,
    k_head_dim: usize,
    v_head_dim: usize,
}

const QWEN: Shape = Shape { layers: 28, n_kv_heads: 2, group: 6, k_head_dim: 128, v_head_dim: 128 };
const LATENT: Shape = Shape { layers: 27, n_kv_heads: 1, group: 16, k_head_dim: 576, v_head_dim: 512 };

/// KV types of keys and of values; a shared-KV tensor has no type of values.
#[derive(Clone, Copy)]
struct Types(DType, Option<DType>);

/// Parses a shape and its KV types from an argument.
fn case(text: &str) -> std::result::Result<(&'static Shape, Types), Box<dyn std::error::Error>> {
    let of = |text: &str| match text.split_once(':') {
        Some((k, v)) => Ok::<_, Box<dyn std::error::Error>>(Types(k.parse()?, Some(v.parse()?))),
        None => Ok(Types(text.parse()?, None)),
    };
    match text.strip_prefix("latent:") {
        Some(types) => Ok((&LATENT, of(types)?)),
        None => match of(text)? {
            Types(_, None) => Err("pairs are K:V".into()),
            types => Ok((&QWEN, types)),
        },
    }
}

/// Number of distinct tiles; the rest repeat them.
const DISTINCT: usize = 31;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let tokens = args.next().map_or(Ok(32768), |s| s.parse())?;
    let rows = args.next().map_or(Ok(1), |s| s.parse())?;
    let mut cases = args.map(|text| case(&text)).collect::<std::result::Result<Vec<_>, _>>()?;
    if cases.is_empty() {
        let pairs = DType::KV.map(|dtype| (dtype, dtype)).into_iter().chain([(DType::Q8_0, DType::Turbo3)]);
        cases = pairs.map(|(k, v)| (&QWEN, Types(k, Some(v)))).collect();
    }
    let isa = Isa::from_env()?;
    println!("{tokens} tokens, {rows} rows, {} kernels", isa.name());
    println!(
        "{:>16} {:>8} {:>14} {:>10} {:>8} {:>8}",
        "K/V", "threads", "ns/(q head,key)", "ms/step", "GB/s", "B/token"
    );
    for (shape, types) in cases {
        let mut layers: Vec<_> =
            (0..shape.layers).map(|layer| filled(shape, types, tokens, layer as u64)).collect();
        let Types(k, v) = types;
        let name = v.map_or_else(|| format!("{k}, shared_kv"), |v| format!("{k}/{v}"));
        for threads in [1, 2] {
            let device = CpuDevice::new(isa, threads).expect("threads");
            let seconds = best_pass(&device, shape, &mut layers, tokens, rows)?;
            let heads = shape.n_kv_heads * shape.group * shape.layers;
            let pairs: usize = (tokens - rows + 1..=tokens).sum::<usize>() * heads;
            let tensors = layers.iter().flat_map(|(layer, _)| layer.tensors());
            let bytes: usize = tensors.map(|tensor| tokens / TILE * tensor.spec.main_layout().bytes()).sum();
            println!(
                "{name:>16} {threads:>8} {:>14.3} {:>10.3} {:>8.1} {:>8}",
                seconds * 1e9 / pairs as f64,
                seconds * 1e3,
                bytes as f64 / seconds / 1e9,
                bytes / tokens / shape.layers
            );
        }
    }
    Ok(())
}

/// A layer and its KV memory.
type Filled = (KvLayer, KvMemory<CpuPage>);

/// Returns a layer of `tokens` tokens in blocks, all in whole tiles.
fn filled(shape: &Shape, Types(k, v): Types, tokens: usize, seed: u64) -> Filled {
    let Shape { n_kv_heads, k_head_dim, v_head_dim, .. } = *shape;
    let (keys, values) = match v {
        Some(v) => {
            (KvTensorSpec::new(k, Side::K, k_head_dim), Some(KvTensorSpec::new(v, Side::V, v_head_dim)))
        }
        None => (KvTensorSpec::new_shared_kv(k, k_head_dim, v_head_dim), None),
    };
    let mut sizes = TensorSizes::default();
    let tensors = |spec| vec![KvTensorSpec { tail_tiles: 0, ..spec }; n_kv_heads];
    let layer = KvLayer::new(tensors(keys), values.map(tensors).unwrap_or_default(), None, &mut sizes);
    let mut memory = KvMemory::new(sizes);
    let blocks = 0..tokens.div_ceil(TOKENS_PER_BLOCK);
    memory.reserve(blocks, false, &Fresh::default()).expect("memory");
    for (index, tensor) in layer.tensors().enumerate() {
        let mut random = Random::new(64 * seed + index as u64);
        let layout = tensor.spec.main_layout();
        let mut row = vec![0.0; tensor.spec.stored_dim()];
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
            let (layout, offset) = tensor.locate(TileLocation::Main(tile));
            let page = memory.page_mut(TileLocation::Main(tile));
            page.as_mut_bytes()[offset..][..layout.bytes()].copy_from_slice(&tiles[tile % DISTINCT]);
        }
    }
    (layer, memory)
}

/// Returns the seconds of the fastest pass over all layers.
fn best_pass(
    device: &CpuDevice,
    shape: &Shape,
    layers: &mut [Filled],
    tokens: usize,
    rows: usize,
) -> Result<f64> {
    let Shape { n_kv_heads, group, k_head_dim, v_head_dim, .. } = *shape;
    let n_heads = n_kv_heads * group;
    let len = rows * n_heads * k_head_dim;
    let mut values = vec![0.0; len];
    Random::new(0).fill_gaussian(&mut values, 1.0);
    let (mut q, mut out) = (device.buffer(len)?, device.buffer(len)?);
    device.write(&mut q, &values)?;
    let params = AttendParams {
        n_heads,
        n_kv_heads,
        k_head_dim,
        v_head_dim,
        scale: 1.0 / (k_head_dim as f32).sqrt(),
        soft_cap: None,
    };
    let rows = TokenSpan { first: 0, n: rows, start: tokens - rows, first_tail_tile: 0 };
    let mut best = f64::INFINITY;
    let start = Instant::now();
    while best.is_infinite() || start.elapsed().as_secs_f64() < 3.0 {
        let pass_start = Instant::now();
        for (layer, memory) in layers.iter_mut() {
            let part = KvBatchEntry { rows, layer, memory, step_offset: 0, channel_scales: None };
            device.attend(&params, &[part], &q, None, None, &mut out)?;
        }
        best = best.min(pass_start.elapsed().as_secs_f64());
    }
    Ok(best)
}
