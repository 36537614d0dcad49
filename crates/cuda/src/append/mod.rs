//! Appending keys and values: RoPE of keys and queries, pad, rotate, encode into the tiles that a stream's plan names. One
//! launch for all of it.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{BackendError, KvLayer, Result};
use kvant_codec::tile::TILE;
use kvant_codec::{Rotation, block32, turbo};

use crate::constants::Constants;
use crate::kv::{self, BOOKS, MAX_HEADS, StreamParams, small};
use crate::rope::{HEADS_PER_BLOCK, TURN_HEADER, Turn};
use crate::rotate::words;
use crate::{Context, CudaPage, DevicePtr, Header, Launch, Source};

const HEADERS: [Header; 4] = {
    let [half, rotate, tile] = kv::HEADERS;
    [TURN_HEADER, half, rotate, tile]
};

/// The kernel of this op.
pub(crate) static SOURCE: Source =
    Source { name: "append.cu", text: include_str!("append.cu"), headers: &HEADERS, constants, options: &[] };

const OP: &str = "kv_append";
/// Most levels of a codebook.
const MAX_LEVELS: usize = 16;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AppendParams {
    streams: [StreamParams; 2 * MAX_HEADS],
    k_turn: Turn,
    q_turn: Turn,
    q: DevicePtr,
    k: DevicePtr,
    v: DevicePtr,
    n_query_heads: u32,
    n_heads: u32,
    first_head: u32,
    n_kv_heads: u32,
    head_dims: [u32; 2],
    rows: u32,
    tiles: u32,
    before: [u32; 4],
    after: [u32; 4],
    levels: [[f32; MAX_LEVELS]; BOOKS.len()],
    mids: [[f32; MAX_LEVELS]; BOOKS.len()],
}

fn constants() -> Constants {
    kv::constants()
        .whole("WARPS", HEADS_PER_BLOCK as usize)
        .whole("N_BOOKS", BOOKS.len())
        .whole("MAX_LEVELS", MAX_LEVELS)
        .whole("Q8_0_ZERO", block32::Q8_0_ZERO.into())
        .whole("Q4_0_ZERO", block32::Q4_0_ZERO.into())
        .double("SQRT_TURBO_DIMS", (turbo::LEN as f64).sqrt())
}

/// New rows of keys and values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// `[rows, n_kv_heads * k_head_dim]`.
    pub k: DevicePtr,
    /// `[rows, n_kv_heads * v_head_dim]`.
    pub v: DevicePtr,
    pub n: usize,
}

/// RoPE of the keys on their way into the cache, and of the queries in place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turns {
    pub k: Turn,
    pub q: Turn,
    /// `[rows, n_query_heads * k_head_dim]`.
    pub queries: DevicePtr,
    pub n_query_heads: usize,
}

/// Appends rows to every stream of `layer`. The pages have been reserved, the lengths of the buffers checked.
pub(crate) fn append(
    cx: &Context,
    layer: &mut KvLayer<CudaPage>,
    rows: Rows,
    turns: Option<Turns>,
) -> Result<()> {
    let n_kv_heads = layer.k.len();
    BackendError::check(OP, "value heads", n_kv_heads, layer.v.len())?;
    if rows.n == 0 {
        return Ok(());
    }
    let kernel = cx.kernel(&SOURCE, "append")?;
    let [k_plans, v_plans] = [&layer.k, &layer.v]
        .map(|streams| streams.iter().map(|stream| stream.plan(rows.n)).collect::<Vec<_>>());
    for first in (0..n_kv_heads).step_by(MAX_HEADS) {
        let heads = first..n_kv_heads.min(first + MAX_HEADS);
        let mut params = AppendParams::zeroed();
        let streams = layer.k[heads.clone()].iter().chain(&layer.v[heads.clone()]);
        for (slot, stream) in params.streams.iter_mut().zip(streams) {
            *slot = StreamParams::new(cx, stream)?;
        }
        params.k = rows.k;
        params.v = rows.v;
        params.n_heads = heads.len() as u32;
        params.first_head = first as u32;
        params.n_kv_heads = small(OP, "heads", n_kv_heads)?;
        params.head_dims = [layer.k[first].spec().head_dim as u32, layer.v[first].spec().head_dim as u32];
        params.rows = small(OP, "rows", rows.n)?;
        let rotation = Rotation::kv();
        (params.before, params.after) = (words(rotation.before()), words(rotation.after()));
        for (book, (levels, mids)) in BOOKS.iter().zip(params.levels.iter_mut().zip(&mut params.mids)) {
            levels[..book.centroids().len()].copy_from_slice(book.centroids());
            mids[..book.mids().len()].copy_from_slice(book.mids());
        }
        let plans = k_plans[heads.clone()].iter().chain(&v_plans[heads.clone()]);
        let most = plans.map(|plan| plan.tiles().len()).max().unwrap_or(0);
        params.tiles = small(OP, "tiles", most)?;
        let mut blocks = 2 * heads.len() * most;
        if let Some(turns) = turns {
            (params.k_turn, params.q_turn, params.q) = (turns.k, turns.q, turns.queries);
            // The queries are turned once, beside the first heads.
            if first == 0 && turns.q.is_on() {
                params.n_query_heads = small(OP, "query heads", turns.n_query_heads)?;
                blocks += (rows.n * turns.n_query_heads).div_ceil(HEADS_PER_BLOCK as usize);
            }
        }
        let streams = layer.k[heads.clone()].iter().chain(&layer.v[heads]);
        let dim = streams.map(|stream| stream.spec().dim()).max().unwrap_or(0);
        // Codes `[16][dim]` and scales `[16][dim / 32]` at most.
        let shared_bytes = (TILE * dim + TILE * dim / block32::LEN * size_of::<u16>()) as u32;
        let grid = [small(OP, "blocks", blocks)?, 1, 1];
        cx.launch(kernel, Launch { grid, block: [32 * HEADS_PER_BLOCK, 1, 1], shared_bytes }, &params)?;
    }
    let streams = layer.k.iter_mut().chain(&mut layer.v);
    streams.zip(k_plans.into_iter().chain(v_plans)).for_each(|(stream, plan)| stream.commit(plan));
    Ok(())
}

#[cfg(test)]
mod tests;
