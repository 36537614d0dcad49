//! Rotary position embedding (RoFormer, arXiv 2104.09864) of whole heads, with the per-head norm that may precede it.
//!
//! 12 bytes and a few operations per value, `rows * heads * dim` values: a launch's own latency for one row.

use bytemuck::NoUninit;
use kvant_backend::{Heads, Pairing, RopeParams};

use crate::norm::NormParts;
use crate::{Context, CudaError, DevicePtr, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source =
    Source { name: "rope.cu", text: include_str!("rope.cu"), headers: &[], options: &[] };

/// Heads that one block turns, a warp each.
const HEADS_PER_BLOCK: u32 = 4;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    x: DevicePtr,
    angles: DevicePtr,
    weight: DevicePtr,
    n_heads: u32,
    dim: u32,
    n_rot: u32,
    total: u32,
    stride: u32,
    eps: f32,
}

/// Norms and turns `rows` rows of `x` `[rows, heads.n * heads.dim]` in place, by `angles` `[rows, n_rot / 2, 2]`.
/// Shapes have been checked.
pub(crate) fn rope(
    cx: &Context,
    x: DevicePtr,
    rows: usize,
    heads: Heads,
    norm: Option<NormParts>,
    params: RopeParams,
    angles: DevicePtr,
) -> Result<(), CudaError> {
    let total = (rows * heads.n) as u32;
    if total == 0 || params.n_rot == 0 && norm.is_none() {
        return Ok(());
    }
    let params = KernelParams {
        x,
        angles,
        weight: norm.map_or(0, |norm| norm.weight),
        n_heads: heads.n as u32,
        dim: heads.dim as u32,
        n_rot: params.n_rot as u32,
        total,
        stride: match params.pairing {
            Pairing::Interleaved => 1,
            Pairing::Halves => (params.n_rot / 2) as u32,
        },
        eps: norm.map_or(0.0, |norm| norm.eps),
    };
    let launch = Launch::linear(total.div_ceil(HEADS_PER_BLOCK), HEADS_PER_BLOCK * 32);
    cx.launch(cx.kernel(&SOURCE, "rope")?, launch, &params)
}
