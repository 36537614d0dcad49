//! Scores of tokens from logits.
//!
//! Logits stay f32 as the model computed them; all derived numbers are f64.

use serde::{Deserialize, Serialize};

/// One row of logits with its log-sum-exp: log p(i) = logits\[i\] - log_sum_exp.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row<'a> {
    logits: &'a [f32],
    log_sum_exp: f64,
}

impl<'a> Row<'a> {
    /// Creates a row; `Err` with the first value that is not finite, so that NaN never becomes a
    /// score.
    pub fn new(logits: &'a [f32]) -> Result<Self, f32> {
        if let Some(&bad) = logits.iter().find(|v| !v.is_finite()) {
            return Err(bad);
        }
        let max = f64::from(logits[argmax(logits)]);
        let sum: f64 = logits.iter().map(|&v| (f64::from(v) - max).exp()).sum();
        Ok(Self { logits, log_sum_exp: max + sum.ln() })
    }

    /// Creates a row with the log sum of an earlier [`Row::new`].
    pub fn with_log_sum_exp(logits: &'a [f32], log_sum_exp: f64) -> Self {
        Self { logits, log_sum_exp }
    }

    pub fn logits(&self) -> &'a [f32] {
        self.logits
    }

    pub fn log_sum_exp(&self) -> f64 {
        self.log_sum_exp
    }
}

/// A distribution over the vocabulary.
pub(crate) trait LogProbs {
    /// Returns log p of token `i`, in nats.
    fn log_prob(&self, i: usize) -> f64;
    /// Returns the most probable token; the first of equals.
    fn top(&self) -> usize;
    /// Returns the log probability at or below which tokens are not counted in a divergence: the
    /// clamped range of a base file.
    fn floor(&self) -> f64;
    fn n_vocab(&self) -> usize;
}

impl LogProbs for Row<'_> {
    fn log_prob(&self, i: usize) -> f64 {
        f64::from(self.logits[i]) - self.log_sum_exp
    }

    fn top(&self) -> usize {
        argmax(self.logits)
    }

    fn floor(&self) -> f64 {
        f64::NEG_INFINITY
    }

    fn n_vocab(&self) -> usize {
        self.logits.len()
    }
}

/// Returns the index of the largest value; the first of equals.
pub(crate) fn argmax<T: PartialOrd + Copy>(values: &[T]) -> usize {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = i;
        }
    }
    best
}

/// Scores of one token for a configuration and the base.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TokenScore {
    /// -log p(token), in nats.
    pub nll: f64,
    /// The same under the base.
    pub nll_base: f64,
    /// KL divergence Σ p_base (log p_base - log p), in nats.
    pub kld: f64,
    /// p(token) - p_base(token).
    pub delta_p: f64,
    /// Whether both have the same most probable token.
    pub same_top: bool,
}

impl TokenScore {
    pub(crate) fn new(base: &impl LogProbs, row: &Row<'_>, token: usize) -> Self {
        let floor = base.floor();
        let kld = (0..base.n_vocab())
            .map(|i| (base.log_prob(i), row.log_prob(i)))
            .filter(|&(log_base, _)| log_base > floor)
            .map(|(log_base, log_p)| log_base.exp() * (log_base - log_p))
            .sum();
        let (log_base, log_p) = (base.log_prob(token), row.log_prob(token));
        Self {
            nll: -log_p,
            nll_base: -log_base,
            kld,
            delta_p: log_p.exp() - log_base.exp(),
            same_top: base.top() == row.top(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_normalized_or_rejected_if_not_finite() {
        let logits = [1.0, 3.0, -2.0, 3.0];
        let row = Row::new(&logits).unwrap();
        let total: f64 = (0..4).map(|i| row.log_prob(i).exp()).sum();
        assert!((total - 1.0).abs() < 1e-15, "{total}");
        assert_eq!(row.top(), 1);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(Row::new(&[0.0, bad]).unwrap_err().to_bits(), bad.to_bits());
        }
    }

    #[test]
    fn the_divergence_of_two_known_distributions_is_exact() {
        // p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): KL = 1/2 ln 2 - 1/4 ln 2.
        let (p, q) = ([2f32.ln(), 0.0, 0.0], [0.0, 0.0, 2f32.ln()]);
        let (p, q) = (Row::new(&p).unwrap(), Row::new(&q).unwrap());
        let score = TokenScore::new(&p, &q, 0);
        assert!((score.kld - 0.25 * 2f64.ln()).abs() < 1e-7, "{score:?}");
        assert!((score.delta_p + 0.25).abs() < 1e-7 && !score.same_top, "{score:?}");
        let same = TokenScore::new(&p, &p, 1);
        assert_eq!((same.kld, same.delta_p, same.same_top), (0.0, 0.0, true));
    }
}
