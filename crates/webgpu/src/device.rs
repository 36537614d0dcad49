//! The device that the worker has opened.

use std::fmt;
use std::future::{Future, ready};
use std::ops::{BitAnd, BitOr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::imports::{self, Object};
use crate::{
    BindGroup, BindGroupDescriptor, Buffer, BufferDescriptor, CommandEncoder, CommandEncoderDescriptor,
    ComputePipeline, ComputePipelineDescriptor, Queue, ShaderModule, ShaderModuleDescriptor, ShaderSource,
};

/// From so many bytes on, it is waited for whether the device has a buffer. Whether it has smaller ones is heard with all else that is
/// refused.
const LARGE: u64 = 1 << 20;

/// Interfaces to GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backends(u32);

impl Backends {
    /// Not in a browser.
    pub const VULKAN: Self = Self(0);
    /// Not in a browser.
    pub const METAL: Self = Self(0);
    /// Not in a browser.
    pub const DX12: Self = Self(0);
    /// The browser's.
    pub const BROWSER_WEBGPU: Self = Self(1);

    /// All that there are.
    pub fn all() -> Self {
        Self::BROWSER_WEBGPU
    }
}

impl BitOr for Backends {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// How closely is looked.
#[derive(Debug, Clone, Copy)]
pub struct InstanceFlags {}

impl InstanceFlags {
    /// As the browser looks.
    pub fn empty() -> Self {
        Self {}
    }
}

/// Where adapters are looked for.
#[derive(Debug)]
pub struct InstanceDescriptor {
    /// Their interfaces.
    pub backends: Backends,
    /// How closely is looked.
    pub flags: InstanceFlags,
    /// How much of a device's memory is taken; the browser decides.
    pub memory_budget_thresholds: MemoryBudgetThresholds,
}

/// How much of a device's memory is taken, in percent.
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryBudgetThresholds {
    /// Beyond it nothing new is made.
    pub for_resource_creation: Option<u8>,
}

impl InstanceDescriptor {
    /// Without a window.
    pub fn new_without_display_handle() -> Self {
        let memory_budget_thresholds = MemoryBudgetThresholds::default();
        Self { backends: Backends::all(), flags: InstanceFlags::empty(), memory_budget_thresholds }
    }
}

/// What has adapters.
#[derive(Debug)]
pub struct Instance(InstanceDescriptor);

impl Instance {
    /// What the worker has.
    pub fn new(descriptor: InstanceDescriptor) -> Self {
        Self(descriptor)
    }

    /// The adapter whose device the worker has opened; none where it has not.
    pub fn enumerate_adapters(&self, backends: Backends) -> impl Future<Output = Vec<Adapter>> {
        let is_wanted = self.0.backends.0 & backends.0 != 0;
        ready(imports::describe().filter(|_| is_wanted).map(Adapter).into_iter().collect())
    }
}

/// A GPU, or what stands for one: the name of its product, of its driver, and whether it is a program on the CPU, a line each, followed
/// by the features of its device.
#[derive(Debug)]
pub struct Adapter(String);

/// What an adapter is.
#[derive(Debug, Clone)]
pub struct AdapterInfo {
    /// The product's name.
    pub name: String,
    /// The interface.
    pub backend: Interface,
    /// Whose it is.
    pub driver: String,
    /// Nothing more.
    pub driver_info: String,
    /// What computes there.
    pub device_type: DeviceType,
    /// Invocations of a subgroup at least. None are asked for: 0.
    pub subgroup_min_size: u32,
}

/// The interface to a GPU: WebGPU.
#[derive(Debug, Clone, Copy)]
pub struct Interface {}

impl Interface {
    /// Its name.
    pub fn to_str(self) -> &'static str {
        "webgpu"
    }
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceType {
    /// A GPU, of whose memory nothing is known.
    Other,
    /// A GPU with memory of its own: no browser tells.
    DiscreteGpu,
    /// A program on the CPU.
    Cpu,
}

/// What a device can do beyond what each can.
#[derive(Debug, Clone, Copy, Default)]
pub struct Features(u32);

impl Features {
    /// Kernels may compute in f16.
    pub const SHADER_F16: Self = Self(1);
    /// Invocations of a subgroup may talk to each other.
    pub const SUBGROUP: Self = Self(2);

    /// None.
    pub fn empty() -> Self {
        Self(0)
    }

    /// Whether all of `others` are there.
    pub fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }
}

impl BitAnd for Features {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// What a device has room for.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a buffer.
    pub max_buffer_size: u64,
    /// Bytes that a kernel reaches in one binding.
    pub max_storage_buffer_binding_size: u64,
    /// Where bindings may begin.
    pub min_storage_buffer_offset_alignment: u32,
}

impl Limits {
    fn of_device() -> Self {
        let [max_buffer_size, max_storage_buffer_binding_size, align] =
            [0, 1, 2].map(|which| imports::limit(which) as u64);
        let min_storage_buffer_offset_alignment = align as u32;
        Self { max_buffer_size, max_storage_buffer_binding_size, min_storage_buffer_offset_alignment }
    }
}

/// A device to be opened.
#[derive(Debug, Default)]
pub struct DeviceDescriptor<'a> {
    /// Its name; not handed on.
    pub label: Option<&'a str>,
    /// What it has to be able to do. The worker has opened it with all of these that the adapter has.
    pub required_features: Features,
    /// What it has to have room for. The worker has opened it with all that the adapter gives.
    pub required_limits: Limits,
}

impl Default for Limits {
    fn default() -> Self {
        Self::of_device()
    }
}

/// Why there is no device.
#[derive(Debug)]
pub enum RequestDeviceError {}

impl fmt::Display for RequestDeviceError {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}

impl Adapter {
    fn line(&self, index: usize) -> &str {
        self.0.lines().nth(index).unwrap_or_default()
    }

    /// What it is.
    pub fn get_info(&self) -> AdapterInfo {
        let [name, driver] = [0, 1].map(|index| self.line(index).to_owned());
        let device_type = if self.line(2) == "software" { DeviceType::Cpu } else { DeviceType::Other };
        AdapterInfo {
            name,
            backend: Interface {},
            driver,
            driver_info: String::new(),
            device_type,
            subgroup_min_size: 0,
        }
    }

    /// What its device has room for.
    pub fn limits(&self) -> Limits {
        Limits::of_device()
    }

    /// What its device can do.
    pub fn features(&self) -> Features {
        let has = |name| self.0.lines().skip(3).any(|line| line == name);
        let bits = [("shader-f16", Features::SHADER_F16), ("subgroups", Features::SUBGROUP)];
        Features(bits.into_iter().filter(|(name, _)| has(*name)).fold(0, |bits, (_, bit)| bits | bit.0))
    }

    /// Its device, which the worker has opened.
    pub fn request_device(
        &self,
        descriptor: &DeviceDescriptor<'_>,
    ) -> impl Future<Output = Result<(Device, Queue), RequestDeviceError>> {
        let DeviceDescriptor { required_features: features, required_limits, .. } = descriptor;
        let inner = Inner {
            info: self.get_info(),
            features: *features,
            limits: required_limits.clone(),
            heard: Mutex::default(),
        };
        ready(Ok((Device(Arc::new(inner)), Queue(()))))
    }
}

/// What WebGPU has against something.
#[derive(Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a device is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceLostReason {
    /// The driver has given it up.
    Unknown,
    /// It was not wanted any more.
    Destroyed,
}

/// What a scope listens to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorFilter {
    /// Memory that is not there.
    OutOfMemory,
    /// What makes no sense.
    Validation,
}

/// Listens until it is popped.
#[derive(Debug)]
pub struct ErrorScope(Device);

impl ErrorScope {
    /// The first of what was heard.
    pub fn pop(self) -> impl Future<Output = Option<Error>> {
        ready(self.0.heard().scopes.pop().flatten())
    }
}

/// How long is waited.
#[derive(Debug)]
pub struct PollType {}

impl PollType {
    /// Until all is done that was handed over.
    pub fn wait_indefinitely() -> Self {
        Self {}
    }
}

/// Why nothing is waited for.
#[derive(Debug)]
pub enum PollError {}

impl fmt::Display for PollError {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}

type OnError = Arc<dyn Fn(Error) + Send + Sync>;
type OnLost = Box<dyn Fn(DeviceLostReason, String) + Send>;

/// Who is told of what goes wrong.
#[derive(Default)]
struct Heard {
    on_error: Option<OnError>,
    on_lost: Option<OnLost>,
    scopes: Vec<Option<Error>>,
}

struct Inner {
    info: AdapterInfo,
    features: Features,
    limits: Limits,
    heard: Mutex<Heard>,
}

/// An opened device.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Device")
    }
}

impl Device {
    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.0.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whose device it is.
    pub fn adapter_info(&self) -> AdapterInfo {
        self.0.info.clone()
    }

    /// What it was asked to be able to do.
    pub fn features(&self) -> Features {
        self.0.features
    }

    /// What it has room for.
    pub fn limits(&self) -> Limits {
        self.0.limits.clone()
    }

    /// Has `handler` told of what goes wrong outside of scopes.
    pub fn on_uncaptured_error(&self, handler: OnError) {
        self.heard().on_error = Some(handler);
    }

    /// Has `handler` told when the device is gone.
    pub fn set_device_lost_callback(&self, handler: impl Fn(DeviceLostReason, String) + Send + 'static) {
        self.heard().on_lost = Some(Box::new(handler));
    }

    /// Listens to what is made from now on.
    pub fn push_error_scope(&self, _filter: ErrorFilter) -> ErrorScope {
        self.heard().scopes.push(None);
        ErrorScope(self.clone())
    }

    /// Zeroed memory. Where there is none for a large one, the innermost scope hears of it.
    pub fn create_buffer(&self, descriptor: &BufferDescriptor<'_>) -> Buffer {
        let (size, usage) = (descriptor.size as f64, descriptor.usage.0);
        let is_tried = descriptor.size >= LARGE && !self.heard().scopes.is_empty();
        let number = if is_tried { imports::buffer_tried(size, usage) } else { imports::buffer(size, usage) };
        if number == 0 {
            self.note(Error("out of memory".to_owned()));
        }
        Buffer::new(number, descriptor.size)
    }

    /// Reads a source.
    pub fn create_shader_module(&self, descriptor: ShaderModuleDescriptor<'_>) -> ShaderModule {
        let ShaderSource::Wgsl(text) = descriptor.source;
        ShaderModule(imports::module(&text))
    }

    /// Compiles an entry point, and waits until that is done.
    pub fn create_compute_pipeline(&self, descriptor: &ComputePipelineDescriptor<'_>) -> ComputePipeline {
        let made = imports::pipeline(&descriptor.module.0, descriptor.entry_point.unwrap_or_default());
        if made.is_none() {
            self.listen();
        }
        ComputePipeline(made)
    }

    /// Binds buffers.
    pub fn create_bind_group(&self, descriptor: &BindGroupDescriptor<'_>) -> BindGroup {
        BindGroup::new(descriptor)
    }

    /// Begins commands.
    pub fn create_command_encoder(&self, _: &CommandEncoderDescriptor) -> CommandEncoder {
        CommandEncoder(Object(imports::encoder()))
    }

    /// Waits until what was handed over is done and what was mapped has come, and tells of what went wrong.
    ///
    /// # Errors
    /// None: what goes wrong is told to whom it was promised.
    pub fn poll(&self, _: PollType) -> Result<(), PollError> {
        imports::wait();
        self.listen();
        Ok(())
    }

    /// Tells of what the worker has heard.
    fn listen(&self) {
        while let Some(text) = imports::failure() {
            match text.strip_prefix("lost ") {
                Some(message) => {
                    if let Some(tell) = &self.heard().on_lost {
                        tell(DeviceLostReason::Unknown, message.to_owned());
                    }
                }
                None => self.note(Error(text)),
            }
        }
    }

    /// Tells the innermost scope of `error`, or whoever listens where there is none.
    fn note(&self, error: Error) {
        let mut heard = self.heard();
        match heard.scopes.last_mut() {
            Some(scope) => _ = scope.get_or_insert(error),
            None => {
                if let Some(tell) = &heard.on_error {
                    tell(error);
                }
            }
        }
    }
}
