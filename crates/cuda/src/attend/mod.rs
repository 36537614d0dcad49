//! Attention over the compressed cache, with tensor cores.
//!
//! The equation is that of [`kvant_backend::Backend::attend`]. A warp works on 16 queries (the query heads of a group,
//! then rows) and one tile of 16 tokens at a time, as FlashAttention-2 does ([arXiv 2307.08691](https://arxiv.org/abs/2307.08691)):
//!
//! 1. **Queries** are padded, rotated where the keys are, scaled by `scale · log2 e` and rounded to halves, once.
//! 2. **A tile** is unpacked to halves in shared memory, once for all 16 queries, in the order in which it lies: what a
//!    product sums over lies side by side in coded tiles and across in float tiles, and `ldmatrix` reads either.
//! 3. **Scores** are one `mma.m16n8k16` per 16 dims and 8 tokens; the online softmax stays in registers.
//! 4. **Values** likewise, with the weights as left operand straight from the registers of step 3.
//!
//! The KV heads of one sequence or of several that step together share launches.
//!
//! Up to eight queries of a KV head (decoding) take [`decode`] instead, which needs no shared memory for tiles. More
//! split the sequence over blocks and over the four warps of a block (flash-decoding); many queries share unpacked tiles
//! between four warps. Shares are joined in a fixed order, so results do not depend on
//! timing. Nothing of the cache's size is ever written.
//!
//! # Budget
//!
//! An H200 copies 16.5 bytes and issues 128 operations per clock and multiprocessor: to read a turbo3 cache at 45 % of that
//! speed, 6.7 operations per value may be spent, for turbo4 8.9; for q8_0 at 60 % 13.7, for f16 25.9. Counted in the
//! machine code of the decode loop for sm_90 (K and V of 128 dims, a tile of each; raising a maximum left out, which is
//! seldom): turbo2 5.0, turbo3 5.9, turbo4 6.3, q8_0 4.8, f16 3.0. 168 registers, so three blocks of four warps run on a
//! multiprocessor. To get there, scales of keys of turbo types stay out of the unpacking: they multiply the scores, and the
//! offset of the keys' bytes is taken from the scores. (Scales of values could multiply the weights, 0.3 operations less; but
//! weights as halves have no room for those of values in the thousands.)
//!
//! # Error
//!
//! Halves round by 2^-11, relative: queries, values of blocks of 32, weights. Codebooks are rounded to bytes ([`ByteBook`]). The
//! tests hold the sum of these against attention in f64.

mod decode;

use bytemuck::{Pod, Zeroable};
use kvant_backend::{AttendParams, BackendError, KvLayer, Result, StreamSpec};
use kvant_codec::finite::F16_MAX;
use kvant_codec::tile::TILE;
use kvant_codec::{ByteBook, DType, Rotation, block32, turbo};

use self::decode::Kind;
use crate::constants::Constants;
use crate::kv::{self, MAX_HEADS, StreamParams, small};
use crate::module::Build;
use crate::rotate::words;
use crate::{Context, CudaPage, Define, DevicePtr, Header, Launch, Source};

/// The kernels of this op.
pub(crate) static SOURCE: Source = Source {
    name: "attend.cu",
    text: include_str!("attend.cu"),
    headers: &HEADERS,
    constants: || constants().whole("QUERIES", QUERIES).whole("PAD", PAD).whole("HAND_STATE", HAND_STATE),
    options: &[],
};

/// What the kernels of this op include.
const HEADERS: [Header; 4] = {
    let [half, rotate, tile] = kv::HEADERS;
    [half, rotate, tile, Header { name: "attend.cuh", text: include_str!("attend.cuh") }]
};

const OP: &str = "attend";
/// Warps of a block, in every kernel of this op.
const WARPS: usize = 4;
const THREADS: u32 = 32 * WARPS as u32;
/// Queries of a warp.
const QUERIES: usize = 16;
/// Above this many queries of a KV head, warps share tiles instead of splitting them.
const FEW: usize = 32;
/// Halves of room after each row of a tile in shared memory.
const PAD: usize = 8;
/// Floats that a lane hands over besides its outputs: maxima and sums of its two queries.
const HAND_STATE: usize = 4;
/// Score of a token that a query may not see; maxima begin there.
const HIDDEN: f32 = -1e30;
/// Weights are powers of two up to 2^LIFT, not to 1: the largest power that is a half, so that as halves they keep their
/// precision down to 2^(-14 - LIFT). Their sum carries the same factor.
const LIFT: u32 = F16_MAX.to_bits() / (1 << 23) - 127;
/// Largest head as stored: the queries and outputs of a warp stay in registers.
const MAX_DIM: usize = 256;

/// The codebook of a type in bytes: value = (byte - bias) · step · scale.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Book {
    bytes: [u8; 16],
    step: f32,
    bias: f32,
}

/// `Slot` of `attend.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Slot {
    first_row: u32,
    kv_head: u32,
    start: u32,
    unused: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct KernelParams {
    keys: [StreamParams; MAX_HEADS],
    values: [StreamParams; MAX_HEADS],
    slots: [Slot; MAX_HEADS],
    q: DevicePtr,
    queries: DevicePtr,
    part: DevicePtr,
    state: DevicePtr,
    out: DevicePtr,
    n_slots: u32,
    n_heads: u32,
    group: u32,
    k_head_dim: u32,
    v_head_dim: u32,
    rows: u32,
    padded: u32,
    splits: u32,
    split_tiles: u32,
    scale: f32,
    books: [Book; DType::KV.len()],
    before: [u32; 4],
    after: [u32; 4],
}

/// What both sources of this op take.
fn constants() -> Constants {
    kv::constants().whole("WARPS", WARPS).float("HIDDEN", HIDDEN).float("LIFT", LIFT as f32)
}

/// Macros that the kernels are compiled with for these sizes of stored heads.
fn defines(k_dim: usize, v_dim: usize) -> [Define; 2] {
    [("K_DIM", k_dim as u32), ("V_DIM", v_dim as u32)]
}

/// The sizes of stored heads in use; others are compiled when they come.
pub(crate) fn builds() -> impl Iterator<Item = Build> {
    let sizes = [(64, 64), (64, 128), (96, 96), (128, 64), (128, 128), (256, 256)];
    let sized = |(k_dim, v_dim)| Build { source: &SOURCE, defines: defines(k_dim, v_dim).to_vec() };
    sizes.into_iter().map(sized).chain(decode::builds())
}

/// Which kernel serves a number of queries of a KV head.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// Straight from memory to the tensor cores.
    Decode,
    /// Warps take tiles of their own.
    Split,
    /// Warps share tiles.
    Many,
}

impl Way {
    fn of(queries: usize) -> Self {
        if queries <= decode::QUERIES {
            Self::Decode
        } else if queries <= FEW {
            Self::Split
        } else {
            Self::Many
        }
    }

    fn queries_per_block(self) -> usize {
        match self {
            Self::Decode => decode::QUERIES,
            Self::Split => QUERIES,
            Self::Many => QUERIES * WARPS,
        }
    }
}

/// The sequences of a launch: as many rows of each, of one shape. Rows of queries and outputs are those that each names.
pub(crate) type Parts<'a> = [(AttendParams, &'a KvLayer<CudaPage>)];

/// Attention of `q` `[.., n_heads * k_head_dim]` into `out` `[.., n_heads * v_head_dim]`. The lengths of the buffers have
/// been checked.
pub(crate) fn attend(cx: &Context, parts: &Parts<'_>, q: DevicePtr, out: DevicePtr) -> Result<()> {
    for (p, layer) in parts {
        check(p, &parts[0].0, layer)?;
    }
    let slots: Vec<_> = parts
        .iter()
        .filter(|(p, _)| p.rows > 0)
        .flat_map(|part| (0..part.0.n_kv_heads).map(move |head| (part, head)))
        .collect();
    // Heads whose types or stored sizes differ go into launches of their own.
    for alike in slots.chunk_by(|a, b| kind(a) == kind(b)) {
        for slots in alike.chunks(MAX_HEADS) {
            attend_slots(cx, q, out, slots)?;
        }
    }
    Ok(())
}

/// A KV head of a sequence.
type PartHead<'a> = (&'a (AttendParams, &'a KvLayer<CudaPage>), usize);

fn kind(&((_, layer), head): &PartHead<'_>) -> Kind {
    let specs = [layer.k[head].spec(), layer.v[head].spec()];
    Kind { types: specs.map(|spec| spec.dtype), dims: specs.map(StreamSpec::dim) }
}

fn check(p: &AttendParams, first: &AttendParams, layer: &KvLayer<CudaPage>) -> Result<()> {
    BackendError::check(OP, "rows of each sequence", first.rows, p.rows)?;
    BackendError::check(OP, "query heads", first.n_heads, p.n_heads)?;
    BackendError::check(OP, "key heads", first.n_kv_heads, p.n_kv_heads)?;
    BackendError::check(OP, "key streams", p.n_kv_heads, layer.k.len())?;
    BackendError::check(OP, "value streams", p.n_kv_heads, layer.v.len())?;
    BackendError::check(OP, "query heads beyond whole groups", 0, p.n_heads % p.n_kv_heads.max(1))?;
    for (head_dim, streams) in [(first.k_head_dim, &layer.k), (first.v_head_dim, &layer.v)] {
        for stream in streams {
            BackendError::check(OP, "head size", head_dim, stream.spec().head_dim)?;
            BackendError::check_at_least(OP, "cached tokens", p.start + p.rows, stream.len())?;
            let dim = stream.spec().dim();
            if dim > MAX_DIM {
                return Err(BackendError::Unsupported {
                    op: OP,
                    wanted: format!("heads of {head_dim}, stored as {dim} values"),
                    has: format!("heads of up to {MAX_DIM}"),
                });
            }
        }
    }
    Ok(())
}

fn attend_slots(cx: &Context, q: DevicePtr, out: DevicePtr, slots: &[PartHead<'_>]) -> Result<()> {
    let (kind, p) = (kind(&slots[0]), &slots[0].0.0);
    let [k_dim, v_dim] = kind.dims;
    let group = p.n_heads / p.n_kv_heads;
    let queries = p.rows * group;
    let way = Way::of(queries);
    let per_block = way.queries_per_block();
    let (padded, blocks) = (queries.next_multiple_of(per_block), queries.div_ceil(per_block));
    let tokens = slots.iter().map(|((p, _), _)| p.start + p.rows).max().unwrap_or(0);
    let tiles = tokens.div_ceil(TILE);
    let split_tiles = match way {
        Way::Decode => decode::split_tiles(cx, tiles, slots.len()),
        _ => split_tiles(cx, tiles, slots.len() * blocks),
    };
    let splits = tiles.div_ceil(split_tiles);

    let shares = slots.len() * splits * padded;
    let on_queries = cx.scratch(slots.len() * padded * k_dim * size_of::<u16>())?;
    let on_part = cx.scratch(shares * v_dim * size_of::<f32>())?;
    let on_state = cx.scratch(shares * 2 * size_of::<f32>())?;

    let mut params = KernelParams::zeroed();
    for (i, &((p, layer), head)) in slots.iter().enumerate() {
        params.keys[i] = StreamParams::new(cx, &layer.k[head])?;
        params.values[i] = StreamParams::new(cx, &layer.v[head])?;
        params.slots[i] = Slot {
            first_row: small(OP, "rows", p.first_row)?,
            kv_head: head as u32,
            start: small(OP, "tokens", p.start + p.rows)? - p.rows as u32,
            unused: 0,
        };
    }
    let rotation = Rotation::kv();
    let params = KernelParams {
        q,
        queries: on_queries.ptr(),
        part: on_part.ptr(),
        state: on_state.ptr(),
        out,
        n_slots: slots.len() as u32,
        n_heads: small(OP, "heads", p.n_heads)?,
        group: group as u32,
        k_head_dim: p.k_head_dim as u32,
        v_head_dim: p.v_head_dim as u32,
        rows: small(OP, "rows", p.rows)?,
        padded: small(OP, "queries", padded)?,
        splits: splits as u32,
        split_tiles: split_tiles as u32,
        scale: p.scale * std::f32::consts::LOG2_E,
        books: books(),
        before: words(rotation.before()),
        after: words(rotation.after()),
        ..params
    };
    let launch = |name, grid: [usize; 3], shared_bytes: usize| -> Result<()> {
        let kernel = cx.kernel_with(&SOURCE, &defines(k_dim, v_dim), name)?;
        let grid = grid.map(|n| n as u32);
        let launch = Launch { grid, block: [THREADS, 1, 1], shared_bytes: shared_bytes as u32 };
        Ok(cx.launch(kernel, launch, &params)?)
    };
    let tile_bytes = k_dim.max(v_dim) * (TILE + PAD) * size_of::<u16>();
    launch("prepare_queries", [padded.div_ceil(WARPS), slots.len(), 1], 0)?;
    match way {
        Way::Decode => decode::launch(cx, &params, kind)?,
        Way::Split => {
            // The tiles of the warps, and then what two of them hand over.
            let hand = WARPS / 2 * 32 * (v_dim / 2 + HAND_STATE) * size_of::<f32>();
            launch("attend_split", [splits, blocks, slots.len()], hand.max(WARPS * tile_bytes))?;
        }
        Way::Many => launch("attend_many", [splits, blocks, slots.len()], 2 * WARPS * tile_bytes)?,
    }
    launch("combine", [queries.div_ceil(WARPS), slots.len(), 1], 0)
}

/// Tiles of one split: so many that all multiprocessors have work, but each warp several.
fn split_tiles(cx: &Context, tiles: usize, blocks: usize) -> usize {
    let wanted = 4 * cx.gpu().properties().n_sms as usize;
    let splits = (wanted / blocks.max(1)).max(1);
    tiles.div_ceil(splits).max(2 * WARPS).next_multiple_of(WARPS)
}

/// What the bytes of each type stand for, by its number in kernels.
fn books() -> [Book; DType::KV.len()] {
    DType::KV.map(|dtype| match (dtype, turbo::codebook(dtype)) {
        (_, Some(codebook)) => {
            let ByteBook { bytes, step } = ByteBook::of(&codebook);
            Book { bytes, step, bias: 128.0 }
        }
        (DType::Q8_0, _) => Book { bytes: [0; 16], step: 1.0, bias: block32::Q8_0_ZERO.into() },
        (DType::Q4_0, _) => Book { bytes: [0; 16], step: 1.0, bias: block32::Q4_0_ZERO.into() },
        _ => Book::zeroed(),
    })
}

#[cfg(test)]
mod tests;
