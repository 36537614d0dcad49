//! Plans decode attention: the KV splits of all sequences, in equal shares of one launch.
//!
//! Two wishes meet in a launch. A long sequence that is alone needs all multiprocessors, so its
//! cache is divided finely; of 256 sequences each block should walk a long piece, without a fixed
//! cost for every few tokens and without partial results. And the bits of a sequence must not
//! depend on which of the two is the case. So what is computed and who computes it are planned
//! apart:
//!
//! - **What: splits.** The tokens that rows of a *tile* see are divided into *units*, each a block
//!   of the cache (128 tokens at absolute positions), and units into *splits* of one or more
//!   *rounds* of four warps. The number of rounds depends on the length of the sequence (in tiles),
//!   the heads of the layer and the device, which one row alone should fill: on nothing else. A
//!   warp has every fourth unit of a split. Every split begins with an empty softmax, and the sums
//!   of its four warps are added in order. Rows of another tile see other tiles in 16 bit, so a
//!   sequence whose rows cross tiles counts as two. Tokens that a row does not see add exactly zero
//!   to it. So a row among seven others has the bits that it has alone.
//! - **The fold.** Splits are added one after the other to a total, which begins at zero: `total =
//!   fma(total, 2^(max - top), split · 2^(split max - top))`, the sum of the softmax weights
//!   likewise. A left fold in one order has the same bits in one block and in several; what it
//!   costs is that it cannot begin in the middle. (A tree of aligned groups could, at the price of
//!   another level: it would save a part of the partial results below, which are few.)
//! - **Who: shares.** The splits of all sequences, heads and tiles of four or eight queries, in
//!   this order, are a list, of which every block has an equal consecutive share; there are as many
//!   blocks as the device holds at once. A block that has the first split of some columns folds
//!   from there on, in shared memory, and writes the output if it has all of them. If not, it
//!   writes its total; blocks that begin in the middle write each split until the columns end, and
//!   the last one of them to finish folds these to the total, in order. Each block begins in the
//!   middle once at most, and leaves columns unfinished once at most.
//!
//! A sequence alone has one split per block. Counted for 132 multiprocessors of four blocks each
//! and eight KV heads of 128 with four query heads each: rounds that the device needs for a layer
//! (of a block of four warps, each with a unit), how often a block prepares queries, and megabytes
//! of partial results, each written and read once. Before, a launch took 16 sequences (four and
//! sixteen launches of a layer, now one), a block one split (2,048 to 65,536 blocks, now 528), and
//! a multiprocessor three blocks:
//!
//! | sequences | tokens | rounds | preparations | MB | rounds | preparations | MB |
//! |---|---|---|---|---|---|---|---|
//! | | | before | | | now | | |
//! | 1 | 65,536 | 3 | 1 | 0.7 | 2 | 1 | 1.1 |
//! | 64 | 2,048 | 8 | 5.2 | 4.3 | 4 | 1.1 | 0.3 |
//! | 64 | 8,192 | 24 | 21 | 17 | 16 | 1.4 | 4.5 |
//! | 64 | 32,768 | 88 | 41 | 34 | 63 | 1.9 | 35 |
//! | 256 | 2,048 | 32 | 21 | 17 | 16 | 4.2 | 1.2 |
//! | 256 | 8,192 | 96 | 83 | 68 | 63 | 4.8 | 8.7 |
//! | 256 | 32,768 | 352 | 166 | 136 | 249 | 4.8 | 33 |
//!
//! A unit of turbo3 is some 2,100 instructions of a warp, preparing queries and a join of four
//! warps through memory cost as much again; a fold within a block is a twentieth of it.

use std::sync::Arc;

use kvant_backend::{AttendParams, KvLayer, Result, TILES_PER_BLOCK, TokenSpan};
use kvant_codec::tile::TILE;

use super::decode::HeadFormat;
use super::plan::SequenceParams;
use super::{OP, Part, WARPS, decode, slice};
use crate::context::MAX_COUNTERS;
use crate::kv::{MAX_SEQUENCES, small};
use crate::memory::Block;
use crate::{Context, DevicePtr};

/// Tiles that the four warps of a block process in one round.
const ROUND_TILES: usize = decode::UNIT * WARPS;

const _: () = assert!(decode::UNIT == TILES_PER_BLOCK, "a unit has one page and one centre");

/// The splits of a launch.
pub(crate) struct Splits {
    /// The sequences, in the order of their splits; one whose rows cross tiles is there for each.
    pub(super) sequences: Vec<SequenceParams>,
    /// The same on the device, if they are too many to travel with a launch.
    pub(super) listed: Option<Block>,
    /// Queries of a tile of columns.
    pub(super) queries: usize,
    /// All of them: of all sequences, heads and tiles of columns.
    n: usize,
    /// Maximum number of splits of a sequence.
    max: usize,
}

impl Splits {
    /// Returns the splits of these heads, which have one storage format: of an earlier layer, if
    /// these depend on nothing else.
    ///
    /// # Errors
    /// [`Unsupported`](kvant_backend::BackendError::Unsupported) beyond 32 bits, and when the
    /// device cannot be written.
    pub(super) fn of(
        cx: &Context,
        p: &AttendParams,
        head_format: &HeadFormat,
        heads: &[usize],
        parts: &[Part<'_, '_>],
        step_tiles: DevicePtr,
    ) -> Result<Arc<Self>> {
        let layer = parts[0].sequence.layer;
        let [keys, values] = [&layer.k[heads[0]].spec, &layer.values(heads[0]).spec];
        let tiles = [keys, values].map(|spec| [spec.sink_tiles, spec.tail_tiles]);
        let counts = [p.n_heads, p.n_kv_heads, heads.len()];
        let counts = counts.into_iter().chain(tiles.into_iter().flatten()).map(|count| count as u64);
        let window = layer.window.map_or(u64::MAX, |window| window as u64);
        // Types and sizes decide how many blocks are resident.
        let of_layer: Vec<_> = counts.chain(head_format.words()).chain([window, step_tiles]).collect();
        let sequences = parts.iter().map(|part| part.sequence);
        let make = || Self::new(cx, p, head_format, heads, parts, step_tiles);
        cx.attend_plans().get(&of_layer, sequences, make)
    }

    /// Plans the splits of these heads.
    fn new(
        cx: &Context,
        p: &AttendParams,
        head_format: &HeadFormat,
        heads: &[usize],
        parts: &[Part<'_, '_>],
        step_tiles: DevicePtr,
    ) -> Result<Self> {
        let group = p.n_heads / p.n_kv_heads;
        let most = parts.iter().flat_map(|part| rows_by_tile(part.rows)).map(|rows| rows.n * group);
        let queries = decode::queries_per_block(most.max().unwrap_or(0));
        // As many splits as a row alone fills the device with, all resident at once, so that they
        // finish together: a row has the same ones whatever other rows the launch has.
        let blocks = blocks_at_once(cx, head_format, decode::queries_per_block(group));
        let max_splits = (blocks / (p.n_kv_heads * group.div_ceil(decode::MAX_QUERIES))).max(1);
        let sequences = Vec::with_capacity(parts.len());
        let mut all = Self { sequences, listed: None, queries, n: 0, max: 0 };
        for Part { sequence, rows, .. } in parts {
            for rows in rows_by_tile(*rows) {
                let rounds = rounds(sequence.layer, rows.start / TILE);
                let split_rounds = rounds.div_ceil(max_splits);
                let splits = rounds.div_ceil(split_rounds);
                let params = SequenceParams::new(cx, sequence, rows, heads[0], step_tiles)?;
                all.sequences.push(params.with_splits(all.n, splits, split_rounds * ROUND_TILES)?);
                all.n += heads.len() * (rows.n * group).div_ceil(queries) * splits;
                all.max = all.max.max(splits);
            }
        }
        small(OP, "splits", all.n)?;
        if all.sequences.len() > MAX_SEQUENCES {
            all.listed = Some(cx.list(bytemuck::cast_slice(&all.sequences))?);
        }
        Ok(all)
    }

    /// Divides the splits among as many blocks as the device holds at once.
    pub(super) fn shares(&self, cx: &Context, head_format: &HeadFormat) -> Shares {
        let blocks = self.n.min(blocks_at_once(cx, head_format, self.queries)).clamp(1, MAX_COUNTERS);
        let (share, longer) = (self.n / blocks, self.n % blocks);
        let max_share = share + usize::from(longer > 0);
        Shares { blocks, share, longer, block_partials: max_share.min(self.max) + 1 }
    }
}

/// Equal shares of the splits of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shares {
    pub blocks: usize,
    /// Splits of each block.
    pub share: usize,
    /// Blocks that have one split more, the first ones.
    pub longer: usize,
    /// Places of a block for partial results: for all that it may have of columns which it does not
    /// begin, and for the total of columns which it does not end.
    pub block_partials: usize,
}

/// Divides rows by their tiles: those of one tile see all tiles in the same form.
fn rows_by_tile(rows: TokenSpan) -> impl Iterator<Item = TokenSpan> {
    let tiles = rows.start / TILE..rows.end().div_ceil(TILE);
    tiles.map(move |tile| {
        let (start, end) = (rows.start.max(tile * TILE), rows.end().min((tile + 1) * TILE));
        slice(rows, start - rows.start..end - rows.start)
    })
}

/// Returns the rounds of a block over the units that some row of tile `tile` may see: `Units` of
/// `decode.cu`.
fn rounds(layer: &KvLayer, tile: usize) -> usize {
    let first = layer.window_start(tile * TILE) / TILE / decode::UNIT;
    (tile / decode::UNIT + 1 - first).div_ceil(WARPS)
}

/// Returns the blocks that the device holds at once.
fn blocks_at_once(cx: &Context, head_format: &HeadFormat, queries: usize) -> usize {
    head_format.resident_blocks(queries) * cx.gpu().properties().n_sms as usize
}
