//! Quantization with AVX-512: a block is two registers.

use std::arch::x86_64::*;

use super::source::Source;
use super::tile::{TileMut, rotate, steps};
use crate::simd::matmul::format::{BLOCK, GROUPS};
use crate::simd::tokens::avx512;

avx512! {
    #[inline]
    fn load(block: &[f32; BLOCK]) -> [__m512; 2] {
        // SAFETY: 32 readable floats.
        unsafe { [_mm512_loadu_ps(block.as_ptr()), _mm512_loadu_ps(block.as_ptr().add(16))] }
    }

    #[inline]
    fn rotated(registers: [__m512; 2]) -> [__m512; 2] {
        let mut values = [0.0; BLOCK];
        for (half, register) in values.as_chunks_mut::<16>().0.iter_mut().zip(registers) {
            // SAFETY: 16 writable floats.
            unsafe { _mm512_storeu_ps(half.as_mut_ptr(), register) };
        }
        rotate(&mut values);
        load(&values)
    }

    /// Does the work of [`super::quantize_tile`].
    pub(super) fn quantize_tile<const T: usize>(source: Source<'_>, mut tile: TileMut<'_, T>) {
        let magnitude = _mm512_set1_epi32(0x7fff_ffff);
        for t in 0..T {
            let (row, norm) = source.row(t);
            if row.is_empty() {
                tile.clear(t);
            }
            for (b, block) in row.iter().enumerate() {
                let [mut low, mut high] = load(block);
                if let Some((weight, factor)) = norm {
                    let (weight, factor) = (load(&weight[b]), _mm512_set1_ps(factor));
                    low = _mm512_mul_ps(_mm512_mul_ps(low, factor), weight[0]);
                    high = _mm512_mul_ps(_mm512_mul_ps(high, factor), weight[1]);
                }
                if source.rotates {
                    [low, high] = rotated([low, high]);
                }
                let magnitudes = _mm512_max_epu32(
                    _mm512_and_si512(_mm512_castps_si512(low), magnitude),
                    _mm512_and_si512(_mm512_castps_si512(high), magnitude),
                );
                let max = _mm512_reduce_max_epu32(magnitudes);
                let (inverse, scale) = steps(f32::from_bits(max));
                if scale.is_nan() {
                    tile.put(b, t, &[0; GROUPS], scale, [0; 2]);
                    continue;
                }
                let inverse = _mm512_set1_ps(inverse);
                // The nearest integer, ties to even: the rounding mode of Rust programs.
                let low = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
                let high = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
                let bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low));
                // Four bytes to a sum, then two sums to one, twice: the halves' sums end in the
                // first of each four.
                let sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
                let sums = _mm256_hadd_epi32(sums, sums);
                let sums = _mm256_hadd_epi32(sums, sums);
                let halves = [_mm256_extract_epi32::<0>(sums), _mm256_extract_epi32::<4>(sums)];
                let mut codes = [0; GROUPS];
                // SAFETY: 32 writable bytes.
                unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), bytes) };
                tile.put(b, t, &codes, scale, halves);
            }
        }
    }
}
