//! An opened adapter: its compiled kernels, and the commands recorded for it.

use std::collections::HashMap;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytemuck::Pod;
use kvant_backend::KernelTime;

use crate::WgpuError;
use crate::constants::Constants;
use crate::recording::{Recording, Traffic};
use crate::scratch::ScratchPool;
use crate::shader::{self, Kernel, Source};

/// First size in bytes of the allocations that probe the free memory, and the size that ends the
/// probe.
const MAX_PROBE_BYTES: u64 = 4 << 30;
const MIN_PROBE_BYTES: usize = 64 << 20;
/// Maximum number of successful probes.
const MAX_PROBES: usize = 256;

/// The address of a source, the name of an entry point and the numbers of a variant.
type KernelKey = (usize, &'static str, Vec<u32>);

/// An opened adapter.
#[derive(Debug)]
pub(crate) struct Gpu {
    device: wgpu::Device,
    limits: wgpu::Limits,
    recording: Mutex<Recording>,
    /// Reusable scratch memory of the ops.
    pub(crate) scratch_pool: ScratchPool,
    kernels: Mutex<HashMap<KernelKey, Arc<Kernel>>>,
    /// Whether kernels run on the CPU, which changes what is fast.
    is_software: bool,
    /// The first error of the device, or its loss.
    failure: Arc<Mutex<Option<String>>>,
    /// Bound in place of a buffer that an op does not use.
    unused_buffer: wgpu::Buffer,
}

/// A buffer for a kernel, and the number of its binding.
pub(crate) type Binding<'a> = (u32, &'a wgpu::Buffer);

impl Gpu {
    pub fn new(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        let failure = Arc::new(Mutex::new(None));
        let handler_failure = Arc::clone(&failure);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            record_failure(&handler_failure, error.to_string())
        }));
        let callback_failure = Arc::clone(&failure);
        device.set_device_lost_callback(move |_, message| {
            // Other errors follow from the loss.
            let problem = format!("the device is lost: {message}");
            *callback_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(problem);
        });
        let limits = device.limits();
        let unused_buffer = new_buffer(&device, 16, wgpu::BufferUsages::STORAGE);
        let recording = Mutex::new(Recording::new(&device, queue, &limits));
        let is_software = device.adapter_info().device_type == wgpu::DeviceType::Cpu;
        Self {
            device,
            limits,
            recording,
            scratch_pool: ScratchPool::default(),
            kernels: Mutex::default(),
            is_software,
            failure,
            unused_buffer,
        }
    }

    /// Returns whether kernels run on the CPU, which changes what is fast.
    pub fn is_software(&self) -> bool {
        self.is_software
    }

    /// Inverts [`Gpu::is_software`].
    #[cfg(test)]
    pub fn invert_is_software(&mut self) {
        self.is_software = !self.is_software;
    }

    /// Returns the maximum size of a binding in bytes.
    pub fn max_binding(&self) -> usize {
        let max = self.limits.max_storage_buffer_binding_size.min(self.limits.max_buffer_size);
        usize::try_from(max).unwrap_or(usize::MAX)
    }

    /// Returns a buffer of 16 bytes that no kernel reads.
    pub fn unused_buffer(&self) -> &wgpu::Buffer {
        &self.unused_buffer
    }

    /// Allocates at least `bytes` of zeroed memory, for `what`.
    ///
    /// # Errors
    /// [`WgpuError::OutOfMemory`] if the device has none, or `bytes` exceed the maximum binding
    /// size.
    pub fn allocate(&self, bytes: usize, what: &'static str) -> Result<wgpu::Buffer, WgpuError> {
        let out_of_memory = WgpuError::OutOfMemory { bytes, what };
        // Bindings are never empty, and whole words.
        let size = bytes.max(16).next_multiple_of(4);
        if size > self.max_binding() {
            return Err(out_of_memory);
        }
        self.recording().count_allocation();
        if let Some(buffer) = self.try_allocate(size) {
            return Ok(buffer);
        }
        // Cached scratch memory may be what is missing.
        self.scratch_pool.clear();
        self.recording().drop_bind_groups();
        self.try_allocate(size).ok_or(out_of_memory)
    }

    /// Measures the free memory by allocating and freeing it, as no underlying interface reports
    /// it. The result has no meaning for memory that is committed only on first access, such as
    /// memory shared with the CPU.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn free_bytes(&self) -> Result<usize, WgpuError> {
        let mut buffers = Vec::new();
        let mut size = self.limits.max_buffer_size.min(MAX_PROBE_BYTES) as usize / 4 * 4;
        while size >= MIN_PROBE_BYTES && buffers.len() < MAX_PROBES {
            match self.try_allocate(size) {
                Some(buffer) => buffers.push(buffer),
                None => size = size / 8 * 4,
            }
        }
        self.check()?;
        Ok(buffers.iter().map(|buffer| buffer.size() as usize).sum())
    }

    fn try_allocate(&self, size: usize) -> Option<wgpu::Buffer> {
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let buffer = new_buffer(&self.device, size as u64, usage);
        ready(scope.pop()).is_none().then_some(buffer)
    }

    /// Returns the entry point `name` of `source`, compiled at its first use.
    pub fn kernel(&self, source: &'static Source, name: &'static str) -> Result<Arc<Kernel>, WgpuError> {
        self.variant(source, name, &[], Constants::default)
    }

    /// As [`Gpu::kernel`], for the variant of `source` with the constants `constants`, identified
    /// by `numbers`.
    pub fn variant(
        &self,
        source: &'static Source,
        name: &'static str,
        numbers: &[u32],
        constants: impl FnOnce() -> Constants,
    ) -> Result<Arc<Kernel>, WgpuError> {
        let key = (std::ptr::from_ref(source) as usize, name, numbers.to_vec());
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(&key) {
            return Ok(Arc::clone(kernel));
        }
        let kernel = Arc::new(shader::compile(&self.device, source, &constants(), name)?);
        kernels.insert(key, Arc::clone(&kernel));
        Ok(kernel)
    }

    /// Records a launch of `kernel` in a grid of `groups`, with `params` in binding 0, followed by
    /// `list`.
    ///
    /// # Errors
    /// Those of a submission, if the recorded commands fill one.
    pub fn launch<P: Pod, L: Pod>(
        &self,
        kernel: &Kernel,
        groups: [u32; 3],
        params: &P,
        list: &[L],
        bindings: &[Binding<'_>],
    ) -> Result<(), WgpuError> {
        if groups.contains(&0) {
            return Ok(());
        }
        let param_bytes = [bytemuck::bytes_of(params), bytemuck::cast_slice(list)].concat();
        self.recording().launch(&self.device, kernel, groups, &param_bytes, bindings);
        self.check()
    }

    /// Counts the multiply-adds of the next launch, a product of these factors, so that no
    /// submission takes a GPU too long.
    pub fn count_work<const N: usize>(&self, factors: [usize; N]) {
        self.recording().count_work(product(factors));
    }

    /// Records a write of `bytes` to `to` from byte `at` on, both whole words.
    pub fn write(&self, to: &wgpu::Buffer, at: usize, bytes: &[u8]) -> Result<(), WgpuError> {
        self.recording().write(&self.device, to, at as u64, bytes);
        self.check()
    }

    /// Records a copy of `len` bytes from byte `from_at` on to byte `to_at` of `to`, all whole
    /// words.
    pub fn copy(&self, from: &wgpu::Buffer, from_at: usize, to: &wgpu::Buffer, to_at: usize, len: usize) {
        self.recording().copy(&self.device, from, from_at, to, to_at, len);
    }

    /// Records the zeroing of `len` bytes, whole words.
    pub fn clear(&self, buffer: &wgpu::Buffer, at: usize, len: usize) {
        self.recording().clear(&self.device, buffer, at, len);
    }

    /// Submits the recorded commands, waits, and reads bytes from `at` on, whole words.
    pub fn read(&self, from: &wgpu::Buffer, at: usize, bytes: &mut [u8]) -> Result<(), WgpuError> {
        let result = self.recording().read(&self.device, from, at, bytes);
        self.check()?;
        result
    }

    /// Submits the recorded commands, and waits until they are done.
    pub fn finish(&self) -> Result<(), WgpuError> {
        let result = self.recording().finish(&self.device);
        self.check()?;
        result
    }

    /// Starts timing kernels, or stops; returns whether the device can.
    pub fn time_kernels(&self, is_on: bool) -> Result<bool, WgpuError> {
        let can = self.recording().time_kernels(&self.device, is_on);
        self.check().map(|()| can)
    }

    /// Returns the time of each kernel since timing started.
    pub fn kernel_times(&self) -> Result<Vec<KernelTime>, WgpuError> {
        let times = self.recording().kernel_times();
        self.check()?;
        times
    }

    /// Returns the work submitted and the bytes moved so far.
    pub fn traffic(&self) -> Traffic {
        self.recording().traffic()
    }

    /// Returns the number of cached bind groups.
    #[cfg(test)]
    pub fn groups(&self) -> usize {
        self.recording().groups()
    }

    /// Destroys the device, as a driver may at any time.
    #[cfg(test)]
    pub fn destroy(&self) {
        self.device.destroy();
    }

    fn recording(&self) -> MutexGuard<'_, Recording> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an error if the device has reported one, now or before: its contents are undefined
    /// then.
    fn check(&self) -> Result<(), WgpuError> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone().map_or(Ok(()), |problem| Err(WgpuError::Refused(problem)))
    }
}

/// Stores the first error.
fn record_failure(failure: &Mutex<Option<String>>, problem: String) {
    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(problem);
}

/// Returns the product of these factors, which a `usize` may not hold in a browser.
pub(crate) fn product<const N: usize>(factors: [usize; N]) -> u64 {
    factors.iter().fold(1, |product, &factor| product.saturating_mul(factor as u64))
}

pub(crate) fn new_buffer(device: &wgpu::Device, size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
}

/// Returns a grid of `n` workgroups in its first two dimensions, each within the limits of every
/// adapter, and of `depth` in its third. Kernels skip those beyond `n`.
pub(crate) fn groups(n: usize, depth: usize) -> [u32; 3] {
    const MAX_GROUPS: usize = 32_768;
    [n.min(MAX_GROUPS) as u32, n.div_ceil(MAX_GROUPS) as u32, depth as u32]
}

/// Returns the output of `future`. The futures of wgpu are ready at once outside of a browser.
///
/// # Panics
/// If it is pending.
pub(crate) fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("a future of wgpu that is not ready at once"),
    }
}
