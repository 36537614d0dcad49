//! What a session stores and how long it is, and what that takes.

use std::str::FromStr;
use std::sync::Arc;

use kvant_codec::{DType, TILE};
use kvant_kv::{Balance, KvError, KvShape, Plan, Policies, Policy};

use crate::Error;

/// What keys and values are multiplied by before they are stored in codes, and divided by where they are read.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum KvBalance {
    /// Nothing.
    Off,
    /// Factors that follow from the model's weights.
    #[default]
    Weights,
    /// Factors and centres that were measured, as those of a [plan](crate::KvPlan).
    Plan(Arc<Balance>),
}

/// What the KV cache stores.
#[derive(Debug, Clone, PartialEq)]
pub struct KvOptions {
    /// Type of the keys.
    pub k: DType,
    /// Type of the values.
    pub v: DType,
    /// Rules that change the types of some heads or keep some tokens in f16.
    pub policies: Policies,
    /// What keys and values are multiplied by before they are stored in codes.
    pub balance: KvBalance,
    /// Whether the youngest tokens, those that do not fill a tile yet, wait in f16. On except for measurements:
    /// without, what is stored depends on how tokens are fed.
    pub tail: bool,
}

/// What a code may do to scores where nobody asked for it, in nats squared: a thirtieth of what a named type may.
const MOST_UNNAMED_NOISE: f64 = 0.08;

impl KvOptions {
    /// The same type for keys and values, with the default policies.
    pub fn symmetric(dtype: DType) -> Self {
        Self { k: dtype, v: dtype, ..Default::default() }
    }

    /// What a model of this shape stores where nobody names a type: the smallest of which no model that was measured loses 0.005 nats
    /// (docs/quality.md). Of latent vectors the weights say nothing: q8_0.
    pub fn unnamed(shape: &KvShape) -> Self {
        let is_latent = shape.layers.iter().any(|layer| layer.joint);
        let policies = vec![Policy::AutoKeys { most: MOST_UNNAMED_NOISE }, Policy::Sink(TILE)];
        let dtype = if is_latent { DType::Q8_0 } else { DType::Turbo4 };
        Self { policies: Policies(policies), ..Self::symmetric(dtype) }
    }

    /// What each layer and head of a model of this shape stores then.
    ///
    /// # Errors
    /// Policies or a balance that do not fit the model.
    pub fn plan(&self, shape: &KvShape) -> Result<Plan, KvError> {
        let mut plan = Plan::new(shape, self.k, self.v, &self.policies)?;
        let is_coded = || {
            plan.types.iter().flatten().any(|types| [types.k, types.v].iter().any(|of| of.code().is_some()))
        };
        let balance = match (&self.balance, &shape.statistics) {
            (KvBalance::Plan(balance), _) => Some(Arc::clone(balance)),
            (KvBalance::Weights, Some(statistics)) if is_coded() && !statistics.balance.is_none() => {
                plan.notes.push("balance: factors from the weights".to_owned());
                Some(Arc::clone(&statistics.balance))
            }
            (KvBalance::Weights | KvBalance::Off, _) => None,
        };
        if let Some(balance) = &balance {
            balance.check(shape)?;
        }
        Ok(Plan { tail: self.tail, balance, ..plan })
    }
}

/// One type for keys and values, or `K/V`.
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

/// How to make a session.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SessionOptions {
    /// Tokens the context holds; the model's training length when `None`. A model with LongRoPE turns positions otherwise in
    /// contexts that are longer than its [original one](kvant_model::Config::n_ctx_short).
    pub n_ctx: Option<usize>,
    /// What the cache stores.
    pub kv: KvOptions,
}

/// What a cache takes, measured.
#[derive(Debug, Clone, PartialEq)]
pub struct KvUse {
    /// Tokens stored.
    pub tokens: usize,
    /// Bytes allocated: pages, f16 parts and padding.
    pub bytes: usize,
    /// Bytes an f16 cache would have allocated for the same tokens.
    pub bytes_f16: usize,
    /// Bytes that the cache of a [draft model](crate::OpenOptions::draft) has allocated beside.
    pub bytes_draft: usize,
    /// Name of the keys' type (`mixed` when heads differ).
    pub type_k: &'static str,
    /// Name of the values' type (`mixed` when heads differ).
    pub type_v: &'static str,
    /// Bits per key value, scales included.
    pub bpv_k: f64,
    /// Bits per value value, scales included.
    pub bpv_v: f64,
    /// What policies changed, one line each.
    pub notes: Vec<String>,
}

#[cfg(test)]
mod tests {
    use kvant_kv::{KvLayerShape, LayerBalance, WeightStatistics};

    use super::*;

    #[test]
    fn a_coded_cache_is_balanced_by_the_weights_unless_a_plan_or_nothing_was_asked_for() {
        let heads = KvLayerShape {
            n_heads: 1,
            n_kv_heads: 1,
            k_head_dim: 32,
            v_head_dim: 32,
            window: None,
            joint: false,
        };
        let of_weights =
            Balance { layers: vec![LayerBalance { k_scale: vec![2.0; 32], ..LayerBalance::none(&heads) }] };
        let of_plan = Arc::new(Balance {
            layers: vec![LayerBalance { k_scale: vec![3.0; 32], ..LayerBalance::none(&heads) }],
        });
        let statistics = |balance: Balance| {
            Some(Arc::new(WeightStatistics { balance: Arc::new(balance), score_noise: vec![vec![0.0]] }))
        };
        let shape = KvShape { statistics: statistics(of_weights.clone()), ..KvShape::uniform(1, heads) };
        let plan = |dtype: DType, balance: KvBalance, shape: &KvShape| {
            KvOptions { balance, ..KvOptions::symmetric(dtype) }.plan(shape).unwrap()
        };
        let balanced = plan(DType::Turbo3, KvBalance::Weights, &shape);
        assert_eq!(balanced.balance.as_deref(), Some(&of_weights));
        assert!(
            balanced.notes.contains(&"balance: factors from the weights".to_owned()),
            "{:?}",
            balanced.notes
        );
        assert_eq!(plan(DType::Turbo3, KvBalance::Plan(Arc::clone(&of_plan)), &shape).balance, Some(of_plan));
        assert_eq!(plan(DType::Turbo3, KvBalance::Off, &shape).balance, None);
        // Floats lose nothing that factors could spread.
        assert_eq!(plan(DType::F16, KvBalance::Weights, &shape).balance, None);
        let even = Balance { layers: vec![LayerBalance::none(&heads)] };
        let shape = KvShape { statistics: statistics(even), ..KvShape::uniform(1, heads) };
        assert_eq!(plan(DType::Turbo3, KvBalance::Weights, &shape).balance, None);
    }
}
