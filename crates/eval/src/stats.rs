//! Statistics over scored tokens, with the standard errors that llama.cpp's `llama-perplexity`
//! prints.

use serde::{Deserialize, Serialize};

use crate::score::TokenScore;

/// A value and its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The value.
    pub value: f64,
    /// Its standard error, assuming independent tokens.
    pub stderr: f64,
}

impl Estimate {
    /// Returns the mean of `values` and its standard error.
    pub fn mean(values: impl Iterator<Item = f64> + Clone) -> Self {
        let n = values.clone().count().max(1) as f64;
        let mean = values.clone().sum::<f64>() / n;
        let variance = values.map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        Self { value: mean, stderr: (variance / (n - 1.0).max(1.0)).sqrt() }
    }

    /// Returns `exp` of the value; the error to first order.
    pub fn exp(self) -> Self {
        let value = self.value.exp();
        Self { value, stderr: value * self.stderr }
    }
}

/// Percentiles of the divergence, in nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// The median.
    pub median: f64,
    /// 99.9 % of the tokens are below.
    pub p99_9: f64,
    /// 99 %.
    pub p99: f64,
    /// 95 %.
    pub p95: f64,
    /// 90 %.
    pub p90: f64,
    /// 10 %.
    pub p10: f64,
    /// 5 %.
    pub p5: f64,
    /// 1 %.
    pub p1: f64,
    /// The largest.
    pub max: f64,
}

impl Percentiles {
    fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |fraction: f64| percentile(&values, fraction);
        Self {
            median: at(0.5),
            p99_9: at(0.999),
            p99: at(0.99),
            p95: at(0.95),
            p90: at(0.9),
            p10: at(0.1),
            p5: at(0.05),
            p1: at(0.01),
            max: at(1.0),
        }
    }
}

/// Returns the value below which `fraction` of the sorted values are, with linear interpolation.
fn percentile(sorted: &[f64], fraction: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = fraction * last as f64;
    let (below, part) = (place.floor() as usize, place.fract());
    let above = (below + 1).min(last);
    sorted[below] * (1.0 - part) + sorted[above] * part
}

/// Divergence statistics of a configuration from the base.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KldStats {
    /// Tokens scored.
    pub tokens: usize,
    /// Mean KL divergence, in nats.
    pub mean_kld: Estimate,
    /// Its percentiles.
    pub kld: Percentiles,
    /// Share of tokens with the same most probable token.
    pub same_top: Estimate,
    /// Mean change of the correct token's probability.
    pub delta_p: Estimate,
    /// Root mean square of that change.
    pub delta_p_rms: Estimate,
    /// Perplexity.
    pub ppl: Estimate,
    /// Perplexity of the base.
    pub ppl_base: Estimate,
    /// ppl / ppl_base; the error accounts for their correlation.
    pub ppl_ratio: Estimate,
}

impl KldStats {
    /// Computes the statistics of `scores`.
    pub fn new(scores: &[TokenScore]) -> Self {
        let of = |pick: fn(&TokenScore) -> f64| Estimate::mean(scores.iter().map(pick));
        let square = of(|s| s.delta_p.powi(2));
        let rms = square.value.sqrt();
        let rms_stderr = if rms > 0.0 { 0.5 * square.stderr / rms } else { 0.0 };
        Self {
            tokens: scores.len(),
            mean_kld: of(|s| s.kld),
            kld: Percentiles::new(scores.iter().map(|s| s.kld).collect()),
            same_top: of(|s| f64::from(u8::from(s.same_top))),
            delta_p: of(|s| s.delta_p),
            delta_p_rms: Estimate { value: rms, stderr: rms_stderr },
            ppl: of(|s| s.nll).exp(),
            ppl_base: of(|s| s.nll_base).exp(),
            ppl_ratio: of(|s| s.nll - s.nll_base).exp(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate_between_neighbours() {
        let sorted = [0.0, 1.0, 2.0, 3.0];
        assert_eq!(percentile(&sorted, 0.0), 0.0);
        assert_eq!(percentile(&sorted, 0.5), 1.5);
        assert_eq!(percentile(&sorted, 1.0), 3.0);
        assert!((percentile(&sorted, 0.9) - 2.7).abs() < 1e-15);
        assert_eq!(percentile(&[7.0], 0.3), 7.0);
        assert!(percentile(&[], 0.5).is_nan());
    }

    #[test]
    fn an_estimate_is_the_mean_and_its_standard_error() {
        // Values 1, 3: mean 2, variance 1, standard error √(1 / (2 - 1)).
        assert_eq!(Estimate::mean([1.0, 3.0].into_iter()), Estimate { value: 2.0, stderr: 1.0 });
        assert_eq!(Estimate::mean([5.0].into_iter()), Estimate { value: 5.0, stderr: 0.0 });
    }

    #[test]
    fn a_configuration_equal_to_the_base_is_at_distance_zero() {
        let score = TokenScore { nll: 2.0, nll_base: 2.0, kld: 0.0, delta_p: 0.0, same_top: true };
        let stats = KldStats::new(&[score; 10]);
        assert_eq!(stats.mean_kld, Estimate { value: 0.0, stderr: 0.0 });
        assert_eq!(stats.same_top.value, 1.0);
        assert_eq!(stats.ppl_ratio, Estimate { value: 1.0, stderr: 0.0 });
        assert_eq!(stats.ppl.value, stats.ppl_base.value);
    }
}
