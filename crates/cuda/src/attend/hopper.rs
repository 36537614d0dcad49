//! Many queries of a KV head on compute capability 9.0, whose products of warpgroups (`wgmma`) have nearly twice the rate of those of
//! [`prompt`](super::prompt).
//!
//! **Tiles are unpacked once**, by a kernel before (`unpack_tiles`), to halves in memory as products take them. Queries of 512 rows are ten and more
//! blocks for a KV head, each of which would unpack all tiles again: a warp takes 930 instructions for a tile of turbo3's keys and one of its
//! values, one after the other, and on an H200 that was three quarters of the time. Memory for them is bounded ([`MOST_IMAGE_BYTES`]): KV
//! heads take turns, and one that alone has more goes by [`prompt`](super::prompt).
//!
//! A block has three warpgroups of 64 queries each, the *takers*, and one that copies, the *bringer*. They walk steps of 64 tokens, four
//! tiles of keys and four of values, through three stages of shared memory.
//!
//! - **Scores** of a step are products of queries and keys in shared memory, `m64n64k16`; **values** are added by `m64n128k16` with the
//!   weights as left operand, straight from the registers of the scores. Both lie as the existing orders of `unpack.cuh` have them, rows of
//!   tokens in the swizzle of 128 bytes, rows of dims in that of 32.
//! - **Products run beside the threads.** A taker asks for the values of a step and the scores of the next at once, and waits for both; meanwhile
//!   the two others soften theirs.
//! - **What a product sums over lies side by side**, of float tiles too: these are turned in registers. So no step is special, and only
//!   what is hidden tells tiles of a step apart. Tiles that are not there are zeros.
//! - **Each side waits only for the other**, at barriers of a stage: each taker has one of its own where it waits for the bringer, which waits
//!   for all takers at one before it fills a stage again. Copies are shown to the products by a fence before that.
//! - **Registers** move from the bringer to the takers, 56 and 152 of a thread.
//!
//! How a walk is split is [`prompt`](super::prompt)'s.
//!
//! # Budget
//!
//! For a step of 64 tokens and 192 queries, heads of 128, the tensor cores of a multiprocessor take 1,536 clocks, and shared memory 1,408: 768
//! for scores, 384 for values, 256 for what arrives. Of a scheduler's instructions three takers have 305 each (and 70 where a maximum
//! rises), counted in the machine code that ptxas 13.0 makes.
//!
//! An H100 takes 1.17 to 1.25 ms for 512 rows of 32 heads at 65,536 tokens, whatever the type, 2.25 with [`prompt`](super::prompt); PyTorch's
//! attention of f16 takes 0.83. The first 8,192 rows in pieces of 512 take 2.0 ms (3.0; 1.03): there a piece has 128 blocks at most, some of
//! them for a few steps, and the launches before and behind.

use kvant_backend::{KvLayer, Result, Rows};
use kvant_codec::DType;
use kvant_codec::tile::TILE;

use super::decode::Kind;
use super::{HEADERS, SIGHT, constants, parts};
use crate::half::{COPIES_HEADER, WARPGROUP_ARCH, WARPGROUP_HEADER, WARPGROUP_OPTIONS};
use crate::kv::{MAX_HEADS, MAX_PARTS, TYPES, number};
use crate::module::Build;
use crate::{Context, Define, Header, KernelId, Source};

/// What only these kernels include.
const HOPPER_HEADERS: [Header; HEADERS.len() + 3] = {
    let [half, rotate, tile, bounded, look_up, attend, ends, apart, unpack, work] = HEADERS;
    let turn = Header { name: "turn.cuh", text: include_str!("turn.cuh") };
    [
        half,
        rotate,
        tile,
        bounded,
        look_up,
        attend,
        ends,
        apart,
        unpack,
        work,
        turn,
        COPIES_HEADER,
        WARPGROUP_HEADER,
    ]
};

/// The kernels for many queries.
static SOURCE: Source = Source {
    name: "hopper.cu",
    text: include_str!("hopper.cu"),
    headers: &HOPPER_HEADERS,
    constants: || {
        let cut = [("TAKERS", TAKERS), ("BRINGERS", BRINGERS), ("STAGES", STAGES)];
        let registers = [("TAKER_REGISTERS", REGISTERS[0]), ("BRINGER_REGISTERS", REGISTERS[1])];
        let numbers = cut.into_iter().chain(registers).chain([("QUERIES", super::QUERIES)]);
        numbers.fold(constants(), |constants, (name, n)| constants.whole(name, n))
    },
    options: &WARPGROUP_OPTIONS,
};

/// Sizes of values, as stored, that the kernels are for.
const DIMS: [usize; 2] = [64, 128];
/// Warpgroups of a block that take queries, and that unpack tiles.
const TAKERS: usize = 3;
const BRINGERS: usize = 1;
const WARPGROUP: usize = 128;
/// Steps that there is room for.
const STAGES: usize = 3;
/// Tiles of a step.
const STEP: usize = 4;
/// Bytes of unpacked tiles at a time: some twice what the second-level cache of such a device holds, and of what a device keeps free for such.
const MOST_IMAGE_BYTES: usize = 96 << 20;
/// Registers of a thread that takes queries, and of one that brings tiles: multiples of 8, of all threads what a multiprocessor has.
const REGISTERS: [usize; 2] = [152, 56];
const _: () = assert!((REGISTERS[0] * TAKERS + REGISTERS[1] * BRINGERS) * WARPGROUP <= 1 << 16);

/// Queries of a block.
pub(super) const QUERIES: usize = 64 * TAKERS;
/// Threads of a block.
pub(super) const THREADS: u32 = (WARPGROUP * (TAKERS + BRINGERS)) as u32;

/// Whether the heads of `layer` are for these kernels, on compute capability `arch / 10`, and what these rows see of one can be unpacked at a
/// time.
pub(super) fn takes(rows: Rows, layer: &KvLayer, arch: u32) -> bool {
    let is_known = |head: usize| {
        let dims = dims(layer, head);
        let bytes = parts::images(rows, layer, head) * image_bytes(dims);
        dims.iter().all(|dim| DIMS.contains(dim)) && bytes <= MOST_IMAGE_BYTES
    };
    arch == WARPGROUP_ARCH && (0..layer.k.len()).all(is_known)
}

fn dims(layer: &KvLayer, head: usize) -> [usize; 2] {
    [layer.k[head].spec.dim(), layer.values(head).spec.value_dim()]
}

/// Shared memory of a block for heads of these sizes: `Shared` of `hopper.cu`.
pub(super) fn bytes([k_dim, v_dim]: [usize; 2]) -> usize {
    let stages = STAGES * STEP * TILE * (k_dim + v_dim);
    (stages + QUERIES * k_dim) * size_of::<u16>() + QUERIES * SIGHT
}

/// Bytes of a tile, unpacked, of keys and of values of these sizes.
pub(super) fn image_bytes([k_dim, v_dim]: [usize; 2]) -> usize {
    TILE * (k_dim + v_dim) * size_of::<u16>()
}

/// Sequences of so many `images` each that a launch takes: as many as go together, or one.
pub(super) fn parts_at_once(layer: &KvLayer, images: impl Iterator<Item = usize>) -> usize {
    let bytes = images.sum::<usize>() * image_bytes(dims(layer, 0));
    if bytes <= MOST_IMAGE_BYTES { MAX_PARTS } else { 1 }
}

/// KV heads of a layer of `n_heads` whose `images` tiles each are unpacked at a time: about as many of each time.
pub(super) fn heads_at_once(layer: &KvLayer, images: usize, n_heads: usize) -> usize {
    let most = (MOST_IMAGE_BYTES / (images * image_bytes(dims(layer, 0))).max(1)).clamp(1, MAX_HEADS);
    n_heads.div_ceil(n_heads.div_ceil(most))
}

/// One of the kernels.
pub(super) fn kernel(cx: &Context, kind: &Kind, is_capped: bool, name: &'static str) -> Result<KernelId> {
    let types = kind.specs.map(|spec| spec.dtype.into());
    Ok(cx.kernel_with(&SOURCE, &defines(types, kind.dims, is_capped), name)?)
}

/// `types` are numbers, as kernels count them.
fn defines([k, v]: [u32; 2], dims: [usize; 2], is_capped: bool) -> Vec<Define> {
    [("K_TYPE", k), ("V_TYPE", v)].into_iter().chain(super::defines(dims, is_capped)).collect()
}

/// What is compiled ahead: the sizes of stored heads in use, and every type in heads of 128. Others when they come.
pub(super) fn builds() -> impl Iterator<Item = Build> {
    let known = super::usual_heads().filter(|(dims, _)| dims.iter().all(|dim| DIMS.contains(dim)));
    let usual = known.map(|(dims, is_capped)| (DType::Turbo3, dims, is_capped));
    let others = TYPES.into_iter().filter(|&dtype| dtype != DType::Turbo3);
    usual.chain(others.map(|dtype| (dtype, [128; 2], false))).map(|(dtype, dims, is_capped)| Build {
        source: &SOURCE,
        defines: defines([number(dtype); 2], dims, is_capped),
    })
}
