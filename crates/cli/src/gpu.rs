//! GPU section of `kvant doctor`: NVIDIA GPUs, and adapters of Vulkan, Metal and DX12.

use kvant::tuning::AttendVariantName;
use kvant::{CudaInfo, DeviceInfo, Error, WgpuInfo};
use serde_json::{Value, json};

use crate::output;

/// One GPU: a line of text, and the same as JSON.
pub struct Report {
    pub line: String,
    pub json: Value,
}

/// Returns every GPU, or one report with the reason why none is usable.
pub fn reports() -> Vec<Report> {
    match CudaInfo::count() {
        Ok(count) => (0..count.max(1)).map(report).collect(),
        Err(error) => vec![unusable(&error)],
    }
}

fn report(index: usize) -> Report {
    examine(index).unwrap_or_else(|error| unusable(&error))
}

fn unusable(error: &Error) -> Report {
    Report { line: format!("no usable GPU: {error}"), json: json!({ "error": error.to_string() }) }
}

/// Opens the GPU and compiles its kernels.
fn examine(index: usize) -> Result<Report, Error> {
    let gpu = CudaInfo::open(index)?;
    let (info, (driver, nvrtc), (free, total)) = (gpu.info(), gpu.versions(), gpu.memory()?);
    let n_kernels = gpu.compile_kernels()?;
    let line = format!(
        "{} {}, driver for CUDA {driver}, NVRTC {nvrtc}, {} of {} free, {n_kernels} kernel sources compile{}",
        info.name,
        info.kernels,
        output::bytes(free),
        output::bytes(total),
        nan_check_warning(&info),
    );
    let json = json!({
        "device": info.name,
        "product": gpu.product(),
        "n_sms": info.n_threads,
        "looks_for_broken_rows": info.checks_finite_rows,
        "driver": driver,
        "nvrtc": nvrtc,
        "free_bytes": free,
        "total_bytes": total,
        "kernel_sources": n_kernels,
    });
    Ok(Report { line, json })
}

/// Returns every adapter of Vulkan, Metal and DX12; empty without adapters.
pub fn adapters() -> Vec<Report> {
    match kvant::adapters() {
        Ok(adapters) => adapters.into_iter().map(of_adapter).collect(),
        Err(error) => vec![unusable(&error)],
    }
}

fn of_adapter(adapter: WgpuInfo) -> Report {
    let WgpuInfo {
        device,
        product,
        interface,
        driver,
        is_software,
        max_binding,
        features,
        variants,
        is_tuned,
    } = adapter;
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
    Report { line, json }
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
        let cpu = kvant::CpuInfo::open(Some(1)).unwrap().info();
        assert_eq!(nan_check_warning(&cpu), "");
        assert!(nan_check_warning(&DeviceInfo { checks_finite_rows: false, ..cpu }).contains("logits alone"));
    }
}
