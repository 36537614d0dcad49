//! Weight matrices on the device.

use kvant_backend::{BackendError, Result, WeightSource};
use kvant_codec::DType;

use crate::memory::Block;
use crate::{Context, DevicePtr};

/// A weight matrix `[n_out, n_in]` on the device, its rows as in the file.
#[derive(Debug)]
pub struct CudaMatrix {
    block: Block,
    dtype: DType,
    n_out: usize,
    n_in: usize,
}

impl CudaMatrix {
    /// Copies `source` to the device.
    pub(crate) fn new(cx: &Context, source: &WeightSource) -> Result<Self> {
        let WeightSource { dtype, n_out, n_in, ref bytes } = *source;
        let row_bytes = dtype.row_bytes(n_in).map_err(|error| BackendError::Unsupported {
            op: "matrix",
            wanted: error.to_string(),
            has: "rows of whole blocks".to_owned(),
        })?;
        BackendError::check("matrix", "bytes of the weights", n_out.saturating_mul(row_bytes), bytes.len())?;
        let block = cx.arena().take(bytes.len())?;
        cx.gpu().write(block.ptr(), bytes)?;
        Ok(Self { block, dtype, n_out, n_in })
    }

    /// Where the first row starts.
    pub fn ptr(&self) -> DevicePtr {
        self.block.ptr()
    }

    /// Type of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows: output features.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// Columns: input features.
    pub fn n_in(&self) -> usize {
        self.n_in
    }
}
