//! Per-tensor scales of nvfp4, which converters store as separate tensors: `blk.0.attn_q.scale` for
//! `blk.0.attn_q.weight`, one f32, or one per matrix where experts are stacked.
//!
//! In rows of a multiple of 256, loading makes it the factor of blocks of nvfp4_g256. Other rows
//! are multiplied by it and converted to q8_0. (The additional error is at most the 254th part of
//! the largest of 32 values, a twentieth of nvfp4's own error.) These tensors and the activation
//! scales (`.input_scale`), unused as activations are not coded in 4 bits here, are removed from
//! the model.

use std::collections::HashSet;

use kvant_codec::DType;
use kvant_codec::factored_fp4::{self, FactoredBlock};

use crate::file::Gguf;
use crate::load_only::LoadOnlyType;
use crate::tensor::{TensorInfo, TensorScales};

/// Values converted at a time.
const CHUNK: usize = 1 << 16;

impl Gguf {
    /// Attaches such scales to the weights that they belong to. Invalid ones stay tensors, which no
    /// model uses.
    pub(crate) fn with_scales(mut self) -> Self {
        let mut taken = HashSet::new();
        for at in 0..self.tensors.len() {
            let Some((scales, names)) = self.scales_of(&self.tensors[at]) else { continue };
            let info = &mut self.tensors[at];
            let is_whole = info.row_len().is_multiple_of(factored_fp4::LEN);
            info.dtype = if is_whole { LoadOnlyType::ScaledNvfp4.loaded_type() } else { DType::Q8_0 };
            info.n_bytes = info.elements() / info.dtype.block_len() * info.dtype.block_bytes();
            info.packed = Some(LoadOnlyType::ScaledNvfp4);
            info.scales = Some(scales);
            taken.extend(names);
        }
        if !taken.is_empty() {
            self.tensors.retain(|info| !taken.contains(&info.name));
            self.by_name = (0..self.tensors.len()).collect();
            self.by_name.sort_by(|a, b| self.tensors[*a].name.cmp(&self.tensors[*b].name));
        }
        self
    }

    /// Returns the scales of a tensor, and the names of the tensors that they make redundant.
    fn scales_of(&self, info: &TensorInfo) -> Option<(TensorScales, [String; 2])> {
        let stem = info.name.strip_suffix(".weight").filter(|_| info.dtype == DType::NVFP4)?;
        let names = [format!("{stem}.scale"), format!("{stem}.input_scale")];
        let found = self.find_info(&names[0]).filter(|found| found.dtype == DType::F32)?;
        let n_matrices: usize = info.shape.iter().skip(2).product();
        let scales = TensorScales { shard: found.shard, offset: found.offset, n: found.elements() };
        let is_sound = self.values_of(scales).into_iter().all(f32::is_finite);
        (is_sound && [1, n_matrices].contains(&scales.n)).then_some((scales, names))
    }

    /// Returns name and numbers of the tensor that holds the scales of `info`, if any.
    pub fn scale_tensor(&self, info: &TensorInfo) -> Option<(String, Vec<f32>)> {
        let stem = info.name.strip_suffix(".weight")?;
        Some((format!("{stem}.scale"), self.values_of(info.scales?)))
    }

    fn values_of(&self, scales: TensorScales) -> Vec<f32> {
        // Validated by `parse`, as for any tensor.
        let bytes = self.shards[scales.shard].bytes.range(scales.offset, 4 * scales.n);
        bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
    }

    /// Converts blocks of nvfp4, times their scales, to nvfp4_g256 or q8_0.
    pub(crate) fn scaled(&self, bytes: &[u8], scales: TensorScales, to: DType) -> Vec<u8> {
        let from = DType::NVFP4;
        if to == DType::NVFP4G256 {
            let matrices = bytes.chunks_exact(bytes.len() / scales.n).zip(self.values_of(scales));
            let blocks = matrices.flat_map(|(bytes, scale)| {
                let fours = bytes.as_chunks().0.as_chunks().0.iter();
                fours.flat_map(move |four| FactoredBlock::of_nvfp4(scale, four))
            });
            return blocks.collect();
        }
        let n_values = bytes.len() / from.block_bytes() * from.block_len();
        let mut out = vec![0; n_values / to.block_len() * to.block_bytes()];
        let (matrix, matrix_out) = (bytes.len() / scales.n, out.len() / scales.n);
        let of_chunk = |dtype: DType| CHUNK / dtype.block_len() * dtype.block_bytes();
        let matrices = bytes.chunks_exact(matrix).zip(out.chunks_exact_mut(matrix_out));
        let mut values = vec![0.0; CHUNK];
        for ((bytes, out), scale) in matrices.zip(self.values_of(scales)) {
            for (bytes, out) in bytes.chunks(of_chunk(from)).zip(out.chunks_mut(of_chunk(to))) {
                let values = &mut values[..bytes.len() / from.block_bytes() * from.block_len()];
                kvant_codec::decode(from, bytes, values).expect("whole blocks");
                values.iter_mut().for_each(|value| *value *= scale);
                kvant_codec::encode(to, values, out).expect("whole blocks");
            }
        }
        out
    }
}
