//! Encodes a whole tile: finds the codes of 16 rows by comparisons, then packs them into planes
//! group by group.
//!
//! Every value gets the code that the codec gives it: scales come from the same sums in f64 (in
//! another order, which rounding to f16 hides except for one in many millions), codes from the same
//! f32 comparisons.

use half::f16;
use kvant_codec::block32::Q8_0_MAX_SCALE;
use kvant_codec::finite::{F16_MAX, clamp, to_f16};
use kvant_codec::tile::{GROUP, SCALE_BYTES, Side, TILE, high_planes};
use kvant_codec::{Codebook, DType, Trellis, step};

use super::trellis::encode;
use crate::simd::vec16::{Lanes, Op};

/// Maximum dims of a slice: the widest block of the rotation.
pub(super) const SLICE: usize = 128;

/// A slice of the rows of a tile, with zeros in slots that are not written.
pub(super) type Rows = [[f32; SLICE]; TILE];

/// Encodes up to 128 dims of all 16 slots of a tile.
pub(super) struct Encode<'a> {
    pub(super) dtype: DType,
    pub(super) side: Side,
    pub(super) rows: &'a Rows,
    /// Number of dims: one block of a rotated type, or several blocks of 32.
    pub(super) dims: usize,
    /// Whole blocks.
    pub(super) out: &'a mut [u8],
}

impl Op for Encode<'_> {
    type Output = ();

    const LOOKS_UP_64: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.dtype {
            DType::Turbo2 => self.turbo::<L, Turbo2>(lanes),
            DType::Turbo3 => self.turbo::<L, Turbo3>(lanes),
            DType::Turbo4 => self.turbo::<L, Turbo4>(lanes),
            DType::Turbo2T => self.turbo::<L, Turbo2T>(lanes),
            DType::Turbo3T => self.turbo::<L, Turbo3T>(lanes),
            DType::Q8_0 => self.blocks::<L, Q8_0, 32>(lanes),
            DType::Q4_0 => self.blocks::<L, Q4_0, 32>(lanes),
            dtype => unreachable!("{dtype} is not coded"),
        }
    }
}

/// A coded format, in blocks of `N` dims.
trait CodedFormat<const N: usize> {
    /// Finds the codes of a block of all rows, and returns their scales.
    fn code<L: Lanes>(lanes: L, rows: [&[f32; N]; TILE], codes: &mut [[u8; N]; TILE]) -> [f16; TILE];

    /// Packs the codes of group `g` into the planes of the block.
    fn pack(codes: &[u8; GROUP], g: usize, planes: &mut [u8]);
}

/// Implements [`Format`] from a function that encodes a row and one that packs a group, for one
/// block size or for any.
macro_rules! format {
    ($name:ident, $([$n:ident])? $($m:literal)?, $code:expr, $pack:path) => {
        struct $name;

        impl$(<const $n: usize>)? CodedFormat<{$($n)? $($m)?}> for $name {
            #[inline(always)]
            fn code<L: Lanes>(
                _: L,
                rows: [&[f32; {$($n)? $($m)?}]; TILE],
                codes: &mut [[u8; {$($n)? $($m)?}]; TILE],
            ) -> [f16; TILE] {
                let mut scales = [f16::ZERO; TILE];
                for t in 0..TILE {
                    scales[t] = $code(rows[t], &mut codes[t]);
                }
                scales
            }

            #[inline(always)]
            fn pack(codes: &[u8; GROUP], g: usize, planes: &mut [u8]) {
                $pack(codes, g, planes);
            }
        }
    };
}

format!(Turbo2, [N], |x, codes| turbo::<N>(&Codebook::GAUSS2, x, codes), plane_2);
format!(Turbo3, [N], |x, codes| turbo::<N>(&Codebook::GAUSS3, x, codes), planes_3);
format!(Turbo4, [N], |x, codes| turbo::<N>(&Codebook::GAUSS4, x, codes), plane_4);
format!(Q8_0, 32, q8_0, plane_8);
format!(Q4_0, 32, q4_0, plane_4);

/// Implements [`Format`] for a trellis-coded type.
macro_rules! with_memory {
    ($name:ident, $trellis:expr, $bits:literal, $states:literal, $pack:path) => {
        struct $name;

        impl<const N: usize> CodedFormat<N> for $name {
            #[inline(always)]
            fn code<L: Lanes>(lanes: L, rows: [&[f32; N]; TILE], codes: &mut [[u8; N]; TILE]) -> [f16; TILE] {
                let mut norms = [0.0; TILE];
                let values: [[f32; N]; TILE] = std::array::from_fn(|t| {
                    let UnitVariance { norm, values } = unit(rows[t]);
                    norms[t] = norm;
                    values
                });
                let coded_norms = encode::<L, $bits, $states, N>(lanes, &$trellis, &values, codes);
                std::array::from_fn(|t| to_f16((norms[t] / coded_norms[t]) as f32))
            }

            #[inline(always)]
            fn pack(codes: &[u8; GROUP], g: usize, planes: &mut [u8]) {
                $pack(codes, g, planes);
            }
        }
    };
}

with_memory!(Turbo2T, Trellis::TURBO2T, 2, 16, plane_2);
with_memory!(Turbo3T, Trellis::TURBO3T, 3, 8, planes_3);

impl Encode<'_> {
    #[inline(always)]
    fn turbo<L: Lanes, F: CodedFormat<128> + CodedFormat<64> + CodedFormat<32>>(self, lanes: L) {
        match self.dims {
            128 => self.blocks::<L, F, 128>(lanes),
            64 => self.blocks::<L, F, 64>(lanes),
            32 => self.blocks::<L, F, 32>(lanes),
            dims => unreachable!("a slice of {dims} dims"),
        }
    }

    #[inline(always)]
    fn blocks<L: Lanes, F: CodedFormat<N>, const N: usize>(self, lanes: L) {
        let mut codes = [[0; N]; TILE];
        let block_bytes = self.out.len() / (self.dims / N);
        for (b, block) in self.out.chunks_exact_mut(block_bytes).enumerate() {
            let (scales, planes) = block.split_at_mut(SCALE_BYTES);
            let rows = std::array::from_fn(|t| &self.rows[t].as_chunks().0[b]);
            let found = F::code(lanes, rows, &mut codes).map(f16::to_le_bytes);
            scales.copy_from_slice(found.as_flattened());
            for g in 0..N / 4 {
                F::pack(&group(self.side, &codes, g), g, planes);
            }
        }
    }
}

/// Returns the codes of group `g`, in the order of `kvant_codec::tile`.
#[inline(always)]
fn group<const N: usize>(side: Side, codes: &[[u8; N]; TILE], g: usize) -> [u8; GROUP] {
    let mut out = [0; GROUP];
    match side {
        Side::K => {
            for (out, codes) in out.as_chunks_mut::<4>().0.iter_mut().zip(codes) {
                *out = codes.as_chunks().0[g];
            }
        }
        Side::V => {
            let tokens: [&[u8; 16]; 4] =
                std::array::from_fn(|i| &codes[4 * (g % 4) + i].as_chunks().0[g / 4]);
            for (d, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *out = [tokens[0][d], tokens[1][d], tokens[2][d], tokens[3][d]];
            }
        }
    }
    out
}

#[inline(always)]
fn plane_8(codes: &[u8; GROUP], g: usize, planes: &mut [u8]) {
    planes.as_chunks_mut().0[g] = *codes;
}

#[inline(always)]
fn plane_4(codes: &[u8; GROUP], g: usize, planes: &mut [u8]) {
    let plane: &mut [u8; 32] = &mut planes.as_chunks_mut().0[g];
    for (j, byte) in plane.iter_mut().enumerate() {
        *byte = codes[j] | codes[32 + j] << 4;
    }
}

#[inline(always)]
fn plane_2(codes: &[u8; GROUP], g: usize, planes: &mut [u8]) {
    let plane: &mut [u8; 16] = &mut planes.as_chunks_mut().0[g];
    for (j, byte) in plane.iter_mut().enumerate() {
        *byte = codes[j] | codes[16 + j] << 2 | codes[32 + j] << 4 | codes[48 + j] << 6;
    }
}

#[inline(always)]
fn planes_3(codes: &[u8; GROUP], g: usize, planes: &mut [u8]) {
    // The low planes of all groups come first.
    let (low, high) = planes.split_at_mut(high_planes(planes.len()));
    plane_2(&codes.map(|code| code & 3), g, low);
    let high: &mut [u8; 8] = &mut high.as_chunks_mut().0[g];
    for (byte, codes) in high.iter_mut().zip(codes.as_chunks().0) {
        // Moves bit 2 of byte i of the word to bit i of its highest byte.
        let third = u64::from_le_bytes(*codes) >> 2 & 0x0101_0101_0101_0101;
        *byte = (third.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
    }
}

/// A slice normalized to unit variance.
struct UnitVariance<const N: usize> {
    /// Its norm; 0 for a vanishing slice, whose values are 0.
    norm: f64,
    values: [f32; N],
}

/// See `kvant_codec::turbo::encode_rotated`.
#[inline(always)]
fn unit<const N: usize>(y: &[f32; N]) -> UnitVariance<N> {
    let y = y.map(|v| clamp(v, F16_MAX));
    let norm = sum(y.map(|v| f64::from(v) * f64::from(v))).sqrt();
    if norm < 1e-10 {
        return UnitVariance { norm: 0.0, values: [0.0; N] };
    }
    let to_unit_variance = ((N as f64).sqrt() / norm) as f32;
    UnitVariance { norm, values: y.map(|v| v * to_unit_variance) }
}

/// As above.
#[inline(always)]
fn turbo<const N: usize>(book: &Codebook, y: &[f32; N], codes: &mut [u8; N]) -> f16 {
    let UnitVariance { norm, values } = unit(y);
    let factor = step::factor(step::best(book, &values));
    let values = values.map(|z| z * factor);
    for (codes, z) in codes.as_chunks_mut::<16>().0.iter_mut().zip(values.as_chunks::<16>().0) {
        let mut counts = [0i32; 16];
        for &mid in book.mids() {
            for (count, &z) in counts.iter_mut().zip(z) {
                *count += i32::from(z >= mid);
            }
        }
        *codes = counts.map(|count| count as u8);
    }
    let coded_norm = sum(codes.map(|code| f64::from(book.centroids()[usize::from(code)]).powi(2))).sqrt();
    to_f16((norm / coded_norm) as f32)
}

/// Returns the sum, accumulated in eight interleaved partial sums.
#[inline(always)]
fn sum<const N: usize>(x: [f64; N]) -> f64 {
    let mut parts = [0.0; 8];
    for x in x.as_chunks::<8>().0 {
        parts.iter_mut().zip(x).for_each(|(part, x)| *part += x);
    }
    parts.iter().sum()
}

/// See `kvant_codec::block32::encode_q8_0`.
#[inline(always)]
fn q8_0(x: &[f32; 32], codes: &mut [u8; 32]) -> f16 {
    let x = x.map(|v| clamp(v, F16_MAX));
    let d = x.iter().fold(0.0f32, |max, v| max.max(v.abs())) / 127.0;
    let per_unit = inverse(d);
    *codes = x.map(|v| ((v * per_unit).round() as i32 + 128) as u8);
    to_f16(d.min(Q8_0_MAX_SCALE))
}

/// See `kvant_codec::block32::encode_centred`, for q4_0.
#[inline(always)]
fn q4_0(x: &[f32; 32], codes: &mut [u8; 32]) -> f16 {
    let x = x.map(|v| clamp(v, F16_MAX));
    let d = x.iter().fold(0.0f32, |best, &v| if v.abs() > best.abs() { v } else { best }) / -8.0;
    let per_unit = inverse(d);
    *codes = x.map(|v| ((v * per_unit + 8.0 + 0.5) as u8).min(15));
    to_f16(d)
}

#[inline(always)]
fn inverse(d: f32) -> f32 {
    if to_f16(d) == f16::ZERO { 0.0 } else { 1.0 / d }
}
