//! KV caches of every shape, and their expected content.
//!
//! | module | content |
//! |---|---|
//! | `tokens` | keys and values to append, and their expected decoded values |
//! | `batch` | sequences of one layer in a common step, on a device |
//! | `attention` | reference attention in f64, and the error bounds of devices |

use kvant_backend::{AttendParams, ChannelScaleLayout, KvTensorSpec};
use kvant_codec::{DType, Side};

mod attention;
mod batch;
mod tokens;

pub use attention::{Answer, PooledTokens};
pub use batch::{Batch, Blocks, MemoryBytes};
pub use tokens::{Affine, Record, Row, Tokens};

use crate::weights::gaussian;

/// The KV tensors of a layer, and its queries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Type of K.
    pub k: DType,
    /// Type of V.
    pub v: DType,
    /// Size of a key head, without padding.
    pub k_head_dim: usize,
    /// Size of a value head, without padding.
    pub v_head_dim: usize,
    /// Whether values are a prefix of their keys (MLA): one shared KV tensor, of the keys' type.
    pub shared_kv: bool,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// First tiles of quantized KV tensors that stay in 16 bits (sink).
    pub sink_tiles: usize,
    /// Tiles in the tail of quantized KV tensors, beyond the default.
    pub extra_tail_tiles: usize,
    /// Whether quantized KV tensors have a 16-bit tail.
    pub has_tail: bool,
    /// Whether codes of keys are of their difference from the block's centre.
    pub centres: bool,
    /// Which rows have factors and shifts before they are stored.
    pub scaled: Scaled,
    /// Factor on every quantized vector.
    pub alpha: f32,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Soft cap of scores.
    pub soft_cap: Option<f32>,
    /// Attention sinks: that of the first query head, and the increment per head.
    pub sinks: Option<[f32; 2]>,
}

/// Which rows have factors and shifts before they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scaled {
    /// None of them.
    None,
    /// Keys, and inversely queries.
    Keys,
    /// Keys and values, and inversely queries and outputs.
    All,
}

impl Shape {
    /// Returns one KV head of 128 for two query heads, with default KV tensors.
    pub fn new(k: DType, v: DType) -> Self {
        Self {
            k,
            v,
            k_head_dim: 128,
            v_head_dim: 128,
            shared_kv: false,
            n_kv_heads: 1,
            group: 2,
            sink_tiles: 0,
            extra_tail_tiles: 0,
            has_tail: true,
            centres: true,
            scaled: Scaled::None,
            alpha: 1.0,
            window: None,
            soft_cap: None,
            sinks: None,
        }
    }

    /// Returns one shared KV tensor of this type: the first `v_head_dim` values of a key are the
    /// value.
    pub fn shared_kv(dtype: DType, k_head_dim: usize, v_head_dim: usize) -> Self {
        Self { shared_kv: true, k_head_dim, v_head_dim, ..Self::new(dtype, dtype) }
    }

    /// Returns the specification of one side's KV tensors; shared ones are the same for both.
    pub fn spec(&self, side: Side) -> KvTensorSpec {
        let dtype = if side == Side::K { self.k } else { self.v };
        let spec = match side {
            _ if self.shared_kv => KvTensorSpec::new_shared_kv(dtype, self.k_head_dim, self.v_head_dim),
            Side::K => KvTensorSpec::new(dtype, side, self.k_head_dim),
            Side::V => KvTensorSpec::new(dtype, side, self.v_head_dim),
        };
        if dtype.code().is_none() {
            return spec;
        }
        let tail_tiles = if self.has_tail { spec.tail_tiles + self.extra_tail_tiles } else { 0 };
        let centres = spec.centres && self.centres;
        KvTensorSpec { sink_tiles: self.sink_tiles, tail_tiles, alpha: self.alpha, centres, ..spec }
    }

    /// Returns the factors and shifts in the order of [`ChannelScaleLayout`], if any: factors
    /// between 1/4 and 4, those of queries and outputs the inverses of those of keys and values,
    /// and shifts.
    pub fn balance(&self) -> Option<Vec<f32>> {
        (self.scaled != Scaled::None).then(|| {
            let layout = self.balance_layout();
            let mut values = gaussian(77, layout.n_values(), 1.0);
            let (key, value) = (layout.key.clone(), layout.value.clone());
            values[key.clone()].iter_mut().for_each(|x| *x = x.clamp(-2.0, 2.0).exp2());
            values[value.clone()].iter_mut().for_each(|x| *x = x.clamp(-2.0, 2.0).exp2());
            key.zip(layout.query).for_each(|(k, q)| values[q] = 1.0 / values[k]);
            for (((v, shift), o), back) in value.zip(layout.value_shift).zip(layout.out).zip(layout.out_shift)
            {
                values[o] = 1.0 / values[v];
                values[back] = -values[shift] / values[v];
            }
            values
        })
    }

    /// Returns whether values have factors and shifts of their own.
    pub fn scales_values(&self) -> bool {
        self.scaled == Scaled::All && !self.shared_kv
    }

    /// Returns the position of each of these numbers.
    pub fn balance_layout(&self) -> ChannelScaleLayout {
        let n_v = if self.scales_values() { self.n_kv_heads * self.v_head_dim } else { 0 };
        ChannelScaleLayout::new(self.n_kv_heads * self.k_head_dim, n_v)
    }

    /// Returns the parameters of attention.
    pub fn params(&self) -> AttendParams {
        AttendParams {
            n_heads: self.n_heads(),
            n_kv_heads: self.n_kv_heads,
            k_head_dim: self.k_head_dim,
            v_head_dim: self.v_head_dim,
            scale: 1.0 / (self.k_head_dim as f32).sqrt(),
            soft_cap: self.soft_cap,
        }
    }

    /// Returns the sink of each query head.
    pub fn sinks(&self) -> Option<Vec<f32>> {
        self.sinks.map(|[first, step]| (0..self.n_heads()).map(|head| first + head as f32 * step).collect())
    }

    /// Returns the number of query heads.
    pub fn n_heads(&self) -> usize {
        self.n_kv_heads * self.group
    }
}
