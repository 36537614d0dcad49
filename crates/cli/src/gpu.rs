//! GPU section of `kvant doctor`: NVIDIA GPUs, and adapters of Vulkan, Metal and DX12.

use kvant::devices::{self, CudaDetails, DeviceReport, WgpuDetails};
use kvant::tuning::AttendVariantName;
use kvant::{DeviceInfo, Error};
use serde_json::{Value, json};

use crate::doctor::fit::Memory;
use crate::output;

/// One GPU: a line of text, and the same as JSON.
pub struct Report {
    pub line: String,
    pub json: Value,
    /// The memory that it reports, if any.
    pub memory: Option<Memory>,
}

/// Returns every GPU, or one report with the reason why none is usable.
pub fn reports() -> Vec<Report> {
    let report = |index| devices::cuda_report(index).map_or_else(|error| unusable(&error), of_gpu);
    match devices::cuda_count() {
        Ok(count) => (0..count.max(1)).map(report).collect(),
        Err(error) => vec![unusable(&error)],
    }
}

fn unusable(error: &Error) -> Report {
    Report {
        line: format!("no usable GPU: {error}"),
        json: json!({ "error": error.to_string() }),
        memory: None,
    }
}

/// What a missing run-time compiler means.
const NO_NVRTC: &str = "no NVRTC for unusual head sizes (python3 -m pip install nvidia-cuda-nvrtc)";

fn of_gpu(gpu: DeviceReport<CudaDetails>) -> Report {
    let DeviceReport { device, product, driver, details } = gpu;
    let driver = driver.unwrap_or_default();
    let CudaDetails { info, nvrtc, free_bytes, total_bytes, n_kernel_sources } = details;
    let memory = Some(Memory { device: device.clone(), free: free_bytes });
    let line = format!(
        "{device} {}, driver for CUDA {driver}, {n_kernel_sources} kernels at hand, {}, {} of {} free{}",
        info.kernels,
        nvrtc.as_ref().map_or_else(|| NO_NVRTC.to_owned(), |version| format!("NVRTC {version} for others")),
        output::bytes(free_bytes),
        output::bytes(total_bytes),
        nan_check_warning(&info),
    );
    let json = json!({
        "device": device,
        "product": product,
        "n_sms": info.n_threads,
        "looks_for_broken_rows": info.checks_finite_rows,
        "driver": driver,
        "nvrtc": nvrtc,
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "kernel_sources": n_kernel_sources,
    });
    Report { line, json, memory }
}

/// Returns every adapter of Vulkan, Metal and DX12; empty without adapters.
pub fn adapters() -> Vec<Report> {
    match devices::adapters() {
        Ok(adapters) => adapters.into_iter().map(of_adapter).collect(),
        Err(error) => vec![unusable(&error)],
    }
}

fn of_adapter(adapter: DeviceReport<WgpuDetails>) -> Report {
    let DeviceReport { device, product, driver, details } = adapter;
    let (product, driver) = (product.unwrap_or_default(), driver.unwrap_or_default());
    let WgpuDetails { interface, is_software, max_binding, features, variants, is_tuned } = details;
    let line = format!(
        "{device} {product} through {interface}{}, {driver}, up to {} per allocation, {}, codebook lookup {} ({})",
        if is_software { " (software on the CPU)" } else { "" },
        output::bytes(usize::try_from(max_binding).unwrap_or(usize::MAX)),
        if features.is_empty() { "no f16".to_owned() } else { features.join(", ") },
        variants.iter().find_map(|variant| variant.look_ups.as_deref()).unwrap_or("the default"),
        if is_tuned { "tuned" } else { "default" },
    );
    let json = json!({
        "device": device,
        "product": product,
        "interface": interface,
        "driver": driver,
        "is_software": is_software,
        "max_binding": max_binding,
        "features": features,
        "ways": variants.iter().map(|variant| Value::Object(variant_cells(variant).collect())).collect::<Vec<_>>(),
        "tuned": is_tuned,
    });
    Report { line, json, memory: None }
}

/// Returns the attention variant of an adapter for types with the same read path.
pub fn variant_cells(variant: &AttendVariantName) -> impl Iterator<Item = (String, Value)> {
    let cells: [(&str, Value); 4] = [
        ("types", variant.types.clone().into()),
        ("look_ups", variant.look_ups.clone().into()),
        ("queries", variant.queries.into()),
        ("words", variant.words.into()),
    ];
    cells.into_iter().map(|(name, cell)| (name.to_owned(), cell))
}

/// Returns the warning for a device that does not check K and V rows for NaN.
fn nan_check_warning(info: &DeviceInfo) -> &'static str {
    if info.checks_finite_rows { "" } else { "; NaN in keys and values is detected in the logits alone" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_nan_checks_is_reported() {
        let cpu = devices::cpu_report(Some(1)).unwrap().details.info;
        assert_eq!(nan_check_warning(&cpu), "");
        assert!(nan_check_warning(&DeviceInfo { checks_finite_rows: false, ..cpu }).contains("logits alone"));
    }
}
