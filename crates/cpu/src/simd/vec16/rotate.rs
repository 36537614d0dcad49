//! The rotation of the KV cache, in registers: the same additions in the same order as
//! [`Rotation`], so the same bits.

use std::ops::Range;

use kvant_codec::Rotation;
use kvant_codec::codebook::SIGMA_128;

use super::{Lanes, Op};

/// Returns factors `±by`, negative where `mask` has a bit.
const fn signs(mask: u128, by: f32) -> [[f32; 16]; 8] {
    let mut out = [[by; 16]; 8];
    let mut i = 0;
    while i < 128 {
        if mask >> i & 1 == 1 {
            out[i / 16][i % 16] = -by;
        }
        i += 1;
    }
    out
}

/// Returns 1/√len, which [`Rotation`] applies after the butterfly; times ±1 it rounds the same.
const fn norm(len: usize) -> f32 {
    match len {
        32 => (2.0 * SIGMA_128) as f32,
        64 => 0.125,
        _ => SIGMA_128 as f32,
    }
}

/// Direction of the rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Inverse,
}

/// Rotates a slice of each row by [`Rotation::kv`], or back.
pub(crate) struct Rotate<'a> {
    /// `[rows, width]`.
    pub(crate) rows: &'a mut [f32],
    pub(crate) width: usize,
    /// 128, 64 or 32 values of each row.
    pub(crate) slice: Range<usize>,
    pub(crate) way: Direction,
}

impl Op for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.slice.len() {
            128 => self.rotate::<L, 128, 8>(lanes),
            64 => self.rotate::<L, 64, 4>(lanes),
            32 => self.rotate::<L, 32, 2>(lanes),
            len => unreachable!("a slice of {len} values"),
        }
    }
}

impl Rotate<'_> {
    /// Rotates slices of `N` values, `R` registers.
    #[inline(always)]
    fn rotate<L: Lanes, const N: usize, const R: usize>(self, lanes: L) {
        let (first, last) = match self.way {
            Direction::Forward => (
                &const { signs(Rotation::kv(N).before(), 1.0) },
                &const { signs(Rotation::kv(N).after(), norm(N)) },
            ),
            Direction::Inverse => (
                &const { signs(Rotation::kv(N).after(), 1.0) },
                &const { signs(Rotation::kv(N).before(), norm(N)) },
            ),
        };
        for row in self.rows.chunks_exact_mut(self.width) {
            let slice: &mut [[f32; 16]; R] =
                row[self.slice.clone()].as_chunks_mut().0.try_into().expect("a whole slice");
            let mut x = [lanes.splat(0.0); R];
            for i in 0..R {
                x[i] = lanes.mul(lanes.load(&slice[i]), lanes.load(&first[i]));
                x[i] = within::<L, 1>(lanes, x[i]);
                x[i] = within::<L, 2>(lanes, x[i]);
                x[i] = within::<L, 4>(lanes, x[i]);
                x[i] = within::<L, 8>(lanes, x[i]);
            }
            let mut apart = 1;
            while apart < R {
                for i in (0..R).filter(|i| i & apart == 0) {
                    (x[i], x[i + apart]) = (lanes.add(x[i], x[i + apart]), lanes.sub(x[i], x[i + apart]));
                }
                apart *= 2;
            }
            for i in 0..R {
                lanes.store(lanes.mul(x[i], lanes.load(&last[i])), &mut slice[i]);
            }
        }
    }
}

/// Computes butterflies between lanes `BY` apart: `a + b` in the lower, `a - b` in the upper one.
#[inline(always)]
fn within<L: Lanes, const BY: usize>(lanes: L, x: L::Floats) -> L::Floats {
    let sign = const {
        let mut sign = [1.0f32; 16];
        let mut i = 0;
        while i < 16 {
            if i & BY != 0 {
                sign[i] = -1.0;
            }
            i += 1;
        }
        sign
    };
    lanes.mul_add(x, lanes.load(&sign), lanes.swap::<BY>(x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::isa::Isa;
    use crate::simd::vec16::run_on;
    use kvant_codec::random::Random;

    #[test]
    fn rotation_in_registers_has_the_bits_of_the_codec() {
        let mut x = vec![0.0; 3 * 160];
        Random::new(1).fill_gaussian(&mut x, 3.0);
        x[5] = 1e9;
        for isa in Isa::available() {
            for (way, slice) in [Direction::Forward, Direction::Inverse]
                .into_iter()
                .flat_map(|way| [0..128, 32..96, 128..160].map(|slice| (way, slice)))
            {
                let (mut got, mut want) = (x.clone(), x.clone());
                let rotate = Rotate { rows: &mut got, width: 160, slice: slice.clone(), way };
                if run_on(isa, rotate).is_none() {
                    continue;
                }
                let rotation = Rotation::kv(slice.len());
                for row in want.chunks_exact_mut(160) {
                    match way {
                        Direction::Forward => rotation.forward(&mut row[slice.clone()]),
                        Direction::Inverse => rotation.inverse(&mut row[slice.clone()]),
                    }
                }
                assert_eq!(got, want, "{isa:?} {way:?} {slice:?}");
            }
        }
    }
}
