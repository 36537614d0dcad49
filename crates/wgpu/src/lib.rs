//! GPUs of every vendor through wgpu (Vulkan, Metal, DX12): kernels in WGSL beside the Rust that
//! launches them.
//!
//! Building this crate, or starting a program that contains it, has no requirements: enumerating
//! adapters loads the system's graphics libraries, and the error names a missing one.
//!
//! Each op is a folder with its `.wgsl` and the Rust that launches it. A kernel takes the
//! parameters of a launch as a struct in binding 0, whose fields are those of a `#[repr(C)]` struct
//! beside the launch, and buffers in the following bindings. Rust alone defines the constants that
//! it shares with the kernels (`constants.rs`). The arithmetic of the kernels guarantees what the
//! conformance suites require, and no more; kernels use no feature that an adapter may lack.
//!
//! Ops are recorded and submitted in parts of 64 launches, and when a result is read: the device
//! runs one part while the host records the next ([`WgpuDevice::traffic`] counts them). Bind groups
//! and scratch buffers are cached for the next step, which usually binds the same: a decode step
//! creates none.
#![forbid(unsafe_code)]

// In a browser, `kvant-webgpu` replaces wgpu, which would need generated JavaScript glue and cannot
// wait there.
#[cfg(target_arch = "wasm32")]
extern crate kvant_webgpu as wgpu;

mod adapter;
mod append;
mod arena;
mod attend;
#[cfg(test)]
mod conformance;
mod constants;
#[cfg(test)]
mod cross_compile;
mod device;
mod elementwise;
#[cfg(test)]
mod end_to_end;
mod error;
mod experts;
mod gpu;
mod kv;
mod matmul;
mod matrix;
mod memory;
mod norm;
mod recording;
mod recurrent;
mod rope;
mod scratch;
mod shader;
mod slabs;
mod streams;
#[cfg(test)]
mod tests;
#[cfg(not(target_arch = "wasm32"))]
mod timer;
#[cfg(target_arch = "wasm32")]
#[path = "no_timer.rs"]
mod timer;
mod top_k;
mod unroll;
#[cfg(test)]
mod wgsl_lint;

pub use adapter::{AdapterReport, adapters};
pub use attend::{AttendTrial, AttendVariant, AttendWork, CodebookLookup, TypeClass};
pub use device::WgpuDevice;
pub use matrix::{WgpuExperts, WgpuMatrix};
pub use memory::{WgpuBuffer, WgpuPage};
pub use recording::Traffic;

use error::WgpuError;
use gpu::{Gpu, groups};
use shader::{Part, Source};
