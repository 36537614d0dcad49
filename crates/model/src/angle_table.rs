//! Cosines and sines of positions, computed once for all sequences.

use std::collections::HashMap;

use crate::Rope;

/// Positions of a block.
const BLOCK: usize = 64;
/// Blocks kept: those of as many sequences, or of 32,768 consecutive positions, 16 MB for heads of
/// 128.
const MAX_BLOCKS: usize = 512;

/// The rows of [`Rope::angles`] of positions met before: a sine takes 30 ns, those of 64 sequences
/// in a step a tenth of a millisecond.
#[derive(Debug, Default)]
pub(crate) struct AngleTable {
    blocks: HashMap<BlockKey, Vec<f32>>,
}

/// A block, and whether its frequencies are those of short contexts.
#[derive(Debug, PartialEq, Eq, Hash)]
struct BlockKey {
    block: usize,
    is_short: bool,
}

impl AngleTable {
    /// Appends what [`Rope::angles`] of `rope`, the same in every call, would.
    pub fn append(&mut self, rope: &Rope, n_ctx: usize, start: usize, rows: usize, out: &mut Vec<f32>) {
        // A prompt computes each position once anyway.
        if rows > BLOCK || rope.stride() > 1 {
            return rope.angles(n_ctx, start, rows, out);
        }
        let is_short = rope.n_ctx_short().is_some_and(|longest| n_ctx <= longest);
        for position in start..start + rows {
            let key = BlockKey { block: position / BLOCK, is_short };
            if self.blocks.len() == MAX_BLOCKS && !self.blocks.contains_key(&key) {
                self.blocks.clear();
            }
            let block = self.blocks.entry(key).or_insert_with(|| {
                let mut rows = Vec::with_capacity(BLOCK * rope.params.n_rot);
                rope.angles(n_ctx, position / BLOCK * BLOCK, BLOCK, &mut rows);
                rows
            });
            out.extend_from_slice(&block[position % BLOCK * rope.params.n_rot..][..rope.params.n_rot]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rope::Scaling;
    use kvant_backend::Pairing;

    #[test]
    fn rows_are_those_of_the_rope_also_when_the_table_is_full() {
        let plain = || Rope::new(Pairing::Halves, 4, 100.0, &Scaling::None, None).unwrap();
        let short = Rope::new(Pairing::Halves, 4, 10.0, &Scaling::None, None).unwrap();
        for rope in [plain(), plain().beyond(64, short), plain().pooled(4)] {
            let mut table = AngleTable::default();
            for position in (0..2 * MAX_BLOCKS * BLOCK).step_by(BLOCK - 1) {
                for (n_ctx, rows) in [(64, 1), (128, 3), (64, BLOCK + 1)] {
                    let (mut got, mut want) = (vec![1.0], vec![1.0]);
                    table.append(&rope, n_ctx, position, rows, &mut got);
                    rope.angles(n_ctx, position, rows, &mut want);
                    assert_eq!(got, want, "{position}, {rows} of {n_ctx}");
                }
            }
            assert!(table.blocks.len() <= MAX_BLOCKS);
        }
    }
}
