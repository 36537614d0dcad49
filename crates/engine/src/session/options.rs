//! Options of a session: KV types, context length, and the resulting size.

use std::str::FromStr;
use std::sync::Arc;

use kvant_codec::{DType, TILE};
use kvant_kv::{ChannelScales, KvError, KvShape, Plan, Policies, Policy};

use crate::error::Error;

/// Channel scales: keys and values are multiplied by them before quantization, and divided by them
/// when read.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum KvBalance {
    /// No scales.
    Off,
    /// Scales derived from the model's weights.
    #[default]
    Weights,
    /// Measured scales and centres, as those of a [plan](crate::KvPlan).
    Plan(Arc<ChannelScales>),
}

/// Types of the KV cache.
#[derive(Debug, Clone, PartialEq)]
pub struct KvOptions {
    /// Type of the keys.
    pub k: DType,
    /// Type of the values.
    pub v: DType,
    /// Rules that change the types of some heads or store some tokens in f16.
    pub policies: Policies,
    /// Channel scales of keys and values.
    pub balance: KvBalance,
    /// Whether the tail, the youngest tokens up to a full tile, is f16. Off for measurements only:
    /// without a tail, the stored codes depend on how tokens are fed.
    pub tail: bool,
}

/// Bound on the score noise of the default KV type, in nats squared: a thirtieth of the bound for
/// an explicitly chosen type.
const MAX_DEFAULT_NOISE: f64 = 0.08;

impl KvOptions {
    /// Returns options with the same type for keys and values, and the default policies.
    pub fn symmetric(dtype: DType) -> Self {
        Self { k: dtype, v: dtype, ..Default::default() }
    }

    /// Returns the default options for a model of this shape: the smallest type with which no
    /// measured model loses 0.005 nats (docs/quality.md). The weights give no estimate for the
    /// latent vectors of MLA: q8_0.
    pub fn default_for(shape: &KvShape) -> Self {
        let is_latent = shape.layers.iter().any(|layer| layer.shared_kv);
        let policies = vec![Policy::AutoKeys { max_noise: MAX_DEFAULT_NOISE }, Policy::Sink(TILE)];
        let dtype = if is_latent { DType::Q8_0 } else { DType::Turbo4 };
        Self { policies: Policies(policies), ..Self::symmetric(dtype) }
    }

    /// Returns the resulting plan: the type of each layer and head of a model of this shape.
    ///
    /// # Errors
    /// Policies or channel scales that do not fit the model.
    pub fn plan(&self, shape: &KvShape) -> Result<Plan, KvError> {
        let mut plan = Plan::new(shape, self.k, self.v, &self.policies)?;
        let is_coded = || {
            plan.types.iter().flatten().any(|types| [types.k, types.v].iter().any(|of| of.code().is_some()))
        };
        let balance = match (&self.balance, &shape.statistics) {
            (KvBalance::Plan(balance), _) => Some(Arc::clone(balance)),
            (KvBalance::Weights, Some(statistics)) if is_coded() && !statistics.channel_scales.is_none() => {
                plan.notes.push("balance: factors from the weights".to_owned());
                Some(Arc::clone(&statistics.channel_scales))
            }
            (KvBalance::Weights | KvBalance::Off, _) => None,
        };
        if let Some(balance) = &balance {
            balance.check(shape)?;
        }
        Ok(Plan { tail: self.tail, channel_scales: balance, ..plan })
    }
}

/// Parses one type for keys and values, or `K/V`.
impl FromStr for KvOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (k, v) = text.split_once('/').unwrap_or((text, text));
        let dtype = |name: &str| {
            let expected = format!("a KV type ({}), or K/V", DType::KV.map(DType::name).join(" "));
            name.parse().map_err(|_| Error::Setting { name: "kv_type", expected, got: text.to_owned() })
        };
        Ok(Self { k: dtype(k)?, v: dtype(v)?, ..Self::default() })
    }
}

impl Default for KvOptions {
    fn default() -> Self {
        Self {
            k: DType::F16,
            v: DType::F16,
            policies: Policies::default(),
            balance: KvBalance::default(),
            tail: true,
        }
    }
}

/// Options of a session.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SessionOptions {
    /// Context length in tokens; the model's training length when `None`. A model with LongRoPE
    /// uses its long factors in contexts beyond its [original
    /// one](kvant_model::Config::n_ctx_short).
    pub n_ctx: Option<usize>,
    /// Types of the KV cache.
    pub kv: KvOptions,
}

/// Measured size of a KV cache.
#[derive(Debug, Clone, PartialEq)]
pub struct KvUse {
    /// Tokens stored.
    pub tokens: usize,
    /// Bytes allocated: pages, f16 windows and padding.
    pub bytes: usize,
    /// Bytes that an f16 cache of the same tokens would allocate.
    pub bytes_f16: usize,
    /// Bytes allocated by the cache of the [draft model](crate::OpenOptions::draft), in addition.
    pub bytes_draft: usize,
    /// Name of the keys' type (`mixed` when heads differ).
    pub type_k: &'static str,
    /// Name of the values' type (`mixed` when heads differ).
    pub type_v: &'static str,
    /// Bits per value of the keys, scales included.
    pub bpv_k: f64,
    /// Bits per value of the values, scales included.
    pub bpv_v: f64,
    /// Changes made by policies, one line each.
    pub notes: Vec<String>,
}

#[cfg(test)]
mod tests {
    use kvant_kv::{KvLayerShape, LayerScales, WeightStatistics};

    use super::*;

    #[test]
    fn channel_scales_come_from_weights_unless_a_plan_is_given() {
        let heads = KvLayerShape {
            n_heads: 1,
            n_kv_heads: 1,
            k_head_dim: 32,
            v_head_dim: 32,
            window: None,
            shared_kv: false,
            index: None,
            pool: None,
        };
        let of_weights = ChannelScales {
            layers: vec![LayerScales { k_scale: vec![2.0; 32], ..LayerScales::identity(&heads) }],
        };
        let of_plan = Arc::new(ChannelScales {
            layers: vec![LayerScales { k_scale: vec![3.0; 32], ..LayerScales::identity(&heads) }],
        });
        let statistics = |balance: ChannelScales| {
            Some(Arc::new(WeightStatistics {
                channel_scales: Arc::new(balance),
                score_noise: vec![vec![0.0]],
            }))
        };
        let shape = KvShape { statistics: statistics(of_weights.clone()), ..KvShape::uniform(1, heads) };
        let plan = |dtype: DType, balance: KvBalance, shape: &KvShape| {
            KvOptions { balance, ..KvOptions::symmetric(dtype) }.plan(shape).unwrap()
        };
        let balanced = plan(DType::Turbo3, KvBalance::Weights, &shape);
        assert_eq!(balanced.channel_scales.as_deref(), Some(&of_weights));
        assert!(
            balanced.notes.contains(&"balance: factors from the weights".to_owned()),
            "{:?}",
            balanced.notes
        );
        assert_eq!(
            plan(DType::Turbo3, KvBalance::Plan(Arc::clone(&of_plan)), &shape).channel_scales,
            Some(of_plan)
        );
        assert_eq!(plan(DType::Turbo3, KvBalance::Off, &shape).channel_scales, None);
        // Scales would not reduce the error of floats.
        assert_eq!(plan(DType::F16, KvBalance::Weights, &shape).channel_scales, None);
        let even = ChannelScales { layers: vec![LayerScales::identity(&heads)] };
        let shape = KvShape { statistics: statistics(even), ..KvShape::uniform(1, heads) };
        assert_eq!(plan(DType::Turbo3, KvBalance::Weights, &shape).channel_scales, None);
    }
}
