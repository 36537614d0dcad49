//! Probabilities of candidates, and what they tell together.

use kvant_codec::candidate::Candidate;

use super::math::{exp, ln};

/// The softmax of candidates' logits, at temperature 1.
pub(super) struct Distribution {
    /// The largest logit.
    best: f64,
    /// The sum of all weights, of which the likeliest has 1.
    total: f64,
}

impl Distribution {
    /// That of `candidates`, of which there is one at least.
    pub fn of(candidates: &[Candidate]) -> Self {
        let best = candidates.iter().map(|c| f64::from(c.logit)).fold(f64::NEG_INFINITY, f64::max);
        let total = candidates.iter().map(|c| exp(f64::from(c.logit) - best)).sum();
        Self { best, total }
    }

    pub fn probability(&self, candidate: &Candidate) -> f64 {
        exp(f64::from(candidate.logit) - self.best) / self.total
    }

    /// -ln p, which is finite also where p is too small for a number.
    pub fn surprise(&self, candidate: &Candidate) -> f64 {
        ln(self.total) - (f64::from(candidate.logit) - self.best)
    }

    /// The mean surprise, in nats.
    pub fn entropy(&self, candidates: &[Candidate]) -> f64 {
        candidates.iter().map(|c| self.probability(c) * self.surprise(c)).sum()
    }
}
