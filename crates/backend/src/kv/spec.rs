//! What a stream stores, and which of its tokens are in 16 bit.

use kvant_codec::DType;
use kvant_codec::tile::{Side, TILE, TileLayout, padded_dim, slices};
use kvant_codec::turbo;

/// Tokens after which the 16-bit window begins anew: what lies before a multiple of it is seen in codes by all that comes
/// after.
pub const BORDER: usize = 512;

/// Tiles in the tail of a coded stream. With two, a token stays in 16 bit until at least 16 younger ones are there: with
/// one, every sixteenth step would see all but its own token encoded.
const TAIL_TILES: usize = 2;

/// What one stream stores and how much of it stays in 16 bit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamSpec {
    /// Type of the main tiles.
    pub dtype: DType,
    /// Keys or values: how its tiles are laid out.
    pub side: Side,
    /// True size of a head.
    pub head_dim: usize,
    /// Of a *joint* stream, which holds keys and values in one: how many of the first values of a key are its value. Its tiles are
    /// laid out as those of values.
    pub joint: Option<usize>,
    /// First tokens kept in f16, in tiles.
    pub sink_tiles: usize,
    /// Youngest tokens kept in f16, in tiles; 0 switches the tail off.
    pub tail_tiles: usize,
    /// Factor on every encoded vector (1 for none); tokens in 16 bit are not scaled.
    pub alpha: f32,
    /// Whether rows are rotated before they are stored, in all parts.
    pub rotates: bool,
    /// Whether codes are of what is left of a row when the *centre* of its block is taken away: the mean of its
    /// [first tokens](StreamSpec::centre_rows), in f16, which lies in the block beside them. Keys drift slowly around an offset
    /// that is half of their energy; a score misses nothing but `q . centre`, one number for each query and block.
    pub centres: bool,
}

/// Values that every kernel reads together.
const LANES: usize = 16;

const KV_ONLY: &str = "a stream stores KV types only";

/// Which part of a stream a tile lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Tile of the sink.
    Sink(usize),
    /// Tile of the blocks, counted from token 0.
    Main(usize),
    /// Tile of the tail's ring.
    Tail(usize),
}

impl StreamSpec {
    /// A stream with no sink, no scaling, and the tail, the rotation and the centres that its type and side have by default.
    ///
    /// # Panics
    /// When `dtype` is not a KV type; a plan checks that before it makes streams.
    pub fn new(dtype: DType, side: Side, head_dim: usize) -> Self {
        assert!(dtype.is_kv(), "{KV_ONLY}");
        let tail_tiles = if dtype.code().is_some() { TAIL_TILES } else { 0 };
        // Codes of every kind lose less of rows that have been rotated.
        let rotates = dtype.code().is_some();
        let centres = rotates && side == Side::K;
        Self { dtype, side, head_dim, joint: None, sink_tiles: 0, tail_tiles, alpha: 1.0, rotates, centres }
    }

    /// A joint stream: keys of `head_dim` values, the first `v_head_dim` of which are the value. As with keys alone, codes are of what
    /// centres leave.
    ///
    /// # Panics
    /// As [`StreamSpec::new`], and when the value is longer than the key.
    pub fn joint(dtype: DType, head_dim: usize, v_head_dim: usize) -> Self {
        assert!(v_head_dim <= head_dim, "a value of {v_head_dim} in a key of {head_dim}");
        let of_values = Self::new(dtype, Side::V, head_dim);
        Self { joint: Some(v_head_dim), centres: of_values.rotates, ..of_values }
    }

    /// True size of a value that is read from it; of a stream of keys, that of a key.
    pub fn v_head_dim(&self) -> usize {
        self.joint.unwrap_or(self.head_dim)
    }

    /// The first so many of the values stored for a token make its value: all of them, but where the rest of a joint key lies in
    /// slices of its own.
    pub fn value_dim(&self) -> usize {
        let Some(v_head_dim) = self.joint else { return self.dim() };
        if !self.rotates {
            return v_head_dim.next_multiple_of(LANES);
        }
        let ends = slices(self.dim(), turbo::LEN).map(|slice| slice.end);
        ends.into_iter().find(|&end| end >= v_head_dim).unwrap_or(self.dim())
    }

    /// Values per token as stored: the head padded for the stream's type.
    pub fn dim(&self) -> usize {
        padded_dim(self.dtype, self.head_dim).expect(KV_ONLY)
    }

    /// Layout of a main tile.
    pub fn main_layout(&self) -> TileLayout {
        TileLayout::new(self.dtype, self.side, self.dim()).expect(KV_ONLY)
    }

    /// Layout of a sink, tail or band tile.
    pub fn f16_layout(&self) -> TileLayout {
        TileLayout::new(DType::F16, self.side, self.dim()).expect(KV_ONLY)
    }

    /// Bytes of a block's centre, `[dim]` in f16; none where there is none.
    pub fn centre_bytes(&self) -> usize {
        if self.centres { 2 * self.dim() } else { 0 }
    }

    /// The first tile that a query in tile `tile` sees in 16 bit, the sink aside; it sees codes of those before. One beyond
    /// its own where there is no tail.
    pub fn window(&self, tile: usize) -> usize {
        let begins = match self.tail_tiles {
            0 => tile + 1,
            // The tail that every coded stream has; a policy that keeps more keeps it over borders too.
            TAIL_TILES => (tile + 1).saturating_sub(TAIL_TILES).max(tile / BORDER_TILES * BORDER_TILES),
            tiles => (tile + 1).saturating_sub(tiles),
        };
        begins.max(self.sink_tiles)
    }

    /// Tiles before this one are in the sink or the blocks once `len` tokens have been fed, later ones in the tail.
    pub fn coded_tiles(&self, len: usize) -> usize {
        match len.div_ceil(TILE) {
            0 => self.sink_tiles,
            tiles => self.window(tiles - 1),
        }
    }

    /// Tokens that the blocks reach up to when `len` tokens are stored.
    pub fn main_end(&self, len: usize) -> usize {
        let end = if self.tail_tiles == 0 { len } else { self.coded_tiles(len) * TILE };
        if end <= self.sink_tiles * TILE { 0 } else { end }
    }

    /// Where tile `tile` lies while those before `coded` are in the sink or the blocks.
    pub fn place(&self, tile: usize, coded: usize) -> Place {
        if tile < self.sink_tiles {
            Place::Sink(tile)
        } else if self.tail_tiles == 0 || tile < coded {
            Place::Main(tile)
        } else {
            Place::Tail(tile % self.tail_tiles)
        }
    }

    /// The longest cut to at most `n` tokens that can be gone on from as if nothing more had ever been fed, while tiles
    /// before `coded` are coded: whatever the next query sees in 16 bit is still in 16 bit.
    pub fn exact_cut(&self, n: usize, coded: usize) -> usize {
        let is_exact =
            |n: usize| self.tail_tiles == 0 || self.window(n / TILE) >= coded.min(n.div_ceil(TILE));
        let border = n / BORDER * BORDER;
        [n, border].into_iter().find(|&n| is_exact(n)).unwrap_or(0)
    }
}

const BORDER_TILES: usize = BORDER / TILE;
