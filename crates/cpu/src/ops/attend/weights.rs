//! Rounds softmax weights to integers, which are multiplied with the codes of values.
//!
//! Values that lose little take weights of two bytes. Codebooks lose so much themselves that one
//! byte may suffice. Their scales are norms, so that it needs no sign: its unit is `max / 255`, or
//! `max / 127` where bytes of products end at 64. Rounded to nearest, weights below half a unit
//! would lose all their mass beside a large one; so each token has its own threshold, and the
//! thresholds are spread evenly ([ordered dithering]). A weight of 0 stays 0.
//!
//! Products take signed bytes, so a weight is stored minus [`below`], and `below` times the sum of
//! all codes is added back ([`weighted`]).
//!
//! [ordered dithering]: https://en.wikipedia.org/wiki/Ordered_dithering

use super::codes::CodeMeaning;
use super::shape::{BLOCK, BLOCK_TILES, Bytes, Lane, Scores, joined};
use crate::simd::vec16::{Lanes, Op};

/// Returns the offset that is subtracted from a weight of one byte when it is stored.
pub(super) const fn weight_offset<L: Lanes>() -> i32 {
    1 << L::OFFSET_BITS
}

/// Returns the largest weight of one byte.
const fn max_unsigned<L: Lanes>() -> i32 {
    2 * weight_offset::<L>() - 1
}

/// Dither added to the weights of a block before rounding: from -1/2 to 1/2, in van der Corput
/// order, so that neighbours have distant thresholds.
static DITHER: [Lane; BLOCK_TILES] = {
    let (mut dither, mut i) = ([Lane([0.0; 16]); BLOCK_TILES], 0);
    while i < BLOCK {
        let turned = (i as u8).reverse_bits() >> 1;
        dither[i / 16].0[i % 16] = (turned as f32 + 0.5) / BLOCK as f32 - 0.5;
        i += 1;
    }
    dither
};

/// Returns the number of byte planes of weights for values with this
/// [`Codes::LOSS`](super::codes::Codes): one where rounding to it costs at most a twentieth of the
/// loss of the codes of the largest weight's value, with all others of a block anywhere between two
/// units, where dithering is off by 1/6 unit² in the mean.
pub(super) const fn weight_planes<L: Lanes>(loss: f32) -> usize {
    let unit = 1.0 / max_unsigned::<L>() as f32;
    if BLOCK as f32 / 6.0 * unit * unit <= loss / 20.0 { 1 } else { 2 }
}

/// Returns codes times weights, from their products with `P` byte planes and the sums of all codes.
#[inline(always)]
pub(super) fn weighted<L: Lanes, const P: usize>(lanes: L, sums: [L::Ints; P], all: L::Ints) -> L::Ints {
    let sum = joined(lanes, sums);
    if P == 2 { sum } else { lanes.add_i(sum, lanes.shift_left(all, lanes.splat_i(L::OFFSET_BITS))) }
}

/// Rounds the weights of some tiles, p · scale, to integers. A NaN among `p` may give any integers;
/// the sum of the softmax propagates it.
pub(super) struct RoundWeights<'a> {
    pub(super) p: &'a [Scores],
    /// f16 scales of the first tile's tokens; the next tile's are `stride` bytes further.
    pub(super) scales: &'a [u8],
    pub(super) stride: usize,
    pub(super) tiles: usize,
    /// First of the tiles within the weights.
    pub(super) tile: usize,
    pub(super) meaning: CodeMeaning,
    /// Factor on the weights, `[queries]`.
    pub(super) rescale_new: &'a [f32],
    /// Byte planes, `[queries][planes]`: the parts of weights, or the weight minus its offset.
    pub(super) rows: &'a mut [Bytes],
    /// `-bias · Σ integers`, `[queries]`.
    pub(super) starts: &'a mut [i32],
    /// Value of one unit of a product with codes, `[queries]`.
    pub(super) factors: &'a mut [f32],
}

impl Op for RoundWeights<'_> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let mut scales = [lanes.splat(0.0); BLOCK_TILES];
        for (t, scales) in scales[..self.tiles].iter_mut().enumerate() {
            *scales = lanes.load_f16(self.scales[t * self.stride..].first_chunk().expect("16 scales"));
        }
        let is_whole = L::WIDE == 2 && self.tiles == BLOCK_TILES;
        match (weight_planes::<L>(self.meaning.loss), is_whole) {
            (1, true) => self.round::<L, 1, true>(lanes, &scales),
            (1, false) => self.round::<L, 1, false>(lanes, &scales),
            (2, true) => self.round::<L, 2, true>(lanes, &scales),
            (2, false) => self.round::<L, 2, false>(lanes, &scales),
            (planes, _) => unreachable!("{planes} planes"),
        }
    }
}

impl RoundWeights<'_> {
    /// Rounds to `P` byte planes; with `WHOLE`, all tiles of a block, which is faster with many
    /// registers.
    #[inline(always)]
    fn round<L: Lanes, const P: usize, const WHOLE: bool>(self, lanes: L, scales: &[L::Floats; BLOCK_TILES]) {
        let limit = if P == 1 { max_unsigned::<L>() } else { L::MAX_SPLIT } as f32;
        // Weights this small add nothing to any sum; dividing by them might overflow.
        let per_unit = |max: f32| if max > 1e-30 { limit / max } else { 0.0 };
        let (bias, step) = (-self.meaning.bias, self.meaning.step / limit);
        let (tile, n_tiles) = if WHOLE { (0, BLOCK_TILES) } else { (self.tile, self.tiles) };
        let (scales, tiles) = (&scales[..n_tiles], tile..tile + n_tiles);
        let mut sizes = [lanes.splat(0.0); BLOCK_TILES];
        for (size, &scale) in sizes.iter_mut().zip(scales) {
            *size = lanes.abs(scale);
        }
        let sizes = &sizes[..n_tiles];
        let (sixteens, rest) = self.p.as_chunks::<16>();
        let (rows, n) = (self.rows.as_chunks_mut::<P>().0, 16 * sixteens.len());
        for (i, p) in sixteens.iter().enumerate() {
            let mut max = [lanes.splat(0.0); 16];
            for (max, p) in max.iter_mut().zip(p) {
                *max = heaviest(lanes, &p.0[tiles.clone()], sizes);
            }
            let mut heaviest = [0.0; 16];
            lanes.store(lanes.largest_of_each(max), &mut heaviest);
            let (per_unit, mut sums) = (heaviest.map(per_unit), [lanes.splat_i(0); 16]);
            for m in 0..16 {
                let p = &p[m].0[tiles.clone()];
                sums[m] = to_bytes(lanes, p, scales, tile, per_unit[m], &mut rows[16 * i + m]);
            }
            let sums = lanes.sum_i_of_each(sums);
            for m in 0..16 {
                self.starts[16 * i + m] = sums[m].wrapping_mul(bias);
                self.factors[16 * i + m] = heaviest[m] * step * self.rescale_new[16 * i + m];
            }
        }
        // Two loops, so that the latency of one query's maximum does not stall the next query.
        let mut maxima = [0.0; 16];
        for (max, p) in maxima.iter_mut().zip(rest) {
            *max = lanes.largest(heaviest(lanes, &p.0[tiles.clone()], sizes));
        }
        for ((i, p), max) in (n..).zip(rest).zip(maxima) {
            let p = &p.0[tiles.clone()];
            let sum = lanes.sum_i(to_bytes(lanes, p, scales, tile, per_unit(max), &mut rows[i]));
            self.starts[i] = sum.wrapping_mul(bias);
            self.factors[i] = max * step * self.rescale_new[i];
        }
    }
}

/// Returns the largest weights of a query, lane by lane, with scales of this magnitude.
#[inline(always)]
fn heaviest<L: Lanes>(lanes: L, p: &[[f32; 16]], sizes: &[L::Floats]) -> L::Floats {
    let mut max = lanes.splat(0.0);
    for (p, &size) in p.iter().zip(sizes) {
        max = lanes.max(lanes.mul(lanes.load(p), size), max);
    }
    max
}

/// Rounds the weights of a query, from tile `tile` of the block on, to `P` byte planes; returns
/// their sums, lane by lane.
#[inline(always)]
fn to_bytes<L: Lanes, const P: usize>(
    lanes: L,
    p: &[[f32; 16]],
    scales: &[L::Floats],
    tile: usize,
    per_unit: f32,
    rows: &mut [Bytes; P],
) -> L::Ints {
    let mut rows = rows.each_mut().map(|row| &mut row.0.as_chunks_mut().0[tile..tile + p.len()]);
    if P == 1 {
        to_byte(lanes, p, scales, &DITHER[tile..], per_unit, rows[0])
    } else {
        let (first, second) = rows.split_at_mut(1);
        to_parts(lanes, p, scales, per_unit, [first[0], second[0]])
    }
}

/// Rounds the weights of a query to one byte; returns their sums, lane by lane.
#[inline(always)]
fn to_byte<L: Lanes>(
    lanes: L,
    p: &[[f32; 16]],
    scales: &[L::Floats],
    dither: &[Lane],
    per_unit: f32,
    row: &mut [[[i8; 4]; 4]],
) -> L::Ints {
    let mut sum = lanes.splat_i(0);
    // Where there are registers for that many.
    let n_fours = if L::WIDE == 2 { p.len() / 4 } else { 0 };
    let (fours, rest) = row.split_at_mut(4 * n_fours);
    let fours = fours.as_chunks_mut::<4>().0;
    for (i, row) in fours.iter_mut().enumerate() {
        let t = 4 * i;
        let integers = [
            to_integers(lanes, &p[t], scales[t], &dither[t], per_unit),
            to_integers(lanes, &p[t + 1], scales[t + 1], &dither[t + 1], per_unit),
            to_integers(lanes, &p[t + 2], scales[t + 2], &dither[t + 2], per_unit),
            to_integers(lanes, &p[t + 3], scales[t + 3], &dither[t + 3], per_unit),
        ];
        sum = lanes.store_offset(sum, integers, row);
    }
    for (row, t) in rest.iter_mut().zip(4 * n_fours..) {
        let integers = to_integers(lanes, &p[t], scales[t], &dither[t], per_unit);
        sum = lanes.add_i(sum, integers);
        *row = lanes.low_bytes(lanes.add_i(integers, lanes.splat_i(-weight_offset::<L>())));
    }
    sum
}

/// Returns p · scale in units, rounded with the thresholds of its tokens.
#[inline(always)]
fn to_integers<L: Lanes>(lanes: L, p: &[f32; 16], scale: L::Floats, dither: &Lane, per_unit: f32) -> L::Ints {
    let weight = lanes.mul(lanes.load(p), scale);
    lanes.round(lanes.mul_add(weight, lanes.splat(per_unit), lanes.load(&dither.0)))
}

/// Rounds the weights of a query to two bytes, in parts ([`Lanes::split`]); returns their sums,
/// lane by lane.
#[inline(always)]
fn to_parts<L: Lanes>(
    lanes: L,
    p: &[[f32; 16]],
    scales: &[L::Floats],
    per_unit: f32,
    [first, second]: [&mut [[[i8; 4]; 4]]; 2],
) -> L::Ints {
    let mut sum = lanes.splat_i(0);
    let (fours_of_first, first) = first.as_chunks_mut::<4>();
    let (fours_of_second, second) = second.as_chunks_mut::<4>();
    let n_fours = fours_of_first.len();
    for (i, (first, second)) in fours_of_first.iter_mut().zip(fours_of_second).enumerate() {
        let mut integers = [sum; 4];
        for (m, integers) in integers.iter_mut().enumerate() {
            *integers = to_nearest(lanes, &p[4 * i + m], scales[4 * i + m], per_unit);
            sum = lanes.add_i(sum, *integers);
        }
        lanes.store_split(integers, [first, second]);
    }
    for (t, (first, second)) in (4 * n_fours..).zip(first.iter_mut().zip(second)) {
        let integers = to_nearest(lanes, &p[t], scales[t], per_unit);
        sum = lanes.add_i(sum, integers);
        [*first, *second] = lanes.split(integers);
    }
    sum
}

/// Returns p · scale in units, rounded to nearest.
#[inline(always)]
fn to_nearest<L: Lanes>(lanes: L, p: &[f32; 16], scale: L::Floats, per_unit: f32) -> L::Ints {
    lanes.round(lanes.mul(lanes.mul(lanes.load(p), scale), lanes.splat(per_unit)))
}

#[cfg(test)]
mod tests {
    use kvant_codec::{DType, TILE};

    use super::*;
    use crate::simd::isa::Isa;
    use crate::simd::vec16::run_on;

    /// Products of weights in two parts with a code of 1: the weights.
    struct Joined<'a>([&'a Bytes; 2]);

    impl Op for Joined<'_> {
        type Output = Vec<i32>;

        const MULTIPLIES_BYTES: bool = true;

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Vec<i32> {
            let [first, second] = self.0;
            let weight = |token: usize| {
                let code = lanes.splat_i(1 << (8 * (token % 4)));
                let sums = [
                    lanes.dot_part::<0>(lanes.splat_i(0), code, first.0[token / 4]),
                    lanes.dot_part::<1>(lanes.splat_i(0), code, second.0[token / 4]),
                ];
                lanes.sum_i(joined(lanes, sums)) / TILE as i32
            };
            (0..BLOCK).map(weight).collect()
        }
    }

    /// Returns the weights of one query as integers, for values of this type with scales of 1, and
    /// their unit.
    fn rounded(isa: Isa, dtype: DType, p: &Scores) -> Option<(Vec<i32>, f32)> {
        struct Planes(CodeMeaning);
        impl Op for Planes {
            type Output = (usize, i32);

            const MULTIPLIES_BYTES: bool = true;

            fn run<L: Lanes>(self, _: L) -> (usize, i32) {
                (weight_planes::<L>(self.0.loss), weight_offset::<L>())
            }
        }
        let meaning = CodeMeaning::of(dtype).unwrap();
        let (planes, below) = run_on(isa, Planes(meaning))?;
        let scales: Vec<u8> = [0, 0x3c].repeat(16);
        let (mut rows, mut starts, mut factors) = (vec![Bytes([[0; 4]; 32]); planes], [0], [0.0]);
        let (p, scales, rows_of) = (std::slice::from_ref(p), &scales, &mut rows);
        let (tiles, tile, stride, rescale_new) = (BLOCK_TILES, 0, 0, &[1.0]);
        let (starts, factors) = (&mut starts, &mut factors);
        let round = RoundWeights {
            p,
            scales,
            stride,
            tiles,
            tile,
            meaning,
            rescale_new,
            rows: rows_of,
            starts,
            factors,
        };
        run_on(isa, round)?;
        let integers = match &rows[..] {
            [row] => row.0.as_flattened().iter().map(|&byte| i32::from(byte) + below).collect(),
            [first, second] => run_on(isa, Joined([first, second]))?,
            _ => unreachable!(),
        };
        assert_eq!(starts[0], -meaning.bias * integers.iter().sum::<i32>());
        Some((integers, factors[0] / meaning.step))
    }

    #[test]
    fn rounding_keeps_zeros_and_the_mass_of_small_weights() {
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
                // Thresholds are spread evenly, in all tiles but one too: as many are exceeded as
                // there are units of mass.
                assert!((got - want).abs() <= 2.0 / 127.0, "{isa:?} {dtype} {small}: {got} {want}");
            }
        }
    }
}
