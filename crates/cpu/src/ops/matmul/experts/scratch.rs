//! Scratch memory of experts.

use super::route::Routes;
use crate::ops::matmul::quantize::GroupTiles;

/// Buffers that are reused between steps.
#[derive(Default)]
pub(in crate::ops::matmul) struct ExpertScratch {
    pub(super) routes: Routes,
    /// The tiles of each group, in 8 bits and in f32.
    pub(super) tiles: [Vec<GroupTiles>; 2],
    /// The rows of `x` in f32, normalized, in slot order, `[slots, n]`, where a product reads f32.
    pub(super) picked: Vec<f32>,
    /// Gate activations, `[slots, n_ff]`, where gate and up are not fused.
    pub(super) gates: Vec<f32>,
    /// Gated activations, `[slots, n_ff]`.
    pub(super) hidden: Vec<f32>,
}
