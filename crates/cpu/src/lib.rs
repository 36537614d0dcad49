//! The CPU device: scalar reference kernels, AVX2, AVX-512, AMX and NEON variants selected at run
//! time, WebAssembly SIMD kernels selected at build time, and a thread pool.
//!
//! Every vectorized kernel takes a capability token ([`Avx2`], [`AvxVnni`], [`Avx512`],
//! [`Avx512Vbmi`], [`Amx`], [`Neon`], [`I8mm`], [`Simd128`]) that exists only on a CPU with the
//! instructions. The selection is made once, when the device is opened; `KVANT_ISA` forces it.
//!
//! Four floors, each of which imports only from those before it: `simd` (instruction sets and
//! vectors), `host` (threads and memory), `ops` (one module for each op), `device` (the
//! [`Backend`](kvant_backend::Backend)). Modules import from the module that defines a name;
//! the names below are for other crates.

#![cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, unused_variables, reason = "there is no matrix unit, and perhaps no vector set")
)]

mod device;
mod host;
mod ops;
mod simd;

pub use device::CpuDevice;
pub use device::tuning::Trial;
pub use host::buffer::CpuBuffer;
pub use host::page::CpuPage;
pub use host::pool::{Pool, Region};
pub use ops::matmul::prefill_precision::PrefillPrecision;
pub use ops::matmul::tuning::Tuning;
pub use ops::matmul::{CpuExperts, CpuMatrix};
pub use simd::amx::{Amx, MatrixUnit};
pub use simd::isa::Isa;
pub use simd::tokens::{Avx2, Avx512, Avx512Vbmi, AvxVnni, Bf16, I8mm, Neon, Simd128};
