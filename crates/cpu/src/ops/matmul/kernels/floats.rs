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
use crate::simd::matmul::format::{E4M3_UNIT, QUAD, Values};
use crate::simd::matmul::{Kernel, MAX_PARTS, Simd};

/// Registers of weights that a GEMM holds at once.
const ACROSS: usize = 2;

/// Loads column `col` of a panel, or of a group of one, without its scale.
#[inline(always)]
fn column<S: Simd, V: Values>(simd: S, lines: &[Line], col: usize, part: usize) -> S::Floats {
    let line = &lines[col / V::PER_LINE].0;
    match V::DTYPE {
        DType::F16 => simd.load_f16(line, col % 2, part),
        DType::BF16 => simd.load_bf16(line, col % 2, part),
        DType::FP8G128 => simd.load_signed_e4m3(line, col % V::PER_LINE, part),
        _ => simd.bits_to_floats(simd.load(line, part)),
    }
}

/// Adds the sums of a group of columns, in the units of [`column`], to `sums`. The unit is a factor
/// of its own, so that no scale overflows with it.
#[inline(always)]
fn add_scaled<S: Simd>(simd: S, of_group: S::Floats, scale: S::Floats, sums: S::Floats) -> S::Floats {
    simd.mul_add(simd.mul(of_group, simd.splat(1.0 / E4M3_UNIT)), scale, sums)
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
                                let sum = sums[p][t][part];
                                sums[p][t][part] = add_scaled(simd, of_group[p][t][part], scale, sum);
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
    let (quads, rest) = x.as_chunks::<QUAD>();
    for (i, quad) in quads.iter().enumerate() {
        let n_lines = QUAD / V::PER_LINE;
        let mut lines = [&panels[0][..n_lines]; P];
        for p in 0..P {
            lines[p] = &panels[p][i * n_lines..][..n_lines];
            prefetch(lines[p], prefetch_distance);
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
        let lines = match V::GROUP {
            None => lines,
            Some(_) => {
                const { assert!(V::GROUP.is_none() || V::GROUP.unwrap() == CHUNK_COLS) };
                let (of_group, lines) = lines.split_first().expect("a group has a line of scales");
                match scales {
                    Some(scales) => scales[p] = Register(bytemuck::cast(of_group.0)),
                    None => return unpack_scaled::<S, V>(simd, of_group, lines, p, &mut chunk[..n_cols]),
                }
                lines
            }
        };
        for (col, out) in chunk[..n_cols].iter_mut().enumerate() {
            for part in 0..S::PARTS {
                let values = column::<S, V>(simd, lines, col, part);
                simd.store_floats(values, &mut out[p].0, part);
            }
        }
    }
}

/// Writes the columns of a group times their scales as panel `p` of a chunk.
#[inline(always)]
fn unpack_scaled<S: Simd, V: Values>(
    simd: S,
    scales: &Line,
    lines: &[Line],
    p: usize,
    chunk: &mut [[Register; PAIR]],
) {
    for (col, out) in chunk.iter_mut().enumerate() {
        for part in 0..S::PARTS {
            let scale = simd.bits_to_floats(simd.load(&scales.0, part));
            let values = add_scaled(simd, column::<S, V>(simd, lines, col, part), scale, simd.splat(0.0));
            simd.store_floats(values, &mut out[p].0, part);
        }
    }
}

/// Adds the products of the first columns of a chunk with a tile of as many columns, times `scales`
/// if there are some, to `sums`.
pub(in crate::ops::matmul) struct MultiplyFloats<'a, const T: usize> {
    pub chunk: &'a FloatChunk,
    pub scales: Option<&'a FloatScales>,
    pub x: &'a [[f32; T]],
    pub sums: &'a mut Sums<T>,
}

impl<const T: usize> Kernel for MultiplyFloats<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { chunk, scales, x, sums } = self;
        for first in (0..PAIR * S::PARTS).step_by(ACROSS) {
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
                let scale = scales.map(|scales| simd.load_floats(&scales[p].0, part));
                for t in 0..T {
                    if let Some(scale) = scale {
                        let sum = simd.load_floats(&sums[p][t].0, part);
                        totals[a][t] = add_scaled(simd, totals[a][t], scale, sum);
                    }
                    simd.store_floats(totals[a][t], &mut sums[p][t].0, part);
                }
            }
        }
    }
}
