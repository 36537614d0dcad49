//! Device selection: places a model on devices and reports devices without a model.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use kvant_backend::{Backend, BackendError, DeviceInfo, KernelChoice};
use kvant_codec::DType;
use kvant_cpu::{CpuDevice, Isa, MatrixUnit, PrefillPrecision};
use kvant_gguf::Gguf;
use kvant_model::{Config, LayerRange, Lora};

use crate::runtime::{self, LayerPipeline, LoadedModel};
use crate::tuning::AttendVariantName;
use crate::{CudaInfo, Error, adapter, tuning};

/// The device to run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The first NVIDIA GPU where one is usable, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU with this index.
    Cuda(usize),
    /// The Vulkan, Metal or DX12 adapter with this index; see [`adapters`](crate::adapters).
    Wgpu(usize),
}

/// A Vulkan, Metal or DX12 adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WgpuInfo {
    /// The device's name, such as `wgpu:0`.
    pub device: String,
    /// The product name.
    pub product: String,
    /// The graphics API, such as `vulkan`.
    pub interface: String,
    /// The driver's name and version.
    pub driver: String,
    /// Whether it is a software renderer on the CPU.
    pub is_software: bool,
    /// Largest binding in bytes, which bounds the KV cache; a matrix is split over several.
    pub max_binding: u64,
    /// Optional features for kernels, such as `f16`.
    pub features: Vec<String>,
    /// The attention variant of each class of types.
    pub variants: Vec<AttendVariantName>,
    /// Whether the variants come from tuning rather than defaults.
    pub is_tuned: bool,
}

impl FromStr for DeviceChoice {
    type Err = Error;

    /// Parses `auto`, `cpu`, `cuda:N` or `wgpu:N`; `cuda` and `wgpu` have index 0.
    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => return Ok(Self::Auto),
            "cpu" => return Ok(Self::Cpu),
            "cuda" => return Ok(Self::Cuda(0)),
            "wgpu" => return Ok(Self::Wgpu(0)),
            _ => {}
        }
        let of_kind = |kind, choice: fn(usize) -> Self| {
            let index = text.strip_prefix(kind).and_then(|index| index.parse().ok());
            index.map(choice)
        };
        of_kind("cuda:", Self::Cuda).or_else(|| of_kind("wgpu:", Self::Wgpu)).ok_or_else(|| Error::Setting {
            name: "device",
            expected: EXPECTED.to_owned(),
            got: text.to_owned(),
        })
    }
}

/// The accepted forms.
const EXPECTED: &str = "auto, cpu, cuda:N or wgpu:N";

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Wgpu(index) => write!(f, "wgpu:{index}"),
        }
    }
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
    /// See [`OpenOptions::prompt_math`](crate::OpenOptions::prompt_math).
    pub prompt_math: PrefillPrecision,
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
    let open_cpu = || tuning::open_cpu(n_threads, placement.prompt_math);
    let n_layers = config.layers.len();
    let whole = placement.resolve(LayerRange::whole(n_layers));
    let Some(gpu) = GpuDevice::choose(placement.device()?)? else {
        return runtime::load(open_cpu()?, config, &whole, gguf, progress);
    };
    if placement.prompt_math != PrefillPrecision::Exact {
        let (expected, got) = ("exact with layers on a GPU".to_owned(), placement.prompt_math.to_string());
        return Err(Error::Setting { name: "prompt_math", expected, got });
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

/// A device other than the CPU.
enum GpuDevice {
    Gpu(Box<CudaInfo>),
    /// An adapter by index, opened on load.
    Adapter(usize),
}

impl GpuDevice {
    /// Opens the chosen device; `None` for the CPU.
    fn choose(choice: DeviceChoice) -> Result<Option<Self>, Error> {
        match choice {
            DeviceChoice::Wgpu(index) => Ok(Some(Self::Adapter(index))),
            choice => Ok(CudaInfo::choose(choice)?.map(|gpu| Self::Gpu(Box::new(gpu)))),
        }
    }

    fn load(
        self,
        config: Config,
        part: &LayerRange,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        match self {
            Self::Gpu(gpu) => gpu.load(config, part, gguf, progress),
            Self::Adapter(index) => adapter::load(index, config, part, gguf, progress),
        }
    }
}

/// Returns the memory bandwidth of the chosen device in bytes per second, the roofline of decoding:
/// the read bandwidth of all CPU threads together, or the read-and-write bandwidth of a GPU copy.
///
/// # Errors
/// When the device cannot be opened or has too little memory to measure.
pub fn memory_bandwidth(choice: DeviceChoice, n_threads: Option<usize>) -> Result<f64, Error> {
    match GpuDevice::choose(choice)? {
        Some(GpuDevice::Gpu(gpu)) => gpu.copy_bandwidth(),
        Some(GpuDevice::Adapter(index)) => Err(Error::Device(BackendError::Unsupported {
            op: "memory_bandwidth",
            requested: format!("wgpu:{index}"),
            has: "clocks for cpu and cuda:N".to_owned(),
        })),
        None => Ok(CpuDevice::from_env(n_threads)?.read_bandwidth()),
    }
}

/// The CPU, to report its properties and kernels.
pub struct CpuInfo(CpuDevice);

impl CpuInfo {
    /// Opens the CPU with `n_threads` threads (all cores when `None`).
    ///
    /// # Errors
    /// When a setting cannot be applied.
    pub fn open(n_threads: Option<usize>) -> Result<Self, Error> {
        Ok(Self(tuning::open_cpu(n_threads, PrefillPrecision::Exact)?))
    }

    /// Returns the device information.
    pub fn info(&self) -> DeviceInfo {
        self.0.info()
    }

    /// Returns the kernel of every op and type.
    pub fn kernel_choices(&self) -> Vec<KernelChoice> {
        self.0.kernel_choices()
    }

    /// Returns the ISAs of this machine that have kernel sets, slowest first.
    pub fn instruction_sets(&self) -> Vec<&'static str> {
        Isa::available().into_iter().map(Isa::name).collect()
    }

    /// Describes the processor's matrix unit, or what prevents this process from using it.
    pub fn matrix_unit(&self) -> String {
        MatrixUnit::find().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n_gpu_layers_selects_the_device() {
        let device = |device, n_gpu_layers| {
            let prompt_math = PrefillPrecision::Exact;
            let (weights, maps_experts, mtp, loras) = (None, false, false, Vec::new());
            Placement { device, n_gpu_layers, weights, maps_experts, mtp, prompt_math, loras }.device()
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

    #[test]
    fn a_choice_is_read_as_it_is_written_and_others_are_refused() {
        use DeviceChoice::{Auto, Cpu, Cuda, Wgpu};
        for choice in [Auto, Cpu, Cuda(0), Cuda(7), Wgpu(0), Wgpu(3)] {
            assert_eq!(choice.to_string().parse::<DeviceChoice>().unwrap(), choice);
        }
        assert_eq!("cuda".parse::<DeviceChoice>().unwrap(), DeviceChoice::Cuda(0));
        assert_eq!("wgpu".parse::<DeviceChoice>().unwrap(), DeviceChoice::Wgpu(0));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:1x", "wgpu:", "CPU"] {
            let error = text.parse::<DeviceChoice>().unwrap_err().to_string();
            assert_eq!(error, format!("device: expected {EXPECTED}, got {text}"));
        }
    }
}
