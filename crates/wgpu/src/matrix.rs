//! Weight matrices on the device, and the rows of a token embedding in host memory.

use std::ops::Range;

use kvant_backend::{
    BackendError, Experts, Matrix, Result, SharedBytes, WeightSource, decode_embedding_rows,
};
use kvant_codec::DType;

use crate::Gpu;
use crate::matmul::{PANEL, VECTOR_BYTES, pack_panels, row_vectors};

/// A weight matrix `[n_out, n_in]`.
#[derive(Debug)]
pub struct WgpuMatrix {
    dtype: DType,
    n_out: usize,
    n_in: usize,
    /// The rows in host memory, as in the file (mapped where the file is), for embeddings: a table
    /// that is not also the output matrix takes no device memory. `None` for matrices without
    /// look-ups, so that they are not stored twice.
    rows: Option<SharedBytes>,
    /// The rows on the device; `None` for a table.
    slabs: Option<Vec<Slab>>,
}

/// Some rows of weights in one buffer on the device, in panels. A matrix has as few slabs as the
/// maximum binding size allows.
#[derive(Debug)]
pub(crate) struct Slab {
    pub buffer: wgpu::Buffer,
    pub rows: Range<usize>,
}

impl WgpuMatrix {
    /// Creates a table for row look-ups.
    pub(crate) fn table(source: WeightSource) -> Self {
        let WeightSource { dtype, n_out, n_in, bytes } = source;
        Self { dtype, n_out, n_in, rows: Some(bytes), slabs: None }
    }

    /// Creates a matrix on the device that also supports row look-ups.
    pub(crate) fn tied(gpu: &Gpu, source: WeightSource) -> Result<Self> {
        let slabs = Some(upload(gpu, &source)?);
        Ok(Self { slabs, ..Self::table(source) })
    }

    /// Creates a matrix on the device.
    pub(crate) fn new(gpu: &Gpu, source: WeightSource) -> Result<Self> {
        Ok(Self { rows: None, ..Self::tied(gpu, source)? })
    }

    /// Returns the rows on the device.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for a table.
    pub(crate) fn slabs(&self, op: &'static str) -> Result<&[Slab]> {
        self.slabs.as_deref().ok_or_else(|| BackendError::Unsupported {
            op,
            requested: "a table of embeddings".to_owned(),
            has: "matrices".to_owned(),
        })
    }

    /// Returns the type of the weights.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// As [`decode_rows`].
    pub(crate) fn decode_rows(&self, tokens: &[u32], scale: f32, out: &mut [f32]) -> Result<()> {
        decode_embedding_rows(self.rows.as_deref(), self.dtype, self.n_in, tokens, scale, out)
    }
}

impl Matrix for WgpuMatrix {
    fn n_out(&self) -> usize {
        self.n_out
    }

    fn n_in(&self) -> usize {
        self.n_in
    }
}

/// Contiguous weight matrices of one shape and type.
#[derive(Debug)]
pub struct WgpuExperts {
    pub(crate) slabs: Vec<Slab>,
    pub(crate) dtype: DType,
    n_experts: usize,
    n_out: usize,
    n_in: usize,
}

impl WgpuExperts {
    /// Uploads the matrices to the device.
    pub(crate) fn new(gpu: &Gpu, source: &WeightSource, n_experts: usize) -> Result<Self> {
        let &WeightSource { dtype, n_out, n_in, .. } = source;
        let slabs = upload(gpu, source)?;
        Ok(Self { slabs, dtype, n_experts, n_out: n_out / n_experts, n_in })
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

/// Minimum bytes per thread, and the maximum bytes of a write.
const MIN_THREAD_BYTES: usize = 1 << 20;
const UPLOAD_BYTES: usize = 32 << 20;

/// Uploads the rows of `source`.
fn upload(gpu: &Gpu, source: &WeightSource) -> Result<Vec<Slab>> {
    let &WeightSource { dtype, n_out, n_in, ref bytes } = source;
    let row_bytes = bytes.len() / n_out.max(1);
    let vectors = row_vectors(dtype, n_in);
    let max_rows = gpu.max_binding() / (vectors * VECTOR_BYTES).max(1);
    // Whole panels, if one fits.
    let max_rows = if max_rows > PANEL { max_rows / PANEL * PANEL } else { max_rows };
    if max_rows == 0 {
        return Err(BackendError::Unsupported {
            op: "matrix",
            requested: format!("rows of {n_in} values in {dtype}"),
            has: format!("bindings of at most {} bytes", gpu.max_binding()),
        });
    }
    let slab = |first: usize| {
        let rows = first..n_out.min(first + max_rows);
        let buffer = gpu.allocate(rows.len() * vectors * VECTOR_BYTES, "weights")?;
        let upload_rows = (UPLOAD_BYTES / (PANEL * row_bytes).max(1)).max(1) * PANEL;
        for at in rows.clone().step_by(upload_rows) {
            let range = at..rows.end.min(at + upload_rows);
            let rows_of_file = &bytes[range.start * row_bytes..range.end * row_bytes];
            let packed = pack_rows(dtype, n_in, rows_of_file, row_bytes);
            let to = (at - rows.start) * vectors * VECTOR_BYTES;
            gpu.write(&buffer, to, bytemuck::cast_slice(&packed))?;
        }
        Ok(Slab { buffer, rows })
    };
    (0..n_out).step_by(max_rows).map(slab).collect()
}

/// Returns rows in panels, laid out on several cores if there are many.
fn pack_rows(dtype: DType, n_in: usize, rows: &[u8], row_bytes: usize) -> Vec<[u32; 4]> {
    let vectors = row_vectors(dtype, n_in);
    let mut panels = vec![[0; 4]; rows.len() / row_bytes * vectors];
    let n_panels = rows.len().div_ceil(PANEL * row_bytes);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let panels_per_thread = n_panels.div_ceil(threads).max(MIN_THREAD_BYTES.div_ceil(PANEL * row_bytes));
    if panels_per_thread >= n_panels {
        pack_panels(dtype, n_in, rows, row_bytes, &mut panels);
        return panels;
    }
    std::thread::scope(|scope| {
        let parts = panels.chunks_mut(panels_per_thread * PANEL * vectors);
        for (panels, rows) in parts.zip(rows.chunks(panels_per_thread * PANEL * row_bytes)) {
            scope.spawn(move || pack_panels(dtype, n_in, rows, row_bytes, panels));
        }
    });
    panels
}
