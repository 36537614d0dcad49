//! Decode attention: up to eight rows of a sequence, whose query heads of a KV head are processed
//! eight at a time. Tiles go from memory to the tensor cores through registers. [`super::splits`]
//! plans which block processes what.
//!
//! A warp processes a *unit* of 8 tiles: the 128 tokens of a block of the cache. Its lanes are (g,
//! t), g = 0..8 and t = 0..4, as the tensor cores number them, and the eight queries are the
//! columns of every MMA:
//!
//! - **Keys.** Lane (g, t) loads whole groups of tile g, every fourth from t on, by 16 bytes at a
//!   time. MMA i of eight takes tokens i and i + 8 of all eight tiles as its 16 rows, and the four
//!   dims of each lane's group as its share of 16 dims: the assignment of tokens to rows and of
//!   dims to reduction steps is free, as long as the queries follow it. So the lane that loaded a
//!   group uses all of its 64 codes, and nothing passes through shared memory. Codes are multiplied
//!   as bytes; the contribution of their bias is subtracted from the f32 sum of a block, which is
//!   then multiplied by the token's scale.
//! - **The centre** that keys of a block are relative to is every row of one additional MMA for
//!   each 16 dims. Its result is added to the maximum of each tile in codes, not to its scores.
//! - **Softmax weights** of the unit (128 tokens, 8 queries, f16) are the only data that passes
//!   through shared memory, to become right operands.
//! - **Values.** Lane (g, t) has the group of dims 16 g .. 16 g + 16 and tokens 4 t .. 4 t + 4 of
//!   one tile: the 32 groups of 128 dims are contiguous. MMA i takes dims i and i + 8 of each 16 as
//!   rows. With 64 dims or fewer, lanes g and g + 4 share a group of 16 dims, half of its rows
//!   each, in four MMAs.
//! - **Scales of values** join the softmax weights where a token has one scale, in turbo types and
//!   heads of up to 128; codes are multiplied as bytes then, as those of keys are, and one more MMA
//!   for each tile collects what the bias adds to every dim. A scale above 1 must not overflow a
//!   weight, which is up to 2^[`LIFT`](super::LIFT): scales are divided by the power of two above
//!   the largest that the query sees in the unit, which multiplies the outputs instead. Powers of
//!   two round nothing, and masked tokens have no part in them, so that bits do not depend on other
//!   rows. In other formats scales are multiplied in as f16, two tokens at a time.
//!
//! Trellis codes (turbo2t, turbo3t) are looked up together with those of the 16 dims before: for
//! keys in the group that the lane had before, for values in the group of the lane four before it;
//! at the start of a block the predecessors are the last group of the block, one dim to the left.
//! Six bits select one of 64 f16 levels in shared memory, where each lane has a copy in a bank of
//! its own, 8 KB in all; `dp4a` computes the address from a byte of four.
//!
//! Tiles of the f16 sink and tail use the same loop with another `Group`; a unit that contains both
//! kinds is processed once for each, and the lanes of the other kind contribute zero.
//!
//! # Splits
//!
//! At the end of a split the warps leave their sums in shared memory, which held the softmax
//! weights before, and every thread folds four queries of one dim into the total that it owns there
//! (`fold.cuh`): some 110 instructions of a warp. Outputs leave the block when the total is
//! complete. Where several blocks share columns, the last one to finish joins their results, all
//! four warps together, with 16 loads of 16 bytes in flight per thread: 43 splits of four queries,
//! 88 KB, take three waits for memory, where a warp per query with four loads in flight took
//! eleven. Columns without a query are neither prepared, exchanged, written nor joined; only the
//! softmax has them, in lanes that would idle.
//!
//! Addresses of blocks are loaded one unit ahead, and the first keys of a warp are requested before
//! the queries are prepared.
//!
//! # Error of scaled weights
//!
//! A weight and its scale are rounded once, together, by 2^-11, where weight, scale and their
//! product with the level took three roundings; below 2^-14 (a weight of less than 2^-29 of the
//! largest, at the largest scale) by 2^-25, or 2^-40 of the largest. Bytes are exact. The bias
//! makes sums larger than what is left of them: of mean magnitude 128 where levels have 37, so a
//! rounding of the f32 sum counts 3.5 times: for the `n` MMAs of a split at most `3.5 n 2^-23` of
//! the mean magnitude of the values, 1e-5 at three units, against 4.9e-4 for a rounding to f16. So
//! the error in the documentation of [`super`] is not exceeded.
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
//! visible to all queries, K and V and softmax, counted in the machine code that `ptxas` 13.0 makes
//! for compute capability 9.0; and the share of an H200's 4.3 TB/s (132 multiprocessors at 1.98
//! GHz) that either allows:
//!
//! | | turbo2 | turbo3 | turbo4 | q4_0 | q8_0 | f16 | turbo2t | turbo3t |
//! |---|---|---|---|---|---|---|---|---|
//! | instructions | 2.2 | 2.6 | 3.3 | 2.6 | 2.2 | 1.6 | 4.9 | 5.6 |
//! | integer instructions | 1.2 | 1.5 | 2.1 | 1.2 | 0.8 | 0.9 | 1.8 | 2.4 |
//! | allowed by issue | 94 % | all | all | all | all | all | 43 % | 54 % |
//! | allowed by the integer pipe | 87 % | 99 % | 94 % | all | all | all | 56 % | 63 % |
//!
//! Of turbo types, the loops over codes are counted with scales in the weights; 180 instructions of
//! a unit are added for the softmax. `ptxas` 13.4 spills 12 to 56 bytes of heads of 128, around the
//! loops over codes, none within.
//!
//! turbo3 of 64 dims before that: 4.0 and 2.0 instructions, 77 % and 76 %; of 256: 2.9 and 1.5,
//! all. Stalls on memory and on dependent instructions come on top: 12 warps fit a multiprocessor
//! at 168 registers. Loads in flight: two to four groups of 24 bytes per lane (turbo3), 18 to 36 KB
//! for these; 4.3 TB/s at a latency of 700 ns need 23 KB.
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
//! These times are of the kernel before scales joined the weights and before the fold; no card has
//! run this one.
//!
//! Possible improvements: signs of turbo4's keys as f16 signs, since its levels are symmetric (12 %
//! of its integer instructions); tiles that arrive by copies to shared memory, as weights do in
//! `gemv.cu`, which leaves registers for more warps; bytes as int8 operands, two rows of a word in
//! two columns, so that four queries fill the eight columns.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{KvTensorSpec, Result};
use kvant_codec::{DType, turbo};

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
    constants: || constants().whole("QUERIES", QUERIES).whole("UNIT", UNIT),
    // Lambdas are device code.
    options: &["--device-as-default-execution-space"],
};

/// Queries that a block processes at a time, the columns of its products.
pub(super) const QUERIES: usize = 8;
/// Maximum number of rows of a sequence that this kernel serves, in tiles of [`QUERIES`] queries.
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

fn defines(types: [DType; 2], dims: [usize; 2], is_capped: bool) -> [Define; 6] {
    let ([k, v], [k_dim, v_dim, capped]) = (types.map(number), super::defines(dims, is_capped));
    [("K_TYPE", k), ("V_TYPE", v), k_dim, v_dim, capped, ("BLOCKS", resident_blocks(dims[1]) as u32)]
}

/// Returns the resident blocks per multiprocessor: as many as leave the accumulators of `v_dim`
/// dims in registers.
pub(super) fn resident_blocks(v_dim: usize) -> usize {
    if v_dim <= turbo::LEN { 3 } else { 2 }
}

/// Returns the variants that are compiled ahead of time.
pub(super) fn builds() -> impl Iterator<Item = Build> {
    super::usual_formats().map(|UsualFormat { types, dims, is_capped }| Build {
        source: &SOURCE,
        defines: defines(types, dims, is_capped).to_vec(),
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
    let Shares { blocks, share, longer, block_partials } = splits.shares(cx, v_dim);
    let n_partials = blocks * block_partials * QUERIES;
    let on_partials = cx.scratch(n_partials * v_dim * size_of::<f32>())?;
    let on_state = cx.scratch(n_partials * 2 * size_of::<f32>())?;
    let mut params = DecodeParams {
        attend: params,
        listed: 0,
        n_sequences: splits.sequences.len() as u32,
        share: share as u32,
        longer: longer as u32,
        block_partials: block_partials as u32,
    };
    let common = &mut params.attend.common;
    (common.partial_out, common.state) = (on_partials.ptr(), on_state.ptr());
    match &splits.listed {
        Some(listed) => params.listed = listed.ptr(),
        None => common.sequences[..splits.sequences.len()].copy_from_slice(&splits.sequences),
    }
    let kernel =
        cx.kernel_with(&SOURCE, &defines(head_format.types, head_format.dims, is_capped), "decode")?;
    Ok(cx.launch(kernel, Launch::linear(blocks as u32, THREADS), &params)?)
}
