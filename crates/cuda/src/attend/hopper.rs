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
//! A block has three consumer warpgroups of 64 queries each, of heads of 256 two, and one producer
//! warpgroup that copies. They iterate over steps of 64 tokens, four tiles of keys and four of
//! values, through three stages of shared memory, of heads of 256 two, where keys and values are
//! filled apart.
//!
//! - **Scores** of a step are MMAs of queries and keys in shared memory, `m64n64k16`; **values**
//!   are added by `m64n128k16`, with the softmax weights as left operand, straight from the
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
//! - **Registers** move from the producer to the consumers: 56 and 152 per thread, in heads of 256
//!   88 and 208, of which 128 are outputs.
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
//! In heads of 256 a step has 128 queries, and both take 2,048 clocks: shared memory 1,024 for
//! scores, 512 for values and 512 for arriving data. [`prompt`](super::prompt) reaches 368 TFLOP/s
//! at best, and unpacks each tile for every block of queries.
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
        let numbers = [("PRODUCERS", PRODUCERS), ("QUERIES", super::QUERIES)];
        numbers.into_iter().fold(constants(), |constants, (name, n)| constants.whole(name, n))
    },
    options: &WARPGROUP_OPTIONS,
};

/// Stored sizes of keys and of values that the kernels support.
const DIMS: [&[usize]; 2] = [&[64, 128, 192, 256], &[64, 128, 256]];
/// Producer warpgroups of a block.
const PRODUCERS: usize = 1;
const WARPGROUP: usize = 128;
/// Queries of a consumer warpgroup.
const CONSUMER_QUERIES: usize = 64;
/// Tiles of a step.
const STEP: usize = 4;
/// Bytes of unpacked tiles at a time: about twice the L2 cache of such a device, and within the
/// memory that a device leaves free for scratch.
const MAX_UNPACKED_BYTES: usize = 96 << 20;
/// Registers of a multiprocessor.
const SM_REGISTERS: usize = 1 << 16;

/// The shape of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockShape {
    /// Consumer warpgroups.
    consumers: usize,
    /// Stages of shared memory, one step each.
    stages: usize,
    /// Registers per thread of consumers and producers, multiples of 8.
    registers: [usize; 2],
}

/// Blocks for heads of up to 192, and for those of 256, whose outputs take twice the registers.
const BLOCK_SHAPES: [BlockShape; 2] = [
    BlockShape { consumers: 3, stages: 3, registers: [152, 56] },
    BlockShape { consumers: 2, stages: 2, registers: [208, 88] },
];

// Warpgroups divide the registers that the threads begin with.
const _: () = assert!(BLOCK_SHAPES[0].has_registers() && BLOCK_SHAPES[1].has_registers());

impl BlockShape {
    /// Returns that of blocks for the heads of a layer.
    pub fn of(layer: &KvLayer) -> Self {
        Self::for_dims((0..layer.k.len()).flat_map(|head| dims(layer, head)))
    }

    fn for_dims(mut dims: impl Iterator<Item = usize>) -> Self {
        BLOCK_SHAPES[usize::from(dims.any(|dim| dim > 192))]
    }

    const fn has_registers(&self) -> bool {
        let warpgroups = self.consumers + PRODUCERS;
        let at_first = SM_REGISTERS / (WARPGROUP * warpgroups) / 8 * 8;
        let [consumer, producer] = self.registers;
        consumer * self.consumers + producer * PRODUCERS <= at_first * warpgroups
    }

    /// Returns the queries of a block.
    pub fn queries(self) -> usize {
        CONSUMER_QUERIES * self.consumers
    }

    /// Returns the threads of a block.
    pub fn threads(self) -> u32 {
        (WARPGROUP * (self.consumers + PRODUCERS)) as u32
    }

    /// Returns the shared memory of a block for these head sizes: `Shared` of `hopper.cu`.
    pub fn bytes(self, [k_dim, v_dim]: [usize; 2]) -> usize {
        let stages = self.stages * STEP * TILE * (k_dim + v_dim);
        (stages + self.queries() * k_dim) * size_of::<u16>() + self.queries() * VISIBLE_RANGE_BYTES
    }

    fn defines(self) -> [Define; 4] {
        let [consumer, producer] = self.registers;
        let numbers = [
            ("CONSUMERS", self.consumers),
            ("STAGES", self.stages),
            ("CONSUMER_REGISTERS", consumer),
            ("PRODUCER_REGISTERS", producer),
        ];
        numbers.map(|(name, n)| (name, n as u32))
    }
}

/// Returns whether these kernels serve the heads of `layer` on compute capability `arch / 10`, and
/// the tiles that `rows` attend to in one head fit the unpack buffer.
pub(super) fn supports(rows: TokenSpan, layer: &KvLayer, arch: u32) -> bool {
    let is_known = |head: usize| {
        let dims = dims(layer, head);
        let bytes = plan::n_visible_tiles(rows, layer, head) * unpacked_tile_bytes(dims);
        has_dims(dims) && bytes <= MAX_UNPACKED_BYTES
    };
    arch == WARPGROUP_ARCH && (0..layer.k.len()).all(is_known)
}

fn has_dims(dims: [usize; 2]) -> bool {
    DIMS.iter().zip(&dims).all(|(known, dim)| known.contains(dim))
}

fn dims(layer: &KvLayer, head: usize) -> [usize; 2] {
    [layer.k[head].spec.stored_dim(), layer.values(head).spec.stored_value_dim()]
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
    block_shape: BlockShape,
    name: &'static str,
) -> Result<KernelId> {
    let types = head_format.specs.map(|spec| spec.dtype.into());
    Ok(cx.kernel_with(&SOURCE, &defines(types, head_format.dims, is_capped, block_shape), name)?)
}

/// Returns the macros of a variant; `types` are kernel type numbers.
fn defines([k, v]: [u32; 2], dims: [usize; 2], is_capped: bool, block_shape: BlockShape) -> Vec<Define> {
    let of_heads = [("K_TYPE", k), ("V_TYPE", v)].into_iter().chain(super::defines(dims, is_capped));
    of_heads.chain(block_shape.defines()).collect()
}

/// Returns the variants that are compiled ahead of time.
pub(super) fn builds() -> impl Iterator<Item = Build> {
    let known = super::usual_formats().filter(|format| has_dims(format.dims));
    known.map(|UsualFormat { types, dims, is_capped }| {
        let block_shape = BlockShape::for_dims(dims.into_iter());
        Build { source: &SOURCE, defines: defines(types.map(number), dims, is_capped, block_shape) }
    })
}
