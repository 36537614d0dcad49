//! Mirostat (Basu et al., <https://arxiv.org/abs/2007.14966>): tokens are cut so that the surprise of those drawn stays near a
//! target. What is cut, `mu`, the most surprise that is let through, follows from what was drawn before.

use kvant_codec::candidate::Candidate;

use super::math::{exp, ln, log2, pow};

/// How many of the likeliest tokens version 1 looks at.
const N_ESTIMATED: usize = 100;

/// Settings of Mirostat.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mirostat {
    /// Which of its versions.
    pub version: MirostatVersion,
    /// The surprise to keep to, in bits: the target of the entropy.
    pub tau: f32,
    /// How much of an error is made good with each token: the learning rate.
    pub eta: f32,
}

/// Versions of Mirostat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MirostatVersion {
    /// None.
    #[default]
    Off,
    /// Keeps as many tokens as Zipf's law, fitted to the likeliest 100, wants for the target.
    V1,
    /// Keeps the tokens whose own surprise is small enough.
    V2,
}

impl MirostatVersion {
    /// Off, 1 and 2 by number, as clients name them.
    pub fn from_number(number: i64) -> Option<Self> {
        [Self::Off, Self::V1, Self::V2].into_iter().find(|version| version.number() == number)
    }

    /// 0 for off, 1 or 2.
    pub fn number(self) -> i64 {
        match self {
            Self::Off => 0,
            Self::V1 => 1,
            Self::V2 => 2,
        }
    }
}

impl Default for Mirostat {
    /// llama.cpp's: off.
    fn default() -> Self {
        Self { version: MirostatVersion::Off, tau: 5.0, eta: 0.1 }
    }
}

impl Mirostat {
    /// `mu` before anything has been drawn.
    pub(super) fn first_mu(&self) -> f64 {
        2.0 * f64::from(self.tau)
    }

    /// `mu` after a token of this probability, among those that were kept, has been drawn.
    pub(super) fn next_mu(&self, mu: f64, probability: f64) -> f64 {
        let surprise = -log2(probability.max(f64::MIN_POSITIVE));
        mu - f64::from(self.eta) * (surprise - f64::from(self.tau))
    }

    /// Keeps the likeliest of `candidates`, sorted, one at least: those that `mu` lets through, of a vocabulary of `n_vocab` tokens.
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
                let least = total * pow(2.0, -mu);
                sort_likeliest(1, candidates);
                let likeliest = candidates[0];
                candidates.retain(|c| *c == likeliest || scale.weight(c) >= least);
                candidates.sort_unstable_by(Candidate::rank);
            }
        }
    }
}

/// How weights come of logits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    /// The largest logit.
    pub best: f64,
    /// What logits are divided by; above 0.
    pub temperature: f64,
}

impl Scale {
    /// The weight of a candidate, of which the likeliest has 1.
    fn weight(&self, candidate: &Candidate) -> f64 {
        exp((f64::from(candidate.logit) - self.best) / self.temperature)
    }
}

/// Puts the likeliest `n`, or all where there are fewer, in front and in order.
fn sort_likeliest(n: usize, candidates: &mut [Candidate]) {
    let n = n.min(candidates.len());
    if n > 0 && n < candidates.len() {
        candidates.select_nth_unstable_by(n - 1, Candidate::rank);
    }
    candidates[..n].sort_unstable_by(Candidate::rank);
}

/// How many tokens version 1 keeps, one at least. If the probabilities of the tokens by rank fall as rank to the -s (Zipf's law), the
/// k likeliest, drawn from alone, have the surprise mu for k = (ε 2^mu / (1 - n^-ε))^(1/s), ε = s - 1. s is fitted to the `likeliest`
/// by least squares: ln(p of i / p of i + 1) = s ln((i + 1) / i).
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
    // At 0 it is the limit.
    let ratio = if epsilon.abs() < 1e-9 { 1.0 / ln(n) } else { epsilon / (1.0 - pow(n, -epsilon)) };
    // Casts of floats saturate; what is no number, of probabilities that do not fall at all, is 0.
    (pow(ratio * pow(2.0, mu), 1.0 / s) as usize).max(1)
}
