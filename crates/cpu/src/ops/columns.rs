//! Copies rows into columns of wider rows.

use kvant_backend::Columns;

/// Copies rows of `n` values, at least one, to the columns `to` of `dst`.
pub(crate) fn copy_columns(src: &[f32], n: usize, dst: &mut [f32], to: Columns) {
    let Columns { width, first } = to;
    for (src, dst) in src.chunks_exact(n).zip(dst.chunks_exact_mut(width)) {
        dst[first..first + n].copy_from_slice(src);
    }
}
