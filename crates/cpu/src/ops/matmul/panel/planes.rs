//! Writes the codes of 32 columns of a panel to lines and, for single rows, reads them. The table
//! is in [`super`](super).

use kvant_codec::fields::FieldSpec;

use super::Line;
use crate::simd::matmul::format::{BLOCK, GROUPS, PANEL};

/// Returns how many bits of a code are in the low and in the high lines.
const fn split(bits: usize) -> (usize, usize) {
    match bits {
        2 | 3 => (2, bits - 2),
        4..=6 => (4, bits - 4),
        _ => (8, 0),
    }
}

/// Writes the codes of 32 columns of 16 rows, `codes(row)`, to as many lines as they have bits.
pub(super) fn put<'a>(spec: FieldSpec, lines: &mut [Line], codes: impl Fn(usize) -> &'a [u8; BLOCK]) {
    let mut groups = [[0; 64]; GROUPS];
    for row in 0..PANEL {
        for (group, word) in groups.iter_mut().zip(codes(row).as_chunks::<4>().0) {
            group[4 * row..4 * row + 4].copy_from_slice(word);
        }
    }
    if spec.trellis.is_some() {
        return put_pairs(lines, &groups);
    }
    let (low, high) = split(spec.bits);
    let (low_lines, high_lines) = lines.split_at_mut(low);
    put_plane(low_lines, &groups, 0, low);
    if high > 0 {
        put_plane(high_lines, &groups, low, high);
    }
}

/// Writes codes with predecessors: in line t pair t of groups, the second in the low bits, and
/// above it two bits of the fourth pair.
fn put_pairs(lines: &mut [Line], groups: &[[u8; 64]; GROUPS]) {
    let pair = |m: usize, j: usize| groups[2 * m + 1][j] | groups[2 * m][j] << 3;
    for (t, line) in lines.iter_mut().enumerate() {
        *line = Line(std::array::from_fn(|j| pair(t, j) | (pair(3, j) >> (2 * t) & 3) << 6));
    }
}

/// Writes bits `from .. from + width` of every code: `8 / width` groups share a line.
fn put_plane(lines: &mut [Line], groups: &[[u8; 64]; GROUPS], from: usize, width: usize) {
    // Eight codes at a time, for fast model loading: no bit that the mask keeps leaves its byte.
    let mask = u64::from_ne_bytes([0xff >> (8 - width); 8]);
    for (line, groups) in lines.iter_mut().zip(groups.chunks_exact(8 / width)) {
        let mut words = [0; 8];
        for (k, group) in groups.iter().enumerate() {
            for (word, codes) in words.iter_mut().zip(group.as_chunks().0) {
                *word |= (u64::from_ne_bytes(*codes) >> from & mask) << (width * k);
            }
        }
        *line = Line(bytemuck::cast(words));
    }
}

/// Returns the code of one row and column.
pub(super) fn get(spec: FieldSpec, lines: &[Line], row: usize, col: usize) -> u8 {
    let (low, high) = split(spec.bits);
    let (group, j) = (col / 4, 4 * row + col % 4);
    if spec.trellis.is_some() {
        let pair = match group / 2 {
            3 => (0..3).fold(0, |pair, t| pair | lines[t].0[j] >> 6 << (2 * t)),
            m => lines[m].0[j],
        };
        return if group % 2 == 1 { pair & 7 } else { pair >> 3 & 7 };
    }
    let plane = |lines: &[Line], width: usize| {
        let per_line = 8 / width;
        let mask = (0xff >> (8 - width)) as u8;
        lines[group / per_line].0[j] >> (width * (group % per_line)) & mask
    };
    let mut code = plane(&lines[..low], low);
    if high > 0 {
        code |= plane(&lines[low..], high) << low;
    }
    code
}
