//! Attention on shared-KV tensors, whose rows are keys and values at once (MLA).
//!
//! Their tiles are laid out as those of values, and the value kernels read them directly. For the
//! scores, codes are transposed: the octets that were unpacked for the values become octets of
//! keys, 32 dims of 16 tokens at a time, so that a tile is read and unpacked once for the scores
//! and the values of all its queries. Float rows are scored in their own layout: they are long, and
//! one sum across lanes for each costs little beside its products.

#![allow(clippy::needless_range_loop, reason = "an index runs over sums, codes and operands at once")]

use std::marker::PhantomData;
use std::ops::Range;

use kvant_codec::tile::{TILE, high_planes};
use kvant_codec::{DType, Side};

use super::codes::{Codes, Coding, Expanded, with_codes};
use super::floats::{Floats, with_floats};
use super::shape::{Lane, Scores, with_n};
use crate::simd::vec16::{Lanes, Op};

/// Unpacks an octet of values to whole bytes, and transposes it to one of keys.
pub(super) struct Unpack<'a> {
    pub(super) coding: Coding,
    /// Planes of the block, and nothing else.
    pub(super) planes: &'a [u8],
    /// Index of the octet within the block.
    pub(super) octet: usize,
    /// The octet as values, unless values are read from the tile itself.
    pub(super) values: Option<&'a mut Expanded>,
    pub(super) keys: &'a mut Expanded,
}

impl Op for Unpack<'_> {
    type Output = ();

    const LOOKS_UP_64: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        with_codes!(self.coding, C => self.unpack::<L, C>(lanes))
    }
}

impl Unpack<'_> {
    #[inline(always)]
    fn unpack<L: Lanes, C: Codes>(self, lanes: L) {
        let octet = C::octet(self.planes, high_planes(self.planes.len()), self.octet);
        let keys = &mut self.keys.0;
        let mut values = self.values.map(|values| &mut values.0);
        // Sixteen dims of values are four groups of four tokens each; of keys, four groups of four
        // dims each.
        for first in [0, 4] {
            let groups = [
                C::group(lanes, octet, first, Side::V),
                C::group(lanes, octet, first + 1, Side::V),
                C::group(lanes, octet, first + 2, Side::V),
                C::group(lanes, octet, first + 3, Side::V),
            ];
            let turned = lanes.transpose(groups);
            for i in 0..4 {
                lanes.store_codes(turned[i], &mut keys[first + i]);
                if let Some(values) = &mut values {
                    lanes.store_codes(groups[i], &mut values[first + i]);
                }
            }
        }
    }
}

/// Scores a float tile of rows `[16][dim]` for a chunk of queries.
pub(super) struct ScoreRows<'a> {
    pub(super) dtype: DType,
    pub(super) rows: &'a [u8],
    /// Scaled, `[queries][dim]`.
    pub(super) queries: &'a [f32],
    pub(super) scores: &'a mut [Scores],
    pub(super) tile: usize,
}

impl ScoreRows<'_> {
    pub(super) fn run<L: Lanes>(mut self, lanes: L) {
        let n = self.scores.len();
        with_floats!(self.dtype, F, B => with_n!(n, N => lanes.run(ScoreRowsChunk::<F, B, N>(&mut self, PhantomData))))
    }
}

struct ScoreRowsChunk<'b, 'a, F, const B: usize, const N: usize>(&'b mut ScoreRows<'a>, PhantomData<F>);

/// Maximum number of rows that are multiplied at once.
const MAX_ROWS: usize = 4;

impl<F: Floats<B>, const B: usize, const N: usize> Op for ScoreRowsChunk<'_, '_, F, B, N> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        // As many as leave registers for the sums of six queries.
        let together = if L::WIDE == 2 { MAX_ROWS } else { 1 };
        let &mut ScoreRows { rows, queries, ref mut scores, tile, .. } = self.0;
        let scores: &mut [Scores; N] = (&mut **scores).try_into().expect("scores of each query");
        let queries = queries.as_chunks::<16>().0;
        let width = queries.len() / N;
        let queries: [&[[f32; 16]]; N] = std::array::from_fn(|n| &queries[n * width..(n + 1) * width]);
        let rows = &rows.as_chunks::<B>().0[..TILE * width];
        for first in (0..TILE).step_by(together) {
            let mut sums = [[lanes.splat(0.0); N]; MAX_ROWS];
            for i in 0..width {
                for m in 0..together {
                    let x = F::load(lanes, &rows[(first + m) * width + i]);
                    for n in 0..N {
                        sums[m][n] = lanes.mul_add(x, lanes.load(&queries[n][i]), sums[m][n]);
                    }
                }
            }
            for m in 0..together {
                for n in 0..N {
                    scores[n].0[tile][first + m] = lanes.sum(sums[m][n]);
                }
            }
        }
    }
}

/// Adds the weighted centres of coded tokens to the outputs.
pub(super) struct AddCentre<'a> {
    /// `[dim]` in f16.
    pub(super) centre: &'a [u8],
    /// Weights of each query.
    pub(super) p: &'a [Scores],
    /// The tiles that were encoded relative to the centre.
    pub(super) tiles: Range<usize>,
    /// Factor on the weights, `[queries]` or more.
    pub(super) rescale_new: &'a [f32],
    /// `[queries][width]`, of the first dims of the centre.
    pub(super) out: &'a mut [Lane],
}

impl Op for AddCentre<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let width = self.out.len() / self.p.len().max(1);
        let centre = self.centre.as_chunks().0;
        for ((p, &rescale_new), out) in
            self.p.iter().zip(self.rescale_new).zip(self.out.chunks_exact_mut(width))
        {
            let mut sum = lanes.splat(0.0);
            for tile in &p.0[self.tiles.clone()] {
                sum = lanes.add(sum, lanes.load(tile));
            }
            let weight = lanes.splat(lanes.sum(sum) * rescale_new);
            for (out, centre) in out.iter_mut().zip(centre) {
                lanes.store(lanes.mul_add(lanes.load_f16(centre), weight, lanes.load(&out.0)), &mut out.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvant_codec::tile::{SCALE_BYTES, TileLayout};
    use kvant_conformance::weights::gaussian;

    use super::*;
    use crate::simd::isa::Isa;
    use crate::simd::vec16::run_on;

    #[test]
    fn an_unpacked_octet_of_values_is_transposed_to_keys() {
        const DIM: usize = 32;
        let x = gaussian(3, TILE * DIM, 1.0);
        let tile = |side| {
            let layout = TileLayout::new(DType::Q8_0, side, DIM).unwrap();
            let mut tile = vec![0; layout.bytes()];
            x.chunks_exact(DIM).enumerate().for_each(|(slot, row)| layout.put(&mut tile, slot, row));
            tile
        };
        let [of_keys, of_values] = [tile(Side::K), tile(Side::V)].map(|tile| tile[SCALE_BYTES..].to_vec());
        for isa in Isa::available() {
            let [mut keys, mut values] = [Expanded::ZERO; 2];
            let (coding, planes, octet) = (Coding::Whole, &of_values, 0);
            let unpack = Unpack { coding, planes, octet, values: Some(&mut values), keys: &mut keys };
            let Some(()) = run_on(isa, unpack) else { continue };
            assert!(of_keys == keys.0.as_flattened() && of_values == values.0.as_flattened(), "{isa:?}");
        }
    }
}
