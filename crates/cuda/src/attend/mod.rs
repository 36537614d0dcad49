//! Attention over the compressed KV cache, on tensor cores.
//!
//! Implements the equation of [`kvant_backend::Backend::attend`]. A warp takes tiles of 16 queries
//! (the query heads of a group, then tokens) and tiles of 16 cached tokens, as FlashAttention-2
//! does ([arXiv 2307.08691](https://arxiv.org/abs/2307.08691)):
//!
//! 1. **Queries** get channel scales, padding, the rotation where keys have it, the factor `scale ·
//!    log2 e`, and are rounded to f16, once. Kernels keep them in shared memory, from which
//!    `ldmatrix` loads 16 dims at a time: outputs leave no registers for them.
//! 2. **A tile** is unpacked to f16 in shared memory, once for all queries of a warp or a block, in
//!    its stored order: the reduction dimension is contiguous in quantized tiles and strided in
//!    float tiles, and `ldmatrix` reads either. The f16 values include the scales and the centre
//!    that keys of a block are relative to.
//! 3. **Scores** are one `mma.m16n8k16` per 16 dims and 8 tokens; the online softmax stays in
//!    registers.
//! 4. **Values** likewise, with the softmax weights as left operand straight from the registers of
//!    step 3.
//!
//! An attention sink joins the softmax of its head when the partial results of a query are
//! combined.
//!
//! A soft cap bounds the scores before their softmax, in kernels compiled for it: others have no
//! cost.
//!
//! # Visibility
//!
//! Tokens of one tile see the same tiles in the same form: quantized up to the window, 16 bit from
//! there on. Queries that are processed together may differ, so the iteration has two parts: the
//! tiles that any of them sees as stored in the blocks, and after them those that any of them sees
//! in 16 bit, in the step tiles or the tail. Each query masks in each part the tokens it does not
//! see there.
//!
//! # Kernel selection
//!
//! The KV heads of all sequences of a step share launches. Up to eight rows of a sequence
//! (decoding, and verifying drafts) take [`decode`], which needs no shared memory for tiles, in one
//! launch for all sequences. Up to 32 queries of more rows use split-KV over blocks and over the
//! four warps of a block (flash-decoding); many share unpacked tiles among up to eight warps
//! ([`prompt`]), on compute capability 9.0 in heads of 64, 128 and 256 among warpgroups
//! ([`hopper`]). Heads beyond 256, and shared-KV tensors (MLA), take a kernel whose warps share
//! outputs too ([`large_head`]).
//!
//! Attention is batch invariant: the split depends on the tokens of its own sequence alone, and
//! partial results are combined in a fixed order ([`splits`]), so the results have the same bits
//! whatever else is in the batch, and up to eight rows whatever other rows of the sequence are in
//! the step: [`decode`] computes each as if alone, and [`large_head`] takes each as a sequence of
//! its own. Prefill chunks with other boundaries may take another kernel or another split: their
//! results differ by roundings, within the error below. No buffer grows with the cache: the tiles
//! that [`hopper`] unpacks are bounded.
//!
//! # Budget
//!
//! [`decode`], [`prompt`], [`hopper`] and [`large_head`] state their bounds, counted in the machine
//! code that ptxas 13.0 makes for 9.0, and their times on an H100. The kernel for up to 32 queries
//! takes 167 registers for heads of 128, so that three blocks of four warps run on a
//! multiprocessor, and 255 for heads of 256, two blocks; none are spilled.
//!
//! # Error
//!
//! f16 rounds by 2^-11, relative: queries, keys and values including their scales, softmax weights.
//! [`decode`] has queries and weights of turbo types in 16-bit fixed point, with less error.
//! Codebooks are rounded to bytes ([`ByteBook`]). The tests compare with the CPU's attention in
//! f64, and tolerate the sum of these errors.

mod decode;
mod divisor;
mod hopper;
mod large_head;
mod plan;
mod prompt;
mod splits;

use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::LazyLock;

use bytemuck::{Pod, Zeroable};
use kvant_backend::{
    AttendParams, BackendError, ChannelScaleLayout, KvBatchEntry, KvLayer, KvTensor, Result, TokenSpan,
};
use kvant_codec::finite::F16_MAX;
use kvant_codec::tile::TILE;
use kvant_codec::{ByteBook, DType, Rotation, Trellis, block32, turbo};

use self::decode::HeadFormat;
use self::divisor::Divisor;
use self::plan::{KernelKind, Launched, SequenceParams};
pub(crate) use self::splits::Splits;
use crate::constants::Constants;
use crate::kv::{self, MAX_HEADS, MAX_PARAMS, MAX_SEQUENCES, Offsets, SpecParams, TYPES, is_same, small};
use crate::module::Build;
use crate::rotate::words;
use crate::soft_cap::{SOFT_CAP_HEADER, rate};
use crate::{Context, CudaPage, Define, DevicePtr, Header, Launch, Source};

/// The kernels for up to 32 queries, and the prologue and epilogue of the others.
pub(crate) static SOURCE: Source = Source {
    name: "attend.cu",
    text: include_str!("attend.cu"),
    headers: &HEADERS,
    constants: || constants().whole("QUERIES", QUERIES).whole("PARTIAL_STATE", PARTIAL_STATE),
    options: &[],
};

/// Headers that the kernels of this op include.
const HEADERS: [Header; 10] = {
    let [half, rotate, tile] = kv::HEADERS;
    let attend = Header { name: "attend.cuh", text: include_str!("attend.cuh") };
    let look_up = Header { name: "look_up.cuh", text: include_str!("look_up.cuh") };
    let prologue_epilogue =
        Header { name: "prologue_epilogue.cuh", text: include_str!("prologue_epilogue.cuh") };
    let split_epilogue = Header { name: "split_epilogue.cuh", text: include_str!("split_epilogue.cuh") };
    let unpack = Header { name: "unpack.cuh", text: include_str!("unpack.cuh") };
    let work = Header { name: "work.cuh", text: include_str!("work.cuh") };
    [half, rotate, tile, SOFT_CAP_HEADER, look_up, attend, prologue_epilogue, split_epilogue, unpack, work]
};

const OP: &str = "attend";
/// Warps of a block, in every kernel of this op except the prefill kernels.
const WARPS: usize = 4;
const THREADS: u32 = 32 * WARPS as u32;
/// Queries of a warp.
const QUERIES: usize = 16;
/// Floats that a lane passes on besides its outputs: maxima and sums of its two queries.
const PARTIAL_STATE: usize = 4;
/// Score of a masked token; initial value of the maxima.
const MASKED_SCORE: f32 = -1e30;
/// Softmax weights are powers of two up to 2^LIFT, not to 1: the largest power that f16 represents,
/// so that as f16 they keep their precision down to 2^(-14 - LIFT). Their sum carries the same
/// factor.
const LIFT: u32 = F16_MAX.to_bits() / (1 << 23) - 127;
/// Bytes of `VisibleRange` of `unpack.cuh`.
const VISIBLE_RANGE_BYTES: usize = 2 * size_of::<u32>();
/// Maximum number of rows of a sequence in a step that attend as each of them does alone.
pub(crate) const INVARIANT_ROWS: usize = decode::MAX_ROWS;
/// Largest stored head size whose queries and outputs stay in the registers of a warp.
const MAX_NARROW: usize = 256;

/// Codebook of a type in bytes: value = (byte - bias) · step · scale.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Book {
    bytes: [u8; 16],
    step: f32,
    bias: f32,
}

/// `Head` of `attend.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct HeadParams {
    keys: Offsets,
    values: Offsets,
    kv_head: u32,
    unused: u32,
}

/// `Common` of `attend.cuh`: the parameters of all kernels of this op.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Common {
    heads: [HeadParams; MAX_HEADS],
    sequences: [SequenceParams; MAX_SEQUENCES],
    keys: SpecParams,
    values: SpecParams,
    windows: DevicePtr,
    queries: DevicePtr,
    partial_out: DevicePtr,
    state: DevicePtr,
    unpacked_tiles: DevicePtr,
    counters: DevicePtr,
    n_heads: u32,
    group: u32,
    visible: u32,
    soft_cap: f32,
    cap_rate: f32,
    unused: u32,
    by_group: Divisor,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct KernelParams {
    common: Common,
    q: DevicePtr,
    sinks: DevicePtr,
    out: DevicePtr,
    n_query_heads: u32,
    k_head_dim: u32,
    v_head_dim: u32,
    scale: f32,
    rotates: [u32; 2],
    balance_at: [u32; 3],
    is_shared_kv: u32,
    books: [Book; TYPES.len()],
    before: [u32; 4],
    after: [u32; 4],
}

const _: () = assert!(size_of::<KernelParams>() <= MAX_PARAMS);

/// Returns the constants of all sources of this op.
fn constants() -> Constants {
    kv::constants()
        .whole("WARPS", WARPS)
        .float("HIDDEN", MASKED_SCORE)
        .float("LIFT", LIFT as f32)
        .float("LOG2_E", LOG2_E)
        .list("TRELLIS_BYTES", [Trellis::TURBO2T, Trellis::TURBO3T].into_iter().flat_map(level_words))
}

/// Returns the levels of a trellis above -128, four to a word.
fn level_words(trellis: Trellis) -> impl Iterator<Item = i32> {
    let bytes = trellis.levels().map(|level| level.wrapping_add(-128) as u8);
    (0..bytes.len()).step_by(4).map(move |i| i32::from_le_bytes(std::array::from_fn(|k| bytes[i + k])))
}

/// Returns the macros of these stored head sizes, with or without a cap on the scores.
fn defines([k_dim, v_dim]: [usize; 2], is_capped: bool) -> [Define; 3] {
    [("K_DIM", k_dim as u32), ("V_DIM", v_dim as u32), ("CAPPED", is_capped.into())]
}

/// Returns the variants that are compiled ahead of time; other sizes and types are compiled on
/// first use.
pub(crate) fn builds() -> impl Iterator<Item = Build> {
    let build = |(dims, is_capped)| Build { source: &SOURCE, defines: defines(dims, is_capped).to_vec() };
    usual_heads()
        .map(build)
        .chain(decode::builds())
        .chain(prompt::builds())
        .chain(hopper::builds())
        .chain(large_head::builds())
}

/// Returns the stored head sizes in use, and whether their scores are capped.
fn usual_heads() -> impl Iterator<Item = ([usize; 2], bool)> {
    let plain = [[64, 64], [64, 128], [96, 96], [128, 64], [128, 128], [192, 128], [256, 256]]
        .map(|dims| (dims, false));
    plain.into_iter().chain([[128, 128], [256, 256]].map(|dims| (dims, true)))
}

/// A storage format of heads whose kernels are compiled ahead of time.
#[derive(Debug, Clone, Copy)]
struct UsualFormat {
    /// Keys first.
    types: [DType; 2],
    dims: [usize; 2],
    is_capped: bool,
}

/// Returns the formats that kernels for types and sizes are compiled ahead for: in heads of 128
/// every type alone, in those of 64 and 256 the usual ones, with keys in q8_0 too where a policy
/// raises them, and the default types in all others. Other variants are compiled at first use.
fn usual_formats() -> impl Iterator<Item = UsualFormat> {
    const DEFAULT: [[DType; 2]; 3] = [[DType::F16; 2], [DType::Turbo4; 2], [DType::Q8_0, DType::Turbo4]];
    const COMMON: [[DType; 2]; 3] = [[DType::Q8_0; 2], [DType::Turbo3; 2], [DType::Q8_0, DType::Turbo3]];
    let format = |is_capped, dims| move |types| UsualFormat { types, dims, is_capped };
    let usual = || DEFAULT.into_iter().chain(COMMON);
    let alike =
        TYPES.map(|dtype| [dtype; 2]).into_iter().filter(move |types| !usual().any(|of| of == *types));
    let large = [64, 128, 256].map(|dim| usual().map(format(false, [dim; 2])));
    let default = [[96, 96], [192, 128]].map(|dims| DEFAULT.map(format(false, dims)));
    let capped = [128, 256].map(|dim| DEFAULT.map(format(true, [dim; 2])));
    alike
        .map(format(false, [128; 2]))
        .chain(large.into_iter().flatten())
        .chain(default.into_iter().chain(capped).flatten())
}

/// Device addresses of queries and outputs, and of the step tiles (arbitrary when there are none).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// `[rows, n_heads * k_head_dim]`.
    pub q: DevicePtr,
    /// `[n_heads]`; 0 without attention sinks.
    pub sinks: DevicePtr,
    pub step_tiles: DevicePtr,
    /// `[rows, n_heads * v_head_dim]`.
    pub out: DevicePtr,
}

/// Rows of a sequence that share blocks, and the kernel that serves them.
#[derive(Clone, Copy)]
struct Part<'a, 'b> {
    sequence: &'a KvBatchEntry<'b, CudaPage>,
    rows: TokenSpan,
    kernel_kind: KernelKind,
}

/// Returns some of the rows of a sequence, in the batch that all of them are in.
fn slice(rows: TokenSpan, range: Range<usize>) -> TokenSpan {
    TokenSpan { first: rows.first + range.start, n: range.len(), start: rows.start + range.start, ..rows }
}

/// Attends with the queries of each sequence. The caller has checked the shapes.
pub(crate) fn attend(
    cx: &Context,
    p: &AttendParams,
    sequences: &[KvBatchEntry<'_, CudaPage>],
    rows: Rows,
) -> Result<()> {
    let group = p.n_heads / p.n_kv_heads.max(1);
    let device = cx.gpu().properties();
    let shared_bytes = device.shared_per_block as usize;
    let mut sorted = Vec::with_capacity(sequences.len());
    // The sequences of a step usually have the same layer.
    for alike in sequences.chunk_by(|a, b| std::ptr::eq(a.layer, b.layer)) {
        let layer = alike[0].layer;
        check(p, layer, shared_bytes)?;
        let large_head = large_head::max_tiles(layer, shared_bytes);
        for sequence in alike.iter().filter(|sequence| sequence.rows.n > 0 && p.n_kv_heads > 0) {
            // Where no kernel attends with several rows as with each alone, few are taken apart:
            // `large_head` shares the work of queries by their number.
            let n = sequence.rows.n;
            let step = if large_head.is_some() && n <= INVARIANT_ROWS { 1 } else { n };
            for first in (0..n).step_by(step) {
                let rows = slice(sequence.rows, first..first + step);
                let kernel_kind = KernelKind::of(rows, group, layer, large_head, device);
                sorted.push(Part { sequence, rows, kernel_kind });
            }
        }
    }
    sorted.sort_by_key(|part| part.kernel_kind);
    // Sequences of one layer and kernel share launches, and so do heads of the same storage format.
    for parts in
        sorted.chunk_by(|a, b| a.kernel_kind == b.kernel_kind && is_same(a.sequence.layer, b.sequence.layer))
    {
        let (kernel_kind, layer) = (parts[0].kernel_kind, parts[0].sequence.layer);
        for (head_format, heads) in head_formats(layer)? {
            let n_unpacked_tiles = |part: &Part<'_, '_>| plan::n_visible_tiles(part.rows, layer, heads[0]);
            let is_unpacked = kernel_kind.unpacks();
            // The buffer of unpacked tiles is bounded.
            let max_parts = if is_unpacked {
                hopper::sequences_at_once(layer, parts.iter().map(n_unpacked_tiles))
            } else if kernel_kind == KernelKind::Decode {
                usize::MAX
            } else {
                MAX_SEQUENCES
            };
            for parts in parts.chunks(max_parts) {
                let max_heads = if is_unpacked {
                    let n_unpacked_tiles = parts.iter().map(n_unpacked_tiles).sum();
                    hopper::heads_at_once(layer, n_unpacked_tiles, heads.len())
                } else {
                    MAX_HEADS
                };
                for heads in heads.chunks(max_heads) {
                    launch(cx, p, &head_format, heads, parts, rows)?;
                }
            }
        }
    }
    Ok(())
}

/// Groups the KV heads of a layer by the storage format of their tensors.
fn head_formats(layer: &KvLayer) -> Result<Vec<(HeadFormat, Vec<usize>)>> {
    let specs = |head: usize| [&layer.k[head].spec, &layer.values(head).spec];
    let mut formats: Vec<(HeadFormat, Vec<usize>)> = Vec::new();
    for head in 0..layer.k.len() {
        // Heads usually have the format of the one before, whose specs are compared faster.
        if let Some((_, heads)) = formats.last_mut().filter(|(_, heads)| specs(heads[0]) == specs(head)) {
            heads.push(head);
            continue;
        }
        let head_format = HeadFormat::new(specs(head))?;
        match formats.iter_mut().find(|(known, _)| *known == head_format) {
            Some((_, heads)) => heads.push(head),
            None => formats.push((head_format, vec![head])),
        }
    }
    Ok(formats)
}

/// Rejects formats that no kernel reads.
fn check(p: &AttendParams, layer: &KvLayer, shared_bytes: usize) -> Result<()> {
    let unsupported = |wanted, has| Err(BackendError::Unsupported { op: OP, requested: wanted, has });
    let max_dim = large_head::max_dim(shared_bytes).max(MAX_NARROW);
    for tensor in layer.tensors() {
        let dim = tensor.spec.stored_dim();
        if dim > max_dim {
            let wanted = format!("heads of {}, stored as {dim} values", tensor.spec.head_dim);
            return unsupported(wanted, format!("heads of up to {max_dim}"));
        }
    }
    for (k, v) in layer.k.iter().zip(&layer.v) {
        let tails = [k, v].map(|tensor: &KvTensor| tensor.spec.tail_tiles);
        if tails[0] != tails[1] && !tails.contains(&0) {
            let wanted = format!("{} tiles in 16 bit of keys and {} of values", tails[0], tails[1]);
            return unsupported(wanted, "as many of both, or of one side".to_owned());
        }
    }
    small(OP, "heads", p.n_heads * p.k_head_dim.max(p.v_head_dim))?;
    Ok(())
}

/// Returns the parameters of a launch, without sequences and their buffers.
fn kernel_params(
    cx: &Context,
    p: &AttendParams,
    head_format: &HeadFormat,
    heads: &[usize],
    layer: &KvLayer,
    rows: Rows,
) -> Result<KernelParams> {
    let mut params = KernelParams::zeroed();
    for (to, &head) in params.common.heads.iter_mut().zip(heads) {
        let (keys, values) = (Offsets::new(OP, &layer.k[head])?, Offsets::new(OP, layer.values(head))?);
        *to = HeadParams { keys, values, kv_head: head as u32, unused: 0 };
    }
    let (masks, group) = (Rotation::kv(turbo::LEN), p.n_heads / p.n_kv_heads);
    let ChannelScaleLayout { query, out, out_shift, .. } = ChannelScaleLayout::of(layer);
    let out = if head_format.is_shared_kv { query.clone() } else { out };
    let begin = |values| kv::begin(OP, values);
    let caps = p.soft_cap.map(|cap| cap * LOG2_E);
    let (soft_cap, cap_rate) = caps.map_or((0.0, 0.0), |cap| (cap, rate(cap)));
    Ok(KernelParams {
        common: Common {
            keys: head_format.specs[0],
            values: head_format.specs[1],
            counters: cx.counters()?,
            n_heads: heads.len() as u32,
            group: group as u32,
            by_group: Divisor::new(group),
            visible: layer.window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX)),
            soft_cap,
            cap_rate,
            ..params.common
        },
        q: rows.q,
        sinks: rows.sinks,
        out: rows.out,
        n_query_heads: p.n_heads as u32,
        k_head_dim: p.k_head_dim as u32,
        v_head_dim: p.v_head_dim as u32,
        scale: p.scale * LOG2_E,
        rotates: [&layer.k[heads[0]], layer.values(heads[0])].map(|tensor| tensor.spec.rotates.into()),
        balance_at: [begin(&query)?, begin(&out)?, begin(&out_shift)?],
        is_shared_kv: head_format.is_shared_kv.into(),
        books: *BOOKS,
        before: words(masks.before()),
        after: words(masks.after()),
    })
}

fn launch(
    cx: &Context,
    p: &AttendParams,
    head_format: &HeadFormat,
    heads: &[usize],
    parts: &[Part<'_, '_>],
    rows: Rows,
) -> Result<()> {
    let ([k_dim, v_dim], kernel_kind) = (head_format.dims, parts[0].kernel_kind);
    let mut params = kernel_params(cx, p, head_format, heads, parts[0].sequence.layer, rows)?;
    if kernel_kind == KernelKind::Decode {
        let splits = Splits::of(cx, p, head_format, heads, parts, rows.step_tiles)?;
        return decode::launch(cx, params, head_format, p.soft_cap.is_some(), &splits);
    }
    let launched = Launched::new(cx, p, heads, parts, rows.step_tiles)?;
    let on_queries = cx.scratch(launched.n_queries * k_dim * size_of::<u16>())?;
    let on_partials = cx.scratch(launched.n_partials * v_dim * size_of::<f32>())?;
    let on_state = cx.scratch(launched.n_partials * 2 * size_of::<f32>())?;
    // Only some launches need these buffers.
    let scratch = |bytes: usize| (bytes > 0).then(|| cx.scratch(bytes)).transpose();
    let on_unpacked_tiles =
        scratch(launched.n_unpacked_tiles * hopper::unpacked_tile_bytes(head_format.dims))?;
    let windows = scratch(size_of_val(&launched.windows[..]))?;
    if let Some(windows) = &windows {
        cx.gpu().write(windows.ptr(), bytemuck::cast_slice(&launched.windows))?;
    }
    params.common.sequences[..parts.len()].copy_from_slice(&launched.sequences);
    params.common = Common {
        windows: windows.as_ref().map_or(0, |windows| windows.ptr()),
        queries: on_queries.ptr(),
        partial_out: on_partials.ptr(),
        state: on_state.ptr(),
        unpacked_tiles: on_unpacked_tiles.as_ref().map_or(0, |buffer| buffer.ptr()),
        ..params.common
    };
    let (slots, is_capped) = (parts.len() * heads.len(), p.soft_cap.is_some());
    let start = |name, grid: [usize; 3], threads: u32, shared_bytes: usize| -> Result<()> {
        let kernel = match kernel_kind {
            KernelKind::Prefill(partition) => prompt::kernel(cx, head_format, is_capped, partition, name)?,
            KernelKind::Warpgroups(block_shape) => {
                hopper::kernel(cx, head_format, is_capped, block_shape, name)?
            }
            KernelKind::LargeHead(tiles) => large_head::kernel(cx, head_format, is_capped, tiles, name)?,
            KernelKind::Decode | KernelKind::Split => {
                cx.kernel_with(&SOURCE, &defines(head_format.dims, is_capped), name)?
            }
        };
        let grid = grid.map(|n| n as u32);
        let launch = Launch { grid, block: [threads, 1, 1], shared_bytes: shared_bytes as u32 };
        Ok(cx.launch(kernel, launch, &params)?)
    };
    let (splits, max_queries) = (launched.max_splits, launched.max_queries);
    let (name, threads, shared_bytes) = match kernel_kind {
        KernelKind::Decode | KernelKind::Split => ("attend_split", THREADS, split_bytes(head_format.dims)),
        KernelKind::Prefill(partition) => {
            ("attend_prefill", partition.threads(), partition.bytes(head_format.dims))
        }
        KernelKind::Warpgroups(block_shape) => {
            ("attend_prefill", block_shape.threads(), block_shape.bytes(head_format.dims))
        }
        KernelKind::LargeHead(tiles) => {
            ("attend_large_head", THREADS, large_head::bytes(head_format.dims, tiles))
        }
    };
    let blocks = max_queries.div_ceil(kernel_kind.queries_per_block());
    start(
        "prepare_queries",
        [(blocks * kernel_kind.queries_per_block()).div_ceil(WARPS), slots, 1],
        THREADS,
        0,
    )?;
    if kernel_kind.unpacks() {
        start("unpack_tiles", [launched.max_unpacked_tiles.div_ceil(WARPS), 2, slots], THREADS, 0)?;
    }
    start(name, [splits, blocks, slots], threads, shared_bytes)?;
    start("combine", [max_queries.div_ceil(WARPS), slots, 1], THREADS, 0)
}

/// Returns the shared memory of `attend_split` for these head sizes: `Shared` of `attend.cu`, then
/// the exchange buffer of two warps.
fn split_bytes([k_dim, v_dim]: [usize; 2]) -> usize {
    let halves = WARPS * TILE * k_dim.max(v_dim) + QUERIES * k_dim;
    let exchange = WARPS / 2 * 32 * (v_dim / 2 + PARTIAL_STATE) * size_of::<f32>();
    (halves * size_of::<u16>() + QUERIES * VISIBLE_RANGE_BYTES).max(exchange)
}

/// Byte codebooks, by kernel type number.
static BOOKS: LazyLock<[Book; TYPES.len()]> = LazyLock::new(|| {
    TYPES.map(|dtype| match (dtype, turbo::codebook(dtype)) {
        (_, Some(codebook)) => {
            let ByteBook { bytes, step } = ByteBook::of(&codebook);
            Book { bytes, step, bias: 128.0 }
        }
        (DType::Turbo2T | DType::Turbo3T, _) => {
            Book { bytes: [0; 16], step: Trellis::CENTROID_STEP, bias: 128.0 }
        }
        (DType::Q8_0, _) => Book { bytes: [0; 16], step: 1.0, bias: block32::Q8_0_ZERO.into() },
        (DType::Q4_0, _) => Book { bytes: [0; 16], step: 1.0, bias: block32::Q4_0_ZERO.into() },
        _ => Book::zeroed(),
    })
});

#[cfg(test)]
mod tests;
