//! Splits a step into micro-batches: while one device runs its layers on one of them, the device
//! before it runs the next.
//!
//! A step of `P` equal parts and `M` micro-batches takes `(M + P - 1) / (M P)` of the time of one
//! part after the other, if the time of a part grows with its rows. It does not where reading the
//! weights bounds it, since each micro-batch reads them again: so each has at least
//! [`MIN_ROWS`] rows, and decode of few sequences is one micro-batch.
//!
//! Rows of one sequence may be in several micro-batches, as every part runs them in order. Devices
//! with batch invariance give the same bits for any split.

use std::ops::Range;

use kvant_model::{Entry, LogitsFor};

use super::super::BatchEntry;

/// Minimum of rows in a micro-batch: about where a GPU's products begin to take more time than its
/// reading of weights.
const MIN_ROWS: usize = 64;

/// A part of a step's rows.
#[derive(Debug)]
pub(super) struct MicroBatch {
    /// The entries, of which the first and the last may be pieces of the step's.
    pub entries: Vec<BatchEntry>,
    /// Its rows in the step.
    pub rows: Range<usize>,
}

/// Splits a step for `n_parts` parts; empty where one micro-batch takes the whole step.
pub(super) fn split(batch: &[BatchEntry], n_parts: usize) -> Vec<MicroBatch> {
    let n_rows: usize = batch.iter().map(|entry| entry.n).sum();
    let n = n_rows / MIN_ROWS;
    if n < 2 || n_parts < 2 {
        return Vec::new();
    }
    let max = n_rows.div_ceil(n);
    let mut micro_batches = vec![MicroBatch { entries: Vec::new(), rows: 0..0 }];
    for entry in batch {
        let mut rest = entry.clone();
        loop {
            let last = micro_batches.last_mut().expect("it begins with one");
            let room = max.saturating_sub(last.rows.len());
            let end = last.rows.end;
            // A few rows stay together: draft tokens are verified in one step.
            if room > 0 && (rest.n <= room || rest.n <= MIN_ROWS) {
                last.rows.end = end + rest.n;
                last.entries.push(rest);
                break;
            }
            if room > 0 {
                let [piece, after] = rest.cut(room);
                last.rows.end = end + room;
                last.entries.push(piece);
                rest = after;
            }
            let end = last.rows.end;
            micro_batches.push(MicroBatch { entries: Vec::new(), rows: end..end });
        }
    }
    micro_batches
}

/// Returns these rows of what enters a step.
pub(super) fn rows_of<'a>(entry: Entry<'a>, rows: &Range<usize>, n_embd: usize) -> Entry<'a> {
    let values = |x: &'a [f32]| &x[rows.start * n_embd..rows.end * n_embd];
    match entry {
        Entry::Tokens(tokens) => Entry::Tokens(&tokens[rows.clone()]),
        Entry::Residual(x) => Entry::Residual(values(x)),
        Entry::Pairs(tokens, x) => Entry::Pairs(&tokens[rows.clone()], values(x)),
        Entry::Features(..) => unreachable!("features enter a draft head, which has one layer"),
    }
}

impl BatchEntry {
    /// Returns the entry without requested logits.
    pub(super) fn without_logits(&self) -> Self {
        Self { logits_for: LogitsFor::None, ..self.clone() }
    }

    /// Returns the entry's first `n` rows, and the rest. No model whose n-grams read tokens before
    /// a step has several parts.
    fn cut(&self, n: usize) -> [Self; 2] {
        let first = self.n - self.logits_for.count(self.n);
        let piece = |rows: Range<usize>| Self {
            logits_for: match first.saturating_sub(rows.start) {
                first if first < rows.len() => LogitsFor::From(first),
                _ => LogitsFor::None,
            },
            positions: self.positions.as_ref().map(|positions| {
                let of_rows = &positions[positions.len() - self.n..];
                of_rows[rows.clone()].into()
            }),
            n: rows.len(),
            ..self.clone()
        };
        [piece(0..n), piece(n..self.n)]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::super::SequenceId;
    use super::*;

    /// Row `row` of sequence `id` has position `[id, row, 0]`.
    fn entry(id: u32, n: usize, logits_for: LogitsFor) -> BatchEntry {
        let positions = (0..n as u32).map(|row| [id, row, 0]).collect();
        BatchEntry {
            id: SequenceId(id.into()),
            n,
            logits_for,
            lora_scales: None,
            positions: Some(positions),
            tokens_before: Arc::default(),
        }
    }

    /// Returns id, row and whether it has logits, of all rows.
    fn rows(entries: &[BatchEntry]) -> Vec<(u32, u32, bool)> {
        let of = |entry: &BatchEntry| {
            let first = entry.n - entry.logits_for.count(entry.n);
            let positions = entry.positions.clone().unwrap();
            assert_eq!(positions.len(), entry.n);
            let rows = (0..entry.n).map(move |row| (positions[row][0], positions[row][1], row >= first));
            rows.collect::<Vec<_>>()
        };
        entries.iter().flat_map(of).collect()
    }

    #[test]
    fn micro_batches_have_the_rows_of_the_step_in_order() {
        use LogitsFor::{From, Last, None};
        for batch in [
            vec![entry(0, 128, Last)],
            vec![entry(0, 512, From(100))],
            vec![entry(0, 512, None), entry(1, 1, Last)],
            vec![entry(0, 1, Last), entry(1, 63, From(3)), entry(2, 65, From(60)), entry(3, 1, None)],
            vec![entry(0, 40, Last), entry(1, 60, From(0)), entry(2, 28, Last)],
            vec![entry(0, 300, From(299)), entry(1, 40, From(5)), entry(2, 32, From(0)), entry(3, 90, Last)],
            (0..200).map(|id| entry(id, 1, Last)).collect(),
        ] {
            let n_rows: usize = batch.iter().map(|entry| entry.n).sum();
            let micro_batches = split(&batch, 2);
            assert!(micro_batches.len() >= 2 && micro_batches.len() <= n_rows / MIN_ROWS + 1);
            let mut end = 0;
            for MicroBatch { entries, rows } in &micro_batches {
                assert_eq!(rows.start, end);
                assert_eq!(rows.len(), entries.iter().map(|entry| entry.n).sum::<usize>());
                assert!(entries.iter().all(|entry| entry.n > 0));
                // Even, but for a sequence that stays whole, and the last.
                let even = n_rows.div_ceil(n_rows / MIN_ROWS);
                assert!(!rows.is_empty() && rows.len() < even + MIN_ROWS, "{rows:?}");
                end = rows.end;
            }
            assert_eq!(end, n_rows);
            let entries: Vec<_> = micro_batches.into_iter().flat_map(|part| part.entries).collect();
            assert_eq!(rows(&entries), rows(&batch));
            // Sequences of a few rows stay whole.
            for whole in batch.iter().filter(|entry| entry.n <= MIN_ROWS) {
                assert_eq!(entries.iter().filter(|entry| entry.id == whole.id).count(), 1);
            }
        }
    }

    #[test]
    fn steps_of_few_rows_and_single_parts_are_not_split() {
        assert!(split(&[entry(0, 2 * MIN_ROWS - 1, LogitsFor::Last)], 2).is_empty());
        assert!(split(&[entry(0, 512, LogitsFor::Last)], 1).is_empty());
        let decode: Vec<_> = (0..8).map(|id| entry(id, 1, LogitsFor::Last)).collect();
        assert!(split(&decode, 2).is_empty());
    }
}
