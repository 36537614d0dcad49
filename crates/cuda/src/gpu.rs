//! The interface between the ops and the driver or emulator that runs their kernels.

use crate::{CudaError, CudaVersion};

/// An address in device memory.
pub(crate) type DevicePtr = u64;

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuProperties {
    /// The product name, `NVIDIA H200`.
    pub name: String,
    /// Compute capability times ten: 80, 89, 90.
    pub arch: u32,
    /// Streaming multiprocessors.
    pub n_sms: u32,
    /// Maximum shared memory per block, in bytes.
    pub shared_per_block: u32,
    /// Memory of the device, in bytes.
    pub total_bytes: usize,
    /// The newest CUDA version that the driver supports.
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

/// Memory, modules and one queue of work on a device. Writes, copies, zeroing and launches execute
/// in call order; only [`Gpu::read`] and [`Gpu::finish`] wait for them.
pub(crate) trait Gpu: Send + Sync + 'static {
    /// Returns the properties of this device.
    fn properties(&self) -> &GpuProperties;
    /// Returns the free memory in bytes.
    fn free_bytes(&self) -> Result<usize, CudaError>;
    /// Allocates `bytes` (at least one) of uninitialized memory, aligned to 256 bytes.
    fn alloc(&self, bytes: usize) -> Result<DevicePtr, CudaError>;
    /// Frees memory once the work queued so far is done. `ptr` comes from [`Gpu::alloc`].
    fn free(&self, ptr: DevicePtr);
    /// Copies `src` to the device. `src` may be changed as soon as this returns.
    fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError>;
    /// Copies `n_bytes` to the device that `fill(offset, piece)` produces, one piece after the
    /// other, each a multiple of `unit` bytes, as `n_bytes` is.
    ///
    /// While the device copies a piece, `fill` produces the next, so the copy hides the time of
    /// `fill`.
    fn upload(
        &self,
        dst: DevicePtr,
        n_bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError>;
    /// Copies from the device, after all work queued so far.
    fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError>;
    /// As [`Gpu::read`], beside the work that is queued meanwhile.
    fn read_page(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        self.read(src, dst)
    }
    /// As [`Gpu::write`] outside of a recording, beside the work that is queued before it.
    fn write_page(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        self.write(dst, src)
    }
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

    /// Queues the work of `ops`, waits for it and returns the seconds on the device clock.
    fn timed(&self, ops: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError>;
    /// Starts to record the work that this thread queues, to be launched in pieces.
    ///
    /// Until [`Gpu::end`] reads fail, and other threads wait. A device without recording executes
    /// everything immediately, with the same result.
    fn begin(&self) -> Result<(), CudaError> {
        Ok(())
    }
    /// Ends the recording and queues its remainder.
    fn end(&self) -> Result<(), CudaError> {
        Ok(())
    }
}
