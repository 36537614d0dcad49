//! Heads whose queries and outputs no warp has registers for, and joint streams (latent attention), of whatever size.
//!
//! A head of 512 takes 256 registers of a lane for the outputs of 16 queries alone. So the four warps of a block share what they
//! make: each *scores* a tile of its own for all queries of the block, which lie in shared memory, and *sums* a fourth of the dims over
//! all four tiles. Between the two, 64 tokens at a time, they tell one another the maxima and the weights.
//!
//! - **A tile is brought to shared memory by the warp that scores it**, whole: its scales and its centre are in its halves
//!   (`unpack.cuh`), by one fused product and sum for two of them. So the centre of a joint stream, which counts for scores and for
//!   outputs, needs nothing further.
//! - **A joint stream is read and unpacked once.** Codes of its tiles lie as those of values, `[dim][token]`, and floats `[token][dim]`.
//!   What scores sum over lies across, then, and what outputs sum over side by side, or the other way round: `ldmatrix` reads both.
//!   Outputs are of the slices in which values lie; the turned part behind them is scored and no more.
//! - **Streams apart** take turns in the same room: values follow once the keys have been scored.
//! - **Query heads share what is unpacked**, 32 of them where shared memory has room, or 16. Latent attention has one KV head for all:
//!   with 16 heads its stream is read once, with 128 four times, of which three find it in the second-level cache.
//!
//! # Room
//!
//! Rows lie without padding, eights of halves change places instead. For heads of 576 a block of 32 queries takes 115,200 bytes, so
//! that two run on a multiprocessor of compute capability 9.0 (233,472 bytes, 1,024 of them kept for each block), one on that of 8.0;
//! with 16 queries it takes 94,464, which fit 8.9 and 12.0 (101,376).
//!
//! # Budget
//!
//! For a tile of a joint stream of 512 + 64 and 32 queries: 144 + 128 products `mma.m16n8k16`, 2 clocks each of a multiprocessor of
//! 9.0, are 544 clocks. Its 9,216 values take 6.0 operations each to unpack from q8_0, 7.7 from turbo3, 7.4 from turbo4 and 15 to 17 from
//! turbo2t and turbo3t, counted in the machine code with loads and stores: 550 clocks for turbo3. The two overlap where two blocks run.
//! Its 3,760 bytes would come from memory in 230. So latent attention is bound by products, and by unpacking where there are few
//! queries, whatever is stored: codes save room. 168 registers with 16 queries and heads of 512, 250 with 32, none spilled. The clocks
//! have not been measured.

use kvant_backend::{KvLayer, Result};
use kvant_codec::tile::TILE;

use super::decode::Kind;
use super::{HEADERS, MAX_NARROW, QUERIES, WARPS, constants};
use crate::module::Build;
use crate::{Context, Define, KernelId, Source};

/// The kernels for wide heads and joint streams.
static SOURCE: Source = Source {
    name: "wide.cu",
    text: include_str!("wide.cu"),
    headers: &HEADERS,
    constants: || constants().whole("QUERIES", QUERIES),
    options: &[],
};

/// Most sixteens of queries of a block: the outputs of more do not stay in registers.
const MOST_TILES: usize = 2;

/// Most sixteens of queries that a block may take where a block has so many bytes of shared memory; none where the heads of `layer` do
/// not need this kernel.
pub(super) fn most_tiles(layer: &KvLayer, shared_bytes: usize) -> Option<usize> {
    let dim = layer.streams().map(|stream| stream.spec.dim()).max().unwrap_or(0);
    let fits = |tiles: &usize| bytes([dim; 2], *tiles) <= shared_bytes;
    (dim > MAX_NARROW || layer.is_joint()).then(|| (1..=MOST_TILES).rev().find(fits).unwrap_or(1))
}

/// The largest heads, as stored, for which there is shared memory.
pub(super) fn most_dim(shared_bytes: usize) -> usize {
    let per_dim = bytes([1; 2], 1) - bytes([0; 2], 1);
    shared_bytes.saturating_sub(bytes([0; 2], 1)) / per_dim / QUERIES * QUERIES
}

/// Shared memory of a block for heads of these sizes: `Shared` of `wide.cu`.
pub(super) fn bytes([k_dim, v_dim]: [usize; 2], tiles: usize) -> usize {
    let queries = QUERIES * tiles;
    let halves = WARPS * TILE * k_dim.max(v_dim) + queries * k_dim + queries * WARPS * TILE;
    halves * size_of::<u16>() + WARPS * queries * size_of::<f32>()
}

/// One of the kernels, for blocks of so many sixteens of queries.
pub(super) fn kernel(
    cx: &Context,
    kind: &Kind,
    is_capped: bool,
    tiles: usize,
    name: &'static str,
) -> Result<KernelId> {
    Ok(cx.kernel_with(&SOURCE, &defines(kind.dims, is_capped, kind.is_joint, tiles), name)?)
}

fn defines(dims: [usize; 2], is_capped: bool, is_joint: bool, tiles: usize) -> [Define; 5] {
    let [k, v, capped] = super::defines(dims, is_capped);
    [k, v, capped, ("JOINT", is_joint.into()), ("QUERY_TILES", tiles as u32)]
}

/// What is compiled ahead: the latent vectors of DeepSeek's models, and the largest heads of Gemma's. Others when they come.
pub(super) fn builds() -> impl Iterator<Item = Build> {
    [([576, 512], true, 1), ([576, 512], true, MOST_TILES), ([512, 512], false, 1)]
        .map(|(dims, is_joint, tiles)| Build {
            source: &SOURCE,
            defines: defines(dims, false, is_joint, tiles).to_vec(),
        })
        .into_iter()
}
