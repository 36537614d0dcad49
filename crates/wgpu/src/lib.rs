//! GPUs of every maker through wgpu (Vulkan, Metal, DX12): kernels in WGSL beside the Rust that launches them.
//!
//! Nothing is needed to build this crate or to start a program that contains it: the system's graphics libraries are looked for
//! when adapters are asked for, and what is missing is named in the error.
//!
//! Each op is a folder with its `.wgsl` and the Rust that launches it. A kernel takes the numbers of a launch as a struct in
//! binding 0, whose fields are those of a `#[repr(C)]` struct beside the launch, and buffers in those after it. Numbers that
//! Rust and the kernels share stand in Rust alone (`constants.rs`). Kernels promise no more of their arithmetic than the
//! conformance suites ask for, and take no feature that an adapter may lack.
//!
//! Ops are recorded and handed to the device when something is read back, so that a step is one submission
//! ([`WgpuDevice::traffic`] counts them).
#![forbid(unsafe_code)]

mod adapter;
mod append;
mod arena;
mod attend;
#[cfg(test)]
mod conformance;
mod constants;
mod device;
mod each;
#[cfg(test)]
mod end_to_end;
mod error;
mod experts;
mod gpu;
mod kv;
#[cfg(test)]
mod languages;
mod matrix;
mod memory;
mod norm;
mod product;
mod recording;
mod recurrent;
mod rope;
mod shader;
#[cfg(test)]
mod tests;
mod top_k;

pub use adapter::{AdapterReport, adapters};
pub use attend::{AttendWays, LookUps};
pub use device::WgpuDevice;
pub use matrix::{WgpuExperts, WgpuMatrix};
pub use memory::{WgpuBuffer, WgpuPage};
pub use recording::Traffic;

use error::WgpuError;
use gpu::{Gpu, groups};
use shader::{Part, Source};
