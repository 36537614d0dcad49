//! [`Lanes`] on two 256-bit registers.
//!
//! Sets differ in their byte products. AVX2 has `vpmaddubsw`, which adds two products of an
//! unsigned and a signed byte in 16 bits and saturates: 255 · 64 · 2 = 32,640 stays below 32,767,
//! so signed bytes are limited to ±64. Widening the sums takes a second multiplication; two of 16
//! bits do as well, and so integers of two bytes are multiplied whole. AVX-VNNI has `vpdpbusd`,
//! which adds four products in 32 bits.

use std::arch::x86_64::*;

use kvant_codec::finite::F16_MAX;

use super::{Lanes, Op, PairTable, Shared};
use crate::simd::look_up;
use crate::simd::tokens::{Avx2, AvxVnni};
use crate::simd::tokens::{avx_vnni, avx2};

/// Wraps an intrinsic: the token proves its instructions.
macro_rules! intrinsic {
    ($($body:tt)*) => {
        // SAFETY: tokens that are `Ymm` exist only on a CPU with AVX2, FMA and F16C; memory is read
        // and written through array references of the full width, without any need for alignment.
        unsafe { $($body)* }
    };
}

/// Applies the same operation to both halves.
macro_rules! halves {
    (|$($x:ident),+| $body:expr) => {
        intrinsic!([
            { let ($($x,)+) = ($($x[0],)+); $body },
            { let ($($x,)+) = ($($x[1],)+); $body },
        ])
    };
}

/// A token that proves at least AVX2, FMA and F16C, and the byte products of its set.
pub(crate) trait Ymm: Copy + Send + Sync {
    /// [`Lanes::MAX_BYTE`]
    const BYTE: i32;
    /// [`Lanes::MAX_SPLIT`]
    const SPLIT: i32;
    /// [`Lanes::PARTS_SHARE_SUMS`]
    const PARTS_SHARE_SUMS: bool = false;

    /// [`Lanes::run`]
    fn run_op<O: Op>(self, op: O) -> O::Output;
    /// Adds to each lane the products of its four codes with its four signed bytes.
    fn dot_half(self, sum: __m256i, codes: __m256i, bytes: __m256i) -> __m256i;
    /// [`Lanes::dot_part`]
    fn dot_half_part<const PART: usize>(self, sum: __m256i, codes: __m256i, part: __m256i) -> __m256i;
    /// [`Lanes::split`]
    fn split_halves(self, a: [__m256i; 2]) -> [[[i8; 4]; 4]; 2];
    /// [`Lanes::join`]
    fn join_halves(self, first: __m256i, second: __m256i) -> __m256i;
}

avx2! {
    fn run_shared<O: Op>(lanes: Shared<Avx2>, op: O) -> O::Output {
        op.run(lanes)
    }

    fn run_avx2<O: Op>(lanes: Avx2, op: O) -> O::Output {
        op.run(lanes)
    }
}

impl Ymm for Shared<Avx2> {
    // No byte at all, so that an op that uses it without `MULTIPLIES_BYTES` fails its tests on
    // every set.
    const BYTE: i32 = 0;
    const SPLIT: i32 = 0;

    #[inline(always)]
    fn run_op<O: Op>(self, op: O) -> O::Output {
        intrinsic!(run_shared(self, op))
    }

    #[inline(always)]
    fn dot_half(self, _: __m256i, _: __m256i, _: __m256i) -> __m256i {
        unreachable!("an op that declares no MULTIPLIES_BYTES")
    }

    #[inline(always)]
    fn dot_half_part<const PART: usize>(self, _: __m256i, _: __m256i, _: __m256i) -> __m256i {
        unreachable!("an op that declares no MULTIPLIES_BYTES")
    }

    #[inline(always)]
    fn split_halves(self, _: [__m256i; 2]) -> [[[i8; 4]; 4]; 2] {
        unreachable!("an op that declares no MULTIPLIES_BYTES")
    }

    #[inline(always)]
    fn join_halves(self, _: __m256i, _: __m256i) -> __m256i {
        unreachable!("an op that declares no MULTIPLIES_BYTES")
    }
}

impl Ymm for Avx2 {
    const BYTE: i32 = 64;
    const SPLIT: i32 = i16::MAX as i32;
    const PARTS_SHARE_SUMS: bool = true;

    #[inline(always)]
    fn run_op<O: Op>(self, op: O) -> O::Output {
        if O::MULTIPLIES_BYTES { intrinsic!(run_avx2(self, op)) } else { Shared(self).run_op(op) }
    }

    #[inline(always)]
    fn dot_half(self, sum: __m256i, codes: __m256i, bytes: __m256i) -> __m256i {
        intrinsic!({
            let pairs = _mm256_maddubs_epi16(codes, bytes);
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }

    /// Products of 16 bits: those of bytes would need twice as many multiplications. A part has
    /// every other code of a group of four.
    #[inline(always)]
    fn dot_half_part<const PART: usize>(self, sum: __m256i, codes: __m256i, part: __m256i) -> __m256i {
        intrinsic!({
            let codes = match PART {
                0 => _mm256_and_si256(codes, _mm256_set1_epi16(0xff)),
                _ => _mm256_srli_epi16::<8>(codes),
            };
            _mm256_add_epi32(sum, _mm256_madd_epi16(codes, part))
        })
    }

    #[inline(always)]
    fn split_halves(self, a: [__m256i; 2]) -> [[[i8; 4]; 4]; 2] {
        intrinsic!({
            // Integers 0 to 3 and 8 to 11, then 4 to 7 and 12 to 15.
            let packed = _mm256_packs_epi32(a[0], a[1]);
            let by_part = _mm256_broadcastsi128_si256(_mm_setr_epi8(
                0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
            ));
            let parts = _mm256_shuffle_epi8(packed, by_part);
            std::mem::transmute(_mm256_permutevar8x32_epi32(parts, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)))
        })
    }

    #[inline(always)]
    fn join_halves(self, first: __m256i, second: __m256i) -> __m256i {
        intrinsic!(_mm256_add_epi32(first, second))
    }
}

avx_vnni! {
    fn run_avx_vnni<O: Op>(lanes: AvxVnni, op: O) -> O::Output {
        op.run(lanes)
    }
}

impl Ymm for AvxVnni {
    const BYTE: i32 = 127;
    const SPLIT: i32 = 127 * 256 + 127;

    #[inline(always)]
    fn run_op<O: Op>(self, op: O) -> O::Output {
        if !O::MULTIPLIES_BYTES {
            return Shared(Avx2::from(self)).run_op(op);
        }
        // SAFETY: this token proves AVX-VNNI beside the rest.
        unsafe { run_avx_vnni(self, op) }
    }

    #[inline(always)]
    fn dot_half(self, sum: __m256i, codes: __m256i, bytes: __m256i) -> __m256i {
        // SAFETY: this token proves AVX-VNNI.
        unsafe { _mm256_dpbusd_avx_epi32(sum, codes, bytes) }
    }

    #[inline(always)]
    fn dot_half_part<const PART: usize>(self, sum: __m256i, codes: __m256i, part: __m256i) -> __m256i {
        self.dot_half(sum, codes, part)
    }

    #[inline(always)]
    fn split_halves(self, a: [__m256i; 2]) -> [[[i8; 4]; 4]; 2] {
        // The remainder of an integer after rounding to the high byte is a signed byte.
        let high = halves!(|a| _mm256_srai_epi32::<8>(_mm256_add_epi32(a, _mm256_set1_epi32(128))));
        [self.low_bytes(high), self.low_bytes(a)]
    }

    #[inline(always)]
    fn join_halves(self, high: __m256i, low: __m256i) -> __m256i {
        intrinsic!(_mm256_add_epi32(_mm256_slli_epi32::<8>(high), low))
    }
}

/// 64 codes of 3 bits: their plane of low bits, twice, and a mask of those whose third bit is set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parted3 {
    low: __m256i,
    is_high: [__m256i; 2],
}

/// Returns bit j as all bits of byte j.
#[inline(always)]
fn are_set(bits: &[u8; 8]) -> [__m256i; 2] {
    let bits = [[bits[0], bits[1], bits[2], bits[3]], [bits[4], bits[5], bits[6], bits[7]]];
    halves!(|bits| {
        let all = _mm256_set1_epi32(i32::from_le_bytes(bits));
        // Byte j of a half holds its bits 8·(j / 8) ..; bit j mod 8 of those is tested.
        let near = _mm256_shuffle_epi8(
            all,
            _mm256_set_epi64x(0x0303_0303_0303_0303, 0x0202_0202_0202_0202, 0x0101_0101_0101_0101, 0),
        );
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        _mm256_cmpeq_epi8(_mm256_and_si256(near, bit), bit)
    })
}

impl<Y: Ymm> Lanes for Y {
    type Ints = [__m256i; 2];
    type Floats = [__m256; 2];
    type Codes2 = __m256i;
    type Codes3 = Parted3;

    const WIDE: usize = 1;
    const MAX_BYTE: i32 = Y::BYTE;
    const MAX_SPLIT: i32 = Y::SPLIT;
    const PARTS_SHARE_SUMS: bool = Y::PARTS_SHARE_SUMS;

    #[inline(always)]
    fn run<O: Op>(self, op: O) -> O::Output {
        self.run_op(op)
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> [__m256i; 2] {
        intrinsic!([_mm256_set1_epi32(x); 2])
    }

    #[inline(always)]
    fn add_i(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        halves!(|a, b| _mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn min_i(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        halves!(|a, b| _mm256_min_epi32(a, b))
    }

    #[inline(always)]
    fn and_i(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        halves!(|a, b| _mm256_and_si256(a, b))
    }

    #[inline(always)]
    fn or_i(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        halves!(|a, b| _mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn shift_left(self, a: [__m256i; 2], by: [__m256i; 2]) -> [__m256i; 2] {
        halves!(|a, by| _mm256_sllv_epi32(a, by))
    }

    #[inline(always)]
    fn shift_right(self, a: [__m256i; 2], by: [__m256i; 2]) -> [__m256i; 2] {
        halves!(|a, by| _mm256_srlv_epi32(a, by))
    }

    #[inline(always)]
    fn dot_pairs(self, sum: [__m256i; 2], a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        halves!(|sum, a, b| _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)))
    }

    #[inline(always)]
    fn sum_i(self, a: [__m256i; 2]) -> i32 {
        intrinsic!({
            let eight = _mm256_add_epi32(a[0], a[1]);
            let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
        })
    }

    #[inline(always)]
    fn low_bytes(self, a: [__m256i; 2]) -> [[i8; 4]; 4] {
        intrinsic!({
            let pick = _mm256_set1_epi32(0x0c08_0400);
            let zero_rest = _mm256_set_epi32(-1, -1, -1, 0, -1, -1, -1, 0);
            let pick = _mm256_or_si256(pick, zero_rest);
            let (a, b) = (_mm256_shuffle_epi8(a[0], pick), _mm256_shuffle_epi8(a[1], pick));
            std::mem::transmute([
                _mm_cvtsi128_si32(_mm256_castsi256_si128(a)),
                _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(a)),
                _mm_cvtsi128_si32(_mm256_castsi256_si128(b)),
                _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(b)),
            ])
        })
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        intrinsic!([_mm256_set1_ps(x); 2])
    }

    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> [__m256; 2] {
        intrinsic!([_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))])
    }

    #[inline(always)]
    fn store(self, a: [__m256; 2], x: &mut [f32; 16]) {
        intrinsic!({
            _mm256_storeu_ps(x.as_mut_ptr(), a[0]);
            _mm256_storeu_ps(x.as_mut_ptr().add(8), a[1]);
        })
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(|a, b| _mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(|a, b| _mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(|a, b| _mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(|a, b| _mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        halves!(|a, b, c| _mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn abs(self, a: [__m256; 2]) -> [__m256; 2] {
        halves!(|a| _mm256_andnot_ps(_mm256_set1_ps(-0.0), a))
    }

    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(|a, b| _mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn above_floor(self, x: [__m256; 2]) -> [__m256; 2] {
        halves!(|x| _mm256_sub_ps(x, _mm256_floor_ps(x)))
    }

    #[inline(always)]
    fn times_two_to_floor(self, a: [__m256; 2], x: [__m256; 2]) -> [__m256; 2] {
        halves!(|a, x| {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(x)), _mm256_set1_epi32(127));
            let product = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)));
            _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(-126.0)), product)
        })
    }

    #[inline(always)]
    fn swap<const BY: usize>(self, a: [__m256; 2]) -> [__m256; 2] {
        match BY {
            1 => halves!(|a| _mm256_permute_ps::<0b10_11_00_01>(a)),
            2 => halves!(|a| _mm256_permute_ps::<0b01_00_11_10>(a)),
            4 => halves!(|a| _mm256_permute2f128_ps::<1>(a, a)),
            8 => [a[1], a[0]],
            _ => unreachable!("lanes {BY} apart"),
        }
    }

    #[inline(always)]
    fn largest(self, a: [__m256; 2]) -> f32 {
        intrinsic!({
            let eight = _mm256_max_ps(a[0], a[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn sum(self, a: [__m256; 2]) -> f32 {
        intrinsic!({
            let eight = _mm256_add_ps(a[0], a[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn round(self, a: [__m256; 2]) -> [__m256i; 2] {
        halves!(|a| _mm256_cvtps_epi32(a))
    }

    #[inline(always)]
    fn to_floats(self, a: [__m256i; 2]) -> [__m256; 2] {
        halves!(|a| _mm256_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> [__m256; 2] {
        let (x, _) = x.as_chunks::<16>();
        halves!(|x| _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> [__m256; 2] {
        let (x, _) = x.as_chunks::<16>();
        halves!(|x| {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    fn load_f32(self, x: &[u8; 64]) -> [__m256; 2] {
        intrinsic!([_mm256_loadu_ps(x.as_ptr().cast()), _mm256_loadu_ps(x.as_ptr().add(32).cast())])
    }

    #[inline(always)]
    fn to_f16(self, a: [__m256; 2]) -> [[u8; 2]; 16] {
        let halves = halves!(|a| {
            let (max, min) = (_mm256_set1_ps(F16_MAX), _mm256_set1_ps(-F16_MAX));
            let a = _mm256_max_ps(_mm256_min_ps(a, max), min);
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)
        });
        intrinsic!(std::mem::transmute(halves))
    }

    #[inline(always)]
    fn dot(self, sum: [__m256i; 2], codes: [__m256i; 2], bytes: [i8; 4]) -> [__m256i; 2] {
        let bytes = intrinsic!(_mm256_set1_epi32(bytemuck::cast(bytes)));
        [self.dot_half(sum[0], codes[0], bytes), self.dot_half(sum[1], codes[1], bytes)]
    }

    #[inline(always)]
    fn codes_8(self, x: &[u8; 64]) -> [__m256i; 2] {
        intrinsic!([_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(32).cast())])
    }

    #[inline(always)]
    fn codes_4(self, x: &[u8; 32]) -> [__m256i; 2] {
        intrinsic!({
            let (both, nibble) = (_mm256_loadu_si256(x.as_ptr().cast()), _mm256_set1_epi8(15));
            [_mm256_and_si256(both, nibble), _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble)]
        })
    }

    #[inline(always)]
    fn codes_2(self, x: &[u8; 16]) -> [__m256i; 2] {
        intrinsic!({
            let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(x.as_ptr().cast()));
            let spread = _mm256_srlv_epi64(twice, _mm256_set_epi64x(2, 2, 0, 0));
            let two = _mm256_set1_epi8(3);
            [_mm256_and_si256(spread, two), _mm256_and_si256(_mm256_srli_epi16::<4>(spread), two)]
        })
    }

    #[inline(always)]
    fn look_up_3(self, low: &[u8; 16], high: &[u8; 8], table: &[u8; 16]) -> [__m256i; 2] {
        self.look_up(self.codes_3(low, high), table)
    }

    #[inline(always)]
    fn codes_3(self, low: &[u8; 16], high: &[u8; 8]) -> [__m256i; 2] {
        let (low, is_set) = (self.codes_2(low), are_set(high));
        halves!(|low, is_set| _mm256_or_si256(low, _mm256_and_si256(is_set, _mm256_set1_epi8(4))))
    }

    #[inline(always)]
    fn look_up(self, codes: [__m256i; 2], table: &[u8; 16]) -> [__m256i; 2] {
        intrinsic!({
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, codes[0]), _mm256_shuffle_epi8(table, codes[1])]
        })
    }

    #[inline(always)]
    fn look_up_floats(self, at: [__m256i; 2], table: &[f32; 16]) -> [__m256; 2] {
        let [low, high] = self.load(table);
        halves!(|at| {
            let [low, high] = [_mm256_permutevar8x32_ps(low, at), _mm256_permutevar8x32_ps(high, at)];
            // Bit 3 of the index becomes the sign that chooses.
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(at)))
        })
    }

    #[inline(always)]
    fn look_up_64(self, codes: [__m256i; 2], table: &[u8; 64]) -> [__m256i; 2] {
        halves!(|codes| look_up::in_ymm(table, codes))
    }

    #[inline(always)]
    fn load_2(self, low: &[u8; 16]) -> __m256i {
        intrinsic!(_mm256_broadcastsi128_si256(_mm_loadu_si128(low.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_3<const ABOVE: bool>(self, low: &[u8; 16], high: &[u8; 8]) -> Parted3 {
        Parted3 { low: self.load_2(low), is_high: are_set(high) }
    }

    #[inline(always)]
    fn look_up_triples(self, [a, b, c]: [__m256i; 3], table: &[u8; 64]) -> [__m256i; 2] {
        let codes = intrinsic!(look_up::nibbles_in_ymm(a, b));
        // The bits of `c` as the highest of their bytes.
        let odd_by = intrinsic!([_mm256_set_epi64x(5, 5, 7, 7), _mm256_set_epi64x(1, 1, 3, 3)]);
        let high_by = intrinsic!([_mm256_set_epi64x(4, 4, 6, 6), _mm256_set_epi64x(0, 0, 2, 2)]);
        halves!(|codes, odd_by, high_by| {
            let (odd, high) = (_mm256_sllv_epi64(c, odd_by), _mm256_sllv_epi64(c, high_by));
            look_up::quarters_in_ymm(table, codes, odd, high)
        })
    }

    #[inline(always)]
    fn look_up_pairs(self, below: Parted3, above: Parted3, table: &PairTable) -> [__m256i; 2] {
        let codes = intrinsic!(look_up::nibbles_in_ymm(below.low, above.low));
        let (odd, high) = (below.is_high, above.is_high);
        halves!(|codes, odd, high| look_up::quarters_in_ymm(&table.by_plane, codes, odd, high))
    }

    #[inline(always)]
    fn transpose(self, [a, b, c, d]: [[__m256i; 2]; 4]) -> [[__m256i; 2]; 4] {
        // Exchanges 4x4 squares, and transposes each.
        intrinsic!({
            let square = _mm256_broadcastsi128_si256(_mm_setr_epi8(
                0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
            ));
            let [a0, a1] = [_mm256_shuffle_epi8(a[0], square), _mm256_shuffle_epi8(a[1], square)];
            let [b0, b1] = [_mm256_shuffle_epi8(b[0], square), _mm256_shuffle_epi8(b[1], square)];
            let [c0, c1] = [_mm256_shuffle_epi8(c[0], square), _mm256_shuffle_epi8(c[1], square)];
            let [d0, d1] = [_mm256_shuffle_epi8(d[0], square), _mm256_shuffle_epi8(d[1], square)];
            [
                [_mm256_permute2x128_si256::<0x20>(a0, b0), _mm256_permute2x128_si256::<0x20>(c0, d0)],
                [_mm256_permute2x128_si256::<0x31>(a0, b0), _mm256_permute2x128_si256::<0x31>(c0, d0)],
                [_mm256_permute2x128_si256::<0x20>(a1, b1), _mm256_permute2x128_si256::<0x20>(c1, d1)],
                [_mm256_permute2x128_si256::<0x31>(a1, b1), _mm256_permute2x128_si256::<0x31>(c1, d1)],
            ]
        })
    }

    #[inline(always)]
    fn store_codes(self, codes: [__m256i; 2], x: &mut [u8; 64]) {
        intrinsic!({
            _mm256_storeu_si256(x.as_mut_ptr().cast(), codes[0]);
            _mm256_storeu_si256(x.as_mut_ptr().add(32).cast(), codes[1]);
        })
    }

    #[inline(always)]
    fn dot_part<const PART: usize>(
        self,
        sum: [__m256i; 2],
        codes: [__m256i; 2],
        part: [i8; 4],
    ) -> [__m256i; 2] {
        let part = intrinsic!(_mm256_set1_epi32(bytemuck::cast(part)));
        [
            self.dot_half_part::<PART>(sum[0], codes[0], part),
            self.dot_half_part::<PART>(sum[1], codes[1], part),
        ]
    }

    #[inline(always)]
    fn split(self, a: [__m256i; 2]) -> [[[i8; 4]; 4]; 2] {
        self.split_halves(a)
    }

    #[inline(always)]
    fn join(self, first: [__m256i; 2], second: [__m256i; 2]) -> [__m256i; 2] {
        [self.join_halves(first[0], second[0]), self.join_halves(first[1], second[1])]
    }
}
