//! Appending keys and values to the cache: pad, rotate, encode into the tiles a stream's plan names.
//!
//! A new row is padded to the stream's width and, in a rotated stream, rotated, whatever part it lands in: sink and
//! tail hold rotated rows in f16, so that one query serves all parts. A tile that leaves the tail is encoded from
//! the f16 rows that waited there. Only rows encoded into a coded main tile are scaled by the stream's `alpha`.

use std::ops::Range;

use kvant_backend::{BackendError, KvLayer, Result};
use kvant_codec::DType;

use crate::shards::Shards;
use crate::{CpuPage, Isa, Pool};

mod encode;
mod scalar;
mod slices;

const OP: &str = "kv_append";

/// Appends a token for each of `rows` to every stream of a layer: `k` `[.., n_kv_heads * k_head_dim]`, `v`
/// `[.., n_kv_heads * v_head_dim]`. The pages must have been reserved.
///
/// # Errors
/// [`BackendError::Shape`] when a buffer is shorter than that, or K and V differ in heads.
pub(crate) fn kv_append(
    isa: Isa,
    pool: &Pool,
    layer: &mut KvLayer<CpuPage>,
    k: &[f32],
    v: &[f32],
    rows: Range<usize>,
) -> Result<()> {
    let n_kv_heads = layer.k.len();
    BackendError::check(OP, "value heads", n_kv_heads, layer.v.len())?;
    for (what, streams, x) in [("keys", &layer.k, k), ("values", &layer.v, v)] {
        let head_dim = streams.first().map_or(0, |stream| stream.spec().head_dim);
        if let Some(odd) = streams.iter().find(|stream| stream.spec().head_dim != head_dim) {
            BackendError::check(OP, "head size", head_dim, odd.spec().head_dim)?;
        }
        BackendError::check_at_least(OP, what, rows.end * n_kv_heads * head_dim, x.len())?;
    }
    let (k_streams, v_streams) = (Shards::new(&mut layer.k), Shards::new(&mut layer.v));
    pool.for_each(2 * n_kv_heads, &|item| {
        let head = item / 2;
        let (streams, x) = if item % 2 == 0 { (&k_streams, k) } else { (&v_streams, v) };
        // SAFETY: each item is a different (side, head), so no other thread has this stream.
        let stream = unsafe { &mut streams.part(head..head + 1)[0] };
        let head_dim = stream.spec().head_dim;
        let width = n_kv_heads * head_dim;
        let row = |row| &x[(rows.start + row) * width + head * head_dim..][..head_dim];
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(lanes) => slices::append(lanes, stream, rows.len(), row),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni(lanes) => slices::append(lanes, stream, rows.len(), row),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(lanes) => slices::append(lanes, stream, rows.len(), row),
            _ => scalar::append(stream, rows.len(), row),
        }
    });
    Ok(())
}

fn is_coded(dtype: DType) -> bool {
    !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;
