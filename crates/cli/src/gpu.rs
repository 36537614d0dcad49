//! What the doctor says about the NVIDIA GPUs of this machine.

use kvant::{Error, Gpu};
use serde_json::{Value, json};

use crate::output;

/// One GPU: a line for people, and the same for programs.
pub struct Report {
    pub line: String,
    pub json: Value,
}

/// Every GPU, or one report that says why there is none to use.
pub fn reports() -> Vec<Report> {
    match Gpu::count() {
        Ok(count) => (0..count.max(1)).map(report).collect(),
        Err(error) => vec![unusable(&error)],
    }
}

fn report(index: usize) -> Report {
    examine(index).unwrap_or_else(|error| unusable(&error))
}

fn unusable(error: &Error) -> Report {
    Report { line: format!("none that can be used: {error}"), json: json!({ "error": error.to_string() }) }
}

/// Opens the GPU and compiles its kernels.
fn examine(index: usize) -> Result<Report, Error> {
    let gpu = Gpu::open(index)?;
    let (name, (driver, nvrtc), (free, total)) = (gpu.info().name, gpu.versions(), gpu.memory()?);
    let n_kernels = gpu.compile_kernels()?;
    let line = format!(
        "{name} {}, driver for CUDA {driver}, NVRTC {nvrtc}, {} of {} free, {n_kernels} kernel sources compile",
        gpu.info().kernels,
        output::bytes(free),
        output::bytes(total),
    );
    let json = json!({
        "device": name,
        "product": gpu.product(),
        "n_sms": gpu.info().n_threads,
        "driver": driver,
        "nvrtc": nvrtc,
        "free_bytes": free,
        "total_bytes": total,
        "kernel_sources": n_kernels,
    });
    Ok(Report { line, json })
}
