//! Prefill attention for every device and head size that [`hopper`](super::hopper) does not serve.
//!
//! A block of eight warps takes 256 queries and iterates over its tiles in steps of 64 tokens: four
//! tiles of keys and four of values, of which each warp unpacks one, for all.
//!
//! - **A warp takes 32 queries** (16 where values are wider than 128), so that a fragment of keys
//!   or values that `ldmatrix` reads serves two MMAs. Outputs and the scores of 64 tokens fill its
//!   registers; queries are read again for every step.
//! - **One softmax per step**: maxima cross lanes and outputs are rescaled once in 64 tokens, the
//!   latter where a maximum has risen, and only steps that are not fully visible to a query apply
//!   the mask.
//! - **Steps are double-buffered.** Of the two warps that share a scheduler one unpacks while the
//!   other multiplies. f16 tiles are copied by `cp.async`, which occupies neither.
//! - **Tiles of a step are uniform** (contiguous, of one type), or else the step is processed tile
//!   by tile: at the end of the sink, at the start of the 16-bit tiles, and at the end of the
//!   sequence.
//!
//! A KV split costs as much as 16 tiles: writing and reading 128 outputs of a query, 1 KB or a
//! quarter of a nanosecond at 4.3 TB/s, equals the MMAs of ten, and no MMA runs before the first
//! step has arrived. So the number of splits is the one that finishes first.
//!
//! # Shared memory
//!
//! Two buffers of 64 tokens and 256 queries are 131,072 bytes for heads of 128, and 196,608 for
//! heads of 256, whose blocks take 128 queries: one block on a multiprocessor of 9.0, which is also
//! the limit of its registers. Where a block has less, steps are of 32 tokens, and then blocks of
//! four warps (8.0 with heads of 256; 8.9 and 12.0).
//!
//! # Budget
//!
//! Counted in the machine code that ptxas 13.0 makes for 9.0. For a step of 64 tokens and 256
//! queries, heads of 128, each scheduler of a multiprocessor has 512 MMAs `mma.m16n8k16` of 6.5
//! clocks, 3,328, and shared memory transfers 360,448 bytes in 2,816. Two warps issue 1,035
//! instructions each to process a step (1,240 over floats, whose softmax is interleaved with the
//! MMAs), 140 more where a maximum rises, and 130 each to find their tile. To unpack one they
//! issue, keys and values, per value:
//!
//! | f16 | q8_0 | q4_0 | turbo2 | turbo3 | turbo4 | turbo2t | turbo3t |
//! |---|---|---|---|---|---|---|---|
//! | 1.5, 1.1 | 7.0, 3.9 | 7.2, 4.1 | 7.2, 4.3 | 8.8, 5.7 | 8.5, 5.8 | 15, 12 | 16, 13 |
//! | 2,900 | 3,000 | 3,100 | 3,100 | 3,300 | 3,200 | 4,000 | 4,200 |
//!
//! The last row is instructions of a scheduler in a step. So MMAs bound all but turbo2t and
//! turbo3t, at 565 TFLOP/s for 132 multiprocessors at 1.7 GHz, reduced by latencies. In heads of
//! 256 a fragment serves one MMA: shared memory takes 5,120 clocks for 3,328 of MMAs, 368 TFLOP/s
//! at best. Kernels of quantized types spill no register, those of floats of 128 wide some twenty
//! in a step.
//!
//! Measured on an H100: 244 TFLOP/s, of f16 and of quantized types alike. Two warps on a scheduler
//! stall on their own loads in 40 % of their clocks, and issue in 41 %. The count assumed that one
//! of the two always multiplies.

use kvant_backend::{KvLayer, Result};
use kvant_codec::tile::TILE;

use super::decode::HeadFormat;
use super::{HEADERS, QUERIES, UsualFormat, VISIBLE_RANGE_BYTES, constants};
use crate::kv::number;
use crate::module::Build;
use crate::{Context, Define, KernelId, Source};

/// The prefill kernels.
static SOURCE: Source = Source {
    name: "prompt.cu",
    text: include_str!("prompt.cu"),
    headers: &HEADERS,
    constants: || constants().whole("QUERIES", QUERIES),
    options: &[],
};

/// Largest stored value size at which the outputs of two 16-query tiles stay in registers.
const MAX_FOR_TWO: usize = 128;

/// Cost of one more KV split, in tiles that a block could process in that time: its queries and
/// first step must arrive before any MMA, and its outputs, 4 bytes each, go to memory and back.
const SPLIT_COST: usize = 16;
/// Minimum tiles of a split; splits are multiples of it.
const MIN_TILES: usize = 8;

/// Shape of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Partition {
    /// Warps per block.
    warps: usize,
    /// 16-query tiles per warp.
    query_tiles: usize,
    /// Tiles that a block processes at a time.
    step: usize,
}

impl Partition {
    /// Returns the shape for the heads of `layer`, with `shared_bytes` of shared memory per block.
    pub fn of(layer: &KvLayer, shared_bytes: usize) -> Self {
        let k = layer.k.iter().map(|tensor| tensor.spec.stored_dim()).max().unwrap_or(0);
        let v = (0..layer.k.len()).map(|head| layer.values(head).spec.stored_value_dim()).max().unwrap_or(0);
        Self::fitting([k, v], shared_bytes)
    }

    /// Returns the largest shape that fits, for heads of these sizes. The last fits on every device
    /// with the tensor cores that the kernel needs.
    fn fitting(dims: [usize; 2], shared_bytes: usize) -> Self {
        let max_query_tiles = if dims[1] > MAX_FOR_TWO { 1 } else { 2 };
        [(8, max_query_tiles, 4), (8, max_query_tiles, 2), (4, max_query_tiles, 2), (4, 1, 2)]
            .map(|(warps, query_tiles, step)| Self { warps, query_tiles, step })
            .into_iter()
            .find(|partition| partition.bytes(dims) <= shared_bytes)
            .unwrap_or(Self { warps: 4, query_tiles: 1, step: 2 })
    }

    pub fn queries(self) -> usize {
        QUERIES * self.query_tiles * self.warps
    }

    pub fn threads(self) -> u32 {
        32 * self.warps as u32
    }

    /// Returns the shared memory of a block for these head sizes: `Shared` of `prompt.cu`.
    pub fn bytes(self, [k_dim, v_dim]: [usize; 2]) -> usize {
        let tiles = 2 * self.step * TILE * (k_dim + v_dim);
        (tiles + self.queries() * k_dim) * size_of::<u16>() + self.queries() * VISIBLE_RANGE_BYTES
    }
}

/// Returns the tiles per KV split of a sequence that attends to `tiles` and takes `blocks` blocks
/// without splits: as many splits as finish first, with one block per multiprocessor.
pub(super) fn split_tiles(cx: &Context, tiles: usize, blocks: usize) -> usize {
    let n_sms = cx.gpu().properties().n_sms as usize;
    let max_splits = tiles.div_ceil(MIN_TILES).min(4 * n_sms).max(1);
    let of = |splits: usize| tiles.div_ceil(splits).max(1).next_multiple_of(MIN_TILES);
    let finish_time = |splits: &usize| {
        let each = of(*splits);
        (blocks * tiles.div_ceil(each)).div_ceil(n_sms) * (each + SPLIT_COST)
    };
    of((1..=max_splits).min_by_key(finish_time).unwrap_or(1))
}

/// Returns the kernel `name`.
pub(super) fn kernel(
    cx: &Context,
    head_format: &HeadFormat,
    is_capped: bool,
    partition: Partition,
    name: &'static str,
) -> Result<KernelId> {
    let types = head_format.specs.map(|spec| spec.dtype.into());
    Ok(cx.kernel_with(&SOURCE, &defines(types, head_format.dims, is_capped, partition), name)?)
}

/// Returns the macros of a variant; `types` are kernel type numbers.
fn defines(types: [u32; 2], dims: [usize; 2], is_capped: bool, partition: Partition) -> Vec<Define> {
    let Partition { warps, query_tiles, step } = partition;
    let partition = [("BLOCK_WARPS", warps), ("QUERY_TILES", query_tiles), ("STEP", step)];
    let types = [("K_TYPE", types[0]), ("V_TYPE", types[1])];
    let others =
        super::defines(dims, is_capped).into_iter().chain(partition.map(|(name, n)| (name, n as u32)));
    types.into_iter().chain(others).collect()
}

/// Returns the variants that are compiled ahead of time: for the shared memory of compute
/// capability 9.0, of 8.0, and of the consumer cards of both and of later ones.
pub(super) fn builds() -> impl Iterator<Item = Build> {
    const SHARED: [usize; 3] = [227 << 10, 163 << 10, 99 << 10];
    super::usual_formats().flat_map(|UsualFormat { types, dims, is_capped }| {
        let mut partitions = SHARED.map(|shared_bytes| Partition::fitting(dims, shared_bytes)).to_vec();
        partitions.dedup();
        partitions.into_iter().map(move |partition| Build {
            source: &SOURCE,
            defines: defines(types.map(number), dims, is_capped, partition),
        })
    })
}
