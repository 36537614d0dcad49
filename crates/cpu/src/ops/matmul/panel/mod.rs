//! Weights packed for the instruction that reads them: panels of 16 rows.
//!
//! A dot product of weight rows with an activation row needs 16 rows side by side, so that four
//! weights of each fill a 32-bit lane and one byte dot product (`vpdpbusd`) with four activations,
//! broadcast, adds to 16 sums at once: no horizontal sum, and one load of the weights serves any
//! number of activation rows.
//!
//! # Layout
//!
//! A matrix `[n_out, n_in]` is divided into panels of 16 rows (the last one padded with zero
//! scales), a panel into units of columns. Everything is a whole number of 64-byte lines, read
//! strictly in order:
//!
//! ```text
//! unit     header lines, then `bits` lines per 32 columns     64 columns, or a longer block
//! ```
//!
//! **Codes.** 32 columns are 8 groups of 4; code j of a group belongs to row j / 4 and column j mod
//! 4 of the group, and is byte j of the register that the kernel loads. Lines hold several groups
//! side by side in each byte:
//!
//! | bits | low lines | high lines |
//! |---|---|---|
//! | 8 | 8: line g = group g | |
//! | 4 | 4: line i = group 2i, low nibble; 2i + 1, high nibble | |
//! | 2 | 2: line i, bits 2k = group 4i + k | |
//! | 5, 6 | as 4 bits | 5: one line, bit g = fifth bit of group g; 6: as 2 bits |
//! | 3 | as 2 bits | one line, bit g = third bit of group g |
//! | 3, tq3t | 3: line t, group 2t + 1, then 2t; upper two bits = a third of groups 7 and 6 | |
//!
//! **Headers.** `h[i]` is the i-th f16 or byte of the line, `row` 0..16, `s` a sub-block.
//!
//! | format | header lines |
//! |---|---|
//! | q8_0 q4_0 q5_0 | d: f16 `[16·block + row]`, two blocks |
//! | q4_1 q5_1 | d, then m in the same order |
//! | q2_K | four lines of bytes `[16·s + row]` = sc, sm << 4; then a line (1) |
//! | q4_K q5_K | low nibbles of sc (2); the same of sm; upper pairs (3); d and dmin |
//! | q3_K iq1 iq2 | low nibbles of sc 0..8, of sc 8..16; upper pairs: bits 2k = sc 4k + s; d |
//! | q6_K | four lines of bytes sc; d |
//! | iq4_nl | as q4_0 |
//! | iq4_xs iq3 iq3x | two lines of bytes sc; d |
//! | mxfp4 | a line of bytes `[16·block + row]`: E8M0, four blocks |
//! | nvfp4 | a line of bytes `[16·s + row]`: E4M3 |
//! | nvfp4_g256 | four such lines; f: f32 `[row]` |
//! | q4_g128 | d: f16 `[row]`; zero: byte `[32 + row]` |
//! | tq3t | d: f16 `[16·block + row]`, two blocks |
//! | tq3_1s tq4_1s | a line per block, two blocks: f16 `[16·half + row]` = d of that half |
//!
//! (1) d and dmin: f16 `[row]`, `[16 + row]`. (2) Byte `[16·s + row]` for s < 4, high half for
//! s + 4. (3) Bits 0: sc s, 2: sc s + 4, 4: sm s, 6: sm s + 4.
//!
//! Codes of iq1, iq2 and from iq4_nl on are indices, of tq3t with their predecessors; kernels look
//! them up in registers ([`TABLE`](crate::simd::matmul::format::WeightFormat::TABLE)) and multiply
//! the resulting bytes.
//! Weights of tq3_1s, tq4_1s and tq3t are rotated, so they are multiplied with activations rotated
//! in the same way.
//!
//! Scales stay as stored (q3_K and iq4_xs + 32, q6_K + 128), so nothing is rounded: a panel holds
//! the bits of the file in another order, and takes no more space than the file (iq4_xs 2.9 %, q3_K
//! 1.8 %, q6_K 1 % more).
//!
//! **Floats.** One group is one column: 16 values, a line in f32, half a line in f16 and bf16, a
//! quarter in fp8_g128, of which each 128 columns follow a line of their scales, `[row]` in f32. Of
//! nf4_g64 and fp4_g64 each 64 columns follow such a line; a line has eight of them, of each row
//! the four bytes of the file.

mod header;
mod lines;
mod planes;

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use kvant_backend::BackendError;
use kvant_codec::fields::{FieldSpec, Fields};
use kvant_codec::{DType, fp8, nf4};

pub(crate) use lines::{Line, Lines};

use super::partition::Partition;
use crate::host::disjoint::DisjointMut;
use crate::host::pool::Pool;
use crate::simd::matmul::format::{BLOCK, Layout, PANEL};

/// A matrix `[n_out, n_in]` in panels, alone in its allocation or one of several.
#[derive(Debug)]
pub(crate) struct Panels {
    dtype: DType,
    n_in: usize,
    lines: Arc<Lines>,
    /// Index of its first line.
    first_line: usize,
    panel_lines: usize,
}

impl Panels {
    /// Packs `rows`, `n_out` rows of GGML blocks whose length has been checked.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub fn new(
        pool: &Pool,
        dtype: DType,
        n_out: usize,
        n_in: usize,
        rows: &[u8],
    ) -> Result<Self, BackendError> {
        let mut one = Self::several(pool, dtype, [n_out, n_in], &[rows])?;
        Ok(one.pop().expect("as many matrices as requested"))
    }

    /// Packs matrices `[n_out, n_in]`, each given by its rows, in one allocation. Every thread
    /// writes its slice of each.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub fn several(
        pool: &Pool,
        dtype: DType,
        [n_out, n_in]: [usize; 2],
        matrices: &[&[u8]],
    ) -> Result<Vec<Self>, BackendError> {
        let n = matrices.len();
        let panel_lines = panel_lines(dtype, n_in);
        let n_panels = n_out.div_ceil(PANEL);
        let n_lines = n_panels.checked_mul(panel_lines).and_then(|lines| lines.checked_mul(n));
        let n_lines = n_lines.ok_or(BackendError::OutOfMemory { bytes: usize::MAX, what: "weights" })?;
        let mut lines = Lines::zeroed(n_lines)?;
        let row_bytes = matrices.first().map_or(0, |rows| rows.len() / n_out.max(1));
        let panels = DisjointMut::new(lines.as_mut_slice());
        let cut = Partition { n_threads: pool.n_threads(), per_item: 1 };
        pool.for_shares(|thread| 0..cut.n_items_of(n, n_panels, thread), &|_, thread, item| {
            let (matrix, at) = cut.panels_of(n_panels, thread, item);
            let [panel, index] = [at.start, matrix * n_panels + at.start];
            // SAFETY: one call of this job writes each panel.
            let lines = unsafe { panels.part(index * panel_lines..(index + 1) * panel_lines) };
            put_panel(dtype, n_in, panel_rows(matrices[matrix], row_bytes, panel), row_bytes, lines);
        });
        let lines = Arc::new(lines);
        let first_lines = (0..n).map(|matrix| matrix * n_panels * panel_lines);
        let panels = |first_line| Self { dtype, n_in, lines: Arc::clone(&lines), first_line, panel_lines };
        Ok(first_lines.map(panels).collect())
    }

    /// Returns the lines of panel `index`.
    pub fn panel(&self, index: usize) -> &[Line] {
        self.panels(index..index + 1)
    }

    /// Returns the lines of some neighbouring panels.
    pub fn panels(&self, panels: Range<usize>) -> &[Line] {
        let [start, end] = [panels.start, panels.end].map(|panel| self.first_line + panel * self.panel_lines);
        &self.lines.as_slice()[start..end]
    }

    /// Decodes row `row` into `out` `[n_in]`, exactly as the codec decodes the original row.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        debug_assert_eq!(out.len(), self.n_in);
        let (panel, row) = (self.panel(row / PANEL), row % PANEL);
        let half = |col: usize| panel[col / 2].half(16 * (col % 2) + row);
        match self.dtype {
            DType::F32 => {
                for (line, v) in panel.iter().zip(out) {
                    *v = f32::from_le_bytes(line.0.as_chunks().0[row]);
                }
            }
            DType::F16 => (0..).zip(out).for_each(|(col, v)| *v = f16::from_bits(half(col)).to_f32()),
            DType::BF16 => (0..).zip(out).for_each(|(col, v)| *v = bf16::from_bits(half(col)).to_f32()),
            DType::FP8G128 => {
                let groups = panel.chunks_exact(FP8_GROUP_LINES);
                for (group, out) in groups.zip(out.chunks_exact_mut(fp8::LEN)) {
                    let scale = f32::from_le_bytes(group[0].0.as_chunks().0[row]);
                    for (col, v) in out.iter_mut().enumerate() {
                        *v = fp8::to_f32(group[1 + col / 4].0[16 * (col % 4) + row]) * scale;
                    }
                }
            }
            DType::NF4G64 | DType::FP4G64 => {
                let levels = nf4::levels(self.dtype).expect("codes are indices");
                let groups = panel.chunks_exact(NF4_GROUP_LINES);
                for (group, out) in groups.zip(out.chunks_exact_mut(nf4::LEN)) {
                    let scale = f32::from_le_bytes(group[0].0.as_chunks().0[row]);
                    for (col, v) in out.iter_mut().enumerate() {
                        let byte = group[1 + col / 8].0[4 * row + col % 8 / 2];
                        *v = levels[usize::from(byte >> (4 * (1 - col % 2)) & 15)] * scale;
                    }
                }
            }
            dtype => {
                let spec = FieldSpec::of(dtype).expect("panels are coded or float");
                for (index, out) in out.chunks_exact_mut(spec.len).enumerate() {
                    get_fields(dtype, spec, panel, row, index, self.n_in).decode(dtype, out);
                }
            }
        }
    }
}

/// Returns the lines of a panel of rows of `n_in` weights.
fn panel_lines(dtype: DType, n_in: usize) -> usize {
    match FieldSpec::of(dtype) {
        Some(spec) => Layout::of(spec).panel_lines(n_in),
        None => (n_in / dtype.block_len() * dtype.block_bytes() * PANEL).div_ceil(64),
    }
}

/// Returns the rows of panel `index`: sixteen, or fewer in the last.
fn panel_rows(rows: &[u8], row_bytes: usize, index: usize) -> &[u8] {
    &rows[index * PANEL * row_bytes..rows.len().min((index + 1) * PANEL * row_bytes)]
}

/// Splits the lines of `P` panels.
#[inline(always)]
pub(crate) fn split<const P: usize>(panels: &[Line]) -> [&[Line]; P] {
    let len = panels.len() / P;
    std::array::from_fn(|p| &panels[p * len..][..len])
}

/// Fills a zeroed panel from at most 16 rows.
fn put_panel(dtype: DType, n_in: usize, rows: &[u8], row_bytes: usize, panel: &mut [Line]) {
    let row = |r: usize| rows.get(r * row_bytes..(r + 1) * row_bytes);
    match FieldSpec::of(dtype) {
        Some(spec) => put_coded(dtype, spec, row, n_in, panel),
        None if dtype == DType::F32 => put_floats::<4>(row, panel),
        None if dtype == DType::FP8G128 => put_scaled_bytes(row, panel),
        None if nf4::levels(dtype).is_some() => put_scaled_nibbles(row, panel),
        None => put_floats::<2>(row, panel),
    }
}

/// Returns the lines of the unit that holds block `index` of a row, and the block's index within
/// it.
fn unit_of(layout: Layout, spec: FieldSpec, index: usize, n_in: usize) -> (Range<usize>, usize) {
    let per_unit = layout.unit / spec.len;
    let (unit, slot) = (index / per_unit, index % per_unit);
    let cols = layout.unit.min(n_in - unit * layout.unit);
    let first = unit * layout.unit_lines(layout.unit);
    (first..first + layout.unit_lines(cols), slot)
}

/// Fills a zeroed panel from the rows that exist.
fn put_coded<'a>(
    dtype: DType,
    spec: FieldSpec,
    row: impl Fn(usize) -> Option<&'a [u8]>,
    n_in: usize,
    panel: &mut [Line],
) {
    let layout = Layout::of(spec);
    let mut fields = [Fields::EMPTY; PANEL];
    for index in 0..n_in / spec.len {
        for (r, fields) in fields.iter_mut().enumerate() {
            if let Some(row) = row(r) {
                fields.reload(dtype, &row[index * dtype.block_bytes()..][..dtype.block_bytes()]);
            }
        }
        let (unit, slot) = unit_of(layout, spec, index, n_in);
        let (header, codes) = panel[unit].split_at_mut(layout.header);
        for (r, fields) in fields.iter().enumerate() {
            header::put(dtype, header, r, slot, fields);
        }
        let n_blocks = spec.len / BLOCK;
        let codes = &mut codes[slot * n_blocks * layout.block..][..n_blocks * layout.block];
        for (b, lines) in codes.chunks_exact_mut(layout.block).enumerate() {
            planes::put(spec, lines, |r| &fields[r].codes.as_chunks().0[b]);
        }
    }
}

/// Returns the fields of block `index` of row `row`.
fn get_fields(
    dtype: DType,
    spec: FieldSpec,
    panel: &[Line],
    row: usize,
    index: usize,
    n_in: usize,
) -> Fields {
    let layout = Layout::of(spec);
    let (unit, slot) = unit_of(layout, spec, index, n_in);
    let (header, codes) = panel[unit].split_at(layout.header);
    let mut fields = header::get(dtype, header, row, slot);
    let n_blocks = spec.len / BLOCK;
    let codes = &codes[slot * n_blocks * layout.block..][..n_blocks * layout.block];
    for (b, lines) in codes.chunks_exact(layout.block).enumerate() {
        for col in 0..BLOCK {
            fields.codes[b * BLOCK + col] = planes::get(spec, lines, row, col);
        }
    }
    fields
}

/// Fills a zeroed panel of values of `N` bytes.
fn put_floats<'a, const N: usize>(row: impl Fn(usize) -> Option<&'a [u8]>, panel: &mut [Line]) {
    let per_line = 64 / (PANEL * N);
    let rows: [&[[u8; N]]; PANEL] = std::array::from_fn(|r| row(r).map_or(&[][..], |row| row.as_chunks().0));
    for (i, line) in panel.iter_mut().enumerate() {
        for (at, out) in line.0.as_chunks_mut().0.iter_mut().enumerate() {
            if let Some(value) = rows[at % PANEL].get(i * per_line + at / PANEL) {
                *out = *value;
            }
        }
    }
}

/// Lines of 128 columns of fp8_g128.
const FP8_GROUP_LINES: usize = 1 + fp8::LEN * PANEL / 64;

/// Fills a zeroed panel from the rows of fp8_g128 that exist.
fn put_scaled_bytes<'a>(row: impl Fn(usize) -> Option<&'a [u8]>, panel: &mut [Line]) {
    for r in 0..PANEL {
        let blocks = row(r).unwrap_or_default().chunks_exact(fp8::BYTES);
        for (block, group) in blocks.zip(panel.chunks_exact_mut(FP8_GROUP_LINES)) {
            let (scale, codes) = block.split_at(fp8::HEADER);
            group[0].0[4 * r..4 * r + 4].copy_from_slice(scale);
            for (four, line) in codes.chunks_exact(4).zip(&mut group[1..]) {
                four.iter().enumerate().for_each(|(i, code)| line.0[PANEL * i + r] = *code);
            }
        }
    }
}

/// Lines of 64 columns of nf4_g64.
const NF4_GROUP_LINES: usize = 1 + nf4::LEN * PANEL / 2 / 64;

/// Fills a zeroed panel from the rows of nf4_g64, or fp4_g64, that exist. A scale takes as many
/// bytes as eight columns.
fn put_scaled_nibbles<'a>(row: impl Fn(usize) -> Option<&'a [u8]>, panel: &mut [Line]) {
    for r in 0..PANEL {
        let blocks = row(r).unwrap_or_default().chunks_exact(nf4::BYTES);
        for (block, group) in blocks.zip(panel.chunks_exact_mut(NF4_GROUP_LINES)) {
            for (four, line) in block.as_chunks::<4>().0.iter().zip(group) {
                line.0.as_chunks_mut().0[r] = *four;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvant_codec::random::Random;

    /// Any bits, invalid scales included, survive packing.
    #[test]
    fn panels_keep_every_bit_of_every_format() {
        let pool = Pool::new(2).unwrap();
        let mut random = Random::new(7);
        for dtype in DType::weights() {
            for blocks in [1, 2, 3, 5] {
                let n_in = blocks * dtype.block_len();
                for n_out in [1, 15, 16, 33] {
                    let row_bytes = dtype.row_bytes(n_in).unwrap();
                    let bytes: Vec<u8> = (0..n_out * row_bytes).map(|_| random.bits() as u8).collect();
                    let panels = Panels::new(&pool, dtype, n_out, n_in, &bytes).unwrap();
                    for (r, row) in bytes.chunks_exact(row_bytes).enumerate() {
                        if let Some(spec) = FieldSpec::of(dtype) {
                            for (b, block) in row.chunks_exact(dtype.block_bytes()).enumerate() {
                                let panel = panels.panel(r / PANEL);
                                let got = get_fields(dtype, spec, panel, r % PANEL, b, n_in);
                                let want = Fields::read(dtype, block);
                                // Scales are compared as bits: random ones may be NaN.
                                assert_eq!(got.scale.to_bits(), want.scale.to_bits(), "{dtype}");
                                assert_eq!(got.min.to_bits(), want.min.to_bits(), "{dtype}");
                                assert_eq!(got.factor.to_bits(), want.factor.to_bits(), "{dtype}");
                                assert_eq!(got.sub_scales, want.sub_scales, "{dtype}");
                                assert_eq!(got.sub_mins, want.sub_mins, "{dtype}");
                                assert_eq!(got.codes, want.codes, "{dtype} {n_out}x{n_in} row {r}");
                            }
                        }
                        let (mut got, mut want) = (vec![0.0; n_in], vec![0.0; n_in]);
                        panels.decode_row(r, &mut got);
                        kvant_codec::decode(dtype, row, &mut want).unwrap();
                        let same =
                            got.iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits() || w.is_nan());
                        assert!(same, "{dtype} {n_out}x{n_in} row {r}");
                    }
                }
            }
        }
    }

    #[test]
    fn panels_take_no_more_room_than_the_file() {
        let pool = Pool::new(1).unwrap();
        for (dtype, percent) in [
            (DType::F32, 0.0),
            (DType::F16, 0.0),
            (DType::BF16, 0.0),
            (DType::Q8_0, 0.0),
            (DType::Q4_0, 0.0),
            (DType::Q4_1, 0.0),
            (DType::Q5_0, 0.0),
            (DType::Q5_1, 0.0),
            (DType::Q2K, 0.0),
            (DType::Q3K, 1.82),
            (DType::Q4K, 0.0),
            (DType::Q5K, 0.0),
            (DType::Q6K, 0.96),
            (DType::IQ4NL, 0.0),
            (DType::IQ4XS, 2.94),
            (DType::MXFP4, 0.0),
            (DType::NVFP4, 0.0),
            (DType::Q4G128, 0.0),
            (DType::FP8G128, 0.0),
            (DType::NVFP4G256, 0.0),
            (DType::NF4G64, 0.0),
            (DType::FP4G64, 0.0),
            (DType::IQ1, 1.82),
            (DType::IQ2, 1.82),
            (DType::IQ3, 2.94),
            (DType::IQ3X, 2.94),
            (DType::TQ3_1S, 0.0),
            (DType::TQ4_1S, 0.0),
            (DType::TQ3T, 0.0),
        ] {
            let (n_out, n_in) = (32, 512);
            let bytes = vec![0; n_out * dtype.row_bytes(n_in).unwrap()];
            let panels = Panels::new(&pool, dtype, n_out, n_in, &bytes).unwrap();
            let more = (64 * panels.lines.as_slice().len()) as f64 / bytes.len() as f64 - 1.0;
            assert!((100.0 * more - percent).abs() < 0.01, "{dtype}: {}", 100.0 * more);
        }
    }
}
