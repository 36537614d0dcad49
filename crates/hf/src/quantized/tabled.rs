//! Codes of bitsandbytes: 4 bits into a table of levels, as blocks of nf4_g64 or fp4_g64, or as
//! values of the model's type.

use kvant_codec::{DType, nf4};

use super::floats::{put, scales};
use crate::safetensors::{Shards, Stored};

/// A matrix of codes: `value = level(code) · scale`.
///
/// Groups divide the matrix as one sequence, row after row, so they may begin within a row.
#[derive(Debug, Clone)]
pub(crate) struct Tabled {
    pub n_out: usize,
    pub n_in: usize,
    /// Pairs of values in bytes, the first in the high half.
    pub codes: Stored,
    pub scales: Scales,
    /// Values that share a scale.
    pub group: usize,
    pub levels: &'static nf4::Levels,
    /// The type of [`Tabled::rows`].
    pub dtype: DType,
    /// The type of its values.
    pub dense_dtype: DType,
}

/// The scales of a matrix.
#[derive(Debug, Clone)]
pub(crate) enum Scales {
    Values(Stored),
    /// Quantized themselves (QLoRA's double quantization).
    Coded(CodedScales),
}

/// Quantized scales: `scale = level(code) · factor + offset`, both results rounded to f32.
#[derive(Debug, Clone)]
pub(crate) struct CodedScales {
    pub codes: Stored,
    /// The levels of the 256 codes.
    pub levels: Stored,
    /// One for each `group` scales.
    pub factors: Stored,
    pub group: usize,
    pub offset: f32,
}

impl Scales {
    fn values(&self, shards: &Shards) -> Vec<f32> {
        let coded = match self {
            Self::Values(stored) => return scales(stored, shards),
            Self::Coded(coded) => coded,
        };
        let (levels, factors) = (scales(&coded.levels, shards), scales(&coded.factors, shards));
        let groups = shards.data(&coded.codes);
        let groups = groups.chunks(coded.group).zip(factors);
        let of_group = |(codes, factor): (&[u8], f32)| -> Vec<f32> {
            codes.iter().map(|code| levels[usize::from(*code)] * factor + coded.offset).collect()
        };
        groups.flat_map(of_group).collect()
    }
}

impl Tabled {
    /// Chooses the type of `blocks` where rows are whole blocks and a block has one scale.
    ///
    /// The values of others are rounded to the type of the model, as the library does.
    pub fn with_blocks(self, blocks: DType) -> Self {
        let has_blocks = self.n_in.is_multiple_of(nf4::LEN) && self.group.is_multiple_of(nf4::LEN);
        let dtype = if has_blocks { blocks } else { self.dense_dtype };
        Self { dtype, ..self }
    }

    /// Returns the rows, in blocks or values.
    pub fn rows(&self, shards: &Shards) -> Vec<u8> {
        let (codes, scales) = (shards.data(&self.codes), self.scales.values(shards));
        if self.dtype.block_len() == nf4::LEN {
            self.blocks(&codes, &scales)
        } else {
            self.values(&codes, &scales)
        }
    }

    fn blocks(&self, codes: &[u8], scales: &[f32]) -> Vec<u8> {
        let (per_scale, code_bytes) = (self.group / nf4::LEN, nf4::LEN / 2);
        let mut out = vec![0; codes.len() / code_bytes * nf4::BYTES];
        let blocks = codes.chunks_exact(code_bytes).zip(out.chunks_exact_mut(nf4::BYTES));
        for (at, (codes, out)) in blocks.enumerate() {
            let (header, to) = out.split_at_mut(nf4::HEADER);
            header.copy_from_slice(&scales[at / per_scale].to_le_bytes());
            to.copy_from_slice(codes);
        }
        out
    }

    fn values(&self, codes: &[u8], scales: &[f32]) -> Vec<u8> {
        let size = self.dtype.block_bytes();
        let mut out = vec![0; self.n_out * self.n_in * size];
        for (i, out) in out.chunks_exact_mut(size).enumerate() {
            let code = codes[i / 2] >> (4 * (1 - i % 2)) & 15;
            put(self.dtype, self.levels[usize::from(code)] * scales[i / self.group], out);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tabled(n_in: usize, group: usize) -> Tabled {
        let (codes, scales) = (Stored::empty(), Scales::Values(Stored::empty()));
        let (levels, dtype, dense_dtype) = (&nf4::NF4, DType::F32, DType::F32);
        Tabled { n_out: 3, n_in, codes, scales, group, levels, dtype, dense_dtype }
    }

    #[test]
    fn blocks_have_the_values_of_codes_and_scales() {
        for group in [64, 128, 256, 4096] {
            let tabled = tabled(192, group);
            let codes: Vec<u8> = (0..3 * 96).map(|i| (i * 31 % 251) as u8).collect();
            let scales: Vec<f32> = (0..(3usize * 192).div_ceil(group)).map(|i| 0.1 + i as f32).collect();
            let mut values = vec![0.0; 3 * 192];
            kvant_codec::decode(DType::NF4G64, &tabled.blocks(&codes, &scales), &mut values).unwrap();
            let want: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(tabled.values(&codes, &scales), want, "{group}");
            assert_eq!(tabled.with_blocks(DType::NF4G64).dtype, DType::NF4G64, "{group}");
        }
    }

    #[test]
    fn groups_across_rows_and_of_32_become_values() {
        for (n_in, group) in [(96, 64), (32, 128), (64, 32)] {
            assert_eq!(tabled(n_in, group).with_blocks(DType::NF4G64).dtype, DType::F32, "{n_in} {group}");
        }
        // Three rows of three: a group of two ends within the second.
        let tabled = Tabled { n_in: 3, group: 2, ..tabled(3, 2) };
        let values = tabled.values(&[0xff, 0xff, 0xff, 0xff, 0xf0], &[1.0, 2.0, 3.0, 4.0, 5.0]);
        let values: Vec<f32> = values.as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)).collect();
        assert_eq!(values, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0]);
    }
}
