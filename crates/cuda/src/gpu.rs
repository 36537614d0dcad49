//! The interface between the ops and the driver or emulator that runs their kernels.

use kvant_backend::DeviceInfo;

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

impl GpuProperties {
    /// Returns the maximum of rows in a step. On a large device products of 512 rows leave much of
    /// the last wave of blocks idle; the activations of 2,048 rows of an 8B model take 0.4 GB.
    pub fn max_step_rows(&self) -> usize {
        match self.total_bytes >> 30 {
            0..15 => DeviceInfo::MAX_STEP_ROWS,
            15..36 => 2 * DeviceInfo::MAX_STEP_ROWS,
            _ => 4 * DeviceInfo::MAX_STEP_ROWS,
        }
    }
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

    /// A thread for each of `n` values, in blocks of `threads`.
    ///
    /// # Errors
    /// [`CudaError::TooManyValues`] where the numbers of threads, 32 bits in kernels, would wrap.
    pub fn each(op: &'static str, n: usize, threads: u32) -> Result<Self, CudaError> {
        match u32::try_from(n) {
            Ok(n) if n <= u32::MAX - threads => Ok(Self::linear(n.div_ceil(threads), threads)),
            _ => Err(CudaError::TooManyValues { op, n }),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_cards_take_more_rows_at_once() {
        let rows = |gib: usize| {
            let properties = GpuProperties {
                name: String::new(),
                arch: 90,
                n_sms: 132,
                shared_per_block: 1,
                total_bytes: (gib << 30) - (gib << 25),
                driver: CudaVersion { major: 13, minor: 0 },
            };
            properties.max_step_rows()
        };
        // Cards report somewhat less than their names say.
        assert_eq!([8, 12, 16, 24, 32, 40, 80].map(rows), [512, 512, 1024, 1024, 1024, 2048, 2048]);
    }

    #[test]
    fn numbers_of_threads_fit_32_bits() {
        assert_eq!(Launch::each("op", 257, 256).unwrap(), Launch::linear(2, 256));
        for n in [u32::MAX as usize - 255, 1 << 32, (1 << 32) + 1] {
            assert_eq!(Launch::each("op", n, 256), Err(CudaError::TooManyValues { op: "op", n }));
        }
        let max = u32::MAX as usize - 256;
        assert_eq!(Launch::each("op", max, 256).unwrap().grid[0], (1 << 24) - 1);
    }
}
