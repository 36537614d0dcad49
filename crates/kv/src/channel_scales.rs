//! Channel scales (SmoothQuant) of keys and values, which move the coding error to where attention
//! is least sensitive.
//!
//! Attention is invariant: `q.k = (q / s).(s k)`, and `sum w (v - c) + c = sum w v`. A rotated code
//! spreads its error evenly over the stored dims, so dims in which queries are large need larger
//! keys, and dims to which the output matrix gives large weights need larger values.

use std::sync::Arc;

use kvant_backend::ChannelScaleLayout;
use kvant_codec::finite::F16_MAX;
use kvant_codec::tile::Side;

use crate::{KvError, KvLayerShape, KvShape};

/// Factors and centres of all layers with keys and values of their own, by KV-layer ordinal.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ChannelScales {
    /// `[layers]`
    pub layers: Vec<LayerScales>,
}

/// Factors and centres of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerScales {
    /// Factor on each dim of the keys after RoPE, `[n_kv_heads * k_head_dim]`; queries are divided
    /// by it. Key centres are not stored here: the cache measures them at run time.
    pub k_scale: Vec<f32>,
    /// Factor on each dim of the values, `[n_kv_heads * v_head_dim]`; outputs are divided by it.
    /// Empty where values are part of their keys (MLA) and share their factors.
    pub v_scale: Vec<f32>,
    /// Subtracted from values before coding and added to outputs, `[n_kv_heads * v_head_dim]`.
    /// Empty where values are part of their keys (MLA), which have a centre per block.
    pub v_centre: Vec<f32>,
}

/// Statistics of a model's weights that predict the sensitivity of its cache, known before any text
/// is processed.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct WeightStatistics {
    /// Optimal channel scales of keys and values.
    pub channel_scales: Arc<ChannelScales>,
    /// Variance of a KV head's scores, in nats squared, caused by a code of relative squared error
    /// 1 on keys with these factors, `[layers][n_kv_heads]`.
    pub score_noise: Vec<Vec<f64>>,
}

/// The largest ratio of a head's factors to their geometric mean: statistics of few tokens justify
/// no more, and values stay within f16.
const MAX_APART: f64 = 64.0;

/// Returns `(read / stored)^(1/4)` for each dim, normalized to a geometric mean of 1, as a common
/// factor has no effect. Dims that are not stored or not read, or whose statistics are not finite,
/// get 1.
///
/// A rotated code spreads its error evenly over the stored dims. With keys stored as A k and
/// queries divided by A, the variance of a score is `tr(A Sk A^T) tr(A^-T Sq A^-1)` up to the
/// code's own factor: Sk the covariance of the keys around their centre, Sq the second moment of
/// the queries that attend to them. For a diagonal A = diag(s) that is
/// `(sum s^2 Sk) (sum Sq / s^2)`, which by Cauchy-Schwarz is least at `s^4 = Sq / Sk`. The same
/// holds for values, with the squared columns of the output matrix for Sq.
pub fn balance_factors(read: &[f64], stored: &[f64]) -> Vec<f32> {
    let log = |(read, stored): (&f64, &f64)| {
        let ratio = read / stored;
        (ratio.is_finite() && ratio > 0.0).then(|| ratio.ln() / 4.0)
    };
    let logs: Vec<Option<f64>> = read.iter().zip(stored).map(log).collect();
    let sound = || logs.iter().flatten();
    let mean = sound().sum::<f64>() / sound().count().max(1) as f64;
    let factor = |log: &Option<f64>| {
        log.map_or(1.0, |log| five_digits((log - mean).exp().clamp(1.0 / MAX_APART, MAX_APART)))
    };
    logs.iter().map(factor).collect()
}

/// Rounds `x` to five digits, so that a file stores exactly the measured value.
pub fn five_digits(x: f64) -> f32 {
    format!("{x:.4e}").parse().unwrap_or(0.0)
}

impl LayerScales {
    /// Returns the identity scales.
    pub fn identity(heads: &KvLayerShape) -> Self {
        let n_k = heads.n_kv_heads * heads.k_head_dim;
        let n_v = heads.n_values();
        Self { k_scale: vec![1.0; n_k], v_scale: vec![1.0; n_v], v_centre: vec![0.0; n_v] }
    }

    /// Returns whether values are scaled or shifted. If not, devices receive no factors for them.
    pub(crate) fn scales_values(&self) -> bool {
        self.v_scale.iter().any(|&scale| scale != 1.0) || self.v_centre.iter().any(|&centre| centre != 0.0)
    }

    /// Returns the layout of the factors on a device.
    fn on_device(&self) -> ChannelScaleLayout {
        ChannelScaleLayout::new(self.k_scale.len(), if self.scales_values() { self.v_scale.len() } else { 0 })
    }

    /// Undoes scale and shift of a row `[head_dim]` of a head.
    pub(crate) fn undo(&self, head: usize, side: Side, row: &mut [f32]) {
        let dims = head * row.len()..(head + 1) * row.len();
        match side {
            Side::K => row.iter_mut().zip(&self.k_scale[dims]).for_each(|(x, s)| *x /= s),
            Side::V => {
                let affine = self.v_scale[dims.clone()].iter().zip(&self.v_centre[dims]);
                row.iter_mut().zip(affine).for_each(|(x, (s, c))| *x = *x / s + c);
            }
        }
    }
}

/// Rounds up to 64 bytes, the allocation granularity of some devices.
fn padded(n_bytes: usize) -> usize {
    n_bytes.next_multiple_of(64)
}

/// The largest allowed factor; larger ones would lose values at one end of f16.
const MAX_SCALE: f32 = 1024.0;

impl ChannelScales {
    /// Checks the scales against the shape of a model.
    ///
    /// # Errors
    /// When lengths differ, a factor is not within 1/1024 to 1024, or a centre does not fit f16.
    pub fn check(&self, shape: &KvShape) -> Result<(), KvError> {
        let error = |what: String| Err(KvError::Balance { what });
        if self.layers.len() != shape.layers.len() {
            return error(format!("expected {} layers, got {}", shape.layers.len(), self.layers.len()));
        }
        for (index, (layer, shape)) in self.layers.iter().zip(&shape.layers).enumerate() {
            let KvLayerShape { n_kv_heads, k_head_dim, .. } = *shape;
            let n_v = shape.n_values();
            let LayerScales { k_scale, v_scale, v_centre } = layer;
            let lengths = [
                ("factors of keys", k_scale, n_kv_heads * k_head_dim),
                ("factors of values", v_scale, n_v),
                ("centres of values", v_centre, n_v),
            ];
            if let Some((what, got, n)) = lengths.iter().find(|(_, got, n)| got.len() != *n) {
                return error(format!("layer {index}: expected {n} {what}, got {}", got.len()));
            }
            let factors = k_scale.iter().chain(v_scale);
            if let Some(bad) = factors.copied().find(|x| !(1.0 / MAX_SCALE..=MAX_SCALE).contains(x)) {
                return error(format!("layer {index}: expected factors of 1/1024 to 1024, got {bad}"));
            }
            if let Some(bad) = v_centre.iter().copied().find(|x| !(-F16_MAX..=F16_MAX).contains(x)) {
                return error(format!("layer {index}: expected centres within f16, got {bad}"));
            }
        }
        Ok(())
    }

    /// Returns all factors and centres, layer by layer.
    pub fn values(&self) -> impl Iterator<Item = f32> {
        self.layers.iter().flat_map(|LayerScales { k_scale, v_scale, v_centre }| {
            [k_scale, v_scale, v_centre].into_iter().flatten().copied()
        })
    }

    /// Returns whether the scales have no effect.
    pub fn is_none(&self) -> bool {
        let of_layer =
            |layer: &LayerScales| !layer.scales_values() && layer.k_scale.iter().all(|&scale| scale == 1.0);
        self.layers.iter().all(of_layer)
    }

    /// Returns the factors of layer `index` in the layout of [`ChannelScaleLayout`], in bytes,
    /// padded for every device.
    pub(crate) fn bytes(&self, index: usize) -> Vec<u8> {
        let LayerScales { k_scale, v_scale, v_centre } = &self.layers[index];
        let inverse = |scale: &[f32]| scale.iter().map(|s| 1.0 / s).collect::<Vec<_>>();
        let layout = self.layers[index].on_device();
        let mut values = vec![0.0; layout.n_values()];
        values[layout.key.clone()].copy_from_slice(k_scale);
        values[layout.query.clone()].copy_from_slice(&inverse(k_scale));
        if layout.scales_values() {
            let v_shift: Vec<f32> = v_centre.iter().zip(v_scale).map(|(c, s)| -c * s).collect();
            values[layout.value].copy_from_slice(v_scale);
            values[layout.value_shift].copy_from_slice(&v_shift);
            values[layout.out].copy_from_slice(&inverse(v_scale));
            values[layout.out_shift].copy_from_slice(v_centre);
        }
        let mut bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        bytes.resize(padded(bytes.len()), 0);
        bytes
    }

    /// Returns the bytes of the factors of all layers on a device.
    pub(crate) fn n_bytes(&self) -> usize {
        let of_layer = |layer: &LayerScales| size_of::<f32>() * layer.on_device().n_values();
        self.layers.iter().map(of_layer).map(padded).sum()
    }

    /// Returns the scales of a range of layers.
    ///
    /// # Panics
    /// When `layers` is out of range.
    pub fn part(&self, layers: std::ops::Range<usize>) -> Self {
        Self { layers: self.layers[layers].to_vec() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balance_factors_minimize_the_noise() {
        let (read, stored) = ([4.0, 1.0, 12.0, 0.5], [0.1, 3.0, 0.2, 1.0]);
        let noise = |s: &[f32]| {
            let sum = |of: fn(f64, f64) -> f64, x: &[f64]| {
                s.iter().zip(x).map(|(&s, &x)| of(f64::from(s).powi(2), x)).sum::<f64>()
            };
            sum(|s, x| s * x, &stored) * sum(|s, x| x / s, &read)
        };
        let best = balance_factors(&read, &stored);
        assert!((best.iter().map(|s| s.ln()).sum::<f32>()).abs() < 1e-3, "{best:?}");
        for change in [0.8, 0.9, 0.99, 1.01, 1.1, 1.25] {
            let other = [best[0] * change, best[1], best[2], best[3] / change];
            assert!(noise(&best) < noise(&other), "{change}: {} {}", noise(&best), noise(&other));
        }
        // Identity scales are far worse.
        assert!(2.0 * noise(&best) < noise(&[1.0; 4]));
    }

    #[test]
    fn dead_or_non_finite_dims_get_one_and_factors_are_bounded() {
        for (read, stored) in [
            ([0.0; 4], [1.0; 4]),
            ([1.0; 4], [0.0; 4]),
            ([f64::NAN; 4], [1.0; 4]),
            ([f64::INFINITY; 4], [1.0; 4]),
            ([1.0; 4], [f64::INFINITY; 4]),
            ([0.0; 4], [0.0; 4]),
        ] {
            assert_eq!(balance_factors(&read, &stored), [1.0; 4], "{read:?} {stored:?}");
        }
        // Some dims are dead; the others get the factors they would get alone.
        assert_eq!(balance_factors(&[0.0, 5.0, 0.0, 5.0], &[1.0; 4]), [1.0; 4]);
        let far = balance_factors(&[1e30, 1.0, 1e30, 1.0], &[1e-30, 1.0, 1e-30, 1.0]);
        assert_eq!(far, [64.0, 1.0 / 64.0, 64.0, 1.0 / 64.0]);
    }

    #[test]
    fn scales_of_another_shape_or_range_are_rejected_with_the_layer() {
        let layer = KvLayerShape {
            n_heads: 4,
            n_kv_heads: 2,
            k_head_dim: 8,
            v_head_dim: 4,
            window: None,
            shared_kv: false,
            index: None,
            pool: None,
        };
        let shape = KvShape::uniform(2, layer);
        let fits = LayerScales { k_scale: vec![2.0; 16], v_scale: vec![0.5; 8], v_centre: vec![-3.0; 8] };
        let balance = ChannelScales { layers: vec![fits.clone(), fits] };
        balance.check(&shape).unwrap();
        assert_eq!(balance.part(1..2).layers.len(), 1);
        let refused = |spoil: fn(&mut ChannelScales), why: &str| {
            let mut balance = balance.clone();
            spoil(&mut balance);
            assert_eq!(balance.check(&shape).unwrap_err().to_string(), format!("balance: {why}"));
        };
        refused(|b| b.layers.truncate(1), "expected 2 layers, got 1");
        refused(|b| b.layers[1].k_scale.truncate(3), "layer 1: expected 16 factors of keys, got 3");
        refused(|b| b.layers[0].v_centre.push(0.0), "layer 0: expected 8 centres of values, got 9");
        refused(|b| b.layers[0].v_scale[1] = 0.0, "layer 0: expected factors of 1/1024 to 1024, got 0");
        refused(
            |b| b.layers[0].k_scale[1] = f32::NAN,
            "layer 0: expected factors of 1/1024 to 1024, got NaN",
        );
        refused(|b| b.layers[1].v_centre[0] = 1e6, "layer 1: expected centres within f16, got 1000000");
    }

    #[test]
    fn devices_get_no_factors_for_unscaled_values() {
        let keys = LayerScales { k_scale: vec![2.0; 16], v_scale: vec![1.0; 8], v_centre: vec![0.0; 8] };
        let moved = LayerScales { v_centre: vec![0.5; 8], ..keys.clone() };
        let balance = ChannelScales { layers: vec![keys, moved] };
        let sizes = [2 * 16, 2 * 16 + 4 * 8].map(|n| n * size_of::<f32>());
        assert_eq!([0, 1].map(|index| balance.bytes(index).len()), sizes);
        assert_eq!(balance.n_bytes(), sizes.iter().sum::<usize>());
    }
}
