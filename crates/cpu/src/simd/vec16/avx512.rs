//! [`Lanes`] on one 512-bit register.
//!
//! Sets differ in lookups among 64 bytes: VBMI has `vpermb`, others select among four lookups in 16
//! bytes.

use std::arch::x86_64::*;

use kvant_codec::finite::F16_MAX;

use super::{Lanes, Op, PairTable, Shared};
use crate::simd::look_up;
use crate::simd::tokens::{Avx512, Avx512Vbmi};
use crate::simd::tokens::{avx512, avx512vbmi};

/// Wraps an intrinsic: the token proves its instructions.
macro_rules! intrinsic {
    ($($body:tt)*) => {
        // SAFETY: tokens that are `Wide` exist only on a CPU with AVX-512 F, BW, DQ, VL and VNNI;
        // memory is read and written through array references of the full width, without any need
        // for alignment.
        unsafe { $($body)* }
    };
}

/// Reduces the lanes of each of sixteen registers: halves of lanes first, as the reductions of one
/// register do, but of two registers per instruction.
macro_rules! folded {
    ($a:expr, $put:expr) => {{
        // Folding leaves them in this order.
        const ORDER: [usize; 16] = [0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15];
        let mut a = $a;
        for (i, place) in ORDER.into_iter().enumerate() {
            a[place] = $a[i];
        }
        intrinsic!({
            for i in 0..8 {
                let (x, y) = (a[i], a[i + 8]);
                a[i] = $put(_mm512_shuffle_f32x4::<0x44>(x, y), _mm512_shuffle_f32x4::<0xee>(x, y));
            }
            for i in 0..4 {
                let (x, y) = (a[i], a[i + 4]);
                a[i] = $put(_mm512_shuffle_f32x4::<0x88>(x, y), _mm512_shuffle_f32x4::<0xdd>(x, y));
            }
            for i in 0..2 {
                let (x, y) = (a[i], a[i + 2]);
                a[i] = $put(_mm512_shuffle_ps::<0x44>(x, y), _mm512_shuffle_ps::<0xee>(x, y));
            }
            $put(_mm512_shuffle_ps::<0x88>(a[0], a[1]), _mm512_shuffle_ps::<0xdd>(a[0], a[1]))
        })
    }};
}

/// Adds registers lane by lane, as integers.
#[inline(always)]
unsafe fn add_as_integers(a: __m512, b: __m512) -> __m512 {
    // SAFETY: as of `intrinsic`.
    unsafe { _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b))) }
}

/// A token that proves at least AVX-512 F, BW, DQ, VL and VNNI, and the lookups of its set.
pub(crate) trait Wide: Copy + Send + Sync {
    /// [`Lanes::Codes3`]
    type Codes3: Copy;

    /// [`Lanes::run`]
    fn run_op<O: Op>(self, op: O) -> O::Output;
    /// [`Lanes::look_up_64`]
    fn look_up(self, codes: __m512i, table: &[u8; 64]) -> __m512i;
    /// [`Lanes::load_3`]
    fn load_3<const ABOVE: bool>(self, low: &[u8; 16], high: &[u8; 8]) -> Self::Codes3;
    /// [`Lanes::look_up_triples`]
    fn look_up_triples(self, codes: [__m512i; 3], table: &[u8; 64]) -> __m512i;
    /// [`Lanes::look_up_pairs`]
    fn look_up_pairs(self, below: Self::Codes3, above: Self::Codes3, table: &PairTable) -> __m512i;
}

/// The lanes of a token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zmm<W>(pub(crate) W);

avx512! {
    fn run_shared<O: Op>(lanes: Zmm<Shared<Avx512>>, op: O) -> O::Output {
        op.run(lanes)
    }

    fn run_avx512<O: Op>(lanes: Zmm<Avx512>, op: O) -> O::Output {
        op.run(lanes)
    }
}

impl Wide for Shared<Avx512> {
    type Codes3 = ();

    #[inline(always)]
    fn run_op<O: Op>(self, op: O) -> O::Output {
        intrinsic!(run_shared(Zmm(self), op))
    }

    #[inline(always)]
    fn look_up(self, _: __m512i, _: &[u8; 64]) -> __m512i {
        unreachable!("an op that declares no LOOKS_UP_64")
    }

    #[inline(always)]
    fn load_3<const ABOVE: bool>(self, _: &[u8; 16], _: &[u8; 8]) {
        unreachable!("an op that declares no LOOKS_UP_64")
    }

    #[inline(always)]
    fn look_up_triples(self, _: [__m512i; 3], _: &[u8; 64]) -> __m512i {
        unreachable!("an op that declares no LOOKS_UP_64")
    }

    #[inline(always)]
    fn look_up_pairs(self, (): (), (): (), _: &PairTable) -> __m512i {
        unreachable!("an op that declares no LOOKS_UP_64")
    }
}

impl Wide for Avx512 {
    /// The plane of low bits, four times, and the third bits.
    type Codes3 = (__m512i, u64);

    #[inline(always)]
    fn run_op<O: Op>(self, op: O) -> O::Output {
        if O::LOOKS_UP_64 { intrinsic!(run_avx512(Zmm(self), op)) } else { Shared(self).run_op(op) }
    }

    #[inline(always)]
    fn look_up(self, codes: __m512i, table: &[u8; 64]) -> __m512i {
        intrinsic!(look_up::in_zmm(table, codes))
    }

    #[inline(always)]
    fn load_3<const ABOVE: bool>(self, low: &[u8; 16], high: &[u8; 8]) -> Self::Codes3 {
        (Zmm(self).load_2(low), u64::from_le_bytes(*high))
    }

    #[inline(always)]
    fn look_up_triples(self, [a, b, c]: [__m512i; 3], table: &[u8; 64]) -> __m512i {
        intrinsic!({
            let odd = _mm512_test_epi8_mask(c, of_bytes(const { &bit_of_codes(0) }));
            let high = _mm512_test_epi8_mask(c, of_bytes(const { &bit_of_codes(1) }));
            look_up::quarters_in_zmm(table, look_up::nibbles_in_zmm(a, b), odd, high)
        })
    }

    #[inline(always)]
    fn look_up_pairs(self, below: Self::Codes3, above: Self::Codes3, table: &PairTable) -> __m512i {
        intrinsic!({
            let codes = look_up::nibbles_in_zmm(below.0, above.0);
            look_up::quarters_in_zmm(&table.by_plane, codes, below.1, above.1)
        })
    }
}

avx512vbmi! {
    fn run_avx512vbmi<O: Op>(lanes: Zmm<Avx512Vbmi>, op: O) -> O::Output {
        op.run(lanes)
    }
}

impl Wide for Avx512Vbmi {
    /// In bits 0 to 2 of each byte, or in 3 to 5 if they are above others; other bits are
    /// arbitrary.
    type Codes3 = __m512i;

    #[inline(always)]
    fn run_op<O: Op>(self, op: O) -> O::Output {
        if !O::LOOKS_UP_64 {
            return Shared(Avx512::from(self)).run_op(op);
        }
        // SAFETY: this token proves AVX-512 VBMI beside the rest.
        unsafe { run_avx512vbmi(Zmm(self), op) }
    }

    #[inline(always)]
    fn look_up(self, codes: __m512i, table: &[u8; 64]) -> __m512i {
        // SAFETY: this token proves AVX-512 VBMI.
        unsafe { look_up::in_zmm_with_vbmi(table, codes) }
    }

    /// One instruction aligns a plane: it takes any eight bits of a line for each byte. On Zen 4 it
    /// takes the place of a product, and a shift does not.
    #[inline(always)]
    fn load_3<const ABOVE: bool>(self, low: &[u8; 16], high: &[u8; 8]) -> __m512i {
        let up = if ABOVE { 3 } else { 0 };
        let low = Zmm(self).load_2(low);
        let high = intrinsic!(_mm512_set1_epi64(i64::from_le_bytes(*high)));
        // SAFETY: this token proves AVX-512 VBMI.
        unsafe {
            let low = if ABOVE {
                _mm512_multishift_epi64_epi8(of_bytes(const { &low_places(3) }), low)
            } else {
                _mm512_srlv_epi64(low, _mm512_set_epi64(6, 6, 4, 4, 2, 2, 0, 0))
            };
            let high_at = const { if ABOVE { &high_places(3) } else { &high_places(0) } };
            let high = _mm512_multishift_epi64_epi8(of_bytes(high_at), high);
            choose(_mm512_set1_epi8(3 << up), low, high)
        }
    }

    /// Bits above the sixth are arbitrary: a lookup ignores them.
    #[inline(always)]
    fn look_up_triples(self, [a, b, c]: [__m512i; 3], table: &[u8; 64]) -> __m512i {
        let codes = intrinsic!({
            let c = _mm512_rorv_epi64(c, _mm512_set_epi64(2, 2, 0, 0, 62, 62, 60, 60));
            choose(_mm512_set1_epi8(15), look_up::low_nibbles_in_zmm(a, b), c)
        });
        self.look_up(codes, table)
    }

    #[inline(always)]
    fn look_up_pairs(self, below: __m512i, above: __m512i, table: &PairTable) -> __m512i {
        self.look_up(choose(intrinsic!(_mm512_set1_epi8(7)), below, above), &table.by_code)
    }
}

/// Returns bit `bit` of code j in byte j, of codes that are loaded by [`Lanes::codes_2`].
const fn bit_of_codes(bit: usize) -> [u8; 64] {
    let (mut bits, mut j) = ([0; 64], 0);
    while j < 64 {
        bits[j] = 1 << (2 * (j / 16) + bit);
        j += 1;
    }
    bits
}

/// Returns, modulo 64, the offset in a line of 8 bytes of the eight bits that have code j of a
/// plane of low bits at their bit `up`.
const fn low_places(up: usize) -> [u8; 64] {
    let (mut places, mut j) = ([0; 64], 0);
    while j < 64 {
        places[j] = ((64 + 8 * (j % 8) + 2 * (j / 16) - up) % 64) as u8;
        j += 1;
    }
    places
}

/// Returns the same for a plane of high bits, at bit `up + 2`.
const fn high_places(up: usize) -> [u8; 64] {
    let (mut places, mut j) = ([0; 64], 0);
    while j < 64 {
        places[j] = ((64 + j - up - 2) % 64) as u8;
        j += 1;
    }
    places
}

/// Returns the bits of `a` where those of `mask` are set, and of `b` elsewhere.
#[inline(always)]
fn choose(mask: __m512i, a: __m512i, b: __m512i) -> __m512i {
    intrinsic!(_mm512_ternarylogic_epi64::<0b1100_1010>(mask, a, b))
}

/// Returns the bytes of four packed operands, operand by operand: every quarter of the packed
/// register holds a quarter of each.
#[inline(always)]
fn by_operand(packed: __m512i) -> __m512i {
    let order = intrinsic!(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    intrinsic!(_mm512_permutexvar_epi32(order, packed))
}

#[inline(always)]
fn of_bytes(bytes: &[u8; 64]) -> __m512i {
    intrinsic!(_mm512_loadu_si512(bytes.as_ptr().cast()))
}

impl<W: Wide> Lanes for Zmm<W> {
    type Ints = __m512i;
    type Floats = __m512;
    type Codes2 = __m512i;
    type Codes3 = W::Codes3;

    const WIDE: usize = 2;
    const MAX_BYTE: i32 = 127;
    const MAX_SPLIT: i32 = 127 * 256 + 127;

    #[inline(always)]
    fn run<O: Op>(self, op: O) -> O::Output {
        self.0.run_op(op)
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m512i {
        intrinsic!(_mm512_set1_epi32(x))
    }

    #[inline(always)]
    fn add_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn min_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_min_epi32(a, b))
    }

    #[inline(always)]
    fn and_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or_i(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn shift_left(self, a: __m512i, by: __m512i) -> __m512i {
        intrinsic!(_mm512_sllv_epi32(a, by))
    }

    #[inline(always)]
    fn shift_right(self, a: __m512i, by: __m512i) -> __m512i {
        intrinsic!(_mm512_srlv_epi32(a, by))
    }

    #[inline(always)]
    fn dot_pairs(self, sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
        intrinsic!(_mm512_dpwssd_epi32(sum, a, b))
    }

    #[inline(always)]
    fn sum_i(self, a: __m512i) -> i32 {
        intrinsic!(_mm512_reduce_add_epi32(a))
    }

    #[inline(always)]
    fn sum_i_of_each(self, a: [__m512i; 16]) -> [i32; 16] {
        let a: [__m512; 16] = intrinsic!(std::mem::transmute(a));
        let sums = folded!(a, add_as_integers);
        intrinsic!(std::mem::transmute(sums))
    }

    #[inline(always)]
    fn low_bytes(self, a: __m512i) -> [[i8; 4]; 4] {
        intrinsic!(std::mem::transmute(_mm512_cvtepi32_epi8(a)))
    }

    #[inline(always)]
    fn store_offset(self, sum: __m512i, [a, b, c, d]: [__m512i; 4], x: &mut [[[i8; 4]; 4]; 4]) -> __m512i {
        let packed = intrinsic!(_mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d)));
        let bytes = by_operand(packed);
        let below = intrinsic!(_mm512_xor_si512(bytes, _mm512_set1_epi8(i8::MIN)));
        self.store_codes(below, bytemuck::cast_mut(x));
        self.dot(sum, bytes, [1; 4])
    }

    #[inline(always)]
    fn store_split(self, [a, b, c, d]: [__m512i; 4], [high, low]: [&mut [[[i8; 4]; 4]; 4]; 2]) {
        let (ab, cd) = intrinsic!((_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)));
        let packed = intrinsic!({
            let (half, low) = (_mm512_set1_epi16(128), _mm512_set1_epi16(0xff));
            let high_ab = _mm512_srai_epi16::<8>(_mm512_add_epi16(ab, half));
            let high_cd = _mm512_srai_epi16::<8>(_mm512_add_epi16(cd, half));
            [
                _mm512_packs_epi16(high_ab, high_cd),
                _mm512_packus_epi16(_mm512_and_si512(ab, low), _mm512_and_si512(cd, low)),
            ]
        });
        self.store_codes(by_operand(packed[0]), bytemuck::cast_mut(high));
        self.store_codes(by_operand(packed[1]), bytemuck::cast_mut(low));
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        intrinsic!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> __m512 {
        intrinsic!(_mm512_loadu_ps(x.as_ptr()))
    }

    #[inline(always)]
    fn store(self, a: __m512, x: &mut [f32; 16]) {
        intrinsic!(_mm512_storeu_ps(x.as_mut_ptr(), a))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsic!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        intrinsic!(_mm512_abs_ps(a))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn above_floor(self, x: __m512) -> __m512 {
        intrinsic!(_mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x))
    }

    #[inline(always)]
    fn times_two_to_floor(self, a: __m512, x: __m512) -> __m512 {
        intrinsic!(_mm512_scalef_ps(a, x))
    }

    #[inline(always)]
    fn swap<const BY: usize>(self, a: __m512) -> __m512 {
        intrinsic!(match BY {
            1 => _mm512_permute_ps::<0b10_11_00_01>(a),
            2 => _mm512_permute_ps::<0b01_00_11_10>(a),
            4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(a, a),
            8 => _mm512_shuffle_f32x4::<0b01_00_11_10>(a, a),
            _ => unreachable!("lanes {BY} apart"),
        })
    }

    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        intrinsic!(_mm512_reduce_max_ps(a))
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        intrinsic!(_mm512_reduce_add_ps(a))
    }

    #[inline(always)]
    fn largest_of_each(self, a: [__m512; 16]) -> __m512 {
        folded!(a, _mm512_max_ps)
    }

    #[inline(always)]
    fn sum_of_each(self, a: [__m512; 16]) -> __m512 {
        folded!(a, _mm512_add_ps)
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512i {
        intrinsic!(_mm512_cvtps_epi32(a))
    }

    #[inline(always)]
    fn to_floats(self, a: __m512i) -> __m512 {
        intrinsic!(_mm512_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> __m512 {
        intrinsic!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> __m512 {
        intrinsic!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    fn load_f32(self, x: &[u8; 64]) -> __m512 {
        intrinsic!(_mm512_loadu_ps(x.as_ptr().cast()))
    }

    #[inline(always)]
    fn to_f16(self, a: __m512) -> [[u8; 2]; 16] {
        intrinsic!({
            let (max, min) = (_mm512_set1_ps(F16_MAX), _mm512_set1_ps(-F16_MAX));
            let a = _mm512_max_ps(_mm512_min_ps(a, max), min);
            std::mem::transmute(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a))
        })
    }

    #[inline(always)]
    fn dot(self, sum: __m512i, codes: __m512i, bytes: [i8; 4]) -> __m512i {
        let bytes = bytemuck::cast(bytes);
        intrinsic!(_mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(bytes)))
    }

    #[inline(always)]
    fn codes_8(self, x: &[u8; 64]) -> __m512i {
        intrinsic!(_mm512_loadu_si512(x.as_ptr().cast()))
    }

    #[inline(always)]
    fn codes_4(self, x: &[u8; 32]) -> __m512i {
        intrinsic!({
            let twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(x.as_ptr().cast()));
            let down = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
            _mm512_and_si512(_mm512_srlv_epi64(twice, down), _mm512_set1_epi8(15))
        })
    }

    #[inline(always)]
    fn codes_2(self, x: &[u8; 16]) -> __m512i {
        intrinsic!({
            let four_times = _mm512_broadcast_i32x4(_mm_loadu_si128(x.as_ptr().cast()));
            let down = _mm512_set_epi64(6, 6, 4, 4, 2, 2, 0, 0);
            _mm512_and_si512(_mm512_srlv_epi64(four_times, down), _mm512_set1_epi8(3))
        })
    }

    #[inline(always)]
    fn look_up_3(self, low: &[u8; 16], high: &[u8; 8], table: &[u8; 16]) -> __m512i {
        let low = self.codes_2(low);
        // One lookup for codes below 4, one for the others: cheaper than joining the bits first.
        let low_half = i32::from_le_bytes([table[0], table[1], table[2], table[3]]);
        let high_half = i32::from_le_bytes([table[4], table[5], table[6], table[7]]);
        intrinsic!({
            let below = _mm512_shuffle_epi8(_mm512_set1_epi32(low_half), low);
            let is_high = u64::from_le_bytes(*high);
            _mm512_mask_shuffle_epi8(below, is_high, _mm512_set1_epi32(high_half), low)
        })
    }

    #[inline(always)]
    fn look_up(self, codes: __m512i, table: &[u8; 16]) -> __m512i {
        intrinsic!({
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, codes)
        })
    }

    #[inline(always)]
    fn look_up_floats(self, at: __m512i, table: &[f32; 16]) -> __m512 {
        let table = self.load(table);
        intrinsic!(_mm512_permutexvar_ps(at, table))
    }

    #[inline(always)]
    fn codes_3(self, low: &[u8; 16], high: &[u8; 8]) -> __m512i {
        let low = self.codes_2(low);
        intrinsic!(_mm512_mask_add_epi8(low, u64::from_le_bytes(*high), low, _mm512_set1_epi8(4)))
    }

    #[inline(always)]
    fn look_up_64(self, codes: __m512i, table: &[u8; 64]) -> __m512i {
        self.0.look_up(codes, table)
    }

    #[inline(always)]
    fn load_2(self, low: &[u8; 16]) -> __m512i {
        intrinsic!(_mm512_broadcast_i32x4(_mm_loadu_si128(low.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_3<const ABOVE: bool>(self, low: &[u8; 16], high: &[u8; 8]) -> W::Codes3 {
        self.0.load_3::<ABOVE>(low, high)
    }

    #[inline(always)]
    fn look_up_triples(self, codes: [__m512i; 3], table: &[u8; 64]) -> __m512i {
        self.0.look_up_triples(codes, table)
    }

    #[inline(always)]
    fn look_up_pairs(self, below: W::Codes3, above: W::Codes3, table: &PairTable) -> __m512i {
        self.0.look_up_pairs(below, above, table)
    }

    #[inline(always)]
    fn transpose(self, [a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
        // Exchanges 4x4 squares, and transposes each.
        intrinsic!({
            let square =
                _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
            let (low_ab, low_cd) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d));
            let (high_ab, high_cd) = (_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(c, d));
            [
                _mm512_shuffle_epi8(_mm512_shuffle_i32x4::<0x88>(low_ab, low_cd), square),
                _mm512_shuffle_epi8(_mm512_shuffle_i32x4::<0xdd>(low_ab, low_cd), square),
                _mm512_shuffle_epi8(_mm512_shuffle_i32x4::<0x88>(high_ab, high_cd), square),
                _mm512_shuffle_epi8(_mm512_shuffle_i32x4::<0xdd>(high_ab, high_cd), square),
            ]
        })
    }

    #[inline(always)]
    fn store_codes(self, codes: __m512i, x: &mut [u8; 64]) {
        intrinsic!(_mm512_storeu_si512(x.as_mut_ptr().cast(), codes))
    }

    #[inline(always)]
    fn split(self, a: __m512i) -> [[[i8; 4]; 4]; 2] {
        // The low byte of an integer, taken as signed, is the remainder after rounding to the high
        // byte.
        let high = intrinsic!(_mm512_srai_epi32::<8>(self.add_i(a, self.splat_i(128))));
        [self.low_bytes(high), self.low_bytes(a)]
    }

    #[inline(always)]
    fn join(self, high: __m512i, low: __m512i) -> __m512i {
        self.add_i(intrinsic!(_mm512_slli_epi32::<8>(high)), low)
    }
}
