//! Decode attention: up to eight queries per KV head. Tiles go from memory to the tensor cores
//! through registers.
//!
//! A warp processes a *unit* of 8 tiles, 128 tokens. Its lanes are (g, t), g = 0..8 and t = 0..4,
//! as the tensor cores number them, and the eight queries are the columns of every MMA:
//!
//! - **Keys.** Lane (g, t) loads whole groups of tile g, every fourth from t on, by 16 bytes at a
//!   time. MMA i of eight takes tokens i and i + 8 of all eight tiles as its 16 rows, and the four
//!   dims of each lane's group as its share of 16 dims: the assignment of tokens to rows and of
//!   dims to reduction steps is free, as long as the queries follow it. So the lane that loaded a
//!   group uses all of its 64 codes, and nothing passes through shared memory. Codes are multiplied
//!   as bytes; the contribution of their bias is subtracted from the f32 sum of a block, which is
//!   then multiplied by the token's scale.
//! - **Centres** that keys of a block are relative to are the rows of one additional MMA for each
//!   16 dims, one row per tile: with a window a unit may span two blocks. Their result is added to
//!   the maximum of the tile, not to its scores.
//! - **Softmax weights** of the unit (128 tokens, 8 queries, f16) are the only data that passes
//!   through shared memory, to become right operands.
//! - **Values.** Lane (g, t) has the group of dims 16 g .. 16 g + 16 and tokens 4 t .. 4 t + 4 of
//!   one tile: the 32 groups of 128 dims are contiguous. MMA i takes dims i and i + 8 of each 16 as
//!   rows. Scales are multiplied in as f16, two tokens at a time. With 64 dims or fewer, lanes g
//!   and g + 4 share a group of 16 dims, half of its rows each, in four MMAs.
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
//! | instructions | 2.6 | 3.0 | 3.7 | 2.6 | 2.2 | 1.6 | 5.1 | 5.8 |
//! | integer instructions | 1.2 | 1.5 | 2.1 | 1.2 | 0.8 | 0.9 | 1.8 | 2.4 |
//! | allowed by issue | 80 % | all | all | all | all | all | 41 % | 52 % |
//! | allowed by the integer pipe | 87 % | 99 % | 94 % | all | all | all | 56 % | 63 % |
//!
//! turbo3 of 64 dims: 4.0 and 2.0 instructions, 77 % and 76 %; of 256: 2.9 and 1.5, all. Stalls on
//! memory and on dependent instructions come on top: 12 warps fit a multiprocessor at 168
//! registers. Loads in flight: two to four groups of 24 bytes per lane (turbo3), 18 to 36 KB for
//! these; 4.3 TB/s at a latency of 700 ns need 23 KB.
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
//! Possible improvements: scales of values that join the softmax weights as powers of two, with a
//! maximum of their own (half of the f16 operations, 17 % of turbo3's instructions); signs of
//! turbo4's keys as f16 signs, since its levels are symmetric (12 % of its integer instructions);
//! tiles that arrive by copies to shared memory, as weights do in `gemv.cu`, which leaves registers
//! for more warps.

use kvant_backend::{KvTensorSpec, Result};
use kvant_codec::{DType, turbo};

use super::{HEADERS, KernelParams, OP, THREADS, UsualFormat, WARPS, constants};
use crate::kv::{SpecParams, number};
use crate::module::Build;
use crate::{Context, Define, Header, Launch, Source};

const DECODE_HEADERS: [Header; 8] = {
    let [half, rotate, tile, bounded, look_up, attend, prologue_epilogue, ..] = HEADERS;
    let groups = Header { name: "groups.cuh", text: include_str!("groups.cuh") };
    [half, rotate, tile, bounded, look_up, attend, prologue_epilogue, groups]
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

/// Queries of a KV head that one launch serves.
pub(super) const QUERIES: usize = 8;
/// Tiles that a warp processes at a time.
const UNIT: usize = 8;

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
    [("K_TYPE", k), ("V_TYPE", v), k_dim, v_dim, capped, ("BLOCKS", blocks_at_once(dims[1]) as u32)]
}

/// Returns the resident blocks per multiprocessor: as many as leave the accumulators of `v_dim`
/// dims in registers.
fn blocks_at_once(v_dim: usize) -> usize {
    if v_dim <= turbo::LEN { 3 } else { 2 }
}

/// Returns the variants that are compiled ahead of time.
pub(super) fn builds() -> impl Iterator<Item = Build> {
    super::usual_formats().map(|UsualFormat { types, dims, is_capped }| Build {
        source: &SOURCE,
        defines: defines(types, dims, is_capped).to_vec(),
    })
}

/// Returns the tiles per KV split of a sequence of `n_kv_heads` that attends to `tiles`.
///
/// A split consists of whole units, one or more per warp. The blocks of a single long sequence are
/// all resident at once and finish together: a few more blocks would wait for the first to finish.
pub(super) fn split_tiles(cx: &Context, tiles: usize, n_kv_heads: usize, v_dim: usize) -> usize {
    let at_once = blocks_at_once(v_dim) * cx.gpu().properties().n_sms as usize;
    let max_splits = (at_once / n_kv_heads).max(1);
    UNIT * WARPS * tiles.div_ceil(UNIT * WARPS).div_ceil(max_splits).max(1)
}

/// Queues the kernel, which also prepares the queries and combines the partial results of the
/// splits.
pub(super) fn launch(
    cx: &Context,
    params: &KernelParams,
    head_format: &HeadFormat,
    is_capped: bool,
    [splits, slots]: [usize; 2],
) -> Result<()> {
    let kernel =
        cx.kernel_with(&SOURCE, &defines(head_format.types, head_format.dims, is_capped), "decode")?;
    let grid = [splits as u32, slots as u32, 1];
    Ok(cx.launch(kernel, Launch { grid, block: [THREADS, 1, 1], shared_bytes: 0 }, params)?)
}
