//! Records of tensors.

use std::borrow::Cow;

use kvant_codec::DType;

use crate::load_only::LoadOnlyType;

/// The record of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, unique in the model.
    pub name: String,
    /// 1 to 4 sizes, none zero, in GGUF order: the first is the fastest, the row length, a matrix's
    /// input features.
    pub shape: Vec<usize>,
    /// The format of the data after loading; rows are whole blocks of it.
    pub dtype: DType,
    /// Offset of the data in its file in bytes, a multiple of that file's alignment.
    pub offset: u64,
    /// Size of the data in bytes after loading.
    pub n_bytes: usize,
    /// The type in the file, if it is converted on loading.
    pub packed: Option<LoadOnlyType>,
    /// Size of the data in the file.
    pub stored_bytes: usize,
    /// Per-tensor scales to apply on loading.
    pub(crate) scales: Option<TensorScales>,
    /// Index of the file, see [`Gguf::shard_paths`](crate::Gguf::shard_paths).
    pub shard: usize,
    /// Offset of the record in its file.
    pub(crate) record: u64,
}

impl TensorInfo {
    /// Returns the values per row: the first size.
    pub fn row_len(&self) -> usize {
        self.shape[0]
    }

    /// Returns the number of rows: the product of all sizes but the first.
    pub fn rows(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Returns the number of values.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A tensor and its data.
#[derive(Debug, Clone)]
pub struct TensorView<'a> {
    /// Name, shape and format.
    pub info: &'a TensorInfo,
    /// The encoded rows, `[info.rows()]` times `[info.dtype.row_bytes(info.row_len())]` bytes. They
    /// are as aligned as the file's bytes: those of mapped files to the file's alignment, embedded
    /// ones perhaps not at all.
    pub bytes: Cow<'a, [u8]>,
}

/// Location of a tensor's scales, all in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorScales {
    pub shard: usize,
    pub offset: u64,
    pub n: usize,
}
