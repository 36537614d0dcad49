//! The seam between the ops and whatever runs their kernels.

use crate::{CudaError, CudaVersion};

/// An address in device memory.
pub(crate) type DevicePtr = u64;

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuProperties {
    /// The product's name, `NVIDIA H200`.
    pub name: String,
    /// Compute capability times ten: 80, 89, 90.
    pub arch: u32,
    /// Streaming multiprocessors.
    pub n_sms: u32,
    /// Most shared memory a block can ask for, in bytes.
    pub shared_per_block: u32,
    /// Memory of the device, in bytes.
    pub total_bytes: usize,
    /// The newest CUDA the driver supports.
    pub driver: CudaVersion,
}

/// A loaded module of one [`Gpu`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ModuleId(pub usize);

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct KernelId(pub usize);

/// The geometry of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Launch {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

impl Launch {
    /// `blocks` blocks of `threads` threads in x, without dynamic shared memory.
    pub fn linear(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0 }
    }
}

/// Memory, modules and one queue of work on a device. Writes, copies, zeroing and launches happen in the order of the
/// calls; only [`Gpu::read`] and [`Gpu::finish`] wait for them.
pub(crate) trait Gpu: Send + Sync + 'static {
    /// What this device is.
    fn properties(&self) -> &GpuProperties;
    /// Memory that is free now, in bytes.
    fn free_bytes(&self) -> Result<usize, CudaError>;
    /// `bytes` (at least one) of uninitialised memory, aligned to 256 bytes.
    fn alloc(&self, bytes: usize) -> Result<DevicePtr, CudaError>;
    /// Gives memory back once the work queued so far is done. `ptr` comes from [`Gpu::alloc`].
    fn free(&self, ptr: DevicePtr);
    /// Copies `src` to the device. `src` may be changed as soon as this returns.
    fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError>;
    /// Copies `n_bytes` to the device that `fill(offset, piece)` makes, one piece after the other, each a multiple of `unit`
    /// bytes, as `n_bytes` is. While the device copies a piece, `fill` makes the next: what fills may take its time.
    fn upload(
        &self,
        dst: DevicePtr,
        n_bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError>;
    /// Copies from the device, after all work queued so far.
    fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError>;
    /// Waits for all work queued so far.
    fn finish(&self) -> Result<(), CudaError>;
    /// Copies within the device; the ranges do not overlap.
    fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: usize) -> Result<(), CudaError>;
    /// Sets bytes to zero.
    fn zero(&self, dst: DevicePtr, bytes: usize) -> Result<(), CudaError>;
    /// Loads a module.
    fn load(&self, ptx: &str) -> Result<ModuleId, CudaError>;
    /// Finds a kernel of a module.
    fn kernel(&self, module: ModuleId, name: &str) -> Result<KernelId, CudaError>;
    /// Queues a kernel. `params` is its one parameter, byte for byte.
    fn launch(&self, kernel: KernelId, launch: Launch, params: &[u8]) -> Result<(), CudaError>;

    /// Queues what `ops` does, waits for it and returns the seconds the device took, by its own clock.
    fn timed(&self, ops: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError>;
    /// Starts to record what this thread queues, to be done piece by piece. Until [`Gpu::end`] nothing can be read, and other
    /// threads wait. A device that cannot record does everything at once: the result is the same.
    fn begin(&self) -> Result<(), CudaError> {
        Ok(())
    }
    /// Ends the recording and queues what is left of it.
    fn end(&self) -> Result<(), CudaError> {
        Ok(())
    }
}
