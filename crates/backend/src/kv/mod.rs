//! The layout of a sequence's keys and values, and the precision in which queries read them.
//!
//! K or V of one layer and KV head is a *KV tensor*: a sequence of *tiles* of 16 tokens.
//!
//! ```text
//! token   0 ........ n_sink ............... main_end ........ len
//!         [ sink: f16 ][ main: the tensor's type ][ tail: f16  ]
//!           tiles        tiles of blocks            ring of tiles
//! ```
//!
//! # Precision by position
//!
//! What a query at position p reads in f16 depends on p alone, not on the step sizes. It reads the
//! sink and the youngest tiles up to its own tile, p / 16, in f16 (two tiles unless a policy sets
//! more), and all others as codes ([`KvTensorSpec::f16_window_start`]). A window of two tiles never
//! reaches back over a multiple of [`PREFIX_ALIGNMENT`] tokens: there the cache consists of codes
//! alone, so another sequence can share a prefix of that length unchanged.
//!
//! Where values are a prefix of their keys (MLA), one *shared-KV* tensor serves as both
//! ([`KvTensorSpec::new_shared_kv`]).
//!
//! A tensor of an uncoded type (f32, f16, bf16), or with its tail switched off, has no window:
//! tokens are written to their slot in the blocks at once.
//!
//! Rows are rounded to f16 first and coded from there, whether they were in the tail or not. The
//! f16 tiles of a rotated tensor hold rotated values, so one query serves all tiles.
//!
//! # Steps
//!
//! A step appends rows and computes attention for each of them. Where rows of one sequence span
//! several tiles, the older rows read tokens in f16 that have left the tail by the time the last
//! row is written. The *step tiles* hold these: f16 tiles of the step, written by the append and
//! read by the attention after it ([`KvBatchEntry::step_tiles`]).
//!
//! # Memory
//!
//! A *KV block* is the main tiles of 128 tokens of all KV tensors of a layer group, one allocation;
//! the sink and the tail of these tensors are one more each. [`KvMemory`] holds them, [`KvTensor`]
//! gives the offsets of a tensor in them. Recurrent layers have a state of fixed size instead,
//! which every row updates ([`StateBatchEntry`]).
//!
//! This module is arithmetic on token numbers; the device moves the bytes.

mod channel_scales;
mod check;
mod layer;
mod memory;
mod spec;
mod writes;

pub use channel_scales::ChannelScaleLayout;
pub use check::batch_rows;
pub(crate) use check::{
    check_append, check_attend, check_attend_selected, check_index, check_select, check_select_blocks,
};
pub use layer::{KvLayer, KvTensor, TensorSizes};
pub use memory::{CountedPage, KvBatchEntry, KvMemory, PageAllocator, StateBatchEntry, TileRef, TokenSpan};
pub use spec::{KvTensorSpec, PREFIX_ALIGNMENT, TileLocation};
pub use writes::{TileRows, TileWrite, Writes};

use kvant_codec::tile::TILE;

/// Tokens per KV block. Sequences share the blocks of a common prefix; a block is copied before it
/// is written.
pub const TOKENS_PER_BLOCK: usize = 128;
/// Tiles per block.
pub const TILES_PER_BLOCK: usize = TOKENS_PER_BLOCK / TILE;

#[cfg(test)]
mod tests;
