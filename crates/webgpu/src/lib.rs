//! A page's WebGPU behind the names of `wgpu`: as much of that crate's face as `kvant-wgpu` launches its kernels through, so that one
//! device serves both.
//!
//! `wgpu` itself reaches a browser through generated glue, and is told of what is done by callbacks. Here a handful of functions is
//! imported from the worker that runs the module (`crates/web/page/gpu.js`), each a call or two of WebGPU; what has to be waited for
//! is waited for in the import, which JavaScript Promise Integration suspends. So every future here is ready at once, as those of
//! `wgpu` are outside of a browser.
//!
//! What WebGPU refuses is heard of when something is waited for (`Device::poll`).
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
