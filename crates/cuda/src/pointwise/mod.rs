//! Functions of single values: the activations of encoders, whose layers may have no gate.

use bytemuck::NoUninit;
use kvant_backend::host_ops::Pointwise;

use crate::constants::Constants;
use crate::gate;
use crate::half::HALF_HEADER;
use crate::{Context, CudaError, DevicePtr, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source = Source {
    name: "pointwise.cu",
    text: include_str!("pointwise.cu"),
    headers: &[HALF_HEADER, gate::HEADER],
    constants: || gate::constants(Constants::default()),
    options: &[],
};

const THREADS: u32 = 256;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    x: DevicePtr,
    n: u32,
    function: u32,
}

/// Computes `x = f(x)` of `n` values.
pub(crate) fn apply(cx: &Context, x: DevicePtr, n: usize, f: Pointwise) -> Result<(), CudaError> {
    if n == 0 {
        return Ok(());
    }
    let function = match f {
        Pointwise::GeluTanh => 0,
        Pointwise::Gelu => 1,
        Pointwise::Silu => 2,
        Pointwise::Relu => 3,
        Pointwise::Tanh => 4,
    };
    let params = KernelParams { x, n: n as u32, function };
    let launch = Launch::linear(params.n.div_ceil(THREADS), THREADS);
    cx.launch(cx.kernel(&SOURCE, "apply")?, launch, &params)
}
