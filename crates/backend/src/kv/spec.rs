//! Specification of a KV tensor: its storage type, and which of its tokens stay in f16.

use kvant_codec::DType;
use kvant_codec::tile::{Side, TILE, TileLayout, padded_dim, slices};
use kvant_codec::turbo;

/// Prefix alignment in tokens: the default f16 window restarts at its multiples, so that later
/// queries read all tokens before one as codes.
pub const PREFIX_ALIGNMENT: usize = 512;

/// Tiles in the tail of a coded tensor. With two, a token stays in f16 until at least 16 younger
/// ones follow: with one, every sixteenth step would read all but its own token as codes.
const TAIL_TILES: usize = 2;

/// Storage type of one KV tensor, and its f16 tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvTensorSpec {
    /// Type of the main tiles.
    pub dtype: DType,
    /// Keys or values: selects the tile layout.
    pub side: Side,
    /// True (unpadded) head dimension.
    pub head_dim: usize,
    /// For a shared-KV tensor (MLA), which holds keys and values in one: the number of leading
    /// values of a key that form its value. Its tiles have the layout of values.
    pub shared_kv: Option<usize>,
    /// Tiles of the sink: first tokens in f16.
    pub sink_tiles: usize,
    /// Tiles of the tail: youngest tokens in f16; 0 switches the tail off.
    pub tail_tiles: usize,
    /// Factor on every encoded vector (1 for none); f16 tokens are not scaled.
    pub alpha: f32,
    /// Whether rows are rotated before they are stored, in all tiles.
    pub rotates: bool,
    /// Whether the *centre* of a block is subtracted from its rows before coding: the mean of its
    /// [first tokens](KvTensorSpec::centre_rows), in f16, stored in the block. Keys drift slowly
    /// around an offset that is half of their energy; a score needs only `q . centre` in addition,
    /// one number for each query and block.
    pub centres: bool,
}

/// Values that every kernel reads together.
const LANES: usize = 16;

const KV_ONLY: &str = "a tensor stores KV types only";

/// Storage location of a tile of a KV tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TileLocation {
    /// Tile of the sink.
    Sink(usize),
    /// Tile of the blocks, counted from token 0.
    Main(usize),
    /// Tile of the tail's ring.
    Tail(usize),
}

impl KvTensorSpec {
    /// Specifies a KV tensor with no sink, no scaling, and the default tail, rotation and centres
    /// of its type and side.
    ///
    /// # Panics
    /// When `dtype` is not a KV type; a plan checks that before it builds specifications.
    pub fn new(dtype: DType, side: Side, head_dim: usize) -> Self {
        assert!(dtype.is_kv(), "{KV_ONLY}");
        let tail_tiles = if dtype.code().is_some() { TAIL_TILES } else { 0 };
        // Every coded type has less error on rotated rows.
        let rotates = dtype.code().is_some();
        let centres = rotates && side == Side::K;
        Self {
            dtype,
            side,
            head_dim,
            shared_kv: None,
            sink_tiles: 0,
            tail_tiles,
            alpha: 1.0,
            rotates,
            centres,
        }
    }

    /// Specifies a shared-KV tensor (MLA): keys of `head_dim` values, the first `v_head_dim` of
    /// which are the value. As with keys, centres are subtracted before coding.
    ///
    /// # Panics
    /// As [`KvTensorSpec::new`], and when the value is longer than the key.
    pub fn new_shared_kv(dtype: DType, head_dim: usize, v_head_dim: usize) -> Self {
        assert!(v_head_dim <= head_dim, "a value of {v_head_dim} in a key of {head_dim}");
        let of_values = Self::new(dtype, Side::V, head_dim);
        Self { shared_kv: Some(v_head_dim), centres: of_values.rotates, ..of_values }
    }

    /// Returns the true dimension of a value read from it; for a tensor of keys, the key dimension.
    pub fn v_head_dim(&self) -> usize {
        self.shared_kv.unwrap_or(self.head_dim)
    }

    /// Returns how many of the leading stored values of a token cover its value: all of them,
    /// except where the rest of a shared key occupies slices of its own.
    pub fn stored_value_dim(&self) -> usize {
        let Some(v_head_dim) = self.shared_kv else { return self.stored_dim() };
        if !self.rotates {
            return v_head_dim.next_multiple_of(LANES);
        }
        let ends = slices(self.stored_dim(), turbo::LEN).map(|slice| slice.end);
        ends.into_iter().find(|&end| end >= v_head_dim).unwrap_or(self.stored_dim())
    }

    /// Returns the values per token as stored: the head dimension padded for the tensor's type.
    #[inline]
    pub fn stored_dim(&self) -> usize {
        padded_dim(self.dtype, self.head_dim).expect(KV_ONLY)
    }

    /// Returns the layout of a main tile.
    #[inline]
    pub fn main_layout(&self) -> TileLayout {
        TileLayout::new(self.dtype, self.side, self.stored_dim()).expect(KV_ONLY)
    }

    /// Returns the layout of a sink, tail or step tile.
    pub fn f16_layout(&self) -> TileLayout {
        TileLayout::new(DType::F16, self.side, self.stored_dim()).expect(KV_ONLY)
    }

    /// Returns the bytes of a block's centre, `[dim]` in f16; 0 without centres.
    pub fn centre_bytes(&self) -> usize {
        if self.centres { 2 * self.stored_dim() } else { 0 }
    }

    /// Returns the first tile that a query in tile `tile` reads in f16, apart from the sink; it
    /// reads earlier tiles as codes. Without a tail this is one beyond its own tile.
    pub fn f16_window_start(&self, tile: usize) -> usize {
        let begins = match self.tail_tiles {
            0 => tile + 1,
            // The tail of every coded tensor; a policy with a longer tail extends it over prefix
            // boundaries too.
            TAIL_TILES => (tile + 1)
                .saturating_sub(TAIL_TILES)
                .max(tile / PREFIX_ALIGNMENT_TILES * PREFIX_ALIGNMENT_TILES),
            tiles => (tile + 1).saturating_sub(tiles),
        };
        begins.max(self.sink_tiles)
    }

    /// Returns the number of tiles in the sink and the blocks after `len` tokens; later tiles are
    /// in the tail.
    pub fn first_tail_tile(&self, len: usize) -> usize {
        match len.div_ceil(TILE) {
            0 => self.sink_tiles,
            tiles => self.f16_window_start(tiles - 1),
        }
    }

    /// Returns the number of tokens that the blocks cover when `len` tokens are stored.
    pub fn main_end(&self, len: usize) -> usize {
        let end = if self.tail_tiles == 0 { len } else { self.first_tail_tile(len) * TILE };
        if end <= self.sink_tiles * TILE { 0 } else { end }
    }

    /// Returns the location of tile `tile` while tiles before `coded` are in the sink or the
    /// blocks.
    pub fn location(&self, tile: usize, coded: usize) -> TileLocation {
        if tile < self.sink_tiles {
            TileLocation::Sink(tile)
        } else if self.tail_tiles == 0 || tile < coded {
            TileLocation::Main(tile)
        } else {
            TileLocation::Tail(tile % self.tail_tiles)
        }
    }

    /// Returns the longest length up to `n` to which the cache can be truncated exactly, while
    /// tiles before `coded` are coded: every tile that the next query reads in f16 is still in f16,
    /// so that the result equals a cache never fed further.
    pub fn exact_truncation(&self, n: usize, coded: usize) -> usize {
        let is_exact =
            |n: usize| self.tail_tiles == 0 || self.f16_window_start(n / TILE) >= coded.min(n.div_ceil(TILE));
        let border = n / PREFIX_ALIGNMENT * PREFIX_ALIGNMENT;
        [n, border].into_iter().find(|&n| is_exact(n)).unwrap_or(0)
    }
}

const PREFIX_ALIGNMENT_TILES: usize = PREFIX_ALIGNMENT / TILE;
