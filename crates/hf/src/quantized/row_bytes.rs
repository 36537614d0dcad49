//! Signed bytes of bitsandbytes with a scale for each output, as values of the model's type.

use kvant_codec::DType;

use super::floats::{put, scales};
use crate::safetensors::{Shards, Stored};

/// A matrix of signed bytes: `value = code · scale / 127`.
///
/// No f16 holds a 127th of a scale, so q8_0 does not hold the values.
#[derive(Debug, Clone)]
pub(crate) struct RowBytes {
    pub n_out: usize,
    pub n_in: usize,
    pub codes: Stored,
    /// `[out]`: the largest magnitude of the row.
    pub scales: Stored,
    /// The type of its values.
    pub dtype: DType,
}

/// By which the library multiplies: 1 / 127 in f32.
const UNIT: f32 = 7.874_016e-3;

impl RowBytes {
    /// Returns the rows in values.
    pub fn rows(&self, shards: &Shards) -> Vec<u8> {
        let (codes, scales) = (shards.data(&self.codes), scales(&self.scales, shards));
        let size = self.dtype.block_bytes();
        let mut out = vec![0; codes.len() * size];
        for (i, (code, out)) in codes.iter().zip(out.chunks_exact_mut(size)).enumerate() {
            put(self.dtype, f32::from(*code as i8) * scales[i / self.n_in] * UNIT, out);
        }
        out
    }
}
