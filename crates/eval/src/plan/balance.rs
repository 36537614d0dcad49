//! Factors and centres from statistics.
//!
//! A rotated code spreads its noise evenly over the stored dims. With keys stored as A k and queries divided by A, the noise of
//! a score is `tr(A Sk A^T) tr(A^-T Sq A^-1)` up to the code's own factor: Sk the covariance of the keys around their centre, Sq
//! the second moment of the queries that meet them. For a diagonal A = diag(s) that is `(sum s^2 Sk) (sum Sq / s^2)`, and by
//! Cauchy and Schwarz least at `s^4 = Sq / Sk`. Values are the same, with the squared columns of the output matrix for Sq.
//!
//! RoPE turns pairs of dims into each other as positions grow: squares of keys and queries are those of all positions that a plan is
//! made for ([`super::moments`]), so that a factor that would be wrong further on is not taken.
//!
//! Where values are the first part of their keys, one row is read twice: what reads the values adds to what reads the keys, and the
//! rest is the same.

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
        let heads = 0..self.shape.n_kv_heads;
        let own_values = if self.shape.joint { 0..0 } else { heads.clone() };
        let k_scale = heads.clone().flat_map(|head| {
            let dims = head * k_dim..(head + 1) * k_dim;
            factors(&self.q[dims.clone()], &self.k[dims])
        });
        let v_scale = own_values.clone().flat_map(|head| {
            let dims = head * v_dim..(head + 1) * v_dim;
            factors(&self.w[dims.clone()], &self.v[dims])
        });
        let means = &self.v_mean[..own_values.len() * v_dim];
        let v_centre = means.iter().map(|&mean| if mean.is_finite() { rounded(mean) } else { 0.0 });
        LayerBalance { k_scale: k_scale.collect(), v_scale: v_scale.collect(), v_centre: v_centre.collect() }
    }
}

/// `(read / stored)^(1/4)` of each dim, their geometric mean 1: a factor that all share changes nothing. 1 where nothing is
/// stored, nothing reads it, or either is no number.
fn factors(read: &[f64], stored: &[f64]) -> Vec<f32> {
    let log = |(read, stored): (&f64, &f64)| {
        let ratio = read / stored;
        (ratio.is_finite() && ratio > 0.0).then(|| ratio.ln() / 4.0)
    };
    let logs: Vec<Option<f64>> = read.iter().zip(stored).map(log).collect();
    let sound = || logs.iter().flatten();
    let mean = sound().sum::<f64>() / sound().count().max(1) as f64;
    let factor =
        |log: &Option<f64>| log.map_or(1.0, |log| rounded((log - mean).exp().clamp(1.0 / MOST, MOST)));
    logs.iter().map(factor).collect()
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
    use kvant::{KvLayerShape, KvShape};

    use super::*;

    #[test]
    fn no_other_factors_make_less_noise() {
        let (read, stored) = ([4.0, 1.0, 12.0, 0.5], [0.1, 3.0, 0.2, 1.0]);
        let noise = |s: &[f32]| {
            let sum = |of: fn(f64, f64) -> f64, x: &[f64]| {
                s.iter().zip(x).map(|(&s, &x)| of(f64::from(s).powi(2), x)).sum::<f64>()
            };
            sum(|s, x| s * x, &stored) * sum(|s, x| x / s, &read)
        };
        let best = factors(&read, &stored);
        assert!((best.iter().map(|s| s.ln()).sum::<f32>()).abs() < 1e-3, "{best:?}");
        for change in [0.8, 0.9, 0.99, 1.01, 1.1, 1.25] {
            let other = [best[0] * change, best[1], best[2], best[3] / change];
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
            assert_eq!(factors(&read, &stored), [1.0; 4], "{read:?} {stored:?}");
        }
        // Some dims dead, the others as they would be alone.
        assert_eq!(factors(&[0.0, 5.0, 0.0, 5.0], &[1.0; 4]), [1.0; 4]);
        let far = factors(&[1e30, 1.0, 1e30, 1.0], &[1e-30, 1.0, 1e-30, 1.0]);
        assert_eq!(far, [64.0, 1.0 / 64.0, 64.0, 1.0 / 64.0]);
    }

    #[test]
    fn heads_that_are_dead_or_alike_or_all_but_flat_have_a_balance_that_a_cache_takes() {
        // Heads: usual, the same again, dead, and one whose energy lies in one dim but for a rest that is next to nothing.
        let shape = KvLayerShape {
            n_heads: 4,
            n_kv_heads: 4,
            k_head_dim: 2,
            v_head_dim: 2,
            window: None,
            joint: false,
        };
        let usual = [16.0, 0.0625, 16.0, 0.0625, 0.0, 0.0, 1.0, 1e-300];
        let layer = |v: [f64; 8]| LayerStatistics {
            shape,
            q: vec![1.0; 8],
            k: usual.to_vec(),
            v_mean: vec![0.0, f64::NAN, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            v: v.to_vec(),
            w: vec![1.0; 8],
        };
        for v in [usual, [0.0; 8]] {
            let balance = layer(v).balance();
            assert_eq!(balance.k_scale, [0.5, 2.0, 0.5, 2.0, 1.0, 1.0, 1.0 / 64.0, 64.0]);
            assert_eq!(balance.v_scale, if v == usual { balance.k_scale.clone() } else { vec![1.0; 8] });
            assert_eq!(balance.v_centre, [0.0; 8]);
            let shares = shares(&balance.k_scale, &layer(v).q, &usual, 4);
            assert!(shares[0] == shares[1] && shares[2] == 0.0, "{shares:?}");
            assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{shares:?}");
            Balance { layers: vec![balance] }.check(&KvShape::uniform(1, shape)).unwrap();
        }
    }

    #[test]
    fn shares_follow_the_noise_and_are_even_where_there_is_none() {
        assert_eq!(shares(&[1.0; 4], &[1.0, 1.0, 3.0, 3.0], &[1.0; 4], 2), [0.25, 0.75]);
        assert_eq!(shares(&[1.0; 4], &[0.0; 4], &[0.0; 4], 2), [0.5, 0.5]);
        assert_eq!(shares(&[1.0; 4], &[f64::NAN; 4], &[1.0; 4], 2), [0.5, 0.5]);
    }
}
