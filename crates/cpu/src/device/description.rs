//! What the device says of itself.

use kvant_backend::{DeviceInfo, KernelChoice};
use kvant_codec::DType;

use super::CpuDevice;
use crate::ops::matmul::prefill_precision::PrefillPrecision;
use crate::ops::{attend, matmul};

/// Returns the description of the device and its kernels.
pub(super) fn info(device: &CpuDevice) -> DeviceInfo {
    let math = if device.prefill_precision == PrefillPrecision::Bf16 { ", prefill in bf16" } else { "" };
    let tuned = if device.is_tuned { ", tuned" } else { "" };
    DeviceInfo {
        name: "cpu".to_owned(),
        kernels: format!("{}{math}{tuned}", device.isa.name()),
        n_threads: device.pool.n_threads(),
        thread_unit: "threads",
        max_step_rows: DeviceInfo::MAX_STEP_ROWS,
        batch_invariant_rows: match device.prefill_precision {
            PrefillPrecision::Exact => usize::MAX,
            PrefillPrecision::Bf16 => 1,
        },
        checks_finite_rows: true,
        selects_tokens: true,
        runs_encoders: true,
    }
}

/// Returns the kernel for every op and type.
pub(super) fn kernel_choices(device: &CpuDevice) -> Vec<KernelChoice> {
    let choice = |op, dtype, kernel| KernelChoice { op, dtype, kernel };
    let weights = DType::weights();
    let weights = weights.map(|dtype| choice("matmul", dtype, matmul::kernel_name(device.isa, dtype)));
    let caches = DType::KV.into_iter();
    let caches = caches.map(|dtype| choice("attend", dtype, attend::kernel_name(device.isa, dtype)));
    weights.chain(caches).collect()
}
