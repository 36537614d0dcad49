//! The CPU device: scalar reference kernels, AVX2, AVX-512, AMX and NEON variants selected at run
//! time, WebAssembly SIMD kernels selected at build time, and a thread pool.
//!
//! Every vectorized kernel takes a capability token ([`Avx2`], [`AvxVnni`], [`Avx512`],
//! [`Avx512Vbmi`], [`Amx`], [`Neon`], [`I8mm`], [`Simd128`]) that exists only on a CPU with the
//! instructions. The selection is made once, when the device is opened; `KVANT_ISA` forces it.

#![cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, unused_variables, reason = "there is no matrix unit, and perhaps no vector set")
)]

mod amx;
mod append;
mod attend;
mod attend_bidirectional;
mod buffer;
mod channel_scales;
mod columns;
mod device;
mod disjoint;
mod embed;
mod exp;
mod gate_rows;
mod isa;
mod linear_attention;
mod matmul;
mod matrix_unit;
mod norm;
mod page;
mod pool;
mod prefill_precision;
mod roofline;
mod rope;
mod short_conv;
mod soft_cap;
mod tuning;
#[cfg(not(target_arch = "x86_64"))]
mod vec128;
mod vec16;

pub use amx::MatrixUnit;
pub use buffer::CpuBuffer;
pub use device::CpuDevice;
pub use isa::{Amx, Avx2, Avx512, Avx512Vbmi, AvxVnni, Bf16, I8mm, Isa, Neon, Simd128};
pub use matmul::{CpuExperts, CpuMatrix};
pub use page::CpuPage;
pub use pool::Pool;
pub use prefill_precision::PrefillPrecision;
pub use tuning::{Trial, Tuning};
