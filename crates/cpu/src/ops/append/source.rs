//! Source of the rows that are appended.

use std::ops::Range;

use crate::ops::channel_scales::Affine;

/// The input rows of one KV tensor.
pub(super) struct Source<'a, F: Fn(usize) -> &'a [f32]> {
    /// Returns row i, `[head_dim]`.
    pub row: F,
    /// Channel scale and shift, applied first.
    pub balance: Option<Affine<'a>>,
}

impl<'a, F: Fn(usize) -> &'a [f32]> Source<'a, F> {
    /// Reads values `dims` of row `index`, as far as the row has them, into the start of `out`.
    pub fn read(&self, index: usize, dims: Range<usize>, out: &mut [f32]) {
        let row = (self.row)(index);
        let row = &row[dims.start.min(row.len())..dims.end.min(row.len())];
        match self.balance {
            None => out[..row.len()].copy_from_slice(row),
            Some(affine) => affine.apply(dims.start..dims.start + row.len(), row, out),
        }
    }
}
