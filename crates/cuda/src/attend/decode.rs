//! Decode attention: up to eight rows of a sequence, whose query heads of a KV head are processed
//! in one or two *quads* of four. Tiles go from memory to the tensor cores through registers.
//! [`super::splits`] plans which block processes what.
//!
//! A warp processes a *unit* of 8 tiles: the 128 tokens of a block of the cache. Its lanes are (g,
//! t), g = 0..8 and t = 0..4, as the tensor cores number them. Four queries fill the eight columns
//! of every MMA, as each has two: `mma.m16n8k32` of bytes takes the looked-up codes of a register
//! word as they come, those of rows i and i + 8 interleaved, and the right operand has zeros where
//! a column meets the other row. So lane (g, t) gets rows i, i + 8 (the two columns), i + 4 and i +
//! 12 (the two halves of the MMA's rows) of query t of each quad, and no result is empty. f16
//! operands likewise have one row in one half of the reduction of `mma.m16n8k16`, another in the
//! other.
//!
//! - **Keys.** Lane (g, t) loads whole groups of tile g, every fourth from t on, by 16 bytes at a
//!   time, and multiplies their 16 tokens in fours: the assignment of tokens to rows and of dims to
//!   reduction steps is free, as long as the queries follow it. So the lane that loaded a group
//!   uses all of its 64 codes, and nothing passes through shared memory. For turbo codes, queries
//!   are 16-bit fixed point, `256 high + low`, two products with the same codes; the sums of a
//!   block are exact, and are then multiplied by the token's scale. Other codes are f16, and so are
//!   queries then: q8_0 and q4_0 need no look-up, and have four sums where turbo has one.
//! - **The centre** that keys of a block are relative to is in all rows of two additional f16 MMAs
//!   for each 32 dims. Its result is added to the maximum of each tile in codes, not to its scores.
//! - **Softmax weights** of the unit (128 tokens, 16 bits for each query) are the only data that
//!   passes through shared memory, to become right operands.
//! - **Values.** Lane (g, t) has the group of dims 16 g .. 16 g + 16 and tokens 4 t .. 4 t + 4 of
//!   one tile: the 32 groups of 128 dims are contiguous. MMA i takes dims i, i + 4, i + 8 and i +
//!   12 of each 16. With 64 dims or fewer, lanes g and g + 4 share a group of 16 dims, half of its
//!   rows each.
//! - **Scales of values** join the softmax weights where a token has one scale per slice of 128
//!   dims, as in turbo types and heads of 32, 64, 128, 192 and 256. The products of weights and
//!   scales of a query in a unit are 16-bit fixed point relative to the largest of them, in two
//!   bytes again, and the sums of a unit are exact. Masked tokens have no part in the largest, so
//!   that bits do not depend on other rows. In other formats scales are multiplied in as f16, two
//!   tokens at a time. Trellis levels are f16, their weights relative to the largest too.
//!
//! Trellis codes (turbo2t, turbo3t) are looked up together with those of the 16 dims before: for
//! keys in the group that the lane had before, for values in the group of the lane four before it;
//! at the start of a block the predecessors are the last group of the block, one dim to the left.
//! Six bits select one of 64 f16 levels in shared memory, where each lane has a copy in a bank of
//! its own, 8 KB in all; `dp4a` computes the address from a byte of four.
//!
//! Tiles of the f16 sink and tail have products of their own; a unit that contains both kinds is
//! processed once for each, and the lanes of the other kind contribute zero.
//!
//! # Splits
//!
//! At the end of a split the warps leave their sums in shared memory, which held the softmax
//! weights before, and every thread folds four queries of one dim into the total that it owns there
//! (`fold.cuh`): some 110 instructions of a warp. Outputs leave the block when the total is
//! complete. Where several blocks share columns, the last one to finish joins their results, all
//! four warps together, with sixteen loads of 16 bytes in flight per thread: 66 splits of four
//! queries, 135 KB, take five waits for memory, where a warp per query took them one by one. Quads
//! without a query are neither exchanged, written nor joined.
//!
//! Before the kernel before has ended, a block finds its columns among the parameters, without a
//! division ([`Divisor`]). Addresses of blocks are loaded one unit ahead, and the first keys of a
//! warp are requested before the queries are prepared.
//!
//! # Error of fixed point
//!
//! The error in the documentation of [`super`] is not exceeded:
//!
//! - *Queries* are multiples of the largest magnitude by 32,639. Of that unit `u` a rounding has
//!   variance `u² / 12`, that of f16 `2^-22 / 3` of the square. The mean over the dims is less in
//!   fixed point as long as the largest is below `2 · 32,639 / 2^11` = 32 times the root of the
//!   mean square; of 256 dims it is 16 times at most, of the rotated ones about 3.
//! - *Weights and scales* are multiples of the largest product of a unit by 65,535, rounded once
//!   where weight, scale and their product with the level took three roundings. The 128 tokens have
//!   a variance of `128 / 12 / 65535²`, 2.5e-9 of the square of the largest; f16 has 2.4e-7 (three
//!   roundings) of the sum of all squares, which is not less. Tokens below half a step vanish: 127
//!   of them are 2^-10 of the largest together, two of its roundings to f16.
//! - *Sums* of a unit are exact: each at most `128 · 128 · 255`, and `256 high + low` is less than
//!   2^31. One rounding to f32 follows.
//!
//! # Budget
//!
//! Each of the four quarters of a multiprocessor issues one instruction (of a warp) per clock, and
//! every other clock an integer instruction: logic, shifts, byte permutations, selections,
//! comparisons, conversions to f16 (CUDA C++ programming guide, throughput of arithmetic
//! instructions, compute capability 9.0: 64 lanes per clock). That integer pipe bounds the
//! look-ups, so work moves to other pipes where possible: the upper half of a word is taken by an
//! f16 addition, left shifts are multiplications.
//!
//! Instructions per value, and the integer instructions among them, for a unit of 128 dims that is
//! visible to all of four queries, K and V, softmax and addresses, counted in the machine code that
//! `ptxas` 13.4 makes for compute capability 9.0; and the share of an H200's 4.3 TB/s (132
//! multiprocessors at 1.98 GHz) that either allows:
//!
//! | | turbo2 | turbo3 | turbo4 | q4_0 | q8_0 | f16 | turbo2t | turbo3t |
//! |---|---|---|---|---|---|---|---|---|
//! | instructions | 1.5 | 2.0 | 2.4 | 2.7 | 2.4 | 1.6 | 4.8 | 5.6 |
//! | integer instructions | 0.7 | 1.1 | 1.4 | 1.2 | 0.8 | 0.9 | 1.9 | 2.4 |
//! | allowed by issue | all | all | all | all | all | all | 43 % | 55 % |
//! | allowed by the integer pipe | all | all | all | all | all | all | 55 % | 62 % |
//!
//! Stalls on memory and on dependent instructions come on top: 16 warps fit a multiprocessor at 128
//! registers (floats, and turbo2 to turbo4 of one block, with four queries), else 12 at 168, of
//! heads beyond 128 eight or twelve. Spills are outside of units. Loads in flight: four
//! groups of 24 bytes per lane (turbo3), 48 KB for 16 warps; 4.3 TB/s at a latency of 700 ns need
//! 23 KB. Counts of other heads and of eight queries, and what the simulator makes of them:
//! docs/benchmarks/2026-12-01-decode-bytes.md.
//!
//! # On an H100
//!
//! At 65,536 tokens and eight KV heads, relative to the copy bandwidth: f16 80 %, q8_0 68 %, turbo4
//! 42 %, turbo3 38 % (docs/benchmarks/2026-11-26-h100.md). Quantized types are latency-bound: each
//! scheduler has two and a half warps, of which one is eligible in 42 % of the clocks. A third of
//! the stalls is on memory, a sixth on the results of preceding instructions, a tenth at the
//! barriers of the epilogue. Tried there, and slower: prefetching the next unit (its lines leave
//! the L2 cache before they are used, f16 1.3 times as long); loading groups and tiles one
//! iteration early (registers spill around the loops: turbo3 1.12 times, q8_0 1.4 times as long);
//! four blocks on a multiprocessor (128 registers, spilled: 1.16 times).
//!
//! These times are of the kernel before bytes were operands and before the fold; no card has run
//! this one.
//!
//! Possible improvement: tiles that arrive by bulk copies to shared memory, as weights do in
//! `gemv.cu`, which hides latency without registers.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{KvTensorSpec, Result};
use kvant_codec::{DType, turbo};

use super::divisor::Divisor;
use super::splits::{Shares, Splits};
use super::{HEADERS, KernelParams, OP, THREADS, UsualFormat, constants};
use crate::kv::{MAX_PARAMS, SpecParams, number};
use crate::module::Build;
use crate::{Context, Define, DevicePtr, Header, Launch, Source};

const DECODE_HEADERS: [Header; 10] = {
    let [half, rotate, tile, bounded, look_up, attend, prologue_epilogue, ..] = HEADERS;
    let groups = Header { name: "groups.cuh", text: include_str!("groups.cuh") };
    let fold = Header { name: "fold.cuh", text: include_str!("fold.cuh") };
    let scores = Header { name: "scores.cuh", text: include_str!("scores.cuh") };
    [half, rotate, tile, bounded, look_up, attend, prologue_epilogue, groups, fold, scores]
};

/// The decode kernel.
static SOURCE: Source = Source {
    name: "decode.cu",
    text: include_str!("decode.cu"),
    headers: &DECODE_HEADERS,
    constants: || constants().whole("UNIT", UNIT),
    // Lambdas are device code.
    options: &["--device-as-default-execution-space"],
};

/// Queries that a block processes at a time, at most.
pub(super) const MAX_QUERIES: usize = 8;
/// Queries of a block where no head of a sequence has more.
const FEW_QUERIES: usize = 4;
/// Maximum number of rows of a sequence that this kernel serves, in tiles of [`MAX_QUERIES`]
/// queries.
pub(super) const MAX_ROWS: usize = 8;
/// Tiles that a warp processes at a time: those of a block.
pub(super) const UNIT: usize = 8;

/// `DecodeParams` of `fold.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DecodeParams {
    attend: KernelParams,
    listed: DevicePtr,
    n_sequences: u32,
    share: u32,
    longer: u32,
    block_partials: u32,
    by_share: Divisor,
    by_longer_share: Divisor,
}

const _: () = assert!(size_of::<DecodeParams>() <= MAX_PARAMS);

/// Storage formats of the KV tensors of a head, keys first. The kernel is compiled for the types
/// and sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadFormat {
    types: [DType; 2],
    /// Stored values per token; for values of a shared-KV tensor (MLA), the dims they take of it.
    pub dims: [usize; 2],
    pub is_shared_kv: bool,
    pub specs: [SpecParams; 2],
}

impl HeadFormat {
    /// Returns the types and sizes as words.
    pub fn words(&self) -> [u64; 4] {
        let ([k, v], [k_dim, v_dim]) = (self.types.map(number), self.dims);
        [k.into(), v.into(), k_dim as u64, v_dim as u64]
    }

    /// Returns the resident blocks per multiprocessor.
    pub fn resident_blocks(&self, queries: usize) -> usize {
        resident_blocks(self.types, self.dims, queries)
    }

    /// The format of a head with these specs of keys and values.
    ///
    /// # Errors
    /// [`Unsupported`](kvant_backend::BackendError::Unsupported) when a count does not fit the
    /// kernel's parameters.
    pub fn new(specs: [&KvTensorSpec; 2]) -> Result<Self> {
        let params = [SpecParams::new(OP, specs[0])?, SpecParams::new(OP, specs[1])?];
        let [k, v] = specs;
        Ok(Self {
            types: [k.dtype, v.dtype],
            dims: [k.stored_dim(), v.stored_value_dim()],
            is_shared_kv: k.shared_kv.is_some(),
            specs: params,
        })
    }
}

fn defines(types: [DType; 2], dims: [usize; 2], is_capped: bool, queries: usize) -> [Define; 7] {
    let ([k, v], [k_dim, v_dim, capped]) = (types.map(number), super::defines(dims, is_capped));
    let blocks = resident_blocks(types, dims, queries) as u32;
    [("K_TYPE", k), ("V_TYPE", v), k_dim, v_dim, capped, ("QUERIES", queries as u32), ("BLOCKS", blocks)]
}

/// Returns the queries that a block processes at a time, where no head of a sequence has more than
/// `max`.
pub(super) fn queries_per_block(max: usize) -> usize {
    if max <= FEW_QUERIES { FEW_QUERIES } else { MAX_QUERIES }
}

/// Returns the resident blocks per multiprocessor: as many as leave what a unit needs in registers.
/// Keys of several blocks need more, as do blocks of 32 dims, whose sums come between the scores,
/// and levels from shared memory (trellis types).
fn resident_blocks(types: [DType; 2], dims: [usize; 2], queries: usize) -> usize {
    let is_float = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let is_plain = |dtype| is_float(dtype) || turbo::codebook(dtype).is_some();
    let leaves_registers = queries == FEW_QUERIES && types.into_iter().all(is_plain);
    let has_one_block = dims.iter().all(|dim| *dim <= turbo::LEN && dim.is_power_of_two());
    match dims[1] <= turbo::LEN {
        true if leaves_registers && has_one_block => 4,
        true => 3,
        false if leaves_registers => 3,
        false => 2,
    }
}

/// Returns the variants that are compiled ahead of time.
pub(super) fn builds() -> impl Iterator<Item = Build> {
    super::usual_formats().flat_map(|UsualFormat { types, dims, is_capped }| {
        [FEW_QUERIES, MAX_QUERIES].map(|queries| Build {
            source: &SOURCE,
            defines: defines(types, dims, is_capped, queries).to_vec(),
        })
    })
}

/// Queues the kernel for any number of sequences. It also prepares the queries and folds the
/// partial results of the splits.
pub(super) fn launch(
    cx: &Context,
    params: KernelParams,
    head_format: &HeadFormat,
    is_capped: bool,
    splits: &Splits,
) -> Result<()> {
    let v_dim = head_format.dims[1];
    let Shares { blocks, share, longer, block_partials } = splits.shares(cx, head_format);
    let n_partials = blocks * block_partials * splits.queries;
    let on_partials = cx.scratch(n_partials * v_dim * size_of::<f32>())?;
    let on_state = cx.scratch(n_partials * 2 * size_of::<f32>())?;
    let mut params = DecodeParams {
        attend: params,
        listed: 0,
        n_sequences: splits.sequences.len() as u32,
        share: share as u32,
        longer: longer as u32,
        block_partials: block_partials as u32,
        by_share: Divisor::new(share),
        by_longer_share: Divisor::new(share + 1),
    };
    let common = &mut params.attend.common;
    (common.partial_out, common.state) = (on_partials.ptr(), on_state.ptr());
    match &splits.listed {
        Some(listed) => params.listed = listed.ptr(),
        None => common.sequences[..splits.sequences.len()].copy_from_slice(&splits.sequences),
    }
    let defines = defines(head_format.types, head_format.dims, is_capped, splits.queries);
    let kernel = cx.kernel_with(&SOURCE, &defines, "decode")?;
    Ok(cx.launch(kernel, Launch::linear(blocks as u32, THREADS), &params)?)
}
