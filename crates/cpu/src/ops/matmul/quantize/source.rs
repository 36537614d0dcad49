//! Source of the values of quantized tiles.

use std::ops::Range;

use crate::ops::norm::inverse_rms;
use crate::simd::matmul::format::BLOCK;

/// A row, divided into blocks.
pub(super) type Blocks<'a> = &'a [[f32; BLOCK]];

/// Source of the values of tiles.
#[derive(Clone, Copy)]
pub(in crate::ops::matmul) struct Source<'a> {
    /// `[rows, n_in]`, `n_in` a multiple of 32.
    pub x: &'a [f32],
    /// Indices of the rows that fill the tiles, in order; `None` for all.
    pub row_indices: Option<&'a [u32]>,
    pub n_in: usize,
    /// Weight `[n_in]` and eps.
    pub norm: Option<(&'a [f32], f32)>,
    /// Whether each block is rotated like the weights of the rotated formats, after the norm.
    pub rotates: bool,
}

impl<'a> Source<'a> {
    /// Returns the values of row `t` in blocks, and the norm's weight in blocks with the factor of
    /// this row. No blocks if the row does not exist.
    #[inline(always)]
    pub(super) fn row(&self, t: usize) -> (Blocks<'a>, Option<(Blocks<'a>, f32)>) {
        let Some(row) = self.row_of(t) else { return (&[], None) };
        let norm = self.norm.map(|(weight, eps)| (weight.as_chunks().0, inverse_rms(row, eps)));
        (row.as_chunks().0, norm)
    }

    #[inline(always)]
    fn row_of(&self, t: usize) -> Option<&'a [f32]> {
        let row = match self.row_indices {
            Some(picks) => *picks.get(t)? as usize,
            None => t,
        };
        self.x.chunks_exact(self.n_in).nth(row)
    }

    /// Returns the number of rows that fill the tiles.
    pub(super) fn rows(&self) -> usize {
        self.row_indices.map_or(self.x.len() / self.n_in, <[u32]>::len)
    }

    /// Returns some of the rows.
    pub(super) fn part(&self, rows: Range<usize>) -> Self {
        match self.row_indices {
            Some(picks) => Self { row_indices: Some(&picks[rows]), ..*self },
            None => Self { x: &self.x[rows.start * self.n_in..rows.end * self.n_in], ..*self },
        }
    }
}
