//! Weight matrices: where they are for products, and the rows of a token embedding.

use kvant_backend::{BackendError, Experts, Matrix, Result, WeightSource, check_experts, check_matrix};
use kvant_codec::DType;

use crate::Gpu;

/// A weight matrix `[n_out, n_in]`.
#[derive(Debug)]
pub struct WgpuMatrix {
    /// The rows in host memory, as in the file (mapped where the file is): embeddings are looked up there, and a table that is
    /// no output matrix takes no device memory.
    source: WeightSource,
    /// The rows on the device, as in the file; `None` for a table.
    rows: Option<wgpu::Buffer>,
}

impl WgpuMatrix {
    /// A table to look rows up in.
    pub(crate) fn table(source: WeightSource) -> Result<Self> {
        check_matrix(&source)?;
        Ok(Self { source, rows: None })
    }

    /// A matrix on the device.
    pub(crate) fn new(gpu: &Gpu, source: WeightSource) -> Result<Self> {
        let mut matrix = Self::table(source)?;
        matrix.rows = Some(upload(gpu, &matrix.source)?);
        Ok(matrix)
    }

    /// The rows on the device.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for a table.
    pub(crate) fn rows(&self, op: &'static str) -> Result<&wgpu::Buffer> {
        self.rows.as_ref().ok_or_else(|| BackendError::Unsupported {
            op,
            wanted: "a table of embeddings".to_owned(),
            has: "matrices".to_owned(),
        })
    }

    /// Type of the weights.
    pub(crate) fn dtype(&self) -> DType {
        self.source.dtype
    }

    /// Decodes rows `tokens`, which exist, times `scale`, into `out` `[tokens, n_in]`.
    pub(crate) fn decode_rows(&self, tokens: &[u32], scale: f32, out: &mut [f32]) -> Result<()> {
        let row_bytes = self.source.bytes.len() / self.n_out().max(1);
        for (&token, row) in tokens.iter().zip(out.chunks_exact_mut(self.n_in())) {
            let bytes = &self.source.bytes[token as usize * row_bytes..][..row_bytes];
            kvant_codec::decode(self.dtype(), bytes, row).map_err(|error| BackendError::Unsupported {
                op: "embed",
                wanted: error.to_string(),
                has: "rows of whole blocks".to_owned(),
            })?;
            row.iter_mut().for_each(|value| *value *= scale);
        }
        Ok(())
    }
}

impl Matrix for WgpuMatrix {
    fn n_out(&self) -> usize {
        self.source.n_out
    }

    fn n_in(&self) -> usize {
        self.source.n_in
    }
}

/// Weight matrices of one shape and type, one after the other.
#[derive(Debug)]
pub struct WgpuExperts {
    pub(crate) rows: wgpu::Buffer,
    pub(crate) dtype: DType,
    n_experts: usize,
    n_out: usize,
    n_in: usize,
}

impl WgpuExperts {
    /// Matrices on the device.
    pub(crate) fn new(gpu: &Gpu, source: &WeightSource, n_experts: usize) -> Result<Self> {
        let n_out = check_experts(source, n_experts)?;
        let rows = upload(gpu, source)?;
        Ok(Self { rows, dtype: source.dtype, n_experts, n_out, n_in: source.n_in })
    }
}

impl Experts for WgpuExperts {
    fn n_experts(&self) -> usize {
        self.n_experts
    }

    fn n_out(&self) -> usize {
        self.n_out
    }

    fn n_in(&self) -> usize {
        self.n_in
    }
}

/// The rows of `source` on the device, and a word behind them, as kernels read words that begin anywhere.
fn upload(gpu: &Gpu, source: &WeightSource) -> Result<wgpu::Buffer> {
    let bytes = &source.bytes[..];
    if bytes.len() >= gpu.max_binding() - 8 {
        return Err(BackendError::Unsupported {
            op: "matrix",
            wanted: format!("{} bytes of weights in {}", bytes.len(), source.dtype),
            has: format!("bindings of at most {} bytes", gpu.max_binding()),
        });
    }
    let rows = gpu.allocate(bytes.len() + 8, "weights")?;
    let (words, rest) = bytes.split_at(bytes.len() / 4 * 4);
    gpu.write(&rows, 0, words)?;
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    gpu.write(&rows, words.len(), &last)?;
    Ok(rows)
}
