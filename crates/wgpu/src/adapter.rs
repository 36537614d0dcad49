//! The adapters of this machine. They are enumerated on request, never before.

use crate::WgpuError;
use crate::gpu::{Gpu, ready};
use crate::timer::Timer;

/// Maximum share, in percent, of the device memory that the system grants this program.
const MAX_OF_BUDGET: u8 = 95;

/// Description of an adapter, for `kvant doctor` and errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterReport {
    /// The device name, such as `wgpu:0`.
    pub device: String,
    /// The product name.
    pub product: String,
    /// The interface: `vulkan`, `metal` or `dx12`.
    pub interface: String,
    /// The driver's name and description.
    pub driver: String,
    /// Whether it is software on the CPU.
    pub is_software: bool,
    /// Whether its memory is dedicated, not shared with the CPU.
    pub has_own_memory: bool,
    /// Maximum size of a binding in bytes. It bounds the cache; a matrix is split into several
    /// buffers.
    pub max_binding: u64,
    /// Whether kernels may use subgroup operations with at least eight threads: smaller subgroups
    /// cannot hold a codebook.
    pub has_subgroups: bool,
    /// Available features among f16 arithmetic, subgroup operations, and 4 x 8-bit dot products.
    /// The kernels require none of them.
    pub features: Vec<&'static str>,
}

/// Returns every adapter, in the order of their numbers.
pub fn adapters() -> Vec<AdapterReport> {
    let adapters = all();
    (0..).zip(&adapters).map(|(index, adapter)| report(index, adapter)).collect()
}

/// Opens adapter `index`, with bindings of at most `max_bytes` or the adapter's limit.
pub(crate) fn open(index: usize, max_bytes: u64) -> Result<(Gpu, AdapterReport), WgpuError> {
    let adapters = all();
    let Some(adapter) = adapters.get(index) else {
        let has = match adapters.len() {
            0 => "this machine has none for Vulkan, Metal or DX12".to_owned(),
            n => format!("this machine has {n}, from 0 on"),
        };
        return Err(WgpuError::NoAdapter { index, has });
    };
    let report = report(index, adapter);
    let mut required_limits = adapter.limits();
    required_limits.max_storage_buffer_binding_size =
        required_limits.max_storage_buffer_binding_size.min(max_bytes);
    // For kernels that also have a variant without subgroups.
    let subgroups = match report.has_subgroups {
        true => wgpu::Features::SUBGROUP,
        false => wgpu::Features::empty(),
    };
    let required_features = subgroups | Timer::features(adapter);
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("kvant"),
        required_features,
        required_limits,
        ..Default::default()
    };
    let (device, queue) = ready(adapter.request_device(&descriptor)).map_err(|error| {
        WgpuError::NoDevice { adapter: report.product.clone(), problem: error.to_string() }
    })?;
    Ok((Gpu::new(device, queue), report))
}

fn all() -> Vec<wgpu::Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    let of_systems = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    // The browser's interface exists in a browser only.
    descriptor.backends = of_systems | wgpu::Backends::BROWSER_WEBGPU;
    // wgpu itself validates; the system's validation layers serve driver developers.
    descriptor.flags = wgpu::InstanceFlags::empty();
    // Stays within the memory that the system grants this program: otherwise other programs, or the
    // screen, would stall.
    descriptor.memory_budget_thresholds.for_resource_creation = Some(MAX_OF_BUDGET);
    let instance = wgpu::Instance::new(descriptor);
    ready(instance.enumerate_adapters(wgpu::Backends::all()))
}

fn report(index: usize, adapter: &wgpu::Adapter) -> AdapterReport {
    let (info, limits, features) = (adapter.get_info(), adapter.limits(), adapter.features());
    let named = [
        ("f16", features.contains(wgpu::Features::SHADER_F16)),
        ("subgroups", features.contains(wgpu::Features::SUBGROUP)),
    ];
    AdapterReport {
        device: format!("wgpu:{index}"),
        product: info.name,
        interface: info.backend.to_str().to_owned(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        is_software: info.device_type == wgpu::DeviceType::Cpu,
        has_own_memory: info.device_type == wgpu::DeviceType::DiscreteGpu,
        max_binding: limits.max_storage_buffer_binding_size.min(limits.max_buffer_size),
        has_subgroups: features.contains(wgpu::Features::SUBGROUP) && info.subgroup_min_size >= 8,
        features: named.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect(),
    }
}
