//! Probabilities of candidates, and their entropy.

use kvant_codec::candidate::Candidate;

use super::math::{exp, ln};

/// The softmax over candidate logits at temperature 1.
pub(super) struct Distribution {
    /// The largest logit.
    best: f64,
    /// The sum of all weights. The likeliest candidate has weight 1.
    total: f64,
}

impl Distribution {
    /// Computes the distribution of `candidates`, at least one.
    pub fn of(candidates: &[Candidate]) -> Self {
        let best = candidates.iter().map(|c| f64::from(c.logit)).fold(f64::NEG_INFINITY, f64::max);
        let total = candidates.iter().map(|c| exp(f64::from(c.logit) - best)).sum();
        Self { best, total }
    }

    pub fn probability(&self, candidate: &Candidate) -> f64 {
        exp(f64::from(candidate.logit) - self.best) / self.total
    }

    /// Returns -ln p, finite even if p underflows.
    pub fn surprise(&self, candidate: &Candidate) -> f64 {
        ln(self.total) - (f64::from(candidate.logit) - self.best)
    }

    /// Returns the mean surprise, in nats.
    pub fn entropy(&self, candidates: &[Candidate]) -> f64 {
        candidates.iter().map(|c| self.probability(c) * self.surprise(c)).sum()
    }
}
