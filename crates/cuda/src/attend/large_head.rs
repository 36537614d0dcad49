//! Attention for heads whose queries and outputs exceed the registers of a warp, and for shared-KV
//! tensors (MLA) of any size.
//!
//! A head of 512 takes 256 registers of a lane for the outputs of 16 queries alone. So the four
//! warps of a block cooperate: each *scores* a tile of its own for all queries of the block, which
//! lie in shared memory, and *sums* a fourth of the dims over all four tiles. Between the two,
//! every 64 tokens, they exchange the maxima and the softmax weights.
//!
//! - **The warp that scores a tile loads it to shared memory**, complete: its f16 values include
//!   its scales and its centre (`unpack.cuh`), by one FMA for two of them. So the centre of a
//!   shared-KV tensor, which counts for scores and for outputs, needs no further work.
//! - **A shared-KV tensor is read and unpacked once.** Codes of its tiles have the order of values,
//!   `[dim][token]`, and floats `[token][dim]`. So either the reduction dimension of scores is
//!   strided and that of outputs contiguous, or the other way round: `ldmatrix` reads both. Outputs
//!   are of the slices that hold values; the RoPE part behind them is only scored.
//! - **Separate K and V** take turns in the same buffer: values follow once the keys have been
//!   scored.
//! - **Query heads share unpacked tiles**, 32 of them where shared memory suffices, or 16. MLA has
//!   one KV head for all: with 16 heads its tensor is read once, with 128 four times, three of them
//!   from the L2 cache.
//!
//! # Shared memory
//!
//! Rows have no padding; groups of eight f16 are swizzled instead. For heads of 576 a block of 32
//! queries takes 115,200 bytes, so that two run on a multiprocessor of compute capability 9.0
//! (233,472 bytes, 1,024 of them reserved for each block), one on that of 8.0; with 16 queries it
//! takes 94,464, which fit 8.9 and 12.0 (101,376).
//!
//! # Budget
//!
//! For a tile of a shared-KV tensor of 512 + 64 and 32 queries: 144 + 128 MMAs `mma.m16n8k16`, 2
//! clocks each of a multiprocessor of 9.0, are 544 clocks. Its 9,216 values take 6.0 operations
//! each to unpack from q8_0, 7.7 from turbo3, 7.4 from turbo4 and 15 to 17 from turbo2t and
//! turbo3t, counted in the machine code with loads and stores: 550 clocks for turbo3. The two
//! overlap where two blocks run. Its 3,760 bytes would come from memory in 230. So MLA is bound by
//! MMAs, and by unpacking with few queries, for every type: quantization saves memory only. 168
//! registers with 16 queries and heads of 512, 250 with 32, none spilled. The clocks have not been
//! measured.

use kvant_backend::{KvLayer, Result};
use kvant_codec::tile::TILE;

use super::decode::HeadFormat;
use super::{HEADERS, MAX_NARROW, QUERIES, WARPS, constants};
use crate::module::Build;
use crate::{Context, Define, KernelId, Source};

/// The kernels for large heads and shared-KV tensors.
static SOURCE: Source = Source {
    name: "large_head.cu",
    text: include_str!("large_head.cu"),
    headers: &HEADERS,
    constants: || constants().whole("QUERIES", QUERIES),
    options: &[],
};

/// Maximum 16-query tiles of a block: the outputs of more do not stay in registers.
const MAX_TILES: usize = 2;

/// Returns the maximum 16-query tiles of a block with `shared_bytes` of shared memory; `None` where
/// the heads of `layer` do not need this kernel.
pub(super) fn max_tiles(layer: &KvLayer, shared_bytes: usize) -> Option<usize> {
    let dim = layer.tensors().map(|tensor| tensor.spec.stored_dim()).max().unwrap_or(0);
    let fits = |tiles: &usize| bytes([dim; 2], *tiles) <= shared_bytes;
    (dim > MAX_NARROW || layer.is_shared_kv()).then(|| (1..=MAX_TILES).rev().find(fits).unwrap_or(1))
}

/// Returns the largest stored head size that fits shared memory.
pub(super) fn max_dim(shared_bytes: usize) -> usize {
    let per_dim = bytes([1; 2], 1) - bytes([0; 2], 1);
    shared_bytes.saturating_sub(bytes([0; 2], 1)) / per_dim / QUERIES * QUERIES
}

/// Returns the shared memory of a block for these head sizes: `Shared` of `large_head.cu`.
pub(super) fn bytes([k_dim, v_dim]: [usize; 2], tiles: usize) -> usize {
    let queries = QUERIES * tiles;
    let halves = WARPS * TILE * k_dim.max(v_dim) + queries * k_dim + queries * WARPS * TILE;
    halves * size_of::<u16>() + WARPS * queries * size_of::<f32>()
}

/// Returns the kernel `name` for blocks of `tiles` 16-query tiles.
pub(super) fn kernel(
    cx: &Context,
    head_format: &HeadFormat,
    is_capped: bool,
    tiles: usize,
    name: &'static str,
) -> Result<KernelId> {
    Ok(cx.kernel_with(
        &SOURCE,
        &defines(head_format.dims, is_capped, head_format.is_shared_kv, tiles),
        name,
    )?)
}

fn defines(dims: [usize; 2], is_capped: bool, is_shared_kv: bool, tiles: usize) -> [Define; 5] {
    let [k, v, capped] = super::defines(dims, is_capped);
    [k, v, capped, ("SHARED_KV", is_shared_kv.into()), ("QUERY_TILES", tiles as u32)]
}

/// Returns the variants that are compiled ahead of time: the latent vectors of DeepSeek's models,
/// and the largest heads of Gemma's. Other variants are compiled on first use.
pub(super) fn builds() -> impl Iterator<Item = Build> {
    [([576, 512], true, 1), ([576, 512], true, MAX_TILES), ([512, 512], false, 1)]
        .map(|(dims, is_shared_kv, tiles)| Build {
            source: &SOURCE,
            defines: defines(dims, false, is_shared_kv, tiles).to_vec(),
        })
        .into_iter()
}
