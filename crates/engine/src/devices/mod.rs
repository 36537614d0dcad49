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
mod report;
pub mod tuning;
mod tuning_file;
#[cfg(feature = "wgpu")]
mod wgpu;

use std::sync::Arc;

use kvant_backend::BackendError;
use kvant_codec::DType;
use kvant_cpu::PrefillPrecision;
use kvant_gguf::Gguf;
use kvant_model::{Config, LayerRange, Lora};

#[cfg(not(feature = "cuda"))]
use absent::cuda;
#[cfg(not(feature = "wgpu"))]
use absent::wgpu;

use crate::error::Error;
use crate::runtime::{self, LayerPipeline, LoadedModel};

pub use choice::DeviceChoice;
pub(crate) use cpu::open as open_cpu;
pub use report::{CpuDetails, CudaDetails, DeviceReport, WgpuDetails};

/// An open device with its type erased.
pub(crate) trait OpenDevice {
    /// Measures the memory bandwidth, in bytes per second.
    fn memory_bandwidth(&self) -> Result<f64, Error>;
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
        DeviceChoice::Auto => match cuda::open(0) {
            Ok(gpu) => Ok(Some(gpu)),
            Err(error @ Error::Device(BackendError::Setting { .. })) => Err(error),
            // No usable GPU: the device summary shows the CPU, and `check` returns the reason.
            Err(_) => Ok(None),
        },
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

/// Reports NVIDIA GPU `index`, and compiles every kernel that is not compiled yet.
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

/// Distribution of the layers over devices, with load options.
#[derive(Debug, Clone)]
pub(crate) struct Placement {
    pub device: DeviceChoice,
    /// Layers on the GPU; see [`OpenOptions::n_gpu_layers`](crate::OpenOptions::n_gpu_layers).
    pub n_gpu_layers: Option<usize>,
    /// Converted weight type; see [`OpenOptions::weights`](crate::OpenOptions::weights).
    pub weights: Option<DType>,
    /// See [`OpenOptions::maps_experts`](crate::OpenOptions::maps_experts).
    pub maps_experts: bool,
    /// See [`OpenOptions::mtp`](crate::OpenOptions::mtp).
    pub mtp: bool,
    /// See [`OpenOptions::prefill_precision`](crate::OpenOptions::prefill_precision).
    pub prefill_precision: PrefillPrecision,
    /// See [`OpenOptions::loras`](crate::OpenOptions::loras).
    pub loras: Vec<Lora>,
}

impl Placement {
    /// Applies the load options of all parts to `part`.
    fn resolve(&self, part: LayerRange) -> LayerRange {
        part.with_weights(self.weights)
            .with_mapped_experts(self.maps_experts)
            .with_mtp(self.mtp && !self.maps_experts)
            .with_loras(self.loras.clone())
    }

    /// Returns the device to open: the CPU where it takes all layers, and never `Auto` with a given
    /// number of GPU layers.
    fn device(&self) -> Result<DeviceChoice, Error> {
        match (self.device, self.n_gpu_layers) {
            (_, Some(0)) => Ok(DeviceChoice::Cpu),
            (DeviceChoice::Auto, Some(_)) => Ok(DeviceChoice::Cuda(0)),
            (DeviceChoice::Cpu, Some(n)) => {
                let expected = "0 layers for a GPU with device cpu".to_owned();
                Err(Error::Setting { name: "n_gpu_layers", expected, got: n.to_string() })
            }
            (device, _) => Ok(device),
        }
    }
}

/// Loads a model onto the devices of its layers.
pub(crate) fn load(
    placement: Placement,
    n_threads: Option<usize>,
    config: Config,
    gguf: &Arc<Gguf>,
    progress: &mut dyn FnMut(f32),
) -> Result<Arc<dyn LoadedModel>, Error> {
    let open_cpu = || cpu::open(n_threads, placement.prefill_precision);
    let n_layers = config.layers.len();
    let whole = placement.resolve(LayerRange::whole(n_layers));
    let Some(gpu) = open_gpu(placement.device()?)? else {
        return runtime::load(open_cpu()?, config, &whole, gguf, progress);
    };
    if placement.prefill_precision != PrefillPrecision::Exact {
        let (expected, got) =
            ("exact with layers on a GPU".to_owned(), placement.prefill_precision.to_string());
        return Err(Error::Setting { name: "prefill_precision", expected, got });
    }
    match placement.n_gpu_layers {
        Some(n) if n < n_layers => {
            let parts = LayerRange::split(n_layers, n_layers - n);
            let [first, last] = parts.map(|part| placement.resolve(part));
            let share = first.layers().len() as f32 / n_layers as f32;
            let on_cpu =
                runtime::load(open_cpu()?, config.clone(), &first, gguf, &mut |done| progress(done * share))?;
            let on_gpu = gpu.load(config, &last, gguf, &mut |done| progress(share + done * (1.0 - share)))?;
            Ok(Arc::new(LayerPipeline::new(vec![on_cpu, on_gpu])))
        }
        _ => gpu.load(config, &whole, gguf, progress),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n_gpu_layers_selects_the_device() {
        let device = |device, n_gpu_layers| {
            let prefill_precision = PrefillPrecision::Exact;
            let (weights, maps_experts, mtp, loras) = (None, false, false, Vec::new());
            Placement { device, n_gpu_layers, weights, maps_experts, mtp, prefill_precision, loras }.device()
        };
        for any in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda(1)] {
            assert_eq!(device(any, None).unwrap(), any);
            assert_eq!(device(any, Some(0)).unwrap(), DeviceChoice::Cpu);
        }
        assert_eq!(device(DeviceChoice::Auto, Some(3)).unwrap(), DeviceChoice::Cuda(0));
        assert_eq!(device(DeviceChoice::Cuda(1), Some(3)).unwrap(), DeviceChoice::Cuda(1));
        let error = device(DeviceChoice::Cpu, Some(3)).unwrap_err().to_string();
        assert_eq!(error, "n_gpu_layers: expected 0 layers for a GPU with device cpu, got 3");
    }
}
