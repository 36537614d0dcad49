//! Rotary position embedding (RoFormer, arXiv 2104.09864) of whole heads, with an optional per-head
//! norm before it.
//!
//! 12 bytes and a few operations per value, `rows * heads * dim` values: for one row the latency of
//! the launch dominates.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{Heads, Pairing, RopeParams};

use crate::constants::Constants;
use crate::half::HALF_HEADER;
use crate::norm::NormParts;
use crate::{Context, CudaError, DevicePtr, Header, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source = Source {
    name: "rope.cu",
    text: include_str!("rope.cu"),
    headers: &[HALF_HEADER, ROPE_HEADER],
    constants: Constants::default,
    options: &[],
};

/// RoPE of a head, for every kernel that applies it.
pub(crate) const ROPE_HEADER: Header = Header { name: "rope.cuh", text: include_str!("rope.cuh") };

/// Heads of one block, a warp each.
pub(crate) const HEADS_PER_BLOCK: u32 = 4;

/// `HeadRope` of `rope.cuh`; zeroed, it does nothing.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct HeadRope {
    angles: DevicePtr,
    weight: DevicePtr,
    n_rot: u32,
    stride: u32,
    eps: f32,
    is_on: u32,
}

impl HeadRope {
    /// RoPE by `angles` `[rows, n_rot / 2, 2]`, after the norm if given.
    pub fn new(norm: Option<NormParts>, params: RopeParams, angles: DevicePtr) -> Self {
        Self {
            angles,
            weight: norm.map_or(0, |norm| norm.weight),
            n_rot: params.n_rot as u32,
            stride: match params.pairing {
                Pairing::Interleaved => 1,
                Pairing::Halves => (params.n_rot / 2) as u32,
            },
            eps: norm.map_or(0.0, |norm| norm.eps),
            is_on: (norm.is_some() || params.n_rot > 0).into(),
        }
    }

    pub fn is_on(&self) -> bool {
        self.is_on != 0
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct KernelParams {
    head_rope: HeadRope,
    x: DevicePtr,
    n_heads: u32,
    dim: u32,
    total: u32,
    weight_step: u32,
}

/// Applies the norm, with one weight or one per head, and RoPE to `rows` rows of `x` `[rows,
/// heads.n * heads.dim]` in place. The caller has checked the shapes.
pub(crate) fn rope(
    cx: &Context,
    x: DevicePtr,
    rows: usize,
    heads: Heads,
    head_rope: HeadRope,
    has_own_weights: bool,
) -> Result<(), CudaError> {
    let total = rows * heads.n;
    if total == 0 || !head_rope.is_on() {
        return Ok(());
    }
    let (n_heads, dim) = (heads.n as u32, heads.dim as u32);
    let params = KernelParams {
        head_rope,
        x,
        n_heads,
        dim,
        total: total as u32,
        weight_step: if has_own_weights { dim } else { 0 },
    };
    let launch = Launch::each("rope", 32 * total, HEADS_PER_BLOCK * 32)?;
    cx.launch(cx.kernel(&SOURCE, "rope")?, launch, &params)
}
