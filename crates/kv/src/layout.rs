//! How the streams of all layers lie in memory: worked out once for a plan, shared by the caches that follow it.

use kvant_backend::{BORDER, KvLayer, Rows, StreamSizes, StreamSpec, TOKENS_PER_BLOCK};
use kvant_codec::tile::{Side, TILE};

use crate::{KvLayerShape, KvShape, Plan};

/// A plan, and where its streams lie.
///
/// Layers with the same window form a group, whose streams share blocks: a windowed group lets go of blocks that no query
/// can see, while the others keep theirs.
#[derive(Debug)]
pub struct Layout {
    plan: Plan,
    layers: Vec<KvLayer>,
    /// The group of each layer.
    group_of: Vec<usize>,
    groups: Vec<Group>,
    /// What decides which tokens are in 16 bit: any stream with a tail, as all have the same.
    tailed: Option<StreamSpec>,
    states: Option<StateLayout>,
}

/// How the states of recurrent layers lie in memory, and when they are remembered.
#[derive(Debug)]
pub(crate) struct StateLayout {
    /// Where each state begins, in bytes, and its length in f32 values.
    states: Vec<(usize, usize)>,
    n_bytes: usize,
    every: usize,
}

/// Layers that share blocks.
#[derive(Debug)]
pub(crate) struct Group {
    /// The youngest tokens that a query of these layers sees.
    window: Option<usize>,
    pub(crate) sizes: StreamSizes,
    /// One stream of each kind: with a tail and without, with a sink and without. What they write, all of the group write.
    kinds: Vec<StreamSpec>,
}

impl Layout {
    /// The layout of `plan` for a model of this shape.
    ///
    /// # Panics
    /// When `plan` was made for another shape.
    pub fn new(shape: &KvShape, plan: Plan) -> Self {
        assert_eq!(plan.types.len(), shape.layers.len(), "the plan belongs to another model");
        let mut groups: Vec<Group> = Vec::new();
        let (mut layers, mut group_of) = (Vec::new(), Vec::new());
        for (index, layer) in shape.layers.iter().enumerate() {
            let known = groups.iter().position(|group| group.window == layer.window);
            let group = known.unwrap_or_else(|| {
                groups.push(Group { window: layer.window, sizes: StreamSizes::default(), kinds: Vec::new() });
                groups.len() - 1
            });
            let streams = |side| {
                let spec = |head| plan.stream(shape, index, head, side);
                let heads = if layer.sides().contains(&side) { layer.n_kv_heads } else { 0 };
                (0..heads).map(spec).collect::<Vec<_>>()
            };
            let (k, v) = (streams(Side::K), streams(Side::V));
            let Group { sizes, kinds, .. } = &mut groups[group];
            for spec in k.iter().chain(&v) {
                let of = |spec: &StreamSpec| (spec.tail_tiles > 0, spec.sink_tiles);
                if !kinds.iter().any(|kind| of(kind) == of(spec)) {
                    kinds.push(*spec);
                }
            }
            let streams = KvLayer::new(k, v, layer.window, sizes);
            let scales_values = plan.balance.as_ref().is_some_and(|of| of.layers[index].scales_values());
            layers.push(KvLayer { scales_values, ..streams });
            group_of.push(group);
        }
        let tailed = groups.iter().flat_map(|group| &group.kinds).find(|kind| kind.tail_tiles > 0).copied();
        let states = (!shape.states.is_empty()).then(|| StateLayout::new(shape));
        Self { plan, layers, group_of, groups, tailed, states }
    }

    /// What is stored, and how.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The streams of a layer.
    pub fn layer(&self, index: usize) -> &KvLayer {
        &self.layers[index]
    }

    /// Bytes that a cache of `tokens` tokens allocates; `usize::MAX` when they are more than that.
    pub fn n_bytes(&self, tokens: usize) -> usize {
        let of_group = |group: &Group| {
            // A tail longer than a window holds what no block does.
            let blocks = group.n_blocks(tokens, self.coded_tiles(tokens));
            let blocks = blocks.saturating_sub(group.oldest_block(tokens));
            let StreamSizes { block, sink, tail } = group.sizes;
            let sixteen = if tokens > 0 { sink.saturating_add(tail) } else { 0 };
            blocks.saturating_mul(block).saturating_add(sixteen)
        };
        // One that changes, and one after each place that is remembered.
        let of_states = |states: &StateLayout| tokens.div_ceil(states.every).saturating_mul(states.n_bytes);
        let of_states = self.states.as_ref().map_or(0, of_states);
        let of_balance =
            self.plan.balance.as_ref().filter(|_| tokens > 0).map_or(0, |balance| balance.n_bytes());
        self.groups.iter().map(of_group).fold(of_states, usize::saturating_add).saturating_add(of_balance)
    }

    /// Bytes that a place which is remembered ([`Cache::mark`](crate::Cache::mark)) takes once more tokens have come, and tokens on trial
    /// ([`Cache::try_on`](crate::Cache::try_on)): a copy of the states for either.
    pub fn bytes_aside(&self) -> usize {
        let states = self.states.as_ref().map_or(0, |states| states.n_bytes().saturating_mul(2));
        self.groups.iter().map(|group| group.sizes.tail).fold(states, usize::saturating_add)
    }

    /// How the states of recurrent layers lie in memory, where there are any.
    pub(crate) fn states(&self) -> Option<&StateLayout> {
        self.states.as_ref()
    }

    /// The longest cut to at most `n` tokens that can be gone on from as if no more had ever been fed, while tiles before
    /// `coded` are coded.
    pub(crate) fn exact_cut(&self, n: usize, coded: usize) -> usize {
        self.tailed.map_or(n, |spec| spec.exact_cut(n, coded))
    }

    /// Whether anything is coded, and waits for that in a tail.
    pub(crate) fn is_tailed(&self) -> bool {
        self.tailed.is_some()
    }

    /// Tiles that are coded once `len` tokens have been fed.
    pub(crate) fn coded_tiles(&self, len: usize) -> usize {
        self.tailed.map_or(0, |spec| spec.coded_tiles(len))
    }

    pub(crate) fn groups(&self) -> &[Group] {
        &self.groups
    }

    pub(crate) fn group_of(&self, layer: usize) -> usize {
        self.group_of[layer]
    }

    /// Whether blocks of the first `n` tokens say all of them: a sequence can begin with them.
    pub(crate) fn is_attachable(&self, n: usize) -> bool {
        n.is_multiple_of(TOKENS_PER_BLOCK) && self.exact_cut(n, n / TILE) == n && {
            let n_sink = self.tailed.map_or(0, |spec| spec.sink_tiles * TILE);
            n >= n_sink
        }
    }
}

impl StateLayout {
    /// Snapshots are as far apart as makes them no larger than the keys and values between them, one byte per value: with
    /// them, a cache is at most twice as large, whatever the model.
    fn new(shape: &KvShape) -> Self {
        let mut n_bytes = 0;
        let mut put = |&n_values: &usize| {
            let offset = n_bytes;
            n_bytes += (n_values * size_of::<f32>()).next_multiple_of(STATE_ALIGN);
            (offset, n_values)
        };
        let states = shape.states.iter().map(&mut put).collect();
        let per_token: usize = shape.layers.iter().map(KvLayerShape::values_per_token).sum();
        let borders = n_bytes.div_ceil(BORDER * per_token.max(1)).max(1);
        Self { states, n_bytes, every: borders.next_power_of_two() * BORDER }
    }

    /// Bytes of all states together.
    pub(crate) fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Where the state of recurrent layer `index` begins, in bytes, and its length in f32 values.
    pub(crate) fn state(&self, index: usize) -> (usize, usize) {
        self.states[index]
    }

    /// Tokens from one snapshot to the next; a multiple of [`BORDER`], where the keys and values are in blocks alone.
    pub(crate) fn every(&self) -> usize {
        self.every
    }

    /// Tokens from `len` on to the next snapshot, at least one.
    pub(crate) fn until_snapshot(&self, len: usize) -> usize {
        self.every - len % self.every
    }
}

impl KvShape {
    /// Bytes of the states of a sequence, and tokens from one copy of them that is kept to the next; `None` where there are none.
    pub fn states_kept(&self) -> Option<(usize, usize)> {
        let layout = (!self.states.is_empty()).then(|| StateLayout::new(self))?;
        Some((layout.n_bytes(), layout.every()))
    }
}

/// States begin at multiples of so many bytes, as tiles do.
const STATE_ALIGN: usize = 64;

impl Group {
    /// Blocks that `len` tokens reach into, while tiles before `coded` are coded.
    pub(crate) fn n_blocks(&self, len: usize, coded: usize) -> usize {
        let end = |kind: &StreamSpec| match kind.tail_tiles {
            0 => kind.main_end(len),
            _ if coded <= kind.sink_tiles => 0,
            _ => coded * TILE,
        };
        self.kinds.iter().map(end).max().unwrap_or(0).div_ceil(TOKENS_PER_BLOCK)
    }

    /// The first block that a query after `len` tokens may see.
    pub(crate) fn oldest_block(&self, len: usize) -> usize {
        self.window.map_or(0, |window| (len + 1).saturating_sub(window)) / TOKENS_PER_BLOCK
    }

    /// Tokens whose block holds everything that queries may ever see of it, while tiles before `coded` are coded.
    pub(crate) fn complete_blocks(&self, len: usize, coded: usize) -> usize {
        let end = |kind: &StreamSpec| match kind.tail_tiles {
            0 => len,
            // The sink is whole as soon as anything after it is coded.
            _ if coded <= kind.sink_tiles => 0,
            _ => len.min(coded * TILE),
        };
        self.kinds.iter().map(end).min().unwrap_or(0) / TOKENS_PER_BLOCK
    }

    /// The first block that a step of `rows` writes; `None` when it writes none.
    pub(crate) fn first_block(&self, rows: Rows) -> Option<usize> {
        let first = |kind: &StreamSpec| {
            kind.writes(rows).find_map(|write| match write.place {
                kvant_backend::Place::Main(tile) => Some(tile * TILE / TOKENS_PER_BLOCK),
                _ => None,
            })
        };
        self.kinds.iter().filter_map(first).min()
    }

    /// Whether a step of `rows` writes to the sink.
    pub(crate) fn writes_sink(&self, rows: Rows) -> bool {
        self.kinds.iter().any(|kind| rows.start < kind.sink_tiles * TILE)
    }
}
