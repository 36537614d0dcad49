//! Where the streams of a layer lie in the memory of its group.

use kvant_codec::TileLayout;

use super::{Place, StreamSpec, TILES_PER_BLOCK};

/// A stream, and where its tiles begin in each allocation, in bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct KvStream {
    /// What it stores.
    pub spec: StreamSpec,
    /// Its eight tiles in a block.
    pub main: usize,
    /// The centre of these, where it has one.
    pub centre: usize,
    /// Its tiles in the sink.
    pub sink: usize,
    /// Its ring in the tail.
    pub tail: usize,
    /// Its tiles in the band, times the number of tiles that the band has.
    pub band: usize,
}

impl KvStream {
    /// Layout of the tile at `place`, and where it starts in its allocation.
    pub fn locate(&self, place: Place) -> (TileLayout, usize) {
        let f16 = |start: usize, tile: usize| {
            let layout = self.spec.f16_layout();
            (layout, start + tile * layout.bytes())
        };
        match place {
            Place::Sink(tile) => f16(self.sink, tile),
            Place::Tail(tile) => f16(self.tail, tile),
            Place::Main(tile) => {
                let layout = self.spec.main_layout();
                (layout, self.main + tile % TILES_PER_BLOCK * layout.bytes())
            }
        }
    }
}

/// The streams of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct KvLayer {
    /// Keys, `[n_kv_heads]`.
    pub k: Vec<KvStream>,
    /// Values, `[n_kv_heads]`; none where the streams of keys are [joint](StreamSpec::joint).
    pub v: Vec<KvStream>,
    /// The youngest tokens that a query sees, itself included; all of them when `None`.
    pub window: Option<usize>,
    /// Whether a balance has factors on values too, not on keys alone.
    pub scales_values: bool,
    /// Bytes of the band for each of its tiles.
    pub band_bytes: usize,
}

/// Sizes of the allocations of a group of layers, in bytes, while streams are added one after the other. Sums saturate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamSizes {
    /// A block.
    pub block: usize,
    /// The sink.
    pub sink: usize,
    /// The tail.
    pub tail: usize,
}

/// Tiles begin at multiples of so many bytes.
const ALIGN: usize = 64;

impl KvLayer {
    /// A layer with streams of `k` and `v`, placed behind those that `sizes` counts. A balance scales both.
    pub fn new(
        k: impl IntoIterator<Item = StreamSpec>,
        v: impl IntoIterator<Item = StreamSpec>,
        window: Option<usize>,
        sizes: &mut StreamSizes,
    ) -> Self {
        let mut band_bytes = 0;
        let mut put = |spec: StreamSpec| {
            let f16_bytes = spec.f16_layout().bytes();
            let StreamSizes { block: main, sink, tail } = *sizes;
            let centre = main.saturating_add(TILES_PER_BLOCK * spec.main_layout().bytes());
            let stream = KvStream { spec, main, centre, sink, tail, band: band_bytes };
            sizes.block = centre.saturating_add(spec.centre_bytes().next_multiple_of(ALIGN));
            sizes.sink = sizes.sink.saturating_add(spec.sink_tiles.saturating_mul(f16_bytes));
            sizes.tail = sizes.tail.saturating_add(spec.tail_tiles.saturating_mul(f16_bytes));
            band_bytes += if spec.tail_tiles > 0 { f16_bytes } else { 0 };
            stream
        };
        let k = k.into_iter().map(&mut put).collect();
        let v = v.into_iter().map(&mut put).collect();
        Self { k, v, window, scales_values: true, band_bytes }
    }

    /// The stream that values of KV head `head` are read from.
    pub fn values(&self, head: usize) -> &KvStream {
        self.v.get(head).unwrap_or(&self.k[head])
    }

    /// Whether keys and values are one stream.
    pub fn is_joint(&self) -> bool {
        self.k.first().is_some_and(|stream| stream.spec.joint.is_some())
    }

    /// Every stream, keys first.
    pub fn streams(&self) -> impl Iterator<Item = &KvStream> {
        self.k.iter().chain(&self.v)
    }

    /// The oldest token that a query at `position` sees.
    pub fn oldest(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The first tile in 16 bit that queries in tile `tile` of KV head `head` see, of either side.
    pub fn head_window(&self, head: usize, tile: usize) -> usize {
        self.k[head].spec.window(tile).min(self.values(head).spec.window(tile))
    }
}
