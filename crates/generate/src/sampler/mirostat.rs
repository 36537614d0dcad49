//! Mirostat (Basu et al., <https://arxiv.org/abs/2007.14966>): truncates the distribution so that
//! the surprise of sampled tokens stays near a target. The truncation threshold `mu`, the largest
//! surprise allowed, follows from the tokens sampled before.

use kvant_codec::candidate::Candidate;

use super::math::{exp, ln, log2, pow};

/// Number of likeliest tokens that version 1 fits.
const N_ESTIMATED: usize = 100;

/// Settings of Mirostat.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mirostat {
    /// The version.
    pub version: MirostatVersion,
    /// Target surprise, in bits: the target entropy.
    pub tau: f32,
    /// Learning rate of `mu`.
    pub eta: f32,
}

/// Versions of Mirostat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MirostatVersion {
    /// Disabled.
    #[default]
    Off,
    /// Keeps as many tokens as Zipf's law, fitted to the likeliest 100, predicts for the target.
    V1,
    /// Keeps the tokens whose own surprise is at most `mu`.
    V2,
}

impl MirostatVersion {
    /// Converts a version number as clients send it: 0 is off.
    pub fn from_number(number: i64) -> Option<Self> {
        [Self::Off, Self::V1, Self::V2].into_iter().find(|version| version.number() == number)
    }

    /// Returns 0 for off, 1 or 2.
    pub fn number(self) -> i64 {
        match self {
            Self::Off => 0,
            Self::V1 => 1,
            Self::V2 => 2,
        }
    }
}

impl Default for Mirostat {
    /// llama.cpp's default: off.
    fn default() -> Self {
        Self { version: MirostatVersion::Off, tau: 5.0, eta: 0.1 }
    }
}

impl Mirostat {
    /// Returns the initial `mu`.
    pub(super) fn first_mu(&self) -> f64 {
        2.0 * f64::from(self.tau)
    }

    /// Returns `mu` after sampling a token with this probability in the truncated distribution.
    pub(super) fn next_mu(&self, mu: f64, probability: f64) -> f64 {
        let surprise = -log2(probability.max(f64::MIN_POSITIVE));
        mu - f64::from(self.eta) * (surprise - f64::from(self.tau))
    }

    /// Keeps the likeliest `candidates`, sorted, at least one: those that `mu` allows, for a
    /// vocabulary of `n_vocab` tokens.
    pub(super) fn apply(&self, mu: f64, scale: Scale, n_vocab: usize, candidates: &mut Vec<Candidate>) {
        match self.version {
            MirostatVersion::Off => {}
            MirostatVersion::V1 => {
                sort_likeliest(N_ESTIMATED, candidates);
                let kept = n_kept(mu, scale, n_vocab, &candidates[..N_ESTIMATED.min(candidates.len())]);
                sort_likeliest(kept, candidates);
                candidates.truncate(kept);
            }
            MirostatVersion::V2 => {
                // A surprise of at most mu, where the surprise is -log2 of a weight's share.
                let total: f64 = candidates.iter().map(|c| scale.weight(c)).sum();
                let min_weight = total * pow(2.0, -mu);
                sort_likeliest(1, candidates);
                let likeliest = candidates[0];
                candidates.retain(|c| *c == likeliest || scale.weight(c) >= min_weight);
                candidates.sort_unstable_by(Candidate::rank);
            }
        }
    }
}

/// Conversion of logits to weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    /// The largest logit.
    pub best: f64,
    /// The divisor of logits; above 0.
    pub temperature: f64,
}

impl Scale {
    /// Returns the weight of a candidate; the likeliest has 1.
    fn weight(&self, candidate: &Candidate) -> f64 {
        exp((f64::from(candidate.logit) - self.best) / self.temperature)
    }
}

/// Moves the likeliest `n` candidates, or all if fewer, to the front in order.
fn sort_likeliest(n: usize, candidates: &mut [Candidate]) {
    let n = n.min(candidates.len());
    if n > 0 && n < candidates.len() {
        candidates.select_nth_unstable_by(n - 1, Candidate::rank);
    }
    candidates[..n].sort_unstable_by(Candidate::rank);
}

/// Returns how many tokens version 1 keeps, at least one. If the probabilities of the tokens by
/// rank fall as rank to the -s (Zipf's law), sampling from the k likeliest alone has the surprise
/// mu for k = (ε 2^mu / (1 - n^-ε))^(1/s), ε = s - 1. s is fitted to the `likeliest` by least
/// squares: ln(p of i / p of i + 1) = s ln((i + 1) / i).
fn n_kept(mu: f64, scale: Scale, n_vocab: usize, likeliest: &[Candidate]) -> usize {
    if likeliest.len() < 2 {
        return 1;
    }
    let (mut of_both, mut of_squares) = (0.0, 0.0);
    for (i, pair) in likeliest.windows(2).enumerate() {
        let step = ln((i + 2) as f64 / (i + 1) as f64);
        let fall = (f64::from(pair[0].logit) - f64::from(pair[1].logit)) / scale.temperature;
        of_both += step * fall;
        of_squares += step * step;
    }
    let s = of_both / of_squares;
    let (epsilon, n) = (s - 1.0, n_vocab as f64);
    // The limit for ε → 0.
    let ratio = if epsilon.abs() < 1e-9 { 1.0 / ln(n) } else { epsilon / (1.0 - pow(n, -epsilon)) };
    // Float casts saturate. NaN, from probabilities that do not fall at all, becomes 0.
    (pow(ratio * pow(2.0, mu), 1.0 / s) as usize).max(1)
}
