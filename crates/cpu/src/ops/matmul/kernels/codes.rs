//! Coded panels with activations in 8 bits. The products of each sub-block are summed as integers;
//! its scaled sum and the contribution of its minimum are added to the f32 sums, in the order of
//! the columns.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use std::marker::PhantomData;

use super::prefetch::prefetch;
use super::unpack::{Scales, Stored, unpack};
use super::{Chunk, Register, Sums, place};
use crate::ops::matmul::panel::Line;
use crate::ops::matmul::partition::PAIR;
use crate::ops::matmul::quantize::Tile;
use crate::simd::matmul::format::{BLOCK, GROUPS, WeightFormat};
use crate::simd::matmul::{Kernel, MAX_ACROSS, MAX_PARTS, Simd};

/// Maximum sub-blocks of a block.
const MAX_SUBS: usize = 2;

/// Returns the number of sub-blocks of a block.
#[inline(always)]
pub(in crate::ops::matmul) fn subs<F: WeightFormat>() -> usize {
    BLOCK / F::SPEC.sub_len
}

/// Returns the number of groups whose products are added before they are widened.
#[inline(always)]
fn short_groups<S: Simd, F: WeightFormat>() -> usize {
    S::groups_in_short_sum::<F>().min(GROUPS / subs::<F>())
}

/// Returns the index of a tile's activation sums for sub-block `sub` of a block.
#[inline(always)]
pub(super) fn which<F: WeightFormat>(sub: usize) -> usize {
    let n = GROUPS / subs::<F>();
    which_groups(sub * n, n)
}

/// Returns the index of the activation sums of `n` groups from `from` on, or of the half block that
/// contains them.
#[inline(always)]
fn which_groups(from: usize, n: usize) -> usize {
    if n == GROUPS { 2 } else { from * 2 / GROUPS }
}

/// Multiplies one panel with one tile: one value for each row of the tile and of the panel.
/// Prefetches `prefetch_distance` bytes further in memory, unless that is 0.
pub(in crate::ops::matmul) struct Gemv<'a, F, const T: usize> {
    pub panel: &'a [Line],
    pub tile: Tile<'a, T>,
    pub prefetch_distance: usize,
    pub format: PhantomData<F>,
}

/// A unit of a panel, and the index of its first block.
#[derive(Clone, Copy)]
struct Unit<'a> {
    header: &'a [Line],
    lines: &'a [Line],
    stored: &'a Stored,
    first: usize,
}

impl<F: WeightFormat, const T: usize> Kernel for Gemv<'_, F, T> {
    type Output = [Register; T];

    const LOOKS_UP_64: bool = F::WINDOWS.is_some();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> [Register; T] {
        let layout = F::LAYOUT;
        let mut sums = [[simd.splat(0.0); T]; MAX_PARTS];
        let mut stored = Stored::ZERO;
        for (u, unit) in self.panel.chunks(layout.unit_lines(layout.unit)).enumerate() {
            let (header, lines) = unit.split_at(layout.header);
            prefetch(header, self.prefetch_distance);
            stored.read::<S, F>(simd, header);
            let unit = Unit { header, lines, stored: &stored, first: u * (layout.unit / BLOCK) };
            // Not a loop: sums stay in registers where the part is a constant.
            add_unit::<S, F, T>(simd, unit, self.tile, 0, &mut sums[0], self.prefetch_distance);
            if S::PARTS == MAX_PARTS {
                add_unit::<S, F, T>(simd, unit, self.tile, 1, &mut sums[1], 0);
            }
        }
        let mut out = [Register::ZERO; T];
        for t in 0..T {
            for part in 0..S::PARTS {
                simd.store_floats(sums[part][t], &mut out[t].0, part);
            }
        }
        out
    }
}

/// Adds the products of a part of a unit.
#[inline(always)]
fn add_unit<S: Simd, F: WeightFormat, const T: usize>(
    simd: S,
    unit: Unit<'_>,
    tile: Tile<'_, T>,
    part: usize,
    sums: &mut [S::Floats; T],
    prefetch_distance: usize,
) {
    let (layout, subs, step) = (F::LAYOUT, subs::<F>(), short_groups::<S, F>());
    let scales = Scales::new::<F>(simd, unit.header, unit.stored, part);
    for i in 0..(layout.unit / BLOCK).min(tile.codes.len() - unit.first) {
        let block = unit.first + i;
        let lines = &unit.lines[i * layout.block..][..layout.block];
        prefetch(lines, prefetch_distance);
        let codes = unpack::<S, F>(simd, lines, part);
        let (mut scale, mut min) = ([simd.splat(0.0); MAX_SUBS], [simd.splat(0.0); MAX_SUBS]);
        for sub in 0..subs {
            scale[sub] = scales.scale::<F>(simd, i * subs + sub);
            if F::SPEC.has_min {
                min[sub] = scales.min::<F>(simd, i * subs + sub);
            }
        }
        for t in 0..T {
            for sub in 0..subs {
                let mut sum = simd.start::<F>(tile.neg_sums[block][which::<F>(sub)][t]);
                for from in (sub * GROUPS / subs..(sub + 1) * GROUPS / subs).step_by(step) {
                    let neg_sum = tile.neg_sums[block][which_groups(from, step)][t];
                    let mut short = simd.short::<F>(sum, neg_sum);
                    for g in from..from + step {
                        short = simd.dot::<F>(short, codes[g], simd.splat_i(tile.codes[block][t].0[g]));
                    }
                    sum = simd.widen(sum, short);
                }
                let scaled = simd.mul(simd.to_floats(sum), scale[sub]);
                sums[t] = simd.mul_add(scaled, simd.splat(tile.scales[block][t]), sums[t]);
                if F::SPEC.has_min {
                    let weighted = simd.splat(tile.weighted[block][which::<F>(sub)][t]);
                    sums[t] = simd.mul_add(min[sub], weighted, sums[t]);
                }
            }
        }
    }
}

/// Adds the products of a chunk with a tile of as many blocks to `sums`.
pub(in crate::ops::matmul) struct Multiply<'a, F, const T: usize> {
    pub chunk: &'a Chunk,
    pub tile: Tile<'a, T>,
    pub sums: &'a mut Sums<T>,
    pub format: PhantomData<F>,
}

impl<F: WeightFormat, const T: usize> Kernel for Multiply<'_, F, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for first in (0..PAIR * S::PARTS).step_by(S::across::<F>()) {
            multiply::<S, F, T>(simd, self.chunk, self.tile, self.sums, first);
        }
    }
}

/// Adds the products of registers `first ..` of each group, as many as are held at once.
#[inline(always)]
fn multiply<S: Simd, F: WeightFormat, const T: usize>(
    simd: S,
    chunk: &Chunk,
    tile: Tile<'_, T>,
    sums: &mut Sums<T>,
    first: usize,
) {
    let (subs, step, across) = (subs::<F>(), short_groups::<S, F>(), S::across::<F>());
    let mut totals = [[simd.splat(0.0); T]; MAX_ACROSS];
    for a in 0..across {
        let (p, part) = place::<S>(first + a);
        for t in 0..T {
            totals[a][t] = simd.load_floats(&sums[p][t].0, part);
        }
    }
    let blocks = chunk.codes.iter().zip(&chunk.scales).zip(&chunk.mins);
    let rows = tile.codes.iter().zip(tile.scales).zip(tile.neg_sums).zip(tile.weighted);
    for (((codes, scales), mins), (((x, steps), neg_sums), weighted)) in blocks.zip(rows) {
        for sub in 0..subs {
            let mut acc = [[simd.splat_i(0); T]; MAX_ACROSS];
            for t in 0..T {
                let start = simd.start::<F>(neg_sums[which::<F>(sub)][t]);
                for a in 0..across {
                    acc[a][t] = start;
                }
            }
            for from in (sub * GROUPS / subs..(sub + 1) * GROUPS / subs).step_by(step) {
                let mut short = acc;
                for t in 0..T {
                    let neg_sum = neg_sums[which_groups(from, step)][t];
                    for a in 0..across {
                        short[a][t] = simd.short::<F>(acc[a][t], neg_sum);
                    }
                }
                for g in from..from + step {
                    let mut w = [simd.splat_i(0); MAX_ACROSS];
                    for a in 0..across {
                        let (p, part) = place::<S>(first + a);
                        w[a] = simd.load(&codes[g][p].0, part);
                    }
                    for t in 0..T {
                        let x = simd.splat_i(x[t].0[g]);
                        for a in 0..across {
                            short[a][t] = simd.dot::<F>(short[a][t], w[a], x);
                        }
                    }
                }
                for a in 0..across {
                    for t in 0..T {
                        acc[a][t] = simd.widen(acc[a][t], short[a][t]);
                    }
                }
            }
            for a in 0..across {
                let (p, part) = place::<S>(first + a);
                let scale = simd.load_floats(&scales[sub][p].0, part);
                for t in 0..T {
                    let scaled = simd.mul(simd.to_floats(acc[a][t]), scale);
                    totals[a][t] = simd.mul_add(scaled, simd.splat(steps[t]), totals[a][t]);
                }
                if F::SPEC.has_min {
                    let min = simd.load_floats(&mins[sub][p].0, part);
                    for t in 0..T {
                        let weighted = simd.splat(weighted[which::<F>(sub)][t]);
                        totals[a][t] = simd.mul_add(min, weighted, totals[a][t]);
                    }
                }
            }
        }
    }
    for a in 0..across {
        let (p, part) = place::<S>(first + a);
        for t in 0..T {
            simd.store_floats(totals[a][t], &mut sums[p][t].0, part);
        }
    }
}
