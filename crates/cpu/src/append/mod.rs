//! Appending keys and values to the cache: pad, rotate, encode into the tiles a stream's plan names.
//!
//! A new row is padded to the stream's width and, in a rotated stream, rotated, whatever part it lands in: sink and
//! tail hold rotated rows in f16, so that one query serves all parts. A tile that leaves the tail is encoded from
//! the f16 rows that waited there. Only rows encoded into a coded main tile are scaled by the stream's `alpha`.

use kvant_backend::{BackendError, KvLayer, Place, Result, Stream};
use kvant_codec::tile::{TileLayout, prepare_row};
use kvant_codec::{DType, Rotation};

use crate::shards::Shards;
use crate::{CpuPage, Isa, Pool};

const OP: &str = "kv_append";

/// Appends `rows` tokens to every stream of a layer: `k` `[rows, n_kv_heads * k_head_dim]`, `v`
/// `[rows, n_kv_heads * v_head_dim]`. The pages must have been reserved.
///
/// # Errors
/// [`BackendError::Shape`] when a buffer is shorter than that, or K and V differ in heads.
pub(crate) fn kv_append(
    _isa: Isa,
    pool: &Pool,
    layer: &mut KvLayer<CpuPage>,
    k: &[f32],
    v: &[f32],
    rows: usize,
) -> Result<()> {
    let n_kv_heads = layer.k.len();
    BackendError::check(OP, "value heads", n_kv_heads, layer.v.len())?;
    for (what, streams, x) in [("keys", &layer.k, k), ("values", &layer.v, v)] {
        let head_dim = streams.first().map_or(0, |stream| stream.spec().head_dim);
        if let Some(odd) = streams.iter().find(|stream| stream.spec().head_dim != head_dim) {
            BackendError::check(OP, "head size", head_dim, odd.spec().head_dim)?;
        }
        BackendError::check_at_least(OP, what, rows * n_kv_heads * head_dim, x.len())?;
    }
    let (k_streams, v_streams) = (Shards::new(&mut layer.k), Shards::new(&mut layer.v));
    pool.for_each(2 * n_kv_heads, &|item| {
        let head = item / 2;
        let (streams, x) = if item % 2 == 0 { (&k_streams, k) } else { (&v_streams, v) };
        // SAFETY: each item is a different (side, head), so no other thread has this stream.
        let stream = unsafe { &mut streams.part(head..head + 1)[0] };
        let head_dim = stream.spec().head_dim;
        let width = n_kv_heads * head_dim;
        append_rows(stream, rows, |row| &x[row * width + head * head_dim..][..head_dim]);
    });
    Ok(())
}

/// Appends `row(0) .. row(rows)` `[head_dim]` to one stream.
fn append_rows<'a>(stream: &mut Stream<CpuPage>, rows: usize, row: impl Fn(usize) -> &'a [f32]) {
    let spec = *stream.spec();
    let rotation = spec.rotates().then(Rotation::kv);
    let mut value = vec![0.0; spec.dim()];
    let plan = stream.plan(rows);
    for write in plan.writes() {
        let alpha = match write.place {
            Place::Main(_) if is_coded(spec.dtype) => spec.alpha,
            _ => 1.0,
        };
        if let Some((tail, slots)) = write.from_tail {
            for slot in slots {
                let from = stream.tile_at(tail);
                from.layout.get(tile(from.page.as_bytes(), from.layout, from.offset), slot, &mut value);
                put(stream, write.place, slot, alpha, &mut value);
            }
        }
        for (i, slot) in write.from_rows.enumerate() {
            prepare_row(rotation.as_ref(), row(write.first_row + i), &mut value);
            put(stream, write.place, slot, alpha, &mut value);
        }
    }
    stream.commit(plan);
}

fn put(stream: &mut Stream<CpuPage>, place: Place, slot: usize, alpha: f32, value: &mut [f32]) {
    value.iter_mut().for_each(|v| *v *= alpha);
    let (layout, page, offset) = stream.tile_mut(place);
    layout.put(&mut page.as_mut_bytes()[offset..][..layout.bytes()], slot, value);
}

fn tile(page: &[u8], layout: TileLayout, offset: usize) -> &[u8] {
    &page[offset..][..layout.bytes()]
}

fn is_coded(dtype: DType) -> bool {
    !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;
