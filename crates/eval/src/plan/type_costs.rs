//! Costs of the types of a KV tensor: the bits of each type, and its distortion. They depend on the
//! shape of a model and its device alone.

use kvant::{DType, KvLayerShape, KvShape, Model, Plan, Policies};
use kvant_codec::Side;
use kvant_codec::distortion::{FileBytes, measure};

use super::Goal;
use crate::error::EvalError;

/// Candidate types, if every device of the model supports them.
const TYPES: [DType; 7] =
    [DType::Turbo2, DType::Turbo2T, DType::Turbo3, DType::Turbo3T, DType::Turbo4, DType::Q4_0, DType::Q8_0];
/// Vectors of the noise measurement per type.
const NOISE_VECTORS: usize = 256;

/// A candidate type of a KV tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Price {
    pub dtype: DType,
    /// Bits per token of one head.
    pub bits: f64,
    /// Its noise relative to the quantized values.
    pub noise: f64,
}

/// The candidate types of all KV tensors of a model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Prices {
    /// Layer by layer: those of a head's keys, then of its values if they are stored separately.
    pub sides: Vec<Vec<Price>>,
    /// K and V values of a token in all layers.
    pub n_values: f64,
    /// Minimum bits of a token in all layers.
    min_bits: f64,
}

impl Prices {
    pub fn new(model: &Model) -> Result<Self, EvalError> {
        let layers = model.config().kv_shape().layers;
        if layers.is_empty() {
            return Err(EvalError::Setting {
                name: "model",
                expected: "layers that attend, whose keys and values a plan gives types".to_owned(),
                got: format!("none in {}", model.config().family.name),
            });
        }
        let supported: Vec<_> = TYPES.into_iter().filter(|&dtype| model.supports_kv_type(dtype)).collect();
        let (mut sides, mut min_bits) = (Vec::new(), 0.0);
        for &layer in &layers {
            for &side in layer.sides() {
                let prices = supported.iter().map(|&dtype| price(layer, side, dtype));
                let prices = prices.collect::<Result<Vec<_>, EvalError>>()?;
                let fewest = prices.iter().map(|price| price.bits).fold(f64::INFINITY, f64::min);
                min_bits += layer.n_kv_heads as f64 * fewest;
                sides.push(prices);
            }
        }
        let n_values = layers.iter().map(|layer| layer.values_per_token() as f64).sum();
        Ok(Self { sides, n_values, min_bits })
    }

    /// Rejects a budget below the minimum of all types.
    pub fn check(&self, goal: Goal) -> Result<(), EvalError> {
        let min_bits = self.min_bits / self.n_values;
        match goal {
            // The sum of many bit counts is inexact.
            Goal::Bits(bits) if min_bits > bits * (1.0 + 1e-9) => {
                let expected = format!("{min_bits:.3} bits or more, the fewest of any type");
                Err(EvalError::Setting { name: "budget", expected, got: bits.to_string() })
            }
            _ => Ok(()),
        }
    }
}

/// Returns bits and noise of a type for one head's keys or values.
fn price(layer: KvLayerShape, side: Side, dtype: DType) -> Result<Price, EvalError> {
    let dim = if side == Side::K { layer.k_head_dim } else { layer.v_head_dim };
    let one = KvShape::uniform(1, layer);
    let plan = Plan::new(&one, dtype, dtype, &Policies::none()).map_err(kvant::Error::from)?;
    let bits = plan.bits_per_value(&one);
    let bits = if side == Side::K { bits.0 } else { bits.1 };
    let noise = measure(dtype, dim, FileBytes::Gaussian, NOISE_VECTORS, 1).map_err(kvant::Error::from)?.mse;
    Ok(Price { dtype, bits: bits * dim as f64, noise })
}
