//! Dynamic temperature: low at low entropy, high at high entropy
//! (<https://github.com/ggml-org/llama.cpp/pull/4972>).

use kvant_codec::candidate::Candidate;

use super::entropy::Distribution;
use super::math::{ln, pow};

/// Settings of the dynamic temperature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dynatemp {
    /// Largest deviation from the configured temperature, down to 0; 0 disables it.
    pub range: f32,
    /// Exponent of the normalized entropy, which interpolates within the range.
    pub exponent: f32,
}

impl Default for Dynatemp {
    /// llama.cpp's default: off.
    fn default() -> Self {
        Self { range: 0.0, exponent: 1.0 }
    }
}

impl Dynatemp {
    pub(super) fn is_on(&self) -> bool {
        self.range > 0.0
    }

    /// Returns the temperature for sampling from `candidates`.
    pub(super) fn temperature(&self, usual: f32, candidates: &[Candidate]) -> f64 {
        let usual = f64::from(usual);
        if !self.is_on() || candidates.len() < 2 {
            return usual;
        }
        let range = f64::from(self.range);
        let (low, high) = ((usual - range).max(0.0), usual + range);
        let max_entropy = ln(candidates.len() as f64);
        let share = (Distribution::of(candidates).entropy(candidates) / max_entropy).clamp(0.0, 1.0);
        low + (high - low) * pow(share, f64::from(self.exponent))
    }
}
