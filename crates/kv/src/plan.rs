//! What a cache stores: the shape of the model's KV heads and a type for each of them.

use std::ops::Range;
use std::sync::Arc;

use kvant_backend::{StreamSpec, TILES_PER_BLOCK, TOKENS_PER_BLOCK};
use kvant_codec::DType;
use kvant_codec::tile::{Side, TILE};

use crate::{Balance, KvError, Layout, Policies, WeightStatistics};

/// What a model keeps of past tokens.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct KvShape {
    /// The layers that have keys and values of their own.
    pub layers: Vec<KvLayerShape>,
    /// The recurrent layers: f32 values of each one's state.
    pub states: Vec<usize>,
    /// What the model's weights say of its keys and values, where that is known.
    pub statistics: Option<Arc<WeightStatistics>>,
}

/// The KV heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayerShape {
    /// Query heads.
    pub n_heads: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Values of a key head.
    pub k_head_dim: usize,
    /// Values of a value head.
    pub v_head_dim: usize,
    /// The youngest tokens that a query sees, itself included; all of them when `None`.
    pub window: Option<usize>,
    /// Whether the first values of a key are the value, so that one stream holds both.
    pub joint: bool,
}

impl KvLayerShape {
    /// Numbers that are kept of a token.
    pub fn values_per_token(&self) -> usize {
        self.n_kv_heads * (self.k_head_dim + if self.joint { 0 } else { self.v_head_dim })
    }

    /// The sides that have streams of their own.
    pub fn sides(&self) -> &'static [Side] {
        if self.joint { &[Side::K] } else { &[Side::K, Side::V] }
    }

    /// Query heads per KV head.
    pub fn gqa_ratio(&self) -> usize {
        self.n_heads / self.n_kv_heads.max(1)
    }
}

impl KvShape {
    /// Layers of one shape.
    pub fn uniform(n_layers: usize, layer: KvLayerShape) -> Self {
        Self { layers: vec![layer; n_layers], ..Self::default() }
    }

    /// Bytes that a cache of `tokens` tokens would allocate in f16, in the same blocks: what a saving is measured
    /// against. `usize::MAX` when they are more than that.
    pub fn f16_bytes(&self, tokens: usize) -> usize {
        let f16 = HeadTypes { k: DType::F16, v: DType::F16 };
        let types = self.layers.iter().map(|layer| vec![f16; layer.n_kv_heads]).collect();
        Layout::new(self, Plan::of(types)).n_bytes(tokens)
    }
}

/// The types of one KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadTypes {
    /// Type of the keys.
    pub k: DType,
    /// Type of the values.
    pub v: DType,
}

impl HeadTypes {
    /// That of one side.
    pub fn of(&self, side: Side) -> DType {
        match side {
            Side::K => self.k,
            Side::V => self.v,
        }
    }
}

/// The full description of what a cache stores; kernels read it, policies fill it.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Types, `[layers][n_kv_heads]`.
    pub types: Vec<Vec<HeadTypes>>,
    /// First tokens kept in f16; rounded up to whole tiles.
    pub sink_tokens: usize,
    /// Youngest tokens kept in f16, beyond those that wait to fill a tile; rounded up to whole tiles.
    pub recent_tokens: usize,
    /// Whether tokens that do not fill a tile yet wait in f16. Off, they are encoded at once, and what is stored depends on how
    /// they are fed; for measurements.
    pub tail: bool,
    /// Factor on every encoded vector's norm.
    pub alpha: f32,
    /// What keys and values are multiplied by first.
    pub balance: Option<Arc<Balance>>,
    /// What the policies changed, one line each, for the summary.
    pub notes: Vec<String>,
}

impl Plan {
    /// The same types for every head, changed by `policies`. Where one stream holds keys and values it has the type of the keys:
    /// a type of values that is another is left out, and a note says so.
    ///
    /// # Errors
    /// When `k` or `v` is not a KV type, a type table does not fit the shape, or a policy keeps more tokens than any context
    /// has.
    pub fn new(shape: &KvShape, k: DType, v: DType, policies: &Policies) -> Result<Self, KvError> {
        for dtype in [k, v] {
            if !dtype.is_kv() {
                return Err(KvError::NotKvType { got: dtype.name().to_owned() });
            }
        }
        let types = shape.layers.iter().map(|layer| vec![HeadTypes { k, v }; layer.n_kv_heads]).collect();
        let mut plan = Self::of(types);
        policies.apply(shape, &mut plan)?;
        plan.join(shape);
        Ok(plan)
    }

    /// Gives values that are part of their keys the type of these.
    fn join(&mut self, shape: &KvShape) {
        let joint = shape.layers.iter().zip(&mut self.types).filter(|(layer, _)| layer.joint);
        let mut left_out = None;
        for types in joint.flat_map(|(_, heads)| heads).filter(|types| types.v != types.k) {
            left_out = Some(*types);
            types.v = types.k;
        }
        if let Some(HeadTypes { k, v }) = left_out {
            self.notes.push(format!(
                "latent attention: one stream holds keys and values, of the keys' type {}; {} of values is not used",
                k.name(),
                v.name()
            ));
        }
    }

    /// These types and nothing else.
    fn of(types: Vec<Vec<HeadTypes>>) -> Self {
        let notes = Vec::new();
        Self { types, sink_tokens: 0, recent_tokens: 0, tail: true, alpha: 1.0, balance: None, notes }
    }

    /// The plan of some of the layers. The notes, which speak of all of them, stay behind.
    ///
    /// # Panics
    /// When there are no such layers.
    pub fn part(&self, layers: Range<usize>) -> Self {
        let balance = self.balance.as_ref().map(|balance| Arc::new(balance.part(layers.clone())));
        Self { types: self.types[layers].to_vec(), balance, notes: Vec::new(), ..self.clone() }
    }

    /// The stream of one head and side: the same of both where it is joint.
    pub fn stream(&self, shape: &KvShape, layer: usize, head: usize, side: Side) -> StreamSpec {
        let (types, layer) = (self.types[layer][head], &shape.layers[layer]);
        let spec = match side {
            _ if layer.joint => StreamSpec::joint(types.k, layer.k_head_dim, layer.v_head_dim),
            Side::K => StreamSpec::new(types.k, side, layer.k_head_dim),
            Side::V => StreamSpec::new(types.v, side, layer.v_head_dim),
        };
        if spec.tail_tiles == 0 {
            return spec;
        }
        let tail_tiles =
            if self.tail { spec.tail_tiles.saturating_add(self.recent_tokens.div_ceil(TILE)) } else { 0 };
        StreamSpec { tail_tiles, sink_tiles: self.sink_tokens.div_ceil(TILE), alpha: self.alpha, ..spec }
    }

    /// Bytes that a cache of `tokens` tokens allocates: what [`Cache::n_bytes`](crate::Cache::n_bytes) will report.
    pub fn n_bytes(&self, shape: &KvShape, tokens: usize) -> usize {
        Layout::new(shape, self.clone()).n_bytes(tokens)
    }

    /// Bytes that are taken beside them: [`Layout::bytes_aside`].
    pub fn bytes_aside(&self, shape: &KvShape) -> usize {
        Layout::new(shape, self.clone()).bytes_aside()
    }

    /// Mean bits per value of the keys and of the values in blocks, scales and centres included.
    pub fn bits_per_value(&self, shape: &KvShape) -> (f64, f64) {
        let mean = |side| {
            let heads = (0..self.types.len()).flat_map(|layer| {
                (0..self.types[layer].len()).map(move |head| self.stream(shape, layer, head, side))
            });
            let (bits, values) = heads.fold((0, 0), |(bits, values), spec| {
                let tiles = TILES_PER_BLOCK * spec.main_layout().bytes();
                (bits + 8 * (tiles + spec.centre_bytes()), values + TOKENS_PER_BLOCK * spec.head_dim)
            });
            bits as f64 / values.max(1) as f64
        };
        (mean(Side::K), mean(Side::V))
    }

    /// The name of the keys' and of the values' type: a type name, or `mixed`.
    pub fn type_names(&self) -> (&'static str, &'static str) {
        let name = |pick: fn(&HeadTypes) -> DType| {
            let mut types = self.types.iter().flatten().map(pick);
            let first = types.next();
            match first {
                Some(dtype) if types.all(|other| other == dtype) => dtype.name(),
                Some(_) => "mixed",
                None => "none",
            }
        };
        (name(|t| t.k), name(|t| t.v))
    }
}
