//! Products of activations with weight matrices: `y = W norm(x) + bias`, several matrices on one
//! input.
//!
//! | rows | weights | path |
//! |---|---|---|
//! | any | file order (scalar kernel set only) | [`rows`]: the reference |
//! | 1 to 8 | panels | [`gemv`]: GEMV, every panel is read once and multiplied with all rows |
//! | more | panels | [`gemm`]: panels are unpacked in chunks and multiplied with blocks of rows |
//!
//! For coded weights, a matrix unit ([`crate::simd::matrix_unit`]) or 2x2 matrix instructions
//! ([`crate::simd::vec128`]) may compute GEMMs, with the same bits.
//!
//! Experts ([`experts`]) take the same paths, each with the rows routed to it.
//!
//! With [`PrefillPrecision::Bf16`](prefill_precision::PrefillPrecision::Bf16), a matrix unit
//! computes GEMMs in bf16 ([`bf16`]), except for experts and f32 weights; 2x2 matrix instructions
//! do so for float weights.
//!
//! Layers, each of which imports only from those before it and its own: operands ([`matrix`],
//! [`panel`], [`partition`], [`quantize`], [`floats`], [`bf16`]), [`kernels`] over them,
//! [`kernel_set`], the loops [`gemm`] and [`gemv`], and [`dispatch`] with [`experts`].
//!
//! Coded panels are multiplied with activations in 8 bits ([`quantize`]), rotated if the weights
//! are; float panels and file rows with activations in f32.

mod bf16;
mod dispatch;
mod experts;
mod floats;
mod forms;
mod gate;
mod gemm;
mod gemv;
mod kernel_set;
mod kernels;
mod matrix;
mod outputs;
pub(crate) mod panel;
mod partition;
pub(crate) mod prefill_precision;
mod product;
mod quantize;
mod rows;
mod scratch;
pub(crate) mod tuning;

use kvant_codec::DType;
use kvant_codec::fields::FieldSpec;

use crate::simd::isa::Isa;
use crate::simd::matmul::format::is_float;
use matrix::uses_panels;

pub(crate) use dispatch::{gated_ffn, project};
pub use experts::CpuExperts;
pub(crate) use experts::{Biased, Choice, ExpertFfn, moe_ffn, project_each};
pub(crate) use gate::gate;
pub use matrix::CpuMatrix;
pub(crate) use product::{Operand, Product, Scatter};
pub(crate) use scratch::Scratch;

/// Returns the names of the kernels that multiply weights of `dtype`: for one to eight rows, and
/// for more.
pub(crate) fn kernel_name(isa: Isa, dtype: DType) -> String {
    if uses_panels(isa) {
        let looks_up = FieldSpec::of(dtype).is_some_and(|spec| spec.trellis.is_some());
        let of_bytes = isa.name_of_byte_products(looks_up);
        let set = match isa {
            _ if is_float(dtype) => isa.name_of_float_products(),
            Isa::Amx(_) => return format!("gemv-{dtype}-{of_bytes}, gemm-{dtype}-amx"),
            Isa::I8mm(_) => return format!("gemv-{dtype}-neon, gemm-{dtype}-i8mm"),
            _ => of_bytes,
        };
        format!("gemv-{dtype}-{set}, gemm-{dtype}-{set}")
    } else {
        format!("rows-{dtype}-scalar")
    }
}
