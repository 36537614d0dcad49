//! Copies rows into columns of wider rows: `dst[r, first + c] = src[r, c]`.

use bytemuck::NoUninit;
use kvant_backend::Columns;

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::{Context, CudaError, DevicePtr, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source = Source {
    name: "columns.cu",
    text: include_str!("columns.cu"),
    headers: &[HALF_HEADER],
    constants: Constants::default,
    options: &[],
};

const THREADS: u32 = 256;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    src: DevicePtr,
    dst: DevicePtr,
    rows: u32,
    n: u32,
    width: u32,
    first: u32,
}

/// Copies rows of `n` values to columns of `dst`.
pub(crate) fn copy_columns(
    cx: &Context,
    src: DevicePtr,
    [rows, n]: [usize; 2],
    dst: DevicePtr,
    to: Columns,
) -> Result<(), CudaError> {
    if rows == 0 || n == 0 {
        return Ok(());
    }
    let launch = Launch::each("copy_columns", rows * n, THREADS)?;
    let [rows, n, width, first] = [rows, n, to.width, to.first].map(|n| n as u32);
    let params = KernelParams { src, dst, rows, n, width, first };
    cx.launch(cx.kernel(&SOURCE, "copy_columns")?, launch, &params)
}
