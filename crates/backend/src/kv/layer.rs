//! Offsets of a layer's KV tensors in the memory of its group.

use kvant_codec::TileLayout;

use super::{KvTensorSpec, TILES_PER_BLOCK, TileLocation};

/// A KV tensor with the byte offsets of its tiles in each allocation.
#[derive(Debug, Clone, PartialEq)]
pub struct KvTensor {
    /// Storage type and f16 tokens.
    pub spec: KvTensorSpec,
    /// Offset of its eight tiles in a block.
    pub main: usize,
    /// Offset of the centre of these tiles, if it has one.
    pub centre: usize,
    /// Offset of its tiles in the sink.
    pub sink: usize,
    /// Offset of its ring in the tail.
    pub tail: usize,
    /// Offset of its tiles in the step tiles, per tile of the step.
    pub step_tile_offset: usize,
}

impl KvTensor {
    /// Returns the layout of the tile at `place`, and its offset in its allocation.
    pub fn locate(&self, place: TileLocation) -> (TileLayout, usize) {
        let f16 = |start: usize, tile: usize| {
            let layout = self.spec.f16_layout();
            (layout, start + tile * layout.bytes())
        };
        match place {
            TileLocation::Sink(tile) => f16(self.sink, tile),
            TileLocation::Tail(tile) => f16(self.tail, tile),
            TileLocation::Main(tile) => {
                let layout = self.spec.main_layout();
                (layout, self.main + tile % TILES_PER_BLOCK * layout.bytes())
            }
        }
    }
}

/// The KV tensors of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct KvLayer {
    /// Keys, `[n_kv_heads]`.
    pub k: Vec<KvTensor>,
    /// Values, `[n_kv_heads]`; empty where key tensors are [shared](KvTensorSpec::new_shared_kv)
    /// with values (MLA).
    pub v: Vec<KvTensor>,
    /// Sliding window: the number of youngest tokens that a query attends to, itself included;
    /// `None` for all.
    pub window: Option<usize>,
    /// Whether channel scales apply to values too, not to keys alone.
    pub scales_values: bool,
    /// Bytes of the step tiles per tile of the step.
    pub step_tile_bytes: usize,
    /// The keys of an index that selects the tokens of a query
    /// ([`Backend::select_tokens`](crate::Backend::select_tokens)), as a layer in the same memory.
    pub index: Option<Box<KvLayer>>,
}

/// Sizes of the allocations of a group of layers, in bytes, accumulated while KV tensors are added.
/// Sums saturate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TensorSizes {
    /// Bytes of a block.
    pub block: usize,
    /// Bytes of the sink.
    pub sink: usize,
    /// Bytes of the tail.
    pub tail: usize,
}

/// Alignment of tensors, in bytes.
const ALIGN: usize = 64;

impl KvLayer {
    /// Lays out a layer with KV tensors `k` and `v` behind those that `sizes` counts. Channel
    /// scales apply to both.
    pub fn new(
        k: impl IntoIterator<Item = KvTensorSpec>,
        v: impl IntoIterator<Item = KvTensorSpec>,
        window: Option<usize>,
        sizes: &mut TensorSizes,
    ) -> Self {
        let mut step_tile_bytes = 0;
        let mut put = |spec: KvTensorSpec| {
            let f16_bytes = spec.f16_layout().bytes();
            let TensorSizes { block: main, sink, tail } = *sizes;
            let centre = main.saturating_add(TILES_PER_BLOCK * spec.main_layout().bytes());
            let tensor = KvTensor { spec, main, centre, sink, tail, step_tile_offset: step_tile_bytes };
            sizes.block = centre.saturating_add(spec.centre_bytes().next_multiple_of(ALIGN));
            sizes.sink = sizes.sink.saturating_add(spec.sink_tiles.saturating_mul(f16_bytes));
            sizes.tail = sizes.tail.saturating_add(spec.tail_tiles.saturating_mul(f16_bytes));
            step_tile_bytes += if spec.tail_tiles > 0 { f16_bytes } else { 0 };
            tensor
        };
        let k = k.into_iter().map(&mut put).collect();
        let v = v.into_iter().map(&mut put).collect();
        Self { k, v, window, scales_values: true, step_tile_bytes, index: None }
    }

    /// Returns the layer with the keys of an index, laid out behind the tensors that `sizes`
    /// counts.
    #[must_use]
    pub fn with_index(self, keys: KvTensorSpec, sizes: &mut TensorSizes) -> Self {
        Self { index: Some(Box::new(Self::new([keys], [], self.window, sizes))), ..self }
    }

    /// Returns the KV tensor that holds the values of KV head `head`.
    pub fn values(&self, head: usize) -> &KvTensor {
        self.v.get(head).unwrap_or(&self.k[head])
    }

    /// Returns whether keys and values share one KV tensor.
    pub fn is_shared_kv(&self) -> bool {
        self.k.first().is_some_and(|tensor| tensor.spec.shared_kv.is_some())
    }

    /// Returns every KV tensor, keys first.
    pub fn tensors(&self) -> impl Iterator<Item = &KvTensor> {
        self.k.iter().chain(&self.v)
    }

    /// Returns the oldest token that a query at `position` attends to.
    pub fn window_start(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Returns the first tile that queries in tile `tile` of KV head `head` read in f16, of either
    /// side.
    pub fn head_f16_window_start(&self, head: usize, tile: usize) -> usize {
        self.k[head].spec.f16_window_start(tile).min(self.values(head).spec.f16_window_start(tile))
    }
}
