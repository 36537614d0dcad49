//! The rotation of the cache, in registers: the same additions in the same order as [`Rotation`], so the same bits.

use kvant_codec::Rotation;
use kvant_codec::codebook::SIGMA_128;

use super::{Lanes, Op};

const LEN: usize = 128;

/// Factors `±by`, minus where `mask` says.
const fn signs(mask: u128, by: f32) -> [[f32; 16]; 8] {
    let mut out = [[by; 16]; 8];
    let mut i = 0;
    while i < LEN {
        if mask >> i & 1 == 1 {
            out[i / 16][i % 16] = -by;
        }
        i += 1;
    }
    out
}

/// 1/√128, which [`Rotation`] applies after the butterfly; times ±1 it rounds the same.
const NORM: f32 = SIGMA_128 as f32;

/// Which way to rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Forward,
    Inverse,
}

/// Rotates each slice of 128 values by [`Rotation::kv`], or back.
pub(crate) struct Rotate<'a> {
    pub(crate) slices: &'a mut [f32],
    pub(crate) way: Way,
}

impl Op for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        const BEFORE: u128 = Rotation::kv().before();
        const AFTER: u128 = Rotation::kv().after();
        let (first, last) = match self.way {
            Way::Forward => (&const { signs(BEFORE, 1.0) }, &const { signs(AFTER, NORM) }),
            Way::Inverse => (&const { signs(AFTER, 1.0) }, &const { signs(BEFORE, NORM) }),
        };
        for slice in self.slices.as_chunks_mut::<LEN>().0 {
            let (rows, _) = slice.as_chunks_mut::<16>();
            let mut x = [lanes.splat(0.0); 8];
            for i in 0..8 {
                x[i] = lanes.mul(lanes.load(&rows[i]), lanes.load(&first[i]));
                x[i] = within::<L, 1>(lanes, x[i]);
                x[i] = within::<L, 2>(lanes, x[i]);
                x[i] = within::<L, 4>(lanes, x[i]);
                x[i] = within::<L, 8>(lanes, x[i]);
            }
            for apart in [1, 2, 4] {
                for i in (0..8).filter(|i| i & apart == 0) {
                    (x[i], x[i + apart]) = (lanes.add(x[i], x[i + apart]), lanes.sub(x[i], x[i + apart]));
                }
            }
            for i in 0..8 {
                lanes.store(lanes.mul(x[i], lanes.load(&last[i])), &mut rows[i]);
            }
        }
    }
}

/// Butterflies between lanes `BY` apart: `a + b` in the lower, `a - b` in the upper one.
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
    use crate::Isa;
    use crate::lanes::run_on;
    use kvant_codec::random::Random;

    #[test]
    fn rotation_in_registers_has_the_bits_of_the_codec() {
        let mut x = vec![0.0; 384];
        Random::new(1).fill_gaussian(&mut x, 3.0);
        x[5] = 1e9;
        for isa in Isa::available() {
            for way in [Way::Forward, Way::Inverse] {
                let (mut got, mut want) = (x.clone(), x.clone());
                let rotate = Rotate { slices: &mut got, way };
                if run_on(isa, rotate).is_none() {
                    continue;
                }
                match way {
                    Way::Forward => Rotation::kv().forward(&mut want),
                    Way::Inverse => Rotation::kv().inverse(&mut want),
                }
                assert_eq!(got, want, "{isa:?} {way:?}");
            }
        }
    }
}
