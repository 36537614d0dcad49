//! Layout of weights in device memory: rows in *panels* of 32, so that threads, each with its own
//! row, read adjacent 16 bytes.
//!
//! A row is divided into *vectors* of 16 bytes. Vector c of row r of a panel that has n rows is at
//! index `c n + r` of it; all panels have 32 rows except the last. Floats stay as in the file,
//! padded to a whole vector; the scales of fp8_g128, nf4_g64 and fp4_g64, padded so too, are before
//! their codes, which stay as in the file. Quantized rows are divided into units of 256 columns, of
//! which the last may be shorter (the formats of blocks of 32 or 64 columns):
//!
//! ```text
//! row      separate data of all units, in sequence; then the units
//! unit     scales; pairs of bits, in 4 vectors; single bits, in 2 vectors;
//!          then a vector, or two, for each 32 columns
//! ```
//!
//! | format | separate | scales | pairs | bits | of 32 columns |
//! |---|---|---|---|---|---|
//! | q8_0 | | d | | | codes |
//! | q4_0 iq4_nl | | d | | | nibbles |
//! | q4_1 | | d; m | | | nibbles |
//! | q5_0 | | d | | fifth bits | nibbles |
//! | q5_1 | | d; m | | fifth bits | nibbles |
//! | q2_K | d, dmin | scales | codes | | |
//! | q3_K iq1 iq2 | | scales, d | lower bits | third bits | |
//! | q4_K | | d, dmin, scales | | | nibbles |
//! | q5_K | | d, dmin, scales | | fifth bits | nibbles |
//! | q6_K | d | scales | upper bits | | nibbles |
//! | iq4_xs iq3 iq3x | d, scales | | | | nibbles |
//! | mxfp4 | scales | | | | nibbles |
//! | nvfp4 | | scales | | | nibbles |
//! | nvfp4_g256 | f | scales | | | nibbles |
//! | q4_g128 | d, zero | | | | nibbles |
//! | tq3_1s | | d; d of second halves | lower bits | third bits | |
//! | tq4_1s | | d; d of second halves | | | nibbles |
//! | tq3t | d | | lower bits | third bits | |
//!
//! Scales are the file's bytes. Of 32 columns, code j is byte j; or the low nibble of byte j, and
//! code j + 16 the high one; or pair m of byte j of word h, of two, for code `16 h + 4 m + j`; or
//! bit m of byte j of a word for code `4 m + j`.

use std::ops::Range;

use kvant_codec::DType;
use kvant_codec::fields::{FieldSpec, Fields};

/// Rows of a panel.
pub(crate) const PANEL: usize = 32;
/// Columns of a unit.
pub(super) const UNIT: usize = 256;
/// Words of a vector, and its bytes.
pub(super) const VECTOR: usize = 4;
pub(crate) const VECTOR_BYTES: usize = 16;
/// Columns of a group, and groups of a unit.
pub(super) const GROUP: usize = 32;
const GROUPS: usize = UNIT / GROUP;
/// Vectors of each plane of a unit.
const PAIRS: usize = 4;
const BITS: usize = 2;

/// Layout of the rows of a quantized type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Separate bytes of a unit.
    pub separate: usize,
    /// Vectors of a unit: scales, and the start of each plane.
    pub pairs: usize,
    pub bits: usize,
    pub groups: usize,
    /// Vectors of 32 columns.
    pub group: usize,
}

impl Layout {
    /// Returns the layout of `dtype`; `None` for floats.
    pub fn of(dtype: DType) -> Option<Self> {
        let spec = FieldSpec::of(dtype)?;
        let (separate, scales) = match dtype.layout() {
            DType::Q4_1 | DType::Q5_1 | DType::TQ3_1S | DType::TQ4_1S => (0, 2),
            DType::Q2K | DType::NVFP4G256 => (4, 1),
            DType::Q6K => (2, 1),
            DType::IQ4XS | DType::MXFP4 | DType::Q4G128 => (8, 0),
            DType::TQ3T => (4, 0),
            _ => (0, 1),
        };
        let (n_pairs, n_bits, group) = match spec.bits {
            2 => (PAIRS, 0, 0),
            3 => (PAIRS, BITS, 0),
            5 => (0, BITS, 1),
            6 => (PAIRS, 0, 1),
            8 => (0, 0, 2),
            _ => (0, 0, 1),
        };
        let bits = scales + n_pairs;
        Some(Self { separate, pairs: scales, bits, groups: bits + n_bits, group })
    }

    /// Returns the vectors of the separate data of a row of `n_in` columns.
    fn separate_vectors(self, n_in: usize) -> usize {
        (n_in.div_ceil(UNIT) * self.separate).div_ceil(VECTOR_BYTES)
    }

    /// Returns the vectors of a whole unit.
    fn unit_vectors(self) -> usize {
        self.groups + GROUPS * self.group
    }

    fn row_vectors(self, n_in: usize) -> usize {
        let (whole, rest) = (n_in / UNIT, n_in % UNIT);
        let rest_vectors = if rest > 0 { self.groups + rest / GROUP * self.group } else { 0 };
        self.separate_vectors(n_in) + whole * self.unit_vectors() + rest_vectors
    }
}

/// Returns the vectors of a row of `n_in` weights, a whole number of blocks.
pub(crate) fn row_vectors(dtype: DType, n_in: usize) -> usize {
    match Layout::of(dtype) {
        Some(layout) => layout.row_vectors(n_in),
        None if scale_columns(dtype) > 0 => {
            let code_bytes = dtype.block_bytes() - SCALE_BYTES;
            scale_vectors(dtype, n_in) + n_in / dtype.block_len() * code_bytes / VECTOR_BYTES
        }
        None => (n_in * dtype.block_bytes()).div_ceil(VECTOR_BYTES),
    }
}

/// Bytes of the scale at the start of a block of floats.
const SCALE_BYTES: usize = size_of::<f32>();

/// Returns the columns of floats that share a scale; 0 if there are no scales.
pub(super) fn scale_columns(dtype: DType) -> usize {
    match dtype {
        DType::FP8G128 | DType::NF4G64 | DType::FP4G64 => dtype.block_len(),
        _ => 0,
    }
}

/// Returns the vectors of the scales of a row of floats.
fn scale_vectors(dtype: DType, n_in: usize) -> usize {
    (n_in / dtype.block_len() * SCALE_BYTES).div_ceil(VECTOR_BYTES)
}

/// Writes panels: `rows` of `row_bytes` bytes each, as in the file, become as many times
/// [`row_vectors`], a whole number of panels except the last.
pub(crate) fn pack_panels(dtype: DType, n_in: usize, rows: &[u8], row_bytes: usize, panels: &mut [[u32; 4]]) {
    let vectors = row_vectors(dtype, n_in);
    let mut row = vec![[0; VECTOR]; vectors];
    let panels_of_rows = rows.chunks(PANEL * row_bytes).zip(panels.chunks_mut(PANEL * vectors));
    for (rows, panel) in panels_of_rows {
        let n = rows.len() / row_bytes;
        for (r, bytes) in rows.chunks_exact(row_bytes).enumerate() {
            match (Layout::of(dtype), FieldSpec::of(dtype)) {
                (Some(layout), Some(spec)) => pack_row(dtype, layout, spec, n_in, bytes, &mut row),
                _ if scale_columns(dtype) > 0 => pack_scaled(dtype, n_in, bytes, &mut row),
                _ => copy_padded(bytes, bytemuck::cast_slice_mut(&mut row)),
            }
            for (vector, destination) in row.iter().zip(panel[r..].iter_mut().step_by(n)) {
                *destination = *vector;
            }
        }
    }
}

fn copy_padded(bytes: &[u8], row: &mut [u8]) {
    let (filled, rest) = row.split_at_mut(bytes.len());
    filled.copy_from_slice(bytes);
    rest.fill(0);
}

/// Writes a row of floats with scales.
fn pack_scaled(dtype: DType, n_in: usize, bytes: &[u8], row: &mut [[u32; VECTOR]]) {
    let (scales, codes) = row.split_at_mut(scale_vectors(dtype, n_in));
    let (scales, codes): (&mut [u8], &mut [u8]) =
        (bytemuck::cast_slice_mut(scales), bytemuck::cast_slice_mut(codes));
    let code_bytes = dtype.block_bytes() - SCALE_BYTES;
    let destinations = scales.chunks_exact_mut(SCALE_BYTES).zip(codes.chunks_exact_mut(code_bytes));
    for (block, (scale, codes)) in bytes.chunks_exact(dtype.block_bytes()).zip(destinations) {
        let (header, rest) = block.split_at(SCALE_BYTES);
        scale.copy_from_slice(header);
        codes.copy_from_slice(rest);
    }
}

/// Writes a quantized row.
fn pack_row(
    dtype: DType,
    layout: Layout,
    spec: FieldSpec,
    n_in: usize,
    bytes: &[u8],
    row: &mut [[u32; VECTOR]],
) {
    row.fill([0; VECTOR]);
    let (separate, units) = row.split_at_mut(layout.separate_vectors(n_in));
    let separate: &mut [u8] = bytemuck::cast_slice_mut(separate);
    let block_bytes = dtype.block_bytes();
    let unit_bytes = UNIT / spec.len * block_bytes;
    let mut fields = Fields::EMPTY;
    let units_of_blocks = bytes.chunks(unit_bytes).zip(units.chunks_mut(layout.unit_vectors()));
    for (u, (blocks, unit)) in units_of_blocks.enumerate() {
        let (scales, codes) = unit.split_at_mut(layout.pairs);
        let scales: &mut [u8] = bytemuck::cast_slice_mut(scales);
        let codes: &mut [u32] = bytemuck::cast_slice_mut(codes);
        for (b, block) in blocks.chunks_exact(block_bytes).enumerate() {
            for (from, destination) in field_destinations(dtype) {
                let n = from.len();
                match destination {
                    Destination::Separate { stride } => {
                        separate[u * layout.separate + b * stride..][..n].copy_from_slice(&block[from]);
                    }
                    Destination::Scales { at, stride } => {
                        scales[at + b * stride..][..n].copy_from_slice(&block[from]);
                    }
                }
            }
            fields.reload(dtype, block);
            for (g, group) in fields.codes[..spec.len].as_chunks::<GROUP>().0.iter().enumerate() {
                pack_codes(layout, spec.bits, b * spec.len / GROUP + g, group, codes);
            }
        }
    }
}

/// Destination of the bytes of a block other than codes; the field is the stride between the blocks
/// of a unit.
enum Destination {
    Separate { stride: usize },
    Scales { at: usize, stride: usize },
}

fn field_destinations(dtype: DType) -> Vec<(Range<usize>, Destination)> {
    let halves = |at| Destination::Scales { at, stride: 2 };
    let scales = |stride| Destination::Scales { at: 0, stride };
    let separate = |stride| Destination::Separate { stride };
    match dtype.layout() {
        DType::Q4_1 | DType::Q5_1 | DType::TQ3_1S | DType::TQ4_1S => {
            vec![(0..2, halves(0)), (2..4, halves(VECTOR_BYTES))]
        }
        DType::Q2K => vec![(0..16, scales(0)), (80..84, separate(0))],
        DType::Q3K => vec![(96..110, scales(0))],
        DType::Q4K | DType::Q5K => vec![(0..16, scales(0))],
        DType::Q6K => vec![(192..208, scales(0)), (208..210, separate(0))],
        DType::IQ4XS => vec![(0..8, separate(0))],
        DType::MXFP4 => vec![(0..1, separate(1))],
        DType::NVFP4 => vec![(0..4, scales(4))],
        DType::NVFP4G256 => vec![(0..4, separate(0)), (4..20, scales(0))],
        DType::Q4G128 => vec![(0..4, separate(4))],
        DType::TQ3T => vec![(0..2, separate(2))],
        _ => vec![(0..2, halves(0))],
    }
}

/// Writes the codes of group `g` of a unit to its planes, which begin at word 0 of `planes`.
fn pack_codes(layout: Layout, bits: usize, g: usize, codes: &[u8; GROUP], planes: &mut [u32]) {
    let word = |vector: usize| VECTOR * (vector - layout.pairs);
    let mut add = |at: usize, code: u8, shift: usize| planes[at] |= u32::from(code) << shift;
    let [bit, pair] = match bits {
        5 => [4, 0],
        6 => [0, 4],
        _ => [2, 0],
    };
    for (i, &code) in codes.iter().enumerate() {
        let (byte, four) = (8 * (i % 4), i / 4);
        if layout.bits > layout.pairs {
            add(word(layout.pairs) + 2 * g + four / 4, code >> pair & 3, byte + 2 * (four % 4));
        }
        if layout.groups > layout.bits {
            add(word(layout.bits) + g, code >> bit & 1, byte + four);
        }
        let at = word(layout.groups + g * layout.group);
        match layout.group {
            0 => {}
            1 => add(at + four % 4, code & 15, byte + 4 * (four / 4)),
            _ => add(at + four, code, byte),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The planes of a unit decode to the codes by the table above.
    #[test]
    fn planes_hold_every_code() {
        for dtype in DType::ALL {
            let (Some(layout), Some(spec)) = (Layout::of(dtype), FieldSpec::of(dtype)) else { continue };
            let mut planes = vec![0; VECTOR * (layout.unit_vectors() - layout.pairs)];
            let code = |g: usize, i: usize| (37 * (32 * g + i) % (1 << spec.bits)) as u8;
            for g in 0..GROUPS {
                pack_codes(layout, spec.bits, g, &std::array::from_fn(|i| code(g, i)), &mut planes);
            }
            let bytes: Vec<u8> = planes.iter().flat_map(|word| word.to_le_bytes()).collect();
            let of = |vector: usize| 16 * (vector - layout.pairs);
            for (g, i) in (0..GROUPS).flat_map(|g| (0..GROUP).map(move |i| (g, i))) {
                let (h, m, j) = (i / 16, i / 4, i % 4);
                let group = of(layout.groups + g * layout.group);
                let pair = || bytes[of(layout.pairs) + 8 * g + 4 * h + j] >> (2 * (m % 4)) & 3;
                let bit = || bytes[of(layout.bits) + 4 * g + j] >> m & 1;
                let nibble = || bytes[group + i % 16] >> (4 * h) & 15;
                let got = match spec.bits {
                    2 => pair(),
                    3 => pair() | bit() << 2,
                    4 => nibble(),
                    5 => nibble() | bit() << 4,
                    6 => nibble() | pair() << 4,
                    _ => bytes[group + i],
                };
                assert_eq!(got, code(g, i), "{dtype}, group {g}, code {i}");
            }
        }
    }

    /// Literals: bytes of a whole unit on the device, and in the file.
    #[test]
    fn units_take_little_more_than_in_the_file() {
        for (dtype, bytes, in_file) in [
            (DType::Q8_0, 272, 272),
            (DType::Q4_0, 144, 144),
            (DType::Q4_1, 160, 160),
            (DType::Q5_0, 176, 176),
            (DType::Q5_1, 192, 192),
            (DType::Q2K, 84, 84),
            (DType::Q3K, 112, 110),
            (DType::Q4K, 144, 144),
            (DType::Q5K, 176, 176),
            (DType::Q6K, 210, 210),
            (DType::IQ4NL, 144, 144),
            (DType::IQ4XS, 136, 136),
            (DType::MXFP4, 136, 136),
            (DType::NVFP4, 144, 144),
            (DType::Q4G128, 136, 136),
            (DType::NVFP4G256, 148, 148),
            (DType::IQ1, 112, 110),
            (DType::IQ2, 112, 110),
            (DType::IQ3, 136, 136),
            (DType::IQ3X, 136, 136),
            (DType::TQ3_1S, 128, 128),
            (DType::TQ4_1S, 160, 160),
            (DType::TQ3T, 100, 100),
        ] {
            let layout = Layout::of(dtype).unwrap();
            assert_eq!(16 * layout.unit_vectors() + layout.separate, bytes, "{dtype}");
            assert_eq!(dtype.row_bytes(UNIT).unwrap(), in_file, "{dtype}");
        }
    }

    /// Scales of three blocks are 12 bytes, padded to a vector.
    #[test]
    fn scales_of_floats_lie_before_their_codes() {
        for (dtype, n_in, vectors) in [(DType::FP8G128, 384, 25), (DType::NF4G64, 192, 7)] {
            let mut bytes: Vec<u8> = (0..3 * dtype.block_bytes()).map(|i| (i % 251) as u8).collect();
            for (block, scale) in bytes.chunks_exact_mut(dtype.block_bytes()).zip([1.0f32, 2.0, 4.0]) {
                block[..4].copy_from_slice(&scale.to_le_bytes());
            }
            let mut row = vec![[u32::MAX; VECTOR]; row_vectors(dtype, n_in)];
            row[0] = [0; VECTOR];
            pack_scaled(dtype, n_in, &bytes, &mut row);
            assert_eq!((row.len(), row[0]), (vectors, [1.0f32, 2.0, 4.0, 0.0].map(f32::to_bits)));
            let blocks = bytes.chunks_exact(dtype.block_bytes());
            let codes: Vec<u8> = blocks.flat_map(|block| block[4..].to_vec()).collect();
            assert_eq!(bytemuck::cast_slice::<_, u8>(&row[1..]), codes);
        }
    }

    #[test]
    fn rows_of_a_panel_lie_side_by_side() {
        let (n_in, rows) = (6, 35);
        let bytes: Vec<u8> =
            (0..rows).flat_map(|r| (0..n_in).flat_map(move |i| [r as u8, i as u8])).collect();
        let vectors = row_vectors(DType::F16, n_in);
        let mut panels = vec![[u32::MAX; VECTOR]; rows * vectors];
        pack_panels(DType::F16, n_in, &bytes, 2 * n_in, &mut panels);
        let of =
            |r: u32| [r | r << 16 | 0x0100_0000, r | r << 16 | 0x0300_0200, r | r << 16 | 0x0500_0400, 0];
        let want: Vec<_> = (0..35).map(of).collect();
        assert_eq!(vectors, 1);
        assert_eq!(panels, want);
    }
}
