//! What the cache's formats lose, beside what theory allows: on synthetic vectors, and on the keys and values of a model.
//!
//! TurboQuant ([arXiv 2504.19874](https://arxiv.org/abs/2504.19874)) gives two bounds on the relative squared error of unit
//! vectors coded at b bits per value: 4^-b for *any* code, from below, and (√3 π / 2) 4^-b for a rotated Lloyd-Max code, from
//! above. Its norms are exact and free; the turbo formats pay [`SCALE_BITS`] for theirs.

use kvant::limits::check_size;
use kvant::{DType, KvOptions, Model, Policies};
use kvant_codec::Side;
use kvant_codec::distortion::{RoundTrip, Source, measure};
use kvant_codec::random::Random;
use serde::{Deserialize, Serialize};

use crate::{EvalError, OnProgress, Progress, walk};

/// What one format lost on one kind of vector.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Distortion {
    /// The format.
    pub codec: String,
    /// Stored bits per value, scales and padding included.
    pub bpv: f64,
    /// Values per vector.
    pub dim: usize,
    /// Where the vectors come from: a synthetic law, or `K` or `V` and a layer of a model.
    pub law: String,
    /// Relative mean squared error, Σ|x - x̂|² / Σ|x|².
    pub mse: f64,
    /// What theory gives for `mse`, where there is a theory.
    pub theory_mse: Option<f64>,
    /// Mean squared error of inner products with Gaussian queries, scaled so that it equals `mse` when the error points
    /// nowhere in particular.
    pub ip_error: f64,
}

/// Bits per value that the turbo formats spend on norms: an f16 for 128 values.
pub const SCALE_BITS: f64 = 16.0 / 128.0;

/// No code of `bits` bits per value loses less on vectors without a preferred direction.
pub fn lower_bound(bits: f64) -> f64 {
    4f64.powf(-bits)
}

/// A rotated Lloyd-Max code of `bits` bits per value, norms not counted, loses no more.
pub fn upper_bound(bits: f64) -> f64 {
    3f64.sqrt() * std::f64::consts::FRAC_PI_2 * lower_bound(bits)
}

/// The widest synthetic vectors: a thousand times the widest heads.
const MAX_DIM: usize = 1 << 20;

/// Every KV format on `vectors` synthetic vectors of each law.
///
/// # Errors
/// Vectors of no values, or wider than any that is cached.
pub fn synthetic(dim: usize, vectors: usize, seed: u64) -> Result<Vec<Distortion>, EvalError> {
    check_size("dim", dim, 1..=MAX_DIM).map_err(kvant::Error::from)?;
    check_size("vectors", vectors, 1..=usize::MAX).map_err(kvant::Error::from)?;
    let mut rows = Vec::new();
    for source in [Source::Sphere, Source::Gaussian, Source::Outliers] {
        for codec in DType::KV {
            let d = measure(codec, dim, source, vectors, seed)?;
            rows.push(Distortion {
                codec: codec.name().to_owned(),
                bpv: d.bpv,
                dim,
                law: source.name().to_owned(),
                mse: d.mse,
                theory_mse: d.theory_mse,
                ip_error: d.ip_error,
            });
        }
    }
    Ok(rows)
}

/// Every KV format on the keys (after RoPE) and values that `model` makes of `tokens`, all heads of a layer together.
///
/// # Errors
/// More tokens than the model's context, or an engine error.
pub fn captured(
    model: &Model,
    tokens: &[u32],
    seed: u64,
    progress: OnProgress<'_>,
) -> Result<Vec<Distortion>, EvalError> {
    let layers = model.config().kv_shape().layers;
    let f32 = KvOptions { policies: Policies::none(), ..KvOptions::symmetric(DType::F32) };
    let mut session = walk::session(model, &f32, tokens.len())?;
    session.feed(tokens, &mut |_| true)?;
    let mut rows = Vec::new();
    let total = layers.len();
    let mut tell = |done| progress(&Progress { done, total, resumed: 0, note: String::new() });
    tell(0);
    for (layer, heads) in layers.iter().enumerate() {
        for (side, name, dim) in [(Side::K, "K", heads.k_head_dim), (Side::V, "V", heads.v_head_dim)] {
            let mut vectors = Vec::new();
            for head in 0..heads.n_kv_heads {
                vectors.extend(session.kv_rows(layer, head, side)?);
            }
            for codec in DType::KV {
                let lost = measure_rows(codec, &vectors, dim, seed)?;
                rows.push(Distortion { law: format!("{name} layer {layer}"), ..lost });
            }
        }
        tell(layer + 1);
    }
    Ok(rows)
}

/// One format on given vectors, `[n, dim]`.
fn measure_rows(codec: DType, rows: &[f32], dim: usize, seed: u64) -> Result<Distortion, EvalError> {
    let mut trip = RoundTrip::new(codec, dim)?;
    let (mut back, mut q) = (vec![0.0; dim], vec![0.0; dim]);
    let mut random = Random::new(seed);
    let (mut error, mut energy, mut ip) = (0.0, 0.0, 0.0);
    for row in rows.chunks_exact(dim) {
        random.fill_gaussian(&mut q, 1.0);
        trip.apply(row, &mut back)?;
        let mut dot = 0.0;
        for ((&x, &back), &q) in row.iter().zip(&back).zip(&q) {
            let e = f64::from(x) - f64::from(back);
            error += e * e;
            energy += f64::from(x) * f64::from(x);
            dot += e * f64::from(q);
        }
        ip += dot * dot;
    }
    Ok(Distortion {
        codec: codec.name().to_owned(),
        bpv: trip.bits_per_value(),
        dim,
        law: String::new(),
        mse: error / energy,
        theory_mse: None,
        ip_error: ip / energy,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turbo_lies_between_the_bounds_on_unit_vectors() {
        for row in synthetic(128, 2_000, 1).unwrap() {
            let bits = match row.codec.as_str() {
                "turbo2" => 2.0,
                "turbo2t" => 2.0,
                "turbo3t" => 3.0,
                "turbo3" => 3.0,
                "turbo4" => 4.0,
                _ => continue,
            };
            let sound = lower_bound(bits) < row.mse && row.mse < upper_bound(bits);
            assert!(sound, "{row:?}: {} to {}", lower_bound(bits), upper_bound(bits));
        }
    }

    #[test]
    fn given_vectors_are_measured_as_synthetic_ones_are() {
        let mut rows = vec![0.0; 128 * 2_000];
        Random::new(9).fill_gaussian(&mut rows, 0.3);
        for codec in DType::KV {
            let got = measure_rows(codec, &rows, 128, 1).unwrap();
            let want = measure(codec, 128, Source::Gaussian, 2_000, 1).unwrap();
            assert_eq!(got.bpv, want.bpv);
            // Both are means over 256,000 values: they agree to a few per cent, q4_0's heavy tail included.
            assert!((got.mse - want.mse).abs() <= 0.03 * want.mse, "{codec}: {} {}", got.mse, want.mse);
        }
    }
}
