//! Float panels with activations in f32: a column at a time.
//!
//! Where values have scales, the products of a group of columns are summed before their sum is
//! scaled.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use std::marker::PhantomData;

use kvant_codec::DType;

use super::prefetch::prefetch;
use super::{CHUNK_COLS, FloatChunk, FloatScales, Register, Sums, place};
use crate::ops::matmul::panel::{Line, split};
use crate::ops::matmul::partition::PAIR;
use crate::simd::matmul::format::Values;
use crate::simd::matmul::{Kernel, MAX_PARTS, Simd};

/// Registers of weights that a GEMM holds at once.
const ACROSS: usize = 2;

/// Loads column `col` of a panel, or of a group of one, without its scale.
#[inline(always)]
fn column<S: Simd, V: Values>(simd: S, lines: &[Line], col: usize, part: usize) -> S::Floats {
    let (line, at) = (&lines[col / V::PER_LINE].0, col % V::PER_LINE);
    match (V::DTYPE, V::LEVELS) {
        (DType::F16, _) => simd.load_f16(line, at, part),
        (DType::BF16, _) => simd.load_bf16(line, at, part),
        (DType::FP8G128, _) => simd.load_signed_e4m3(line, at, part),
        (_, Some(levels)) => simd.load_levels(levels, line, at, part),
        _ => simd.bits_to_floats(simd.load(line, part)),
    }
}

/// Returns the sums of a group of columns, in the units of [`column`], as numbers to scale. The
/// unit is a factor of its own, so that no scale overflows with it.
#[inline(always)]
fn unscaled<S: Simd, V: Values>(simd: S, of_group: S::Floats) -> S::Floats {
    if V::UNIT == 1.0 { of_group } else { simd.mul(of_group, simd.splat(V::UNIT)) }
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
        match V::GROUP {
            None => add_columns::<S, V, P, T>(simd, panels, self.x, self.prefetch_distance, &mut sums),
            Some(group) => {
                let n_lines = V::lines(group);
                for (i, x) in self.x.chunks_exact(group).enumerate() {
                    let (mut scales, mut values) = ([&panels[0][0]; P], [&panels[0][..0]; P]);
                    for p in 0..P {
                        let lines = &panels[p][i * n_lines..][..n_lines];
                        prefetch(&lines[..1], self.prefetch_distance);
                        (scales[p], values[p]) = (&lines[0], &lines[1..]);
                    }
                    let mut of_group = [[[simd.splat(0.0); MAX_PARTS]; T]; P];
                    add_columns::<S, V, P, T>(simd, values, x, self.prefetch_distance, &mut of_group);
                    for p in 0..P {
                        for part in 0..S::PARTS {
                            let scale = simd.bits_to_floats(simd.load(&scales[p].0, part));
                            for t in 0..T {
                                let of_group = unscaled::<S, V>(simd, of_group[p][t][part]);
                                sums[p][t][part] = simd.mul_add(of_group, scale, sums[p][t][part]);
                            }
                        }
                    }
                }
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

/// Adds the products of the columns of `P` panels, or of a group of them.
#[inline(always)]
fn add_columns<S: Simd, V: Values, const P: usize, const T: usize>(
    simd: S,
    panels: [&[Line]; P],
    x: &[[f32; T]],
    prefetch_distance: usize,
    sums: &mut [[[S::Floats; MAX_PARTS]; T]; P],
) {
    let (steps, n_lines) = (x.chunks_exact(V::STEP), V::STEP / V::PER_LINE);
    let rest = steps.remainder();
    for (i, step) in steps.enumerate() {
        let mut lines = [&panels[0][..n_lines]; P];
        for p in 0..P {
            lines[p] = &panels[p][i * n_lines..][..n_lines];
            prefetch(lines[p], prefetch_distance);
        }
        for col in 0..V::STEP {
            for p in 0..P {
                add_column::<S, V, T>(simd, lines[p], col, &step[col], &mut sums[p]);
            }
        }
    }
    for (col, x) in (x.len() - rest.len()..).zip(rest) {
        for p in 0..P {
            add_column::<S, V, T>(simd, panels[p], col, x, &mut sums[p]);
        }
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

/// Widens `n_cols` columns from `lines` as panel `p` of a chunk: without their scales, which go to
/// `scales`, or scaled where that is `None`.
pub(in crate::ops::matmul) struct UnpackFloats<'a, V> {
    pub lines: &'a [Line],
    pub n_cols: usize,
    pub p: usize,
    pub chunk: &'a mut FloatChunk,
    pub scales: Option<&'a mut FloatScales>,
    pub values: PhantomData<V>,
}

impl<V: Values> Kernel for UnpackFloats<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { lines, n_cols, p, chunk, scales, .. } = self;
        let chunk = &mut chunk[..n_cols];
        let Some(group) = V::GROUP else { return unpack_columns::<S, V>(simd, lines, p, chunk) };
        let groups = lines.chunks_exact(V::lines(group)).zip(chunk.chunks_exact_mut(group));
        let Some(scales) = scales else {
            return groups.for_each(|(lines, out)| unpack_scaled::<S, V>(simd, lines, p, out));
        };
        for ((lines, out), scales) in groups.zip(scales) {
            scales[p] = Register(bytemuck::cast(lines[0].0));
            unpack_columns::<S, V>(simd, &lines[1..], p, out);
        }
    }
}

/// Writes columns without their scales as panel `p` of a chunk.
#[inline(always)]
fn unpack_columns<S: Simd, V: Values>(simd: S, lines: &[Line], p: usize, chunk: &mut [[Register; PAIR]]) {
    for (col, out) in chunk.iter_mut().enumerate() {
        for part in 0..S::PARTS {
            simd.store_floats(column::<S, V>(simd, lines, col, part), &mut out[p].0, part);
        }
    }
}

/// Writes the columns of a group times their scales as panel `p` of a chunk.
#[inline(always)]
fn unpack_scaled<S: Simd, V: Values>(simd: S, lines: &[Line], p: usize, group: &mut [[Register; PAIR]]) {
    let (scales, lines) = (&lines[0], &lines[1..]);
    for (col, out) in group.iter_mut().enumerate() {
        for part in 0..S::PARTS {
            let scale = simd.bits_to_floats(simd.load(&scales.0, part));
            let values = unscaled::<S, V>(simd, column::<S, V>(simd, lines, col, part));
            simd.store_floats(simd.mul(values, scale), &mut out[p].0, part);
        }
    }
}

/// Adds the products of the first columns of a chunk with a tile of as many columns, those of each
/// group times its `scales` if there are some, to `sums`.
pub(in crate::ops::matmul) struct MultiplyFloats<'a, V, const T: usize> {
    pub chunk: &'a FloatChunk,
    pub scales: Option<&'a FloatScales>,
    pub x: &'a [[f32; T]],
    pub sums: &'a mut Sums<T>,
    pub values: PhantomData<V>,
}

impl<V: Values, const T: usize> Kernel for MultiplyFloats<'_, V, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { chunk, scales, x, sums, .. } = self;
        let group = V::GROUP.unwrap_or(CHUNK_COLS);
        for first in (0..PAIR * S::PARTS).step_by(ACROSS) {
            for (g, (chunk, x)) in chunk.chunks(group).zip(x.chunks(group)).enumerate() {
                let mut totals = [[simd.splat(0.0); T]; ACROSS];
                for a in 0..ACROSS {
                    let (p, part) = place::<S>(first + a);
                    for t in 0..T {
                        if scales.is_none() {
                            totals[a][t] = simd.load_floats(&sums[p][t].0, part);
                        }
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
                    let scale = scales.map(|scales| simd.load_floats(&scales[g][p].0, part));
                    for t in 0..T {
                        if let Some(scale) = scale {
                            let sum = simd.load_floats(&sums[p][t].0, part);
                            totals[a][t] = simd.mul_add(unscaled::<S, V>(simd, totals[a][t]), scale, sum);
                        }
                        simd.store_floats(totals[a][t], &mut sums[p][t].0, part);
                    }
                }
            }
        }
    }
}
