//! The devices of this machine: opens them for a model, and reports them without one.
//!
//! Each kind is a file that implements `OpenDevice`; `absent` replaces the kinds that this build
//! lacks.

#[cfg(not(all(feature = "cuda", feature = "wgpu")))]
mod absent;
mod choice;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod encoders;
mod placement;
mod report;
pub mod tuning;
mod tuning_file;
#[cfg(feature = "wgpu")]
mod wgpu;

use std::sync::Arc;

use kvant_backend::BackendError;
use kvant_cpu::PrefillPrecision;
use kvant_gguf::Gguf;
use kvant_model::{Config, LayerRange};

#[cfg(not(feature = "cuda"))]
use absent::cuda;
#[cfg(not(feature = "wgpu"))]
use absent::wgpu;

use crate::error::Error;
use crate::runtime::LoadedModel;

pub use choice::{DeviceChoice, DeviceList};
pub(crate) use placement::{Placement, load};
pub use report::{CpuDetails, CudaDetails, DeviceReport, WgpuDetails};

/// An open device with its type erased.
pub(crate) trait OpenDevice {
    /// Measures the memory bandwidth, in bytes per second.
    fn memory_bandwidth(&self) -> Result<f64, Error>;
    /// Returns the free memory for weights and caches, in bytes: the device's, or the machine's for
    /// the CPU; `None` where it is unknown.
    fn free_bytes(&self) -> Result<Option<usize>, Error>;
    /// Loads part of a model; `progress` receives the fraction loaded.
    fn load(
        self: Box<Self>,
        config: Config,
        part: &LayerRange,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error>;
}

/// Opens a device, the CPU with `n_threads` threads.
fn open(choice: DeviceChoice, n_threads: Option<usize>) -> Result<Box<dyn OpenDevice>, Error> {
    Ok(match open_gpu(choice)? {
        Some(gpu) => gpu,
        None => Box::new(cpu::open(n_threads, PrefillPrecision::Exact)?),
    })
}

/// Opens the chosen GPU; `None` for the CPU.
fn open_gpu(choice: DeviceChoice) -> Result<Option<Box<dyn OpenDevice>>, Error> {
    match choice {
        DeviceChoice::Cpu => Ok(None),
        DeviceChoice::Cuda(index) => cuda::open(index).map(Some),
        DeviceChoice::Wgpu(index) => wgpu::open(index).map(Some),
        DeviceChoice::Auto => usable(cuda::open(0)),
    }
}

/// Returns a GPU of `auto`, if it can be used.
fn usable<T>(gpu: Result<T, Error>) -> Result<Option<T>, Error> {
    match gpu {
        Ok(gpu) => Ok(Some(gpu)),
        Err(error @ Error::Device(BackendError::Setting { .. })) => Err(error),
        // No usable GPU: the device summary shows the CPU, and `check` returns the reason.
        Err(_) => Ok(None),
    }
}

/// Opens a device and closes it again.
///
/// # Errors
/// Why a model cannot be loaded onto it: a missing device, a missing or too old driver or run-time
/// compiler, a setting that cannot be applied, or a device whose feature this build lacks.
pub fn check(choice: DeviceChoice) -> Result<(), Error> {
    open(choice, None).map(drop)
}

/// Reports the CPU as models with `n_threads` threads (all cores when `None`) use it.
///
/// # Errors
/// When a setting cannot be applied.
pub fn cpu_report(n_threads: Option<usize>) -> Result<DeviceReport<CpuDetails>, Error> {
    cpu::report(n_threads)
}

/// Returns the number of NVIDIA GPUs.
///
/// # Errors
/// A missing or old driver; a build without the feature `cuda`.
pub fn cuda_count() -> Result<usize, Error> {
    cuda::count()
}

/// Reports NVIDIA GPU `index`, and compiles every listed kernel that is neither in this binary nor
/// cached.
///
/// # Errors
/// As [`check`]; the first compile error, with the compiler's message.
pub fn cuda_report(index: usize) -> Result<DeviceReport<CudaDetails>, Error> {
    cuda::report(index)
}

/// Reports the Vulkan, Metal and DX12 adapters, in the order of their indices.
///
/// # Errors
/// A build without the feature `wgpu`.
pub fn adapters() -> Result<Vec<DeviceReport<WgpuDetails>>, Error> {
    wgpu::adapters()
}

/// Returns the memory bandwidth of the chosen device in bytes per second, the roofline of decoding:
/// the read bandwidth of all CPU threads together, or the read-and-write bandwidth of a GPU copy.
///
/// # Errors
/// When the device cannot be opened or has too little memory to measure; for an adapter.
pub fn memory_bandwidth(choice: DeviceChoice, n_threads: Option<usize>) -> Result<f64, Error> {
    open(choice, n_threads)?.memory_bandwidth()
}
