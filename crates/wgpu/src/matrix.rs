//! Weight matrices: where they are for products, and the rows of a token embedding.

use std::ops::Range;

use kvant_backend::{BackendError, Experts, Matrix, Result, WeightSource, check_experts, check_matrix};
use kvant_codec::DType;

use crate::Gpu;

/// A weight matrix `[n_out, n_in]`.
#[derive(Debug)]
pub struct WgpuMatrix {
    /// The rows in host memory, as in the file (mapped where the file is): embeddings are looked up there, and a table that is
    /// no output matrix takes no device memory.
    source: WeightSource,
    /// The rows on the device; `None` for a table.
    slabs: Option<Vec<Slab>>,
}

/// Some rows of weights in one buffer on the device, as in the file. A matrix has as few as fit what a kernel reaches in one binding.
#[derive(Debug)]
pub(crate) struct Slab {
    pub buffer: wgpu::Buffer,
    pub rows: Range<usize>,
}

impl WgpuMatrix {
    /// A table to look rows up in.
    pub(crate) fn table(source: WeightSource) -> Result<Self> {
        check_matrix(&source)?;
        Ok(Self { source, slabs: None })
    }

    /// A matrix on the device.
    pub(crate) fn new(gpu: &Gpu, source: WeightSource) -> Result<Self> {
        let mut matrix = Self::table(source)?;
        matrix.slabs = Some(upload(gpu, &matrix.source)?);
        Ok(matrix)
    }

    /// The rows on the device.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for a table.
    pub(crate) fn slabs(&self, op: &'static str) -> Result<&[Slab]> {
        self.slabs.as_deref().ok_or_else(|| BackendError::Unsupported {
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
    pub(crate) slabs: Vec<Slab>,
    pub(crate) dtype: DType,
    n_experts: usize,
    n_out: usize,
    n_in: usize,
}

impl WgpuExperts {
    /// Matrices on the device.
    pub(crate) fn new(gpu: &Gpu, source: &WeightSource, n_experts: usize) -> Result<Self> {
        let n_out = check_experts(source, n_experts)?;
        let slabs = upload(gpu, source)?;
        Ok(Self { slabs, dtype: source.dtype, n_experts, n_out, n_in: source.n_in })
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

/// Bytes behind the rows of a slab, as kernels read words that begin anywhere.
const PADDING: usize = 8;

/// The rows of `source` on the device.
fn upload(gpu: &Gpu, source: &WeightSource) -> Result<Vec<Slab>> {
    let &WeightSource { dtype, n_out, n_in, ref bytes } = source;
    let row_bytes = bytes.len() / n_out.max(1);
    // Kernels count bytes in 32 bits.
    let most = gpu.max_binding().min(u32::MAX as usize).saturating_sub(PADDING) / row_bytes.max(1);
    if most == 0 {
        return Err(BackendError::Unsupported {
            op: "matrix",
            wanted: format!("rows of {n_in} values in {dtype}"),
            has: format!("bindings of at most {} bytes", gpu.max_binding()),
        });
    }
    let slab = |first: usize| {
        let rows = first..n_out.min(first + most);
        let buffer = upload_bytes(gpu, &bytes[rows.start * row_bytes..rows.end * row_bytes])?;
        Ok(Slab { buffer, rows })
    };
    (0..n_out).step_by(most).map(slab).collect()
}

fn upload_bytes(gpu: &Gpu, bytes: &[u8]) -> Result<wgpu::Buffer> {
    let buffer = gpu.allocate(bytes.len() + PADDING, "weights")?;
    let (words, rest) = bytes.split_at(bytes.len() / 4 * 4);
    gpu.write(&buffer, 0, words)?;
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    gpu.write(&buffer, words.len(), &last)?;
    Ok(buffer)
}
