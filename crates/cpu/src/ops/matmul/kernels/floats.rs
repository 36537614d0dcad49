//! Float panels with activations in f32: a column at a time.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use std::marker::PhantomData;

use kvant_codec::DType;

use super::prefetch::prefetch;
use super::{FloatChunk, Register, Sums, place};
use crate::ops::matmul::panel::{Line, split};
use crate::ops::matmul::partition::PAIR;
use crate::simd::matmul::format::{QUAD, Values};
use crate::simd::matmul::{Kernel, MAX_PARTS, Simd};

/// Registers of weights that a GEMM holds at once.
const ACROSS: usize = 2;

/// Loads column `col` of a panel.
#[inline(always)]
fn column<S: Simd, V: Values>(simd: S, lines: &[Line], col: usize, part: usize) -> S::Floats {
    let line = &lines[col / V::PER_LINE].0;
    match V::DTYPE {
        DType::F16 => simd.load_f16(line, col % 2, part),
        DType::BF16 => simd.load_bf16(line, col % 2, part),
        _ => simd.bits_to_floats(simd.load(line, part)),
    }
}

/// Multiplies `P` neighbouring panels with one tile `[n_in]`. Prefetches `prefetch_distance` bytes
/// further in memory, unless that is 0.
pub(in crate::ops::matmul) struct GemvFloats<'a, V, const P: usize, const T: usize> {
    pub panels: &'a [Line],
    pub x: &'a [[f32; T]],
    pub prefetch_distance: usize,
    pub values: PhantomData<V>,
}

impl<V: Values, const P: usize, const T: usize> Kernel for GemvFloats<'_, V, P, T> {
    type Output = [[Register; T]; P];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> [[Register; T]; P] {
        let mut sums = [[[simd.splat(0.0); MAX_PARTS]; T]; P];
        let panels: [&[Line]; P] = split(self.panels);
        let (quads, rest) = self.x.as_chunks::<QUAD>();
        for (i, quad) in quads.iter().enumerate() {
            let n_lines = QUAD / V::PER_LINE;
            let mut lines = [&panels[0][..n_lines]; P];
            for p in 0..P {
                lines[p] = &panels[p][i * n_lines..][..n_lines];
                prefetch(lines[p], self.prefetch_distance);
            }
            for (col, x) in quad.iter().enumerate() {
                for p in 0..P {
                    add_column::<S, V, T>(simd, lines[p], col, x, &mut sums[p]);
                }
            }
        }
        for (col, x) in (QUAD * quads.len()..).zip(rest) {
            for p in 0..P {
                add_column::<S, V, T>(simd, panels[p], col, x, &mut sums[p]);
            }
        }
        let mut out = [[Register::ZERO; T]; P];
        for p in 0..P {
            for t in 0..T {
                for part in 0..S::PARTS {
                    simd.store_floats(sums[p][t][part], &mut out[p][t].0, part);
                }
            }
        }
        out
    }
}

/// Adds the products of column `col`.
#[inline(always)]
fn add_column<S: Simd, V: Values, const T: usize>(
    simd: S,
    lines: &[Line],
    col: usize,
    x: &[f32; T],
    sums: &mut [[S::Floats; MAX_PARTS]; T],
) {
    let mut w = [simd.splat(0.0); MAX_PARTS];
    for part in 0..S::PARTS {
        w[part] = column::<S, V>(simd, lines, col, part);
    }
    for t in 0..T {
        let x = simd.splat(x[t]);
        for part in 0..S::PARTS {
            sums[t][part] = simd.mul_add(w[part], x, sums[t][part]);
        }
    }
}

/// Widens `n_cols` columns from `lines` as panel `p` of a chunk.
pub(in crate::ops::matmul) struct UnpackFloats<'a, V> {
    pub lines: &'a [Line],
    pub n_cols: usize,
    pub p: usize,
    pub chunk: &'a mut FloatChunk,
    pub values: PhantomData<V>,
}

impl<V: Values> Kernel for UnpackFloats<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (col, out) in self.chunk[..self.n_cols].iter_mut().enumerate() {
            for part in 0..S::PARTS {
                let values = column::<S, V>(simd, self.lines, col, part);
                simd.store_floats(values, &mut out[self.p].0, part);
            }
        }
    }
}

/// Adds the products of the first columns of a chunk with a tile of as many columns to `sums`.
pub(in crate::ops::matmul) struct MultiplyFloats<'a, const T: usize> {
    pub chunk: &'a FloatChunk,
    pub x: &'a [[f32; T]],
    pub sums: &'a mut Sums<T>,
}

impl<const T: usize> Kernel for MultiplyFloats<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { chunk, x, sums } = self;
        for first in (0..PAIR * S::PARTS).step_by(ACROSS) {
            let mut totals = [[simd.splat(0.0); T]; ACROSS];
            for a in 0..ACROSS {
                let (p, part) = place::<S>(first + a);
                for t in 0..T {
                    totals[a][t] = simd.load_floats(&sums[p][t].0, part);
                }
            }
            for (columns, x) in chunk.iter().zip(x) {
                let mut w = [simd.splat(0.0); ACROSS];
                for a in 0..ACROSS {
                    let (p, part) = place::<S>(first + a);
                    w[a] = simd.load_floats(&columns[p].0, part);
                }
                for t in 0..T {
                    let x = simd.splat(x[t]);
                    for a in 0..ACROSS {
                        totals[a][t] = simd.mul_add(w[a], x, totals[a][t]);
                    }
                }
            }
            for a in 0..ACROSS {
                let (p, part) = place::<S>(first + a);
                for t in 0..T {
                    simd.store_floats(totals[a][t], &mut sums[p][t].0, part);
                }
            }
        }
    }
}
