//! The rows of a step that get logits.

use std::iter;
use std::ops::Range;

/// Selects the rows of a sequence that get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsFor {
    /// None: prefill without logits.
    None,
    /// The last row.
    Last,
    /// Every row from this one on.
    From(usize),
}

impl LogitsFor {
    /// Returns the first requested row of a sequence with `rows` rows in the step (`rows` if none).
    fn first(self, rows: usize) -> usize {
        match self {
            Self::None => rows,
            Self::Last => rows.saturating_sub(1),
            Self::From(row) => row.min(rows),
        }
    }

    /// Returns the number of requested rows of a sequence with `rows` rows in the step.
    pub fn count(self, rows: usize) -> usize {
        rows - self.first(rows)
    }
}

/// Returns the rows of a step that get logits, in as few ranges as possible. `parts` has the number
/// of rows of each sequence, and which of them get logits.
pub(super) fn ranges_with_logits(
    parts: impl Iterator<Item = (usize, LogitsFor)>,
) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0;
    let of_parts = parts.map(move |(n, logits_for)| {
        let first = end + logits_for.first(n);
        end += n;
        first..end
    });
    let mut of_parts = of_parts.filter(|rows| !rows.is_empty()).peekable();
    iter::from_fn(move || {
        let mut rows = of_parts.next()?;
        while let Some(next) = of_parts.next_if(|next| next.start == rows.end) {
            rows.end = next.end;
        }
        Some(rows)
    })
}

#[cfg(test)]
mod tests {
    use super::LogitsFor::{From, Last, None};
    use super::*;

    #[test]
    fn rows_with_logits_that_adjoin_are_one_range() {
        let ranges = |parts: &[(usize, LogitsFor)]| -> Vec<_> {
            ranges_with_logits(parts.iter().copied()).map(|rows| [rows.start, rows.end]).collect()
        };
        assert!(ranges(&[]).is_empty() && ranges(&[(5, None), (1, None)]).is_empty());
        assert_eq!(ranges(&[(1, Last); 4]), [[0, 4]]);
        assert_eq!(ranges(&[(7, Last), (1, Last), (1, Last)]), [[6, 9]]);
        let gaps = [(1, Last), (4, None), (3, From(0)), (5, From(3)), (2, From(2))];
        assert_eq!(ranges(&gaps), [[0, 1], [5, 8], [11, 13]]);
    }
}
