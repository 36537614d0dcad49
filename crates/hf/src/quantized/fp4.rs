//! 4-bit floats (E2M1) with scales of blocks: MXFP4 and NVFP4.
//!
//! MXFP4 becomes blocks of mxfp4, which hold the same numbers. NVFP4 has one more scale, of the
//! whole matrix: in rows of a multiple of 256 it becomes the factor of blocks of nvfp4_g256. Other
//! rows are converted to q8_0, as those of GGUF files, with an additional error of at most the
//! 254th part of the largest of 32 values.

use kvant_codec::DType;
use kvant_codec::factored_fp4::{self, FactoredBlock};
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
        let scale_of: Vec<f32> = match &self.kind {
            Fp4Kind::Mx => powers.iter().map(|power| ByteFloat::E8M0.to_f32(*power)).collect(),
            Fp4Kind::Nv { global, divides } => {
                let global = scales(global, shards)[0];
                let factor = if *divides { global.recip() } else { global };
                if self.dtype == DType::NVFP4G256 {
                    return factored(&codes, &powers, factor);
                }
                powers.iter().map(|power| ByteFloat::E4M3.to_f32(*power) * factor).collect()
            }
        };
        let per_scale = self.n_in * self.n_out / powers.len();
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

/// Returns blocks of nvfp4_g256 of pairs of codes, the first in the low half, and their scales.
fn factored(codes: &[u8], scales: &[u8], factor: f32) -> Vec<u8> {
    let blocks = codes.chunks_exact(factored_fp4::LEN / 2).zip(scales.chunks_exact(factored_fp4::SUBS));
    let block = |(codes, scales): (&[u8], &[u8])| {
        let block = FactoredBlock {
            factor,
            scales: std::array::from_fn(|s| scales[s]),
            codes: std::array::from_fn(|i| codes[i / 2] >> (4 * (i % 2)) & 15),
        };
        block.to_bytes()
    };
    blocks.flat_map(block).collect()
}

/// Returns the value of the low four bits.
fn e2m1(code: u8) -> f32 {
    let table = kvant_codec::LevelTable::E2M1;
    table.level(code & 15) * table.unit()
}
