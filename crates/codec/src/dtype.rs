//! The storage formats: names, sizes and GGML ids.

use std::fmt;
use std::str::FromStr;

use crate::{Codebook, CodecError, Trellis, block32, factored_fp4, fp8, grouped, nf4, tq3t};

/// A storage format for a row of numbers.
///
/// Weights use any of them except turbo; the KV cache supports those in [`DType::KV`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// 32 values: f16 scale, signed bytes.
    Q8_0,
    /// 32 values: f16 scale, nibbles centred on 8.
    Q4_0,
    /// 32 values: f16 scale and minimum, nibbles.
    Q4_1,
    /// 32 values: f16 scale, 5-bit codes centred on 16.
    Q5_0,
    /// 32 values: f16 scale and minimum, 5-bit codes.
    Q5_1,
    /// 256 values: 16 sub-blocks of 16 with 4-bit scales and minima, 2-bit codes.
    Q2K,
    /// 256 values: 16 sub-blocks of 16 with 6-bit scales, 3-bit codes.
    Q3K,
    /// 256 values: 8 sub-blocks of 32 with 6-bit scales and minima, 4-bit codes.
    Q4K,
    /// 256 values: 8 sub-blocks of 32 with 6-bit scales and minima, 5-bit codes.
    Q5K,
    /// 256 values: 16 sub-blocks of 16 with 8-bit scales, 6-bit codes.
    Q6K,
    /// 32 values: f16 scale, 4-bit indices of a table.
    IQ4NL,
    /// 256 values: 8 sub-blocks of 32 with 6-bit scales, 4-bit indices of a table.
    IQ4XS,
    /// 32 values: a power of two, E2M1 floats.
    MXFP4,
    /// 64 values: 4 sub-blocks of 16 with E4M3 scales, E2M1 floats.
    NVFP4,
    /// 128 values: f16 scale, integer zero, nibbles. AWQ and GPTQ.
    Q4G128,
    /// 128 values: f32 scale, E4M3 floats. FP8 checkpoints.
    FP8G128,
    /// 256 values: f32 factor, 16 sub-blocks of 16 with E4M3 scales, E2M1 floats. NVFP4
    /// checkpoints.
    NVFP4G256,
    /// 64 values: f32 scale, indices of the 16 levels of NF4. bitsandbytes.
    NF4G64,
    /// 64 values: f32 scale, indices of the 16 levels of bitsandbytes' FP4.
    FP4G64,
    /// 256 values: 16 sub-blocks of 16 with 6-bit scales, 3-bit indices of a table. Expanded iq1_s
    /// and iq1_m.
    IQ1,
    /// As [`DType::IQ1`] with another table. Expanded iq2_xxs, iq2_xs and iq2_s.
    IQ2,
    /// 256 values: 8 sub-blocks of 32 with 6-bit scales, 4-bit indices of a table. Expanded iq3_s.
    IQ3,
    /// As [`DType::IQ3`] with another table. Expanded iq3_xxs.
    IQ3X,
    /// 32 rotated values: two f16 scales, 3-bit codebook indices.
    TQ3_1S,
    /// 32 rotated values: two f16 scales, 4-bit codebook indices.
    TQ4_1S,
    /// 128 values, rotated by 32: one f16 scale, 3-bit indices; a level depends on the index before
    /// it too.
    TQ3T,
    /// 128 rotated values: one f16 scale, 2-bit Lloyd-Max indices. KV only.
    Turbo2,
    /// 128 rotated values: one f16 scale, 3-bit Lloyd-Max indices. KV only.
    Turbo3,
    /// 128 rotated values: one f16 scale, 4-bit Lloyd-Max indices. KV only.
    Turbo4,
    /// 128 rotated values: one f16 scale, 2-bit indices; a level depends on the two indices before
    /// it too. KV only.
    Turbo2T,
    /// 128 rotated values: one f16 scale, 3-bit indices; a level depends on the index before it
    /// too. KV only.
    Turbo3T,
}

impl DType {
    /// Every format.
    pub const ALL: [Self; 34] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::IQ4NL,
        Self::IQ4XS,
        Self::MXFP4,
        Self::NVFP4,
        Self::Q4G128,
        Self::FP8G128,
        Self::NVFP4G256,
        Self::NF4G64,
        Self::FP4G64,
        Self::IQ1,
        Self::IQ2,
        Self::IQ3,
        Self::IQ3X,
        Self::TQ3_1S,
        Self::TQ4_1S,
        Self::TQ3T,
        Self::Turbo2,
        Self::Turbo3,
        Self::Turbo4,
        Self::Turbo2T,
        Self::Turbo3T,
    ];

    /// The formats that a KV cache supports.
    pub const KV: [Self; 10] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Turbo2,
        Self::Turbo3,
        Self::Turbo4,
        Self::Turbo2T,
        Self::Turbo3T,
    ];

    /// Returns the data sheet of the format.
    pub const fn format(self) -> &'static FormatSpec {
        &FORMATS[self as usize]
    }

    /// Returns the name that users type and files print, e.g. `q4_K` or `turbo3`.
    pub const fn name(self) -> &'static str {
        self.format().name
    }

    /// Returns the values per block, the unit of encoding.
    pub const fn block_len(self) -> usize {
        self.format().block_len
    }

    /// Returns the bytes per block, scales included.
    pub const fn block_bytes(self) -> usize {
        self.format().block_bytes
    }

    /// Returns the bits per stored value, scales included.
    pub fn bits_per_value(self) -> f64 {
        (8 * self.block_bytes()) as f64 / self.block_len() as f64
    }

    /// Returns the mean squared error of a cache type on Gaussian vectors, relative to their mean
    /// square, as measured by `eval distortion`; 0 for floats and for types that no cache supports.
    pub const fn squared_error(self) -> f64 {
        match self {
            Self::Q8_0 => 3e-5,
            Self::Q4_0 => 0.0074,
            Self::Turbo4 => 0.0079,
            Self::Turbo3 => 0.0318,
            Self::Turbo3T => 0.0216,
            Self::Turbo2 => 0.1175,
            Self::Turbo2T => 0.0802,
            _ => 0.0,
        }
    }

    /// Returns the tensor type id in GGUF files. `None` for formats that no file contains: turbo,
    /// and iq1 to iq3x ([`crate::iq`]).
    ///
    /// 45 and 46 (tq3_1s, tq4_1s) are private to one fork; upstream may assign them another
    /// meaning. Those of q4_g128, fp8_g128, nvfp4_g256, nf4_g64, fp4_g64 and tq3t are Kvant's
    /// own.
    pub const fn ggml_id(self) -> Option<u32> {
        self.format().ggml_id
    }

    /// Returns the format of a GGUF tensor type id, `None` if this crate does not support it.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.ggml_id() == Some(id))
    }

    /// Returns the format with the same block layout: itself, except for iq1 to iq3x, which differ
    /// from it in their levels.
    pub const fn layout(self) -> Self {
        match self {
            Self::IQ1 | Self::IQ2 => Self::Q3K,
            Self::IQ3 | Self::IQ3X => Self::IQ4XS,
            own => own,
        }
    }

    /// Returns whether devices accept weights of this format.
    pub const fn is_weight(self) -> bool {
        self.layout().ggml_id().is_some()
    }

    /// Returns every format that devices accept for weights.
    pub fn weights() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|t| t.is_weight())
    }

    /// Returns the bytes of a row of `values` numbers.
    ///
    /// # Errors
    /// [`CodecError::NotWholeBlocks`] unless `values` is a multiple of [`DType::block_len`];
    /// [`CodecError::TooLarge`] when the size does not fit `usize`.
    pub fn row_bytes(self, values: usize) -> Result<usize, CodecError> {
        let block = self.block_len();
        if !values.is_multiple_of(block) {
            return Err(CodecError::NotWholeBlocks { dtype: self, block, got: values });
        }
        (values / block).checked_mul(self.block_bytes()).ok_or(CodecError::TooLarge { dtype: self, values })
    }

    /// Returns whether a KV cache supports the format.
    pub const fn is_kv(self) -> bool {
        !matches!(self.format().kv, KvEncoding::No)
    }

    /// Returns the KV-cache encoding; `None` for float types and for types that no cache supports.
    pub const fn code(self) -> Option<&'static KvCode> {
        match &self.format().kv {
            KvEncoding::Coded(code) => Some(code),
            KvEncoding::No | KvEncoding::Float => None,
        }
    }

    /// Returns the largest representable magnitude, to which [`crate::finite::clamp`] clamps
    /// values.
    pub fn max_abs(self) -> f32 {
        match self {
            Self::F32 => f32::MAX,
            Self::BF16 => half::bf16::MAX.to_f32(),
            Self::MXFP4 => crate::fp4::MXFP4_MAX,
            Self::NVFP4 => crate::fp4::NVFP4_MAX,
            _ => crate::finite::F16_MAX,
        }
    }
}

/// The data sheet of a format: what a new format adds here, besides its reference and its kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FormatSpec {
    /// The format.
    pub dtype: DType,
    /// The name that users type and files print.
    pub name: &'static str,
    /// The tensor type id in GGUF files.
    pub ggml_id: Option<u32>,
    /// Values per block.
    pub block_len: usize,
    /// Bytes per block, scales included.
    pub block_bytes: usize,
    /// How a KV cache stores it.
    pub kv: KvEncoding,
}

/// How a KV cache stores a format.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvEncoding {
    /// Not supported.
    No,
    /// As floats.
    Float,
    /// As codes with scales.
    Coded(KvCode),
}

/// KV-cache codes: each token has, for each block of dims, an f16 scale and one code per dim.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvCode {
    /// Bits per value.
    pub bits: usize,
    /// The values of codes, in units of the scale.
    pub levels: Levels,
}

/// The values of codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Levels {
    /// Uniform steps: `code - zero`. Blocks of 32 dims.
    Steps {
        /// The code of zero.
        zero: u8,
    },
    /// Centroids of a codebook, for rotated values. Blocks of 128, 64 and 32 dims that partition
    /// the head.
    Book(Codebook),
    /// Levels of a codebook with memory, for values rotated and sliced as in [`Levels::Book`].
    Trellis(Trellis),
}

impl KvCode {
    /// Returns the scalar codebook, if any.
    pub const fn book(&self) -> Option<&Codebook> {
        match &self.levels {
            Levels::Book(book) => Some(book),
            Levels::Steps { .. } | Levels::Trellis(_) => None,
        }
    }

    /// Returns the largest number of dims that share a scale: 32, or 128.
    pub const fn max_dims(&self) -> usize {
        match &self.levels {
            Levels::Steps { .. } => 32,
            Levels::Book(_) | Levels::Trellis(_) => 128,
        }
    }
}

/// Builds one row of the format table.
const fn format(
    dtype: DType,
    name: &'static str,
    ggml_id: Option<u32>,
    [block_len, block_bytes]: [usize; 2],
    kv: KvEncoding,
) -> FormatSpec {
    FormatSpec { dtype, name, ggml_id, block_len, block_bytes, kv }
}

const fn steps(bits: usize, zero: u8) -> KvEncoding {
    KvEncoding::Coded(KvCode { bits, levels: Levels::Steps { zero } })
}

const fn book(book: Codebook) -> KvEncoding {
    KvEncoding::Coded(KvCode { bits: book.bits() as usize, levels: Levels::Book(book) })
}

const fn trellis(trellis: Trellis) -> KvEncoding {
    KvEncoding::Coded(KvCode { bits: trellis.bits() as usize, levels: Levels::Trellis(trellis) })
}

/// Tensor type ids of types that only Kvant writes: far beyond GGML's own. Those of blocks of the
/// same size differ in two bits at least, so that no flipped bit reads one as another.
const Q4G128_ID: u32 = 19_318;
const FP8G128_ID: u32 = 19_319;
const NVFP4G256_ID: u32 = 19_320;
const TQ3T_ID: u32 = 19_321;
const NF4G64_ID: u32 = 19_322;
const FP4G64_ID: u32 = 19_325;

/// The formats, in the order of [`DType`].
static FORMATS: [FormatSpec; 34] = [
    format(DType::F32, "f32", Some(0), [1, 4], KvEncoding::Float),
    format(DType::F16, "f16", Some(1), [1, 2], KvEncoding::Float),
    format(DType::BF16, "bf16", Some(30), [1, 2], KvEncoding::Float),
    format(DType::Q8_0, "q8_0", Some(8), [32, 34], steps(8, block32::Q8_0_ZERO)),
    format(DType::Q4_0, "q4_0", Some(2), [32, 18], steps(4, block32::Q4_0_ZERO)),
    format(DType::Q4_1, "q4_1", Some(3), [32, 20], KvEncoding::No),
    format(DType::Q5_0, "q5_0", Some(6), [32, 22], KvEncoding::No),
    format(DType::Q5_1, "q5_1", Some(7), [32, 24], KvEncoding::No),
    format(DType::Q2K, "q2_K", Some(10), [256, 84], KvEncoding::No),
    format(DType::Q3K, "q3_K", Some(11), [256, 110], KvEncoding::No),
    format(DType::Q4K, "q4_K", Some(12), [256, 144], KvEncoding::No),
    format(DType::Q5K, "q5_K", Some(13), [256, 176], KvEncoding::No),
    format(DType::Q6K, "q6_K", Some(14), [256, 210], KvEncoding::No),
    format(DType::IQ4NL, "iq4_nl", Some(20), [32, 18], KvEncoding::No),
    format(DType::IQ4XS, "iq4_xs", Some(23), [256, 136], KvEncoding::No),
    format(DType::MXFP4, "mxfp4", Some(39), [32, 17], KvEncoding::No),
    format(DType::NVFP4, "nvfp4", Some(40), [64, 36], KvEncoding::No),
    format(DType::Q4G128, "q4_g128", Some(Q4G128_ID), [grouped::LEN, grouped::BYTES], KvEncoding::No),
    format(DType::FP8G128, "fp8_g128", Some(FP8G128_ID), [fp8::LEN, fp8::BYTES], KvEncoding::No),
    format(
        DType::NVFP4G256,
        "nvfp4_g256",
        Some(NVFP4G256_ID),
        [factored_fp4::LEN, factored_fp4::BYTES],
        KvEncoding::No,
    ),
    format(DType::NF4G64, "nf4_g64", Some(NF4G64_ID), [nf4::LEN, nf4::BYTES], KvEncoding::No),
    format(DType::FP4G64, "fp4_g64", Some(FP4G64_ID), [nf4::LEN, nf4::BYTES], KvEncoding::No),
    format(DType::IQ1, "iq1", None, [256, 110], KvEncoding::No),
    format(DType::IQ2, "iq2", None, [256, 110], KvEncoding::No),
    format(DType::IQ3, "iq3", None, [256, 136], KvEncoding::No),
    format(DType::IQ3X, "iq3x", None, [256, 136], KvEncoding::No),
    format(DType::TQ3_1S, "tq3_1s", Some(45), [32, 16], KvEncoding::No),
    format(DType::TQ4_1S, "tq4_1s", Some(46), [32, 20], KvEncoding::No),
    format(DType::TQ3T, "tq3t", Some(TQ3T_ID), [tq3t::LEN, tq3t::BYTES], KvEncoding::No),
    format(DType::Turbo2, "turbo2", None, [128, 34], book(Codebook::GAUSS2)),
    format(DType::Turbo3, "turbo3", None, [128, 50], book(Codebook::GAUSS3)),
    format(DType::Turbo4, "turbo4", None, [128, 66], book(Codebook::GAUSS4)),
    format(DType::Turbo2T, "turbo2t", None, [128, 34], trellis(Trellis::TURBO2T)),
    format(DType::Turbo3T, "turbo3t", None, [128, 50], trellis(Trellis::TURBO3T)),
];

/// Joins the names of `types`, for messages.
pub(crate) fn list(types: &[DType]) -> String {
    types.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = CodecError;

    /// Parses a name as [`DType::name`] writes it, ignoring case.
    fn from_str(s: &str) -> Result<Self, CodecError> {
        Self::ALL
            .into_iter()
            .find(|t| t.name().eq_ignore_ascii_case(s))
            .ok_or_else(|| CodecError::UnknownName { name: s.to_owned(), known: list(&Self::ALL) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_published_ones() {
        let want = [
            (DType::F32, 1, 4, 32.0),
            (DType::F16, 1, 2, 16.0),
            (DType::BF16, 1, 2, 16.0),
            (DType::Q8_0, 32, 34, 8.5),
            (DType::Q4_0, 32, 18, 4.5),
            (DType::Q4_1, 32, 20, 5.0),
            (DType::Q5_0, 32, 22, 5.5),
            (DType::Q5_1, 32, 24, 6.0),
            (DType::Q2K, 256, 84, 2.625),
            (DType::Q3K, 256, 110, 3.4375),
            (DType::Q4K, 256, 144, 4.5),
            (DType::Q5K, 256, 176, 5.5),
            (DType::Q6K, 256, 210, 6.5625),
            (DType::IQ4NL, 32, 18, 4.5),
            (DType::IQ4XS, 256, 136, 4.25),
            (DType::MXFP4, 32, 17, 4.25),
            (DType::NVFP4, 64, 36, 4.5),
            (DType::Q4G128, 128, 68, 4.25),
            (DType::FP8G128, 128, 132, 8.25),
            (DType::NVFP4G256, 256, 148, 4.625),
            (DType::NF4G64, 64, 36, 4.5),
            (DType::FP4G64, 64, 36, 4.5),
            (DType::IQ1, 256, 110, 3.4375),
            (DType::IQ2, 256, 110, 3.4375),
            (DType::IQ3, 256, 136, 4.25),
            (DType::IQ3X, 256, 136, 4.25),
            (DType::TQ3_1S, 32, 16, 4.0),
            (DType::TQ4_1S, 32, 20, 5.0),
            (DType::TQ3T, 128, 50, 3.125),
            (DType::Turbo2, 128, 34, 2.125),
            (DType::Turbo3, 128, 50, 3.125),
            (DType::Turbo4, 128, 66, 4.125),
            (DType::Turbo2T, 128, 34, 2.125),
            (DType::Turbo3T, 128, 50, 3.125),
        ];
        assert_eq!(want.map(|w| w.0), DType::ALL);
        for (t, len, bytes, bpv) in want {
            assert_eq!((t.block_len(), t.block_bytes(), t.bits_per_value()), (len, bytes, bpv), "{t}");
            assert_eq!(t.row_bytes(4 * len), Ok(4 * bytes), "{t}");
        }
    }

    #[test]
    fn names_and_ids_round_trip() {
        for t in DType::ALL {
            assert_eq!(t.name().parse(), Ok(t));
            assert_eq!(t.name().to_uppercase().parse(), Ok(t));
            assert_eq!(t.format().dtype, t);
            let is_turbo = t.code().is_some_and(|code| code.max_dims() == 128);
            assert_eq!(t.ggml_id().is_none(), is_turbo || t.layout() != t, "{t}");
            assert_eq!(t.is_weight(), !is_turbo, "{t}");
            assert_eq!(
                (t.block_len(), t.block_bytes()),
                (t.layout().block_len(), t.layout().block_bytes()),
                "{t}"
            );
            if let Some(id) = t.ggml_id() {
                assert_eq!(DType::from_ggml_id(id), Some(t));
            }
        }
        // 4, 5: formats removed from GGML; 9: q8_1; 42..=44: turbo in one fork, never in a file.
        for id in [4, 5, 9, 15, 42, 43, 44, 47, u32::MAX] {
            assert_eq!(DType::from_ggml_id(id), None);
        }
    }

    #[test]
    fn kv_formats_match_the_table() {
        let kv: Vec<DType> = DType::ALL.into_iter().filter(|t| t.is_kv()).collect();
        assert_eq!(kv, DType::KV);
        for (t, code) in DType::KV.into_iter().filter_map(|t| Some((t, t.code()?))) {
            // A row of one block: its codes and an f16 scale.
            assert_eq!(t.block_bytes(), code.max_dims() * code.bits / 8 + 2, "{t}");
            assert_eq!(t.block_len(), code.max_dims(), "{t}");
            let levels = code.book().map_or(1 << code.bits, |book| book.levels().len());
            assert_eq!(levels, 1 << code.bits, "{t}");
        }
    }

    #[test]
    fn unknown_name_lists_the_known_ones() {
        let message = "turbo5".parse::<DType>().unwrap_err().to_string();
        assert!(message.contains("\"turbo5\"") && message.contains("turbo4") && message.contains("q4_K"));
    }

    #[test]
    fn rows_of_partial_blocks_or_excessive_size_are_rejected() {
        assert_eq!(
            DType::Q4K.row_bytes(255),
            Err(CodecError::NotWholeBlocks { dtype: DType::Q4K, block: 256, got: 255 })
        );
        assert!(matches!(DType::F32.row_bytes(usize::MAX), Err(CodecError::TooLarge { .. })));
        assert_eq!(DType::Turbo3.row_bytes(0), Ok(0));
    }
}
