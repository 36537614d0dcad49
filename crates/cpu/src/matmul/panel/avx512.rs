//! Kernels for coded panels with AVX-512 VNNI: 16 rows to a register.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use std::arch::x86_64::*;

use kvant_codec::DType;

use super::prefetch::prefetch;
use super::{BLOCK, Format, GROUPS, Line, PANEL, QUAD, Values, split};
use crate::matmul::gemm::{Chunk, FLOAT_TILE, FloatChunk, PAIR, Register, Sums, TILE};
use crate::matmul::quantise::Tile;
use crate::matmul::silu;

/// Registers for the scales of a unit, one per sub-block.
type Scales = [__m512; 16];

#[target_feature(enable = "avx512f")]
#[inline]
fn load(line: &Line) -> __m512i {
    // SAFETY: a `Line` is 64 readable bytes, aligned to 64.
    unsafe { _mm512_load_si512(std::ptr::from_ref(line).cast()) }
}

/// Sixteen f16 of a line, from half `half`.
#[target_feature(enable = "avx512f")]
#[inline]
fn halves(line: &Line, half: usize) -> __m512 {
    let bytes: &[u8; 32] = &line.0.as_chunks().0[half];
    // SAFETY: 32 readable bytes.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) })
}

/// Sixteen bytes of a register of bytes, from quarter `q`, as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn bytes_to_f32(bytes: &[u8; 64], q: usize) -> __m512 {
    let quarter: &[u8; 16] = &bytes.as_chunks().0[q];
    // SAFETY: 16 readable bytes.
    let quarter = unsafe { _mm_loadu_si128(quarter.as_ptr().cast()) };
    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(quarter))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn to_bytes(register: __m512i) -> [u8; 64] {
    let mut line = Line::ZERO;
    // SAFETY: a `Line` is 64 writable bytes, aligned to 64.
    unsafe { _mm512_store_si512(std::ptr::from_mut(&mut line).cast(), register) };
    line.0
}

/// `bits >> shift & mask` in every byte. Bits that cross a byte are masked away.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn field<const SHIFT: u32>(line: __m512i, mask: i8) -> __m512i {
    _mm512_and_si512(_mm512_srli_epi16::<SHIFT>(line), _mm512_set1_epi8(mask))
}

/// `low | (line shifted left by SHIFT) & mask` in every byte.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn join_left<const SHIFT: u32>(low: __m512i, line: __m512i, mask: i8) -> __m512i {
    _mm512_ternarylogic_epi32::<0xf8>(low, _mm512_slli_epi16::<SHIFT>(line), _mm512_set1_epi8(mask))
}

/// `low | (line shifted right by SHIFT) & mask` in every byte.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn join_right<const SHIFT: u32>(low: __m512i, line: __m512i, mask: i8) -> __m512i {
    _mm512_ternarylogic_epi32::<0xf8>(low, _mm512_srli_epi16::<SHIFT>(line), _mm512_set1_epi8(mask))
}

/// What is multiplied of 32 columns, one register per group: codes, or what they stand for in a codebook.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn unpack<F: Format>(lines: &[Line]) -> [__m512i; GROUPS] {
    let mut groups = codes::<F>(lines);
    if let Some(book) = F::BOOK {
        // SAFETY: 16 readable bytes.
        let bytes = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(book.bytes.as_ptr().cast()) });
        for g in 0..GROUPS {
            groups[g] = _mm512_shuffle_epi8(bytes, groups[g]);
        }
    }
    groups
}

/// The codes of 32 columns, one register per group.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn codes<F: Format>(lines: &[Line]) -> [__m512i; GROUPS] {
    let lines = &lines[..F::LAYOUT.block];
    match F::SPEC.bits {
        8 => {
            let mut groups = [_mm512_setzero_si512(); GROUPS];
            for g in 0..GROUPS {
                groups[g] = load(&lines[g]);
            }
            groups
        }
        4 => nibbles(lines),
        5 => {
            let [a, b, c, d, e, f, g, h] = nibbles(lines);
            let high = load(&lines[4]);
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
            let [a, b, c, d, e, f, g, h] = nibbles(lines);
            let (first, second) = (load(&lines[4]), load(&lines[5]));
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
        2 => pairs(lines),
        3 => {
            let [a, b, c, d, e, f, g, h] = pairs(lines);
            let high = load(&lines[2]);
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

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn nibbles(lines: &[Line]) -> [__m512i; GROUPS] {
    let mut groups = [_mm512_setzero_si512(); GROUPS];
    for i in 0..4 {
        let line = load(&lines[i]);
        groups[2 * i] = field::<0>(line, 15);
        groups[2 * i + 1] = field::<4>(line, 15);
    }
    groups
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn pairs(lines: &[Line]) -> [__m512i; GROUPS] {
    let mut groups = [_mm512_setzero_si512(); GROUPS];
    for i in 0..2 {
        let line = load(&lines[i]);
        groups[4 * i] = field::<0>(line, 3);
        groups[4 * i + 1] = field::<2>(line, 3);
        groups[4 * i + 2] = field::<4>(line, 3);
        groups[4 * i + 3] = field::<6>(line, 3);
    }
    groups
}

/// `unit * (byte - offset)` for four times sixteen bytes.
#[target_feature(enable = "avx512f")]
#[inline]
fn products(out: &mut [__m512], bytes: __m512i, unit: __m512, offset: f32) {
    let bytes = to_bytes(bytes);
    for (q, out) in out[..4].iter_mut().enumerate() {
        *out = _mm512_mul_ps(unit, _mm512_sub_ps(bytes_to_f32(&bytes, q), _mm512_set1_ps(offset)));
    }
}

/// The scale of each sub-block of a unit, and what its minimum adds.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn scales<F: Format>(header: &[Line]) -> (Scales, Scales) {
    let header = &header[..F::LAYOUT.header];
    let zero = _mm512_setzero_ps();
    let (mut scales, mut mins) = ([zero; 16], [zero; 16]);
    match F::DTYPE {
        DType::Q2K => {
            let (d, minus_dmin) = (halves(&header[4], 0), _mm512_sub_ps(zero, halves(&header[4], 1)));
            for i in 0..4 {
                let line = load(&header[i]);
                products(&mut scales[4 * i..], field::<0>(line, 15), d, 0.0);
                products(&mut mins[4 * i..], field::<4>(line, 15), minus_dmin, 0.0);
            }
        }
        DType::Q4K | DType::Q5K => {
            let (d, minus_dmin) = (halves(&header[3], 0), _mm512_sub_ps(zero, halves(&header[3], 1)));
            let (sc, sm, top) = (load(&header[0]), load(&header[1]), load(&header[2]));
            products(&mut scales[..4], join_left::<4>(field::<0>(sc, 15), top, 48), d, 0.0);
            products(&mut scales[4..], join_left::<2>(field::<4>(sc, 15), top, 48), d, 0.0);
            products(&mut mins[..4], join_left::<0>(field::<0>(sm, 15), top, 48), minus_dmin, 0.0);
            products(&mut mins[4..], join_right::<2>(field::<4>(sm, 15), top, 48), minus_dmin, 0.0);
        }
        DType::Q3K => {
            let d = halves(&header[3], 0);
            let (a, b, top) = (load(&header[0]), load(&header[1]), load(&header[2]));
            let offset = f32::from(F::SPEC.scale_zero);
            products(&mut scales[..4], join_left::<4>(field::<0>(a, 15), top, 48), d, offset);
            products(&mut scales[4..8], join_left::<2>(field::<4>(a, 15), top, 48), d, offset);
            products(&mut scales[8..12], join_left::<0>(field::<0>(b, 15), top, 48), d, offset);
            products(&mut scales[12..], join_right::<2>(field::<4>(b, 15), top, 48), d, offset);
        }
        DType::Q6K => {
            let d = halves(&header[4], 0);
            for i in 0..4 {
                products(&mut scales[4 * i..], load(&header[i]), d, f32::from(F::SPEC.scale_zero));
            }
        }
        DType::TQ3_1S | DType::TQ4_1S => {
            for i in 0..4 {
                let d = halves(&header[i / 2], i % 2);
                scales[i] = _mm512_mul_ps(d, _mm512_set1_ps(F::D_FACTOR));
            }
        }
        _ => {
            for block in 0..2 {
                scales[block] = halves(&header[0], block);
                if F::SPEC.has_min {
                    mins[block] = halves(&header[1], block);
                }
            }
        }
    }
    (scales, mins)
}

/// What an accumulator starts from: minus the code of zero times the sum of the activations.
#[target_feature(enable = "avx512f")]
#[inline]
fn start<F: Format>(neg_sum: i32) -> __m512i {
    match F::FACTOR_ZERO {
        0 => _mm512_setzero_si512(),
        4 => _mm512_slli_epi32::<2>(_mm512_set1_epi32(neg_sum)),
        8 => _mm512_slli_epi32::<3>(_mm512_set1_epi32(neg_sum)),
        16 => _mm512_slli_epi32::<4>(_mm512_set1_epi32(neg_sum)),
        32 => _mm512_slli_epi32::<5>(_mm512_set1_epi32(neg_sum)),
        128 => _mm512_slli_epi32::<7>(_mm512_set1_epi32(neg_sum)),
        zero => unreachable!("no format has zero at {zero}"),
    }
}

/// Products of one panel with one tile: `sums[t][row]`.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) fn gemv<F: Format, const T: usize>(
    panel: &[Line],
    tile: Tile<'_, T>,
    ahead: usize,
) -> [[f32; PANEL]; T] {
    let layout = F::LAYOUT;
    let subs = BLOCK / F::SPEC.sub_len;
    let blocks_per_unit = layout.unit / BLOCK;
    let mut sums = [_mm512_setzero_ps(); T];
    let n_blocks = tile.codes.len();
    for (u, unit) in panel.chunks(layout.unit_lines(layout.unit)).enumerate() {
        let (header, lines) = unit.split_at(layout.header);
        prefetch(header, ahead);
        let (scales, mins) = scales::<F>(header);
        let first = u * blocks_per_unit;
        for i in 0..blocks_per_unit.min(n_blocks - first) {
            let block = first + i;
            let lines = &lines[i * layout.block..][..layout.block];
            prefetch(lines, ahead);
            let codes = unpack::<F>(lines);
            for t in 0..T {
                let step = _mm512_set1_ps(tile.scales[block][t]);
                for half in 0..subs {
                    let which = if subs == 1 { 2 } else { half };
                    let mut acc = start::<F>(tile.neg_sums[block][which][t]);
                    for g in half * GROUPS / subs..(half + 1) * GROUPS / subs {
                        let x = _mm512_set1_epi32(tile.codes[block][g][t]);
                        acc = _mm512_dpbusd_epi32(acc, codes[g], x);
                    }
                    let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(acc), scales[i * subs + half]);
                    sums[t] = _mm512_fmadd_ps(scaled, step, sums[t]);
                    if F::SPEC.has_min {
                        let weighted = _mm512_set1_ps(tile.weighted[block][which][t]);
                        sums[t] = _mm512_fmadd_ps(mins[i * subs + half], weighted, sums[t]);
                    }
                }
            }
        }
    }
    let mut out = [[0.0; PANEL]; T];
    for t in 0..T {
        out[t] = to_floats(sums[t]);
    }
    out
}

#[target_feature(enable = "avx512f")]
#[inline]
fn to_floats(register: __m512) -> [f32; PANEL] {
    let mut floats = [0.0; PANEL];
    // SAFETY: 16 writable floats.
    unsafe { _mm512_storeu_ps(floats.as_mut_ptr(), register) };
    floats
}

/// Unpacks the blocks `blocks` of panel number `p` of a chunk.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn unpack_chunk<F: Format>(lines: &[Line], n_blocks: usize, p: usize, chunk: &mut Chunk) {
    let layout = F::LAYOUT;
    let subs = BLOCK / F::SPEC.sub_len;
    let blocks_per_unit = layout.unit / BLOCK;
    for (u, unit) in lines.chunks(layout.unit_lines(layout.unit)).enumerate() {
        let (header, lines) = unit.split_at(layout.header);
        let (scales, mins) = scales::<F>(header);
        let first = u * blocks_per_unit;
        for i in 0..blocks_per_unit.min(n_blocks - first) {
            let codes = unpack::<F>(&lines[i * layout.block..]);
            for (g, codes) in codes.into_iter().enumerate() {
                let out = std::ptr::from_mut(&mut chunk.codes[first + i][g][p]);
                // SAFETY: a `Line` is 64 writable bytes, aligned to 64.
                unsafe { _mm512_store_si512(out.cast(), codes) };
            }
            for half in 0..subs {
                chunk.scales[first + i][half][p].0 = to_floats(scales[i * subs + half]);
                if F::SPEC.has_min {
                    chunk.mins[first + i][half][p].0 = to_floats(mins[i * subs + half]);
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn floats(register: &Register) -> __m512 {
    // SAFETY: a `Register` is 16 readable floats, aligned to 64 bytes.
    unsafe { _mm512_load_ps(register.0.as_ptr()) }
}

/// Adds the products of an unpacked chunk of two panels with [`TILE`] rows to `sums`.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) fn multiply<F: Format>(chunk: &Chunk, tile: Tile<'_, TILE>, sums: &mut Sums<TILE>) {
    let subs = BLOCK / F::SPEC.sub_len;
    let mut totals = [[_mm512_setzero_ps(); TILE]; PAIR];
    for p in 0..PAIR {
        for t in 0..TILE {
            totals[p][t] = floats(&sums[p][t]);
        }
    }
    let blocks = chunk.codes.iter().zip(&chunk.scales).zip(&chunk.mins);
    let rows = tile.codes.iter().zip(tile.scales).zip(tile.neg_sums).zip(tile.weighted);
    for (((codes, scales), mins), (((x, steps), neg_sums), weighted)) in blocks.zip(rows) {
        for half in 0..subs {
            let which = if subs == 1 { 2 } else { half };
            let mut acc = [[_mm512_setzero_si512(); TILE]; PAIR];
            for t in 0..TILE {
                let start = start::<F>(neg_sums[which][t]);
                for p in 0..PAIR {
                    acc[p][t] = start;
                }
            }
            for g in half * GROUPS / subs..(half + 1) * GROUPS / subs {
                let mut w = [_mm512_setzero_si512(); PAIR];
                for p in 0..PAIR {
                    w[p] = load(&codes[g][p]);
                }
                for t in 0..TILE {
                    let x = _mm512_set1_epi32(x[g][t]);
                    for p in 0..PAIR {
                        acc[p][t] = _mm512_dpbusd_epi32(acc[p][t], w[p], x);
                    }
                }
            }
            for p in 0..PAIR {
                let scale = floats(&scales[half][p]);
                for t in 0..TILE {
                    let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[p][t]), scale);
                    totals[p][t] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(steps[t]), totals[p][t]);
                }
                if F::SPEC.has_min {
                    let min = floats(&mins[half][p]);
                    for t in 0..TILE {
                        let weighted = _mm512_set1_ps(weighted[which][t]);
                        totals[p][t] = _mm512_fmadd_ps(min, weighted, totals[p][t]);
                    }
                }
            }
        }
    }
    for p in 0..PAIR {
        for t in 0..TILE {
            sums[p][t] = Register(to_floats(totals[p][t]));
        }
    }
}

/// Column `col` of a float panel.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn column<V: Values>(lines: &[Line], col: usize) -> __m512 {
    let line = &lines[col / V::PER_LINE];
    match V::DTYPE {
        DType::F16 => halves(line, col % 2),
        DType::BF16 => {
            let bytes: &[u8; 32] = &line.0.as_chunks().0[col % 2];
            // SAFETY: 32 readable bytes.
            let halves = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
            // A bf16 is the upper half of an f32.
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }
        _ => _mm512_castsi512_ps(load(line)),
    }
}

/// Products of `P` float panels, one after the other, with one tile.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn gemv_floats<V: Values, const P: usize, const T: usize>(
    panels: &[Line],
    x: &[[f32; T]],
    ahead: usize,
) -> [[[f32; PANEL]; T]; P] {
    let mut sums = [[_mm512_setzero_ps(); T]; P];
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
                let w = column::<V>(lines[p], col);
                for t in 0..T {
                    sums[p][t] = _mm512_fmadd_ps(w, _mm512_set1_ps(x[t]), sums[p][t]);
                }
            }
        }
    }
    for (col, x) in (QUAD * quads.len()..).zip(rest) {
        for p in 0..P {
            let w = column::<V>(panels[p], col);
            for t in 0..T {
                sums[p][t] = _mm512_fmadd_ps(w, _mm512_set1_ps(x[t]), sums[p][t]);
            }
        }
    }
    let mut out = [[[0.0; PANEL]; T]; P];
    for p in 0..P {
        for t in 0..T {
            out[p][t] = to_floats(sums[p][t]);
        }
    }
    out
}

/// Widens the columns of a float panel.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn unpack_floats<V: Values>(lines: &[Line], n_cols: usize, p: usize, chunk: &mut FloatChunk) {
    for (col, out) in chunk[..n_cols].iter_mut().enumerate() {
        out[p] = Register(to_floats(column::<V>(lines, col)));
    }
}

/// Adds the products of a chunk of floats with [`FLOAT_TILE`] rows to `sums`.
#[target_feature(enable = "avx512f")]
pub(crate) fn multiply_floats(chunk: &FloatChunk, x: &[[f32; FLOAT_TILE]], sums: &mut Sums<FLOAT_TILE>) {
    let mut totals = [[_mm512_setzero_ps(); FLOAT_TILE]; PAIR];
    for p in 0..PAIR {
        for t in 0..FLOAT_TILE {
            totals[p][t] = floats(&sums[p][t]);
        }
    }
    for (w, x) in chunk.iter().zip(x) {
        let w = [floats(&w[0]), floats(&w[1])];
        for t in 0..FLOAT_TILE {
            let x = _mm512_set1_ps(x[t]);
            for p in 0..PAIR {
                totals[p][t] = _mm512_fmadd_ps(w[p], x, totals[p][t]);
            }
        }
    }
    for p in 0..PAIR {
        for t in 0..FLOAT_TILE {
            sums[p][t] = Register(to_floats(totals[p][t]));
        }
    }
}

/// `u *= silu(g)` for each value.
#[target_feature(enable = "avx512f")]
pub(crate) fn gate(g: &[f32; PANEL], u: &mut [f32; PANEL]) {
    silu::gate(g, u);
}
