//! What a layer's rows are multiplied by on their way into the cache and out of it.

use std::ops::Range;

use super::KvLayer;

/// The factors of a layer's keys, queries, values and outputs, one after the other in f32: before it is rotated and rounded a
/// key becomes `k * key`, a query `q * query`, a value `v * value + value_shift`; after the rotation is undone an output
/// becomes `o * out + out_shift`. Each has a value for each KV head and dim; query heads of a group share theirs. Where values
/// are the first part of their keys, `query` undoes `key` for outputs too. There, and where a layer scales keys alone
/// ([`KvLayer::scales_values`]), the parts of values are empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BalanceLayout {
    /// Factors on keys, `[n_kv_heads * k_head_dim]`.
    pub key: Range<usize>,
    /// Factors on queries, `[n_kv_heads * k_head_dim]`.
    pub query: Range<usize>,
    /// Factors on values, `[n_kv_heads * v_head_dim]`.
    pub value: Range<usize>,
    /// Added to values after that.
    pub value_shift: Range<usize>,
    /// Factors on outputs, `[n_kv_heads * v_head_dim]`.
    pub out: Range<usize>,
    /// Added to outputs after that.
    pub out_shift: Range<usize>,
}

impl BalanceLayout {
    /// That of a layer with so many values in a row of keys, and in a row of values where these are scaled.
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

    /// That of this layer.
    pub fn of(layer: &KvLayer) -> Self {
        let width = |streams: &[super::KvStream]| streams.iter().map(|stream| stream.spec.head_dim).sum();
        Self::new(width(&layer.k), if layer.scales_values { width(&layer.v) } else { 0 })
    }

    /// Whether it has factors on values of their own.
    pub fn scales_values(&self) -> bool {
        !self.value.is_empty()
    }

    /// Values in all.
    pub fn n_values(&self) -> usize {
        self.out_shift.end
    }
}
