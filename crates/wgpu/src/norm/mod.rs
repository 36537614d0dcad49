//! Normalization of rows.

use bytemuck::{Pod, Zeroable};

use crate::constants::Constants;
use crate::elementwise::MATH;
use crate::{Gpu, Part, Source, WgpuError, groups};

/// A sum over the `THREADS` threads of a workgroup.
pub(crate) const SUM: Part = Part { name: "sum.wgsl", text: include_str!("sum.wgsl") };

pub(crate) static SOURCE: Source = Source {
    parts: &[MATH, SUM, Part { name: "norm.wgsl", text: include_str!("norm.wgsl") }],
    constants: || {
        Constants::default()
            .whole("THREADS", 64)
            .whole("ADD_RMS", NormKind::AddRms as usize)
            .whole("LAYER", NormKind::Layer as usize)
    },
};

/// Kind of normalization; see `norm.wgsl`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NormKind {
    AddRms,
    Layer,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    rows: u32,
    n: u32,
    kind: u32,
    eps: f32,
}

/// Normalizes `x` `[rows, n]` to `y`.
pub(crate) fn norm(
    gpu: &Gpu,
    kind: NormKind,
    x: &wgpu::Buffer,
    [rows, n]: [usize; 2],
    weight: &wgpu::Buffer,
    eps: f32,
    y: &wgpu::Buffer,
) -> Result<(), WgpuError> {
    let kernel = gpu.kernel(&SOURCE, "norm")?;
    let params = Params { rows: rows as u32, n: n as u32, kind: kind as u32, eps };
    gpu.launch::<_, u32>(&kernel, groups(rows, 1), &params, &[], &[(1, x), (2, weight), (3, y)])
}
