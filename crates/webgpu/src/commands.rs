//! Command recording and submission.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::imports::{self, Object};
use crate::kernel::number;
use crate::{BindGroupLayout, Buffer, BufferBinding, ComputePipeline};

/// A resource for a binding.
#[derive(Debug, Clone)]
pub enum BindingResource<'a> {
    /// A range of a buffer.
    Buffer(BufferBinding<'a>),
}

/// A binding number and its resource.
#[derive(Debug, Clone)]
pub struct BindGroupEntry<'a> {
    /// The binding's number.
    pub binding: u32,
    /// The bound resource.
    pub resource: BindingResource<'a>,
}

/// Describes a bind group to create.
#[derive(Debug)]
pub struct BindGroupDescriptor<'a> {
    /// Its name; unused.
    pub label: Option<&'a str>,
    /// Its layout.
    pub layout: &'a BindGroupLayout,
    /// Its bindings.
    pub entries: &'a [BindGroupEntry<'a>],
}

/// The bindings of a launch.
#[derive(Debug, Clone)]
pub struct BindGroup {
    group: Arc<Object>,
    /// Keeps the buffers alive.
    _buffers: Arc<[Buffer]>,
}

impl BindGroup {
    pub(crate) fn new(descriptor: &BindGroupDescriptor<'_>) -> Self {
        let parts = || descriptor.entries.iter().map(|entry| (entry.binding, resource(entry)));
        let numbers = parts().map(|(binding, BufferBinding { buffer, offset, size })| {
            let len = size.map_or(buffer.size() - offset, |size| size.get());
            [binding.into(), buffer.object.0.into(), *offset as f64, len as f64]
        });
        let group = imports::group(&descriptor.layout.0, &numbers.collect::<Vec<_>>());
        let buffers = parts().map(|(_, range)| range.buffer.clone()).collect();
        Self { group: Arc::new(group), _buffers: buffers }
    }
}

fn resource<'a>(entry: &'a BindGroupEntry<'a>) -> &'a BufferBinding<'a> {
    let BindingResource::Buffer(range) = &entry.resource;
    range
}

/// Describes a command encoder.
#[derive(Debug, Default)]
pub struct CommandEncoderDescriptor {}

/// Records commands.
#[derive(Debug)]
pub struct CommandEncoder(pub(crate) Object);

/// Recorded commands.
#[derive(Debug)]
pub struct CommandBuffer(Object);

impl CommandEncoder {
    /// Begins a compute pass.
    pub fn begin_compute_pass(&mut self, _: &ComputePassDescriptor) -> ComputePass<'_> {
        ComputePass { commands: PassCommands(Object(imports::pass(self.0.0))), encoder: PhantomData }
    }

    /// Copies within the device, `len` bytes or all from `at` on.
    pub fn copy_buffer_to_buffer(
        &mut self,
        from: &Buffer,
        at: u64,
        to: &Buffer,
        to_at: u64,
        len: Option<u64>,
    ) {
        let len = len.unwrap_or(from.size() - at) as f64;
        imports::copy(self.0.0, from.object.0, at as f64, to.object.0, to_at as f64, len);
    }

    /// Zeroes `len` bytes or all from `at` on.
    pub fn clear_buffer(&mut self, buffer: &Buffer, at: u64, len: Option<u64>) {
        let len = len.unwrap_or(buffer.size() - at) as f64;
        imports::clear(self.0.0, buffer.object.0, at as f64, len);
    }

    /// Ends the recording.
    pub fn finish(self) -> CommandBuffer {
        CommandBuffer(self.0)
    }
}

/// Describes a compute pass.
#[derive(Debug, Default)]
pub struct ComputePassDescriptor {}

/// Records launches, until it is dropped.
#[derive(Debug)]
pub struct ComputePass<'a> {
    commands: PassCommands,
    encoder: PhantomData<&'a mut CommandEncoder>,
}

/// The launches of a pass, which dropping them ends.
#[derive(Debug)]
struct PassCommands(Object);

impl ComputePass<'_> {
    /// Returns the pass without its borrow of the encoder. Other commands of the encoder are errors
    /// until the pass is dropped.
    pub fn forget_lifetime(self) -> ComputePass<'static> {
        ComputePass { commands: self.commands, encoder: PhantomData }
    }

    /// Sets the kernel to launch.
    pub fn set_pipeline(&mut self, pipeline: &ComputePipeline) {
        imports::set_pipeline(self.commands.0.0, number(pipeline));
    }

    /// Sets the bindings, with dynamic `offsets`.
    pub fn set_bind_group(&mut self, index: u32, group: &BindGroup, offsets: &[u32]) {
        imports::set_group(&self.commands.0, index, &group.group, offsets);
    }

    /// Launches a grid of workgroups.
    pub fn dispatch_workgroups(&mut self, x: u32, y: u32, z: u32) {
        imports::dispatch(self.commands.0.0, x, y, z);
    }
}

impl Drop for PassCommands {
    fn drop(&mut self) {
        imports::end(self.0.0);
    }
}

/// Receives commands.
#[derive(Debug, Clone)]
pub struct Queue(pub(crate) ());

impl Queue {
    /// Writes bytes to a buffer, before the next submitted commands.
    pub fn write_buffer(&self, to: &Buffer, at: u64, bytes: &[u8]) {
        imports::write(&to.object, at as f64, bytes);
    }

    /// Submits commands.
    pub fn submit(&self, commands: impl IntoIterator<Item = CommandBuffer>) {
        commands.into_iter().for_each(|commands| imports::submit(commands.0.0));
    }
}
