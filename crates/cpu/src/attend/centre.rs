//! Keys in blocks are codes of what their block's centre leaves: what a query makes of the centre is added to its scores.

use std::ops::Range;

use super::kernels::Scores;
use crate::lanes::{Lanes, Op};

/// The products of queries with a centre.
pub(super) struct Meet<'a> {
    /// `[queries][dim]`
    pub(super) queries: &'a [f32],
    /// `[dim]` in f16.
    pub(super) bytes: &'a [u8],
    /// Room for the same in f32.
    pub(super) centre: &'a mut [f32],
    /// `[queries]` or more.
    pub(super) met: &'a mut [f32],
}

impl Op for Meet<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (centre, _) = self.centre.as_chunks_mut::<16>();
        for (to, bytes) in centre.iter_mut().zip(self.bytes.as_chunks().0) {
            lanes.store(lanes.load_f16(bytes), to);
        }
        let queries = self.queries.chunks_exact(16 * centre.len());
        for (met, query) in self.met.iter_mut().zip(queries) {
            let mut sum = lanes.splat(0.0);
            for (q, c) in query.as_chunks().0.iter().zip(centre.iter()) {
                sum = lanes.mul_add(lanes.load(q), lanes.load(c), sum);
            }
            *met = lanes.sum(sum);
        }
    }
}

/// Adds a number of its own to each query's scores of some tiles.
pub(super) struct Shift<'a> {
    pub(super) scores: &'a mut [Scores],
    pub(super) tiles: Range<usize>,
    /// `[queries]` or more.
    pub(super) by: &'a [f32],
}

impl Op for Shift<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for (scores, &by) in self.scores.iter_mut().zip(self.by) {
            for tile in &mut scores.0[self.tiles.clone()] {
                lanes.store(lanes.add(lanes.load(tile), lanes.splat(by)), tile);
            }
        }
    }
}
