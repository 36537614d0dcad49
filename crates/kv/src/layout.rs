//! The memory layout of all KV tensors, computed once per plan and shared by its caches.

use std::ops::Range;

use kvant_backend::{
    KvLayer, KvTensorSpec, PREFIX_ALIGNMENT, TOKENS_PER_BLOCK, TensorSizes, TokenPool, TokenSpan,
};
use kvant_codec::tile::{Side, TILE};

use crate::{KeyPool, KvLayerShape, KvShape, Plan};

/// A plan with the offsets of its KV tensors.
///
/// Layers with the same sliding window form a group, whose tensors share blocks: a windowed group
/// releases blocks outside its window, while the others keep theirs.
#[derive(Debug)]
pub struct Layout {
    plan: Plan,
    layers: Vec<KvLayer>,
    /// The group of each layer.
    group_of: Vec<usize>,
    groups: Vec<LayerGroup>,
    /// The pooled keys of each layer, and their group.
    pooled: Vec<Option<PooledLayer>>,
    /// Determines which tokens are in f16: any tensor with a tail, as all tails are equal.
    tailed: Option<KvTensorSpec>,
    states: Option<StateLayout>,
}

/// The memory layout of recurrent states, and the interval of their snapshots.
#[derive(Debug)]
pub(crate) struct StateLayout {
    /// Byte offset of each state, and its length in f32 values.
    states: Vec<(usize, usize)>,
    n_bytes: usize,
    every: usize,
}

/// The pooled keys of a layer.
#[derive(Debug)]
pub(crate) struct PooledLayer {
    pub(crate) tensors: KvLayer,
    pub(crate) group: usize,
    /// Tokens per key.
    pub(crate) stride: usize,
    /// Whether they are those of the index alone.
    pub(crate) of_index: bool,
}

/// Layers that share blocks.
#[derive(Debug)]
pub(crate) struct LayerGroup {
    /// Tokens per row of a tensor: 1, or those of a pooled key.
    stride: usize,
    /// Sliding window: the youngest tokens that a query of these layers attends to.
    window: Option<usize>,
    pub(crate) sizes: TensorSizes,
    /// One tensor of each kind: with and without a tail, with and without a sink. Together they
    /// write every location that the group writes.
    tensor_kinds: Vec<KvTensorSpec>,
}

impl Layout {
    /// Computes the layout of `plan` for a model of this shape.
    ///
    /// # Panics
    /// When `plan` was made for another shape.
    pub fn new(shape: &KvShape, plan: Plan) -> Self {
        assert_eq!(plan.types.len(), shape.layers.len(), "the plan belongs to another model");
        let mut groups: Vec<LayerGroup> = Vec::new();
        let (mut layers, mut group_of, mut all_pooled) = (Vec::new(), Vec::new(), Vec::new());
        for (of, layer) in shape.layers.iter().enumerate() {
            let group = LayerGroup::among(&mut groups, layer.window, 1);
            let tensors = |side| {
                let spec = |head| plan.kv_tensor(shape, of, head, side);
                let heads = if layer.sides().contains(&side) { layer.n_kv_heads } else { 0 };
                (0..heads).map(spec).collect::<Vec<_>>()
            };
            let (k, v) = (tensors(Side::K), tensors(Side::V));
            let LayerGroup { sizes, tensor_kinds: kinds, .. } = &mut groups[group];
            let (index, of_pooled) = match (plan.index_tensor(shape, of), layer.pool) {
                (index, None) => (index, None),
                (index, Some(_)) => (None, index),
            };
            for spec in k.iter().chain(&v).chain(&index) {
                let of = |spec: &KvTensorSpec| (spec.tail_tiles > 0, spec.sink_tiles);
                if !kinds.iter().any(|kind| of(kind) == of(spec)) {
                    kinds.push(*spec);
                }
            }
            let mut tensors = KvLayer::new(k, v, layer.window, sizes);
            if let Some(keys) = index {
                tensors = tensors.with_index(keys, sizes);
            }
            // The keys of an index that selects blocks of tokens are the only pooled ones.
            let (keys, of_pooled) = match plan.pooled_tensor(shape, of) {
                Some(keys) => (Some(keys), of_pooled),
                None => (of_pooled, None),
            };
            all_pooled.push(keys.zip(layer.pool).map(|(keys, KeyPool { stride, of_index })| {
                let group = LayerGroup::among(&mut groups, None, stride);
                let LayerGroup { sizes, tensor_kinds, .. } = &mut groups[group];
                // All of them are without a tail and a sink.
                *tensor_kinds = vec![keys];
                let mut tensors = KvLayer::new([keys], [], None, sizes);
                if let Some(keys) = of_pooled {
                    tensors = tensors.with_index(keys, sizes);
                }
                PooledLayer { tensors, group, stride, of_index }
            }));
            let scales_values =
                plan.channel_scales.as_ref().is_some_and(|scales| scales.layers[of].scales_values());
            layers.push(KvLayer { scales_values, ..tensors });
            group_of.push(group);
        }
        let tailed =
            groups.iter().flat_map(|group| &group.tensor_kinds).find(|kind| kind.tail_tiles > 0).copied();
        let states = (!shape.states.is_empty()).then(|| StateLayout::new(shape));
        Self { plan, layers, group_of, groups, pooled: all_pooled, tailed, states }
    }

    /// Returns the plan: what is stored, and in which types.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the KV tensors of a layer.
    pub fn layer(&self, index: usize) -> &KvLayer {
        &self.layers[index]
    }

    /// Returns the pooled keys of a layer.
    pub(crate) fn pooled(&self, layer: usize) -> Option<&PooledLayer> {
        self.pooled[layer].as_ref()
    }

    /// Returns the bytes that a cache of `tokens` tokens allocates; saturates at `usize::MAX`.
    pub fn n_bytes(&self, tokens: usize) -> usize {
        let of_group = |group: &LayerGroup| {
            // A tail longer than a sliding window holds tokens that are in no block.
            let blocks = group.n_blocks(tokens, self.first_tail_tile(tokens));
            let blocks = blocks.saturating_sub(group.oldest_block(tokens));
            let TensorSizes { block, sink, tail } = group.sizes;
            let sixteen = if tokens > 0 { sink.saturating_add(tail) } else { 0 };
            let kept = self.states.as_ref().map_or(0, |states| group.n_kept_apart(tokens, states.every));
            blocks.saturating_add(kept).saturating_mul(block).saturating_add(sixteen)
        };
        // The current state, and one per snapshot.
        let of_states = |states: &StateLayout| tokens.div_ceil(states.every).saturating_mul(states.n_bytes);
        let of_states = self.states.as_ref().map_or(0, of_states);
        let of_balance =
            self.plan.channel_scales.as_ref().filter(|_| tokens > 0).map_or(0, |balance| balance.n_bytes());
        self.groups.iter().map(of_group).fold(of_states, usize::saturating_add).saturating_add(of_balance)
    }

    /// Returns the additional bytes of a checkpoint
    /// ([`Cache::set_checkpoint`](crate::Cache::set_checkpoint)) after more tokens follow, and of
    /// draft tokens ([`Cache::reserve_draft`](crate::Cache::reserve_draft)): a copy of the states
    /// for each, and with states the blocks of windows and one of pooled keys for the former.
    pub fn bytes_aside(&self) -> usize {
        let states = self.states.as_ref().map_or(0, |states| states.n_bytes().saturating_mul(2));
        let of_group = |group: &LayerGroup| {
            let window = group.window.filter(|_| self.states.is_some());
            // The blocks of a window, or one that is not complete.
            let blocks = match window.map(|window| window.div_ceil(TOKENS_PER_BLOCK) + 1) {
                None if group.is_pooled() => 1,
                blocks => blocks.unwrap_or(0),
            };
            blocks.saturating_mul(group.sizes.block).saturating_add(group.sizes.tail)
        };
        self.groups.iter().map(of_group).fold(states, usize::saturating_add)
    }

    /// Returns the tokens of an entry in the prefix cache: those of a block, or without attention
    /// those between two snapshots of the states.
    pub(crate) fn prefix_unit(&self) -> usize {
        let states = self.states.as_ref().filter(|_| self.groups.is_empty());
        states.map_or(TOKENS_PER_BLOCK, StateLayout::snapshot_interval)
    }

    /// Returns the layout of recurrent states, if any.
    pub(crate) fn states(&self) -> Option<&StateLayout> {
        self.states.as_ref()
    }

    /// Returns the longest length up to `n` to which truncation is exact, while tiles before
    /// `coded` are coded.
    pub(crate) fn exact_truncation(&self, n: usize, coded: usize) -> usize {
        self.tailed.map_or(n, |spec| spec.exact_truncation(n, coded))
    }

    /// Returns whether any tensor is coded and has a tail.
    pub(crate) fn has_tail(&self) -> bool {
        self.tailed.is_some()
    }

    /// Returns the number of coded tiles after `len` tokens.
    pub(crate) fn first_tail_tile(&self, len: usize) -> usize {
        self.tailed.map_or(0, |spec| spec.first_tail_tile(len))
    }

    pub(crate) fn groups(&self) -> &[LayerGroup] {
        &self.groups
    }

    pub(crate) fn group_of(&self, layer: usize) -> usize {
        self.group_of[layer]
    }

    /// Returns whether blocks alone represent the first `n` tokens, so that a sequence can start
    /// with them.
    pub(crate) fn is_attachable(&self, n: usize) -> bool {
        n.is_multiple_of(TOKENS_PER_BLOCK) && self.exact_truncation(n, n / TILE) == n && {
            let n_sink = self.tailed.map_or(0, |spec| spec.sink_tiles * TILE);
            n >= n_sink
        }
    }
}

impl StateLayout {
    /// Spaces snapshots so that each is no larger than the keys and values that stay in between, at
    /// one byte per value: a cache with snapshots is at most twice as large, for every model with
    /// attention to more than windows. Without it they are [`WITHOUT_ATTENTION`] apart.
    fn new(shape: &KvShape) -> Self {
        let mut n_bytes = 0;
        let mut put = |&n_values: &usize| {
            let offset = n_bytes;
            n_bytes += (n_values * size_of::<f32>()).next_multiple_of(STATE_ALIGN);
            (offset, n_values)
        };
        let states = shape.states.iter().map(&mut put).collect();
        let of_layers = shape.layers.iter().map(KvLayerShape::kept_and_windowed);
        let [per_token, windowed] =
            of_layers.fold([0; 2], |[a, b], [kept, windowed]| [a + kept, b + windowed]);
        let every = match per_token {
            0 => WITHOUT_ATTENTION,
            // It keeps the blocks of windows too.
            _ => {
                let n_intervals = (n_bytes + windowed).div_ceil(PREFIX_ALIGNMENT * per_token);
                n_intervals.max(1).next_power_of_two() * PREFIX_ALIGNMENT
            }
        };
        Self { states, n_bytes, every }
    }

    /// Returns the bytes of all states together.
    pub(crate) fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Returns the byte offset of the state of recurrent layer `index`, and its length in f32
    /// values.
    pub(crate) fn state(&self, index: usize) -> (usize, usize) {
        self.states[index]
    }

    /// Returns the tokens between snapshots; a multiple of [`PREFIX_ALIGNMENT`], where keys and
    /// values are in blocks alone.
    pub(crate) fn snapshot_interval(&self) -> usize {
        self.every
    }

    /// Returns the tokens from `len` to the next snapshot, at least one.
    pub(crate) fn tokens_to_snapshot(&self, len: usize) -> usize {
        self.every - len % self.every
    }
}

impl KvShape {
    /// Returns the bytes of a sequence's states, and the tokens between their snapshots; `None`
    /// without recurrent layers.
    pub fn state_snapshots(&self) -> Option<(usize, usize)> {
        let layout = (!self.states.is_empty()).then(|| StateLayout::new(self))?;
        Some((layout.n_bytes(), layout.snapshot_interval()))
    }
}

/// Returns the pooled keys that tokens complete, as rows of a batch from `first` on.
pub(crate) fn pooled_rows(stride: usize, tokens: TokenSpan, first: usize) -> TokenSpan {
    let completed = TokenPool::completed(stride, tokens);
    TokenSpan { first, n: completed.len(), start: completed.start, first_tail_tile: 0 }
}

/// Tokens between snapshots of models without attention: those of Mamba-2 with 2.7 billion weights
/// (168 MB each) then take 20 KB per token, an eighth of the keys and values of a model of this
/// size at one byte per value.
const WITHOUT_ATTENTION: usize = 16 * PREFIX_ALIGNMENT;

/// Alignment of states in bytes, the same as that of tiles.
const STATE_ALIGN: usize = 64;

impl LayerGroup {
    /// Returns the index of the group with this window and stride, adding it if there is none.
    fn among(groups: &mut Vec<Self>, window: Option<usize>, stride: usize) -> usize {
        let known = groups.iter().position(|group| (group.window, group.stride) == (window, stride));
        known.unwrap_or_else(|| {
            groups.push(Self { stride, window, sizes: TensorSizes::default(), tensor_kinds: Vec::new() });
            groups.len() - 1
        })
    }

    /// Returns whether its rows are pooled keys.
    pub(crate) fn is_pooled(&self) -> bool {
        self.stride > 1
    }

    /// Returns whether the last block after `len` tokens is a block of pooled keys that later
    /// tokens write.
    pub(crate) fn is_open(&self, len: usize) -> bool {
        self.is_pooled() && !(len / self.stride).is_multiple_of(TOKENS_PER_BLOCK)
    }

    /// Returns whether it has a sliding window.
    pub(crate) fn has_window(&self) -> bool {
        self.window.is_some()
    }

    /// Returns the blocks that a snapshot after `len` tokens keeps: those of a window, and a block
    /// of pooled keys that is not complete.
    pub(crate) fn kept_blocks(&self, len: usize) -> Range<usize> {
        match self.window {
            Some(_) => self.oldest_block(len)..len.div_ceil(TOKENS_PER_BLOCK),
            None if self.is_open(len) => {
                let block = len / self.stride / TOKENS_PER_BLOCK;
                block..block + 1
            }
            None => 0..0,
        }
    }

    /// Returns how many blocks snapshots, `every` tokens apart, hold beside those stored after
    /// `tokens`: released ones of windows, and copies of blocks that later tokens have written.
    fn n_kept_apart(&self, tokens: usize, every: usize) -> usize {
        if let Some(window) = self.window {
            let (step, released) = (every / TOKENS_PER_BLOCK, self.oldest_block(tokens));
            // Those of two snapshots may overlap.
            let of_each = (window - 1).div_ceil(TOKENS_PER_BLOCK).min(step);
            let next = (released / step + 1) * step;
            let is_taken = next <= tokens / TOKENS_PER_BLOCK;
            let of_next = if is_taken { (released + of_each).saturating_sub(next) } else { 0 };
            return released / step * of_each + of_next;
        }
        if !self.is_pooled() {
            return 0;
        }
        let mut n = tokens / every;
        while n > 0 && n * every / self.stride == tokens / self.stride {
            n -= 1;
        }
        // The keys of a block, in snapshots.
        let period = TOKENS_PER_BLOCK * self.stride;
        let n_open = |n: usize| (1..=n).filter(|n| self.is_open(n * every)).count();
        n / period * n_open(period) + n_open(n % period)
    }

    /// Returns the blocks that a prefix of `n` times 128 tokens fills, each with the index of the
    /// 128 tokens that completes it; for groups with a window those alone that a query reads.
    pub(crate) fn blocks_of_prefix(&self, n: usize) -> impl Iterator<Item = usize> + use<> {
        let (stride, first) = (self.stride, self.oldest_block(n * TOKENS_PER_BLOCK));
        (first..n / stride).map(move |block| (block + 1) * stride - 1)
    }

    /// Returns the block that is complete with the 128 tokens of index `index`.
    pub(crate) fn completed_block(&self, index: usize) -> Option<usize> {
        (index + 1).is_multiple_of(self.stride).then(|| (index + 1) / self.stride - 1)
    }

    /// Returns the number of blocks that `len` tokens extend into, while tiles before `coded` are
    /// coded.
    pub(crate) fn n_blocks(&self, len: usize, coded: usize) -> usize {
        let end = |kind: &KvTensorSpec| match kind.tail_tiles {
            0 => kind.main_end(len / self.stride),
            _ if coded <= kind.sink_tiles => 0,
            _ => coded * TILE,
        };
        self.tensor_kinds.iter().map(end).max().unwrap_or(0).div_ceil(TOKENS_PER_BLOCK)
    }

    /// Returns the first block that a query after `len` tokens reads.
    pub(crate) fn oldest_block(&self, len: usize) -> usize {
        self.window.map_or(0, |window| (len + 1).saturating_sub(window)) / TOKENS_PER_BLOCK
    }

    /// Returns the number of blocks in their final state, while tiles before `coded` are coded.
    pub(crate) fn complete_blocks(&self, len: usize, coded: usize) -> usize {
        let end = |kind: &KvTensorSpec| match kind.tail_tiles {
            0 => len,
            // The sink is complete as soon as any tile after it is coded.
            _ if coded <= kind.sink_tiles => 0,
            _ => len.min(coded * TILE),
        };
        self.tensor_kinds.iter().map(end).min().unwrap_or(0) / TOKENS_PER_BLOCK
    }

    /// Returns the first block that a step of `rows` writes; `None` when it writes none.
    pub(crate) fn first_block(&self, rows: TokenSpan) -> Option<usize> {
        let rows = if self.is_pooled() { pooled_rows(self.stride, rows, 0) } else { rows };
        let first = |kind: &KvTensorSpec| {
            kind.writes(rows).find_map(|write| match write.place {
                kvant_backend::TileLocation::Main(tile) => Some(tile * TILE / TOKENS_PER_BLOCK),
                _ => None,
            })
        };
        self.tensor_kinds.iter().filter_map(first).min()
    }

    /// Returns whether a step of `rows` writes to the sink.
    pub(crate) fn writes_sink(&self, rows: TokenSpan) -> bool {
        self.tensor_kinds.iter().any(|kind| rows.start < kind.sink_tiles * TILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(window: Option<usize>, stride: usize) -> LayerGroup {
        LayerGroup { stride, window, sizes: TensorSizes::default(), tensor_kinds: Vec::new() }
    }

    #[test]
    fn blocks_of_snapshots_are_counted_once() {
        for (window, every) in [(1, 512), (12, 512), (128, 512), (129, 1024), (600, 512), (5000, 1024)] {
            let of = group(Some(window), 1);
            for tokens in (0..9000).step_by(37).chain([512, 639, 640, 641, 1024, 5120]) {
                let snapshots = (1..=tokens / every).map(|n| of.kept_blocks(n * every));
                let mut apart: Vec<usize> = snapshots.flatten().collect();
                apart.retain(|&block| block < of.oldest_block(tokens));
                apart.sort_unstable();
                apart.dedup();
                assert_eq!(of.n_kept_apart(tokens, every), apart.len(), "{window}, {every}, {tokens}");
            }
        }
        for (stride, every) in [(4, 512), (3, 512), (128, 1024), (4096, 512), (700, 512)] {
            let of = group(None, stride);
            for tokens in (0..400_000).step_by(4099).chain([512, 1023, 1024, 131_072]) {
                let is_copied = |at: &usize| of.is_open(*at) && at / stride < tokens / stride;
                let want = (1..=tokens / every).map(|n| n * every).filter(is_copied).count();
                assert_eq!(of.n_kept_apart(tokens, every), want, "{stride}, {every}, {tokens}");
            }
        }
        let all = [group(None, 1), group(Some(128), 1), group(None, 128)];
        assert_eq!(all.map(|of| of.n_kept_apart(usize::MAX / 2, 1024) > 0), [false, true, true]);
    }
}
