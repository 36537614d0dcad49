//! [`Simd`] on 512-bit registers: sixteen rows to a register.
//!
//! Sets differ in lookups among 64 bytes: VBMI has `vpermb`, others select among four lookups in 16
//! bytes.

use std::arch::x86_64::*;

use super::{Kernel, Simd};
use crate::simd::look_up;
use crate::simd::matmul::format::{PANEL, WeightFormat};
use crate::simd::tokens::{Avx512, Avx512Vbmi, avx512, avx512vbmi};

/// Between 2^23 and 2^24 the last bit of a float counts ones: 2^22 of them are on either side.
const LIFT: f32 = 12_582_912.0;

/// Wraps an intrinsic: the token proves its instructions.
macro_rules! intrinsic {
    ($($body:tt)*) => {
        // SAFETY: tokens that are `Wide` exist only on a CPU with the features of AVX-512; memory
        // is read and written through array references of the full width, without any need for
        // alignment.
        unsafe { $($body)* }
    };
}

/// A token that proves at least what [`Avx512`] does, and the lookups of its set.
pub(crate) trait Wide: Copy + Send + Sync {
    /// [`Simd::run`]
    fn run_kernel<K: Kernel>(self, kernel: K) -> K::Output;
    /// [`Simd::look_up_64`]
    fn look_up(self, table: &[u8; 64], codes: __m512i) -> __m512i;
}

/// The vectors of a token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zmm<W>(pub(crate) W);

avx512! {
    fn run_avx512<K: Kernel>(simd: Zmm<Avx512>, kernel: K) -> K::Output {
        kernel.run(simd)
    }
}

impl Wide for Avx512 {
    #[inline(always)]
    fn run_kernel<K: Kernel>(self, kernel: K) -> K::Output {
        intrinsic!(run_avx512(Zmm(self), kernel))
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 64], codes: __m512i) -> __m512i {
        intrinsic!(look_up::in_zmm(table, codes))
    }
}

avx512vbmi! {
    fn run_avx512vbmi<K: Kernel>(simd: Zmm<Avx512Vbmi>, kernel: K) -> K::Output {
        kernel.run(simd)
    }
}

impl Wide for Avx512Vbmi {
    #[inline(always)]
    fn run_kernel<K: Kernel>(self, kernel: K) -> K::Output {
        if !K::LOOKS_UP_64 {
            return Avx512::from(self).run_kernel(kernel);
        }
        // SAFETY: this token proves AVX-512 VBMI beside the rest.
        unsafe { run_avx512vbmi(Zmm(self), kernel) }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 64], codes: __m512i) -> __m512i {
        // SAFETY: this token proves AVX-512 VBMI.
        unsafe { look_up::in_zmm_with_vbmi(table, codes) }
    }
}

impl<W: Wide> Simd for Zmm<W> {
    type Ints = __m512i;
    type Floats = __m512;

    const PARTS: usize = 1;
    const FLOAT_TILE: usize = 12;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        self.0.run_kernel(kernel)
    }

    #[inline(always)]
    fn load(self, line: &[u8; 64], _: usize) -> __m512i {
        intrinsic!(_mm512_loadu_si512(line.as_ptr().cast()))
    }

    #[inline(always)]
    fn store(self, a: __m512i, line: &mut [u8; 64], _: usize) {
        intrinsic!(_mm512_storeu_si512(line.as_mut_ptr().cast(), a))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m512i {
        intrinsic!(_mm512_set1_epi32(x))
    }

    #[inline(always)]
    fn field(self, a: __m512i, by: i32, mask: i8) -> __m512i {
        intrinsic!(_mm512_and_si512(_mm512_srl_epi16(a, _mm_cvtsi32_si128(by)), _mm512_set1_epi8(mask)))
    }

    #[inline(always)]
    fn less(self, a: __m512i, zero: u8) -> __m512i {
        intrinsic!(_mm512_sub_epi8(a, _mm512_set1_epi8(zero as i8)))
    }

    #[inline(always)]
    fn join(self, low: __m512i, a: __m512i, left: i32, mask: i8) -> __m512i {
        intrinsic!({
            let shifted = if left < 0 {
                _mm512_srl_epi16(a, _mm_cvtsi32_si128(-left))
            } else {
                _mm512_sll_epi16(a, _mm_cvtsi32_si128(left))
            };
            _mm512_ternarylogic_epi32::<0xf8>(low, shifted, _mm512_set1_epi8(mask))
        })
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], codes: __m512i) -> __m512i {
        intrinsic!({
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, codes)
        })
    }

    #[inline(always)]
    fn look_up_64(self, table: &[u8; 64], codes: __m512i) -> __m512i {
        self.0.look_up(table, codes)
    }

    #[inline(always)]
    fn rotate_bytes(self, a: __m512i) -> __m512i {
        intrinsic!(_mm512_rol_epi32::<8>(a))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        intrinsic!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load_floats(self, x: &[f32; PANEL], _: usize) -> __m512 {
        intrinsic!(_mm512_loadu_ps(x.as_ptr()))
    }

    #[inline(always)]
    fn store_floats(self, a: __m512, x: &mut [f32; PANEL], _: usize) {
        intrinsic!(_mm512_storeu_ps(x.as_mut_ptr(), a))
    }

    #[inline(always)]
    fn store_floats_nt(self, a: __m512, x: &mut [f32; PANEL], part: usize) {
        let to = x.as_mut_ptr();
        if to.addr().is_multiple_of(64) {
            // SAFETY: as of `intrinsic`; the one instruction that needs alignment has it.
            unsafe { _mm512_stream_ps(to, a) }
        } else {
            self.store_floats(a, x, part);
        }
    }

    #[inline(always)]
    fn store_fence(self) {
        intrinsic!(_mm_sfence())
    }

    #[inline(always)]
    fn load_f16(self, line: &[u8; 64], half: usize, _: usize) -> __m512 {
        let half: &[u8; 32] = &line.as_chunks().0[half];
        intrinsic!(_mm512_cvtph_ps(_mm256_loadu_si256(half.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_bf16(self, line: &[u8; 64], half: usize, _: usize) -> __m512 {
        let half: &[u8; 32] = &line.as_chunks().0[half];
        // A bf16 is the upper half of an f32.
        intrinsic!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(half.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    fn load_bytes(self, line: &[u8; 64], quarter: usize, _: usize) -> __m512 {
        let quarter: &[u8; 16] = &line.as_chunks().0[quarter];
        intrinsic!(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(quarter.as_ptr().cast()))))
    }

    #[inline(always)]
    fn load_e8m0(self, line: &[u8; 64], quarter: usize, _: usize) -> __m512 {
        let quarter: &[u8; 16] = &line.as_chunks().0[quarter];
        intrinsic!({
            let exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(quarter.as_ptr().cast()));
            // 2^-127 has no exponent of its own.
            let bits = _mm512_max_epu32(_mm512_slli_epi32::<23>(exponents), _mm512_set1_epi32(1 << 22));
            _mm512_castsi512_ps(bits)
        })
    }

    #[inline(always)]
    fn load_e4m3(self, line: &[u8; 64], quarter: usize, _: usize) -> __m512 {
        let quarter: &[u8; 16] = &line.as_chunks().0[quarter];
        intrinsic!({
            let halves = _mm256_cvtepu8_epi16(_mm_loadu_si128(quarter.as_ptr().cast()));
            _mm512_cvtph_ps(_mm256_slli_epi16::<7>(halves))
        })
    }

    #[inline(always)]
    fn load_signed_e4m3(self, line: &[u8; 64], quarter: usize, _: usize) -> __m512 {
        let quarter: &[u8; 16] = &line.as_chunks().0[quarter];
        // The sign is in the upper nine bits; all but one of its copies are shifted out, and that
        // one is masked away.
        intrinsic!({
            let signed =
                _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(quarter.as_ptr().cast())));
            _mm512_cvtph_ps(_mm256_and_si256(signed, _mm256_set1_epi16(0xbfffu16 as i16)))
        })
    }

    #[inline(always)]
    fn load_levels(self, levels: &[f32; 16], line: &[u8; 64], col: usize, part: usize) -> __m512 {
        let (lanes, shift) = (self.load(line, part), 4 * (col as i32 ^ 1));
        // The permutation ignores all but four bits.
        intrinsic!({
            let codes = _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(shift));
            _mm512_permutexvar_ps(codes, _mm512_loadu_ps(levels.as_ptr()))
        })
    }

    #[inline(always)]
    fn to_floats(self, a: __m512i) -> __m512 {
        intrinsic!(_mm512_cvtepi32_ps(a))
    }

    /// As an integer sum, `LIFT + a` is the float of that value; the instruction that subtracts the
    /// lift multiplies too. It saves a conversion on the one port that multiplies floats beside a
    /// matrix unit, for an addition on other ports.
    #[inline(always)]
    fn scaled(self, a: __m512i, scale: __m512, lifted: __m512) -> __m512 {
        intrinsic!({
            let a = _mm512_castsi512_ps(_mm512_add_epi32(a, _mm512_set1_epi32(LIFT.to_bits() as i32)));
            _mm512_fmsub_ps(a, scale, lifted)
        })
    }

    #[inline(always)]
    fn lifted(self, scale: __m512) -> __m512 {
        self.mul(scale, self.splat(LIFT))
    }

    #[inline(always)]
    fn bits_to_floats(self, a: __m512i) -> __m512 {
        intrinsic!(_mm512_castsi512_ps(a))
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
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsic!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn across<F: WeightFormat>() -> usize {
        2
    }

    /// `vpdpbusd` adds four products in 32 bits.
    #[inline(always)]
    fn groups_in_short_sum<F: WeightFormat>() -> usize {
        usize::MAX
    }

    #[inline(always)]
    fn start<F: WeightFormat>(self, neg_sum: i32) -> __m512i {
        // A power of two in every format: a shift costs less than a product.
        let zero = u32::from(F::FACTOR_ZERO);
        let by = if zero == 0 { return self.splat_i(0) } else { zero.trailing_zeros() };
        intrinsic!(_mm512_sll_epi32(_mm512_set1_epi32(neg_sum), _mm_cvtsi32_si128(by as i32)))
    }

    #[inline(always)]
    fn short<F: WeightFormat>(self, sum: __m512i, _: i32) -> __m512i {
        sum
    }

    #[inline(always)]
    fn dot<F: WeightFormat>(self, short: __m512i, w: __m512i, x: __m512i) -> __m512i {
        intrinsic!(_mm512_dpbusd_epi32(short, w, x))
    }

    #[inline(always)]
    fn widen(self, _: __m512i, short: __m512i) -> __m512i {
        short
    }
}
