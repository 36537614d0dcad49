//! Intervals of medians from signs alone, and how often one may look at them.
//!
//! # The interval
//!
//! A round gives `x`, the logarithm of base's time over the candidate's. Of `n` values in order,
//! `x(1) <= .. <= x(n)`, the median is below `x(k)` only if fewer than `k` values lie below it,
//! each with probability 1/2: `[x(k), x(n + 1 - k)]` misses it with probability `2 P(Bin(n, 1/2) <
//! k)`. No law of the noise is assumed: neighbours of a shared machine may delay a request by any
//! time.
//!
//! # Why signs are fair coins
//!
//! A coin chooses which side begins a round. If both sides are alike, swapping their names changes
//! the sign of `x` and nothing else, so that each sign is a fair coin whatever the noise, even
//! where it drifts or comes in bursts (Fisher, *The Design of Experiments*, chapter 2: the
//! randomization makes the test valid).
//!
//! # Looking repeatedly
//!
//! An interval that may end a race at any of several looks misses more often than one that is
//! computed once. Look `i` takes `ERROR / (i (i + 1))` of the probability of a miss: these add up
//! to [`ERROR`] for any number of looks (`sum 1 / (i (i + 1)) = 1`).

/// Probability that any of a race's intervals misses: of a thousand races of a tree against itself
/// at most one has a winner.
pub const ERROR: f64 = 0.001;

/// Rounds before the first look: the fewest whose extremes hold the median with its probability,
/// `2 / 2^12 <= ERROR / 2`.
pub const FIRST_LOOK: usize = 12;

/// An interval of logarithms, and its middle value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// The median.
    pub middle: f64,
    /// Upper end.
    pub high: f64,
}

impl Interval {
    /// Returns the interval of the median of `values` that misses it with probability `error`;
    /// `None` for too few values.
    pub fn of_median(values: &[f64], error: f64) -> Option<Self> {
        let (n, k) = (values.len(), rank(values.len(), error));
        if k == 0 {
            return None;
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
        Some(Self { low: sorted[k - 1], middle, high: sorted[n - k] })
    }

    /// Returns whether the interval is narrower than the distance of its middle from 0: it then
    /// excludes 0 by half its width at least.
    pub fn is_resolved(&self) -> bool {
        self.high - self.low < self.middle.abs()
    }

    /// Returns whether it lies within `margin` of 0.
    pub fn is_within(&self, margin: f64) -> bool {
        -margin <= self.low && self.high <= margin
    }
}

/// Returns the largest k with `2 P(Bin(n, 1/2) < k) <= error`; 0 if there is none.
fn rank(n: usize, error: f64) -> usize {
    // Logarithm of C(n, i) / 2^n, which underflows for large n.
    let mut log_term = -(n as f64) * std::f64::consts::LN_2;
    let mut missed = 0.0;
    for i in 0..=n {
        missed += log_term.exp();
        let is_admitted = 2.0 * missed <= error;
        if !is_admitted {
            return i;
        }
        log_term += ((n - i) as f64 / (i + 1) as f64).ln();
    }
    n
}

/// When to look: after [`FIRST_LOOK`] rounds, then each time there are half as many again.
#[derive(Debug, Clone)]
pub struct Looks {
    n_taken: usize,
    next: usize,
}

impl Default for Looks {
    fn default() -> Self {
        Self { n_taken: 0, next: FIRST_LOOK }
    }
}

impl Looks {
    /// Returns the probability of a miss of a look after `n_rounds`; `None` if it is not yet time.
    pub fn take(&mut self, n_rounds: usize) -> Option<f64> {
        (n_rounds >= self.next).then(|| {
            self.next = n_rounds + n_rounds / 2;
            self.take_last()
        })
    }

    /// Returns the probability of a miss of a look out of turn: the last one, when time is up.
    pub fn take_last(&mut self) -> f64 {
        self.n_taken += 1;
        ERROR / (self.n_taken * (self.n_taken + 1)) as f64
    }
}

#[cfg(test)]
mod tests {
    use kvant_codec::random::Random;

    use super::*;

    #[test]
    fn ranks_are_those_of_binomial_tables() {
        // Conover, Practical Nonparametric Statistics, table A3: P(Bin(20, 1/2) <= 5) = 0.0207,
        // P(Bin(20, 1/2) <= 4) = 0.0059.
        assert_eq!(rank(20, 0.05), 6);
        assert_eq!(rank(20, 0.04), 5);
        assert_eq!(rank(11, ERROR / 2.0), 0);
        assert_eq!(rank(FIRST_LOOK, ERROR / 2.0), 1);
        assert_eq!(rank(20, f64::NAN), 0);
        // The normal limit: (n - z sqrt(n)) / 2.
        assert!(rank(10_000, 0.05).abs_diff(4902) <= 2);
    }

    #[test]
    fn intervals_miss_as_often_as_stated() {
        let mut random = Random::new(3);
        let mut n_missed = 0;
        for _ in 0..4000 {
            // Heavy tails: the third power of a Gaussian has the median 0.
            let values: Vec<f64> = (0..30).map(|_| random.gaussian().powi(3)).collect();
            let interval = Interval::of_median(&values, 0.1).unwrap();
            n_missed += usize::from(interval.low > 0.0 || interval.high < 0.0);
        }
        // P(Bin(30, 1/2) < 11) = 0.0494 on each side; four deviations of 4000 coins are 75.
        assert!((4000.0 * 0.0988 - n_missed as f64).abs() < 75.0, "{n_missed}");
    }

    #[test]
    fn all_looks_together_miss_as_often_as_one() {
        let mut looks = Looks::default();
        let spent: f64 = (0..100_000).filter_map(|n| looks.take(n)).sum::<f64>() + looks.take_last();
        assert!(spent < ERROR && spent > 0.9 * ERROR, "{spent}");
        assert_eq!(Looks::default().take(FIRST_LOOK - 1), None);
        assert!(Interval::of_median(&[0.0; FIRST_LOOK], ERROR / 2.0).is_some());
    }
}
