//! Lookups among 64 bytes, for the vector layers of attention and of matrix products.

use std::arch::x86_64::*;

/// Returns, for 64 bytes, bits 0 and 1 of each code of `below`, and above them those of `above`:
/// code j of either in byte j mod 16 of every 16 bytes, at bit 2·(j / 16).
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(crate) unsafe fn nibbles_in_ymm(below: __m256i, above: __m256i) -> [__m256i; 2] {
    // SAFETY: by the caller's promise.
    unsafe {
        // Nibbles of codes 0 to 31 in the low halves of bytes, of the others in the high halves.
        let below = _mm256_srlv_epi64(below, _mm256_set_epi64x(2, 2, 0, 0));
        let above = _mm256_sllv_epi64(above, _mm256_set_epi64x(0, 0, 2, 2));
        let low_twos = _mm256_set1_epi8(0x33);
        let both = _mm256_or_si256(_mm256_and_si256(low_twos, below), _mm256_andnot_si256(low_twos, above));
        let nibble = _mm256_set1_epi8(15);
        [_mm256_and_si256(both, nibble), _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble)]
    }
}

/// Looks up codes below 16 in four quarters, and returns the byte of quarter `odd + 2 high`, each
/// of which is the highest bit of its byte.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(crate) unsafe fn quarters_in_ymm(
    table: &[u8; 64],
    codes: __m256i,
    odd: __m256i,
    high: __m256i,
) -> __m256i {
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
        let low_half = _mm256_blendv_epi8(in_quarter!(0), in_quarter!(1), odd);
        let high_half = _mm256_blendv_epi8(in_quarter!(2), in_quarter!(3), odd);
        _mm256_blendv_epi8(low_half, high_half, high)
    }
}

/// Looks up codes below 64.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(crate) unsafe fn in_ymm(table: &[u8; 64], codes: __m256i) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe {
        // Bits 4 and 5 of a code, as the highest of their bytes.
        let (odd, high) = (_mm256_slli_epi16::<3>(codes), _mm256_slli_epi16::<2>(codes));
        quarters_in_ymm(table, codes, odd, high)
    }
}

/// Does the work of [`nibbles_in_ymm`].
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
pub(crate) unsafe fn nibbles_in_zmm(below: __m512i, above: __m512i) -> __m512i {
    // SAFETY: by the caller's promise.
    unsafe { _mm512_and_si512(low_nibbles_in_zmm(below, above), _mm512_set1_epi8(15)) }
}

/// Does the same but for the high nibble of each byte, which is arbitrary.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
pub(crate) unsafe fn low_nibbles_in_zmm(below: __m512i, above: __m512i) -> __m512i {
    // SAFETY: by the caller's promise.
    unsafe {
        let below = _mm512_srlv_epi64(below, _mm512_set_epi64(6, 6, 4, 4, 2, 2, 0, 0));
        // Two bits less, so that they end above.
        let above = _mm512_rorv_epi64(above, _mm512_set_epi64(4, 4, 2, 2, 0, 0, 62, 62));
        _mm512_ternarylogic_epi64::<0b1100_1010>(_mm512_set1_epi8(3), below, above)
    }
}

/// Looks up codes below 16 in four quarters, and returns the byte of quarter `odd + 2 high`.
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
pub(crate) unsafe fn quarters_in_zmm(table: &[u8; 64], codes: __m512i, odd: u64, high: u64) -> __m512i {
    let (quarters, _) = table.as_chunks::<16>();
    macro_rules! quarter {
        ($i:literal) => {
            _mm512_broadcast_i32x4(_mm_loadu_si128(quarters[$i].as_ptr().cast()))
        };
    }
    // SAFETY: by the caller's promise; 16 bytes of each quarter are read.
    unsafe {
        let first = _mm512_shuffle_epi8(quarter!(0), codes);
        let second = _mm512_mask_shuffle_epi8(first, odd, quarter!(1), codes);
        let third = _mm512_mask_shuffle_epi8(second, high, quarter!(2), codes);
        _mm512_mask_shuffle_epi8(third, high & odd, quarter!(3), codes)
    }
}

/// Looks up codes below 64.
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
pub(crate) unsafe fn in_zmm(table: &[u8; 64], codes: __m512i) -> __m512i {
    // SAFETY: by the caller's promise.
    unsafe {
        let odd = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(16));
        let high = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(32));
        quarters_in_zmm(table, codes, odd, high)
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
