//! Ops of layers with several residual streams, and of sparse feed-forward layers beside them.

use bytemuck::NoUninit;
use kvant_backend::Streams;

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::{Context, CudaError, DevicePtr, Launch, Source, gate, norm};

/// The kernels of these ops.
pub(crate) static SOURCE: Source = Source {
    name: "streams.cu",
    text: include_str!("streams.cu"),
    headers: &[gate::HEADER, HALF_HEADER, norm::SUM_HEADER],
    constants: || gate::constants(Constants::default().whole("THREADS", THREADS as usize)),
    options: &[],
};

const THREADS: u32 = 256;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct MixParams {
    coefs: DevicePtr,
    x: DevicePtr,
    y: DevicePtr,
    rows: u32,
    n_in: u32,
    n_out: u32,
    width: u32,
}

/// Computes `y[i] = Σ_j coefs[row, i, j] x[j]` for every row. Shapes have been checked.
pub(crate) fn mix_streams(
    cx: &Context,
    [coefs, x, y]: [DevicePtr; 3],
    rows: usize,
    streams: Streams,
) -> Result<(), CudaError> {
    let Streams { n_in, n_out, width } = streams;
    let n = rows * n_out * width;
    if n == 0 {
        return Ok(());
    }
    let [rows, n_in, n_out, width] = [rows, n_in, n_out, width].map(|n| n as u32);
    let params = MixParams { coefs, x, y, rows, n_in, n_out, width };
    let launch = Launch::each("mix_streams", n, THREADS)?;
    cx.launch(cx.kernel(&SOURCE, "mix_streams")?, launch, &params)
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct RowsParams {
    of: DevicePtr,
    y: DevicePtr,
    width: u32,
    deviations: f32,
}

/// Multiplies each row of `y` `[rows, width]` by the root mean square of that of `like`.
pub(crate) fn scale_by_rms(
    cx: &Context,
    like: DevicePtr,
    y: DevicePtr,
    shape: [usize; 2],
) -> Result<(), CudaError> {
    launch_rows(cx, "scale_by_rms", [like, y], shape, 0.0)
}

/// Multiplies each row of `y` `[rows, width]` by GELU of how far that of `gates` exceeds its mean
/// by more than `deviations` standard deviations.
pub(crate) fn gate_sparsely(
    cx: &Context,
    gates: DevicePtr,
    y: DevicePtr,
    shape: [usize; 2],
    deviations: f32,
) -> Result<(), CudaError> {
    launch_rows(cx, "gate_sparsely", [gates, y], shape, deviations)
}

fn launch_rows(
    cx: &Context,
    kernel: &'static str,
    [of, y]: [DevicePtr; 2],
    [rows, width]: [usize; 2],
    deviations: f32,
) -> Result<(), CudaError> {
    if rows == 0 || width == 0 {
        return Ok(());
    }
    let params = RowsParams { of, y, width: width as u32, deviations };
    cx.launch(cx.kernel(&SOURCE, kernel)?, Launch::linear(rows as u32, THREADS), &params)
}
