//! A plan for a model's cache: what its keys and values are multiplied by, which type each of them gets, and what that was
//! found to do.
//!
//! 1. Queries, keys and values are looked at over one half of a text: from what is seen follows the balance.
//! 2. What the keys, or the values, of two neighbouring layers alone cost in a coarse type is measured, in divergence, on pieces of
//!    the other half, less what an f32 cache costs: products with quantised weights round activations, so that any two caches differ
//!    by that. What that hides is taken for as much as could be hidden. Noise of other types is that of the coarse one times what codes
//!    of them lose; both layers share their cost, and heads that of their layer, as statistics say.
//! 3. The search spends bits where they save most.
//! 4. What comes out is measured whole, the prediction put right by that, and so on until the goal is met.

mod attention;
mod balance;
mod moments;
mod pieces;
mod prices;
mod search;
mod sensitivity;
mod statistics;

use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use kvant::{
    Balance, Certificate, DType, HeadTypes, KvBalance, KvOptions, KvPlan, KvShape, Model, Plan, Policies,
    Policy, added_kld,
};
use kvant_codec::Side;
use serde_json::json;
use xxhash_rust::xxh3::xxh3_64;

use self::balance::{in_shares, noise, shares};
use self::pieces::Text;
use self::prices::Prices;
use self::search::{Choice, Frontier};
use self::sensitivity::{choices, difference};
use self::statistics::Statistics;
use crate::kld::{Base, Kld, KldOptions, kld};
use crate::run_state::RunState;
use crate::stats::Estimate;
use crate::{Chunks, EvalError, KvConfig, NeedleForm, NiahOptions, OnProgress, Progress, niah};

/// What a plan is to reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// As little divergence as so many bits per value allow, scales included.
    Bits(f64),
    /// As few bits as keep the mean divergence, less that of an f32 cache, below this, in nats.
    Kld(f64),
}

/// How a plan is made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanOptions {
    /// What it is to reach.
    pub goal: Goal,
    /// The length of text that statistics are gathered and plans are judged at, in tokens.
    pub n_ctx: usize,
    /// The length of text that factors on keys are to hold for, in tokens.
    pub reach: usize,
    /// Whether it is judged with the youngest tokens in 16 bit, as people run it.
    pub tail: bool,
}

/// The type that sensitivities are measured with: coarse enough to stand out.
const PROBE: DType = DType::Turbo2;
/// Tokens of a piece that sensitivities are measured on, and how many.
const PROBE_CTX: usize = 256;
const PROBE_CHUNKS: usize = 2;
/// Layers whose keys, or values, are measured together.
const TOGETHER: usize = 2;
/// Caches that are measured beside one run of the base.
const AT_ONCE: usize = 24;
/// Tokens that plans are judged on.
const JUDGED: usize = 2048;

/// A plan, and what there was to choose from.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// The plan.
    pub plan: KvPlan,
    /// Bits per value and predicted divergence of plans, fewest bits first: costs of layers, each measured alone, added up.
    pub frontier: Vec<(f64, f64)>,
}

/// Makes the plan of `model`: from one half of `text`, judged on the other. With a `state` file what layers cost, most of the work, is kept
/// there: a run that was cut short goes on where it stopped, and one with another goal has it already.
///
/// # Errors
/// A text that does not fill two pieces of `n_ctx` tokens, fewer bits than any type has, logits that are not finite, a state file
/// of another run, an engine error.
pub fn plan(
    model: &Model,
    text: &str,
    options: PlanOptions,
    state: Option<&Path>,
    progress: OnProgress<'_>,
) -> Result<Planned, EvalError> {
    let prices = Prices::new(model)?;
    prices.check(options.goal)?;
    let halves = Text::new(model, text, options.n_ctx)?;
    let statistics = Statistics::gather(model, &halves.pieces(options.n_ctx), options.reach, progress)?;
    let finder = Finder::new(model, &statistics, prices, &halves, options)?;
    let frontier = Frontier::new(&finder.streams(state, progress)?);
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

/// What a search goes by.
struct Finder<'a> {
    model: &'a Model,
    statistics: &'a Statistics,
    balance: Arc<Balance>,
    shape: KvShape,
    prices: Prices,
    options: PlanOptions,
    /// What sensitivities are measured on, and what plans are judged by.
    probed: Chunks,
    judged: Chunks,
    /// The mean divergence of an f32 cache on the latter, once it is known.
    noise: Cell<Option<f64>>,
}

impl<'a> Finder<'a> {
    fn new(
        model: &'a Model,
        statistics: &'a Statistics,
        prices: Prices,
        text: &Text,
        options: PlanOptions,
    ) -> Result<Self, EvalError> {
        let n_ctx = options.n_ctx;
        let probed = text.chunks(model, PROBE_CTX.min(n_ctx), PROBE_CHUNKS)?;
        let judged = text.chunks(model, n_ctx, (JUDGED / n_ctx).max(1))?;
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

    /// The plan that meets the goal best, and what was measured of it.
    fn find(&self, frontier: &Frontier) -> Result<(KvPlan, Judged), EvalError> {
        let goal = match self.options.goal {
            Goal::Bits(bits) => {
                let plan = self.plan(&frontier.within_bits(bits * self.prices.n_values));
                return self.judge(&plan).map(|judged| (plan, judged));
            }
            Goal::Kld(goal) => goal,
        };
        frontier.meeting(goal, |n| {
            let plan = self.plan(&frontier.types(n));
            let judged = self.judge(&plan)?;
            Ok((judged.added(), (plan, judged)))
        })
    }

    /// The choices of every stream: layer by layer, the keys of each head, then the values where they have streams of their own.
    fn streams(&self, state: Option<&Path>, progress: OnProgress<'_>) -> Result<Vec<Vec<Choice>>, EvalError> {
        let groups = self.groups();
        let costs = self.sensitivities(&groups, state, progress)?;
        let costs = groups.iter().zip(costs).flat_map(|(group, cost)| self.split(group, cost));
        let costs: HashMap<(usize, Side), Estimate> = costs.collect();
        let mut prices = self.prices.sides.iter();
        let mut streams = Vec::new();
        for (index, (layer, seen)) in self.shape.layers.iter().zip(&self.statistics.layers).enumerate() {
            let balance = &self.balance.layers[index];
            let n = layer.n_kv_heads;
            let of_keys = shares(&balance.k_scale, &seen.q, &seen.k, n);
            let of_values = shares(&balance.v_scale, &seen.w, &seen.v, n);
            for &side in layer.sides() {
                let shares = if side == Side::K { &of_keys } else { &of_values };
                let prices = prices.next().expect("prices of each side");
                streams.extend(shares.iter().map(|&share| choices(prices, costs[&(index, side)], share)));
            }
        }
        Ok(streams)
    }

    /// What is measured together: keys or values of neighbouring layers.
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
            layers.chunks(TOGETHER).map(|layers| Group { side, layers: layers.to_vec() }).collect::<Vec<_>>()
        };
        [Side::K, Side::V].into_iter().flat_map(groups).collect()
    }

    /// What each layer of a group costs: what all of them do, in parts as the noise is that statistics foretell. Each of them may be
    /// what the standard error hides.
    fn split(&self, group: &Group, cost: Estimate) -> Vec<((usize, Side), Estimate)> {
        let of_layer = |&layer: &usize| {
            let (balance, seen) = (&self.balance.layers[layer], &self.statistics.layers[layer]);
            let n = seen.shape.n_kv_heads;
            let of_heads = match group.side {
                Side::K => noise(&balance.k_scale, &seen.q, &seen.k, n),
                Side::V => noise(&balance.v_scale, &seen.w, &seen.v, n),
            };
            of_heads.iter().sum()
        };
        let shares = in_shares(&group.layers.iter().map(of_layer).collect::<Vec<f64>>());
        let part = |share: f64| Estimate { value: share * cost.value, ..cost };
        group.layers.iter().zip(shares).map(|(&layer, share)| ((layer, group.side), part(share))).collect()
    }

    /// The divergence that each group adds alone in the coarse type, as it was measured.
    fn sensitivities(
        &self,
        groups: &[Group],
        state: Option<&Path>,
        progress: OnProgress<'_>,
    ) -> Result<Vec<Estimate>, EvalError> {
        let alone = |group: &Group| {
            let line = |layer: &usize| format!("{layer} * {:?} {}\n", group.side, PROBE.name());
            let table: String = group.layers.iter().map(line).collect();
            // The first tokens would drown all else.
            let sink = Policies(vec![Policy::Sink(statistics::SINK)]);
            let policies = sink.with_table(&table).map_err(kvant::Error::from)?;
            let balance = KvBalance::Plan(Arc::clone(&self.balance));
            Ok(KvOptions { policies, balance, tail: self.options.tail, ..Default::default() })
        };
        let configs = groups.iter().map(alone).collect::<Result<Vec<_>, EvalError>>()?;
        let (mut state, mut costs) = RunState::open(state, || self.measured(&configs))?;
        costs.truncate(configs.len());
        let (resumed, total) = (costs.len(), configs.len());
        for configs in configs[resumed..].chunks(AT_ONCE) {
            for cost in added(self.model, &self.probed, configs)? {
                state.push(&cost)?;
                costs.push(cost);
            }
            let note = "sensitivity of layers".to_owned();
            progress(&Progress { done: costs.len(), total, resumed, note });
        }
        Ok(costs)
    }

    /// What the costs of layers depend on, for a state file.
    fn measured(&self, configs: &[KvOptions]) -> serde_json::Value {
        let kv = configs.iter().map(|kv| KvConfig::new(self.model, kv, self.probed.n_ctx()));
        let kv: String = kv.flatten().map(|kv| kv.identity()).collect();
        json!({
            "measure": "plan", "version": 3, "model": self.model.computed_by(),
            "text": self.probed.fingerprint(), "chunks": self.probed.len(),
            "kv": format!("{:016x}", xxh3_64(kv.as_bytes())),
        })
    }

    /// The plan with these types, stream by stream; nothing has been measured of it.
    fn plan(&self, types: &[DType]) -> KvPlan {
        let mut types = types.iter().copied();
        let mut heads = |n: usize| types.by_ref().take(n).collect::<Vec<_>>();
        let layer = |layer: &kvant::KvLayerShape| {
            let k = heads(layer.n_kv_heads);
            let v = if layer.joint { k.clone() } else { heads(layer.n_kv_heads) };
            k.into_iter().zip(v).map(|(k, v)| HeadTypes { k, v }).collect()
        };
        let (types, balance) = (self.shape.layers.iter().map(layer).collect(), Arc::clone(&self.balance));
        let (model, certificate) = (self.model.fingerprint().to_owned(), Certificate::default());
        KvPlan { model, sink: statistics::SINK, types, balance, certificate }
    }

    /// Measures a plan.
    fn judge(&self, plan: &KvPlan) -> Result<Judged, EvalError> {
        let cache = self.cache(plan)?;
        let known = self.noise.get();
        let mut configs = if known.is_some() { Vec::new() } else { vec![exact()] };
        configs.push(cache);
        let mut results = measured(self.model, &self.judged, configs)?;
        let kld = results.pop().expect("the plan's result");
        let of_exact = || results.first().map_or(0.0, |exact| exact.stats().mean_kld.value);
        let noise = known.unwrap_or_else(of_exact);
        self.noise.set(Some(noise));
        Ok(Judged { kld, noise })
    }

    /// The cache that a plan is judged as.
    fn cache(&self, plan: &KvPlan) -> Result<KvOptions, EvalError> {
        Ok(KvOptions { tail: self.options.tail, ..plan.kv_options()? })
    }

    /// The plan with what was measured of it.
    fn certified(&self, plan: KvPlan, judged: &Judged, text: &str) -> Result<KvPlan, EvalError> {
        let options = self.cache(&plan)?;
        let stored =
            Plan::new(&self.shape, options.k, options.v, &options.policies).map_err(kvant::Error::from)?;
        let ((bits_k, bits_v), stats) = (stored.bits_per_value(&self.shape), judged.kld.stats());
        let (values_k, values_v) = self.shape.layers.iter().fold((0, 0), |(k, v), layer| {
            let of_keys = layer.n_kv_heads * layer.k_head_dim;
            (k + of_keys, v + layer.values_per_token() - of_keys)
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

    /// Share of right tokens in the answers about a hidden sentence, with the plan and with f16. `None` where the context has no
    /// room for one.
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
        let mean = |cells: &[crate::NiahCell]| {
            cells.iter().map(|cell| cell.token_accuracy).sum::<f64>() / cells.len().max(1) as f64
        };
        let (of_plan, of_f16) = cells.split_at(cells.len() / 2);
        Ok(Some([mean(of_plan), mean(of_f16)]))
    }
}

/// What was measured of a cache.
struct Judged {
    kld: Kld,
    /// The mean divergence of an f32 cache.
    noise: f64,
}

impl Judged {
    /// What the cache adds to the mean divergence.
    fn added(&self) -> f64 {
        added_kld(self.kld.stats().mean_kld.value, self.noise)
    }
}

/// A cache that loses nothing.
fn exact() -> KvOptions {
    KvOptions { policies: Policies::none(), ..KvOptions::symmetric(DType::F32) }
}

fn measured(model: &Model, chunks: &Chunks, configs: Vec<KvOptions>) -> Result<Vec<Kld>, EvalError> {
    kld(model, chunks, Base::F16, &KldOptions { configs, step: None }, None, &mut |_| ())
}

/// What caches add to the divergence of one that loses nothing, and the standard error of it: tokens of both are alike, so that it is
/// small.
fn added(model: &Model, chunks: &Chunks, caches: &[KvOptions]) -> Result<Vec<Estimate>, EvalError> {
    let results = measured(model, chunks, [exact()].into_iter().chain(caches.iter().cloned()).collect())?;
    let (exact, caches) = results.split_first().expect("a result of each cache");
    Ok(caches.iter().map(|cache| difference(cache, exact)).collect())
}

/// Texts that a sentence is hidden in, each at another depth.
const NEEDLES: usize = 3;
/// The longest of them, in tokens.
const NEEDLE_CTX: usize = 512;
