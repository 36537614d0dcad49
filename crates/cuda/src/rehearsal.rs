//! A device that computes nothing: what a model launches on it are the kernels that it needs.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::{CudaError, DevicePtr, Gpu, GpuProperties, KernelId, Launch, ModuleId};

/// First address of its memory, which does not exist.
const FIRST: DevicePtr = 1 << 40;
/// Alignment of its allocations, in bytes.
const ALIGNMENT: usize = 256;

/// A [`Gpu`] that accepts all work and does none. Reads give zeros.
pub(crate) struct Rehearsal {
    properties: GpuProperties,
    /// The next free address.
    next: AtomicU64,
    n_modules: AtomicUsize,
    n_kernels: AtomicUsize,
}

impl Rehearsal {
    /// Creates a device that chooses kernels as one with `properties` does.
    pub fn new(properties: GpuProperties) -> Self {
        let (n_modules, n_kernels) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { properties, next: AtomicU64::new(FIRST), n_modules, n_kernels }
    }
}

impl Gpu for Rehearsal {
    fn properties(&self) -> &GpuProperties {
        &self.properties
    }

    fn free_bytes(&self) -> Result<usize, CudaError> {
        Ok(self.properties.total_bytes)
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr, CudaError> {
        Ok(self.next.fetch_add(bytes.next_multiple_of(ALIGNMENT) as u64, Ordering::Relaxed))
    }

    fn free(&self, _: DevicePtr) {}

    fn write(&self, _: DevicePtr, _: &[u8]) -> Result<(), CudaError> {
        Ok(())
    }

    fn upload(
        &self,
        _: DevicePtr,
        _: usize,
        _: usize,
        _: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError> {
        Ok(())
    }

    fn read(&self, _: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        dst.fill(0);
        Ok(())
    }

    fn finish(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn copy(&self, _: DevicePtr, _: DevicePtr, _: usize) -> Result<(), CudaError> {
        Ok(())
    }

    fn zero(&self, _: DevicePtr, _: usize) -> Result<(), CudaError> {
        Ok(())
    }

    fn load(&self, _: &str) -> Result<ModuleId, CudaError> {
        Ok(ModuleId(self.n_modules.fetch_add(1, Ordering::Relaxed)))
    }

    fn kernel(&self, _: ModuleId, _: &str) -> Result<KernelId, CudaError> {
        Ok(KernelId(self.n_kernels.fetch_add(1, Ordering::Relaxed)))
    }

    fn launch(&self, _: KernelId, _: Launch, _: &[u8]) -> Result<(), CudaError> {
        Ok(())
    }

    fn timed(&self, ops: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        ops().map(|()| 0.0)
    }
}
