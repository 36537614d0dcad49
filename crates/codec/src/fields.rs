//! The codes and scales of a block as stored, so that a device can repack weights without loss.
//!
//! ```text
//! q8_0 q4_0 q5_0      value = (code - zero) · d
//! q4_1 q5_1           value = code · d + m
//! q2_K q4_K q5_K      value = d · sc · code - m · sm               sub-blocks of 16 (q2_K) or 32
//! q3_K q6_K           value = d · (sc - sc_zero) · (code - zero)   sub-blocks of 16
//! iq4_nl              value = d · level(code)
//! iq4_xs iq3 iq3x     value = d · (sc - sc_zero) · level(code)     sub-blocks of 32
//! iq1 iq2             value = d · (sc - sc_zero) · level(code)     sub-blocks of 16
//! q4_g128             value = d · code - d · zero
//! mxfp4 nvfp4         value = float(sc) · level(code)              sub-blocks of 32, of 16
//! nvfp4_g256          value = float(sc) · f · level(code)          sub-blocks of 16
//! tq3_1s tq4_1s       value = level(code) · d of the half, then the inverse of Rotation::tq()
//! tq3t                value = level(code, predecessor) · d, then the same
//! ```
//!
//! Codes are unsigned as stored; q8_0 codes are offset by [`block32::Q8_0_ZERO`], q6_K scales
//! (signed in the file) by 128. `zero`, `sc_zero` and the levels are in [`FieldSpec`].

use half::f16;

use crate::factored_fp4::FactoredBlock;
use crate::fp4::ByteFloat;
use crate::grouped::{self, GroupBlock};
use crate::kfit::{MinBlock, SymBlock};
use crate::trellis::LEVELS;
use crate::{Codebook, DType, LevelTable, block32, fp4, iq, iq4, kquant, tq, tq3t};

/// The meaning of a format's fields.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FieldSpec {
    /// Values per block.
    pub len: usize,
    /// Bits of a code.
    pub bits: usize,
    /// The code of zero; 0 for the formats with a minimum.
    pub zero: u8,
    /// Values that share a scale: the block, or a sub-block.
    pub sub_len: usize,
    /// The stored sub-block scale that represents zero.
    pub scale_zero: u8,
    /// Whether blocks have a minimum.
    pub has_min: bool,
    /// The levels of codes in the rotated formats.
    pub book: Option<Codebook>,
    /// The levels of codes in formats of unevenly spaced integers. Without `book` and `table`, a
    /// code is a number.
    pub table: Option<LevelTable>,
    /// The encoding of sub-block scales that are floats; the block then has no other scale, or
    /// `has_factor`.
    pub float: Option<ByteFloat>,
    /// Whether the block has a factor in f32.
    pub has_factor: bool,
    /// The levels by a code and its predecessor ([`crate::tq3t`]), in the rotated format whose
    /// codes have one.
    pub trellis: Option<&'static [i8; LEVELS]>,
}

/// The fields of one block. Fields that a format lacks are 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fields {
    /// `d`; in the rotated formats, `d` of the first half.
    pub scale: f16,
    /// `m`, or the unit of the sub-block minima, or `d` of the second half.
    pub min: f16,
    /// `f`.
    pub factor: f32,
    /// `sc` of each sub-block.
    pub sub_scales: [u8; 16],
    /// `sm` of each sub-block.
    pub sub_mins: [u8; 16],
    /// Codes of the first [`FieldSpec::len`] values.
    pub codes: [u8; kquant::LEN],
}

/// The zero of q3_K scales and of its codes.
const Q3_SCALE_ZERO: u8 = 32;
const Q3_ZERO: u8 = 4;
/// The zero of q6_K scales, as offset here, and of its codes.
const Q6_SCALE_ZERO: u8 = 128;
const Q6_ZERO: u8 = 32;
/// Sub-blocks of q4_g128.
const GROUP_RUNS: usize = grouped::LEN / 32;

impl FieldSpec {
    /// Returns the meaning of the fields of `dtype`; `None` for float and cache formats, which have
    /// no fields.
    pub const fn of(dtype: DType) -> Option<Self> {
        let (bits, zero, sub_len, scale_zero, has_min) = match dtype {
            DType::Q8_0 => (8, block32::Q8_0_ZERO, 32, 0, false),
            DType::Q4_0 => (4, block32::Q4_0_ZERO, 32, 0, false),
            DType::Q5_0 => (5, block32::Q5_0_ZERO, 32, 0, false),
            DType::Q4_1 => (4, 0, 32, 0, true),
            DType::Q5_1 => (5, 0, 32, 0, true),
            DType::Q2K => (2, 0, 16, 0, true),
            DType::Q3K => (3, Q3_ZERO, 16, Q3_SCALE_ZERO, false),
            DType::Q4K => (4, 0, 32, 0, true),
            DType::Q5K => (5, 0, 32, 0, true),
            DType::Q6K => (6, Q6_ZERO, 16, Q6_SCALE_ZERO, false),
            DType::IQ4NL => (4, 0, 32, 0, false),
            DType::IQ4XS | DType::IQ3 | DType::IQ3X => (4, 0, 32, iq4::SCALE_ZERO, false),
            DType::IQ1 | DType::IQ2 => (3, 0, 16, iq4::SCALE_ZERO, false),
            DType::MXFP4 => (4, 0, 32, 0, false),
            DType::NVFP4 | DType::NVFP4G256 => (4, 0, 16, 0, false),
            DType::Q4G128 => (4, 0, 32, 0, true),
            DType::TQ3_1S => (3, 0, 16, 0, false),
            DType::TQ4_1S => (4, 0, 16, 0, false),
            DType::TQ3T => (3, 0, 32, 0, false),
            _ => return None,
        };
        let float = match dtype {
            DType::MXFP4 => Some(ByteFloat::E8M0),
            DType::NVFP4 | DType::NVFP4G256 => Some(ByteFloat::E4M3),
            _ => None,
        };
        let (book, table) = (Self::book_of(dtype), LevelTable::of(dtype));
        Some(Self {
            len: dtype.block_len(),
            bits,
            zero,
            sub_len,
            scale_zero,
            has_min,
            book,
            table,
            float,
            has_factor: matches!(dtype, DType::NVFP4G256),
            trellis: if matches!(dtype, DType::TQ3T) { Some(&tq3t::TABLE) } else { None },
        })
    }

    /// Returns whether weights of `dtype` are stored rotated by [`crate::Rotation::tq`].
    #[inline]
    pub const fn is_rotated(dtype: DType) -> bool {
        matches!(dtype, DType::TQ3_1S | DType::TQ4_1S | DType::TQ3T)
    }

    /// Returns the levels of the codes of `dtype`, if they are those of a scalar codebook.
    #[inline]
    pub const fn book_of(dtype: DType) -> Option<Codebook> {
        match dtype {
            DType::TQ3_1S => Some(Codebook::TQ3),
            DType::TQ4_1S => Some(Codebook::GAUSS4),
            _ => None,
        }
    }
}

impl Fields {
    /// All fields 0.
    pub const EMPTY: Self = Self {
        scale: f16::ZERO,
        min: f16::ZERO,
        factor: 0.0,
        sub_scales: [0; 16],
        sub_mins: [0; 16],
        codes: [0; kquant::LEN],
    };

    /// Reads the fields of one block of `dtype`.
    ///
    /// # Panics
    /// When [`FieldSpec::of`] returns `None` for `dtype`, or `block` does not have its size in
    /// bytes.
    pub fn read(dtype: DType, block: &[u8]) -> Self {
        let mut fields = Self::EMPTY;
        fields.reload(dtype, block);
        fields
    }

    /// Replaces the fields of a block of `dtype` by those of another block, as [`Fields::read`].
    /// Fields that the format lacks are left unchanged.
    ///
    /// # Panics
    /// As [`Fields::read`].
    pub fn reload(&mut self, dtype: DType, block: &[u8]) {
        match dtype {
            DType::Q8_0 => self.set_coded(block32::read_q8_0(sized(block))),
            DType::Q4_0 => self.set_coded(block32::read_q4_0(sized(block))),
            DType::Q5_0 => self.set_coded(block32::read_q5_0(sized(block))),
            DType::Q4_1 => self.set_coded_min(block32::read_q4_1(sized(block))),
            DType::Q5_1 => self.set_coded_min(block32::read_q5_1(sized(block))),
            DType::Q2K => self.set_min_block(kquant::read_q2(sized(block))),
            DType::Q3K => self.set_sym_block(kquant::read_q3(sized(block)), Q3_SCALE_ZERO, Q3_ZERO),
            DType::Q4K => self.set_min_block(kquant::read_q4(sized(block))),
            DType::Q5K => self.set_min_block(kquant::read_q5(sized(block))),
            DType::Q6K => self.set_sym_block(kquant::read_q6(sized(block)), Q6_SCALE_ZERO, Q6_ZERO),
            DType::IQ4NL => (self.scale, *self.first_codes()) = iq4::read_nl(sized(block)),
            DType::IQ4XS | DType::IQ3 | DType::IQ3X => self.set_table_block(iq4::read_xs(sized(block))),
            DType::IQ1 | DType::IQ2 => self.set_table_block(iq::read(sized(block))),
            DType::MXFP4 => (self.sub_scales[0], *self.first_codes()) = fp4::read_mx(sized(block)),
            DType::NVFP4 => (*self.first_scales(), *self.first_codes()) = fp4::read_nv(sized(block)),
            DType::Q4G128 => self.set_group_block(GroupBlock::from_bytes(sized(block))),
            DType::NVFP4G256 => {
                let block = FactoredBlock::from_bytes(sized(block));
                (self.factor, self.sub_scales, self.codes) = (block.factor, block.scales, block.codes);
            }
            DType::TQ3_1S => self.set_halves(tq::scaled_indices_tq3(sized(block))),
            DType::TQ4_1S => self.set_halves(tq::scaled_indices_tq4(sized(block))),
            DType::TQ3T => {
                let block = tq3t::read(sized(block));
                (self.scale, *self.first_codes()) = (block.scale, block.indices);
            }
            _ => panic!("{dtype} has no fields"),
        }
    }

    /// Decodes the values, bit-identical to [`crate::decode`] of the block that the fields were
    /// read from.
    ///
    /// # Panics
    /// When [`FieldSpec::of`] returns `None` for `dtype`, or `out` does not have [`FieldSpec::len`]
    /// values.
    pub fn decode(&self, dtype: DType, out: &mut [f32]) {
        let codes32 = || std::array::from_fn(|j| self.codes[j]);
        let coded = |zero| block32::ScaledBlock { scale: self.scale, codes: codes32() }.decode(zero);
        let coded_min =
            || block32::AffineBlock { scale: self.scale, min: self.min, codes: codes32() }.decode();
        let table = || LevelTable::of(dtype).expect("codes of a table");
        let halves = |book| tq::decode(book, ([self.scale, self.min], codes32()));
        match dtype {
            DType::Q8_0 => out.copy_from_slice(&coded(block32::Q8_0_ZERO)),
            DType::Q4_0 => out.copy_from_slice(&coded(block32::Q4_0_ZERO)),
            DType::Q5_0 => out.copy_from_slice(&coded(block32::Q5_0_ZERO)),
            DType::Q4_1 | DType::Q5_1 => out.copy_from_slice(&coded_min()),
            DType::Q2K => out.copy_from_slice(&self.as_min_block::<16>().decode()),
            DType::Q4K | DType::Q5K => out.copy_from_slice(&self.as_min_block::<8>().decode()),
            DType::Q3K => out.copy_from_slice(&self.as_sym_block(Q3_SCALE_ZERO, Q3_ZERO).decode()),
            DType::Q6K => out.copy_from_slice(&self.as_sym_block(Q6_SCALE_ZERO, Q6_ZERO).decode()),
            DType::IQ4NL => out.copy_from_slice(&iq4::decode_nl(self.scale, &codes32())),
            DType::IQ4XS | DType::IQ3 | DType::IQ3X => {
                out.copy_from_slice(&self.as_table_block::<8, 32>().decode(table()));
            }
            DType::IQ1 | DType::IQ2 => {
                out.copy_from_slice(&self.as_table_block::<16, 16>().decode(table()));
            }
            DType::MXFP4 => out.copy_from_slice(&fp4::decode_mx(self.sub_scales[0], &codes32())),
            DType::NVFP4 => {
                let scales = std::array::from_fn(|j| self.sub_scales[j]);
                out.copy_from_slice(&fp4::decode_nv(&scales, &std::array::from_fn(|j| self.codes[j])));
            }
            DType::Q4G128 => out.copy_from_slice(&self.as_group_block().decode()),
            DType::NVFP4G256 => {
                let (factor, scales, codes) = (self.factor, self.sub_scales, self.codes);
                out.copy_from_slice(&FactoredBlock { factor, scales, codes }.decode());
            }
            DType::TQ3_1S => out.copy_from_slice(&halves(&Codebook::TQ3)),
            DType::TQ4_1S => out.copy_from_slice(&halves(&Codebook::GAUSS4)),
            DType::TQ3T => {
                let indices = std::array::from_fn(|j| self.codes[j]);
                out.copy_from_slice(&tq3t::Coded { scale: self.scale, indices }.decode());
            }
            _ => panic!("{dtype} has no fields"),
        }
    }

    fn first_codes<const N: usize>(&mut self) -> &mut [u8; N] {
        self.codes.first_chunk_mut().expect("no block has more codes")
    }

    fn first_scales<const N: usize>(&mut self) -> &mut [u8; N] {
        self.sub_scales.first_chunk_mut().expect("no block has more scales")
    }

    fn set_coded(&mut self, block: block32::ScaledBlock) {
        self.scale = block.scale;
        self.codes[..block32::LEN].copy_from_slice(&block.codes);
    }

    fn set_coded_min(&mut self, block: block32::AffineBlock) {
        (self.scale, self.min) = (block.scale, block.min);
        self.codes[..block32::LEN].copy_from_slice(&block.codes);
    }

    fn set_halves(&mut self, ([first, second], codes): tq::ScaledIndices) {
        (self.scale, self.min) = (first, second);
        self.codes[..tq::LEN].copy_from_slice(&codes);
    }

    /// Sub-blocks of 32 have the scale of the block, and a minimum in its units.
    fn set_group_block(&mut self, block: GroupBlock) {
        (self.scale, self.min) = (block.scale, block.scale);
        self.sub_scales[..GROUP_RUNS].fill(1);
        self.sub_mins[..GROUP_RUNS].fill(block.zero);
        self.codes[..grouped::LEN].copy_from_slice(&block.codes);
    }

    fn as_group_block(&self) -> GroupBlock {
        GroupBlock {
            scale: self.scale,
            zero: self.sub_mins[0],
            codes: std::array::from_fn(|j| self.codes[j]),
        }
    }

    fn set_min_block<const S: usize>(&mut self, block: MinBlock<S>) {
        (self.scale, self.min, self.codes) = (block.d, block.dmin, block.codes);
        self.sub_scales[..S].copy_from_slice(&block.scales);
        self.sub_mins[..S].copy_from_slice(&block.mins);
    }

    fn as_min_block<const S: usize>(&self) -> MinBlock<S> {
        MinBlock {
            d: self.scale,
            dmin: self.min,
            scales: std::array::from_fn(|j| self.sub_scales[j]),
            mins: std::array::from_fn(|j| self.sub_mins[j]),
            codes: self.codes,
        }
    }

    fn set_table_block<const S: usize, const N: usize>(&mut self, block: iq4::Block<S, N>) {
        (self.scale, self.codes) = (block.d, block.codes);
        let stored = block.scales.map(|scale| (scale as u8).wrapping_add(iq4::SCALE_ZERO));
        self.sub_scales[..S].copy_from_slice(&stored);
    }

    fn as_table_block<const S: usize, const N: usize>(&self) -> iq4::Block<S, N> {
        let scale = |j: usize| self.sub_scales[j].wrapping_sub(iq4::SCALE_ZERO) as i8;
        iq4::Block { d: self.scale, scales: std::array::from_fn(scale), codes: self.codes }
    }

    fn set_sym_block(&mut self, block: SymBlock, scale_zero: u8, zero: u8) {
        self.scale = block.d;
        self.sub_scales = block.scales.map(|scale| (scale as u8).wrapping_add(scale_zero));
        self.codes = block.codes.map(|code| (code as u8).wrapping_add(zero));
    }

    fn as_sym_block(&self, scale_zero: u8, zero: u8) -> SymBlock {
        SymBlock {
            d: self.scale,
            scales: self.sub_scales.map(|scale| scale.wrapping_sub(scale_zero) as i8),
            codes: self.codes.map(|code| code.wrapping_sub(zero) as i8),
        }
    }
}

fn sized<const B: usize>(block: &[u8]) -> &[u8; B] {
    block.try_into().expect("a block has the bytes of its format")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::{Rotation, decode};

    #[test]
    fn fields_decode_as_their_block_does_and_stay_within_their_bits() {
        let mut random = Random::new(11);
        for dtype in DType::ALL {
            let Some(spec) = FieldSpec::of(dtype) else { continue };
            for _ in 0..50 {
                let block: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.bits() as u8).collect();
                let fields = Fields::read(dtype, &block);
                let (mut want, mut got) = (vec![0.0; spec.len], vec![0.0; spec.len]);
                decode(dtype, &block, &mut want).unwrap();
                fields.decode(dtype, &mut got);
                let same = got.iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits() || w.is_nan());
                assert!(same, "{dtype}: {got:?} for {want:?}");
                assert!(fields.codes.iter().all(|&code| usize::from(code) >> spec.bits == 0), "{dtype}");
            }
        }
    }

    #[test]
    fn fields_evaluated_by_their_spec_give_the_values() {
        let mut random = Random::new(12);
        for dtype in DType::ALL {
            let Some(spec) = FieldSpec::of(dtype) else { continue };
            let mut values = vec![0.0; spec.len];
            random.fill_gaussian(&mut values, 1.0);
            let mut block = vec![0; dtype.block_bytes()];
            crate::encode(dtype, &values, &mut block).unwrap();
            let fields = Fields::read(dtype, &block);
            fields.decode(dtype, &mut values);
            let (d, m) = (fields.scale.to_f32(), fields.min.to_f32());
            if FieldSpec::is_rotated(dtype) {
                Rotation::tq().forward(&mut values);
            }
            for (j, &value) in values.iter().enumerate() {
                let levels = |run: usize| tq3t::levels(&fields.codes.as_chunks().0[run]);
                let code = match spec.table {
                    None if spec.trellis.is_some() => f32::from(levels(j / 32)[j % 32]),
                    Some(table) => f32::from(table.levels()[usize::from(fields.codes[j])]) * table.unit(),
                    None => f32::from(fields.codes[j]) - f32::from(spec.zero),
                };
                let sub = j / spec.sub_len;
                let want = match (spec.book, spec.len) {
                    _ if spec.float.is_some() => {
                        let factor = if spec.has_factor { fields.factor } else { 1.0 };
                        spec.float.unwrap().to_f32(fields.sub_scales[sub]) * factor * code
                    }
                    (Some(book), _) => book.levels()[usize::from(fields.codes[j])] * [d, m][sub],
                    _ if spec.trellis.is_some() => d * tq3t::UNIT * code,
                    (None, block32::LEN) => d * code + m,
                    _ => {
                        let scale = f32::from(fields.sub_scales[sub]) - f32::from(spec.scale_zero);
                        d * scale * code - m * f32::from(fields.sub_mins[sub])
                    }
                };
                // Up to four roundings of terms below 10, or the roundings of ten butterflies of
                // terms below 1.
                assert!((value - want).abs() <= 4.0 * f32::EPSILON * 10.0, "{dtype} {j}: {value}, {want}");
            }
        }
    }
}
