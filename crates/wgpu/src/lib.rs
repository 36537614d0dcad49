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
//! ([`WgpuDevice::traffic`] counts them). Groups of bindings, and buffers that ops take for a moment, are kept for the step after it,
//! which most often binds the same: a token of an answer makes none.
#![forbid(unsafe_code)]

// In a browser, what stands for wgpu is of our own: wgpu would bring glue that is generated, and nothing waits in it.
#[cfg(target_arch = "wasm32")]
extern crate kvant_webgpu as wgpu;

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
#[cfg(test)]
mod grammar;
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
mod scratch;
mod shader;
#[cfg(test)]
mod tests;
mod top_k;

pub use adapter::{AdapterReport, adapters};
pub use attend::{AttendTrial, AttendWays, AttendWork, LookUps, TypeClass};
pub use device::WgpuDevice;
pub use matrix::{WgpuExperts, WgpuMatrix};
pub use memory::{WgpuBuffer, WgpuPage};
pub use recording::Traffic;

use error::WgpuError;
use gpu::{Gpu, groups};
use shader::{Part, Source};
