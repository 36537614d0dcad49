//! The NVIDIA device: kernels in CUDA C++ beside the Rust that launches them, compiled ahead to
//! PTX.
//!
//! Building this crate, or starting a program that contains it, requires nothing of CUDA. Opening a
//! device loads the driver. A kernel that is not part of the binary, such as one for an unusual
//! head size, is compiled by NVRTC at its first use; the error names a missing library.
//!
//! Each op is a folder with its `.cu` and the Rust that checks shapes and launches it. A kernel
//! takes one parameter, a struct whose fields are those of a `#[repr(C)]` struct beside the launch.
//! Ops reach the device through `Gpu`, which the driver implements and, in tests, an interpreter of
//! the compiled PTX: tests run the shipped kernels.

mod append;
mod archive;
mod attend;
mod bidirectional;
mod builds;
mod columns;
#[cfg(test)]
mod conformance;
mod constants;
mod context;
mod device;
mod driver;
mod embed;
#[cfg(test)]
mod emulator;
#[cfg(test)]
mod encoders;
#[cfg(test)]
mod end_to_end;
mod entry;
mod error;
mod experts;
mod gate;
mod gpu;
mod half;
mod kv;
mod matmul;
mod matrix;
mod memory;
mod module;
mod norm;
mod nvrtc;
mod plans;
mod pointwise;
mod recorder;
mod recurrent;
mod rehearsal;
mod rope;
mod rotate;
mod soft_cap;
mod staging;
mod streams;
mod top_k;
mod transfers;
mod turns;

pub use device::CudaDevice;
pub use error::CudaVersion;
pub use experts::CudaExperts;
pub use matrix::CudaMatrix;
pub use memory::{CudaBuffer, CudaPage, PageAddresses};

use context::Context;
use error::CudaError;
use gpu::{DevicePtr, Gpu, GpuProperties, KernelId, Launch, ModuleId};
use module::{Define, Header, Source};
