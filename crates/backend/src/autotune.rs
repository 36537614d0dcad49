//! Selects the fastest of several candidates, for devices that benchmark their kernels.
//!
//! Candidates alternate, round after round, so that other load on the machine affects all of them.
//! A candidate replaces the default only when it is clearly faster.

/// The maximum time of a candidate, relative to the default's.
const CLEARLY: f64 = 0.97;

/// Returns the index of the candidate of least time relative to `default`, if clearly less, else
/// `default`: by the median over the rounds, in each of which both ran. `rounds` are the seconds of
/// each candidate, `[candidates, rounds]`.
///
/// # Panics
/// When `default` is out of range.
pub fn fastest(rounds: &[Vec<f64>], default: usize) -> usize {
    let of_default = &rounds[default];
    let relative_time = |rounds: &Vec<f64>| median(rounds.iter().zip(of_default).map(|(a, b)| a / b));
    let best = rounds.iter().map(relative_time).enumerate().min_by(|a, b| a.1.total_cmp(&b.1));
    best.filter(|&(_, ratio)| ratio < CLEARLY).map_or(default, |(index, _)| index)
}

/// Returns the median; the larger of two middle values, NaN for no values.
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
        assert_eq!(fastest(&rounds([f64::NAN, 0.95, 0.9]), 0), 0, "NaN is never selected");
    }

    #[test]
    fn median_is_the_upper_middle_value() {
        assert_eq!(median([3.0, 1.0, 9.0]), 3.0);
        assert_eq!(median([2.0, 1.0]), 2.0);
        assert!(median([]).is_nan());
    }
}
