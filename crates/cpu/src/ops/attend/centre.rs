//! Coded keys are stored relative to the centre of their block: `q · centre` is added to their
//! scores.

#![allow(clippy::needless_range_loop, reason = "an index runs over sums and queries at once")]

use std::ops::Range;

use super::shape::{MAX_QUERIES, Scores, with_n};
use crate::simd::vec16::{Lanes, Op};

/// Computes the products of queries with a centre.
pub(super) struct CentreDot<'a> {
    /// `[queries][dim]`
    pub(super) queries: &'a [f32],
    /// `[dim]` in f16.
    pub(super) centre: &'a [u8],
    /// `[queries]` or more.
    pub(super) dots: &'a mut [f32],
}

impl CentreDot<'_> {
    pub(super) fn run<L: Lanes>(self, lanes: L) {
        let (dim, centre) = (self.centre.len() / 2, self.centre.as_chunks().0);
        let sixteens = self.queries.len() / (16 * dim);
        let (queries, rest) = self.queries.split_at(16 * dim * sixteens);
        let (dots, rest_dots) = self.dots.split_at_mut(16 * sixteens);
        for (queries, dots) in queries.chunks(16 * dim).zip(dots.chunks_mut(16)) {
            lanes.run(CentreDotChunk::<16> { queries, centre, dots });
        }
        let chunks = rest.chunks(MAX_QUERIES * dim);
        for (queries, dots) in chunks.zip(rest_dots.chunks_mut(MAX_QUERIES)) {
            with_n!(queries.len() / dim, N => lanes.run(CentreDotChunk::<N> { queries, centre, dots }));
        }
    }
}

struct CentreDotChunk<'a, const N: usize> {
    queries: &'a [f32],
    centre: &'a [[u8; 32]],
    dots: &'a mut [f32],
}

impl<const N: usize> Op for CentreDotChunk<'_, N> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let width = self.centre.len();
        let (queries, _) = self.queries.as_chunks();
        let queries: [&[[f32; 16]]; N] = std::array::from_fn(|n| &queries[n * width..(n + 1) * width]);
        let mut sums = [lanes.splat(0.0); 16];
        for (i, centre) in self.centre.iter().enumerate() {
            let centre = lanes.load_f16(centre);
            for n in 0..N {
                sums[n] = lanes.mul_add(lanes.load(&queries[n][i]), centre, sums[n]);
            }
        }
        if N == 16 {
            lanes.store(lanes.sum_of_each(sums), self.dots.first_chunk_mut().expect("room for each query"));
        } else {
            let dots: &mut [f32; N] = self.dots.first_chunk_mut().expect("room for each query");
            for n in 0..N {
                dots[n] = lanes.sum(sums[n]);
            }
        }
    }
}

/// Adds one number per query to that query's scores of some tiles.
pub(super) struct AddPerQuery<'a> {
    pub(super) scores: &'a mut [Scores],
    pub(super) tiles: Range<usize>,
    /// `[queries]` or more.
    pub(super) by: &'a [f32],
}

impl Op for AddPerQuery<'_> {
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
