//! Lookups among 64 bytes, for the vector layers of attention and of matrix products.

use std::arch::x86_64::*;

/// Looks up codes below 64: four lookups in 16 bytes, of which the upper bits of the codes select
/// one.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(crate) unsafe fn in_ymm(table: &[u8; 64], codes: __m256i) -> __m256i {
    let (quarters, _) = table.as_chunks::<16>();
    // No closure: it would be compiled without the features of its caller unless it is inlined.
    macro_rules! in_quarter {
        ($i:literal) => {
            _mm256_shuffle_epi8(
                _mm256_broadcastsi128_si256(_mm_loadu_si128(quarters[$i].as_ptr().cast())),
                codes,
            )
        };
    }
    // SAFETY: by the caller's promise; 16 bytes of each quarter are read.
    unsafe {
        // Blends select by the highest bit of a byte: here bit 4 of the code, then bit 5.
        let (odd, high) = (_mm256_slli_epi16::<3>(codes), _mm256_slli_epi16::<2>(codes));
        let low_half = _mm256_blendv_epi8(in_quarter!(0), in_quarter!(1), odd);
        let high_half = _mm256_blendv_epi8(in_quarter!(2), in_quarter!(3), odd);
        _mm256_blendv_epi8(low_half, high_half, high)
    }
}

/// Does the work of [`in_ymm`].
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
pub(crate) unsafe fn in_zmm(table: &[u8; 64], codes: __m512i) -> __m512i {
    let (quarters, _) = table.as_chunks::<16>();
    macro_rules! quarter {
        ($i:literal) => {
            _mm512_broadcast_i32x4(_mm_loadu_si128(quarters[$i].as_ptr().cast()))
        };
    }
    // SAFETY: by the caller's promise; 16 bytes of each quarter are read.
    unsafe {
        let odd = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(16));
        let high = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(32));
        let first = _mm512_shuffle_epi8(quarter!(0), codes);
        let second = _mm512_mask_shuffle_epi8(first, odd, quarter!(1), codes);
        let third = _mm512_mask_shuffle_epi8(second, high, quarter!(2), codes);
        _mm512_mask_shuffle_epi8(third, high & odd, quarter!(3), codes)
    }
}

/// Looks up the lower six bits of each byte.
///
/// # Safety
/// The CPU has AVX-512 VBMI.
#[inline(always)]
pub(crate) unsafe fn in_zmm_with_vbmi(table: &[u8; 64], codes: __m512i) -> __m512i {
    // SAFETY: by the caller's promise; the table has the 64 bytes that are read.
    unsafe { _mm512_permutexvar_epi8(codes, _mm512_loadu_si512(table.as_ptr().cast())) }
}
