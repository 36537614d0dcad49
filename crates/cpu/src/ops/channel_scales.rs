//! Per-channel scales and shifts of the rows of a KV head (as in SmoothQuant), applied before
//! rotation or after it.

use std::ops::Range;

use kvant_backend::{ChannelScaleLayout, KvBatchEntry};

use crate::host::page::CpuPage;

/// `x * scale + shift`, dim by dim.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Affine<'a> {
    scale: &'a [f32],
    shift: Option<&'a [f32]>,
}

impl Affine<'_> {
    /// Applies dims `dims` to `x`, as far as `x` has them.
    pub(crate) fn apply(&self, dims: Range<usize>, x: &[f32], out: &mut [f32]) {
        let scale = &self.scale[dims.clone()][..x.len()];
        match self.shift {
            None => out.iter_mut().zip(x).zip(scale).for_each(|((out, x), s)| *out = x * s),
            Some(shift) => {
                let factors = scale.iter().zip(&shift[dims]);
                out.iter_mut().zip(x).zip(factors).for_each(|((out, x), (s, b))| *out = x * s + b);
            }
        }
    }
}

/// The channel scales of one KV head.
pub(crate) struct HeadScales<'a> {
    pub(crate) key: Affine<'a>,
    pub(crate) query: Affine<'a>,
    /// `None` where values are unscaled.
    pub(crate) value: Option<Affine<'a>>,
    /// `None` where outputs are unscaled.
    pub(crate) out: Option<Affine<'a>>,
}

impl<'a> HeadScales<'a> {
    /// Returns the scales of head `head` of `part`, if any.
    pub(crate) fn of(part: &KvBatchEntry<'a, CpuPage>, head: usize) -> Option<Self> {
        let values: &'a [f32] = bytemuck::cast_slice(part.channel_scales?.as_bytes());
        let layout = ChannelScaleLayout::of(part.layer);
        let scales_values = layout.scales_values();
        let k = part.layer.k[head].spec.head_dim;
        let of_head = |all: Range<usize>, dim: usize| &values[all][head * dim..][..dim];
        let affine = |scale, shift| Affine { scale, shift };
        let (key, query) = (affine(of_head(layout.key, k), None), affine(of_head(layout.query, k), None));
        let Some(v) = part.layer.v.get(head).map(|stream| stream.spec.head_dim) else {
            // Values are the first dims of their keys: the factors that undo a key's scales for
            // queries undo them here.
            return Some(Self { key, query, value: Some(key), out: Some(query) });
        };
        if !scales_values {
            return Some(Self { key, query, value: None, out: None });
        }
        let of_values = |scale, shift| Some(affine(of_head(scale, v), Some(of_head(shift, v))));
        let (value, out) =
            (of_values(layout.value, layout.value_shift), of_values(layout.out, layout.out_shift));
        Some(Self { key, query, value, out })
    }
}
