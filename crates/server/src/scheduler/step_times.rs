//! Step times, as measured, and the prefill tokens that the next step may contain.

use std::collections::BTreeMap;

/// One in this many decode steps runs without prefill, to measure the decode time alone.
const MEASURE_EVERY: u32 = 32;
/// Target duration of a step without decode, in seconds: bounds the time until a new request is
/// noticed.
pub(super) const MAX_STEP: f64 = 0.1;
/// Minimum prefill tokens of a step without decode: with fewer, reading the weights dominates.
pub(super) const MIN_ROWS: usize = 16;
/// Prefill tokens beside decode before any measurement.
const FIRST_ROWS: usize = 4;

/// A sample of more than so many averages is an outlier, as of a step that compiles a kernel.
const OUTLIER: f64 = 10.0;

/// A running average that ignores an outlier, unless the sample before it is one too.
#[derive(Debug, Default)]
pub(super) struct Average {
    value: Option<f64>,
    was_outlier: bool,
}

impl Average {
    /// Returns the average; `None` before the first sample.
    pub fn get(&self) -> Option<f64> {
        self.value
    }

    /// Adds a sample; returns whether it counts.
    fn learn(&mut self, sample: f64) -> bool {
        let Some(average) = &mut self.value else {
            self.value = Some(sample);
            return true;
        };
        let is_outlier = sample > OUTLIER * *average;
        let counts = !is_outlier || self.was_outlier;
        self.was_outlier = is_outlier;
        if counts {
            *average += 0.1 * (sample - *average);
        }
        counts
    }

    /// As [`Average::learn`]; the average is at least the last sample that counts.
    fn learn_maximum(&mut self, sample: f64) {
        if self.learn(sample) {
            self.value = self.value.map(|average| average.max(sample));
        }
    }
}

/// Step times in seconds, as running averages.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Steps with decode only, by the binary logarithm of the batch size: with the average of
    /// another size the difference would be attributed to prefill tokens.
    decode_time: BTreeMap<u32, DecodeTime>,
    /// Time of a prefill token in a step without decode.
    pub row: Average,
    /// Time that a prefill token adds to a step with decode: more than alone, as small batches
    /// multiply less efficiently. The recent maximum, so that the latency bound holds.
    row_beside_decode: Average,
}

/// Time of steps with decode only, for one class of batch sizes.
#[derive(Debug, Default)]
struct DecodeTime {
    seconds: Average,
    /// Steps of that size with prefill since the last measurement.
    n_since: u32,
}

impl DecodeTime {
    /// Reports whether the next step must run without prefill as a measurement: none exists yet,
    /// or contexts have grown since.
    fn is_to_be_known(&self) -> bool {
        self.n_since >= if self.seconds.get().is_none() { 1 } else { MEASURE_EVERY }
    }
}

impl Pace {
    /// Records a step of so many tokens that took `seconds`.
    pub fn ran(&mut self, n_decode: usize, n_read: usize, seconds: f64) {
        match (n_decode, n_read) {
            _ if seconds == 0.0 => {}
            (0, 0) => {}
            (n, 0) => {
                let decode = self.decode_time.entry(n.ilog2()).or_default();
                decode.seconds.learn(seconds);
                decode.n_since = 0;
            }
            (0, rows) => {
                self.row.learn(seconds / rows as f64);
            }
            (n, rows) => {
                let decode = self.decode_time.entry(n.ilog2()).or_default();
                decode.n_since += 1;
                if let Some(decode) = decode.seconds.get() {
                    let row = ((seconds - decode) / rows as f64).max(1e-5);
                    self.row_beside_decode.learn_maximum(row);
                }
            }
        }
    }

    /// Returns the number of prefill tokens of the next step, which may take `gap` times as long as
    /// without them.
    pub fn rows(&self, n_decode: usize, max_rows: usize, gap: f64) -> usize {
        let (seconds, row, min_rows) = match n_decode.checked_ilog2() {
            Some(n) => match self.decode_time.get(&n) {
                Some(decode) if decode.is_to_be_known() => return 0,
                decode => {
                    let decode = decode.and_then(|decode| decode.seconds.get());
                    match (decode, self.row_beside_decode.get()) {
                        (Some(decode), Some(row)) => ((gap - 1.0) * decode, row, 1),
                        _ => return FIRST_ROWS.min(max_rows),
                    }
                }
            },
            None => match self.row.get().filter(|&row| row > 0.0) {
                Some(row) => (MAX_STEP, row, MIN_ROWS),
                None => return max_rows.min(8 * MIN_ROWS),
            },
        };
        ((seconds / row) as usize).max(min_rows).min(max_rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GAP: f64 = 2.0;

    #[test]
    fn prefill_beside_decode_keeps_inter_token_latency_bounded() {
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
        // A single slow step lowers the number of tokens, which then recovers gradually.
        pace.ran(4, 40, 0.050 + 40.0 * 0.005);
        assert_eq!(pace.rows(4, 500, GAP), 10);
        (0..60).for_each(|_| pace.ran(4, 40, 0.050 + 40.0 * 0.001));
        pace.ran(4, 0, 0.050);
        assert!((45..=55).contains(&pace.rows(4, 500, GAP)), "{}", pace.rows(4, 500, GAP));
        // The time of a larger decode batch is not attributed to prefill tokens, and is measured
        // again.
        pace.ran(64, 4, 0.304);
        assert_eq!(pace.rows(64, 500, GAP), 0);
        pace.ran(64, 0, 0.300);
        (0..MEASURE_EVERY).for_each(|_| pace.ran(64, 40, 0.300 + 40.0 * 0.001));
        assert_eq!(pace.rows(64, 500, GAP), 0);
        pace.ran(64, 0, 0.300);
        assert!((270..=330).contains(&pace.rows(64, 500, GAP)), "{}", pace.rows(64, 500, GAP));
        // A machine with slow prefill still reads some tokens.
        let mut slow = Pace::default();
        slow.ran(0, 10, 10.0);
        slow.ran(1, 0, 0.5);
        assert_eq!((slow.rows(1, 500, GAP), slow.rows(0, 500, GAP)), (FIRST_ROWS, MIN_ROWS));
        slow.ran(1, 4, 4.5);
        assert_eq!(slow.rows(1, 500, GAP), 1);
    }

    #[test]
    fn one_step_that_compiles_does_not_slow_the_next_ones() {
        let mut pace = Pace::default();
        for _ in 0..20 {
            pace.ran(4, 0, 0.050);
            pace.ran(4, 40, 0.050 + 40.0 * 0.001);
            pace.ran(0, 100, 0.1);
        }
        let usual = [pace.rows(4, 500, GAP), pace.rows(0, 500, GAP)];
        pace.ran(4, 4, 1.5);
        pace.ran(0, 16, 2.0);
        pace.ran(4, 0, 1.5);
        assert_eq!([pace.rows(4, 500, GAP), pace.rows(0, 500, GAP)], usual);
        // Two in a row are no accident.
        pace.ran(4, 4, 1.5);
        pace.ran(4, 4, 1.5);
        assert_eq!(pace.rows(4, 500, GAP), 1);
    }
}
