//! Attention: one kernel for every pair of types. What a row sees where is worked out on the host and handed over as a list.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use kvant_backend::{
    AttendParams, BackendError, BalanceLayout, KvLayer, KvPart, KvStream, Result, TILES_PER_BLOCK,
    TOKENS_PER_BLOCK,
};
use kvant_codec::tile::{Side, TILE};
use kvant_codec::{Codebook, Rotation, Trellis, block32, trellis};

use crate::constants::Constants;
use crate::each::NUMBERS;
use crate::kv::{NONE, TILES, balance, has_centres, number, word};
use crate::{Gpu, Part, Source, WgpuPage, groups, kv};

pub(crate) static SOURCE: Source = Source {
    parts: &[
        NUMBERS,
        TILES,
        Part { name: "rotation.wgsl", text: include_str!("../kv/rotation.wgsl") },
        Part { name: "read.wgsl", text: include_str!("read.wgsl") },
        Part { name: "attend.wgsl", text: include_str!("attend.wgsl") },
    ],
    constants,
};

const OP: &str = "attend";
/// Tokens of a span, which a group of threads attends to.
const SPAN: usize = 1024;
/// Values that a span leaves beside the sum of its own.
const SUMS: usize = 3;
/// The most bytes that spans leave at once; more rows take several launches.
const LEFT_BYTES: usize = 32 << 20;

/// Dims that each thread adds up, at most.
const MOST_EACH: usize = 5;
/// The most dims of a stored head.
const MOST_DIMS: usize = MOST_EACH * TOKENS_PER_BLOCK;

fn constants() -> Constants {
    let masks = Rotation::kv(128);
    let words = |mask: u128| [0, 32, 64, 96].map(|by| (mask >> by) as u32);
    let books = [Codebook::GAUSS2, Codebook::GAUSS3, Codebook::GAUSS4];
    let centroids = books.iter().flat_map(|book| book.centroids().iter().copied().chain([0.0; 16]).take(16));
    let trellis_levels = [Trellis::TURBO2T, Trellis::TURBO3T]
        .into_iter()
        .flat_map(|trellis| trellis.levels().map(|level| f32::from(level) * Trellis::CENTROID_STEP));
    let with_factors = [128, 64, 32].into_iter().fold(kv::constants(), |constants, n: usize| {
        constants.float(&format!("FACTOR_{n}"), (1.0 / (n as f64).sqrt()) as f32)
    });
    with_factors
        .vector("SIGNS_BEFORE", words(masks.before()))
        .vector("SIGNS_AFTER", words(masks.after()))
        .floats("CENTROIDS", &centroids.collect::<Vec<_>>())
        .whole("TRELLIS_WINDOWS", trellis::LEVELS)
        .floats("TRELLIS_LEVELS", &trellis_levels.collect::<Vec<_>>())
        .float("Q8_0_ZERO", block32::Q8_0_ZERO.into())
        .float("Q4_0_ZERO", block32::Q4_0_ZERO.into())
        .float("LEAST", f32::MIN)
        .whole("THREADS", TOKENS_PER_BLOCK)
        .whole("STREAM", STREAM)
        .whole("SUMS", SUMS)
        .whole("CHUNKS_PER_SPAN", SPAN / TOKENS_PER_BLOCK)
        .whole("TILES_PER_BLOCK", TILES_PER_BLOCK)
        .whole("MOST_EACH", MOST_EACH)
        .whole("MOST_DIMS", MOST_DIMS)
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    heads: u32,
    group: u32,
    k_head_dim: u32,
    v_head_dim: u32,
    rows: u32,
    first_row: u32,
    first_span: u32,
    spans: u32,
    part_values: u32,
    windows_at: u32,
    streams_at: u32,
    has_sinks: u32,
    scale: f32,
    soft_cap: f32,
    not_a_number: u32,
}

/// Activations that attention reads and writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffers<'a> {
    pub q: &'a wgpu::Buffer,
    pub sinks: Option<&'a wgpu::Buffer>,
    pub out: &'a wgpu::Buffer,
}

/// Attention of the rows of each part. The shapes have been checked.
pub(crate) fn attend(
    gpu: &Gpu,
    arena: &wgpu::Buffer,
    params: &AttendParams,
    parts: &[KvPart<'_, WgpuPage>],
    band: Option<&WgpuPage>,
    Buffers { q, sinks, out }: Buffers<'_>,
) -> Result<()> {
    if params.n_kv_heads == 0 || parts.iter().all(|part| part.rows.n == 0) {
        return Ok(());
    }
    let list = List::new(parts, band)?;
    let value_dims = parts.iter().flat_map(|part| part.layer.streams()).map(|stream| stream.spec.value_dim());
    let part_values = SUMS + value_dims.max().unwrap_or(0);
    let numbers = Params {
        heads: params.n_heads as u32,
        group: (params.n_heads / params.n_kv_heads) as u32,
        k_head_dim: params.k_head_dim as u32,
        v_head_dim: params.v_head_dim as u32,
        first_span: list.spans.start as u32,
        spans: list.spans.len() as u32,
        part_values: part_values as u32,
        windows_at: list.windows_at as u32,
        streams_at: list.streams_at as u32,
        has_sinks: sinks.is_some().into(),
        scale: params.scale,
        soft_cap: params.soft_cap.unwrap_or(0.0),
        not_a_number: f32::NAN.to_bits(),
        ..Params::zeroed()
    };
    let (attend, join) = (gpu.kernel(&SOURCE, "attend")?, gpu.kernel(&SOURCE, "join_spans")?);
    let (spans, heads) = (list.spans.len(), params.n_heads);
    let bytes_of_row = heads * spans * part_values * size_of::<f32>();
    let room = LEFT_BYTES.min(gpu.max_binding());
    let at_once = if spans == 1 { list.rows } else { (room / bytes_of_row).clamp(1, list.rows) };
    let left = match spans {
        1 => None,
        _ => Some(gpu.scratch(at_once * bytes_of_row, "what spans of attention leave")?),
    };
    for first in (0..list.rows).step_by(at_once) {
        let rows = at_once.min(list.rows - first);
        let numbers = Params { rows: rows as u32, first_row: first as u32, ..numbers };
        let left_at = (5, left.as_deref().unwrap_or(gpu.scrap()));
        let bindings = [(1, q), (2, sinks.unwrap_or(gpu.nothing())), (3, arena), (4, out), left_at];
        gpu.launch(&attend, groups(rows * heads, spans), &numbers, &list.words, &bindings)?;
        if spans > 1 {
            let bindings = [(3, arena), (4, out), left_at];
            gpu.launch(&join, groups(rows * heads, 1), &numbers, &list.words, &bindings)?;
        }
    }
    Ok(())
}

/// What rows see where; `Params::list` of `attend.wgsl` says how it is laid out.
struct List {
    words: Vec<u32>,
    rows: usize,
    /// That any of the rows sees; one at least.
    spans: Range<usize>,
    windows_at: usize,
    streams_at: usize,
}

impl List {
    fn new(parts: &[KvPart<'_, WgpuPage>], band: Option<&WgpuPage>) -> Result<Self> {
        let positions = |part: &KvPart<'_, WgpuPage>| part.rows.start..part.rows.end();
        let (mut words, mut first_span, mut end_span) = (Vec::new(), usize::MAX, 0);
        for (index, part) in parts.iter().enumerate() {
            for (row, position) in part.rows.range().zip(positions(part)) {
                let oldest = part.layer.oldest(position);
                words.extend([row, position, oldest, index].map(|n| n as u32));
                first_span = first_span.min(oldest / SPAN);
                end_span = end_span.max(position / SPAN + 1);
            }
        }
        let (rows, windows_at) = (words.len() / 4, words.len());
        for part in parts {
            for position in positions(part) {
                let window = |stream: &KvStream| stream.spec.window(position / TILE) as u32;
                let heads = (0..part.layer.k.len()).map(|head| streams(part.layer, head).map(window));
                words.extend(heads.flatten());
            }
        }
        let streams_at = words.len();
        let n_streams: usize = parts.iter().map(|part| 2 * part.layer.k.len()).sum();
        let mut blocks_at = streams_at + STREAM * n_streams;
        for part in parts {
            for head in 0..part.layer.k.len() {
                let [keys, values] = streams(part.layer, head);
                words.extend(stream_words(part, keys, band, blocks_at, of_keys(part, head))?);
                words.extend(stream_words(part, values, band, blocks_at, of_values(part, head))?);
            }
            blocks_at += part.memory.blocks().len();
        }
        for part in parts {
            let blocks = part.memory.blocks().iter();
            words.extend(blocks.map(|block| block.as_ref().map_or(NONE, |page| word(page.at()))));
        }
        Ok(Self { words, rows, spans: first_span..end_span, windows_at, streams_at })
    }
}

/// The streams of keys and of values of a KV head; the same where they are one.
fn streams(layer: &KvLayer, head: usize) -> [&KvStream; 2] {
    [&layer.k[head], layer.values(head)]
}

/// Where factors on queries of a KV head lie, and what is added to them.
fn of_keys(part: &KvPart<'_, WgpuPage>, head: usize) -> [u32; 2] {
    let query = BalanceLayout::of(part.layer).query.start;
    [balance(part, query + head * part.layer.k[head].spec.head_dim), NONE]
}

/// Where factors on outputs of a KV head lie, and what is added to them. Outputs of joint streams have the factors of queries.
fn of_values(part: &KvPart<'_, WgpuPage>, head: usize) -> [u32; 2] {
    let Some(stream) = part.layer.v.get(head) else { return of_keys(part, head) };
    let (of, column) = (BalanceLayout::of(part.layer), head * stream.spec.head_dim);
    [of.out, of.out_shift].map(|range| balance(part, range.start + column))
}

/// Words of a stream in the list.
const STREAM: usize = 18;

/// `Stream` of `attend.wgsl`.
fn stream_words(
    part: &KvPart<'_, WgpuPage>,
    stream: &KvStream,
    band: Option<&WgpuPage>,
    blocks_at: usize,
    [factors, shifts]: [u32; 2],
) -> Result<[u32; STREAM]> {
    let spec = &stream.spec;
    if spec.dim() > MOST_DIMS {
        return Err(BackendError::Unsupported {
            op: OP,
            wanted: format!("heads of {}", spec.head_dim),
            has: format!("heads of up to {MOST_DIMS}"),
        });
    }
    let tiles = part.band_tiles(stream);
    let band = match band {
        Some(page) if !tiles.is_empty() => word(page.at() + part.band_offset(stream, tiles.start)),
        _ => NONE,
    };
    let within = |page: Option<_>, at: usize| page.map_or(NONE, |page: &WgpuPage| word(page.at() + at));
    let [sink, tail] = [part.memory.sink(), part.memory.tail()].map(|page| page.map(|page| &***page));
    Ok([
        number(OP, spec)?,
        spec.dim() as u32,
        spec.value_dim() as u32,
        u32::from(spec.side == Side::K),
        spec.rotates.into(),
        spec.sink_tiles as u32,
        spec.tail_tiles as u32,
        word(stream.main),
        word(spec.main_layout().bytes()),
        if has_centres(spec) { word(stream.centre) } else { NONE },
        within(sink, stream.sink),
        within(tail, stream.tail),
        band,
        tiles.start as u32,
        tiles.end as u32,
        blocks_at as u32,
        factors,
        shifts,
    ])
}
