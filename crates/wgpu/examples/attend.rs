//! Times attention on an adapter over a filled cache, for each type: `cargo run --release -p kvant-wgpu --example attend --
//! [adapter] [tokens] [rows] [rounds] [LOOK-UPS,QUERIES,WORDS] [TYPE or K:V ...]`.
//!
//! The heads are those of Qwen2.5-1.5B, one layer of them: 2 KV heads of 128, 6 query heads each. Keys and values are random tiles,
//! repeated. Types take turns, so that what else the machine does meets them all; figures are medians of the rounds. Of one row each
//! *stage* is timed, what attention leaves out then: see `Backend::stages`.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use kvant_backend::{
    AttendParams, Backend, Held, KvLayer, KvMemory, KvPart, Page, Pages, Place, Result, Rows, StreamSizes,
    StreamSpec, TILES_PER_BLOCK, TOKENS_PER_BLOCK,
};
use kvant_codec::random::Random;
use kvant_codec::{DType, Side, TILE};
use kvant_wgpu::{AttendWays, LookUps, WgpuBuffer, WgpuDevice, WgpuPage};

const N_KV_HEADS: usize = 2;
const GROUP: usize = 6;
const HEAD_DIM: usize = 128;
/// Tiles that are made; the rest repeat them.
const DISTINCT: usize = 31;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let adapter = args.next().map_or(Ok(0), |text| text.parse())?;
    let tokens: usize = args.next().map_or(Ok(16_384), |text| text.parse())?;
    let rows: usize = args.next().map_or(Ok(1), |text| text.parse())?;
    let rounds: usize = args.next().map_or(Ok(7), |text| text.parse())?;
    let mut args = args.peekable();
    let ways = args.next_if(|text| text.contains(',')).map(|text| ways(&text)).transpose()?;
    let mut types = args.map(|text| pair(&text)).collect::<std::result::Result<Vec<_>, _>>()?;
    if types.is_empty() {
        let all = [DType::F16, DType::Q8_0, DType::Turbo4, DType::Turbo3, DType::Turbo2];
        types = all.map(|dtype| (dtype, dtype)).into();
    }
    let mut device = WgpuDevice::open(adapter)?;
    if let Some(ways) = ways {
        device = device.with_ways(ways)?;
    }
    println!("{tokens} tokens, {rows} rows, {}", device.info().kernels);
    let mut layers = types.iter().map(|&types| filled(&device, types, tokens)).collect::<Result<Vec<_>>>()?;
    let stages = if rows == 1 { device.stages() } else { &[] };
    let mut seconds = vec![vec![Vec::new(); stages.len().max(1)]; types.len()];
    let mut work = Work::new(&device, tokens, rows)?;
    for round in 0..=rounds {
        for (filled, seconds) in layers.iter_mut().zip(&mut seconds) {
            for (stage, seconds) in seconds.iter_mut().enumerate() {
                let took = work.attend(filled, (!stages.is_empty()).then_some(stage))?;
                // Kernels are compiled in the first round.
                if round > 0 {
                    seconds.push(took);
                }
            }
        }
    }
    let pairs = (tokens - rows + 1..=tokens).sum::<usize>() * N_KV_HEADS * GROUP;
    println!("{:>18} {:>22} {:>10} {:>16}", "K/V", "stage", "ms", "ns/(q head,key)");
    for ((k, v), seconds) in types.iter().zip(seconds) {
        for (stage, mut seconds) in seconds.into_iter().enumerate() {
            seconds.sort_by(f64::total_cmp);
            let median = seconds[seconds.len() / 2];
            let (name, ms) = (format!("{k}/{v}"), median * 1e3);
            let stage = stages.get(stage).copied().unwrap_or("attention");
            println!("{name:>18} {stage:>22} {ms:>10.2} {:>16.3}", median * 1e9 / pairs as f64);
        }
    }
    Ok(())
}

/// Ways to attend, as `select,8,1`.
fn ways(text: &str) -> std::result::Result<AttendWays, Box<dyn std::error::Error>> {
    let parts: Vec<_> = text.split(',').collect();
    let [look_ups, queries, words] = parts[..] else { return Err("ways are LOOK-UPS,QUERIES,WORDS".into()) };
    let known = LookUps::ALL.into_iter().find(|known| known.name() == look_ups);
    let look_ups =
        known.ok_or_else(|| format!("look-ups are {}", LookUps::ALL.map(LookUps::name).join(", ")))?;
    Ok(AttendWays { look_ups, queries: queries.parse()?, words: words.parse()? })
}

/// Types of keys and of values, or one for both.
fn pair(text: &str) -> std::result::Result<(DType, DType), Box<dyn std::error::Error>> {
    let (k, v) = text.split_once(':').unwrap_or((text, text));
    Ok((k.parse()?, v.parse()?))
}

/// A layer and its memory.
type Filled = (KvLayer, KvMemory<WgpuPage>);

/// Memory of the device, new whenever it is asked for.
struct Fresh<'a>(&'a WgpuDevice, Arc<AtomicUsize>);

impl Pages<WgpuPage> for Fresh<'_> {
    fn page(&self, n_bytes: usize) -> Result<Held<WgpuPage>> {
        Ok(Held::new(self.0.page(n_bytes)?, &self.1))
    }

    fn copy(&self, page: &WgpuPage) -> Result<Held<WgpuPage>> {
        Ok(Held::new(page.duplicate()?, &self.1))
    }
}

/// A layer of `tokens` tokens in blocks, all in whole tiles.
fn filled(device: &WgpuDevice, (k, v): (DType, DType), tokens: usize) -> Result<Filled> {
    let mut sizes = StreamSizes::default();
    let streams = |dtype, side| {
        vec![StreamSpec { tail_tiles: 0, ..StreamSpec::new(dtype, side, HEAD_DIM) }; N_KV_HEADS]
    };
    let layer = KvLayer::new(streams(k, Side::K), streams(v, Side::V), None, &mut sizes);
    let mut memory = KvMemory::new(sizes);
    let blocks = tokens.div_ceil(TOKENS_PER_BLOCK);
    memory.reserve(0..blocks, false, &Fresh(device, Arc::default()))?;
    let mut random = Random::new(1);
    let tiles: Vec<Vec<Vec<u8>>> = layer
        .streams()
        .map(|stream| (0..DISTINCT).map(|_| tile(&stream.spec, &mut random)).collect())
        .collect();
    for block in 0..blocks {
        let first = block * TILES_PER_BLOCK;
        let page = memory.page_mut(Place::Main(first));
        let mut bytes = vec![0; page.n_bytes()];
        for (stream, tiles) in layer.streams().zip(&tiles) {
            for tile in first..first + TILES_PER_BLOCK {
                let (layout, offset) = stream.locate(Place::Main(tile));
                bytes[offset..][..layout.bytes()].copy_from_slice(&tiles[tile % DISTINCT]);
            }
        }
        device.write_page(page, &bytes)?;
    }
    Ok((layer, memory))
}

fn tile(spec: &StreamSpec, random: &mut Random) -> Vec<u8> {
    let layout = spec.main_layout();
    let mut row = vec![0.0; spec.dim()];
    let mut tile = vec![0; layout.bytes()];
    for slot in 0..TILE {
        random.fill_gaussian(&mut row, 1.0);
        layout.put(&mut tile, slot, &row);
    }
    tile
}

/// The last rows of a sequence, and what they attend with.
struct Work<'a> {
    device: &'a WgpuDevice,
    params: AttendParams,
    rows: Rows,
    q: WgpuBuffer,
    out: WgpuBuffer,
}

impl<'a> Work<'a> {
    fn new(device: &'a WgpuDevice, tokens: usize, rows: usize) -> Result<Self> {
        let n_heads = N_KV_HEADS * GROUP;
        let len = rows * n_heads * HEAD_DIM;
        let mut values = vec![0.0; len];
        Random::new(0).fill_gaussian(&mut values, 1.0);
        let (mut q, out) = (device.buffer(len)?, device.buffer(len)?);
        device.write(&mut q, &values)?;
        let params = AttendParams {
            n_heads,
            n_kv_heads: N_KV_HEADS,
            k_head_dim: HEAD_DIM,
            v_head_dim: HEAD_DIM,
            scale: 1.0 / (HEAD_DIM as f32).sqrt(),
            soft_cap: None,
        };
        let rows = Rows { first: 0, n: rows, start: tokens - rows, coded: 0 };
        Ok(Self { device, params, rows, q, out })
    }

    /// Seconds that attention takes, or a stage of it.
    fn attend(&mut self, (layer, memory): &mut Filled, stage: Option<usize>) -> Result<f64> {
        let Self { device, params, rows, q, out } = self;
        device.finish()?;
        let started = Instant::now();
        let part = KvPart { rows: *rows, layer, memory, band: 0, balance: None };
        match stage {
            Some(stage) => device.attend_staged(stage, params, &[part], q, None, out)?,
            None => device.attend(params, &[part], q, None, None, out)?,
        }
        device.finish()?;
        Ok(started.elapsed().as_secs_f64())
    }
}
