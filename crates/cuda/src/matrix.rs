//! Weight matrices on the device, and the rows of a token embedding in host memory.

use kvant_backend::{BackendError, Matrix, Result, SharedBytes, WeightSource, decode_embedding_rows};
use kvant_codec::DType;

use crate::matmul::{self, Weights};
use crate::{Context, embed};

/// A weight matrix `[n_out, n_in]`.
#[derive(Debug)]
pub struct CudaMatrix {
    dtype: DType,
    n_out: usize,
    n_in: usize,
    /// The rows in host memory, as in the file (mapped where the file is), for embeddings: a table
    /// that is not also the output matrix takes no device memory. `None` for matrices without
    /// look-ups.
    rows: Option<SharedBytes>,
    /// The rows on the device; `None` for a table.
    weights: Option<Weights>,
}

impl CudaMatrix {
    /// Creates a table for row look-ups.
    pub(crate) fn table(source: WeightSource) -> Self {
        let WeightSource { dtype, n_out, n_in, bytes } = source;
        Self { dtype, n_out, n_in, rows: Some(bytes), weights: None }
    }

    /// Creates a matrix on the device that also supports row look-ups.
    pub(crate) fn tied(cx: &Context, source: WeightSource) -> Result<Self> {
        matmul::check_type("matrix", source.dtype)?;
        let weights = Some(matmul::upload(cx, source.dtype, source.n_in, &source.bytes)?);
        Ok(Self { weights, ..Self::table(source) })
    }

    /// Creates a matrix on the device.
    pub(crate) fn new(cx: &Context, source: WeightSource) -> Result<Self> {
        Ok(Self { rows: None, ..Self::tied(cx, source)? })
    }

    /// Returns the rows on the device.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for a table.
    pub(crate) fn weights(&self, op: &'static str) -> Result<&Weights> {
        self.weights.as_ref().ok_or_else(|| BackendError::Unsupported {
            op,
            requested: "a table of embeddings".to_owned(),
            has: "matrices".to_owned(),
        })
    }

    /// Returns the type of the weights.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns its rows for look-ups on the device; `None` where it has none, or of a type that the
    /// host decodes.
    pub(crate) fn device_table(&self) -> Option<embed::Table<'_>> {
        let file_rows = self.rows.as_deref().filter(|_| embed::decodes(self.dtype))?;
        let on_device = self.weights.as_ref();
        Some(embed::Table { dtype: self.dtype, n: self.n_in, file_rows, on_device })
    }

    /// As [`decode_embedding_rows`].
    pub(crate) fn decode_rows(&self, tokens: &[u32], scale: f32, out: &mut [f32]) -> Result<()> {
        decode_embedding_rows(self.rows.as_deref(), self.dtype, self.n_in, tokens, scale, out)
    }
}

impl Matrix for CudaMatrix {
    fn n_out(&self) -> usize {
        self.n_out
    }

    fn n_in(&self) -> usize {
        self.n_in
    }
}
