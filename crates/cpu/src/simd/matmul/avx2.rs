//! [`Simd`] on 256-bit registers: eight rows to a register. Sets differ in their byte products.
//!
//! AVX-VNNI has `vpdpbusd`, which adds four products in 32 bits. AVX2 has `vpmaddubsw`, which
//! multiplies unsigned codes with signed activations and adds neighbours to 16 bits, *saturating*:
//! no pair reaches that, since an activation is at most 127. More pairs are added modulo 2^16,
//! starting from the excess of the code of zero, subtracted: so the sum is right once it is that of
//! `code - zero`, whatever the intermediate values.
//!
//! | bits | zero | largest `code - zero` | pair of products | groups per 16-bit sum | largest sum |
//! |---|---|---|---|---|---|
//! | 2, 3, 4 | 0 | 15 | 2 · 15 · 127 = 3,810 | 8 | 30,480 |
//! | 5 | 0 | 31 | 7,874 | 4 | 31,496 |
//! | 5 | 16 | 16 | 4,064 | 8 | 32,512 |
//! | 6 | 32 | 32 | 8,128 | 4 | 32,512 |
//! | 7 | 64 | 64 | 16,256 | 1 | 32,258 of codes |
//! | 8 | 128 | 128 | 32,512 | 1 | 32,512 |
//!
//! The limit is 32,767. With 7 bits a sum takes one group, since activations are not summed for
//! two; zero is subtracted in 32 bits. With 8 bits the code is taken as a signed number, its sign
//! moved to the activation and its magnitude (at most 128) multiplied, so that no zero is
//! subtracted.

use std::arch::x86_64::*;

use super::{Kernel, Simd};
use crate::simd::look_up;
use crate::simd::matmul::format::{BLOCK, GROUPS, PANEL, WeightFormat};
use crate::simd::tokens::{Avx2, AvxVnni, avx_vnni, avx2};

/// Wraps an intrinsic: the token proves its instructions.
macro_rules! intrinsic {
    ($($body:tt)*) => {
        // SAFETY: tokens that are `Ymm` exist only on a CPU with the features of the AVX2 set;
        // memory is read and written through array references of the full width, without any need
        // for alignment.
        unsafe { $($body)* }
    };
}

/// A token that proves at least AVX2, FMA and F16C, and the byte products of its set: as in
/// [`Simd`].
pub(crate) trait Ymm: Copy + Send + Sync {
    fn run_kernel<K: Kernel>(self, kernel: K) -> K::Output;
    fn across<F: WeightFormat>() -> usize;
    fn groups<F: WeightFormat>() -> usize;
    fn first<F: WeightFormat>(self, neg_sum: i32) -> __m256i;
    fn begin<F: WeightFormat>(self, sum: __m256i, neg_sum: i32) -> __m256i;
    fn add_products<F: WeightFormat>(self, short: __m256i, w: __m256i, x: __m256i) -> __m256i;
    fn end(self, sum: __m256i, short: __m256i) -> __m256i;
}

/// Groups of half a block.
const HALF: usize = GROUPS / 2;

/// Returns the number of groups whose products fit in 16 bits after subtracting those with the code
/// of zero.
const fn max_groups<F: WeightFormat>() -> usize {
    let zero = F::FACTOR_ZERO as usize;
    let above = (1 << F::FACTOR_BITS) - 1 - zero;
    i16::MAX as usize / (2 * 127 * if zero > above { zero } else { above })
}

/// Returns whether short sums subtract the excess of the code of zero: activations are summed for
/// half a block and for a whole one.
const fn has_zero_in_short_sums<F: WeightFormat>() -> bool {
    max_groups::<F>() >= HALF
}

avx2! {
    fn run_avx2<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
        kernel.run(simd)
    }
}

impl Ymm for Avx2 {
    #[inline(always)]
    fn run_kernel<K: Kernel>(self, kernel: K) -> K::Output {
        intrinsic!(run_avx2(self, kernel))
    }

    /// Two if registers hold their short sums and little else: not with a minimum for each half of
    /// a block.
    #[inline(always)]
    fn across<F: WeightFormat>() -> usize {
        let has_two_minima = F::SPEC.has_min && F::SPEC.sub_len < BLOCK;
        if max_groups::<F>() >= GROUPS && !has_two_minima { 2 } else { 1 }
    }

    /// Follows the table above.
    #[inline(always)]
    fn groups<F: WeightFormat>() -> usize {
        match max_groups::<F>() {
            GROUPS.. => GROUPS,
            HALF.. => HALF,
            _ => 1,
        }
    }

    #[inline(always)]
    fn first<F: WeightFormat>(self, neg_sum: i32) -> __m256i {
        intrinsic!({
            if F::FACTOR_BITS == 8 || has_zero_in_short_sums::<F>() {
                return _mm256_setzero_si256();
            }
            _mm256_madd_epi16(_mm256_set1_epi32(neg_sum), _mm256_set1_epi16(i16::from(F::FACTOR_ZERO)))
        })
    }

    #[inline(always)]
    fn begin<F: WeightFormat>(self, _: __m256i, neg_sum: i32) -> __m256i {
        intrinsic!({
            if F::FACTOR_ZERO == 0 || !has_zero_in_short_sums::<F>() {
                return _mm256_setzero_si256();
            }
            // A power of two in every format.
            let by = F::FACTOR_ZERO.trailing_zeros() as i32;
            _mm256_sll_epi16(_mm256_set1_epi32(neg_sum), _mm_cvtsi32_si128(by))
        })
    }

    #[inline(always)]
    fn add_products<F: WeightFormat>(self, short: __m256i, w: __m256i, x: __m256i) -> __m256i {
        intrinsic!({
            let products = if F::FACTOR_BITS == 8 {
                // The stored code is the signed one plus 128: its top bit flipped.
                let signed = _mm256_xor_si256(w, _mm256_set1_epi8(i8::MIN));
                _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed))
            } else {
                _mm256_maddubs_epi16(w, x)
            };
            _mm256_add_epi16(short, products)
        })
    }

    #[inline(always)]
    fn end(self, sum: __m256i, short: __m256i) -> __m256i {
        intrinsic!(_mm256_add_epi32(sum, _mm256_madd_epi16(short, _mm256_set1_epi16(1))))
    }
}

avx_vnni! {
    fn run_avx_vnni<K: Kernel>(simd: AvxVnni, kernel: K) -> K::Output {
        kernel.run(simd)
    }
}

impl Ymm for AvxVnni {
    #[inline(always)]
    fn run_kernel<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the token proves the features of its set.
        unsafe { run_avx_vnni(self, kernel) }
    }

    #[inline(always)]
    fn across<F: WeightFormat>() -> usize {
        2
    }

    #[inline(always)]
    fn groups<F: WeightFormat>() -> usize {
        usize::MAX
    }

    #[inline(always)]
    fn first<F: WeightFormat>(self, neg_sum: i32) -> __m256i {
        intrinsic!(_mm256_set1_epi32(neg_sum * i32::from(F::FACTOR_ZERO)))
    }

    #[inline(always)]
    fn begin<F: WeightFormat>(self, sum: __m256i, _: i32) -> __m256i {
        sum
    }

    #[inline(always)]
    fn add_products<F: WeightFormat>(self, short: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the token proves AVX-VNNI.
        unsafe { _mm256_dpbusd_avx_epi32(short, w, x) }
    }

    #[inline(always)]
    fn end(self, _: __m256i, short: __m256i) -> __m256i {
        short
    }
}

impl<Y: Ymm> Simd for Y {
    type Ints = __m256i;
    type Floats = __m256;

    const PARTS: usize = 2;
    const FLOAT_TILE: usize = 6;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        self.run_kernel(kernel)
    }

    #[inline(always)]
    fn load(self, line: &[u8; 64], part: usize) -> __m256i {
        let half: &[u8; 32] = &line.as_chunks().0[part];
        intrinsic!(_mm256_loadu_si256(half.as_ptr().cast()))
    }

    #[inline(always)]
    fn store(self, a: __m256i, line: &mut [u8; 64], part: usize) {
        let half: &mut [u8; 32] = &mut line.as_chunks_mut().0[part];
        intrinsic!(_mm256_storeu_si256(half.as_mut_ptr().cast(), a))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m256i {
        intrinsic!(_mm256_set1_epi32(x))
    }

    #[inline(always)]
    fn field(self, a: __m256i, by: i32, mask: i8) -> __m256i {
        intrinsic!(_mm256_and_si256(_mm256_srl_epi16(a, _mm_cvtsi32_si128(by)), _mm256_set1_epi8(mask)))
    }

    #[inline(always)]
    fn less(self, a: __m256i, zero: u8) -> __m256i {
        intrinsic!(_mm256_sub_epi8(a, _mm256_set1_epi8(zero as i8)))
    }

    #[inline(always)]
    fn join(self, low: __m256i, a: __m256i, left: i32, mask: i8) -> __m256i {
        intrinsic!({
            let shifted = if left < 0 {
                _mm256_srl_epi16(a, _mm_cvtsi32_si128(-left))
            } else {
                _mm256_sll_epi16(a, _mm_cvtsi32_si128(left))
            };
            _mm256_or_si256(low, _mm256_and_si256(shifted, _mm256_set1_epi8(mask)))
        })
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], codes: __m256i) -> __m256i {
        intrinsic!({
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, codes)
        })
    }

    #[inline(always)]
    fn look_up_64(self, table: &[u8; 64], codes: __m256i) -> __m256i {
        intrinsic!(look_up::in_ymm(table, codes))
    }

    #[inline(always)]
    fn rotate_bytes(self, a: __m256i) -> __m256i {
        intrinsic!(_mm256_or_si256(_mm256_slli_epi32::<8>(a), _mm256_srli_epi32::<24>(a)))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        intrinsic!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    fn load_floats(self, x: &[f32; PANEL], part: usize) -> __m256 {
        let half: &[f32; 8] = &x.as_chunks().0[part];
        intrinsic!(_mm256_loadu_ps(half.as_ptr()))
    }

    #[inline(always)]
    fn store_floats(self, a: __m256, x: &mut [f32; PANEL], part: usize) {
        let half: &mut [f32; 8] = &mut x.as_chunks_mut().0[part];
        intrinsic!(_mm256_storeu_ps(half.as_mut_ptr(), a))
    }

    #[inline(always)]
    fn load_f16(self, line: &[u8; 64], half: usize, part: usize) -> __m256 {
        let eight: &[u8; 16] = &line.as_chunks().0[2 * half + part];
        intrinsic!(_mm256_cvtph_ps(_mm_loadu_si128(eight.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_bf16(self, line: &[u8; 64], half: usize, part: usize) -> __m256 {
        let eight: &[u8; 16] = &line.as_chunks().0[2 * half + part];
        // A bf16 is the upper half of an f32.
        intrinsic!({
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(eight.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    fn load_bytes(self, line: &[u8; 64], quarter: usize, part: usize) -> __m256 {
        let eight: &[u8; 8] = &line.as_chunks().0[2 * quarter + part];
        intrinsic!(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(eight.as_ptr().cast()))))
    }

    #[inline(always)]
    fn load_e8m0(self, line: &[u8; 64], quarter: usize, part: usize) -> __m256 {
        let eight: &[u8; 8] = &line.as_chunks().0[2 * quarter + part];
        intrinsic!({
            let exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64(eight.as_ptr().cast()));
            // 2^-127 has no exponent of its own.
            let bits = _mm256_max_epu32(_mm256_slli_epi32::<23>(exponents), _mm256_set1_epi32(1 << 22));
            _mm256_castsi256_ps(bits)
        })
    }

    #[inline(always)]
    fn load_e4m3(self, line: &[u8; 64], quarter: usize, part: usize) -> __m256 {
        let eight: &[u8; 8] = &line.as_chunks().0[2 * quarter + part];
        intrinsic!({
            let halves = _mm_cvtepu8_epi16(_mm_loadl_epi64(eight.as_ptr().cast()));
            _mm256_cvtph_ps(_mm_slli_epi16::<7>(halves))
        })
    }

    #[inline(always)]
    fn load_signed_e4m3(self, line: &[u8; 64], quarter: usize, part: usize) -> __m256 {
        let eight: &[u8; 8] = &line.as_chunks().0[2 * quarter + part];
        // The sign is in the upper nine bits; all but one of its copies are shifted out, and that
        // one is masked away.
        intrinsic!({
            let signed = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(eight.as_ptr().cast())));
            _mm256_cvtph_ps(_mm_and_si128(signed, _mm_set1_epi16(0xbfffu16 as i16)))
        })
    }

    #[inline(always)]
    fn load_levels(self, levels: &[f32; 16], line: &[u8; 64], col: usize, part: usize) -> __m256 {
        let [low, high]: &[[f32; 8]; 2] = levels.as_chunks().0.try_into().expect("two halves");
        let shift = 4 * (col as i32 ^ 1);
        let lanes = self.load(line, part);
        // Permutations ignore all but three bits; the fourth, as a sign, chooses one of them.
        intrinsic!({
            let codes = _mm256_srl_epi32(lanes, _mm_cvtsi32_si128(shift));
            let signs = _mm256_sll_epi32(lanes, _mm_cvtsi32_si128(28 - shift));
            let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(low.as_ptr()), codes);
            let high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(high.as_ptr()), codes);
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(signs))
        })
    }

    #[inline(always)]
    fn to_floats(self, a: __m256i) -> __m256 {
        intrinsic!(_mm256_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn bits_to_floats(self, a: __m256i) -> __m256 {
        intrinsic!(_mm256_castsi256_ps(a))
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        intrinsic!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        intrinsic!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        intrinsic!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn across<F: WeightFormat>() -> usize {
        Y::across::<F>()
    }

    #[inline(always)]
    fn groups_in_short_sum<F: WeightFormat>() -> usize {
        Y::groups::<F>()
    }

    #[inline(always)]
    fn start<F: WeightFormat>(self, neg_sum: i32) -> __m256i {
        self.first::<F>(neg_sum)
    }

    #[inline(always)]
    fn short<F: WeightFormat>(self, sum: __m256i, neg_sum: i32) -> __m256i {
        self.begin::<F>(sum, neg_sum)
    }

    #[inline(always)]
    fn dot<F: WeightFormat>(self, short: __m256i, w: __m256i, x: __m256i) -> __m256i {
        self.add_products::<F>(short, w, x)
    }

    #[inline(always)]
    fn widen(self, sum: __m256i, short: __m256i) -> __m256i {
        self.end(sum, short)
    }
}
