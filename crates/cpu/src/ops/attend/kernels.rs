//! The loops over codes and floats, for a chunk of queries at a time; see the method in [`super`].
//!
//! Keys and values use the same product: 64 codes of a group with four signed bytes broadcast to
//! all lanes. For keys those are four dims of a query, and a lane is a token; for values they are
//! the weights of four tokens, and a lane is a dim. Two groups are unpacked side by side where the
//! registers allow ([`Lanes::WIDE`]), so that each broadcast is loaded once for both.
//!
//! Each loop serves `N` queries, a constant, so that its sums stay in registers. Vector operations
//! are never inside a closure: a closure is compiled on its own, without the target features,
//! unless it happens to be inlined early.

#![allow(clippy::needless_range_loop, reason = "an index runs over sums, codes and operands at once")]

use std::marker::PhantomData;

use kvant_codec::tile::{TILE, high_planes};
use kvant_codec::{DType, Side};

use super::codes::Codes;
use super::floats::{Floats, with_floats};
use super::planes::Planes;
use super::prefetch::Prefetcher;
use super::shape::{BLOCK_TILES, Bytes, Lane, Scores, joined, with_n};
use super::weights::weighted;
use crate::simd::vec16::{Lanes, Op};

/// One block of dims of some tiles of keys.
#[derive(Clone, Copy)]
pub(super) struct KeyBlock<'a> {
    pub(super) codes: Planes<'a>,
    /// f16 scales of the first tile's tokens; the next tile's are `scale_stride` bytes further.
    pub(super) scales: &'a [u8],
    pub(super) scale_stride: usize,
    pub(super) octets: usize,
    pub(super) tiles: usize,
    /// First of the tiles within the scores.
    pub(super) tile: usize,
    /// Whether it is the first block of the tiles, which sets their scores; others add to them.
    pub(super) is_first: bool,
    /// Index of the block's first four dims within its slice of a query.
    pub(super) at: usize,
}

/// A chunk of queries, or their weights, in bytes, for one block of dims.
#[derive(Clone, Copy)]
pub(super) struct ByteChunk<'a> {
    /// Byte planes, `[queries][planes]`.
    pub(super) rows: &'a [Bytes],
    /// `-bias · Σ integers`, `[queries]`.
    pub(super) starts: &'a [i32],
    /// Value of one unit of the integer product, without the scales of keys, `[queries]`.
    pub(super) factors: &'a [f32],
}

/// Adds the products of codes with part `p` of `P` of four integers ([`Lanes::split`]).
#[inline(always)]
fn add_products<L: Lanes, const P: usize>(
    lanes: L,
    sums: &mut [L::Ints; P],
    p: usize,
    codes: L::Ints,
    part: [i8; 4],
) {
    let sum = &mut sums[if L::PARTS_SHARE_SUMS { P - 1 } else { p }];
    *sum = match (P, p) {
        (1, _) => lanes.dot(*sum, codes, part),
        (_, 0) => lanes.dot_part::<0>(*sum, codes, part),
        _ => lanes.dot_part::<1>(*sum, codes, part),
    };
}

/// Scores a block of keys in coding `C` for a chunk of `N` queries of `P` byte planes.
pub(super) struct ScoreCodes<'a, C, const N: usize, const P: usize> {
    pub(super) keys: &'a KeyBlock<'a>,
    pub(super) queries: ByteChunk<'a>,
    /// Destination of the scores, `[queries]`.
    pub(super) scores: &'a mut [Scores],
    /// Prefetcher to advance meanwhile.
    pub(super) prefetcher: &'a mut Prefetcher,
    pub(super) coding: PhantomData<C>,
}

impl<C: Codes, const N: usize, const P: usize> Op for ScoreCodes<'_, C, N, P> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;
    const LOOKS_UP_64: bool = C::LOOKS_UP_64;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (&KeyBlock { codes: block, tiles, .. }, ByteChunk { rows, starts, factors }) =
            (self.keys, self.queries);
        let starts: &[i32; N] = starts.try_into().expect("a start per query");
        let factors: &[f32; N] = factors.try_into().expect("a factor per query");
        let scores: &mut [Scores; N] = self.scores.try_into().expect("scores of each query");
        assert!(rows.len() == N * P && self.keys.tile + tiles <= BLOCK_TILES);
        let high = high_planes(block.plane_bytes);
        for t in (0..tiles).step_by(2) {
            // A last tile without a neighbour is paired with itself; its second scores go to the
            // slack or are overwritten.
            let pair = [t, (t + 1).min(tiles - 1)];
            let planes = pair.map(|t| &block.planes[t * block.stride..][..block.plane_bytes]);
            let scales =
                pair.map(|t| self.keys.scales[t * self.keys.scale_stride..].first_chunk().expect("scales"));
            for first in (0..2).step_by(L::WIDE) {
                let mut sums = [[[lanes.splat_i(0); P]; N]; 2];
                for sums in &mut sums {
                    for (sums, &start) in sums.iter_mut().zip(starts) {
                        sums[P - 1] = lanes.splat_i(start);
                    }
                }
                for octet in 0..self.keys.octets {
                    self.prefetcher.step();
                    let pair = [planes[first], planes[first + L::WIDE - 1]];
                    let octets = [C::octet(pair[0], high, octet), C::octet(pair[1], high, octet)];
                    let at = self.keys.at + 8 * octet;
                    assert!(at + 8 <= 32);
                    for g in 0..8 {
                        let codes =
                            [C::group(lanes, octets[0], g, Side::K), C::group(lanes, octets[1], g, Side::K)];
                        for n in 0..N {
                            for p in 0..P {
                                let dims = rows[n * P + p].0[at + g];
                                for m in 0..L::WIDE {
                                    add_products(lanes, &mut sums[m][n], p, codes[m], dims);
                                }
                            }
                        }
                    }
                }
                for m in 0..L::WIDE {
                    let scale = lanes.load_f16(scales[first + m]);
                    for n in 0..N {
                        let product = lanes.mul(lanes.to_floats(joined(lanes, sums[m][n])), scale);
                        let out = &mut scores[n].0[self.keys.tile + t + first + m];
                        let before = if self.keys.is_first { lanes.splat(0.0) } else { lanes.load(out) };
                        lanes.store(lanes.mul_add(product, lanes.splat(factors[n]), before), out);
                    }
                }
            }
        }
    }
}

/// Scores two neighbouring float tiles of keys `[dim][16]` for a chunk of queries.
pub(super) struct ScoreFloats<'a> {
    pub(super) dtype: DType,
    pub(super) tiles: [&'a [u8]; 2],
    /// Scaled, `[queries][dim]`.
    pub(super) queries: &'a [f32],
    pub(super) scores: &'a mut [Scores],
    pub(super) tile: usize,
    /// Prefetcher to advance meanwhile.
    pub(super) prefetcher: &'a mut Prefetcher,
}

impl ScoreFloats<'_> {
    pub(super) fn run<L: Lanes>(mut self, lanes: L) {
        let n = self.scores.len();
        with_floats!(self.dtype, F, B => with_n!(n, N => lanes.run(ScoreFloatsChunk::<F, B, N>(&mut self, PhantomData))))
    }
}

struct ScoreFloatsChunk<'b, 'a, F, const B: usize, const N: usize>(&'b mut ScoreFloats<'a>, PhantomData<F>);

impl<F: Floats<B>, const B: usize, const N: usize> Op for ScoreFloatsChunk<'_, '_, F, B, N> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let &mut ScoreFloats { tiles, queries, ref mut scores, tile, .. } = self.0;
        let scores: &mut [Scores; N] = (&mut **scores).try_into().expect("scores of each query");
        let dim = queries.len() / N;
        let queries: [&[f32]; N] = std::array::from_fn(|n| &queries[n * dim..(n + 1) * dim]);
        let tiles = tiles.map(|tile| &tile.as_chunks::<B>().0[..dim]);
        for first in (0..2).step_by(L::WIDE) {
            let mut sums = [[lanes.splat(0.0); N]; 2];
            for d in 0..dim {
                if d % TILE == 0 {
                    self.0.prefetcher.step();
                }
                let pair = [&tiles[first][d], &tiles[first + L::WIDE - 1][d]];
                let keys = [F::load(lanes, pair[0]), F::load(lanes, pair[1])];
                for n in 0..N {
                    let q = lanes.splat(queries[n][d]);
                    for m in 0..L::WIDE {
                        sums[m][n] = lanes.mul_add(keys[m], q, sums[m][n]);
                    }
                }
            }
            for m in 0..L::WIDE {
                for n in 0..N {
                    lanes.store(sums[m][n], &mut scores[n].0[tile + first + m]);
                }
            }
        }
    }
}

/// One block of dims of some tiles of values, or an octet of it.
#[derive(Clone, Copy)]
pub(super) struct ValueBlock<'a> {
    pub(super) codes: Planes<'a>,
    pub(super) octets: usize,
    pub(super) tiles: usize,
    /// First of the tiles within the rows of weights.
    pub(super) tile: usize,
    /// The first lane of the first octet within an output.
    pub(super) lane: usize,
}

/// Accumulates a block of values in coding `C`, weighted, octet by octet (two columns of 16 dims
/// each), for a chunk of `N` queries with weights of `P` byte planes.
pub(super) struct AccumulateCodes<'a, C, const N: usize, const P: usize> {
    pub(super) values: &'a ValueBlock<'a>,
    pub(super) weights: ByteChunk<'a>,
    /// Outputs to accumulate into, `[queries][width]`.
    pub(super) out: &'a mut [Lane],
    pub(super) width: usize,
    /// Prefetcher to advance meanwhile.
    pub(super) prefetcher: &'a mut Prefetcher,
    pub(super) coding: PhantomData<C>,
}

impl<C: Codes, const N: usize, const P: usize> Op for AccumulateCodes<'_, C, N, P> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;
    const LOOKS_UP_64: bool = C::LOOKS_UP_64;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (&ValueBlock { codes: block, octets, tiles, tile, lane }, ByteChunk { rows, starts, factors }) =
            (self.values, self.weights);
        let (out, width) = (self.out, self.width);
        let starts: &[i32; N] = starts.try_into().expect("a start per query");
        let factors: &[f32; N] = factors.try_into().expect("a factor per query");
        assert!(rows.len() == P * N && tile + tiles <= BLOCK_TILES);
        let high = high_planes(block.plane_bytes);
        for i in 0..octets {
            for column in (0..2).step_by(L::WIDE) {
                let mut sums = [[[lanes.splat_i(0); P]; N]; 2];
                // Sums of all codes, for weights that are stored as one byte below their value.
                let mut all = [lanes.splat_i(0); 2];
                for sums in &mut sums {
                    for (sums, &start) in sums.iter_mut().zip(starts) {
                        sums[P - 1] = lanes.splat_i(start);
                    }
                }
                for t in 0..tiles {
                    if t % 2 == 0 {
                        self.prefetcher.step();
                    }
                    let planes = &block.planes[t * block.stride..][..block.plane_bytes];
                    let octet = C::octet(planes, high, block.index + i);
                    let fours = 4 * (tile + t);
                    assert!(fours + 4 <= 32);
                    for q in 0..4 {
                        let groups = [4 * column + q, 4 * (column + L::WIDE - 1) + q];
                        let codes = [
                            C::group(lanes, octet, groups[0], Side::V),
                            C::group(lanes, octet, groups[1], Side::V),
                        ];
                        if P == 1 {
                            for m in 0..L::WIDE {
                                all[m] = lanes.dot(all[m], codes[m], [1; 4]);
                            }
                        }
                        for n in 0..N {
                            for p in 0..P {
                                let tokens = rows[P * n + p].0[fours + q];
                                for m in 0..L::WIDE {
                                    add_products(lanes, &mut sums[m][n], p, codes[m], tokens);
                                }
                            }
                        }
                    }
                }
                for n in 0..N {
                    for m in 0..L::WIDE {
                        let sum = lanes.to_floats(weighted(lanes, sums[m][n], all[m]));
                        let out = &mut out[n * width + lane + 2 * i + column + m].0;
                        lanes.store(lanes.mul_add(sum, lanes.splat(factors[n]), lanes.load(out)), out);
                    }
                }
            }
        }
    }
}

/// Accumulates float tiles of values `[tiles][16][row_width]`, in sixteens, for a chunk of queries.
pub(super) struct AccumulateFloats<'a> {
    pub(super) dtype: DType,
    pub(super) values: &'a [u8],
    pub(super) tiles: usize,
    /// Weights of each query.
    pub(super) p: &'a [Scores],
    /// First of the tiles within the weights.
    pub(super) tile: usize,
    /// Factor on the weights, `[queries]`.
    pub(super) factors: &'a [f32],
    /// Outputs that the first dims are accumulated into, `[queries][width]`.
    pub(super) out: &'a mut [Lane],
    pub(super) width: usize,
    pub(super) row_width: usize,
    /// Prefetcher to advance meanwhile.
    pub(super) prefetcher: &'a mut Prefetcher,
}

impl AccumulateFloats<'_> {
    pub(super) fn run<L: Lanes>(mut self, lanes: L) {
        let n = self.factors.len();
        with_floats!(self.dtype, F, B => with_n!(n, N => lanes.run(AccumulateFloatsChunk::<F, B, N>(&mut self, PhantomData))))
    }
}

struct AccumulateFloatsChunk<'b, 'a, F, const B: usize, const N: usize>(
    &'b mut AccumulateFloats<'a>,
    PhantomData<F>,
);

impl<F: Floats<B>, const B: usize, const N: usize> Op for AccumulateFloatsChunk<'_, '_, F, B, N> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let mut lane = 0;
        while lane + L::WIDE <= self.0.width {
            self.columns::<L, 2>(lanes, lane, L::WIDE);
            lane += L::WIDE;
        }
        if lane < self.0.width {
            self.columns::<L, 1>(lanes, lane, 1);
        }
    }
}

impl<F: Floats<B>, const B: usize, const N: usize> AccumulateFloatsChunk<'_, '_, F, B, N> {
    /// Accumulates `wide` columns of 16 dims, at most `M`.
    #[inline(always)]
    fn columns<L: Lanes, const M: usize>(&mut self, lanes: L, lane: usize, wide: usize) {
        let &mut AccumulateFloats {
            values,
            tiles,
            p,
            tile,
            factors,
            ref mut out,
            width,
            row_width,
            ref mut prefetcher,
            ..
        } = self.0;
        let factors: &[f32; N] = factors.try_into().expect("a factor per query");
        let p: &[Scores; N] = p.try_into().expect("weights of each query");
        assert!(tile + tiles <= BLOCK_TILES && wide <= M);
        let rows = values.as_chunks::<B>().0.chunks_exact(row_width);
        let mut sums = [[lanes.splat(0.0); N]; M];
        for (token, row) in rows.take(tiles * TILE).enumerate() {
            if token % TILE == 0 {
                prefetcher.step();
            }
            for m in 0..wide {
                let v = F::load(lanes, &row[lane + m]);
                for n in 0..N {
                    let weight = p[n].0[tile + token / TILE][token % TILE];
                    sums[m][n] = lanes.mul_add(v, lanes.splat(weight), sums[m][n]);
                }
            }
        }
        for n in 0..N {
            for m in 0..wide {
                let out = &mut out[n * width + lane + m].0;
                lanes.store(lanes.mul_add(sums[m][n], lanes.splat(factors[n]), lanes.load(out)), out);
            }
        }
    }
}
