//! A weight matrix on the CPU, in the layout that the kernels of an [`Isa`] read.

use std::ops::Range;
use std::sync::Arc;

use kvant_backend::{BackendError, InputSquares, Matrix, SharedBytes, WeightSource};
use kvant_codec::DType;

use super::panel::{Line, Panels};
use crate::host::pool::Pool;
use crate::simd::isa::Isa;
use crate::simd::matmul::format::PANEL;

/// A weight matrix `[n_out, n_in]` on the CPU.
#[derive(Debug)]
pub struct CpuMatrix {
    pub(super) dtype: DType,
    pub(super) n_out: usize,
    pub(super) n_in: usize,
    pub(super) store: WeightLayout,
    /// Receives the inputs of products, if they are watched.
    pub(super) inputs: Option<Arc<InputSquares>>,
}

/// Memory layout of the weights.
#[derive(Debug)]
pub(super) enum WeightLayout {
    /// As in the file, row by row.
    Rows(SharedBytes),
    /// In panels of 16 rows.
    Panels(Panels),
}

/// Returns whether `isa` reads weights from panels.
pub(super) fn uses_panels(isa: Isa) -> bool {
    isa != Isa::Scalar
}

impl CpuMatrix {
    /// Takes the weights of `source`, packed for the kernels of `isa`.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub(crate) fn new(isa: Isa, pool: &Pool, source: WeightSource) -> Result<Self, BackendError> {
        let WeightSource { dtype, n_out, n_in, bytes } = source;
        let store = if uses_panels(isa) {
            WeightLayout::Panels(Panels::new(pool, dtype, n_out, n_in, &bytes)?)
        } else {
            WeightLayout::Rows(bytes)
        };
        Ok(Self { dtype, n_out, n_in, store, inputs: None })
    }

    /// Adds the squares of inputs to `squares` from now on.
    pub(crate) fn watch_inputs(&mut self, squares: &Arc<InputSquares>) {
        self.inputs = Some(Arc::clone(squares));
    }

    /// Returns the storage type of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Takes the weights of `source` as they are, for [`Self::decode_row`] alone: of a mapped file,
    /// only the rows that are read take memory.
    pub(crate) fn in_rows(source: WeightSource) -> Self {
        let WeightSource { dtype, n_out, n_in, bytes } = source;
        Self { dtype, n_out, n_in, store: WeightLayout::Rows(bytes), inputs: None }
    }

    /// Decodes row `index` into `out` `[n_in]`.
    pub(crate) fn decode_row(&self, index: usize, out: &mut [f32]) {
        match &self.store {
            WeightLayout::Rows(bytes) => {
                let row_bytes = bytes.len() / self.n_out;
                let row = &bytes[index * row_bytes..][..row_bytes];
                kvant_codec::decode(self.dtype, row, out).expect("rows are whole blocks");
            }
            WeightLayout::Panels(panels) => panels.decode_row(index, out),
        }
    }

    /// Returns some neighbouring panels.
    pub(super) fn panels(&self, panels: Range<usize>) -> &[Line] {
        match &self.store {
            WeightLayout::Panels(kept) => kept.panels(panels),
            WeightLayout::Rows(_) => unreachable!("file rows for a kernel set that reads panels"),
        }
    }

    pub(super) fn panel(&self, panel: usize) -> &[Line] {
        self.panels(panel..panel + 1)
    }

    pub(super) fn n_panels(&self) -> usize {
        self.n_out.div_ceil(PANEL)
    }
}

impl Matrix for CpuMatrix {
    fn n_out(&self) -> usize {
        self.n_out
    }

    fn n_in(&self) -> usize {
        self.n_in
    }
}
