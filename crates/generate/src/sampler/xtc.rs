//! XTC (exclude top choices, <https://github.com/oobabooga/text-generation-webui/pull/6335>):
//! removes, with a given probability, all tokens above a threshold except the least likely of them.

use kvant_codec::candidate::Candidate;

use super::math::exp;

/// Settings of XTC.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Xtc {
    /// Probability that a sample applies XTC; 0 disables it.
    pub probability: f32,
    /// Probability from which tokens are removed, except the least likely of them. Above 0.5, which
    /// two tokens cannot reach, nothing is removed.
    pub threshold: f32,
}

impl Default for Xtc {
    /// llama.cpp's default: off.
    fn default() -> Self {
        Self { probability: 0.0, threshold: 0.1 }
    }
}

impl Xtc {
    /// Whether XTC may change a sample.
    pub(super) fn is_on(&self) -> bool {
        self.probability > 0.0 && self.threshold <= 0.5
    }

    /// Removes the likeliest of the sorted `candidates`.
    pub(super) fn apply(&self, candidates: &mut Vec<Candidate>) {
        let Some(&Candidate { logit: best, .. }) = candidates.first() else { return };
        let weight = |c: &Candidate| exp(f64::from(c.logit) - f64::from(best));
        let enough = f64::from(self.threshold) * candidates.iter().map(weight).sum::<f64>();
        let n_likely = candidates.iter().take_while(|c| weight(c) >= enough).count();
        candidates.drain(..n_likely.saturating_sub(1));
    }
}
