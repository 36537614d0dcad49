//! Factors and centres from statistics.
//!
//! A rotated code spreads its noise evenly over the stored dims. With keys stored as A k and queries divided by A, the noise of
//! a score is `tr(A Sk A^T) tr(A^-T Sq A^-1)` up to the code's own factor: Sk the covariance of the keys around their centre, Sq
//! the second moment of the queries that meet them. For a diagonal A = diag(s) that is `(sum s^2 Sk) (sum Sq / s^2)`, and by
//! Cauchy and Schwarz least at `s^4 = Sq / Sk`. Values are the same, with the squared columns of the output matrix for Sq.
//!
//! RoPE turns pairs of dims into each other as positions grow: with one factor for a pair the result holds at any position.

use kvant::{Balance, LayerBalance};

use super::statistics::{LayerStatistics, Statistics};

/// Factors of a head lie within this of their geometric mean: statistics of few tokens are not to be trusted further, and
/// numbers stay within f16.
const MOST: f64 = 64.0;

impl Statistics {
    /// What keys and values are best multiplied by before they are stored, and the centre of the values.
    pub fn balance(&self) -> Balance {
        Balance { layers: self.layers.iter().map(LayerStatistics::balance).collect() }
    }
}

impl LayerStatistics {
    pub fn balance(&self) -> LayerBalance {
        let (k_dim, v_dim) = (self.shape.k_head_dim, self.shape.v_head_dim);
        let (of_keys, of_values) = (self.key_groups(), (0..v_dim).map(|dim| vec![dim]).collect::<Vec<_>>());
        let heads = 0..self.shape.n_kv_heads;
        let k_scale = heads.clone().flat_map(|head| {
            let dims = head * k_dim..(head + 1) * k_dim;
            factors(&of_keys, &self.q[dims.clone()], &self.k[dims])
        });
        let v_scale = heads.flat_map(|head| {
            let dims = head * v_dim..(head + 1) * v_dim;
            factors(&of_values, &self.w[dims.clone()], &self.v[dims])
        });
        let v_centre = self.v_mean.iter().map(|&mean| if mean.is_finite() { rounded(mean) } else { 0.0 });
        LayerBalance { k_scale: k_scale.collect(), v_scale: v_scale.collect(), v_centre: v_centre.collect() }
    }
}

/// `(read / stored)^(1/4)` of each dim, the same for all dims of a group, their geometric mean 1: a factor that all share
/// changes nothing. 1 where nothing is stored, nothing reads it, or either is no number.
fn factors(groups: &[Vec<usize>], read: &[f64], stored: &[f64]) -> Vec<f32> {
    let sum = |of: &[f64], group: &[usize]| group.iter().map(|&dim| of[dim]).sum::<f64>();
    let log = |group: &Vec<usize>| {
        let ratio = sum(read, group) / sum(stored, group);
        (ratio.is_finite() && ratio > 0.0).then(|| ratio.ln() / 4.0)
    };
    let logs: Vec<Option<f64>> = groups.iter().map(log).collect();
    let sound =
        || logs.iter().zip(groups).filter_map(|(log, group)| Some((log.as_ref()?, group.len() as f64)));
    let n: f64 = sound().map(|(_, n)| n).sum();
    let mean = sound().map(|(log, n)| log * n).sum::<f64>() / n.max(1.0);
    let mut out = vec![1.0; stored.len()];
    for (log, group) in logs.iter().zip(groups) {
        let Some(log) = log else { continue };
        let factor = (log - mean).exp().clamp(1.0 / MOST, MOST);
        group.iter().for_each(|&dim| out[dim] = rounded(factor));
    }
    out
}

/// Five digits, so that a file says what was measured.
fn rounded(x: f64) -> f32 {
    format!("{x:.4e}").parse().unwrap_or(0.0)
}

/// How much of a layer's noise each head makes when all have the same code: `(sum s^2 stored) (sum read / s^2)`, in shares of
/// the layer. Even shares where nothing can be said.
pub(super) fn shares(scale: &[f32], read: &[f64], stored: &[f64], n_heads: usize) -> Vec<f64> {
    let dim = scale.len() / n_heads.max(1);
    let noise = |head: usize| {
        let dims = head * dim..(head + 1) * dim;
        let squares = || scale[dims.clone()].iter().map(|&s| f64::from(s).powi(2));
        let stored: f64 = squares().zip(&stored[dims.clone()]).map(|(s, x)| s * x).sum();
        let read: f64 = squares().zip(&read[dims.clone()]).map(|(s, x)| x / s).sum();
        stored * read
    };
    let noise: Vec<f64> = (0..n_heads).map(noise).collect();
    let total: f64 = noise.iter().sum();
    let even = 1.0 / n_heads.max(1) as f64;
    noise.iter().map(|x| if total.is_finite() && total > 0.0 { x / total } else { even }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIRS: [[usize; 2]; 2] = [[0, 2], [1, 3]];

    fn pairs() -> Vec<Vec<usize>> {
        PAIRS.map(Vec::from).to_vec()
    }

    #[test]
    fn no_other_factors_of_pairs_make_less_noise() {
        let (read, stored) = ([4.0, 1.0, 12.0, 0.5], [0.1, 3.0, 0.2, 1.0]);
        let noise = |s: &[f32]| {
            let sum = |of: fn(f64, f64) -> f64, x: &[f64]| {
                s.iter().zip(x).map(|(&s, &x)| of(f64::from(s).powi(2), x)).sum::<f64>()
            };
            sum(|s, x| s * x, &stored) * sum(|s, x| x / s, &read)
        };
        let best = factors(&pairs(), &read, &stored);
        assert_eq!((best[0], best[1]), (best[2], best[3]));
        assert!((best.iter().map(|s| s.ln()).sum::<f32>()).abs() < 1e-3, "{best:?}");
        for change in [0.8, 0.9, 0.99, 1.01, 1.1, 1.25] {
            let other = [best[0] * change, best[1], best[2] * change, best[3]];
            assert!(noise(&best) < noise(&other), "{change}: {} {}", noise(&best), noise(&other));
        }
        // Nothing at all is worse by far.
        assert!(2.0 * noise(&best) < noise(&[1.0; 4]));
    }

    #[test]
    fn what_is_never_there_or_no_number_has_factor_one_and_no_factor_runs_away() {
        for (read, stored) in [
            ([0.0; 4], [1.0; 4]),
            ([1.0; 4], [0.0; 4]),
            ([f64::NAN; 4], [1.0; 4]),
            ([f64::INFINITY; 4], [1.0; 4]),
            ([1.0; 4], [f64::INFINITY; 4]),
            ([0.0; 4], [0.0; 4]),
        ] {
            assert_eq!(factors(&pairs(), &read, &stored), [1.0; 4], "{read:?} {stored:?}");
        }
        // One pair dead, the other as it would be alone.
        assert_eq!(factors(&pairs(), &[0.0, 5.0, 0.0, 5.0], &[1.0; 4]), [1.0; 4]);
        let far = factors(&pairs(), &[1e30, 1.0, 1e30, 1.0], &[1e-30, 1.0, 1e-30, 1.0]);
        assert_eq!(far, [64.0, 1.0 / 64.0, 64.0, 1.0 / 64.0]);
    }

    #[test]
    fn shares_follow_the_noise_and_are_even_where_there_is_none() {
        assert_eq!(shares(&[1.0; 4], &[1.0, 1.0, 3.0, 3.0], &[1.0; 4], 2), [0.25, 0.75]);
        assert_eq!(shares(&[1.0; 4], &[0.0; 4], &[0.0; 4], 2), [0.5, 0.5]);
        assert_eq!(shares(&[1.0; 4], &[f64::NAN; 4], &[1.0; 4], 2), [0.5, 0.5]);
    }
}
