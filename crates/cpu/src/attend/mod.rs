//! Attention over the compressed cache.
//!
//! For query row r at position P = start + r and query head h, with the keys and values of KV head h / g
//! (g = n_heads / n_kv_heads):
//!
//! ```text
//! s_t = scale · q · k_t          t = 0 ..= P
//! out = Σ_t exp(s_t - max s) v_t / Σ_t exp(s_t - max s)
//! ```
//!
//! Keys of a rotated stream are read rotated: the query is rotated once instead, since rotations keep inner products.
//! Values of a rotated stream are summed rotated, and the sum is un-rotated once.

use kvant_backend::{AttendParams, BackendError, KvLayer, Result};

use crate::{CpuPage, Isa, Pool};

mod scalar;

const OP: &str = "attend";

/// Memory that one call leaves to the next.
#[derive(Debug, Default)]
pub(crate) struct Scratch {}

/// Causal attention of `q` `[rows, n_heads * k_head_dim]` over the tokens of `layer` into `out`
/// `[rows, n_heads * v_head_dim]`. See [`kvant_backend::Backend::attend`].
///
/// # Errors
/// [`BackendError::Shape`] when the layer or a buffer does not have the sizes of `p`.
pub(crate) fn attend(
    _isa: Isa,
    pool: &Pool,
    _scratch: &mut Scratch,
    p: &AttendParams,
    q: &[f32],
    layer: &KvLayer<CpuPage>,
    out: &mut [f32],
) -> Result<()> {
    check(p, q, layer, out)?;
    scalar::attend(pool, p, q, layer, out);
    Ok(())
}

fn check(p: &AttendParams, q: &[f32], layer: &KvLayer<CpuPage>, out: &[f32]) -> Result<()> {
    BackendError::check(OP, "key streams", p.n_kv_heads, layer.k.len())?;
    BackendError::check(OP, "value streams", p.n_kv_heads, layer.v.len())?;
    BackendError::check(OP, "query heads beyond whole groups", 0, p.n_heads % p.n_kv_heads.max(1))?;
    for (what, head_dim, streams) in
        [("key head size", p.k_head_dim, &layer.k), ("value head size", p.v_head_dim, &layer.v)]
    {
        for stream in streams {
            BackendError::check(OP, what, head_dim, stream.spec().head_dim)?;
            BackendError::check_at_least(OP, "cached tokens", p.start + p.rows, stream.len())?;
        }
    }
    BackendError::check_at_least(OP, "queries", p.rows * p.n_heads * p.k_head_dim, q.len())?;
    BackendError::check_at_least(OP, "output", p.rows * p.n_heads * p.v_head_dim, out.len())
}

#[cfg(test)]
mod tests;
