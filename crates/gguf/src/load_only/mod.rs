//! Load-only types: stored in files but not supported by kernels. Loading converts their data to a
//! type with kernels, or plain numbers to f32 (`number.rs`).
//!
//! The low-bit types have blocks of 256 values, each an integer times an f16 per block times a
//! constant: with `s` a scale of some bits for 16 or 32 values, `g` a level from a *grid* (a table
//! of rows of 8 or 4 levels, indexed by a code), and signs.
//!
//! | type | bytes | bits | value | as | bits |
//! |---|---|---|---|---|---|
//! | iq1_s | 50 | 1.5625 | d/8 · (2s + 1) · (8g ± 1), s and sign for 32 values | iq1 | 3.4375 |
//! | iq1_m | 56 | 1.75 | as iq1_s, s for 16 values, sign for 8 | iq1 | 3.4375 |
//! | iq2_xxs | 66 | 2.0625 | ± d/8 · (2s + 1) · g, s for 32 values | iq2 | 3.4375 |
//! | iq2_xs | 74 | 2.3125 | as iq2_xxs, s for 16 values | iq2 | 3.4375 |
//! | iq2_s | 82 | 2.5625 | as iq2_xs, with a grid of 1024 rows | iq2 | 3.4375 |
//! | iq3_xxs | 98 | 3.0625 | ± d/4 · (2s + 1) · g, s for 32 values | iq3x | 4.25 |
//! | iq3_s | 110 | 3.4375 | ± d · (2s + 1) · g, s for 32 values | iq3 | 4.25 |
//! | tq1_0 | 54 | 1.6875 | d · (-1, 0 or 1), five to a byte | q2_K | 2.625 |
//! | tq2_0 | 66 | 2.0625 | d · (-1, 0 or 1), four to a byte | q2_K | 2.625 |
//!
//! These conversions are exact: the values are the file's, bit for bit (see [`kvant_codec::iq`]).
//! nvfp4 with a per-tensor scale becomes nvfp4_g256 or q8_0 (`scaled.rs`). Only iq3_s is written
//! too (`pack.rs`).
//!
//! The grids are constants of the format; `tools/reference/packed_types.py` generates them and the
//! test vectors.

use kvant_codec::DType;

mod number;
mod pack;
mod unpack;

pub use pack::encode_iq3_s;

/// A load-only type: stored in files, converted on loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadOnlyType {
    /// 1.5625 bits.
    Iq1S,
    /// 1.75 bits.
    Iq1M,
    /// 2.0625 bits.
    Iq2Xxs,
    /// 2.3125 bits.
    Iq2Xs,
    /// 2.5625 bits.
    Iq2S,
    /// 3.0625 bits.
    Iq3Xxs,
    /// 3.4375 bits.
    Iq3S,
    /// 1.6875 bits: three levels.
    Tq1_0,
    /// 2.0625 bits: three levels.
    Tq2_0,
    /// nvfp4 with a per-tensor scale, which becomes a part of its blocks: see `scaled.rs`.
    ScaledNvfp4,
    /// 8-bit integers.
    I8,
    /// 16-bit integers.
    I16,
    /// 32-bit integers.
    I32,
    /// 64-bit integers.
    I64,
    /// IEEE binary64.
    F64,
}

/// Values per block of the low-bit types.
const BLOCK: usize = 256;

impl LoadOnlyType {
    /// Plain numbers, converted to f32.
    pub const NUMBERS: [Self; 5] = [Self::I8, Self::I16, Self::I32, Self::I64, Self::F64];

    /// All other types.
    pub const ALL: [Self; 10] = [
        Self::Iq1S,
        Self::Iq1M,
        Self::Iq2Xxs,
        Self::Iq2Xs,
        Self::Iq2S,
        Self::Iq3Xxs,
        Self::Iq3S,
        Self::Tq1_0,
        Self::Tq2_0,
        Self::ScaledNvfp4,
    ];

    /// Returns the type after loading; rows of [`LoadOnlyType::ScaledNvfp4`] that are not whole
    /// blocks of it have another.
    pub const fn loaded_type(self) -> DType {
        match self {
            Self::Iq1S | Self::Iq1M => DType::IQ1,
            Self::Iq2Xxs | Self::Iq2Xs | Self::Iq2S => DType::IQ2,
            Self::Iq3S => DType::IQ3,
            Self::Iq3Xxs => DType::IQ3X,
            Self::Tq1_0 | Self::Tq2_0 => DType::Q2K,
            Self::ScaledNvfp4 => DType::NVFP4G256,
            Self::I8 | Self::I16 | Self::I32 | Self::I64 | Self::F64 => DType::F32,
        }
    }

    /// Returns the name, the tensor type id in GGUF files, and the bytes per block.
    const fn sheet(self) -> (&'static str, Option<u32>, usize) {
        match self {
            Self::Iq1S => ("iq1_s", Some(19), 50),
            Self::Iq1M => ("iq1_m", Some(29), 56),
            Self::Iq2Xxs => ("iq2_xxs", Some(16), 66),
            Self::Iq2Xs => ("iq2_xs", Some(17), 74),
            Self::Iq2S => ("iq2_s", Some(22), 82),
            Self::Iq3Xxs => ("iq3_xxs", Some(18), 98),
            Self::Iq3S => ("iq3_s", Some(21), 110),
            Self::Tq1_0 => ("tq1_0", Some(34), 54),
            Self::Tq2_0 => ("tq2_0", Some(35), 66),
            Self::ScaledNvfp4 => ("nvfp4 with a scale", None, DType::NVFP4.block_bytes()),
            Self::I8 => ("i8", Some(24), 1),
            Self::I16 => ("i16", Some(25), 2),
            Self::I32 => ("i32", Some(26), 4),
            Self::I64 => ("i64", Some(27), 8),
            Self::F64 => ("f64", Some(28), 8),
        }
    }

    /// Returns the name that other programs print.
    pub const fn name(self) -> &'static str {
        self.sheet().0
    }

    /// Returns the tensor type id in GGUF files, if it has one of its own.
    pub const fn ggml_id(self) -> Option<u32> {
        self.sheet().1
    }

    /// Returns the values per block.
    pub const fn block_len(self) -> usize {
        match self {
            Self::ScaledNvfp4 => DType::NVFP4.block_len(),
            Self::I8 | Self::I16 | Self::I32 | Self::I64 | Self::F64 => 1,
            _ => BLOCK,
        }
    }

    /// Returns the bytes per block.
    pub const fn block_bytes(self) -> usize {
        self.sheet().2
    }

    /// Returns the load-only type of a GGUF tensor type id.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::stored().find(|packed| packed.ggml_id() == Some(id))
    }

    /// Returns the types with a tensor type id of their own.
    pub(crate) fn stored() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().chain(Self::NUMBERS).filter(|packed| packed.ggml_id().is_some())
    }

    /// Converts whole blocks to [`Packed::unpacked`], on every core.
    pub(crate) fn unpack(self, bytes: &[u8]) -> Vec<u8> {
        if Self::NUMBERS.contains(&self) {
            return number::as_f32(self, bytes);
        }
        let (from, to) = (self.block_bytes(), self.loaded_type().block_bytes());
        let n_blocks = bytes.len() / from;
        let mut out = vec![0; n_blocks * to];
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        let each = n_blocks.div_ceil(n_threads).max(1);
        let work = |bytes: &[u8], out: &mut [u8]| {
            let blocks = bytes.chunks_exact(from).zip(out.chunks_exact_mut(to));
            blocks.for_each(|(block, out)| self.convert(block, out));
        };
        // Some systems have no threads.
        if each >= n_blocks {
            work(bytes, &mut out);
            return out;
        }
        std::thread::scope(|scope| {
            let shares = bytes.chunks(each * from).zip(out.chunks_mut(each * to));
            shares.for_each(|(bytes, out)| _ = scope.spawn(move || work(bytes, out)));
        });
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns each type with a block and its values, as computed by PyPI `gguf`.
    fn vectors() -> Vec<(LoadOnlyType, &'static [u8], Vec<f32>)> {
        let (mut rest, mut all) = (&include_bytes!("vectors.bin")[..], Vec::new());
        while let Some((id, data)) = rest.split_first_chunk() {
            let packed = LoadOnlyType::from_ggml_id(u32::from_le_bytes(*id)).unwrap();
            rest = data;
            for _ in 0..2 {
                let (block, data) = rest.split_at(packed.block_bytes());
                let (values, data) = data.split_at(4 * BLOCK);
                let values = values.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
                all.push((packed, block, values));
                rest = data;
            }
        }
        assert_eq!(all.len(), 2 * 9);
        all
    }

    #[test]
    fn unpacked_values_equal_those_of_gguf_py() {
        for (packed, block, want) in vectors() {
            let mut values = vec![0.0; BLOCK];
            kvant_codec::decode(packed.loaded_type(), &packed.unpack(block), &mut values).unwrap();
            // Bit for bit, except for the sign of zero.
            assert_eq!(values, want, "{}", packed.name());
        }
    }

    /// Covers the last of many blocks, on any thread.
    #[test]
    fn every_block_is_unpacked() {
        for (packed, block, _) in vectors() {
            let one = packed.unpack(block);
            assert_eq!(packed.unpack(&block.repeat(33)), one.repeat(33), "{}", packed.name());
        }
    }

    #[test]
    fn ids_round_trip_and_names_are_distinct_from_dtypes() {
        for packed in LoadOnlyType::ALL.into_iter().chain(LoadOnlyType::NUMBERS) {
            if let Some(id) = packed.ggml_id() {
                assert_eq!((LoadOnlyType::from_ggml_id(id), DType::from_ggml_id(id)), (Some(packed), None));
            }
            assert!(packed.name().parse::<DType>().is_err());
        }
    }
}
