//! Which of several candidates is the fastest, for devices that time their kernels.
//!
//! Candidates take turns, round after round, so that what else the machine does meets them all, and one replaces the default only when it
//! is clearly faster.

/// A candidate must take this part of the default's time, or less.
const CLEARLY: f64 = 0.97;

/// The number of the candidate that takes least beside `default`, if that is clearly less, else `default`: by the median over the
/// rounds, in each of which both ran. `rounds` are the seconds of each candidate, [candidates, rounds].
///
/// # Panics
/// When there is no candidate `default`.
pub fn fastest(rounds: &[Vec<f64>], default: usize) -> usize {
    let of_default = &rounds[default];
    let beside = |rounds: &Vec<f64>| median(rounds.iter().zip(of_default).map(|(a, b)| a / b));
    let least = rounds.iter().map(beside).enumerate().min_by(|a, b| a.1.total_cmp(&b.1));
    least.filter(|&(_, ratio)| ratio < CLEARLY).map_or(default, |(index, _)| index)
}

/// The value in the middle; of two the larger one, of none NaN.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_candidate_must_be_clearly_faster_than_the_default() {
        let rounds = |ratios: [f64; 3]| ratios.map(|ratio| [1.0, 9.0, 2.0].map(|s| s * ratio).to_vec());
        assert_eq!(fastest(&rounds([1.0, 0.98, 1.5]), 0), 0);
        assert_eq!(fastest(&rounds([1.0, 0.95, 0.9]), 0), 2);
        assert_eq!(fastest(&rounds([1.0, 0.95, 0.9]), 2), 2);
        assert_eq!(fastest(&rounds([f64::NAN, 0.95, 0.9]), 0), 0, "no number, no choice");
    }

    #[test]
    fn half_of_the_values_are_not_above_the_median() {
        assert_eq!(median([3.0, 1.0, 9.0]), 3.0);
        assert_eq!(median([2.0, 1.0]), 2.0);
        assert!(median([]).is_nan());
    }
}
