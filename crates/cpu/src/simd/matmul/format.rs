//! Weight formats as types, so that kernels are compiled for each: their fields, the factors that a
//! kernel multiplies, and the layout of their panels.

use kvant_codec::codebook::SIGMA_128;
use kvant_codec::fields::FieldSpec;
use kvant_codec::fp4::ByteFloat;
use kvant_codec::fp8;
use kvant_codec::grouped::LEN as GROUP_LEN;
use kvant_codec::{ByteBook, DType, LevelTable, nf4, tq3t};

/// Weight rows of a panel.
pub(crate) const PANEL: usize = 16;
/// Columns whose codes are stored together.
pub(crate) const BLOCK: usize = 32;
/// Groups of four columns in a block.
pub(crate) const GROUPS: usize = 8;

/// A coded weight format, as a type, so that kernels are compiled for each.
pub(crate) trait WeightFormat {
    const DTYPE: DType;
    const SPEC: FieldSpec = FieldSpec::of(Self::DTYPE).expect("a coded weight format");
    const LAYOUT: Layout = Layout::of(Self::SPEC);
    /// Lookup table of the factors, for codes that are indices.
    const TABLE: Option<Factors> = Factors::of(Self::SPEC);
    /// Lookup tables of the factors, for codes that are indices with a predecessor.
    const WINDOWS: Option<WindowFactors> = WindowFactors::of(Self::SPEC);
    /// Bits of a factor, and the factor that represents zero.
    const FACTOR_BITS: usize = match (Self::TABLE, Self::WINDOWS) {
        (Some(table), _) => table.bits,
        (None, Some(_)) => WindowFactors::BITS,
        (None, None) => Self::SPEC.bits,
    };
    const FACTOR_ZERO: u8 = match (Self::TABLE, Self::WINDOWS) {
        (None, None) => Self::SPEC.zero,
        _ => 1 << (Self::FACTOR_BITS - 1),
    };
    /// Whether scales have at most 22 significant bits and stay below 2^100, so that three times a
    /// power of two times a scale is exact.
    const HAS_SHORT_SCALES: bool = Self::SPEC.book.is_none()
        && !Self::SPEC.has_factor
        && !matches!(Self::SPEC.float, Some(ByteFloat::E8M0));
    /// Factor on stored scales.
    const SCALE_FACTOR: f32 = match (Self::TABLE, Self::WINDOWS) {
        (Some(table), _) => table.unit,
        (None, Some(_)) => tq3t::UNIT,
        (None, None) => 1.0,
    };
}

/// Value of the bits of an E4M3 read as an f16, whose exponent is biased by 15 and not by 7: so
/// small ones are read without arithmetic on subnormal f32, which takes a hundred cycles each.
pub(crate) const E4M3_UNIT: f32 = 1.0 / 256.0;

/// Factors that replace codes that are indices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Factors {
    /// Unsigned; half of the range of their bits represents 0.
    pub bytes: [u8; 16],
    /// Bits of a byte.
    bits: usize,
    /// Value of 1, in units of the stored scale.
    unit: f32,
}

impl Factors {
    const fn of(spec: FieldSpec) -> Option<Self> {
        match (spec.book, spec.table) {
            (Some(book), _) => {
                let book = ByteBook::of(&book);
                // A byte of a codebook counts its steps, in units of the levels.
                Some(Self { bytes: book.bytes, bits: 8, unit: book.step / SIGMA_128 as f32 })
            }
            (None, Some(table)) => {
                let stored = match spec.float {
                    Some(ByteFloat::E4M3) => E4M3_UNIT,
                    None | Some(ByteFloat::E8M0) => 1.0,
                };
                Some(Self::of_table(table, table.unit() / stored))
            }
            (None, None) => None,
        }
    }

    /// Uses as few bits as hold the levels: products of fewer bits are cheaper.
    const fn of_table(table: LevelTable, unit: f32) -> Self {
        let bits = (u8::BITS - table.largest().leading_zeros() + 1) as usize;
        let (mut bytes, mut i) = ([0; 16], 0);
        while i < 16 {
            bytes[i] = ((1 << (bits - 1)) as u8).wrapping_add_signed(table.levels()[i]);
            i += 1;
        }
        Self { bytes, bits, unit }
    }
}

/// Factors by six bits: an index and its predecessor ([`tq3t`]).
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowFactors {
    /// Unsigned, `1 << (BITS - 1)` represents 0; by `index | predecessor << 3`.
    pub index_first: [u8; 64],
    /// The same, by `predecessor | index << 3`.
    pub predecessor_first: [u8; 64],
}

impl WindowFactors {
    const BITS: usize = 7;

    const fn of(spec: FieldSpec) -> Option<Self> {
        let Some(levels) = spec.trellis else { return None };
        let (mut factors, mut w) = (Self { index_first: [0; 64], predecessor_first: [0; 64] }, 0);
        while w < 64 {
            let factor = ((1 << (Self::BITS - 1)) as u8).wrapping_add_signed(levels[w]);
            factors.index_first[w] = factor;
            factors.predecessor_first[w >> 3 | (w & 7) << 3] = factor;
            w += 1;
        }
        Some(factors)
    }
}

macro_rules! formats {
    ($($name:ident),*) => {$(
        pub(crate) struct $name;
        impl WeightFormat for $name {
            const DTYPE: DType = DType::$name;
        }
    )*};
}
formats!(
    Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2K, Q3K, Q4K, Q5K, Q6K, IQ4NL, IQ4XS, MXFP4, NVFP4, Q4G128, NVFP4G256,
    IQ1, IQ2, IQ3, IQ3X, TQ3_1S, TQ4_1S, TQ3T
);

/// A float weight format, as a type.
pub(crate) trait Values {
    const DTYPE: DType;
    /// Columns in a line of values.
    const PER_LINE: usize = 64 * 8 / (PANEL * value_bits(Self::DTYPE));
    /// Columns that a kernel multiplies at once: whole lines.
    const STEP: usize = if Self::PER_LINE > 4 { Self::PER_LINE } else { 4 };
    /// Columns that follow a line of their scales, an f32 for each row, if values have scales.
    const GROUP: Option<usize> = match Self::DTYPE {
        DType::FP8G128 => Some(fp8::LEN),
        DType::NF4G64 | DType::FP4G64 => Some(nf4::LEN),
        _ => None,
    };
    /// The levels of codes that are indices.
    const LEVELS: Option<&'static nf4::Levels> = nf4::levels(Self::DTYPE);
    /// The value of what kernels load, before its scale.
    const UNIT: f32 = match Self::DTYPE {
        DType::FP8G128 => 1.0 / E4M3_UNIT,
        _ => 1.0,
    };

    /// Returns the lines of the first `n` columns: whole lines, and whole groups if there are any.
    fn lines(n: usize) -> usize {
        match Self::GROUP {
            Some(group) => n / group * (1 + group / Self::PER_LINE),
            None => n.div_ceil(Self::PER_LINE),
        }
    }
}

/// Returns the bits of a value without its scale.
const fn value_bits(dtype: DType) -> usize {
    8 * dtype.block_bytes() / dtype.block_len()
}

macro_rules! values {
    ($($name:ident),*) => {$(
        pub(crate) struct $name;
        impl Values for $name {
            const DTYPE: DType = DType::$name;
        }
    )*};
}
values!(F32, F16, BF16, FP8G128, NF4G64, FP4G64);

/// Calls a generic function with the [`Values`] of a dtype.
macro_rules! with_values {
    ($dtype:expr, $V:ident => $body:expr) => {{
        use $crate::simd::matmul::format as formats;
        match $dtype {
            DType::F32 => {
                type $V = formats::F32;
                $body
            }
            DType::F16 => {
                type $V = formats::F16;
                $body
            }
            DType::BF16 => {
                type $V = formats::BF16;
                $body
            }
            DType::FP8G128 => {
                type $V = formats::FP8G128;
                $body
            }
            DType::NF4G64 => {
                type $V = formats::NF4G64;
                $body
            }
            DType::FP4G64 => {
                type $V = formats::FP4G64;
                $body
            }
            dtype => unreachable!("{dtype} has no float panels"),
        }
    }};
}
pub(crate) use with_values;

/// Calls a generic function with the [`WeightFormat`] of a dtype.
macro_rules! with_format {
    ($dtype:expr, $F:ident => $body:expr) => {{
        use $crate::simd::matmul::format as formats;
        match $dtype {
            DType::Q8_0 => {
                type $F = formats::Q8_0;
                $body
            }
            DType::Q4_0 => {
                type $F = formats::Q4_0;
                $body
            }
            DType::Q4_1 => {
                type $F = formats::Q4_1;
                $body
            }
            DType::Q5_0 => {
                type $F = formats::Q5_0;
                $body
            }
            DType::Q5_1 => {
                type $F = formats::Q5_1;
                $body
            }
            DType::Q2K => {
                type $F = formats::Q2K;
                $body
            }
            DType::Q3K => {
                type $F = formats::Q3K;
                $body
            }
            DType::Q4K => {
                type $F = formats::Q4K;
                $body
            }
            DType::Q5K => {
                type $F = formats::Q5K;
                $body
            }
            DType::Q6K => {
                type $F = formats::Q6K;
                $body
            }
            DType::IQ4NL => {
                type $F = formats::IQ4NL;
                $body
            }
            DType::IQ4XS => {
                type $F = formats::IQ4XS;
                $body
            }
            DType::MXFP4 => {
                type $F = formats::MXFP4;
                $body
            }
            DType::NVFP4 => {
                type $F = formats::NVFP4;
                $body
            }
            DType::Q4G128 => {
                type $F = formats::Q4G128;
                $body
            }
            DType::NVFP4G256 => {
                type $F = formats::NVFP4G256;
                $body
            }
            DType::IQ1 => {
                type $F = formats::IQ1;
                $body
            }
            DType::IQ2 => {
                type $F = formats::IQ2;
                $body
            }
            DType::IQ3 => {
                type $F = formats::IQ3;
                $body
            }
            DType::IQ3X => {
                type $F = formats::IQ3X;
                $body
            }
            DType::TQ3_1S => {
                type $F = formats::TQ3_1S;
                $body
            }
            DType::TQ4_1S => {
                type $F = formats::TQ4_1S;
                $body
            }
            DType::TQ3T => {
                type $F = formats::TQ3T;
                $body
            }
            dtype => unreachable!("{dtype} has no coded panels"),
        }
    }};
}
pub(crate) use with_format;

/// Sizes of a coded layout, in lines and columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// Columns of a unit.
    pub unit: usize,
    /// Lines of a unit's header.
    pub header: usize,
    /// Lines of 32 columns of codes.
    pub block: usize,
}

impl Layout {
    pub const fn of(spec: FieldSpec) -> Self {
        let (unit, header) = match (spec.len, spec.bits) {
            _ if spec.has_factor => (spec.len, 5),
            // Two blocks' scales fill a line.
            _ if spec.trellis.is_some() => (2 * spec.len, 1),
            // Byte scales fill a line.
            _ if spec.float.is_some() => (4 * spec.sub_len, 1),
            (GROUP_LEN, _) => (GROUP_LEN, 1),
            (256, 4) if !spec.has_min => (256, 3),
            (32, _) => (64, if spec.has_min || spec.book.is_some() { 2 } else { 1 }),
            (_, 2 | 6) => (256, 5),
            _ => (256, 4),
        };
        Self { unit, header, block: spec.bits }
    }

    /// Returns the lines of a unit of `n` columns (the last unit of a row may be half a unit).
    pub const fn unit_lines(&self, n: usize) -> usize {
        self.header + n / BLOCK * self.block
    }

    /// Returns the lines of a panel of rows of `n_in` weights.
    pub fn panel_lines(&self, n_in: usize) -> usize {
        let rest = n_in % self.unit;
        n_in / self.unit * self.unit_lines(self.unit) + if rest > 0 { self.unit_lines(rest) } else { 0 }
    }
}

/// Returns whether weights of this type are rotated, and require rotated activations.
pub(crate) fn is_rotated(dtype: DType) -> bool {
    FieldSpec::is_rotated(dtype)
}

/// Returns whether weights of this type may be multiplied in bf16, coded ones if `of_codes`. f32
/// weights are excluded: they are few, and their precision is deliberate.
pub(crate) fn has_halves(dtype: DType, of_codes: bool) -> bool {
    dtype != DType::F32 && (of_codes || is_float(dtype))
}

pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::FP8G128 | DType::NF4G64 | DType::FP4G64)
}
