//! RMS normalisation (arXiv 1910.07467): `y = x / sqrt(mean(x²) + eps) * weight`.

use bytemuck::NoUninit;

use crate::{Context, CudaError, DevicePtr, Launch, Source};

/// The kernels of this op.
pub(crate) static SOURCE: Source =
    Source { name: "norm.cu", text: include_str!("norm.cu"), headers: &[], options: &[] };

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct RmsNormParams {
    x: DevicePtr,
    weight: DevicePtr,
    y: DevicePtr,
    cols: u32,
    eps: f32,
}

/// A norm's weight `[cols]` and eps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormParts {
    pub weight: DevicePtr,
    pub eps: f32,
}

/// Normalises `rows` rows of `x` `[rows, cols]` into `y`. Shapes have been checked.
pub(crate) fn rms_norm(
    cx: &Context,
    x: DevicePtr,
    norm: NormParts,
    [rows, cols]: [usize; 2],
    y: DevicePtr,
) -> Result<(), CudaError> {
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let kernel = cx.kernel(&SOURCE, "rms_norm")?;
    let params = RmsNormParams { x, weight: norm.weight, y, cols: cols as u32, eps: norm.eps };
    cx.launch(kernel, Launch::linear(rows as u32, 256), &params)
}
