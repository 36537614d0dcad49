//! Up to eight queries of a KV head, decoding above all: tiles go from memory to the tensor cores through registers.
//!
//! A warp takes a *unit* of 8 tiles, 128 tokens. Its lanes are (g, t), g = 0..8 and t = 0..4, as the tensor cores number
//! them, and the eight queries are the columns of every product:
//!
//! - **Keys.** Lane (g, t) loads whole groups of tile g, every fourth from t on, by 16 bytes at a time. Product i of eight
//!   takes tokens i and i + 8 of all eight tiles as its 16 rows, and the four dims of each lane's group as its share of
//!   16 dims: which token is a row, and which dim is a step of the sum, is ours to choose, as long as the queries follow.
//!   So all 64 codes of a group are used by the lane that loaded them, and nothing passes through shared memory. Codes are multiplied as
//!   bytes; what their bias adds is taken from the 32-bit sum of a block, which the token's scale multiplies then.
//! - **Centres** that keys of a block are relative to are rows of one product more for each 16 dims, a row to a tile: with a window
//!   a unit may lie in two blocks. What it gives is told to the maximum of the tile, not to its scores.
//! - **Weights** of the unit (128 tokens, 8 queries, halves) are the one thing that does, to become right operands.
//! - **Values.** Lane (g, t) has the group of dims 16 g .. 16 g + 16 and tokens 4 t .. 4 t + 4 of one tile: the 32 groups
//!   of 128 dims lie side by side. Product i takes dims i and i + 8 of each sixteen as rows. Scales are multiplied in as
//!   halves, two tokens at a time. Of 64 dims or less, lanes g and g + 4 share a sixteen, half of its rows each, in four products.
//!
//! Codes with a memory (turbo2t, turbo3t) are looked up with those of the 16 dims before: of keys in the group that the lane had before, of
//! values in that of the lane four before it; once in a block they are the last ones, a dim to the left. Six bits choose one of 64 halves in
//! shared memory, where each lane has a copy in a bank of its own, 8 KB in all; `dp4a` makes the address of a byte of four.
//!
//! Tiles of the f16 sink and tail are read by the same walk with another `Group`; a unit in which both kinds meet is
//! walked once for each, with the lanes of the other kind adding nothing.
//!
//! # Budget
//!
//! Of the four quarters of a multiprocessor each issues one instruction (of a warp) per clock, and takes every other clock one of whole
//! numbers: logic, shifts, permutations of bytes, selections, comparisons, conversions to halves (CUDA C++ programming guide,
//! throughput of arithmetic instructions, compute capability 9.0: 64 lanes per clock). That pipe is what binds look-ups, so that what another
//! pipe can do is left to it: the upper half of a word is taken by an addition of halves, shifts to the left are products.
//!
//! Instructions per value, and of these on that pipe, of a unit of 128 dims that all queries see whole, K and V and softmax, counted in
//! the machine code that `ptxas` 13.0 makes for compute capability 9.0; and what share of an H200's 4.3 TB/s (132 multiprocessors at
//! 1.98 GHz) either allows:
//!
//! | | turbo2 | turbo3 | turbo4 | q4_0 | q8_0 | f16 | turbo2t | turbo3t |
//! |---|---|---|---|---|---|---|---|---|
//! | instructions | 2.6 | 3.0 | 3.7 | 2.6 | 2.2 | 1.6 | 5.1 | 5.8 |
//! | of whole numbers | 1.2 | 1.5 | 2.1 | 1.2 | 0.8 | 0.9 | 1.8 | 2.4 |
//! | allowed by issue | 80 % | all | all | all | all | all | 41 % | 52 % |
//! | allowed by the pipe | 87 % | 99 % | 94 % | all | all | all | 56 % | 63 % |
//!
//! turbo3 of 64 dims: 4.0 and 2.0 instructions, 77 % and 76 %; of 256: 2.9 and 1.5, all. What waits for memory or for another instruction comes on
//! top: 12 warps fit a multiprocessor at 168 registers. Loads in flight: two to four groups of 24 bytes per lane (turbo3), 18 to 36 KB
//! for these; 4.3 TB/s at 700 ns take 23 KB.
//!
//! # On an H100
//!
//! 65,536 tokens, eight KV heads, of what copies move: f16 80 %, q8_0 68 %, turbo4 42 %, turbo3 38 %
//! (docs/benchmarks/2026-11-26-h100.md). Codes are bound by latency: each scheduler has two and
//! a half warps, of which one can go on in 42 % of the clocks. A third of their waiting is for memory, a sixth for what they have just computed, a tenth at the
//! barriers of the end. Tried there, and slower: asking for the next unit ahead (its lines leave the second-level cache before they are used, f16
//! 1.3 times as long); groups and tiles that are loaded a turn ahead (registers spill around the loops: turbo3 1.12 times, q8_0 1.4 times as
//! long); four blocks on a multiprocessor (128 registers, spilled: 1.16 times).
//!
//! Left, for what it would save: scales of values that join the weights as powers of two, with a maximum of their own: half of the
//! operations on halves, 17 % of turbo3's instructions; signs of turbo4's keys as those of halves, which are symmetric, 12 % of its pipe; tiles
//! that come by copies to shared memory, as weights do in `one.cu`, which leaves registers for more warps.

use kvant_backend::{Result, StreamSpec};
use kvant_codec::{DType, turbo};

use super::{HEADERS, KernelParams, OP, THREADS, WARPS, constants};
use crate::kv::{SpecParams, TYPES, number};
use crate::module::Build;
use crate::{Context, Define, Header, Launch, Source};

const DECODE_HEADERS: [Header; 8] = {
    let [half, rotate, tile, bounded, look_up, attend, ends, ..] = HEADERS;
    let groups = Header { name: "groups.cuh", text: include_str!("groups.cuh") };
    [half, rotate, tile, bounded, look_up, attend, ends, groups]
};

/// The kernel for few queries.
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
/// Tiles that a warp works on at a time.
const UNIT: usize = 8;

/// What the streams of a KV head store, keys first. A kernel is compiled for the types and sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind {
    types: [DType; 2],
    /// Values of a token as stored, of a joint stream those that its values take.
    pub dims: [usize; 2],
    pub is_joint: bool,
    pub specs: [SpecParams; 2],
}

impl Kind {
    /// Of keys and values.
    ///
    /// # Errors
    /// [`Unsupported`](kvant_backend::BackendError::Unsupported) when there is more of something than a kernel can count.
    pub fn new(specs: [&StreamSpec; 2]) -> Result<Self> {
        let params = [SpecParams::new(OP, specs[0])?, SpecParams::new(OP, specs[1])?];
        let [k, v] = specs;
        Ok(Self {
            types: [k.dtype, v.dtype],
            dims: [k.dim(), v.value_dim()],
            is_joint: k.joint.is_some(),
            specs: params,
        })
    }
}

fn defines(types: [DType; 2], dims: [usize; 2], is_capped: bool) -> [Define; 6] {
    let ([k, v], [k_dim, v_dim, capped]) = (types.map(number), super::defines(dims, is_capped));
    [("K_TYPE", k), ("V_TYPE", v), k_dim, v_dim, capped, ("BLOCKS", blocks_at_once(dims[1]) as u32)]
}

/// Blocks that a multiprocessor holds at once: as many as leave the sums of so many dims in registers.
fn blocks_at_once(v_dim: usize) -> usize {
    if v_dim <= turbo::LEN { 3 } else { 2 }
}

/// What is compiled ahead: every type with itself and one mixed pair, for heads of 128, and turbo types in blocks of every size.
/// Others when they come.
pub(super) fn builds() -> impl Iterator<Item = Build> {
    let alike = TYPES.into_iter().map(|dtype| [dtype; 2]);
    let pairs = alike.chain([[DType::Q8_0, DType::Turbo3]]).map(|types| (types, [128; 2]));
    let small = [([DType::Turbo3; 2], [64; 2]), ([DType::Turbo4, DType::Turbo3], [192, 96])];
    let plain = pairs.chain(small).map(|(types, dims)| (types, dims, false));
    let capped = [128, 256].map(|dim| ([DType::Turbo3; 2], [dim; 2], true));
    let build = |(types, dims, is_capped)| Build {
        source: &SOURCE,
        defines: defines(types, dims, is_capped).to_vec(),
    };
    plain.chain(capped).map(build)
}

/// Tiles of one split of a walk over `tiles`, by a sequence of `n_kv_heads`: whole units, one for each warp or several, so that the
/// blocks of one sequence alone, if it is long, are all there at once and end together: a few more would wait for the first to end.
pub(super) fn split_tiles(cx: &Context, tiles: usize, n_kv_heads: usize, v_dim: usize) -> usize {
    let at_once = blocks_at_once(v_dim) * cx.gpu().properties().n_sms as usize;
    let most = (at_once / n_kv_heads).max(1);
    UNIT * WARPS * tiles.div_ceil(UNIT * WARPS).div_ceil(most).max(1)
}

/// Queues the kernel, which prepares the queries and joins the shares of the splits as well.
pub(super) fn launch(
    cx: &Context,
    params: &KernelParams,
    kind: &Kind,
    is_capped: bool,
    [splits, slots]: [usize; 2],
) -> Result<()> {
    let kernel = cx.kernel_with(&SOURCE, &defines(kind.types, kind.dims, is_capped), "decode")?;
    let grid = [splits as u32, slots as u32, 1];
    Ok(cx.launch(kernel, Launch { grid, block: [THREADS, 1, 1], shared_bytes: 0 }, params)?)
}
