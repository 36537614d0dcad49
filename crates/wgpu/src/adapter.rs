//! The adapters of this machine. They are asked for when somebody wants one, never before.

use crate::WgpuError;
use crate::gpu::{Gpu, ready};

/// Percent of what the system grants this program of a device's memory that it takes.
const MOST_OF_BUDGET: u8 = 95;

/// What an adapter is, for `kvant doctor` and errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterReport {
    /// The device's name, such as `wgpu:0`.
    pub device: String,
    /// The product's name.
    pub product: String,
    /// The interface it is reached through: `vulkan`, `metal` or `dx12`.
    pub interface: String,
    /// The driver, and what it says of itself.
    pub driver: String,
    /// Whether it is a program on the CPU.
    pub is_software: bool,
    /// Whether its memory is its own, not the machine's.
    pub has_own_memory: bool,
    /// Bytes that a kernel reaches in one allocation, which bounds the cache; a matrix is split into several.
    pub max_binding: u64,
    /// Whether threads of a subgroup, eight at least, may talk to each other in kernels: fewer hold no codebook together.
    pub has_subgroups: bool,
    /// Whether kernels may compute in f16, subgroups may talk to each other, and bytes be multiplied four at a time. Kernels here
    /// need none of them.
    pub features: Vec<&'static str>,
}

/// Every adapter, in the order of their numbers.
pub fn adapters() -> Vec<AdapterReport> {
    let adapters = all();
    (0..).zip(&adapters).map(|(index, adapter)| report(index, adapter)).collect()
}

/// Opens adapter `index`. Kernels reach at most `most_bytes` in one binding, and fewer where it allows no more.
pub(crate) fn open(index: usize, most_bytes: u64) -> Result<(Gpu, AdapterReport), WgpuError> {
    let adapters = all();
    let Some(adapter) = adapters.get(index) else {
        let has = match adapters.len() {
            0 => "this machine has none that Vulkan, Metal or DX12 knows".to_owned(),
            n => format!("this machine has {n}, from 0 on"),
        };
        return Err(WgpuError::NoAdapter { index, has });
    };
    let report = report(index, adapter);
    let mut required_limits = adapter.limits();
    required_limits.max_storage_buffer_binding_size =
        required_limits.max_storage_buffer_binding_size.min(most_bytes);
    // For kernels that have a variant without.
    let required_features = match report.has_subgroups {
        true => wgpu::Features::SUBGROUP,
        false => wgpu::Features::empty(),
    };
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
    // The browser's is there in a browser alone.
    descriptor.backends = of_systems | wgpu::Backends::BROWSER_WEBGPU;
    // What validates is wgpu itself; layers of the system's are for those who write drivers.
    descriptor.flags = wgpu::InstanceFlags::empty();
    // What the system grants this program is not exceeded: others, or the screen, would stand still.
    descriptor.memory_budget_thresholds.for_resource_creation = Some(MOST_OF_BUDGET);
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
