//! Rotary position embedding, with an optional per-head norm before it.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{Buffer, Heads, Pairing, RopeParams};

use crate::constants::Constants;
use crate::elementwise::MATH;
use crate::{Gpu, Part, Source, WgpuBuffer, WgpuError, groups};

pub(crate) static SOURCE: Source = Source {
    parts: &[MATH, Part { name: "rope.wgsl", text: include_str!("rope.wgsl") }],
    constants: || Constants::default().whole("THREADS", 32),
};

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    rows: u32,
    heads: u32,
    dim: u32,
    n_rot: u32,
    halves: u32,
    has_norm: u32,
    weight_step: u32,
    eps: f32,
}

/// Applies RoPE by `angles` to the heads of the first `rows` rows of `x`, after the norm if given,
/// with one weight or one per head.
pub(crate) fn rope(
    gpu: &Gpu,
    x: &wgpu::Buffer,
    rows: usize,
    heads: Heads,
    norm: Option<(&WgpuBuffer, f32)>,
    rope: RopeParams,
    angles: &wgpu::Buffer,
) -> Result<(), WgpuError> {
    let kernel = gpu.kernel(&SOURCE, "rope")?;
    let (weight, eps) = norm.map_or((gpu.unused_buffer(), 0.0), |(weight, eps)| (&weight.buffer, eps));
    let has_own_weights = norm.is_some_and(|(weight, _)| weight.n_values() > heads.dim);
    let params = Params {
        rows: rows as u32,
        heads: heads.n as u32,
        dim: heads.dim as u32,
        n_rot: rope.n_rot as u32,
        halves: u32::from(rope.pairing == Pairing::Halves),
        has_norm: norm.is_some().into(),
        weight_step: if has_own_weights { heads.dim as u32 } else { 0 },
        eps,
    };
    let bindings = [(1, x), (2, weight), (3, angles)];
    gpu.launch::<_, u32>(&kernel, groups(rows * heads.n, 1), &params, &[], &bindings)
}
