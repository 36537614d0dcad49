//! Layout of a layer's channel scales (SmoothQuant), applied before caching and undone after.

use std::ops::Range;

use super::KvLayer;

/// Offsets of a layer's channel scales for keys, queries, values and outputs, consecutive in f32.
///
/// Before rotation and rounding, a key becomes `k * key`, a query `q * query`, a value
/// `v * value + value_shift`; after un-rotation, an output becomes `o * out + out_shift`. Each has
/// one factor per KV head and dim; the query heads of a group share theirs. Where values are a
/// prefix of their keys (MLA), `query` undoes `key` for outputs too. There, and where a layer
/// scales keys alone ([`KvLayer::scales_values`]), the ranges of values are empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelScaleLayout {
    /// Factors on keys, `[n_kv_heads * k_head_dim]`.
    pub key: Range<usize>,
    /// Factors on queries, `[n_kv_heads * k_head_dim]`.
    pub query: Range<usize>,
    /// Factors on values, `[n_kv_heads * v_head_dim]`.
    pub value: Range<usize>,
    /// Added to scaled values.
    pub value_shift: Range<usize>,
    /// Factors on outputs, `[n_kv_heads * v_head_dim]`.
    pub out: Range<usize>,
    /// Added to scaled outputs.
    pub out_shift: Range<usize>,
}

impl ChannelScaleLayout {
    /// Lays out the scales for `n_k` values per row of keys and `n_v` scaled values per row of
    /// values (0: none).
    pub fn new(n_k: usize, n_v: usize) -> Self {
        let mut end = 0;
        let mut next = |n| {
            end += n;
            end - n..end
        };
        let (key, query) = (next(n_k), next(n_k));
        let (value, value_shift, out, out_shift) = (next(n_v), next(n_v), next(n_v), next(n_v));
        Self { key, query, value, value_shift, out, out_shift }
    }

    /// Returns the layout for `layer`.
    pub fn of(layer: &KvLayer) -> Self {
        let width = |tensors: &[super::KvTensor]| tensors.iter().map(|tensor| tensor.spec.head_dim).sum();
        Self::new(width(&layer.k), if layer.scales_values { width(&layer.v) } else { 0 })
    }

    /// Returns whether values have factors of their own.
    pub fn scales_values(&self) -> bool {
        !self.value.is_empty()
    }

    /// Returns the total number of values.
    pub fn n_values(&self) -> usize {
        self.out_shift.end
    }
}
