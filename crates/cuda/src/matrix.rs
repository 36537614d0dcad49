//! Weight matrices: where they are for products, and the rows of a token embedding.

use kvant_backend::{BackendError, Matrix, Result, WeightSource, check_matrix};
use kvant_codec::DType;

use crate::memory::Block;
use crate::{Context, DevicePtr, product};

/// A weight matrix `[n_out, n_in]`.
#[derive(Debug)]
pub struct CudaMatrix {
    /// The rows in host memory, as in the file (mapped where the file is): embeddings are looked up there, so that every
    /// type the codec knows can be, and a table that is no output matrix takes no device memory.
    source: WeightSource,
    /// The rows on the device; `None` for a table.
    block: Option<Block>,
}

impl CudaMatrix {
    /// A table to look rows up in.
    pub(crate) fn table(source: WeightSource) -> Result<Self> {
        check_matrix(&source)?;
        Ok(Self { source, block: None })
    }

    /// A matrix on the device.
    pub(crate) fn new(cx: &Context, source: WeightSource) -> Result<Self> {
        product::check_type("matrix", source.dtype)?;
        let mut matrix = Self::table(source)?;
        matrix.block = Some(product::upload(cx, matrix.dtype(), matrix.n_in(), &matrix.source.bytes)?);
        Ok(matrix)
    }

    /// Where the first row starts on the device.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for a table.
    pub(crate) fn ptr(&self, op: &'static str) -> Result<DevicePtr> {
        let block = self.block.as_ref().ok_or_else(|| BackendError::Unsupported {
            op,
            wanted: "a table of embeddings".to_owned(),
            has: "matrices".to_owned(),
        })?;
        Ok(block.ptr())
    }

    /// Type of the weights.
    pub(crate) fn dtype(&self) -> DType {
        self.source.dtype
    }

    /// Decodes rows `tokens`, which exist, into `out` `[tokens, n_in]`.
    pub(crate) fn decode_rows(&self, tokens: &[u32], out: &mut [f32]) -> Result<()> {
        let row_bytes = self.source.bytes.len() / self.n_out().max(1);
        for (&token, row) in tokens.iter().zip(out.chunks_exact_mut(self.n_in())) {
            let bytes = &self.source.bytes[token as usize * row_bytes..][..row_bytes];
            kvant_codec::decode(self.dtype(), bytes, row).map_err(|error| BackendError::Unsupported {
                op: "embed",
                wanted: error.to_string(),
                has: "rows of whole blocks".to_owned(),
            })?;
        }
        Ok(())
    }
}

impl Matrix for CudaMatrix {
    fn n_out(&self) -> usize {
        self.source.n_out
    }

    fn n_in(&self) -> usize {
        self.source.n_in
    }
}
