//! What steps take, as measured, and how many rows of prompts the next one may have.

use std::collections::BTreeMap;

/// Nobody reads in one of so many steps in which others speak, so that it is known what those take.
const SPEAK_EVERY: u32 = 32;
/// The longest that a step is meant to take where nobody speaks, in seconds: so long may pass until somebody new is noticed.
pub(super) const LONGEST_STEP: f64 = 0.1;
/// The fewest rows of prompts in a step where nobody speaks: with fewer, weights are read for too little.
pub(super) const LEAST_ROWS: usize = 16;
/// Rows of prompts beside those who speak while it is not known what they take.
const FIRST_ROWS: usize = 4;

/// What steps take, in seconds, as running averages.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Steps in which somebody speaks and nobody reads, by the binary logarithm of how many speak: of a few others it would be taken for
    /// what rows of prompts add.
    speaking: BTreeMap<u32, Speaking>,
    /// A row of a prompt where nobody speaks.
    pub row: Option<f64>,
    /// What a row of a prompt adds to a step in which others speak: more, as few rows are multiplied at a time. The largest of
    /// late, so that the gap is kept.
    beside: Option<f64>,
}

/// What steps take in which so many speak and nobody reads.
#[derive(Debug, Default)]
struct Speaking {
    seconds: Option<f64>,
    /// Steps of as many since then in which somebody read.
    n_since: u32,
}

impl Speaking {
    /// Whether the next step is to tell: nothing is known, or contexts have grown since.
    fn is_to_be_known(&self) -> bool {
        self.n_since >= if self.seconds.is_none() { 1 } else { SPEAK_EVERY }
    }
}

impl Pace {
    fn learn(average: &mut Option<f64>, seconds: f64) {
        *average = Some(average.map_or(seconds, |average| average + 0.1 * (seconds - average)));
    }

    /// A step of so many rows has taken so many seconds.
    pub fn ran(&mut self, n_speaking: usize, n_read: usize, seconds: f64) {
        match (n_speaking, n_read) {
            _ if seconds == 0.0 => {}
            (0, 0) => {}
            (n, 0) => {
                let speaking = self.speaking.entry(n.ilog2()).or_default();
                Self::learn(&mut speaking.seconds, seconds);
                speaking.n_since = 0;
            }
            (0, rows) => Self::learn(&mut self.row, seconds / rows as f64),
            (n, rows) => {
                let speaking = self.speaking.entry(n.ilog2()).or_default();
                speaking.n_since += 1;
                if let Some(speaking) = speaking.seconds {
                    let row = ((seconds - speaking) / rows as f64).max(1e-5);
                    Self::learn(&mut self.beside, row);
                    self.beside = self.beside.map(|beside| beside.max(row));
                }
            }
        }
    }

    /// Rows of prompts that the next step may have, where it may take `gap` times as long as without.
    pub fn rows(&self, n_speaking: usize, most: usize, gap: f64) -> usize {
        let (seconds, row, least) = match n_speaking.checked_ilog2() {
            Some(n) => match (self.speaking.get(&n), self.beside) {
                (Some(speaking), _) if speaking.is_to_be_known() => return 0,
                (Some(Speaking { seconds: Some(speaking), .. }), Some(beside)) => {
                    ((gap - 1.0) * speaking, beside, 1)
                }
                _ => return FIRST_ROWS.min(most),
            },
            None => match self.row.filter(|&row| row > 0.0) {
                Some(row) => (LONGEST_STEP, row, LEAST_ROWS),
                None => return most.min(8 * LEAST_ROWS),
            },
        };
        ((seconds / row) as usize).max(least).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GAP: f64 = 2.0;

    #[test]
    fn prompts_are_read_beside_speech_in_rows_that_keep_the_gap_small() {
        let mut pace = Pace::default();
        assert_eq!(pace.rows(4, 500, GAP), FIRST_ROWS);
        for _ in 0..20 {
            pace.ran(4, 0, 0.050);
            pace.ran(4, 40, 0.050 + 40.0 * 0.001);
            pace.ran(0, 100, 0.1);
        }
        assert!((45..=55).contains(&pace.rows(4, 500, GAP)), "{}", pace.rows(4, 500, GAP));
        assert!((95..=105).contains(&pace.rows(0, 500, GAP)), "{}", pace.rows(0, 500, GAP));
        assert_eq!(pace.rows(0, 7, GAP), 7);
        // Rows that took longer once are fewer at once, and more again by and by.
        pace.ran(4, 40, 0.050 + 40.0 * 0.005);
        assert_eq!(pace.rows(4, 500, GAP), 10);
        (0..60).for_each(|_| pace.ran(4, 40, 0.050 + 40.0 * 0.001));
        pace.ran(4, 0, 0.050);
        assert!((45..=55).contains(&pace.rows(4, 500, GAP)), "{}", pace.rows(4, 500, GAP));
        // What more who speak take is not put down to rows of prompts, and is looked at again.
        pace.ran(64, 4, 0.304);
        assert_eq!(pace.rows(64, 500, GAP), 0);
        pace.ran(64, 0, 0.300);
        (0..SPEAK_EVERY).for_each(|_| pace.ran(64, 40, 0.300 + 40.0 * 0.001));
        assert_eq!(pace.rows(64, 500, GAP), 0);
        pace.ran(64, 0, 0.300);
        assert!((270..=330).contains(&pace.rows(64, 500, GAP)), "{}", pace.rows(64, 500, GAP));
        // A machine that is slow at prompts still reads some.
        let mut slow = Pace::default();
        slow.ran(0, 10, 10.0);
        slow.ran(1, 0, 0.5);
        assert_eq!((slow.rows(1, 500, GAP), slow.rows(0, 500, GAP)), (FIRST_ROWS, LEAST_ROWS));
        slow.ran(1, 4, 4.5);
        assert_eq!(slow.rows(1, 500, GAP), 1);
    }
}
