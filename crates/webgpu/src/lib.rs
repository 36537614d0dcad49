//! WebGPU of a browser under the names of `wgpu`: the subset of that crate's API that `kvant-wgpu`
//! uses, so that one device implementation serves both.
//!
//! `wgpu` itself reaches a browser through generated JavaScript glue, and reports completion by
//! callbacks. This crate imports a few functions of the worker that runs the module
//! (`crates/web/page/gpu.js`), each of one or two WebGPU calls; an import that has to wait is
//! suspended by JavaScript Promise Integration. So every future here is ready at once, as those of
//! `wgpu` are outside of a browser.
//!
//! `Device::poll` reports the errors of WebGPU.
#![cfg(target_arch = "wasm32")]

mod buffer;
mod commands;
mod device;
mod imports;
mod kernel;

pub use buffer::{
    Buffer, BufferBinding, BufferDescriptor, BufferSize, BufferSlice, BufferUsages, BufferView, MapMode,
    MapRangeError,
};
pub use commands::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BindingResource, CommandBuffer, CommandEncoder,
    CommandEncoderDescriptor, ComputePass, ComputePassDescriptor, Queue,
};
pub use device::{
    Adapter, AdapterInfo, Backends, Device, DeviceDescriptor, DeviceLostReason, DeviceType, Error,
    ErrorFilter, ErrorScope, Features, Instance, InstanceDescriptor, InstanceFlags, Interface, Limits,
    MemoryBudgetThresholds, PollError, PollType, RequestDeviceError,
};
pub use kernel::{
    BindGroupLayout, CompilationInfo, CompilationMessage, CompilationMessageType, ComputePipeline,
    ComputePipelineDescriptor, PipelineCompilationOptions, ShaderModule, ShaderModuleDescriptor,
    ShaderSource, SourceLocation,
};
