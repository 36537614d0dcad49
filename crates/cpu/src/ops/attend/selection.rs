//! Which tokens rows attend to, if not to all, as the kernels of [`split`](super::split) and of
//! [`selected`](super::selected) read it.

use std::ops::Range;

use kvant_backend::Selected;
use kvant_codec::tile::TILE;

use super::shape::{BLOCK, BLOCK_TILES, MASKED_SCORE, Scores};
use crate::host::buffer::CpuBuffer;

/// The selected blocks of tokens, and their numbers `[rows, n_lists, n_used]`.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'a> {
    pub of: Selected<'a, CpuBuffer>,
    pub of_rows: &'a [f32],
}

/// Tokens read per token that a row attends to, up to which it reads all tokens of the 128 that are
/// stored together. The tokens that it does not attend to cost a product less than decoding the
/// others one by one.
const MAX_READ: usize = 8;

impl Blocks<'_> {
    /// Returns the numbers of the blocks that a KV head of a row attends to.
    fn numbers(&self, row: usize, kv_head: usize) -> &[f32] {
        let Selected { n_used, n_lists, .. } = self.of;
        &self.of_rows[(row * n_lists + kv_head.min(n_lists - 1)) * n_used..][..n_used]
    }

    /// Returns the first token behind the blocks that a row at `position` may select, which it
    /// attends to too.
    fn rest(&self, position: usize) -> usize {
        let size = self.of.block;
        if self.of.with_rest { (position + 1) / size * size } else { position + 1 }
    }

    /// Writes the positions of the tokens that a KV head of a row attends to, up to its own.
    pub(super) fn tokens(&self, row: usize, kv_head: usize, position: usize, tokens: &mut Vec<usize>) {
        let size = self.of.block;
        let of_block = |&block: &f32| {
            let first = block as usize * size;
            first..(first + size).min(position + 1)
        };
        let blocks = self.numbers(row, kv_head).iter();
        tokens.clear();
        tokens.extend(blocks.flat_map(of_block).chain(self.rest(position)..=position));
    }

    /// Returns the tokens that a KV head of a row attends to among the 128 from `first` on: a bit
    /// for each, the first the lowest.
    fn mask(&self, row: usize, kv_head: usize, position: usize, first: usize) -> u128 {
        let (size, numbers) = (self.of.block, self.numbers(row, kv_head));
        let bits = |tokens: Range<usize>| {
            let within = |token: usize| token.clamp(first, first + BLOCK) - first;
            let (start, end) = (within(tokens.start), within(tokens.end.min(position + 1)));
            if start < end { u128::MAX >> (BLOCK - (end - start)) << start } else { 0 }
        };
        let from = numbers.partition_point(|&number| (number as usize + 1) * size <= first);
        let blocks = numbers[from..].iter().map(|&number| number as usize * size);
        let selected = blocks.take_while(|&start| start < first + BLOCK);
        selected.fold(bits(self.rest(position)..position + 1), |mask, start| mask | bits(start..start + size))
    }

    /// Returns whether a row reads all tokens of the 128 that are stored together, for each of its
    /// lists. Other rows change nothing, so that its result does not depend on them.
    pub(super) fn reads_all(&self, row: usize, position: usize) -> bool {
        let Selected { block: size, n_lists, n_used, .. } = self.of;
        let n_read = |list: usize| {
            let mut end = 0;
            let of_block = |&number: &f32| {
                let (first, after) = (number as usize * size, (number as usize + 1) * size);
                let (first, after) = ((first / BLOCK).max(end), after.div_ceil(BLOCK));
                end = end.max(after);
                after.saturating_sub(first)
            };
            self.numbers(row, list).iter().map(of_block).sum::<usize>() * BLOCK
        };
        let n_attended = (n_used * size).min(position + 1);
        (0..n_lists).all(|list| n_read(list) <= MAX_READ * n_attended)
    }
}

/// Some consecutive rows of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowSpan {
    /// Index of the sequence.
    pub part: usize,
    /// Its rows.
    pub rows: Range<usize>,
}

/// Rows that attend to selected tokens.
#[derive(Clone, Copy)]
pub(crate) struct SelectedRows<'a> {
    pub blocks: Blocks<'a>,
    pub spans: &'a [RowSpan],
}

/// Rows of a job, all of one sequence.
#[derive(Clone, Copy)]
pub(super) struct JobRows {
    /// Index of the first in the batch, and its position.
    pub(super) first: usize,
    pub(super) position: usize,
    pub(super) n: usize,
    pub(super) kv_head: usize,
}

/// The tokens that the rows of a job attend to, for each 128 of some.
#[derive(Debug, Default)]
pub(super) struct Masks {
    /// `[blocks][rows]`; without rows, they attend to all tokens.
    of_rows: Vec<u128>,
    n_rows: usize,
    /// The first token.
    first: usize,
}

impl Masks {
    /// Sets the masks of these tokens, the first of which begins a block.
    pub(super) fn set(&mut self, selected: Option<SelectedRows<'_>>, rows: JobRows, tokens: &Range<usize>) {
        self.of_rows.clear();
        let Some(SelectedRows { blocks, .. }) = selected else {
            self.n_rows = 0;
            return;
        };
        (self.n_rows, self.first) = (rows.n, tokens.start);
        for first in tokens.clone().step_by(BLOCK) {
            let mask = |i| blocks.mask(rows.first + i, rows.kv_head, rows.position + i, first);
            self.of_rows.extend((0..rows.n).map(mask));
        }
    }

    /// Returns the masks of some rows in the block that begins with token `first`; none where they
    /// attend to all.
    fn of_block(&self, first: usize, rows: Range<usize>) -> &[u128] {
        let at = (first - self.first.min(first)) / BLOCK * self.n_rows;
        self.of_rows.get(at + rows.start..at + rows.end).unwrap_or(&[])
    }

    /// Returns whether some of these rows attend to the block.
    pub(super) fn any(&self, first: usize, rows: Range<usize>) -> bool {
        self.n_rows == 0 || self.of_block(first, rows).iter().any(|&mask| mask != 0)
    }

    /// Returns the tiles of the block that hold all tokens that some row attends to.
    pub(super) fn tiles(&self, first: usize) -> Range<usize> {
        let all = self.of_block(first, 0..self.n_rows).iter().fold(0, |all, mask| all | mask);
        match all {
            0 => 0..BLOCK_TILES,
            _ => {
                let end = BLOCK - all.leading_zeros() as usize;
                all.trailing_zeros() as usize / TILE..end.div_ceil(TILE)
            }
        }
    }

    /// Masks the tokens of some tiles of the block that row `row` does not attend to.
    pub(super) fn apply(&self, first: usize, row: usize, tiles: &Range<usize>, scores: &mut Scores) {
        let Some(&mask) = self.of_block(first, row..row + 1).first() else { return };
        for tile in tiles.clone() {
            let bits = (mask >> (tile * TILE)) as u16;
            if bits == u16::MAX {
                continue;
            }
            for (token, score) in scores.0[tile].iter_mut().enumerate() {
                *score = if bits >> token & 1 == 1 { *score } else { MASKED_SCORE };
            }
        }
    }

    /// Returns whether rows attend to some tokens alone.
    pub(super) fn are_set(&self) -> bool {
        self.n_rows > 0
    }
}
