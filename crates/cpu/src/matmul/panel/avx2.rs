//! Kernels for panels with AVX2: eight rows to a register, so every line is read in two halves.
//!
//! `vpmaddubsw` multiplies unsigned codes with signed activations and adds neighbours to 16 bits, *saturating*. No sum
//! reaches that, since an activation is at most 127:
//!
//! | bits | largest code | one pair of products | groups added before widening to 32 bits | largest sum |
//! |---|---|---|---|---|
//! | 2, 3, 4 | 15 | 2 · 15 · 127 = 3,810 | 8 | 30,480 |
//! | 5 | 31 | 7,874 | 4 | 31,496 |
//! | 6 | 63 | 16,002 | 2 | 32,004 |
//! | 8 | 128 | 32,512 | 1 | 32,512 |
//!
//! With 8 bits the code is taken as a signed number, its sign moved to the activation and its magnitude (at most 128)
//! multiplied, so it needs no zero taken back. The limit is 32,767.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use std::arch::x86_64::*;

use kvant_codec::DType;

use super::prefetch::prefetch;
use super::{BLOCK, Format, GROUPS, Line, PANEL, QUAD, Values, split};
use crate::matmul::gemm::{Chunk, FLOAT_TILE, FloatChunk, PAIR, Register, Sums, TILE};
use crate::matmul::quantise::Tile;
use crate::matmul::silu;

/// Halves of a line, and of a panel's rows.
pub(super) const HALVES: usize = 2;
/// Rows of a half.
const LANES: usize = PANEL / HALVES;

/// The scales of a unit, for each sub-block and half.
pub(super) type Scales = [[__m256; HALVES]; 16];

/// Groups whose products may be added in 16 bits; the table above.
const fn groups_in_16_bits(bits: usize) -> usize {
    match bits {
        2..=4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

/// Half `h` of a line.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn load(line: &Line, h: usize) -> __m256i {
    let half: &[u8; 32] = &line.0.as_chunks().0[h];
    // SAFETY: 32 readable bytes.
    unsafe { _mm256_loadu_si256(half.as_ptr().cast()) }
}

/// Eighth `i` of a line of 16-bit values: eight of them.
#[target_feature(enable = "avx2")]
#[inline]
fn load_eight_halves(line: &Line, i: usize) -> __m128i {
    let eight: &[u8; 16] = &line.0.as_chunks().0[i];
    // SAFETY: 16 readable bytes.
    unsafe { _mm_loadu_si128(eight.as_ptr().cast()) }
}

/// The f16 of sixteen rows that start at half `which` of the line: those of row half `h`.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn halves(line: &Line, which: usize, h: usize) -> __m256 {
    _mm256_cvtph_ps(load_eight_halves(line, 2 * which + h))
}

#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn floats(register: &Register, h: usize) -> __m256 {
    let eight: &[f32; LANES] = &register.0.as_chunks().0[h];
    // SAFETY: 8 readable floats.
    unsafe { _mm256_loadu_ps(eight.as_ptr()) }
}

#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn put_floats(out: &mut [f32; PANEL], h: usize, values: __m256) {
    let eight: &mut [f32; LANES] = &mut out.as_chunks_mut().0[h];
    // SAFETY: 8 writable floats.
    unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), values) };
}

/// `bits >> shift & mask` in every byte. Bits that cross a byte are masked away.
#[target_feature(enable = "avx2")]
#[inline]
fn field<const SHIFT: i32>(line: __m256i, mask: i8) -> __m256i {
    _mm256_and_si256(_mm256_srli_epi16::<SHIFT>(line), _mm256_set1_epi8(mask))
}

/// `low | (line shifted left by SHIFT) & mask` in every byte.
#[target_feature(enable = "avx2")]
#[inline]
fn join_left<const SHIFT: i32>(low: __m256i, line: __m256i, mask: i8) -> __m256i {
    _mm256_or_si256(low, _mm256_and_si256(_mm256_slli_epi16::<SHIFT>(line), _mm256_set1_epi8(mask)))
}

/// `low | (line shifted right by SHIFT) & mask` in every byte.
#[target_feature(enable = "avx2")]
#[inline]
fn join_right<const SHIFT: i32>(low: __m256i, line: __m256i, mask: i8) -> __m256i {
    _mm256_or_si256(low, field::<SHIFT>(line, mask))
}

/// What is multiplied of 32 columns and eight rows, one register per group: codes, or what they stand for in a codebook.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn unpack<F: Format>(lines: &[Line], half: usize) -> [__m256i; GROUPS] {
    let mut groups = codes::<F>(lines, half);
    if let Some(book) = F::BOOK {
        // SAFETY: 16 readable bytes.
        let bytes = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(book.bytes.as_ptr().cast()) });
        for g in 0..GROUPS {
            groups[g] = _mm256_shuffle_epi8(bytes, groups[g]);
        }
    }
    groups
}

/// The codes of 32 columns and eight rows, one register per group.
#[target_feature(enable = "avx2")]
#[inline]
fn codes<F: Format>(lines: &[Line], half: usize) -> [__m256i; GROUPS] {
    let lines = &lines[..F::LAYOUT.block];
    match F::SPEC.bits {
        8 => {
            let mut groups = [_mm256_setzero_si256(); GROUPS];
            for g in 0..GROUPS {
                groups[g] = load(&lines[g], half);
            }
            groups
        }
        4 => nibbles(lines, half),
        5 => {
            let [a, b, c, d, e, f, g, h] = nibbles(lines, half);
            let high = load(&lines[4], half);
            [
                join_left::<4>(a, high, 16),
                join_left::<3>(b, high, 16),
                join_left::<2>(c, high, 16),
                join_left::<1>(d, high, 16),
                join_left::<0>(e, high, 16),
                join_right::<1>(f, high, 16),
                join_right::<2>(g, high, 16),
                join_right::<3>(h, high, 16),
            ]
        }
        6 => {
            let [a, b, c, d, e, f, g, h] = nibbles(lines, half);
            let (first, second) = (load(&lines[4], half), load(&lines[5], half));
            [
                join_left::<4>(a, first, 48),
                join_left::<2>(b, first, 48),
                join_left::<0>(c, first, 48),
                join_right::<2>(d, first, 48),
                join_left::<4>(e, second, 48),
                join_left::<2>(f, second, 48),
                join_left::<0>(g, second, 48),
                join_right::<2>(h, second, 48),
            ]
        }
        2 => pairs(lines, half),
        3 => {
            let [a, b, c, d, e, f, g, h] = pairs(lines, half);
            let high = load(&lines[2], half);
            [
                join_left::<2>(a, high, 4),
                join_left::<1>(b, high, 4),
                join_left::<0>(c, high, 4),
                join_right::<1>(d, high, 4),
                join_right::<2>(e, high, 4),
                join_right::<3>(f, high, 4),
                join_right::<4>(g, high, 4),
                join_right::<5>(h, high, 4),
            ]
        }
        bits => unreachable!("no codes of {bits} bits"),
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn nibbles(lines: &[Line], half: usize) -> [__m256i; GROUPS] {
    let mut groups = [_mm256_setzero_si256(); GROUPS];
    for i in 0..4 {
        let line = load(&lines[i], half);
        groups[2 * i] = field::<0>(line, 15);
        groups[2 * i + 1] = field::<4>(line, 15);
    }
    groups
}

#[target_feature(enable = "avx2")]
#[inline]
fn pairs(lines: &[Line], half: usize) -> [__m256i; GROUPS] {
    let mut groups = [_mm256_setzero_si256(); GROUPS];
    for i in 0..2 {
        let line = load(&lines[i], half);
        groups[4 * i] = field::<0>(line, 3);
        groups[4 * i + 1] = field::<2>(line, 3);
        groups[4 * i + 2] = field::<4>(line, 3);
        groups[4 * i + 3] = field::<6>(line, 3);
    }
    groups
}

/// `unit * (byte - offset)` for the sub-blocks of two sets of bytes: of rows 0..8 and 8..16 of two sub-blocks each.
#[target_feature(enable = "avx2")]
#[inline]
fn products(out: &mut [[__m256; HALVES]], bytes: [__m256i; 2], unit: [__m256; HALVES], offset: f32) {
    for (i, register) in bytes.into_iter().enumerate() {
        let sixteens = [_mm256_castsi256_si128(register), _mm256_extracti128_si256::<1>(register)];
        for (s, sixteen) in sixteens.into_iter().enumerate() {
            let eights = [sixteen, _mm_unpackhi_epi64(sixteen, sixteen)];
            for h in 0..HALVES {
                let value = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eights[h]));
                let value = _mm256_sub_ps(value, _mm256_set1_ps(offset));
                out[2 * i + s][h] = _mm256_mul_ps(unit[h], value);
            }
        }
    }
}

/// The scale of each sub-block of a unit, and what its minimum adds.
#[target_feature(enable = "avx2,f16c")]
#[inline]
pub(super) fn scales<F: Format>(header: &[Line]) -> (Scales, Scales) {
    let header = &header[..F::LAYOUT.header];
    let zero = _mm256_setzero_ps();
    let (mut scales, mut mins) = ([[zero; HALVES]; 16], [[zero; HALVES]; 16]);
    if F::BOOK.is_some() {
        for (i, h) in (0..4).flat_map(|i| [(i, 0), (i, 1)]) {
            let d = halves(&header[i / 2], i % 2, h);
            scales[i][h] = _mm256_mul_ps(d, _mm256_set1_ps(F::D_FACTOR));
        }
        return (scales, mins);
    }
    if F::SPEC.len == BLOCK {
        for block in 0..2 {
            for h in 0..HALVES {
                scales[block][h] = halves(&header[0], block, h);
                if F::SPEC.has_min {
                    mins[block][h] = halves(&header[1], block, h);
                }
            }
        }
        return (scales, mins);
    }
    let last = &header[F::LAYOUT.header - 1];
    let d = [halves(last, 0, 0), halves(last, 0, 1)];
    let minus_dmin = [_mm256_sub_ps(zero, halves(last, 1, 0)), _mm256_sub_ps(zero, halves(last, 1, 1))];
    let offset = f32::from(F::SPEC.scale_zero);
    let line = |i: usize| [load(&header[i], 0), load(&header[i], 1)];
    match F::DTYPE {
        DType::Q2K => {
            for i in 0..4 {
                let [a, b] = line(i);
                products(&mut scales[4 * i..], [field::<0>(a, 15), field::<0>(b, 15)], d, 0.0);
                products(&mut mins[4 * i..], [field::<4>(a, 15), field::<4>(b, 15)], minus_dmin, 0.0);
            }
        }
        DType::Q4K | DType::Q5K => {
            let (sc, sm, top) = (line(0), line(1), line(2));
            let zero = _mm256_setzero_si256();
            let mut fields = [[zero; 2]; 4];
            for i in 0..2 {
                fields[0][i] = join_left::<4>(field::<0>(sc[i], 15), top[i], 48);
                fields[1][i] = join_left::<2>(field::<4>(sc[i], 15), top[i], 48);
                fields[2][i] = join_left::<0>(field::<0>(sm[i], 15), top[i], 48);
                fields[3][i] = join_right::<2>(field::<4>(sm[i], 15), top[i], 48);
            }
            products(&mut scales[..4], fields[0], d, 0.0);
            products(&mut scales[4..], fields[1], d, 0.0);
            products(&mut mins[..4], fields[2], minus_dmin, 0.0);
            products(&mut mins[4..], fields[3], minus_dmin, 0.0);
        }
        DType::Q3K => {
            let (a, b, top) = (line(0), line(1), line(2));
            let mut fields = [[_mm256_setzero_si256(); 2]; 4];
            for i in 0..2 {
                fields[0][i] = join_left::<4>(field::<0>(a[i], 15), top[i], 48);
                fields[1][i] = join_left::<2>(field::<4>(a[i], 15), top[i], 48);
                fields[2][i] = join_left::<0>(field::<0>(b[i], 15), top[i], 48);
                fields[3][i] = join_right::<2>(field::<4>(b[i], 15), top[i], 48);
            }
            for (i, fields) in fields.into_iter().enumerate() {
                products(&mut scales[4 * i..], fields, d, offset);
            }
        }
        _ => {
            for i in 0..4 {
                products(&mut scales[4 * i..], line(i), d, offset);
            }
        }
    }
    (scales, mins)
}

/// Products of one group of codes with one word of activations, neighbours added, in 16 bits.
#[target_feature(enable = "avx2")]
#[inline]
fn dot<F: Format>(codes: __m256i, x: __m256i) -> __m256i {
    if F::FACTOR_BITS == 8 {
        // The stored code is the signed one plus 128: its top bit flipped.
        let signed = _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN));
        _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed))
    } else {
        _mm256_maddubs_epi16(codes, x)
    }
}

/// Adds neighbouring 16-bit sums to 32-bit ones.
#[target_feature(enable = "avx2")]
#[inline]
fn widen(acc: __m256i, sums: __m256i) -> __m256i {
    _mm256_add_epi32(acc, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)))
}

/// What an accumulator starts from: minus the code of zero times the sum of the activations.
#[target_feature(enable = "avx2")]
#[inline]
fn start<F: Format>(neg_sum: i32) -> __m256i {
    if F::FACTOR_BITS == 8 {
        _mm256_setzero_si256()
    } else {
        _mm256_set1_epi32(neg_sum * i32::from(F::FACTOR_ZERO))
    }
}

/// Products of one coded panel with one tile.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn gemv<F: Format, const T: usize>(
    panel: &[Line],
    tile: Tile<'_, T>,
    ahead: usize,
) -> [[f32; PANEL]; T] {
    let layout = F::LAYOUT;
    let subs = BLOCK / F::SPEC.sub_len;
    let step = groups_in_16_bits(F::FACTOR_BITS).min(GROUPS / subs);
    let blocks_per_unit = layout.unit / BLOCK;
    let n_blocks = tile.codes.len();
    let mut sums = [[_mm256_setzero_ps(); HALVES]; T];
    for (u, unit) in panel.chunks(layout.unit_lines(layout.unit)).enumerate() {
        let (header, lines) = unit.split_at(layout.header);
        prefetch(header, ahead);
        let (scales, mins) = scales::<F>(header);
        let first = u * blocks_per_unit;
        for i in 0..blocks_per_unit.min(n_blocks - first) {
            let block = first + i;
            let lines = &lines[i * layout.block..][..layout.block];
            prefetch(lines, ahead);
            for h in 0..HALVES {
                let codes = unpack::<F>(lines, h);
                for t in 0..T {
                    for sub in 0..subs {
                        let which = if subs == 1 { 2 } else { sub };
                        let mut acc = start::<F>(tile.neg_sums[block][which][t]);
                        let groups = sub * GROUPS / subs..(sub + 1) * GROUPS / subs;
                        for from in groups.step_by(step) {
                            let mut sums = _mm256_setzero_si256();
                            for g in from..from + step {
                                let x = _mm256_set1_epi32(tile.codes[block][g][t]);
                                sums = _mm256_add_epi16(sums, dot::<F>(codes[g], x));
                            }
                            acc = widen(acc, sums);
                        }
                        let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(acc), scales[i * subs + sub][h]);
                        let one_step = _mm256_set1_ps(tile.scales[block][t]);
                        sums[t][h] = _mm256_fmadd_ps(scaled, one_step, sums[t][h]);
                        if F::SPEC.has_min {
                            let weighted = _mm256_set1_ps(tile.weighted[block][which][t]);
                            sums[t][h] = _mm256_fmadd_ps(mins[i * subs + sub][h], weighted, sums[t][h]);
                        }
                    }
                }
            }
        }
    }
    let mut out = [[0.0; PANEL]; T];
    for t in 0..T {
        for h in 0..HALVES {
            put_floats(&mut out[t], h, sums[t][h]);
        }
    }
    out
}

/// Unpacks `n_blocks` blocks as panel `p` of a chunk.
#[target_feature(enable = "avx2,f16c")]
pub(crate) fn unpack_chunk<F: Format>(lines: &[Line], n_blocks: usize, p: usize, chunk: &mut Chunk) {
    let layout = F::LAYOUT;
    let subs = BLOCK / F::SPEC.sub_len;
    let blocks_per_unit = layout.unit / BLOCK;
    for (u, unit) in lines.chunks(layout.unit_lines(layout.unit)).enumerate() {
        let (header, lines) = unit.split_at(layout.header);
        let (scales, mins) = scales::<F>(header);
        let first = u * blocks_per_unit;
        for i in 0..blocks_per_unit.min(n_blocks - first) {
            for h in 0..HALVES {
                let codes = unpack::<F>(&lines[i * layout.block..], h);
                for g in 0..GROUPS {
                    let out: &mut [u8; 32] = &mut chunk.codes[first + i][g][p].0.as_chunks_mut().0[h];
                    // SAFETY: 32 writable bytes.
                    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), codes[g]) };
                }
                for sub in 0..subs {
                    put_floats(&mut chunk.scales[first + i][sub][p].0, h, scales[i * subs + sub][h]);
                    if F::SPEC.has_min {
                        put_floats(&mut chunk.mins[first + i][sub][p].0, h, mins[i * subs + sub][h]);
                    }
                }
            }
        }
    }
}

/// Adds the products of an unpacked chunk of two panels with [`TILE`] rows to `sums`.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn multiply<F: Format>(chunk: &Chunk, tile: Tile<'_, TILE>, sums: &mut Sums<TILE>) {
    let subs = BLOCK / F::SPEC.sub_len;
    let step = groups_in_16_bits(F::FACTOR_BITS).min(GROUPS / subs);
    for block in 0..tile.codes.len() {
        let (x, steps) = (&tile.codes[block], &tile.scales[block]);
        for (sub, p, h) in (0..subs * PAIR * HALVES).map(|i| (i / 4, i / 2 % 2, i % 2)) {
            let which = if subs == 1 { 2 } else { sub };
            let mut acc = [_mm256_setzero_si256(); TILE];
            for t in 0..TILE {
                acc[t] = start::<F>(tile.neg_sums[block][which][t]);
            }
            for from in (sub * GROUPS / subs..(sub + 1) * GROUPS / subs).step_by(step) {
                let mut products = [_mm256_setzero_si256(); TILE];
                for g in from..from + step {
                    let w = load(&chunk.codes[block][g][p], h);
                    for t in 0..TILE {
                        let x = _mm256_set1_epi32(x[g][t]);
                        products[t] = _mm256_add_epi16(products[t], dot::<F>(w, x));
                    }
                }
                for t in 0..TILE {
                    acc[t] = widen(acc[t], products[t]);
                }
            }
            let scale = floats(&chunk.scales[block][sub][p], h);
            for t in 0..TILE {
                let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[t]), scale);
                let mut total = floats(&sums[p][t], h);
                total = _mm256_fmadd_ps(scaled, _mm256_set1_ps(steps[t]), total);
                if F::SPEC.has_min {
                    let min = floats(&chunk.mins[block][sub][p], h);
                    let weighted = _mm256_set1_ps(tile.weighted[block][which][t]);
                    total = _mm256_fmadd_ps(min, weighted, total);
                }
                put_floats(&mut sums[p][t].0, h, total);
            }
        }
    }
}

/// Column `col` of a float panel, rows of half `h`.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn column<V: Values>(lines: &[Line], col: usize, h: usize) -> __m256 {
    let line = &lines[col / V::PER_LINE];
    match V::DTYPE {
        DType::F16 => halves(line, col % 2, h),
        DType::BF16 => {
            let halves = _mm256_cvtepu16_epi32(load_eight_halves(line, 2 * (col % 2) + h));
            // A bf16 is the upper half of an f32.
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
        }
        _ => _mm256_castsi256_ps(load(line, h)),
    }
}

/// Products of `P` float panels, one after the other, with one tile.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn gemv_floats<V: Values, const P: usize, const T: usize>(
    panels: &[Line],
    x: &[[f32; T]],
    ahead: usize,
) -> [[[f32; PANEL]; T]; P] {
    let mut sums = [[[_mm256_setzero_ps(); HALVES]; T]; P];
    let panels: [&[Line]; P] = split(panels);
    let (quads, rest) = x.as_chunks::<QUAD>();
    for (i, quad) in quads.iter().enumerate() {
        let n_lines = QUAD / V::PER_LINE;
        let mut lines = [&panels[0][..n_lines]; P];
        for p in 0..P {
            lines[p] = &panels[p][i * n_lines..][..n_lines];
            prefetch(lines[p], ahead);
        }
        for (col, x) in quad.iter().enumerate() {
            for p in 0..P {
                let w = [column::<V>(lines[p], col, 0), column::<V>(lines[p], col, 1)];
                for t in 0..T {
                    let x = _mm256_set1_ps(x[t]);
                    for h in 0..HALVES {
                        sums[p][t][h] = _mm256_fmadd_ps(w[h], x, sums[p][t][h]);
                    }
                }
            }
        }
    }
    for (col, x) in (QUAD * quads.len()..).zip(rest) {
        for p in 0..P {
            let w = [column::<V>(panels[p], col, 0), column::<V>(panels[p], col, 1)];
            for t in 0..T {
                let x = _mm256_set1_ps(x[t]);
                for h in 0..HALVES {
                    sums[p][t][h] = _mm256_fmadd_ps(w[h], x, sums[p][t][h]);
                }
            }
        }
    }
    let mut out = [[[0.0; PANEL]; T]; P];
    for p in 0..P {
        for t in 0..T {
            for h in 0..HALVES {
                put_floats(&mut out[p][t], h, sums[p][t][h]);
            }
        }
    }
    out
}

/// Widens the columns of a float panel.
#[target_feature(enable = "avx2,f16c")]
pub(crate) fn unpack_floats<V: Values>(lines: &[Line], n_cols: usize, p: usize, chunk: &mut FloatChunk) {
    for (col, out) in chunk[..n_cols].iter_mut().enumerate() {
        for h in 0..HALVES {
            put_floats(&mut out[p].0, h, column::<V>(lines, col, h));
        }
    }
}

/// Adds the products of a chunk of floats with [`FLOAT_TILE`] rows to `sums`, a panel and half the rows at a time.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn multiply_floats(chunk: &FloatChunk, x: &[[f32; FLOAT_TILE]], sums: &mut Sums<FLOAT_TILE>) {
    const ROWS: usize = FLOAT_TILE / 2;
    for (p, first) in [(0, 0), (0, ROWS), (1, 0), (1, ROWS)] {
        let mut totals = [[_mm256_setzero_ps(); ROWS]; HALVES];
        for h in 0..HALVES {
            for t in 0..ROWS {
                totals[h][t] = floats(&sums[p][first + t], h);
            }
        }
        for (w, x) in chunk.iter().zip(x) {
            let w = [floats(&w[p], 0), floats(&w[p], 1)];
            for t in 0..ROWS {
                let x = _mm256_set1_ps(x[first + t]);
                for h in 0..HALVES {
                    totals[h][t] = _mm256_fmadd_ps(w[h], x, totals[h][t]);
                }
            }
        }
        for h in 0..HALVES {
            for t in 0..ROWS {
                put_floats(&mut sums[p][first + t].0, h, totals[h][t]);
            }
        }
    }
}

/// `u *= silu(g)` for each value.
#[target_feature(enable = "avx2")]
pub(crate) fn gate(g: &[f32; PANEL], u: &mut [f32; PANEL]) {
    silu::gate(g, u);
}
