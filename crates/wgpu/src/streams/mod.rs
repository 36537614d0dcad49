//! Ops of layers with several residual streams, and of sparse feed-forward layers beside them.

use bytemuck::{Pod, Zeroable};
use kvant_backend::Streams;

use crate::constants::Constants;
use crate::elementwise::{GATE, MATH, gate_constants};
use crate::norm::SUM;
use crate::{Gpu, Part, Source, WgpuError, groups};

pub(crate) static SOURCE: Source = Source {
    parts: &[MATH, SUM, GATE, Part { name: "streams.wgsl", text: include_str!("streams.wgsl") }],
    constants: || gate_constants(Constants::default()).whole("THREADS", THREADS),
};

const THREADS: usize = 64;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    rows: u32,
    width: u32,
    n_in: u32,
    n_out: u32,
    deviations: f32,
}

/// Computes `y[i] = Σ_j coefs[row, i, j] x[j]` for every row. Shapes have been checked.
pub(crate) fn mix_streams(
    gpu: &Gpu,
    [coefs, x, y]: [&wgpu::Buffer; 3],
    rows: usize,
    Streams { n_in, n_out, width }: Streams,
) -> Result<(), WgpuError> {
    let n = (rows * n_out * width).div_ceil(THREADS);
    let [rows, n_in, n_out, width] = [rows, n_in, n_out, width].map(|n| n as u32);
    let params = Params { rows, width, n_in, n_out, deviations: 0.0 };
    let kernel = gpu.kernel(&SOURCE, "mix_streams")?;
    gpu.launch::<_, u32>(&kernel, groups(n, 1), &params, &[], &[(1, x), (2, coefs), (3, y)])
}

/// Multiplies each row of `y` `[rows, width]` by the root mean square of that of `like`.
pub(crate) fn scale_by_rms(
    gpu: &Gpu,
    like: &wgpu::Buffer,
    y: &wgpu::Buffer,
    shape: [usize; 2],
) -> Result<(), WgpuError> {
    launch_rows(gpu, "scale_by_rms", [like, y], shape, 0.0)
}

/// Multiplies each row of `y` `[rows, width]` by GELU of how far that of `gates` exceeds its mean
/// by more than `deviations` standard deviations.
pub(crate) fn gate_sparsely(
    gpu: &Gpu,
    gates: &wgpu::Buffer,
    y: &wgpu::Buffer,
    shape: [usize; 2],
    deviations: f32,
) -> Result<(), WgpuError> {
    launch_rows(gpu, "gate_sparsely", [gates, y], shape, deviations)
}

fn launch_rows(
    gpu: &Gpu,
    name: &'static str,
    [of, y]: [&wgpu::Buffer; 2],
    [rows, width]: [usize; 2],
    deviations: f32,
) -> Result<(), WgpuError> {
    let params = Params { rows: rows as u32, width: width as u32, deviations, ..Params::zeroed() };
    let kernel = gpu.kernel(&SOURCE, name)?;
    gpu.launch::<_, u32>(&kernel, groups(rows, 1), &params, &[], &[(1, of), (3, y)])
}
