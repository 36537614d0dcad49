//! Plans of a model's KV cache: the factors on its keys and values, the type of each, and the
//! measured quality.
//!
//! 1. Statistics of queries, keys and values are gathered over one half of a text; they determine
//!    the factors (balance).
//! 2. The cost in KL divergence of the keys, or the values, of two neighbouring layers alone in a
//!    coarse type is measured on chunks of the other half, less the cost of an f32 cache: GEMMs
//!    with quantized weights round activations, so that any two caches differ by that. A cost
//!    hidden by this noise is taken as the largest that it could hide. The noise of other types is
//!    scaled from the coarse one by the distortion of their codes; the two layers share the cost,
//!    and so do the heads of a layer, according to the statistics.
//! 3. The search spends bits where they reduce the cost most.
//! 4. The resulting plan is measured whole, which corrects the prediction, until the goal is met.

mod attention;
mod balance;
mod memory;
mod moments;
mod search;
mod sensitivity;
mod statistics;
mod text_splits;
mod type_costs;

use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use kvant::{
    Certificate, ChannelScales, DType, HeadTypes, KvBalance, KvOptions, KvPlan, KvShape, Model, Plan,
    Policies, Policy, added_kld,
};
use kvant_codec::Side;
use serde_json::json;
use xxhash_rust::xxh3::xxh3_64;

pub use self::memory::{MemoryBudget, MemoryCosts, WeightChoice, WeightCost};

use self::balance::{in_shares, noise, shares};
use self::search::{Choice, Frontier};
use self::sensitivity::{choices, difference};
use self::statistics::Statistics;
use self::text_splits::TextHalves;
use self::type_costs::Prices;
use crate::chunks::Chunks;
use crate::config::KvConfig;
use crate::error::EvalError;
use crate::kld::{Base, Kld, KldOptions, kld};
use crate::needle_form::NeedleForm;
use crate::niah::{NiahCell, NiahOptions, niah};
use crate::progress::{OnProgress, Progress};
use crate::run_state::RunState;
use crate::stats::Estimate;

/// Goal of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// Minimize the divergence within this many bits per value, scales included.
    Bits(f64),
    /// Minimize the bits with a mean divergence, less that of an f32 cache, below this, in nats.
    Kld(f64),
}

/// Options of plan search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanOptions {
    /// The goal.
    pub goal: Goal,
    /// Length of the texts for statistics and evaluation, in tokens.
    pub n_ctx: usize,
    /// Length of text for which the factors on keys hold, in tokens.
    pub reach: usize,
    /// Whether the evaluation has recent tokens in 16 bits, as in `run`.
    pub tail: bool,
}

/// Type of the sensitivity measurement: coarse enough to exceed the noise.
const PROBE: DType = DType::Turbo2;
/// Tokens per chunk of the sensitivity measurement, and the number of chunks.
const PROBE_CTX: usize = 256;
const PROBE_CHUNKS: usize = 2;
/// Layers whose keys, or values, are measured together.
const LAYERS_PER_GROUP: usize = 2;
/// Caches that are measured beside one run of the base.
const CACHES_PER_RUN: usize = 24;
/// Tokens of the evaluation.
const EVAL_TOKENS: usize = 2048;

/// A plan, and the alternatives.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// The plan.
    pub plan: KvPlan,
    /// Bits per value and predicted divergence of plans, fewest bits first: sums of the costs of
    /// layers that were measured alone.
    pub frontier: Vec<(f64, f64)>,
}

/// Searches the plan of `model`: calibrated on one half of `text`, evaluated on the other. A
/// `state` file stores the costs of layers, which are most of the work: an interrupted run resumes,
/// and a run with another goal reuses them.
///
/// # Errors
///
/// A text that does not fill two chunks of `n_ctx` tokens, fewer bits than any type has, logits
/// that are not finite, a state file of another run, an engine error.
pub fn plan(
    model: &Model,
    text: &str,
    options: PlanOptions,
    state: Option<&Path>,
    progress: OnProgress<'_>,
) -> Result<Planned, EvalError> {
    let prices = Prices::new(model)?;
    prices.check(options.goal)?;
    let halves = TextHalves::new(model, text, options.n_ctx)?;
    let statistics = Statistics::gather(model, &halves.pieces(options.n_ctx), options.reach, progress)?;
    let finder = PlanSearch::new(model, &statistics, prices, &halves, options)?;
    let frontier = Frontier::new(&finder.tensors(state, progress)?);
    let (plan, judged) = finder.find(&frontier)?;
    let n_values = finder.prices.n_values;
    let frontier = frontier.points().iter().map(|(bits, cost)| (bits / n_values, *cost)).collect();
    Ok(Planned { plan: finder.certified(plan, &judged, text)?, frontier })
}

/// Layers whose keys, or values, are measured together.
struct Group {
    side: Side,
    layers: Vec<usize>,
}

/// Inputs of the search.
struct PlanSearch<'a> {
    model: &'a Model,
    statistics: &'a Statistics,
    balance: Arc<ChannelScales>,
    shape: KvShape,
    prices: Prices,
    options: PlanOptions,
    /// Chunks of the sensitivity measurement, and of the evaluation.
    probed: Chunks,
    judged: Chunks,
    /// Mean divergence of an f32 cache on the latter, once measured.
    noise: Cell<Option<f64>>,
}

impl<'a> PlanSearch<'a> {
    fn new(
        model: &'a Model,
        statistics: &'a Statistics,
        prices: Prices,
        text: &TextHalves,
        options: PlanOptions,
    ) -> Result<Self, EvalError> {
        let n_ctx = options.n_ctx;
        let probed = text.chunks(model, PROBE_CTX.min(n_ctx), PROBE_CHUNKS)?;
        let judged = text.chunks(model, n_ctx, (EVAL_TOKENS / n_ctx).max(1))?;
        let (balance, shape) = (Arc::new(statistics.balance()), model.config().kv_shape());
        Ok(Self {
            model,
            statistics,
            balance,
            shape,
            prices,
            options,
            probed,
            judged,
            noise: Cell::new(None),
        })
    }

    /// Returns the plan that meets the goal best, and its measurement.
    fn find(&self, frontier: &Frontier) -> Result<(KvPlan, Judged), EvalError> {
        let goal = match self.options.goal {
            Goal::Bits(bits) => {
                let plan = self.plan(&frontier.within_bits(bits * self.prices.n_values));
                return self.judge(&plan).map(|judged| (plan, judged));
            }
            Goal::Kld(goal) => goal,
        };
        frontier.search(goal, |n| {
            let plan = self.plan(&frontier.types(n));
            let judged = self.judge(&plan)?;
            Ok((judged.added(), (plan, judged)))
        })
    }

    /// Returns the choices of every KV tensor: layer by layer, the keys of each head, then the
    /// values if they are stored separately.
    fn tensors(&self, state: Option<&Path>, progress: OnProgress<'_>) -> Result<Vec<Vec<Choice>>, EvalError> {
        let groups = self.groups();
        let costs = self.sensitivities(&groups, state, progress)?;
        let costs = groups.iter().zip(costs).flat_map(|(group, cost)| self.split(group, cost));
        let costs: HashMap<(usize, Side), Estimate> = costs.collect();
        let mut prices = self.prices.sides.iter();
        let mut tensors = Vec::new();
        for (index, (layer, statistics)) in self.shape.layers.iter().zip(&self.statistics.layers).enumerate()
        {
            let balance = &self.balance.layers[index];
            let n = layer.n_kv_heads;
            let of_keys = shares(&balance.k_scale, &statistics.q, &statistics.k, n);
            let of_values = shares(&balance.v_scale, &statistics.w, &statistics.v, n);
            for &side in layer.sides() {
                let shares = if side == Side::K { &of_keys } else { &of_values };
                let prices = prices.next().expect("prices of each side");
                tensors.extend(shares.iter().map(|&share| choices(prices, costs[&(index, side)], share)));
            }
        }
        Ok(tensors)
    }

    /// Returns the groups that are measured together: keys or values of neighbouring layers.
    fn groups(&self) -> Vec<Group> {
        let with = |side: Side| {
            let layers = self.shape.layers.iter().enumerate();
            layers
                .filter(move |(_, layer)| layer.sides().contains(&side))
                .map(|(index, _)| index)
                .collect::<Vec<_>>()
        };
        let groups = |side: Side| {
            let layers = with(side);
            layers
                .chunks(LAYERS_PER_GROUP)
                .map(|layers| Group { side, layers: layers.to_vec() })
                .collect::<Vec<_>>()
        };
        [Side::K, Side::V].into_iter().flat_map(groups).collect()
    }

    /// Splits the cost of a group among its layers, in proportion to the noise predicted by the
    /// statistics. The standard error applies to each layer undivided.
    fn split(&self, group: &Group, cost: Estimate) -> Vec<((usize, Side), Estimate)> {
        let of_layer = |&layer: &usize| {
            let (balance, statistics) = (&self.balance.layers[layer], &self.statistics.layers[layer]);
            let n = statistics.shape.n_kv_heads;
            let of_heads = match group.side {
                Side::K => noise(&balance.k_scale, &statistics.q, &statistics.k, n),
                Side::V => noise(&balance.v_scale, &statistics.w, &statistics.v, n),
            };
            of_heads.iter().sum()
        };
        let shares = in_shares(&group.layers.iter().map(of_layer).collect::<Vec<f64>>());
        let part = |share: f64| Estimate { value: share * cost.value, ..cost };
        group.layers.iter().zip(shares).map(|(&layer, share)| ((layer, group.side), part(share))).collect()
    }

    /// Measures the divergence that each group adds alone in the coarse type.
    fn sensitivities(
        &self,
        groups: &[Group],
        state: Option<&Path>,
        progress: OnProgress<'_>,
    ) -> Result<Vec<Estimate>, EvalError> {
        let alone = |group: &Group| {
            let line = |layer: &usize| format!("{layer} * {:?} {}\n", group.side, PROBE.name());
            let table: String = group.layers.iter().map(line).collect();
            // The errors of the first tokens would dominate all others.
            let sink = Policies(vec![Policy::Sink(statistics::SINK)]);
            let policies = sink.with_table(&table).map_err(kvant::Error::from)?;
            let balance = KvBalance::Plan(Arc::clone(&self.balance));
            Ok(KvOptions { policies, balance, tail: self.options.tail, ..Default::default() })
        };
        let configs = groups.iter().map(alone).collect::<Result<Vec<_>, EvalError>>()?;
        let (mut state, mut costs) = RunState::open(state, || self.measured(&configs))?;
        costs.truncate(configs.len());
        let (resumed, total) = (costs.len(), configs.len());
        for configs in configs[resumed..].chunks(CACHES_PER_RUN) {
            for cost in added(self.model, &self.probed, configs)? {
                state.push(&cost)?;
                costs.push(cost);
            }
            let note = "sensitivity of layers".to_owned();
            progress(&Progress { done: costs.len(), total, resumed, note });
        }
        Ok(costs)
    }

    /// Returns the inputs of the costs of layers, for a state file.
    fn measured(&self, configs: &[KvOptions]) -> serde_json::Value {
        let kv = configs.iter().map(|kv| KvConfig::new(self.model, kv, self.probed.n_ctx()));
        let kv: String = kv.flatten().map(|kv| kv.identity()).collect();
        json!({
            "measure": "plan", "version": 3, "model": self.model.compute_fingerprint(),
            "text": self.probed.fingerprint(), "chunks": self.probed.len(),
            "kv": format!("{:016x}", xxh3_64(kv.as_bytes())),
        })
    }

    /// Returns the unmeasured plan with these types per KV tensor.
    fn plan(&self, types: &[DType]) -> KvPlan {
        let mut types = types.iter().copied();
        let mut heads = |n: usize| types.by_ref().take(n).collect::<Vec<_>>();
        let layer = |layer: &kvant::KvLayerShape| {
            let k = heads(layer.n_kv_heads);
            let v = if layer.shared_kv { k.clone() } else { heads(layer.n_kv_heads) };
            k.into_iter().zip(v).map(|(k, v)| HeadTypes { k, v }).collect()
        };
        let (types, balance) = (self.shape.layers.iter().map(layer).collect(), Arc::clone(&self.balance));
        let (model, certificate) = (self.model.fingerprint().to_owned(), Certificate::default());
        KvPlan { model, sink: statistics::SINK, types, channel_scales: balance, certificate }
    }

    /// Measures a plan.
    fn judge(&self, plan: &KvPlan) -> Result<Judged, EvalError> {
        let cache = self.cache(plan)?;
        let cached = self.noise.get();
        let mut configs = if cached.is_some() { Vec::new() } else { vec![exact()] };
        configs.push(cache);
        let mut results = measured(self.model, &self.judged, configs)?;
        let kld = results.pop().expect("the plan's result");
        let of_exact = || results.first().map_or(0.0, |exact| exact.stats().mean_kld.value);
        let noise = cached.unwrap_or_else(of_exact);
        self.noise.set(Some(noise));
        Ok(Judged { kld, noise })
    }

    /// Returns the cache options for the evaluation of a plan.
    fn cache(&self, plan: &KvPlan) -> Result<KvOptions, EvalError> {
        Ok(KvOptions { tail: self.options.tail, ..plan.kv_options()? })
    }

    /// Returns the plan with its measurement.
    fn certified(&self, plan: KvPlan, judged: &Judged, text: &str) -> Result<KvPlan, EvalError> {
        let options = self.cache(&plan)?;
        let stored =
            Plan::new(&self.shape, options.k, options.v, &options.policies).map_err(kvant::Error::from)?;
        let ((bits_k, bits_v), stats) = (stored.bits_per_value(&self.shape), judged.kld.stats());
        let (values_k, values_v) = self.shape.layers.iter().fold((0, 0), |(k, v), layer| {
            let of_keys = layer.n_kv_heads * layer.k_head_dim;
            (k + of_keys, v + layer.n_values())
        });
        let bits =
            (bits_k * values_k as f64 + bits_v * values_v as f64) / (values_k + values_v).max(1) as f64;
        let needle = self.needle(options, text)?;
        let certificate = Certificate {
            bits,
            bytes_per_1k: stored.n_bytes(&self.shape, 1024),
            bytes_per_1k_f16: self.shape.f16_bytes(1024),
            mean_kld: stats.mean_kld.value,
            mean_kld_stderr: stats.mean_kld.stderr,
            noise_kld: judged.noise,
            p99_kld: stats.kld.p99,
            max_kld: stats.kld.max,
            same_top: stats.same_top.value,
            ppl_ratio: stats.ppl_ratio.value,
            ppl_ratio_stderr: stats.ppl_ratio.stderr,
            needles: if needle.is_some() { NEEDLES } else { 0 },
            needle,
            weights: self.model.weights().map(|dtype| dtype.name().to_owned()),
            tail: self.options.tail,
            tokens: stats.tokens,
            n_ctx: self.options.n_ctx,
            text: self.judged.fingerprint(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: None,
        };
        Ok(KvPlan { certificate, ..plan })
    }

    /// Returns the share of correct tokens in answers about a hidden sentence, with the plan and
    /// with f16. `None` if the context is too short for one.
    fn needle(&self, plan: KvOptions, text: &str) -> Result<Option<[f64; 2]>, EvalError> {
        if self.options.n_ctx < PROBE_CTX {
            return Ok(None);
        }
        let f16 = KvOptions { policies: Policies::none(), ..Default::default() };
        let options = NiahOptions {
            lengths: vec![self.options.n_ctx.min(NEEDLE_CTX)],
            depths: NEEDLES,
            needles: 1,
            form: NeedleForm::find("secret-word")?,
            chat: false,
            configs: vec![plan, f16],
        };
        let cells = niah(self.model, text, &options, None, &mut |_| ())?;
        let mean = |cells: &[NiahCell]| {
            cells.iter().map(|cell| cell.token_accuracy).sum::<f64>() / cells.len().max(1) as f64
        };
        let (of_plan, of_f16) = cells.split_at(cells.len() / 2);
        Ok(Some([mean(of_plan), mean(of_f16)]))
    }
}

/// Measurement of a cache.
struct Judged {
    kld: Kld,
    /// Mean divergence of an f32 cache.
    noise: f64,
}

impl Judged {
    /// Returns the mean divergence that the cache adds.
    fn added(&self) -> f64 {
        added_kld(self.kld.stats().mean_kld.value, self.noise)
    }
}

/// Returns options of a lossless cache.
fn exact() -> KvOptions {
    KvOptions { policies: Policies::none(), ..KvOptions::symmetric(DType::F32) }
}

fn measured(model: &Model, chunks: &Chunks, configs: Vec<KvOptions>) -> Result<Vec<Kld>, EvalError> {
    kld(model, chunks, Base::F16, &KldOptions { configs, step: None }, None, &mut |_| ())
}

/// Measures the divergence that caches add to that of a lossless one, and its standard error, which
/// is small since the errors of both are paired per token.
fn added(model: &Model, chunks: &Chunks, caches: &[KvOptions]) -> Result<Vec<Estimate>, EvalError> {
    let results = measured(model, chunks, [exact()].into_iter().chain(caches.iter().cloned()).collect())?;
    let (exact, caches) = results.split_first().expect("a result of each cache");
    Ok(caches.iter().map(|cache| difference(cache, exact)).collect())
}

/// Number of needle prompts, each with another depth.
const NEEDLES: usize = 3;
/// Maximum length of a needle prompt, in tokens.
const NEEDLE_CTX: usize = 512;
