//! Caches of every shape, and what they must hold.
//!
//! | module | what it is |
//! |---|---|
//! | `tokens` | keys and values to feed, and what each must read back as |
//! | `batch` | sequences of one layer that step together, on a device |
//! | `attention` | attention over what a query sees, in f64, and how far a device may be from it |

use kvant_backend::{AttendParams, BalanceLayout, StreamSpec};
use kvant_codec::{DType, Side};

mod attention;
mod batch;
mod tokens;

pub use attention::Answer;
pub use batch::{Batch, Image};
pub use tokens::{Affine, Record, Row, Tokens};

use crate::weights::gaussian;

/// The streams of a layer, and the queries that meet them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Type of the keys.
    pub k: DType,
    /// Type of the values.
    pub v: DType,
    /// True size of a key head.
    pub k_head_dim: usize,
    /// True size of a value head.
    pub v_head_dim: usize,
    /// Whether values are the first part of their keys: one stream, of the keys' type.
    pub joint: bool,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Query heads for each KV head.
    pub group: usize,
    /// First tiles of coded streams that stay in 16 bit.
    pub sink_tiles: usize,
    /// Tiles in the tail of coded streams beyond those that it has by default.
    pub extra_tail_tiles: usize,
    /// Whether coded streams have a tail.
    pub has_tail: bool,
    /// Whether codes of keys are of what the centres of their blocks leave.
    pub centres: bool,
    /// Which rows are multiplied and moved before they are stored.
    pub scaled: Scaled,
    /// Factor on every coded vector.
    pub alpha: f32,
    /// The youngest tokens that a query sees.
    pub window: Option<usize>,
    /// Bound on the scores.
    pub soft_cap: Option<f32>,
    /// Scores without a value that join the softmax, of the first query head, and how much larger that of each next one is.
    pub sinks: Option<[f32; 2]>,
}

/// Which rows are multiplied and moved before they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scaled {
    /// None of them.
    None,
    /// Keys, and queries the other way.
    Keys,
    /// Keys and values, queries and outputs the other way.
    All,
}

impl Shape {
    /// One KV head of 128 for two query heads, and what streams have by default.
    pub fn new(k: DType, v: DType) -> Self {
        Self {
            k,
            v,
            k_head_dim: 128,
            v_head_dim: 128,
            joint: false,
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

    /// One stream for keys and values of this type: the first `v_head_dim` values of a key are the value.
    pub fn joint(dtype: DType, k_head_dim: usize, v_head_dim: usize) -> Self {
        Self { joint: true, k_head_dim, v_head_dim, ..Self::new(dtype, dtype) }
    }

    /// The streams of one side: where it is joint, the same of both.
    pub fn spec(&self, side: Side) -> StreamSpec {
        let dtype = if side == Side::K { self.k } else { self.v };
        let spec = match side {
            _ if self.joint => StreamSpec::joint(dtype, self.k_head_dim, self.v_head_dim),
            Side::K => StreamSpec::new(dtype, side, self.k_head_dim),
            Side::V => StreamSpec::new(dtype, side, self.v_head_dim),
        };
        if dtype.code().is_none() {
            return spec;
        }
        let tail_tiles = if self.has_tail { spec.tail_tiles + self.extra_tail_tiles } else { 0 };
        let centres = spec.centres && self.centres;
        StreamSpec { sink_tiles: self.sink_tiles, tail_tiles, alpha: self.alpha, centres, ..spec }
    }

    /// What rows are multiplied by, as [`BalanceLayout`] says, where they are: factors between 1/4 and 4, those of queries and
    /// outputs undoing those of keys and values, and shifts.
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

    /// Whether values are multiplied and moved by numbers of their own.
    pub fn scales_values(&self) -> bool {
        self.scaled == Scaled::All && !self.joint
    }

    /// Where in these each of them is.
    pub fn balance_layout(&self) -> BalanceLayout {
        let n_v = if self.scales_values() { self.n_kv_heads * self.v_head_dim } else { 0 };
        BalanceLayout::new(self.n_kv_heads * self.k_head_dim, n_v)
    }

    /// What attention is told of it.
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

    /// The sink of each query head.
    pub fn sinks(&self) -> Option<Vec<f32>> {
        self.sinks.map(|[first, step]| (0..self.n_heads()).map(|head| first + head as f32 * step).collect())
    }

    /// Query heads.
    pub fn n_heads(&self) -> usize {
        self.n_kv_heads * self.group
    }
}
