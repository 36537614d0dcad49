//! Reports of devices and of their tuning.

use kvant_backend::{DeviceInfo, KernelChoice};

use super::tuning_file::AttendVariantName;

/// A device of this machine, without a model; `details` are those of its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceReport<Details> {
    /// The device's name, such as `cpu`, `cuda:0` or `wgpu:0`.
    pub device: String,
    /// The product name, such as `NVIDIA H200`, where the system reports it.
    pub product: Option<String>,
    /// A GPU's driver: the newest CUDA version that it supports, or its name and version.
    pub driver: Option<String>,
    /// What only devices of this kind have.
    pub details: Details,
}

/// Details of the CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuDetails {
    /// Kernel set and threads.
    pub info: DeviceInfo,
    /// The ISAs of this machine that have kernel sets, slowest first.
    pub instruction_sets: Vec<&'static str>,
    /// The processor's matrix unit, or what prevents this process from using it.
    pub matrix_unit: String,
    /// The kernel of every op and type.
    pub kernel_choices: Vec<KernelChoice>,
}

/// Details of an NVIDIA GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaDetails {
    /// Architecture and multiprocessors.
    pub info: DeviceInfo,
    /// Version of the run-time compiler, which only kernels of unusual shapes need; `None` where it
    /// is missing.
    pub nvrtc: Option<String>,
    /// Free memory in bytes.
    pub free_bytes: usize,
    /// Total memory in bytes.
    pub total_bytes: usize,
    /// Number of kernel sources and variants; all of them are at hand.
    pub n_kernel_sources: usize,
}

/// Details of a Vulkan, Metal or DX12 adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WgpuDetails {
    /// The graphics API, such as `vulkan`.
    pub interface: String,
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

/// A timed attention variant of an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct VariantTrial {
    /// The variant.
    pub variant: AttendVariantName,
    /// Seconds of attention in one layer: the median of the rounds.
    pub seconds: f64,
    /// Whether it was selected.
    pub is_selected: bool,
}
