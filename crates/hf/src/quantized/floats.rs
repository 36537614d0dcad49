//! 8-bit floats (E4M3) with scales, as blocks of fp8_g128, or as values of the model's type.

use half::{bf16, f16};
use kvant_codec::fp4::ByteFloat;
use kvant_codec::{DType, fp8};

use crate::safetensors::{ElementKind, Shards, Stored};

/// A matrix of E4M3 codes: `value = code · scale`.
#[derive(Debug, Clone)]
pub(crate) struct Floats {
    pub n_out: usize,
    pub n_in: usize,
    pub codes: Stored,
    pub scales: Stored,
    /// Outputs and inputs that share a scale.
    pub block: [usize; 2],
    /// The type of [`Floats::rows`].
    pub dtype: DType,
    /// The type of its values.
    pub dense_dtype: DType,
}

impl Floats {
    /// Chooses fp8_g128 where 128 inputs share a scale, which holds the same numbers: the product
    /// of code and scale in f32.
    ///
    /// The values of others are rounded to the 16 bits in which the libraries compute, and take
    /// twice the memory of the file.
    pub fn with_dtype(self) -> Self {
        let columns = self.block[1];
        let is_whole = columns.is_multiple_of(fp8::LEN) || columns >= self.n_in;
        let has_groups = self.n_in.is_multiple_of(fp8::LEN) && is_whole;
        let dtype = if has_groups { DType::FP8G128 } else { self.dense_dtype };
        Self { dtype, ..self }
    }

    /// Returns the rows, in blocks or values.
    pub fn rows(&self, shards: &Shards) -> Vec<u8> {
        let codes = shards.data(&self.codes);
        let scales = scales(&self.scales, shards);
        match self.dtype {
            DType::FP8G128 => self.blocks(&codes, &scales),
            _ => self.values(&codes, &scales),
        }
    }

    fn blocks(&self, codes: &[u8], scales: &[f32]) -> Vec<u8> {
        let [rows, columns] = self.block;
        let per_row = self.n_in.div_ceil(columns);
        let mut out = vec![0; codes.len() / fp8::LEN * fp8::BYTES];
        let blocks = codes.chunks_exact(fp8::LEN).zip(out.chunks_exact_mut(fp8::BYTES));
        for (at, (codes, out)) in blocks.enumerate() {
            let (row, column) = (at * fp8::LEN / self.n_in, at * fp8::LEN % self.n_in);
            let (header, to) = out.split_at_mut(fp8::HEADER);
            header.copy_from_slice(&scales[row / rows * per_row + column / columns].to_le_bytes());
            to.copy_from_slice(codes);
        }
        out
    }

    fn values(&self, codes: &[u8], scales: &[f32]) -> Vec<u8> {
        let known: Vec<f32> = (0..=u8::MAX).map(fp8::to_f32).collect();
        let [rows, columns] = self.block;
        let per_row = self.n_in.div_ceil(columns);
        let size = self.dtype.block_bytes();
        let mut out = vec![0; codes.len() * size];
        let values = codes.chunks_exact(self.n_in).zip(out.chunks_exact_mut(self.n_in * size));
        for (row, (codes, out)) in values.enumerate() {
            let scales = &scales[row / rows * per_row..][..per_row];
            let blocks = codes.chunks(columns).zip(out.chunks_mut(columns * size));
            for ((codes, out), scale) in blocks.zip(scales) {
                for (code, out) in codes.iter().zip(out.chunks_exact_mut(size)) {
                    put(self.dtype, known[usize::from(*code)] * scale, out);
                }
            }
        }
        out
    }
}

/// Returns scales in f32.
pub(super) fn scales(stored: &Stored, shards: &Shards) -> Vec<f32> {
    let bytes = shards.data(stored);
    match stored.holds {
        ElementKind::Values(dtype) => {
            let mut values = vec![0.0; bytes.len() / dtype.block_bytes()];
            kvant_codec::decode(dtype, &bytes, &mut values).expect("scales are single values");
            values
        }
        _ => bytes.iter().map(|power| ByteFloat::E8M0.to_f32(*power)).collect(),
    }
}

/// Writes a value rounded to `dtype`.
pub(super) fn put(dtype: DType, value: f32, out: &mut [u8]) {
    match dtype {
        DType::F16 => out.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        DType::BF16 => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        _ => out.copy_from_slice(&value.to_le_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(n_in: usize, block: [usize; 2]) -> Floats {
        let (codes, scales) = (Stored::empty(), Stored::empty());
        Floats { n_out: 5, n_in, codes, scales, block, dtype: DType::F32, dense_dtype: DType::F32 }
    }

    #[test]
    fn blocks_have_the_values_of_codes_and_scales() {
        for block in [[5, 512], [1, 512], [128, 128], [2, 256], [1, 1024]] {
            let floats = floats(512, block);
            // Without 0x7f and 0xff, which are NaN.
            let codes: Vec<u8> = (0..5 * 512).map(|i| (i * 31 % 127 + i % 2 * 128) as u8).collect();
            let n_scales = 5usize.div_ceil(block[0]) * 512usize.div_ceil(block[1]);
            let scales: Vec<f32> = (0..n_scales).map(|i| 0.001_37 * (i + 1) as f32).collect();
            let mut values = vec![0.0; codes.len()];
            kvant_codec::decode(DType::FP8G128, &floats.blocks(&codes, &scales), &mut values).unwrap();
            let want: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(floats.values(&codes, &scales), want, "{block:?}");
            assert_eq!(floats.with_dtype().dtype, DType::FP8G128, "{block:?}");
        }
    }

    #[test]
    fn other_groups_than_of_128_become_values() {
        for (n_in, block) in [(500, [1, 500]), (512, [64, 64]), (512, [1, 192]), (64, [1, 64])] {
            assert_eq!(floats(n_in, block).with_dtype().dtype, DType::F32, "{n_in} {block:?}");
        }
    }
}
