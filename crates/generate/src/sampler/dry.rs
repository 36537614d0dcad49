//! DRY ("don't repeat yourself", <https://github.com/oobabooga/text-generation-webui/pull/5677>):
//! penalizes tokens that would extend a repetition of the last tokens, the more the longer the
//! repetition is.

use kvant_codec::candidate::Candidate;

use super::breakers::SequenceBreakers;

/// Settings of DRY.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dry {
    /// Penalty on the logit after a repetition of `allowed_length`; 0 disables DRY.
    pub multiplier: f32,
    /// Factor of the penalty per further repeated token.
    pub base: f32,
    /// Length of the shortest penalized repetition, without the token that would extend it.
    pub allowed_length: usize,
    /// Number of most recent tokens to search.
    pub last_n: usize,
}

impl Default for Dry {
    /// llama.cpp's default: off.
    fn default() -> Self {
        Self { multiplier: 0.0, base: 1.75, allowed_length: 2, last_n: 64 }
    }
}

/// A token that would extend a repetition, and the length of that repetition.
#[derive(Debug, Clone, Copy)]
struct Continuation {
    token: u32,
    length: usize,
}

/// Buffers for the search.
#[derive(Debug, Clone, Default)]
pub(super) struct Scratch {
    /// For each distance, the number of last tokens that equal those at that distance before them.
    matches: Vec<usize>,
    continued: Vec<Continuation>,
}

impl Dry {
    /// Whether DRY may change a sample.
    pub fn is_on(&self) -> bool {
        self.multiplier > 0.0
    }

    /// Penalizes `candidates` that would extend a repetition in `tokens`, oldest first.
    pub(super) fn apply(
        &self,
        breakers: &SequenceBreakers,
        tokens: &[u32],
        candidates: &mut [Candidate],
        scratch: &mut Scratch,
    ) {
        let tokens = &tokens[tokens.len().saturating_sub(self.last_n)..];
        let max_length = breakers.n_after_last(tokens);
        if max_length < self.allowed_length {
            return;
        }
        count_matches(tokens, &mut scratch.matches);
        let continued = &mut scratch.continued;
        continued.clear();
        continued.extend(scratch.matches.iter().enumerate().skip(1).filter_map(|(distance, &length)| {
            let length = length.min(max_length);
            let token = tokens[tokens.len() - distance];
            (length >= self.allowed_length).then_some(Continuation { token, length })
        }));
        // Keep the longest repetition per token, and drop sequence breakers.
        continued.sort_unstable_by(|a, b| a.token.cmp(&b.token).then(b.length.cmp(&a.length)));
        continued.dedup_by_key(|continued| continued.token);
        continued.retain(|continued| !breakers.contains_breaker(continued.token));
        if continued.is_empty() {
            return;
        }
        for candidate in candidates.iter_mut().filter(|c| c.logit > f32::NEG_INFINITY) {
            if let Ok(at) = continued.binary_search_by_key(&candidate.id, |continued| continued.token) {
                let logit = f64::from(candidate.logit) - self.penalty(continued[at].length);
                // Clamped: an extreme penalty must not turn a logit into an infinity.
                candidate.logit = logit.max(f64::from(f32::MIN)) as f32;
            }
        }
    }

    /// Returns multiplier * base ^ (length - allowed length), bounded by the range of logits.
    fn penalty(&self, length: usize) -> f64 {
        let mut penalty = f64::from(self.multiplier);
        if self.base == 1.0 {
            return penalty;
        }
        for _ in self.allowed_length..length {
            if penalty > 2.0 * f64::from(f32::MAX) {
                break;
            }
            penalty *= f64::from(self.base);
        }
        penalty
    }
}

/// Computes, for each distance below the number of `tokens`, how many of the last tokens equal
/// those at that distance before them: the Z-function of the reversed tokens, in linear time. The
/// entry for distance 0 is 0.
fn count_matches(tokens: &[u32], matches: &mut Vec<usize>) {
    let n = tokens.len();
    let back = |i: usize| tokens[n - 1 - i];
    matches.clear();
    matches.resize(n, 0);
    // from..to is the match with the prefix that ends last among those found.
    let (mut from, mut to) = (0, 0);
    for distance in 1..n {
        let mut length = if distance < to { matches[distance - from].min(to - distance) } else { 0 };
        while distance + length < n && back(length) == back(distance + length) {
            length += 1;
        }
        matches[distance] = length;
        if distance + length > to {
            (from, to) = (distance, distance + length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: for each position before the end, the length of its agreement with the end.
    fn matches_by_hand(tokens: &[u32]) -> Vec<usize> {
        let n = tokens.len();
        let agree = |distance: usize| {
            (0..n - distance).take_while(|i| tokens[n - 1 - i] == tokens[n - 1 - distance - i]).count()
        };
        (0..n).map(|distance| if distance == 0 { 0 } else { agree(distance) }).collect()
    }

    #[test]
    fn matches_equal_the_quadratic_definition() {
        let mut matches = Vec::new();
        // All binary sequences of up to eight tokens, and longer ones that are mostly periodic.
        for n in 0..=8 {
            for text in 0..1u32 << n {
                let tokens: Vec<u32> = (0..n).map(|i| text >> i & 1).collect();
                count_matches(&tokens, &mut matches);
                assert_eq!(matches, matches_by_hand(&tokens), "{tokens:?}");
            }
        }
        for period in 1..9 {
            let tokens: Vec<u32> = (0..60).map(|i| if i % 23 == 22 { 99 } else { i % period }).collect();
            count_matches(&tokens, &mut matches);
            assert_eq!(matches, matches_by_hand(&tokens), "{tokens:?}");
        }
        // a b c c b c y a b c: the earlier a b c was followed by c, the earlier b c by y.
        count_matches(&[1, 2, 3, 3, 2, 3, 9, 1, 2, 3], &mut matches);
        assert_eq!(matches, [0, 0, 0, 0, 2, 0, 1, 3, 0, 0]);
    }

    #[test]
    fn penalties_are_powers_and_stay_finite() {
        let dry = Dry { multiplier: 0.5, base: 2.0, allowed_length: 2, last_n: 64 };
        assert_eq!([2, 3, 5].map(|length| dry.penalty(length)), [0.5, 1.0, 4.0]);
        assert!(dry.penalty(1_000_000).is_finite());
        assert_eq!(Dry { base: 1.0, ..dry }.penalty(usize::MAX), 0.5);
    }
}
