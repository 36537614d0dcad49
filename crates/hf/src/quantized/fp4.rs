//! 4-bit floats (E2M1) with scales of blocks: MXFP4 and NVFP4.
//!
//! MXFP4 becomes blocks of mxfp4, which hold the same numbers. NVFP4 has one more scale, of the
//! whole matrix, with which no kernel multiplies: as those of GGUF files, such weights are
//! converted to q8_0, with an additional error of at most the 254th part of the largest of 32
//! values.

use kvant_codec::DType;
use kvant_codec::fp4::ByteFloat;

use super::floats::scales;
use crate::recipe;
use crate::safetensors::{Shards, Stored};

/// A matrix of E2M1 codes.
#[derive(Debug, Clone)]
pub(crate) struct Fp4 {
    pub n_out: usize,
    pub n_in: usize,
    /// `[out, in / 2]` bytes: the first of two in the low half.
    pub codes: Stored,
    /// `[out, blocks]` bytes.
    pub scales: Stored,
    pub kind: Fp4Kind,
    /// The type of [`Fp4::rows`].
    pub dtype: DType,
    /// The type of its values.
    pub dense_dtype: DType,
}

/// What the scales of a matrix are.
#[derive(Debug, Clone)]
pub(crate) enum Fp4Kind {
    /// E8M0 for 32 inputs.
    Mx,
    /// E4M3 for 16 inputs, and a factor of the matrix.
    Nv { global: Stored, divides: bool },
}

/// Inputs of a block of NVFP4.
pub(super) const NV_BLOCK: usize = 16;

impl Fp4 {
    /// Returns the rows, in blocks or values of the type.
    pub fn rows(&self, shards: &Shards) -> Vec<u8> {
        let (codes, powers) = (shards.data(&self.codes), shards.data(&self.scales));
        if self.dtype == DType::MXFP4 {
            return recipe::blocks(&codes, &powers);
        }
        let per_scale = self.n_in * self.n_out / powers.len();
        let scale_of: Vec<f32> = match &self.kind {
            Fp4Kind::Mx => powers.iter().map(|power| ByteFloat::E8M0.to_f32(*power)).collect(),
            Fp4Kind::Nv { global, divides } => {
                let global = scales(global, shards)[0];
                let global = if *divides { global.recip() } else { global };
                powers.iter().map(|power| ByteFloat::E4M3.to_f32(*power) * global).collect()
            }
        };
        let row_bytes = self.dtype.row_bytes(self.n_in).expect("whole blocks");
        let mut out = vec![0; self.n_out * row_bytes];
        let mut values = vec![0.0; self.n_in];
        let rows = codes.chunks_exact(self.n_in / 2).zip(scale_of.chunks_exact(self.n_in / per_scale));
        for ((codes, scales), out) in rows.zip(out.chunks_exact_mut(row_bytes)) {
            for (i, value) in values.iter_mut().enumerate() {
                *value = e2m1(codes[i / 2] >> (4 * (i % 2))) * scales[i / per_scale];
            }
            kvant_codec::encode(self.dtype, &values, out).expect("rows of whole blocks");
        }
        out
    }
}

/// Returns the value of the low four bits.
fn e2m1(code: u8) -> f32 {
    let table = kvant_codec::LevelTable::E2M1;
    table.level(code & 15) * table.unit()
}
