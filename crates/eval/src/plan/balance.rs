//! Factors and centres from statistics.
//!
//! The factors of keys follow from the squares of queries and keys, those of values from the
//! columns of the output matrix ([`kvant::balance_factors`]).
//!
//! RoPE rotates pairs of dimensions into each other with growing positions: squares of keys and
//! queries are averaged over all positions that a plan covers ([`super::moments`]), so that the
//! factors also hold at later positions.
//!
//! If values are a prefix of their keys (MLA), one row has two readers: the statistics of both are
//! added, and the rest is unchanged.

use kvant::{ChannelScales, LayerScales, balance_factors as factors, five_digits as rounded};

use super::statistics::{LayerStatistics, Statistics};

impl Statistics {
    /// Returns the factors on keys and values before quantization, and the centres of the values.
    pub fn balance(&self) -> ChannelScales {
        ChannelScales { layers: self.layers.iter().map(LayerStatistics::balance).collect() }
    }
}

impl LayerStatistics {
    pub fn balance(&self) -> LayerScales {
        let (k_dim, v_dim) = (self.shape.k_head_dim, self.shape.v_head_dim);
        let heads = 0..self.shape.n_kv_heads;
        let own_values = if self.shape.shared_kv { 0..0 } else { heads.clone() };
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
        LayerScales { k_scale: k_scale.collect(), v_scale: v_scale.collect(), v_centre: v_centre.collect() }
    }
}

/// Returns each head's share of a layer's noise when all heads have the same code: `(sum s^2
/// stored) (sum read / s^2)`, normalized over the layer. Even shares if undetermined.
pub(super) fn shares(scale: &[f32], read: &[f64], stored: &[f64], n_heads: usize) -> Vec<f64> {
    in_shares(&noise(scale, read, stored, n_heads))
}

/// Returns the noise that quantization errors of values times `scale` cause in their readers, head
/// by head.
pub(super) fn noise(scale: &[f32], read: &[f64], stored: &[f64], n_heads: usize) -> Vec<f64> {
    let dim = scale.len() / n_heads.max(1);
    let of_head = |head: usize| {
        let dims = head * dim..(head + 1) * dim;
        let squares = || scale[dims.clone()].iter().map(|&s| f64::from(s).powi(2));
        let stored: f64 = squares().zip(&stored[dims.clone()]).map(|(s, x)| s * x).sum();
        let read: f64 = squares().zip(&read[dims.clone()]).map(|(s, x)| x / s).sum();
        stored * read
    };
    (0..n_heads).map(of_head).collect()
}

/// Normalizes parts to a sum of one; even shares if undetermined.
pub(super) fn in_shares(parts: &[f64]) -> Vec<f64> {
    let total: f64 = parts.iter().sum();
    let even = 1.0 / parts.len().max(1) as f64;
    parts.iter().map(|x| if total.is_finite() && total > 0.0 { x / total } else { even }).collect()
}

#[cfg(test)]
mod tests {
    use kvant::{KvLayerShape, KvShape};

    use super::*;

    #[test]
    fn degenerate_heads_have_valid_factors() {
        // Heads: a usual one, its copy, a dead one, and one with nearly all energy in one
        // dimension.
        let shape = KvLayerShape {
            n_heads: 4,
            n_kv_heads: 4,
            k_head_dim: 2,
            v_head_dim: 2,
            window: None,
            shared_kv: false,
            index: None,
            pool: None,
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
            ChannelScales { layers: vec![balance] }.check(&KvShape::uniform(1, shape)).unwrap();
        }
    }

    #[test]
    fn shares_follow_the_noise_and_are_even_without_noise() {
        assert_eq!(shares(&[1.0; 4], &[1.0, 1.0, 3.0, 3.0], &[1.0; 4], 2), [0.25, 0.75]);
        assert_eq!(shares(&[1.0; 4], &[0.0; 4], &[0.0; 4], 2), [0.5, 0.5]);
        assert_eq!(shares(&[1.0; 4], &[f64::NAN; 4], &[1.0; 4], 2), [0.5, 0.5]);
    }
}
