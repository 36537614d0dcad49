//! The CPU device: scalar reference kernels, AVX2 and AVX-512 variants chosen at run time, and a thread pool.
//!
//! Every vectorised kernel takes a capability token ([`Avx2`], [`Avx512`]) that exists only on a CPU that has the
//! instructions. The choice is made once, when the device is opened; `KVANT_ISA` forces it.

#[allow(dead_code, reason = "the device calls it")]
mod append;
#[allow(dead_code, reason = "the device calls it")]
mod attend;
mod isa;
mod page;
mod pool;
#[allow(dead_code, reason = "attention and appending use it")]
mod shards;

pub use isa::{Avx2, Avx512, Isa};
pub use page::CpuPage;
pub use pool::Pool;
