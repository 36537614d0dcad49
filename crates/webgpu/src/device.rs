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

/// Minimum size in bytes of a buffer whose allocation is checked at once. Smaller allocations
/// report failures with the other errors.
const LARGE: u64 = 1 << 20;

/// GPU interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backends(u32);

impl Backends {
    /// Unavailable in a browser.
    pub const VULKAN: Self = Self(0);
    /// Unavailable in a browser.
    pub const METAL: Self = Self(0);
    /// Unavailable in a browser.
    pub const DX12: Self = Self(0);
    /// The browser's WebGPU.
    pub const BROWSER_WEBGPU: Self = Self(1);

    /// Returns all interfaces.
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

/// Validation options.
#[derive(Debug, Clone, Copy)]
pub struct InstanceFlags {}

impl InstanceFlags {
    /// The browser's validation.
    pub fn empty() -> Self {
        Self {}
    }
}

/// Describes an instance.
#[derive(Debug)]
pub struct InstanceDescriptor {
    /// Interfaces to search for adapters.
    pub backends: Backends,
    /// Validation options.
    pub flags: InstanceFlags,
    /// Memory budget; the browser decides.
    pub memory_budget_thresholds: MemoryBudgetThresholds,
}

/// Memory budget of a device, in percent.
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryBudgetThresholds {
    /// Limit for new resources.
    pub for_resource_creation: Option<u8>,
}

impl InstanceDescriptor {
    /// Returns a descriptor without a window.
    pub fn new_without_display_handle() -> Self {
        let memory_budget_thresholds = MemoryBudgetThresholds::default();
        Self { backends: Backends::all(), flags: InstanceFlags::empty(), memory_budget_thresholds }
    }
}

/// Enumerates adapters.
#[derive(Debug)]
pub struct Instance(InstanceDescriptor);

impl Instance {
    /// Creates an instance for the worker's device.
    pub fn new(descriptor: InstanceDescriptor) -> Self {
        Self(descriptor)
    }

    /// Returns the adapter of the device that the worker has opened, if any.
    pub fn enumerate_adapters(&self, backends: Backends) -> impl Future<Output = Vec<Adapter>> {
        let is_requested = self.0.backends.0 & backends.0 != 0;
        ready(imports::describe().filter(|_| is_requested).map(Adapter).into_iter().collect())
    }
}

/// An adapter, as text: its product name, its driver, and whether it is software, a line each,
/// followed by the features of its device.
#[derive(Debug)]
pub struct Adapter(String);

/// Description of an adapter.
#[derive(Debug, Clone)]
pub struct AdapterInfo {
    /// The product name.
    pub name: String,
    /// The interface.
    pub backend: Interface,
    /// The driver's name.
    pub driver: String,
    /// Empty.
    pub driver_info: String,
    /// Kind of device.
    pub device_type: DeviceType,
    /// Minimum subgroup size; 0, as it is not requested.
    pub subgroup_min_size: u32,
}

/// The interface to a GPU: WebGPU.
#[derive(Debug, Clone, Copy)]
pub struct Interface {}

impl Interface {
    /// Returns its name.
    pub fn to_str(self) -> &'static str {
        "webgpu"
    }
}

/// Kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceType {
    /// A GPU with unknown memory.
    Other,
    /// A GPU with dedicated memory; no browser reports it.
    DiscreteGpu,
    /// Software on the CPU.
    Cpu,
}

/// Optional features of a device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Features(u32);

impl Features {
    /// f16 arithmetic in kernels.
    pub const SHADER_F16: Self = Self(1);
    /// Subgroup operations in kernels.
    pub const SUBGROUP: Self = Self(2);

    /// Returns no features.
    pub fn empty() -> Self {
        Self(0)
    }

    /// Returns whether all of `others` are included.
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

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Limits of a device.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Maximum size of a buffer in bytes.
    pub max_buffer_size: u64,
    /// Maximum size of a binding in bytes.
    pub max_storage_buffer_binding_size: u64,
    /// Alignment of binding offsets in bytes.
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

/// Describes a device to open.
#[derive(Debug, Default)]
pub struct DeviceDescriptor<'a> {
    /// Its name; unused.
    pub label: Option<&'a str>,
    /// Required features. The worker has opened the device with all of these that the adapter has.
    pub required_features: Features,
    /// Required limits. The worker has opened the device with the adapter's maximum limits.
    pub required_limits: Limits,
}

impl Default for Limits {
    fn default() -> Self {
        Self::of_device()
    }
}

/// Why opening the device failed.
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

    /// Returns the description of the adapter.
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

    /// Returns the limits of its device.
    pub fn limits(&self) -> Limits {
        Limits::of_device()
    }

    /// Returns the features of its device.
    pub fn features(&self) -> Features {
        let has = |name| self.0.lines().skip(3).any(|line| line == name);
        let bits = [("shader-f16", Features::SHADER_F16), ("subgroups", Features::SUBGROUP)];
        Features(bits.into_iter().filter(|(name, _)| has(*name)).fold(0, |bits, (_, bit)| bits | bit.0))
    }

    /// Returns the device that the worker has opened.
    pub fn request_device(
        &self,
        descriptor: &DeviceDescriptor<'_>,
    ) -> impl Future<Output = Result<(Device, Queue), RequestDeviceError>> {
        let DeviceDescriptor { required_features: features, required_limits, .. } = descriptor;
        let inner = Inner {
            info: self.get_info(),
            features: *features,
            limits: required_limits.clone(),
            handlers: Mutex::default(),
        };
        ready(Ok((Device(Arc::new(inner)), Queue(()))))
    }
}

/// An error of WebGPU.
#[derive(Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a device was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceLostReason {
    /// The driver lost it.
    Unknown,
    /// The device was destroyed.
    Destroyed,
}

/// Kind of errors that a scope captures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorFilter {
    /// Failed allocations.
    OutOfMemory,
    /// Validation errors.
    Validation,
}

/// Captures errors until it is popped.
#[derive(Debug)]
pub struct ErrorScope(Device);

impl ErrorScope {
    /// Returns the first captured error.
    pub fn pop(self) -> impl Future<Output = Option<Error>> {
        ready(self.0.handlers().scopes.pop().flatten())
    }
}

/// How long [`Device::poll`] waits.
#[derive(Debug)]
pub struct PollType {}

impl PollType {
    /// Until all submitted work is done.
    pub fn wait_indefinitely() -> Self {
        Self {}
    }
}

/// Why waiting failed.
#[derive(Debug)]
pub enum PollError {}

impl fmt::Display for PollError {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}

type OnError = Arc<dyn Fn(Error) + Send + Sync>;
type OnLost = Box<dyn Fn(DeviceLostReason, String) + Send>;

/// Error handlers and scopes.
#[derive(Default)]
struct ErrorHandlers {
    on_error: Option<OnError>,
    on_lost: Option<OnLost>,
    scopes: Vec<Option<Error>>,
}

struct Inner {
    info: AdapterInfo,
    features: Features,
    limits: Limits,
    handlers: Mutex<ErrorHandlers>,
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
    fn handlers(&self) -> MutexGuard<'_, ErrorHandlers> {
        self.0.handlers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the description of its adapter.
    pub fn adapter_info(&self) -> AdapterInfo {
        self.0.info.clone()
    }

    /// Returns the requested features.
    pub fn features(&self) -> Features {
        self.0.features
    }

    /// Returns its limits.
    pub fn limits(&self) -> Limits {
        self.0.limits.clone()
    }

    /// Sets the `handler` of errors outside of scopes.
    pub fn on_uncaptured_error(&self, handler: OnError) {
        self.handlers().on_error = Some(handler);
    }

    /// Sets the `handler` of a device loss.
    pub fn set_device_lost_callback(&self, handler: impl Fn(DeviceLostReason, String) + Send + 'static) {
        self.handlers().on_lost = Some(Box::new(handler));
    }

    /// Begins to capture errors.
    pub fn push_error_scope(&self, _filter: ErrorFilter) -> ErrorScope {
        self.handlers().scopes.push(None);
        ErrorScope(self.clone())
    }

    /// Creates a zeroed buffer. The innermost scope captures the failure of a large allocation.
    pub fn create_buffer(&self, descriptor: &BufferDescriptor<'_>) -> Buffer {
        let (size, usage) = (descriptor.size as f64, descriptor.usage.0);
        let is_checked = descriptor.size >= LARGE && !self.handlers().scopes.is_empty();
        let number =
            if is_checked { imports::buffer_tried(size, usage) } else { imports::buffer(size, usage) };
        if number == 0 {
            self.report(Error("out of memory".to_owned()));
        }
        Buffer::new(number, descriptor.size)
    }

    /// Parses a source.
    pub fn create_shader_module(&self, descriptor: ShaderModuleDescriptor<'_>) -> ShaderModule {
        let ShaderSource::Wgsl(text) = descriptor.source;
        ShaderModule(imports::module(&text))
    }

    /// Compiles an entry point, and waits for the result.
    pub fn create_compute_pipeline(&self, descriptor: &ComputePipelineDescriptor<'_>) -> ComputePipeline {
        let pipeline = imports::pipeline(&descriptor.module.0, descriptor.entry_point.unwrap_or_default());
        if pipeline.is_none() {
            self.report_failures();
        }
        ComputePipeline(pipeline)
    }

    /// Creates a bind group.
    pub fn create_bind_group(&self, descriptor: &BindGroupDescriptor<'_>) -> BindGroup {
        BindGroup::new(descriptor)
    }

    /// Creates a command encoder.
    pub fn create_command_encoder(&self, _: &CommandEncoderDescriptor) -> CommandEncoder {
        CommandEncoder(Object(imports::encoder()))
    }

    /// Waits until submitted work and mappings are done, and reports errors to their handlers.
    ///
    /// # Errors
    /// None: errors go to the scopes and handlers.
    pub fn poll(&self, _: PollType) -> Result<(), PollError> {
        imports::wait();
        self.report_failures();
        Ok(())
    }

    /// Reports the errors that the worker has received.
    fn report_failures(&self) {
        while let Some(text) = imports::failure() {
            match text.strip_prefix("lost ") {
                Some(message) => {
                    if let Some(handler) = &self.handlers().on_lost {
                        handler(DeviceLostReason::Unknown, message.to_owned());
                    }
                }
                None => self.report(Error(text)),
            }
        }
    }

    /// Reports `error` to the innermost scope, or else to the handler.
    fn report(&self, error: Error) {
        let mut handlers = self.handlers();
        match handlers.scopes.last_mut() {
            Some(scope) => _ = scope.get_or_insert(error),
            None => {
                if let Some(handler) = &handlers.on_error {
                    handler(error);
                }
            }
        }
    }
}
