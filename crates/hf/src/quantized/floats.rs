//! 8-bit floats (E4M3) with scales, as values of the model's type.
//!
//! No kernel type holds them yet, so their values are rounded to the 16 bits in which the libraries
//! compute, and take twice the memory of the file.

use half::{bf16, f16};
use kvant_codec::DType;
use kvant_codec::fp4::ByteFloat;

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
}

impl Floats {
    /// Returns the rows.
    pub fn rows(&self, shards: &Shards) -> Vec<u8> {
        let codes = shards.data(&self.codes);
        let scales = scales(&self.scales, shards);
        let known: Vec<f32> = (0..=u8::MAX).map(e4m3).collect();
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

/// Returns the value of a signed E4M3 byte.
fn e4m3(code: u8) -> f32 {
    let magnitude = ByteFloat::E4M3.to_f32(code);
    if code & 128 == 0 { magnitude } else { -magnitude }
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

    #[test]
    fn signed_bytes_have_the_values_of_their_fields() {
        for (code, value) in [(0x00, 0.0), (0x38, 1.0), (0xb8, -1.0), (0x7e, 448.0), (0x81, -0.001_953_125)] {
            assert_eq!(e4m3(code), value, "{code:#x}");
        }
        assert!(e4m3(0xff).is_nan());
    }
}
