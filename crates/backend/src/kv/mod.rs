//! Where the keys and values of a sequence live, and what a query sees of them.
//!
//! One (layer, KV head, K or V) is a *stream*: a sequence of *tiles* of 16 tokens.
//!
//! ```text
//! token   0 ........ n_sink ............... main_end ........ len
//!         [ sink: f16 ][ main: the stream's type ][ tail: f16  ]
//!           tiles        tiles of blocks            ring of tiles
//! ```
//!
//! # What a query sees
//!
//! What a query at position p sees depends on p alone, however the tokens were fed: with T = p / 16 the tile of its own,
//! it sees in 16 bit the sink and the youngest tiles up to T, two of them unless a policy keeps more, and codes of all
//! others ([`StreamSpec::window`]). The window never reaches back over a multiple of [`BORDER`] tokens, so that there the
//! cache is codes alone: a prefix of that length can be given to another sequence as it is.
//!
//! Where values are the first part of their keys (latent attention), one stream is both: a *joint* one ([`StreamSpec::joint`]).
//!
//! A stream whose type is not coded (f32, f16, bf16), or whose tail is switched off, has no window: tokens are written to
//! their slot in the blocks at once.
//!
//! Rows are rounded to f16 first and coded from there, whether they waited in the tail or not. The f16 parts of a rotated
//! stream hold rotated values, so one query serves all parts.
//!
//! # Steps
//!
//! A step appends rows and attends for each of them. Where rows of one sequence lie in several tiles, the older of them see
//! in 16 bit what is no longer in the tail when the last row is written: the *band*, f16 tiles of the step that are lent to
//! the append and to the attention after it ([`KvPart::band_tiles`]).
//!
//! # Memory
//!
//! A *block* is the main tiles of 128 tokens of all streams of a group of layers, one allocation; sink and tail of those
//! streams are one more each. [`KvMemory`] holds them, [`KvStream`] says where in them a stream lies. What recurrent layers
//! keep is no stream: a state of fixed size that every row changes ([`StatePart`]).
//!
//! Everything here is arithmetic on token numbers; bytes are moved by the device.

mod balance;
mod check;
mod layer;
mod memory;
mod spec;
mod writes;

pub use balance::BalanceLayout;
pub use check::{check_append, check_attend};
pub use layer::{KvLayer, KvStream, StreamSizes};
pub use memory::{Held, KvMemory, KvPart, Pages, Rows, StatePart, TileRef};
pub use spec::{BORDER, Place, StreamSpec};
pub use writes::{TileRows, TileWrite, Writes};

use kvant_codec::tile::TILE;

/// Tokens in one block. Blocks of a shared prefix are shared; a block is copied before it is written.
pub const TOKENS_PER_BLOCK: usize = 128;
/// Tiles in one block.
pub const TILES_PER_BLOCK: usize = TOKENS_PER_BLOCK / TILE;

#[cfg(test)]
mod tests;
