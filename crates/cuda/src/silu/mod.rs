//! The gate of a gated feed-forward layer: `u *= silu(g)`, `silu(g) = g / (1 + exp(-g))`.

use bytemuck::NoUninit;

use crate::{Context, CudaError, DevicePtr, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source =
    Source { name: "silu.cu", text: include_str!("silu.cu"), headers: &[], options: &[] };

const THREADS: u32 = 256;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    g: DevicePtr,
    u: DevicePtr,
    n: u32,
    unused: u32,
}

/// `u *= silu(g)` for `n` values.
pub(crate) fn gate(cx: &Context, g: DevicePtr, u: DevicePtr, n: usize) -> Result<(), CudaError> {
    if n == 0 {
        return Ok(());
    }
    let params = KernelParams { g, u, n: n as u32, unused: 0 };
    let launch = Launch::linear(params.n.div_ceil(THREADS), THREADS);
    cx.launch(cx.kernel(&SOURCE, "silu_gate")?, launch, &params)
}
