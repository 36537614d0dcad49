//! XTC (exclude top choices, <https://github.com/oobabooga/text-generation-webui/pull/6335>): now and then the likeliest tokens are
//! removed, all but the least likely one of those that are likely enough to go on with.

use kvant_codec::candidate::Candidate;

use super::math::exp;

/// Settings of XTC.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Xtc {
    /// How likely a draw is to be one that it changes; 0 is off.
    pub probability: f32,
    /// Tokens at least this likely are removed, but for the last of them; above 0.5, where there cannot be two, nothing is.
    pub threshold: f32,
}

impl Default for Xtc {
    /// llama.cpp's: off.
    fn default() -> Self {
        Self { probability: 0.0, threshold: 0.1 }
    }
}

impl Xtc {
    /// Whether it may change a draw.
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
