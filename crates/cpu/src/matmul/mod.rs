//! Products of activations with weight matrices: `y = W norm(x) + bias`, several matrices on one
//! input.
//!
//! | rows | weights | path |
//! |---|---|---|
//! | any | as in the file | [`rows`]: the reference, which the scalar kernel set runs |
//! | 1 to 8 | panels | [`gemv`]: GEMV, every panel is read once and multiplied with all rows |
//! | more | panels | [`gemm`]: panels are unpacked in chunks and multiplied with blocks of rows |
//!
//! For coded weights, a matrix unit ([`crate::matrix_unit`]) or 2x2 matrix instructions
//! ([`crate::vec128`]) may compute GEMMs, with the same bits.
//!
//! Experts ([`experts`]) take the same paths, each with the rows routed to it.
//!
//! With [`PrefillPrecision::Bf16`](crate::PrefillPrecision::Bf16), a matrix unit computes GEMMs in
//! bf16 ([`halves`]), except for experts and f32 weights; 2x2 matrix instructions do so for f16 and
//! bf16 weights.
//!
//! Coded panels are multiplied with activations in 8 bits ([`quantize`]), rotated if the weights
//! are; float panels and file rows with activations in f32.

mod bf16;
mod dispatch;
mod experts;
mod floats;
mod gate;
mod gemm;
mod gemv;
mod kernel_set;
mod kernels;
mod outputs;
mod panel;
mod partition;
mod quantize;
mod rows;
mod simd;

use std::ops::Range;

use kvant_backend::{BackendError, Matrix, SharedBytes, WeightSource};
use kvant_codec::DType;

use crate::{Isa, Pool};
use panel::{Line, PANEL, Panels};

pub(crate) use dispatch::{Operand, Product, Scatter, Scratch, gated_ffn, project};
pub use experts::CpuExperts;
pub(crate) use experts::{Biased, Choice, ExpertFfn, moe_ffn, project_each};
pub(crate) use gate::gate;

/// Below this many values a parallel region costs more than it saves.
const MIN_PARALLEL_VALUES: usize = 16 * 1024;

/// A weight matrix `[n_out, n_in]` on the CPU.
#[derive(Debug)]
pub struct CpuMatrix {
    dtype: DType,
    n_out: usize,
    n_in: usize,
    store: WeightLayout,
}

/// Memory layout of the weights.
#[derive(Debug)]
enum WeightLayout {
    /// As in the file, row by row.
    Rows(SharedBytes),
    /// In panels of 16 rows.
    Panels(Panels),
}

/// Returns whether `isa` reads weights from panels.
fn uses_panels(isa: Isa) -> bool {
    isa != Isa::Scalar
}

/// Minimum rows that a matrix unit multiplies. Fewer leave most of the unit idle: from 32 on it is
/// faster for all weights, with 9 to 24 rows vectors are as fast or faster
/// (docs/benchmarks/2026-11-25-amx.md).
const MIN_UNIT_ROWS: usize = 32;

/// Returns the kernel set that multiplies `rows` rows.
fn of_rows(isa: Isa, rows: usize) -> Isa {
    match isa {
        Isa::Amx(_) if rows < MIN_UNIT_ROWS => isa.of_vectors(),
        isa => isa,
    }
}

/// Calls a generic function with the [`Set`](set::Set) that multiplies panels for an [`Isa`];
/// without panels, `$otherwise`.
macro_rules! with_set {
    ($isa:expr, $set:ident => $body:expr, _ => $otherwise:expr) => {
        match $isa.of_products() {
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx2($set) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::AvxVnni($set) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx512($set) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Amx(amx) => {
                let $set = $crate::matmul::kernel_set::AmxKernels {
                    vectors: $crate::Avx512::from(amx.vectors()),
                    unit: amx,
                };
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::Isa::Neon(token) => {
                let $set = $crate::vec128::Quads(token);
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::Isa::I8mm(token) => {
                let $set =
                    $crate::matmul::kernel_set::I8mmKernels { bytes: token, halves: $crate::Bf16::detect() };
                $body
            }
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            $crate::Isa::Simd128(token) => {
                let $set = $crate::vec128::Quads(token);
                $body
            }
            #[cfg(all(any(test, debug_assertions), target_arch = "x86_64"))]
            $crate::Isa::Soft(vectors) => {
                let $set = $crate::matmul::kernel_set::AmxKernels {
                    vectors,
                    unit: $crate::matrix_unit::EmulatedUnit,
                };
                $body
            }
            _ => $otherwise,
        }
    };
}
use with_set;

/// Returns the names of the kernels that multiply weights of `dtype`: for one to eight rows, and
/// for more.
pub(crate) fn kernel_name(isa: Isa, dtype: DType) -> String {
    if uses_panels(isa) {
        let set = match isa.of_products() {
            Isa::Amx(_) if !panel::is_float(dtype) => {
                return format!("gemv-{dtype}-avx512vnni, gemm-{dtype}-amx");
            }
            Isa::I8mm(_) if !panel::is_float(dtype) => {
                return format!("gemv-{dtype}-neon, gemm-{dtype}-i8mm");
            }
            Isa::Amx(_) => "avx512",
            Isa::I8mm(_) => "neon",
            Isa::Avx512(_) if !panel::is_float(dtype) => "avx512vnni",
            Isa::AvxVnni(_) if panel::is_float(dtype) => "avx2",
            isa => isa.name(),
        };
        format!("gemv-{dtype}-{set}, gemm-{dtype}-{set}")
    } else {
        format!("rows-{dtype}-scalar")
    }
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
        Ok(Self { dtype, n_out, n_in, store })
    }

    /// Returns the storage type of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
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
    fn panels(&self, panels: Range<usize>) -> &[Line] {
        match &self.store {
            WeightLayout::Panels(kept) => kept.panels(panels),
            WeightLayout::Rows(_) => unreachable!("file rows for a kernel set that reads panels"),
        }
    }

    fn panel(&self, panel: usize) -> &[Line] {
        self.panels(panel..panel + 1)
    }

    fn n_panels(&self) -> usize {
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
