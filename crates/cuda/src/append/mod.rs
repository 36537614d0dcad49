//! Appending keys and values: pad, rotate, encode into the tiles that a stream's plan names.
//!
//! A decoded token costs one launch, or two when a tile leaves the tail: tiles of sink and main pages are written
//! first, as they may read what the tail's new tiles overwrite.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{BackendError, KvLayer, Place, Result};
use kvant_codec::Rotation;
use kvant_codec::tile::TILE;

use crate::kv::{BOOKS, MAX_HEADS, StreamParams, TILE_HEADER, small, words};
use crate::{Context, CudaPage, DevicePtr, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source =
    Source { name: "append.cu", text: include_str!("append.cu"), headers: &[TILE_HEADER], options: &[] };

const OP: &str = "kv_append";

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AppendParams {
    streams: [StreamParams; 2 * MAX_HEADS],
    k: DevicePtr,
    v: DevicePtr,
    n_heads: u32,
    first_head: u32,
    n_kv_heads: u32,
    head_dims: [u32; 2],
    rows: u32,
    to_tail: u32,
    before: [u32; 4],
    after: [u32; 4],
    levels: [[f32; 16]; 3],
    mids: [[f32; 16]; 3],
    padding: u32,
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

/// Appends rows to every stream of `layer`. The pages have been reserved, the lengths of the buffers checked.
pub(crate) fn kv_append(cx: &Context, layer: &mut KvLayer<CudaPage>, rows: Rows) -> Result<()> {
    let n_kv_heads = layer.k.len();
    BackendError::check(OP, "value heads", n_kv_heads, layer.v.len())?;
    if rows.n == 0 {
        return Ok(());
    }
    let kernel = cx.kernel(&SOURCE, "append_tile")?;
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
        let streams = || layer.k[heads.clone()].iter().chain(&layer.v[heads.clone()]);
        let plans = || streams().map(|stream| stream.plan(rows.n));
        let most = plans().map(|plan| plan.tiles().len()).max().unwrap_or(0);
        let dim = streams().map(|stream| stream.spec().dim()).max().unwrap_or(0);
        let launch = Launch {
            grid: [small(OP, "tiles", most)?, 2 * heads.len() as u32, 1],
            block: [128, 1, 1],
            // Codes `[16][dim]` and scales `[16][dim / 32]` at most.
            shared_bytes: (TILE * dim + TILE * dim / 32 * 2) as u32,
        };
        for to_tail in [false, true] {
            let is_needed = plans()
                .any(|plan| plan.writes().any(|write| matches!(write.place, Place::Tail(_)) == to_tail));
            if is_needed {
                params.to_tail = to_tail.into();
                cx.launch(kernel, launch, &params)?;
            }
        }
    }
    for stream in layer.k.iter_mut().chain(&mut layer.v) {
        let plan = stream.plan(rows.n);
        stream.commit(plan);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
