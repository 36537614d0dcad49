//! One budget of memory for weights and cache: which type of weights loses least with the cache
//! that fits beside them.
//!
//! The divergence of weights is measured, that of caches predicted from the costs of layers of the
//! model as its file has it; both are from the same texts and add up, as small divergences do.

use kvant::{DType, KvOptions, Model, Plan, Policies};

use super::search::Frontier;
use super::statistics::Statistics;
use super::text_splits::TextHalves;
use super::type_costs::Prices;
use super::{PlanOptions, PlanSearch};
use crate::error::EvalError;
use crate::kld::{Base, KldOptions, kld};
use crate::progress::{OnProgress, Progress};

/// Types of weights that are tried beside those of the file, most bits first.
const WEIGHT_TYPES: [DType; 5] = [DType::Q8_0, DType::Q6K, DType::Q5K, DType::Q4K, DType::Q3K];

/// Memory for weights and one cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Bytes of both; buffers of a step are not counted.
    pub bytes: usize,
    /// Tokens that the cache holds.
    pub tokens: usize,
}

/// Weights of a model in one type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightCost {
    /// Type that they are converted to; `None` for those of the file.
    pub weights: Option<DType>,
    /// Their bytes.
    pub bytes: usize,
    /// Mean divergence of the output from that of the file's weights, with f16 caches, in nats.
    pub kld: f64,
}

/// Weights in one type, and the cache that fits beside them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightChoice {
    /// The weights.
    pub weights: WeightCost,
    /// Bits per value that remain for the cache, and the divergence predicted for them, in nats.
    /// `None` if the fewest bits of any plan do not fit.
    pub cache: Option<(f64, f64)>,
}

impl WeightChoice {
    /// Returns the predicted divergence of weights and cache together; infinite if they do not fit.
    pub fn kld(&self) -> f64 {
        self.cache.map_or(f64::INFINITY, |(_, kld)| self.weights.kld + kld)
    }
}

/// What the types of a model's weights and caches cost.
pub struct MemoryCosts {
    model: Model,
    weights: Vec<WeightCost>,
    /// The plan of the fewest bits.
    smallest: Plan,
    /// Bits per token of plans, fewest first, and their predicted divergences.
    caches: Vec<(f64, f64)>,
    n_values: f64,
}

impl MemoryCosts {
    /// Measures the costs of `model` for a cache of `options.reach` tokens; the goal is ignored.
    /// `open` returns the model with its weights in another type.
    ///
    /// # Errors
    ///
    /// As of [`plan`](super::plan), and those of `open`.
    pub fn measure<E: From<EvalError>>(
        model: &Model,
        text: &str,
        options: PlanOptions,
        mut open: impl FnMut(DType) -> Result<Model, E>,
        progress: OnProgress<'_>,
    ) -> Result<Self, E> {
        let halves = TextHalves::new(model, text, options.n_ctx)?;
        let prices = Prices::new(model)?;
        let statistics = Statistics::gather(model, &halves.pieces(options.n_ctx), options.reach, progress)?;
        let search = PlanSearch::new(model, &statistics, prices, &halves, options)?;
        let frontier = Frontier::new(&search.tensors(None, progress)?);
        let mut weights = vec![WeightCost { weights: None, bytes: model.weight_bytes(), kld: 0.0 }];
        for (done, &dtype) in WEIGHT_TYPES.iter().enumerate() {
            let note = format!("weights in {dtype}");
            progress(&Progress { done, total: WEIGHT_TYPES.len(), resumed: 0, note });
            let converted = open(dtype)?;
            let bytes = converted.weight_bytes();
            if bytes < model.weight_bytes() {
                let kld = search.weights_kld(&converted)?;
                weights.push(WeightCost { weights: Some(dtype), bytes, kld });
            }
        }
        let smallest = search.plan(&frontier.types(0)).kv_options().map_err(EvalError::from)?;
        let smallest =
            smallest.plan(&search.shape).map_err(|error| EvalError::from(kvant::Error::from(error)))?;
        let (caches, n_values) = (frontier.points().to_vec(), search.prices.n_values);
        Ok(Self { model: model.clone(), weights, smallest, caches, n_values })
    }

    /// Returns the cache that fits beside each type of weights, those of the file first.
    pub fn choices(&self, budget: MemoryBudget) -> Vec<WeightChoice> {
        self.weights
            .iter()
            .map(|&weights| WeightChoice { weights, cache: self.beside(weights, budget) })
            .collect()
    }

    /// Returns the bits per value of the cache that fits, and its divergence.
    fn beside(&self, weights: WeightCost, budget: MemoryBudget) -> Option<(f64, f64)> {
        // What a cache has in 16 bits takes the place of fewer bits in larger plans: a little of
        // the budget remains.
        let least = self.model.kv_bytes_for(&self.smallest, budget.tokens);
        let spare = budget.bytes.checked_sub(weights.bytes.saturating_add(least))?;
        let (fewest, _) = self.caches[0];
        let bits = fewest + 8.0 * spare as f64 / budget.tokens as f64;
        let n_fit = self.caches.partition_point(|(needed, _)| *needed <= bits);
        let (bits, kld) = self.caches[n_fit.max(1) - 1];
        Some((bits / self.n_values, kld))
    }
}

impl PlanSearch<'_> {
    /// Measures the divergence of the output with other weights.
    fn weights_kld(&self, converted: &Model) -> Result<f64, EvalError> {
        let f16 = KvOptions { policies: Policies::none(), ..KvOptions::symmetric(DType::F16) };
        let base = Base::model(self.model.clone(), converted)?;
        let options = KldOptions { configs: vec![f16], step: None };
        let measured = kld(converted, &self.judged, base, &options, None, &mut |_| ())?;
        Ok(measured[0].stats().mean_kld.value)
    }
}
