//! Quantization with 128-bit registers: a block is eight.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use super::source::Source;
use super::tile::{TileMut, rotate, steps};
use crate::simd::matmul::format::{BLOCK, GROUPS};
use crate::simd::vec128::{Quad, Quads, Task};

/// Registers of a block.
const N: usize = 8;

/// Does the work of [`super::quantize_tile`].
#[inline]
pub(super) fn quantize_tile<Q: Quad, const T: usize>(
    quads: Quads<Q>,
    source: Source<'_>,
    tile: TileMut<'_, T>,
) {
    quads.0.run(Quantize { q: quads.0, source, tile });
}

struct Quantize<'a, Q, const T: usize> {
    q: Q,
    source: Source<'a>,
    tile: TileMut<'a, T>,
}

impl<Q: Quad, const T: usize> Task for Quantize<'_, Q, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { q, source, mut tile } = self;
        for t in 0..T {
            let (row, norm) = source.row(t);
            if row.is_empty() {
                tile.clear(t);
            }
            for (b, block) in row.iter().enumerate() {
                let mut values = load(q, block);
                if let Some((weight, factor)) = norm {
                    let (weight, factor) = (load(q, &weight[b]), q.splat(factor));
                    for i in 0..N {
                        values[i] = q.mul(q.mul(values[i], factor), weight[i]);
                    }
                }
                if source.rotates {
                    values = rotated(q, values);
                }
                let mut largest = q.splat_i(0);
                for i in 0..N {
                    largest = q.max_i(largest, q.bits(q.abs(values[i])));
                }
                let (inverse, scale) = steps(f32::from_bits(q.largest_i(largest) as u32));
                if scale.is_nan() {
                    tile.put(b, t, &[0; GROUPS], scale, [0; 2]);
                    continue;
                }
                let mut rounded = [q.splat_i(0); N];
                for i in 0..N {
                    rounded[i] = q.round(q.mul(values[i], q.splat(inverse)));
                }
                let (mut codes, mut sums) = ([[0; 16]; 2], [0; 2]);
                for (half, four) in rounded.as_chunks().0.iter().enumerate() {
                    q.store_i(q.low_bytes(*four), &mut codes[half]);
                    let [a, b, c, d] = *four;
                    sums[half] = q.sum_i(q.add_i(q.add_i(a, b), q.add_i(c, d)));
                }
                tile.put(b, t, &bytemuck::cast(codes), scale, sums);
            }
        }
    }
}

#[inline(always)]
fn load<Q: Quad>(q: Q, block: &[f32; BLOCK]) -> [Q::Floats; N] {
    let mut values = [q.splat(0.0); N];
    for (value, four) in values.iter_mut().zip(block.as_chunks().0) {
        *value = q.load(four);
    }
    values
}

#[inline(always)]
fn rotated<Q: Quad>(q: Q, registers: [Q::Floats; N]) -> [Q::Floats; N] {
    let mut values = [0.0; BLOCK];
    for (four, register) in values.as_chunks_mut().0.iter_mut().zip(registers) {
        q.store(register, four);
    }
    rotate(&mut values);
    load(q, &values)
}
