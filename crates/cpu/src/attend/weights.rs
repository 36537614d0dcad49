//! Weights as integers, to be met with the codes of values.
//!
//! Two bytes beside values that lose little. Codebooks lose so much themselves that one byte may do, and their scales are norms, so that
//! it needs no sign: its unit is `max / 255`, or `max / 127` where bytes of products end at 64. Rounded to the nearest, weights below half
//! a unit would lose all their mass beside a large one; so each token has a threshold of its own, all of them spread evenly
//! ([ordered dithering]). A weight of 0 stays 0.
//!
//! Products take signed bytes, so a weight is stored [`below`] itself, and as many times the sum of all codes is added
//! ([`weighted`]).
//!
//! [ordered dithering]: https://en.wikipedia.org/wiki/Ordered_dithering

use super::codes::Meaning;
use super::kernels::{BLOCK, BLOCK_TILES, Bytes, Lane, Scores, joined};
use crate::lanes::{Lanes, Op};

/// How far a weight of one byte is stored below itself, as a power of two.
const fn below_bits<L: Lanes>() -> i32 {
    (L::MAX_BYTE + 1).ilog2() as i32
}

/// How far a weight of one byte is stored below itself.
pub(super) const fn below<L: Lanes>() -> i32 {
    1 << below_bits::<L>()
}

/// The largest weight of one byte.
const fn max_unsigned<L: Lanes>() -> i32 {
    2 * below::<L>() - 1
}

/// A row that sums codes.
pub(super) const ONES: Bytes = Bytes([[1; 4]; 32]);

/// What is added to the weights of a block before they are rounded: from -1/2 to 1/2, in the order of van der Corput, which
/// keeps those of neighbours far apart.
static DITHER: [Lane; BLOCK_TILES] = {
    let (mut dither, mut i) = ([Lane([0.0; 16]); BLOCK_TILES], 0);
    while i < BLOCK {
        let turned = (i as u8).reverse_bits() >> 1;
        dither[i / 16].0[i % 16] = (turned as f32 + 0.5) / BLOCK as f32 - 0.5;
        i += 1;
    }
    dither
};

/// Planes of the bytes of weights that meet such values: one where rounding to it costs at most a twentieth of what codes of the largest
/// weight's value lose, with all others of a block anywhere between two units, where dithering is off by 1/6 unit² in the mean.
pub(super) fn weight_planes<L: Lanes>(meaning: Meaning) -> usize {
    let unit = 1.0 / max_unsigned::<L>() as f32;
    if BLOCK as f32 / 6.0 * unit * unit <= meaning.loss / 20.0 { 1 } else { 2 }
}

/// Codes times weights, from their products with `P` planes of bytes and the sums of all codes.
#[inline(always)]
pub(super) fn weighted<L: Lanes, const P: usize>(lanes: L, sums: [L::Ints; P], all: L::Ints) -> L::Ints {
    let sum = joined(lanes, sums);
    if P == 2 { sum } else { lanes.add_i(sum, lanes.shift_left(all, lanes.splat_i(below_bits::<L>()))) }
}

/// Rounds the weights of some tiles, p · scale, to integers. A NaN among `p` may give any integers; it is the sum of the softmax
/// that carries it on.
pub(super) struct RoundWeights<'a> {
    pub(super) p: &'a [Scores],
    /// f16 scales of the first tile's tokens; the next tile's are `stride` bytes further.
    pub(super) scales: &'a [u8],
    pub(super) stride: usize,
    pub(super) tiles: usize,
    /// First of the tiles within the weights.
    pub(super) tile: usize,
    pub(super) meaning: Meaning,
    /// Factor on the weights, `[queries]`.
    pub(super) shrink: &'a [f32],
    /// Their bytes, `[queries][planes]`: high and low ones, or [`below`] the weight.
    pub(super) rows: &'a mut [Bytes],
    /// `-bias · Σ integers`, `[queries]`.
    pub(super) starts: &'a mut [i32],
    /// What one unit of a product with codes stands for, `[queries]`.
    pub(super) factors: &'a mut [f32],
}

impl Op for RoundWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let mut scales = [lanes.splat(0.0); BLOCK_TILES];
        for (t, scales) in scales[..self.tiles].iter_mut().enumerate() {
            *scales = lanes.load_f16(self.scales[t * self.stride..].first_chunk().expect("16 scales"));
        }
        let (scales, planes) = (&scales[..self.tiles], weight_planes::<L>(self.meaning));
        let limit = if planes == 1 { max_unsigned::<L>() } else { L::MAX_SPLIT } as f32;
        let tiles = self.tile..self.tile + self.tiles;
        let fours = 4 * tiles.start..4 * tiles.end;
        for (n, (p, rows)) in self.p.iter().zip(self.rows.chunks_exact_mut(planes)).enumerate() {
            let p = &p.0[tiles.clone()];
            let mut most = lanes.splat(0.0);
            for (p, &scale) in p.iter().zip(scales) {
                most = lanes.max(lanes.abs(lanes.mul(lanes.load(p), scale)), most);
            }
            let most = lanes.largest(most);
            // Weights this small add nothing to any sum; dividing by them might overflow.
            let per_unit = if most > 1e-30 { limit / most } else { 0.0 };
            let sum = match rows {
                [row] => {
                    let row = row.0[fours.clone()].as_chunks_mut().0;
                    to_byte(lanes, p, scales, &DITHER[tiles.clone()], per_unit, row)
                }
                [high, low] => {
                    let rows = [high, low].map(|row| row.0[fours.clone()].as_chunks_mut().0);
                    to_two_bytes(lanes, p, scales, per_unit, rows)
                }
                _ => unreachable!("{planes} planes"),
            };
            self.starts[n] = sum.wrapping_mul(-self.meaning.bias);
            self.factors[n] = most * (self.meaning.step / limit) * self.shrink[n];
        }
    }
}

/// Rounds the weights of a query to one byte; gives their sum.
#[inline(always)]
fn to_byte<L: Lanes>(
    lanes: L,
    p: &[[f32; 16]],
    scales: &[L::Floats],
    dither: &[Lane],
    per_unit: f32,
    row: &mut [[[i8; 4]; 4]],
) -> i32 {
    let mut sum = lanes.splat_i(0);
    for (((p, &scale), dither), row) in p.iter().zip(scales).zip(dither).zip(row) {
        let weight = lanes.mul(lanes.load(p), scale);
        let integers = lanes.round(lanes.mul_add(weight, lanes.splat(per_unit), lanes.load(&dither.0)));
        sum = lanes.add_i(sum, integers);
        *row = lanes.low_bytes(lanes.add_i(integers, lanes.splat_i(-below::<L>())));
    }
    lanes.sum_i(sum)
}

/// Rounds the weights of a query to two bytes; gives their sum.
#[inline(always)]
fn to_two_bytes<L: Lanes>(
    lanes: L,
    p: &[[f32; 16]],
    scales: &[L::Floats],
    per_unit: f32,
    [high, low]: [&mut [[[i8; 4]; 4]]; 2],
) -> i32 {
    let mut sum = lanes.splat_i(0);
    for (((p, &scale), high), low) in p.iter().zip(scales).zip(high).zip(low) {
        let weight = lanes.mul(lanes.load(p), scale);
        let integers = lanes.round(lanes.mul(weight, lanes.splat(per_unit)));
        sum = lanes.add_i(sum, integers);
        (*high, *low) = lanes.split(integers);
    }
    lanes.sum_i(sum)
}

#[cfg(test)]
mod tests {
    use kvant_codec::DType;

    use super::*;
    use crate::Isa;
    use crate::lanes::run_on;

    /// The weights of one query beside values of this type whose scales are 1, as integers, and what one unit of them is.
    fn rounded(isa: Isa, dtype: DType, p: &Scores) -> Option<(Vec<i32>, f32)> {
        struct Planes(Meaning);
        impl Op for Planes {
            type Output = (usize, i32);

            fn run<L: Lanes>(self, _: L) -> (usize, i32) {
                (weight_planes::<L>(self.0), below::<L>())
            }
        }
        let meaning = Meaning::of(dtype).unwrap();
        let (planes, below) = run_on(isa, Planes(meaning))?;
        let scales: Vec<u8> = [0, 0x3c].repeat(16);
        let (mut rows, mut starts, mut factors) = (vec![Bytes([[0; 4]; 32]); planes], [0], [0.0]);
        let (p, scales, rows_of) = (std::slice::from_ref(p), &scales, &mut rows);
        let (tiles, tile, stride, shrink) = (BLOCK_TILES, 0, 0, &[1.0]);
        let (starts, factors) = (&mut starts, &mut factors);
        let round =
            RoundWeights { p, scales, stride, tiles, tile, meaning, shrink, rows: rows_of, starts, factors };
        run_on(isa, round)?;
        let bytes =
            |row: &Bytes| row.0.as_flattened().iter().map(|&byte| i32::from(byte)).collect::<Vec<_>>();
        let integers: Vec<i32> = match &rows[..] {
            [row] => bytes(row).into_iter().map(|byte| byte + below).collect(),
            [high, low] => {
                bytes(high).into_iter().zip(bytes(low)).map(|(high, low)| 2 * below * high + low).collect()
            }
            _ => unreachable!(),
        };
        assert_eq!(starts[0], -meaning.bias * integers.iter().sum::<i32>());
        Some((integers, factors[0] / meaning.step))
    }

    #[test]
    fn small_weights_beside_a_large_one_keep_their_mass_and_zeros_stay_zeros() {
        for (isa, dtype) in Isa::available().into_iter().flat_map(|isa| DType::KV.map(|dtype| (isa, dtype))) {
            if dtype.code().is_none() {
                continue;
            }
            for small in [0.0, 1e-6, 0.0007, 0.001, 0.00195, 0.002, 0.01, 0.3, 1.0] {
                let mut p = Scores([[small; 16]; BLOCK_TILES + 1]);
                p.0[3][5] = 1.0;
                p.0[6] = [0.0; 16];
                let Some((integers, unit)) = rounded(isa, dtype, &p) else { continue };
                assert!(integers[96..112] == [0; 16], "{isa:?} {dtype} {small}: {integers:?}");
                let p = p.0[..BLOCK_TILES].as_flattened();
                assert!(
                    integers.iter().zip(p).all(|(&i, &p)| (i as f32 * unit - p).abs() <= unit * 1.001),
                    "{isa:?} {dtype} {small}: {integers:?}"
                );
                let (got, want) = (integers.iter().sum::<i32>() as f32 * unit, p.iter().sum::<f32>());
                // Thresholds are spread evenly, those of all tiles but one too: as many are passed as there are units of mass.
                assert!((got - want).abs() <= 2.0 / 127.0, "{isa:?} {dtype} {small}: {got} {want}");
            }
        }
    }
}
