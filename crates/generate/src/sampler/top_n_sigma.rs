//! Top-n-sigma (Tang et al., <https://arxiv.org/abs/2411.07641>): keeps tokens whose logits are
//! within n standard deviations of the largest.

use kvant_codec::candidate::Candidate;

/// Keeps the `candidates` whose logits are at most `n` standard deviations below the largest.
pub(super) fn apply(n: f32, candidates: &mut Vec<Candidate>) {
    let logits = || candidates.iter().map(|c| f64::from(c.logit));
    let count = candidates.len() as f64;
    let mean = logits().sum::<f64>() / count;
    let variance = logits().map(|logit| (logit - mean) * (logit - mean)).sum::<f64>() / count;
    let min_logit = logits().fold(f64::NEG_INFINITY, f64::max) - f64::from(n) * variance.sqrt();
    candidates.retain(|c| f64::from(c.logit) >= min_logit);
}
