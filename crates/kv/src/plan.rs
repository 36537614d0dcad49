//! What a cache stores: the shape of the model's KV heads and a type for each of them.

use std::ops::Range;
use std::sync::Arc;

use kvant_backend::{KvTensorSpec, TILES_PER_BLOCK, TOKENS_PER_BLOCK};
use kvant_codec::DType;
use kvant_codec::tile::{Side, TILE};

use crate::{ChannelScales, KvError, Layout, Policies, WeightStatistics};

/// The shape of a model's KV cache and recurrent states.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct KvShape {
    /// The layers with keys and values of their own.
    pub layers: Vec<KvLayerShape>,
    /// The recurrent layers: f32 values of each state.
    pub states: Vec<usize>,
    /// Statistics of the weights that produce keys and values, if known.
    pub statistics: Option<Arc<WeightStatistics>>,
}

/// The KV heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayerShape {
    /// Query heads.
    pub n_heads: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Head dimension of keys.
    pub k_head_dim: usize,
    /// Head dimension of values.
    pub v_head_dim: usize,
    /// Sliding window: the youngest tokens that a query attends to, itself included; all of them
    /// when `None`.
    pub window: Option<usize>,
    /// Whether values are a prefix of their keys (MLA), so that one shared-KV tensor holds both.
    pub shared_kv: bool,
    /// Size of the key of an index that selects the tokens of a query, in layers that have one. Of
    /// pooled keys it selects these.
    pub index: Option<usize>,
    /// The pooled keys, in layers that have some.
    pub pool: Option<KeyPool>,
}

/// Pooled keys of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyPool {
    /// Tokens per key.
    pub stride: usize,
    /// Whether the keys of the index alone are pooled; otherwise queries attend to pooled keys
    /// beside the tokens of their window.
    pub of_index: bool,
}

impl KvLayerShape {
    /// Returns the values stored per token: of keys, of values, and of the key of an index; of
    /// pooled keys and their index the share of a token.
    pub fn values_per_token(&self) -> usize {
        let of_index = if self.pool.is_some() { 0 } else { self.index.unwrap_or(0) };
        self.n_kv_heads * self.k_head_dim + self.n_values() + of_index + self.pooled_per_token()
    }

    /// Returns the values of pooled keys and their index per token.
    fn pooled_per_token(&self) -> usize {
        self.pool.map_or(0, |KeyPool { stride, of_index }| {
            let of_keys = if of_index { 0 } else { self.k_head_dim };
            (of_keys + self.index.unwrap_or(0)).div_ceil(stride)
        })
    }

    /// Returns the values per token that stay, not those of a window, and those of all tokens in
    /// the blocks of a window.
    pub(crate) fn kept_and_windowed(&self) -> [usize; 2] {
        let pooled = self.pooled_per_token();
        let of_tokens = self.values_per_token() - pooled;
        match self.window {
            Some(window) => [pooled, of_tokens * (window + TOKENS_PER_BLOCK)],
            None => [of_tokens + pooled, 0],
        }
    }

    /// Returns the length of a token's values in tensors of their own.
    pub fn n_values(&self) -> usize {
        if self.shared_kv { 0 } else { self.n_kv_heads * self.v_head_dim }
    }

    /// Returns the sides with KV tensors of their own.
    pub fn sides(&self) -> &'static [Side] {
        if self.shared_kv { &[Side::K] } else { &[Side::K, Side::V] }
    }

    /// Returns the query heads per KV head.
    pub fn gqa_ratio(&self) -> usize {
        self.n_heads / self.n_kv_heads.max(1)
    }
}

impl KvShape {
    /// Returns a shape of `n_layers` equal layers.
    pub fn uniform(n_layers: usize, layer: KvLayerShape) -> Self {
        Self { layers: vec![layer; n_layers], ..Self::default() }
    }

    /// Returns the bytes that a cache of `tokens` tokens would allocate in f16, in the same blocks:
    /// the baseline of savings. Saturates at `usize::MAX`.
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
    /// Returns the type of one side.
    pub fn of(&self, side: Side) -> DType {
        match side {
            Side::K => self.k,
            Side::V => self.v,
        }
    }
}

/// The complete description of a cache's contents; policies modify it, kernels read it.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Types, `[layers][n_kv_heads]`.
    pub types: Vec<Vec<HeadTypes>>,
    /// First tokens in f16 (sink); rounded up to whole tiles.
    pub sink_tokens: usize,
    /// Youngest tokens in f16, in addition to those of incomplete tiles; rounded up to whole tiles.
    pub recent_tokens: usize,
    /// Whether tokens of incomplete tiles stay in f16. If not, they are encoded at once, and the
    /// stored bits depend on the step sizes; for measurements.
    pub tail: bool,
    /// Factor on every encoded vector's norm.
    pub alpha: f32,
    /// Channel scales of keys and values.
    pub channel_scales: Option<Arc<ChannelScales>>,
    /// The changes made by policies, one line each, for the summary.
    pub notes: Vec<String>,
}

impl Plan {
    /// Assigns the same types to every head, then applies `policies`. A shared-KV tensor (MLA) has
    /// the type of the keys: a different type for values is ignored, with a note.
    ///
    /// # Errors
    /// When `k` or `v` is not a KV type, a type table does not fit the shape, or a policy requests
    /// more f16 tokens than any context has.
    pub fn new(shape: &KvShape, k: DType, v: DType, policies: &Policies) -> Result<Self, KvError> {
        for dtype in [k, v] {
            if !dtype.is_kv() {
                return Err(KvError::NotKvType { got: dtype.name().to_owned() });
            }
        }
        let types = shape.layers.iter().map(|layer| vec![HeadTypes { k, v }; layer.n_kv_heads]).collect();
        let mut plan = Self::of(types);
        policies.apply(shape, &mut plan)?;
        plan.unify_shared_kv(shape);
        Ok(plan)
    }

    /// Sets the type of values that are part of their keys to the keys' type.
    fn unify_shared_kv(&mut self, shape: &KvShape) {
        let shared_kv = shape.layers.iter().zip(&mut self.types).filter(|(layer, _)| layer.shared_kv);
        let mut left_out = None;
        for types in shared_kv.flat_map(|(_, heads)| heads).filter(|types| types.v != types.k) {
            left_out = Some(*types);
            types.v = types.k;
        }
        if let Some(HeadTypes { k, v }) = left_out {
            self.notes.push(format!(
                "MLA: keys and values share one tensor of the keys' type {}; {} for values is ignored",
                k.name(),
                v.name()
            ));
        }
    }

    /// Returns a plan of these types with default settings.
    fn of(types: Vec<Vec<HeadTypes>>) -> Self {
        let notes = Vec::new();
        Self { types, sink_tokens: 0, recent_tokens: 0, tail: true, alpha: 1.0, channel_scales: None, notes }
    }

    /// Returns the plan of a range of layers, without the notes, which describe the whole model.
    ///
    /// # Panics
    /// When `layers` is out of range.
    pub fn part(&self, layers: Range<usize>) -> Self {
        let balance = self.channel_scales.as_ref().map(|balance| Arc::new(balance.part(layers.clone())));
        Self {
            types: self.types[layers].to_vec(),
            channel_scales: balance,
            notes: Vec::new(),
            ..self.clone()
        }
    }

    /// Returns the KV tensor of one head and side: the same for both sides where it is shared.
    pub fn kv_tensor(&self, shape: &KvShape, layer: usize, head: usize, side: Side) -> KvTensorSpec {
        let (types, layer) = (self.types[layer][head], &shape.layers[layer]);
        let spec = match side {
            _ if layer.shared_kv => KvTensorSpec::new_shared_kv(types.k, layer.k_head_dim, layer.v_head_dim),
            Side::K => KvTensorSpec::new(types.k, side, layer.k_head_dim),
            Side::V => KvTensorSpec::new(types.v, side, layer.v_head_dim),
        };
        self.with_f16_tokens(spec)
    }

    /// Returns the tensor with the keys of a layer's index, if it has one: of the type of its first
    /// head's keys.
    pub fn index_tensor(&self, shape: &KvShape, layer: usize) -> Option<KvTensorSpec> {
        let dim = shape.layers[layer].index?;
        let dtype = self.types[layer].first()?.k;
        // The layout of values: rows are decoded token by token.
        let spec = KvTensorSpec::new_shared_kv(dtype, dim, dim);
        Some(if shape.layers[layer].pool.is_some() { self.pooled(spec) } else { self.with_f16_tokens(spec) })
    }

    /// Returns the tensor with the pooled keys that a layer attends to, if it has some: as the keys
    /// of its tokens, without tokens in f16.
    pub fn pooled_tensor(&self, shape: &KvShape, layer: usize) -> Option<KvTensorSpec> {
        shape.layers[layer].pool.filter(|pool| !pool.of_index)?;
        (!self.types[layer].is_empty()).then(|| self.pooled(self.kv_tensor(shape, layer, 0, Side::K)))
    }

    /// Returns a tensor whose rows are coded at once, each by itself: whole tiles of pooled keys,
    /// and centres of them, would wait for thousands of tokens.
    fn pooled(&self, spec: KvTensorSpec) -> KvTensorSpec {
        let alpha = if spec.dtype.code().is_some() { self.alpha } else { spec.alpha };
        KvTensorSpec { sink_tiles: 0, tail_tiles: 0, centres: false, alpha, ..spec }
    }

    /// Returns a tensor with the sink and the tail of the plan.
    fn with_f16_tokens(&self, spec: KvTensorSpec) -> KvTensorSpec {
        if spec.tail_tiles == 0 {
            return spec;
        }
        let tail_tiles =
            if self.tail { spec.tail_tiles.saturating_add(self.recent_tokens.div_ceil(TILE)) } else { 0 };
        KvTensorSpec { tail_tiles, sink_tiles: self.sink_tokens.div_ceil(TILE), alpha: self.alpha, ..spec }
    }

    /// Returns the bytes that a cache of `tokens` tokens allocates: equal to
    /// [`Cache::n_bytes`](crate::Cache::n_bytes).
    pub fn n_bytes(&self, shape: &KvShape, tokens: usize) -> usize {
        Layout::new(shape, self.clone()).n_bytes(tokens)
    }

    /// Returns the additional bytes of checkpoints and draft tokens: [`Layout::bytes_aside`].
    pub fn bytes_aside(&self, shape: &KvShape) -> usize {
        Layout::new(shape, self.clone()).bytes_aside()
    }

    /// Returns the mean bits per value of the keys and of the values in blocks, scales and centres
    /// included; the keys of an index among the keys.
    pub fn bits_per_value(&self, shape: &KvShape) -> (f64, f64) {
        let mean = |side| {
            let heads = (0..self.types.len()).flat_map(|layer| {
                let heads = 0..self.types[layer].len();
                let index = if side == Side::K { self.index_tensor(shape, layer) } else { None };
                heads.map(move |head| self.kv_tensor(shape, layer, head, side)).chain(index)
            });
            let (bits, values) = heads.fold((0, 0), |(bits, values), spec| {
                let tiles = TILES_PER_BLOCK * spec.main_layout().bytes();
                (bits + 8 * (tiles + spec.centre_bytes()), values + TOKENS_PER_BLOCK * spec.head_dim)
            });
            bits as f64 / values.max(1) as f64
        };
        (mean(Side::K), mean(Side::V))
    }

    /// Returns the type names of keys and of values: a type name, `mixed`, or `none`.
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
