//! Kernels for coded panels with AVX-VNNI: those of [`avx2`](super::avx2), but for the products, which are added in 32 bits.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use std::arch::x86_64::*;

use super::avx2::{HALVES, floats, load, put_floats, scales, unpack};
pub(crate) use super::avx2::{gate, gemv_floats, multiply_floats, unpack_chunk, unpack_floats};
use super::prefetch::prefetch;
use super::{BLOCK, Format, GROUPS, Line, PANEL};
use crate::matmul::gemm::{Chunk, PAIR, Sums, TILE};
use crate::matmul::quantise::Tile;

/// What an accumulator starts from: minus the code of zero times the sum of the activations.
#[target_feature(enable = "avx2")]
#[inline]
fn start<F: Format>(neg_sum: i32) -> __m256i {
    _mm256_set1_epi32(neg_sum * i32::from(F::FACTOR_ZERO))
}

/// Products of one coded panel with one tile.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(crate) fn gemv<F: Format, const T: usize>(
    panel: &[Line],
    tile: Tile<'_, T>,
    ahead: usize,
) -> [[f32; PANEL]; T] {
    let layout = F::LAYOUT;
    let subs = BLOCK / F::SPEC.sub_len;
    let blocks_per_unit = layout.unit / BLOCK;
    let n_blocks = tile.codes.len();
    let mut sums = [[_mm256_setzero_ps(); HALVES]; T];
    for (u, unit) in panel.chunks(layout.unit_lines(layout.unit)).enumerate() {
        let (header, lines) = unit.split_at(layout.header);
        prefetch(header, ahead);
        let (scales, mins) = scales::<F>(header);
        let first = u * blocks_per_unit;
        for i in 0..blocks_per_unit.min(n_blocks - first) {
            let block = first + i;
            let lines = &lines[i * layout.block..][..layout.block];
            prefetch(lines, ahead);
            for h in 0..HALVES {
                let codes = unpack::<F>(lines, h);
                for t in 0..T {
                    for sub in 0..subs {
                        let which = if subs == 1 { 2 } else { sub };
                        let mut acc = start::<F>(tile.neg_sums[block][which][t]);
                        for g in sub * GROUPS / subs..(sub + 1) * GROUPS / subs {
                            let x = _mm256_set1_epi32(tile.codes[block][g][t]);
                            acc = _mm256_dpbusd_avx_epi32(acc, codes[g], x);
                        }
                        let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(acc), scales[i * subs + sub][h]);
                        let one_step = _mm256_set1_ps(tile.scales[block][t]);
                        sums[t][h] = _mm256_fmadd_ps(scaled, one_step, sums[t][h]);
                        if F::SPEC.has_min {
                            let weighted = _mm256_set1_ps(tile.weighted[block][which][t]);
                            sums[t][h] = _mm256_fmadd_ps(mins[i * subs + sub][h], weighted, sums[t][h]);
                        }
                    }
                }
            }
        }
    }
    let mut out = [[0.0; PANEL]; T];
    for t in 0..T {
        for h in 0..HALVES {
            put_floats(&mut out[t], h, sums[t][h]);
        }
    }
    out
}

/// Adds the products of an unpacked chunk of two panels with [`TILE`] rows to `sums`, a panel at a time: 12 accumulators.
#[target_feature(enable = "avx2,fma,avxvnni")]
pub(crate) fn multiply<F: Format>(chunk: &Chunk, tile: Tile<'_, TILE>, sums: &mut Sums<TILE>) {
    let subs = BLOCK / F::SPEC.sub_len;
    for block in 0..tile.codes.len() {
        let (x, steps) = (&tile.codes[block], &tile.scales[block]);
        for (sub, p) in (0..subs * PAIR).map(|i| (i / PAIR, i % PAIR)) {
            let which = if subs == 1 { 2 } else { sub };
            let mut acc = [[_mm256_setzero_si256(); TILE]; HALVES];
            for t in 0..TILE {
                let start = start::<F>(tile.neg_sums[block][which][t]);
                for h in 0..HALVES {
                    acc[h][t] = start;
                }
            }
            for g in sub * GROUPS / subs..(sub + 1) * GROUPS / subs {
                let w = [load(&chunk.codes[block][g][p], 0), load(&chunk.codes[block][g][p], 1)];
                for t in 0..TILE {
                    let x = _mm256_set1_epi32(x[g][t]);
                    for h in 0..HALVES {
                        acc[h][t] = _mm256_dpbusd_avx_epi32(acc[h][t], w[h], x);
                    }
                }
            }
            for h in 0..HALVES {
                let scale = floats(&chunk.scales[block][sub][p], h);
                for t in 0..TILE {
                    let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[h][t]), scale);
                    let mut total = floats(&sums[p][t], h);
                    total = _mm256_fmadd_ps(scaled, _mm256_set1_ps(steps[t]), total);
                    if F::SPEC.has_min {
                        let min = floats(&chunk.mins[block][sub][p], h);
                        let weighted = _mm256_set1_ps(tile.weighted[block][which][t]);
                        total = _mm256_fmadd_ps(min, weighted, total);
                    }
                    put_floats(&mut sums[p][t].0, h, total);
                }
            }
        }
    }
}
