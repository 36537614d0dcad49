//! Quantization with AVX2: a block is four registers.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use std::arch::x86_64::*;

use super::source::Source;
use super::tile::{TileMut, rotate, steps};
use crate::simd::matmul::format::{BLOCK, GROUPS};
use crate::simd::tokens::avx2;

avx2! {
    #[inline]
    fn load(block: &[f32; BLOCK], i: usize) -> __m256 {
        let eight: &[f32; 8] = &block.as_chunks().0[i];
        // SAFETY: 8 readable floats.
        unsafe { _mm256_loadu_ps(eight.as_ptr()) }
    }

    /// Returns the sum of eight lanes.
    #[inline]
    fn sum(v: __m256i) -> i32 {
        let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0x4e>(v));
        _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<0xb1>(v)))
    }

    /// Returns the sum of the first two bytes of all words in the lower half of a word, and of
    /// their last two in its upper half.
    #[inline]
    fn sum_pairs(v: __m128i) -> i32 {
        let pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), v);
        let pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32::<0x4e>(pairs));
        _mm_cvtsi128_si32(_mm_add_epi16(pairs, _mm_shuffle_epi32::<0xb1>(pairs)))
    }

    /// Returns the largest of eight lanes, unsigned.
    #[inline]
    fn max(v: __m256i) -> u32 {
        let v = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = _mm_max_epu32(v, _mm_shuffle_epi32::<0x4e>(v));
        _mm_cvtsi128_si32(_mm_max_epu32(v, _mm_shuffle_epi32::<0xb1>(v))) as u32
    }

    #[inline]
    fn rotated(registers: [__m256; 4]) -> [__m256; 4] {
        let mut values = [0.0; BLOCK];
        for (eight, register) in values.as_chunks_mut::<8>().0.iter_mut().zip(registers) {
            // SAFETY: 8 writable floats.
            unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), register) };
        }
        rotate(&mut values);
        std::array::from_fn(|i| load(&values, i))
    }

    /// Does the work of [`super::quantize_tile`]; `IN_PAIRS` selects sums of pairs.
    pub(super) fn quantize_tile<const T: usize, const IN_PAIRS: bool>(
        source: Source<'_>,
        mut tile: TileMut<'_, T>,
    ) {
        let magnitude = _mm256_set1_epi32(0x7fff_ffff);
        for t in 0..T {
            let (row, norm) = source.row(t);
            if row.is_empty() {
                tile.clear(t);
            }
            for (b, block) in row.iter().enumerate() {
                let mut values = [_mm256_setzero_ps(); 4];
                for i in 0..4 {
                    values[i] = load(block, i);
                    if let Some((weight, factor)) = norm {
                        let scaled = _mm256_mul_ps(values[i], _mm256_set1_ps(factor));
                        values[i] = _mm256_mul_ps(scaled, load(&weight[b], i));
                    }
                }
                if source.rotates {
                    values = rotated(values);
                }
                let mut largest = _mm256_setzero_si256();
                for i in 0..4 {
                    let bits = _mm256_and_si256(_mm256_castps_si256(values[i]), magnitude);
                    largest = _mm256_max_epu32(largest, bits);
                }
                let (inverse, scale) = steps(f32::from_bits(max(largest)));
                if scale.is_nan() {
                    tile.put(b, t, &[0; GROUPS], scale, [0; 2]);
                    continue;
                }
                let mut q = [_mm256_setzero_si256(); 4];
                for i in 0..4 {
                    // The nearest integer, ties to even: the rounding mode of Rust programs.
                    q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], _mm256_set1_ps(inverse)));
                }
                let halves = [sum(_mm256_add_epi32(q[0], q[1])), sum(_mm256_add_epi32(q[2], q[3]))];
                // Packing works within 128-bit halves, so groups come out as 0 2 4 6 1 3 5 7.
                let bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
                let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
                let mut codes = [0; GROUPS];
                // SAFETY: 32 writable bytes.
                unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), bytes) };
                tile.put(b, t, &codes, scale, halves);
                if IN_PAIRS {
                    let first = sum_pairs(_mm256_castsi256_si128(bytes));
                    tile.put_pairs(b, t, [first, sum_pairs(_mm256_extracti128_si256::<1>(bytes))]);
                }
            }
        }
    }
}
