//! Prefill attention on compute capability 9.0, whose warpgroup MMAs (`wgmma`) have nearly twice
//! the rate of those of [`prompt`](super::prompt).
//!
//! **Tiles are unpacked once**, by a preceding kernel (`unpack_tiles`), to f16 in memory in the
//! order of the MMA operands. Queries of 512 tokens are ten and more blocks for a KV head, each of
//! which would unpack all tiles again: a warp takes 930 instructions for a tile of turbo3's keys
//! and one of its values, in sequence, and on an H200 that was three quarters of the time. The
//! memory is bounded ([`MAX_UNPACKED_BYTES`]): KV heads take turns, and a single head that needs
//! more uses [`prompt`](super::prompt).
//!
//! A block has three consumer warpgroups of 64 queries each and one producer warpgroup that copies.
//! They iterate over steps of 64 tokens, four tiles of keys and four of values, through three
//! stages of shared memory.
//!
//! - **Scores** of a step are MMAs of queries and keys in shared memory, `m64n64k16`; **values**
//!   are added by `m64n128k16` with the softmax weights as left operand, straight from the
//!   registers of the scores. Both use the orders of `unpack.cuh`: rows of tokens in the 128-byte
//!   swizzle, rows of dims in the 32-byte swizzle.
//! - **MMAs run asynchronously.** A consumer issues the values of a step and the scores of the next
//!   together, and waits for both; meanwhile the two others compute their softmax.
//! - **The reduction dimension is contiguous**, also for float tiles: these are transposed in
//!   registers. So no step is special, and only the mask differs between the tiles of a step. Tiles
//!   beyond the end are zeros.
//! - **Producer and consumers wait only for each other**, at the barriers of a stage: each consumer
//!   has its own barrier at which it waits for the producer, and the producer waits at a barrier
//!   for all consumers before it refills a stage. A fence before that makes copies visible to the
//!   MMAs.
//! - **Registers** move from the producer to the consumers, 56 and 152 per thread.
//!
//! The split of the KV range is that of [`prompt`](super::prompt).
//!
//! # Budget
//!
//! For a step of 64 tokens and 192 queries, heads of 128, the tensor cores of a multiprocessor take
//! 1,536 clocks, and shared memory 1,408: 768 for scores, 384 for values, 256 for arriving data. On
//! a scheduler, three consumers issue 305 instructions each (and 70 where a maximum rises), counted
//! in the machine code that ptxas 13.0 makes.
//!
//! An H100 takes 1.17 to 1.25 ms for 512 tokens of 32 heads at depth 65,536, whatever the type,
//! 2.25 with [`prompt`](super::prompt); PyTorch's attention of f16 takes 0.83. The first 8,192
//! tokens in chunks of 512 take 2.0 ms (3.0; 1.03): there a chunk has at most 128 blocks, some of
//! them with a few steps, and the launches before and after.

use kvant_backend::{KvLayer, Result, TokenSpan};
use kvant_codec::tile::TILE;

use super::decode::HeadFormat;
use super::{HEADERS, UsualFormat, VISIBLE_RANGE_BYTES, constants, plan};
use crate::half::{COPIES_HEADER, WARPGROUP_ARCH, WARPGROUP_HEADER, WARPGROUP_OPTIONS};
use crate::kv::{MAX_HEADS, MAX_SEQUENCES, number};
use crate::module::Build;
use crate::{Context, Define, Header, KernelId, Source};

/// Headers that only these kernels include.
const HOPPER_HEADERS: [Header; HEADERS.len() + 3] = {
    let [half, rotate, tile, bounded, look_up, attend, prologue_epilogue, split_epilogue, unpack, work] =
        HEADERS;
    let transpose = Header { name: "transpose.cuh", text: include_str!("transpose.cuh") };
    [
        half,
        rotate,
        tile,
        bounded,
        look_up,
        attend,
        prologue_epilogue,
        split_epilogue,
        unpack,
        work,
        transpose,
        COPIES_HEADER,
        WARPGROUP_HEADER,
    ]
};

/// The prefill kernels for compute capability 9.0.
static SOURCE: Source = Source {
    name: "hopper.cu",
    text: include_str!("hopper.cu"),
    headers: &HOPPER_HEADERS,
    constants: || {
        let warpgroups = [("CONSUMERS", CONSUMERS), ("PRODUCERS", PRODUCERS), ("STAGES", STAGES)];
        let registers = [("CONSUMER_REGISTERS", REGISTERS[0]), ("PRODUCER_REGISTERS", REGISTERS[1])];
        let numbers = warpgroups.into_iter().chain(registers).chain([("QUERIES", super::QUERIES)]);
        numbers.fold(constants(), |constants, (name, n)| constants.whole(name, n))
    },
    options: &WARPGROUP_OPTIONS,
};

/// Stored head sizes that the kernels support.
const DIMS: [usize; 2] = [64, 128];
/// Consumer warpgroups of a block, and producer warpgroups.
const CONSUMERS: usize = 3;
const PRODUCERS: usize = 1;
const WARPGROUP: usize = 128;
/// Stages of shared memory, one step each.
const STAGES: usize = 3;
/// Tiles of a step.
const STEP: usize = 4;
/// Bytes of unpacked tiles at a time: about twice the L2 cache of such a device, and within the
/// memory that a device leaves free for scratch.
const MAX_UNPACKED_BYTES: usize = 96 << 20;
/// Registers per thread of consumers and producers: multiples of 8, whose sum over all threads fits
/// the register file of a multiprocessor.
const REGISTERS: [usize; 2] = [152, 56];
const _: () = assert!((REGISTERS[0] * CONSUMERS + REGISTERS[1] * PRODUCERS) * WARPGROUP <= 1 << 16);

/// Queries of a block.
pub(super) const QUERIES: usize = 64 * CONSUMERS;
/// Threads of a block.
pub(super) const THREADS: u32 = (WARPGROUP * (CONSUMERS + PRODUCERS)) as u32;

/// Returns whether these kernels serve the heads of `layer` on compute capability `arch / 10`, and
/// the tiles that `rows` attend to in one head fit the unpack buffer.
pub(super) fn supports(rows: TokenSpan, layer: &KvLayer, arch: u32) -> bool {
    let is_known = |head: usize| {
        let dims = dims(layer, head);
        let bytes = plan::n_visible_tiles(rows, layer, head) * unpacked_tile_bytes(dims);
        dims.iter().all(|dim| DIMS.contains(dim)) && bytes <= MAX_UNPACKED_BYTES
    };
    arch == WARPGROUP_ARCH && (0..layer.k.len()).all(is_known)
}

fn dims(layer: &KvLayer, head: usize) -> [usize; 2] {
    [layer.k[head].spec.stored_dim(), layer.values(head).spec.stored_value_dim()]
}

/// Returns the shared memory of a block for these head sizes: `Shared` of `hopper.cu`.
pub(super) fn bytes([k_dim, v_dim]: [usize; 2]) -> usize {
    let stages = STAGES * STEP * TILE * (k_dim + v_dim);
    (stages + QUERIES * k_dim) * size_of::<u16>() + QUERIES * VISIBLE_RANGE_BYTES
}

/// Returns the bytes of one unpacked tile of keys and of values of these sizes.
pub(super) fn unpacked_tile_bytes([k_dim, v_dim]: [usize; 2]) -> usize {
    TILE * (k_dim + v_dim) * size_of::<u16>()
}

/// Returns how many of the sequences with `n_unpacked_tiles` unpacked tiles each one launch takes:
/// [`MAX_SEQUENCES`] if all fit the unpack buffer, else one.
pub(super) fn sequences_at_once(layer: &KvLayer, n_unpacked_tiles: impl Iterator<Item = usize>) -> usize {
    let bytes = n_unpacked_tiles.sum::<usize>() * unpacked_tile_bytes(dims(layer, 0));
    if bytes <= MAX_UNPACKED_BYTES { MAX_SEQUENCES } else { 1 }
}

/// Returns how many of the `n_heads` KV heads of a layer, of `n_unpacked_tiles` tiles each, are
/// unpacked at a time: the same number in each launch, as far as possible.
pub(super) fn heads_at_once(layer: &KvLayer, n_unpacked_tiles: usize, n_heads: usize) -> usize {
    let max_heads = (MAX_UNPACKED_BYTES / (n_unpacked_tiles * unpacked_tile_bytes(dims(layer, 0))).max(1))
        .clamp(1, MAX_HEADS);
    n_heads.div_ceil(n_heads.div_ceil(max_heads))
}

/// Returns the kernel `name`.
pub(super) fn kernel(
    cx: &Context,
    head_format: &HeadFormat,
    is_capped: bool,
    name: &'static str,
) -> Result<KernelId> {
    let types = head_format.specs.map(|spec| spec.dtype.into());
    Ok(cx.kernel_with(&SOURCE, &defines(types, head_format.dims, is_capped), name)?)
}

/// Returns the macros of a variant; `types` are kernel type numbers.
fn defines([k, v]: [u32; 2], dims: [usize; 2], is_capped: bool) -> Vec<Define> {
    [("K_TYPE", k), ("V_TYPE", v)].into_iter().chain(super::defines(dims, is_capped)).collect()
}

/// Returns the variants that are compiled ahead of time.
pub(super) fn builds() -> impl Iterator<Item = Build> {
    let known = super::usual_formats().filter(|format| format.dims.iter().all(|dim| DIMS.contains(dim)));
    known.map(|UsualFormat { types, dims, is_capped }| Build {
        source: &SOURCE,
        defines: defines(types.map(number), dims, is_capped),
    })
}
