//! DRY ("don't repeat yourself", <https://github.com/oobabooga/text-generation-webui/pull/5677>): where the last tokens have been
//! said before, in the same order, the token that came after them there becomes less likely, the more so the longer they are.

use kvant_codec::candidate::Candidate;

use super::breakers::Breakers;

/// Settings of DRY.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dry {
    /// What is taken from a logit after a repetition of the allowed length; 0 is off.
    pub multiplier: f32,
    /// What that is multiplied by for each token more.
    pub base: f32,
    /// The length of the shortest repetition that is penalised, without the token that would go on with it.
    pub allowed_length: usize,
    /// How many of the last tokens are looked at.
    pub last_n: usize,
}

impl Default for Dry {
    /// llama.cpp's: off.
    fn default() -> Self {
        Self { multiplier: 0.0, base: 1.75, allowed_length: 2, last_n: 64 }
    }
}

/// A token that would go on with a repetition, and of how many tokens.
#[derive(Debug, Clone, Copy)]
struct Continued {
    token: u32,
    length: usize,
}

/// Room to look for repetitions in.
#[derive(Debug, Clone, Default)]
pub(super) struct Scratch {
    /// For each distance, how many of the last tokens are the same as those that far before them.
    matches: Vec<usize>,
    continued: Vec<Continued>,
}

impl Dry {
    /// Whether it may change a draw.
    pub fn is_on(&self) -> bool {
        self.multiplier > 0.0
    }

    /// Makes `candidates` less likely that would go on with a repetition in `tokens`, oldest first.
    pub(super) fn apply(
        &self,
        breakers: &Breakers,
        tokens: &[u32],
        candidates: &mut [Candidate],
        scratch: &mut Scratch,
    ) {
        let tokens = &tokens[tokens.len().saturating_sub(self.last_n)..];
        let most = breakers.n_after_last(tokens);
        if most < self.allowed_length {
            return;
        }
        count_matches(tokens, &mut scratch.matches);
        let continued = &mut scratch.continued;
        continued.clear();
        continued.extend(scratch.matches.iter().enumerate().skip(1).filter_map(|(distance, &length)| {
            let length = length.min(most);
            let token = tokens[tokens.len() - distance];
            (length >= self.allowed_length).then_some(Continued { token, length })
        }));
        // The longest of each token, and none of those that break a repetition.
        continued.sort_unstable_by(|a, b| a.token.cmp(&b.token).then(b.length.cmp(&a.length)));
        continued.dedup_by_key(|continued| continued.token);
        continued.retain(|continued| !breakers.is_within(continued.token));
        if continued.is_empty() {
            return;
        }
        for candidate in candidates.iter_mut().filter(|c| c.logit > f32::NEG_INFINITY) {
            if let Ok(at) = continued.binary_search_by_key(&candidate.id, |continued| continued.token) {
                let logit = f64::from(candidate.logit) - self.penalty(continued[at].length);
                // Clamped: an extreme penalty must not make an infinity of a logit.
                candidate.logit = logit.max(f64::from(f32::MIN)) as f32;
            }
        }
    }

    /// multiplier * base ^ (length - allowed length), as far as there are logits.
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

/// For each distance below the number of `tokens`, how many of the last of them are the same as those that far before them: the
/// Z-function of the reversed tokens, in linear time. The first is for distance 0, and 0.
fn count_matches(tokens: &[u32], matches: &mut Vec<usize>) {
    let n = tokens.len();
    let back = |i: usize| tokens[n - 1 - i];
    matches.clear();
    matches.resize(n, 0);
    // What from..to matches the beginning, of those that were found the one that ends last.
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

    /// As the definition has it: each place before the end, how far back it agrees with the end.
    fn matches_by_hand(tokens: &[u32]) -> Vec<usize> {
        let n = tokens.len();
        let agree = |distance: usize| {
            (0..n - distance).take_while(|i| tokens[n - 1 - i] == tokens[n - 1 - distance - i]).count()
        };
        (0..n).map(|distance| if distance == 0 { 0 } else { agree(distance) }).collect()
    }

    #[test]
    fn matches_are_those_of_every_pair_of_places() {
        let mut matches = Vec::new();
        // All texts of up to eight tokens of two kinds, and longer ones of which most repeats.
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
        // a b c c b c y a b c: what comes after a b c was c, after b c y.
        count_matches(&[1, 2, 3, 3, 2, 3, 9, 1, 2, 3], &mut matches);
        assert_eq!(matches, [0, 0, 0, 0, 2, 0, 1, 3, 0, 0]);
    }

    #[test]
    fn penalties_are_the_power_and_stay_numbers() {
        let dry = Dry { multiplier: 0.5, base: 2.0, allowed_length: 2, last_n: 64 };
        assert_eq!([2, 3, 5].map(|length| dry.penalty(length)), [0.5, 1.0, 4.0]);
        assert!(dry.penalty(1_000_000).is_finite());
        assert_eq!(Dry { base: 1.0, ..dry }.penalty(usize::MAX), 0.5);
    }
}
