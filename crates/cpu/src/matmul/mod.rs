//! Products of activations with weight matrices: `y = W norm(x) + bias`, several matrices on one input.
//!
//! | rows | weights | path |
//! |---|---|---|
//! | any | as in the file | [`rows`]: the reference, which the scalar kernel set runs |
//! | 1 to 8 | panels | [`skinny`]: every panel is read once and multiplied with all rows |
//! | more | panels | [`gemm`]: panels are unpacked a chunk at a time and multiplied with blocks of rows |
//!
//! Blocks of many coded rows may be the work of a matrix unit ([`crate::unit`]), or of an instruction for two rows by two
//! ([`crate::quad`]), which give the same bits.
//!
//! Experts ([`experts`]) take the same paths, each with the rows that chose it.
//!
//! Where [`PromptMath::Bf16`](crate::PromptMath::Bf16) was chosen, a matrix unit multiplies such blocks in bf16 ([`halves`]), experts and f32
//! weights excepted; an instruction for two rows by two does so where weights are f16 or bf16.
//!
//! Coded panels meet activations in 8 bits ([`quantise`]), rotated ones where the weights are; float panels and file rows meet
//! them in f32.

mod cut;
mod experts;
mod floats;
mod gate;
mod gemm;
mod halves;
mod kernels;
mod outputs;
mod panel;
mod quantise;
mod rows;
mod set;
mod simd;
mod skinny;
mod work;

use std::ops::Range;

use kvant_backend::{BackendError, Matrix, SharedBytes, WeightSource, check_matrix};
use kvant_codec::DType;

use crate::{Isa, Pool};
use panel::{Line, PANEL, Panels};

pub use experts::CpuExperts;
pub(crate) use experts::{Biased, Choice, ExpertFfn, expert_ffn, project_each};
pub(crate) use gate::gate;
pub(crate) use work::{Operand, Product, Scratch, To, gated_ffn, project};

/// Below this many values a parallel region costs more than it saves.
const MIN_PARALLEL_VALUES: usize = 16 * 1024;

/// A weight matrix `[n_out, n_in]` on the CPU.
#[derive(Debug)]
pub struct CpuMatrix {
    dtype: DType,
    n_out: usize,
    n_in: usize,
    store: Store,
}

/// How the weights lie in memory.
#[derive(Debug)]
enum Store {
    /// As in the file, row by row.
    Rows(SharedBytes),
    /// In panels of 16 rows.
    Panels(Panels),
}

/// Whether `isa` reads weights from panels.
fn uses_panels(isa: Isa) -> bool {
    isa != Isa::Scalar
}

/// The fewest rows that a matrix unit multiplies. Fewer leave most of what it is fed unused: from 32 on it is faster whatever the
/// weights, with 9 to 24 vectors are as fast or faster (docs/benchmarks/2026-11-25-amx.md).
const LEAST_UNIT_ROWS: usize = 32;

/// The kernel set that multiplies `rows` rows.
fn of_rows(isa: Isa, rows: usize) -> Isa {
    match isa {
        Isa::Amx(_) if rows < LEAST_UNIT_ROWS => isa.of_vectors(),
        isa => isa,
    }
}

/// Calls a generic function with the [`Set`](set::Set) that multiplies panels for an [`Isa`]; without panels, `$otherwise`.
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
                let $set =
                    $crate::matmul::set::Tiled { vectors: $crate::Avx512::from(amx.vectors()), unit: amx };
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::Isa::Neon(token) => {
                let $set = $crate::quad::Quads(token);
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::Isa::I8mm(token) => {
                let $set = $crate::matmul::set::Squared { bytes: token, halves: $crate::Bf16::detect() };
                $body
            }
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            $crate::Isa::Simd128(token) => {
                let $set = $crate::quad::Quads(token);
                $body
            }
            #[cfg(all(any(test, debug_assertions), target_arch = "x86_64"))]
            $crate::Isa::Soft(vectors) => {
                let $set = $crate::matmul::set::Tiled { vectors, unit: $crate::unit::SoftUnit };
                $body
            }
            _ => $otherwise,
        }
    };
}
use with_set;

/// The names of the kernels that multiply weights of `dtype`: one to eight rows, and more.
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
    /// Takes the weights of `source`, laid out for the kernels of `isa`.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for a type or row length that no kernel reads, [`BackendError::Shape`] when the
    /// bytes are not as many as the shape says, [`BackendError::OutOfMemory`].
    pub(crate) fn new(isa: Isa, pool: &Pool, source: WeightSource) -> Result<Self, BackendError> {
        check_matrix(&source)?;
        let WeightSource { dtype, n_out, n_in, bytes } = source;
        let store = if uses_panels(isa) {
            Store::Panels(Panels::new(pool, dtype, n_out, n_in, &bytes)?)
        } else {
            Store::Rows(bytes)
        };
        Ok(Self { dtype, n_out, n_in, store })
    }

    /// Storage type of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Decodes row `index` into `out` `[n_in]`.
    pub(crate) fn decode_row(&self, index: usize, out: &mut [f32]) {
        match &self.store {
            Store::Rows(bytes) => {
                let row_bytes = bytes.len() / self.n_out;
                let row = &bytes[index * row_bytes..][..row_bytes];
                kvant_codec::decode(self.dtype, row, out).expect("rows are whole blocks");
            }
            Store::Panels(panels) => panels.decode_row(index, out),
        }
    }

    /// Some panels, one after the other.
    fn panels(&self, panels: Range<usize>) -> &[Line] {
        match &self.store {
            Store::Panels(kept) => kept.panels(panels),
            Store::Rows(_) => unreachable!("file rows for a kernel set that reads panels"),
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
