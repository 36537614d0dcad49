//! Locally typical sampling (Meister et al., <https://arxiv.org/abs/2202.00666>): keeps the tokens
//! whose surprise, -ln p, is nearest to the entropy, its mean.

use kvant_codec::candidate::Candidate;

use super::entropy::Distribution;

/// A candidate, its probability, and the distance of its surprise from the entropy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Typicality {
    candidate: Candidate,
    probability: f64,
    distance: f64,
}

/// Keeps the fewest most typical `candidates` whose probabilities sum to more than `p`, using
/// `scratch` as a buffer.
pub(super) fn apply(p: f32, candidates: &mut Vec<Candidate>, scratch: &mut Vec<Typicality>) {
    let distribution = Distribution::of(candidates);
    let entropy = distribution.entropy(candidates);
    scratch.clear();
    scratch.extend(candidates.iter().map(|&candidate| Typicality {
        candidate,
        probability: distribution.probability(&candidate),
        distance: (distribution.surprise(&candidate) - entropy).abs(),
    }));
    scratch.sort_unstable_by(|a, b| {
        a.distance.total_cmp(&b.distance).then_with(|| Candidate::rank(&a.candidate, &b.candidate))
    });
    let mut sum = 0.0;
    let passed = scratch.iter().position(|typicality| {
        sum += typicality.probability;
        sum > f64::from(p)
    });
    scratch.truncate(passed.map_or(scratch.len(), |last| last + 1));
    candidates.clear();
    candidates.extend(scratch.iter().map(|typicality| typicality.candidate));
}
