//! Fidelity guard: compares attention over the codes of a cache, while a model runs, with attention
//! over the rows that they were made from.
//!
//! A sequence keeps *shadows* of one KV head: its youngest keys and values as they were appended,
//! in f32. Now and then the queries of a step attend to the coded ones among these tokens twice,
//! over the shadows k, v and over the decoded rows k', v':
//!
//! ```text
//! d_t   = scale q . (k'_t - k_t)
//! noise = mean over t of (d_t - mean d)^2             nats squared
//! error = |softmax(s') v' - softmax(s) v| / |softmax(s) v|
//! ```
//!
//! A softmax ignores what all scores share, hence the mean of d.
//!
//! # What was promised
//!
//! A rotated code of relative squared error e ([`DType::squared_error`], measured on Gaussian
//! vectors) spreads `e |k|^2` evenly over the dims, so a score has the variance `e scale^2 |k|^2
//! |q|^2 / dim`. The weights predict all but e ([`WeightStatistics::score_noise`]), and the policy
//! `auto-keys` chooses types by the product: the promised noise. Keys that text makes larger than
//! the weights suggest, in one channel or in all, break that promise. The promised error of an
//! output o = sum w v follows from the noise n and the error e of values (docs/quality.md):
//!
//! ```text
//! E |o' - o|^2 = sum over t of w_t^2 ((exp(n) - 1) |v_t - o|^2 + e |v_t|^2)
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvant_backend::{Backend, Page};
use kvant_codec::DType;
use kvant_codec::tile::{Side, TILE};

use crate::{Cache, KvError, KvShape, Layout, WeightStatistics};

/// Coded tokens that a comparison covers at most: two blocks.
const SHADOW_TOKENS: usize = 256;
/// Coded tokens that a comparison needs.
const MIN_TOKENS: usize = 64;
/// Steps of a model per comparison.
const STEPS: usize = 32;
/// Comparisons of a head before the sequence goes on to the next one.
const PER_HEAD: usize = 4;
/// Ratio of noise to the promised one beyond which a promise is broken. That of the heads of
/// Qwen2.5-Coder 0.5B and 1.5B is 0.5 to 5 (docs/benchmarks/2026-11-29-kv-guard.md).
const MAX_NOISE_RATIO: f64 = 8.0;
/// Noise in nats squared that breaks no promise: scores off by half a nat.
const MAX_HARMLESS_NOISE: f64 = 0.25;
/// Noise in nats squared that no promise covers: twice what `auto-keys` accepts.
const MAX_NOISE: f64 = 5.0;
/// Samples buffered until the owner takes them; further ones are dropped.
const MAX_SAMPLES: usize = 1024;

/// One comparison of a KV head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GuardSample {
    /// KV layer.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// Type of the keys.
    pub k: DType,
    /// Type of the values.
    pub v: DType,
    /// Tokens attended to.
    pub tokens: usize,
    /// Variance of the score error in nats squared, the mean of the head's queries.
    pub noise: f64,
    /// The promised variance.
    pub promised_noise: f64,
    /// Relative error of the outputs of the head's queries together.
    pub error: f64,
    /// The promised error.
    pub promised_error: f64,
}

impl GuardSample {
    /// Returns the noise relative to the promised one.
    pub fn noise_ratio(&self) -> f64 {
        self.noise / self.promised_noise
    }

    /// Returns whether the noise is about as promised, or too small to matter. NaN is neither.
    fn is_as_promised(&self) -> bool {
        self.noise <= (MAX_NOISE_RATIO * self.promised_noise).clamp(MAX_HARMLESS_NOISE, MAX_NOISE)
    }
}

impl fmt::Display for GuardSample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layer, head, k, v, tokens, noise, promised_noise, error, promised_error } = self;
        write!(
            f,
            "layer {layer}, KV head {head} ({k}/{v}): score variance {noise:.3} nats\u{b2}, {promised_noise:.3} promised; \
             output off by {:.1} %, {:.1} % promised, over {tokens} tokens",
            100.0 * error,
            100.0 * promised_error
        )
    }
}

/// What a guard reports.
#[derive(Debug, Default)]
pub struct GuardReport {
    /// The comparisons since the last report.
    pub samples: Vec<GuardSample>,
    /// Heads that broke their promise since the last report: once each, with the mean of its
    /// comparisons in place of a sample.
    pub broken: Vec<GuardSample>,
}

/// Compares attention over codes with attention over shadows, the rows that they were made from,
/// for the sequences of a model.
#[derive(Debug)]
pub struct KvGuard {
    /// What the weights promise.
    statistics: Option<Arc<WeightStatistics>>,
    /// Layers and heads that shadows can follow: those of a cache with codes are a subset.
    heads: Vec<HeadIndex>,
    next_head: AtomicUsize,
    steps: AtomicUsize,
    state: Mutex<GuardState>,
}

#[derive(Debug, Default)]
struct GuardState {
    report: GuardReport,
    heads: BTreeMap<HeadIndex, HeadHistory>,
}

/// A KV head of a KV layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct HeadIndex {
    layer: usize,
    head: usize,
}

/// The comparisons of a head until it breaks its promise.
#[derive(Debug, Default)]
struct HeadHistory {
    n: usize,
    noise: f64,
    promised_noise: f64,
    square: f64,
    promised_square: f64,
    is_broken: bool,
}

impl KvGuard {
    /// Creates the guard of a model with KV heads of this shape; `None` where no head can be
    /// followed: keys that contain their values (MLA) have no rows of their own, and windows
    /// shorter than 256 tokens too few.
    pub fn new(shape: &KvShape) -> Option<Self> {
        let layers = shape
            .layers
            .iter()
            .enumerate()
            .filter(|(_, of)| !of.shared_kv && of.window.is_none_or(|window| window >= SHADOW_TOKENS));
        let heads: Vec<_> = layers
            .flat_map(|(layer, of)| (0..of.n_kv_heads).map(move |head| HeadIndex { layer, head }))
            .collect();
        (!heads.is_empty()).then(|| Self {
            statistics: shape.statistics.clone(),
            heads,
            next_head: AtomicUsize::new(0),
            steps: AtomicUsize::new(0),
            state: Mutex::default(),
        })
    }

    /// Returns whether a step that begins now makes a comparison: one in 32.
    pub fn begin_step(&self) -> bool {
        self.steps.fetch_add(1, Ordering::Relaxed) % STEPS == STEPS - 1
    }

    /// Takes what was compared since the last call.
    pub fn take_report(&self) -> GuardReport {
        std::mem::take(&mut self.state().report)
    }

    /// Returns empty shadows of the next head with codes; `None` if the layout has none.
    pub(crate) fn next_shadow(&self, layout: &Layout, n_ctx: usize) -> Option<Shadow> {
        let types = &layout.plan().types;
        (0..self.heads.len()).find_map(|_| {
            let next = self.next_head.fetch_add(1, Ordering::Relaxed);
            let index = self.heads[next % self.heads.len()];
            let of = types[index.layer][index.head];
            let has_codes = [of.k, of.v].iter().any(|dtype| dtype.code().is_some());
            has_codes.then(|| Shadow::new(index, layout, n_ctx))
        })
    }

    /// Returns the score noise that the weights, or else the keys themselves, promise.
    fn promised_noise(&self, index: HeadIndex, dtype: DType, of_keys: impl FnOnce() -> f64) -> f64 {
        let of_weights = self.statistics.as_ref().map(|of| of.score_noise[index.layer][index.head]);
        dtype.squared_error() * of_weights.unwrap_or_else(of_keys)
    }

    fn record(&self, sample: GuardSample) {
        let state = &mut *self.state();
        if state.report.samples.len() < MAX_SAMPLES {
            state.report.samples.push(sample);
        }
        let GuardSample { layer, head, .. } = sample;
        let history = state.heads.entry(HeadIndex { layer, head }).or_default();
        history.n += 1;
        history.noise += sample.noise;
        history.promised_noise += sample.promised_noise;
        history.square += sample.error.powi(2);
        history.promised_square += sample.promised_error.powi(2);
        if history.n >= PER_HEAD && !history.is_broken {
            let n = history.n as f64;
            let mean = GuardSample {
                noise: history.noise / n,
                promised_noise: history.promised_noise / n,
                error: (history.square / n).sqrt(),
                promised_error: (history.promised_square / n).sqrt(),
                ..sample
            };
            if !mean.is_as_promised() {
                history.is_broken = true;
                state.report.broken.push(mean);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, GuardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The youngest rows of one KV head of a sequence, as they were appended.
#[derive(Debug)]
pub(crate) struct Shadow {
    index: HeadIndex,
    /// Positions with rows.
    tokens: Range<usize>,
    /// Rows are at their position modulo this.
    n_slots: usize,
    keys: Ring,
    values: Ring,
    /// Comparisons made.
    n_compared: usize,
}

/// Rows `[slots, dim]`.
#[derive(Debug)]
struct Ring {
    dim: usize,
    rows: Vec<f32>,
}

impl Ring {
    fn new(dim: usize, n_slots: usize) -> Self {
        Self { dim, rows: vec![0.0; dim * n_slots] }
    }

    fn row(&self, slot: usize) -> &[f32] {
        &self.rows[slot * self.dim..][..self.dim]
    }

    fn row_mut(&mut self, slot: usize) -> &mut [f32] {
        &mut self.rows[slot * self.dim..][..self.dim]
    }
}

impl Shadow {
    fn new(index: HeadIndex, layout: &Layout, n_ctx: usize) -> Self {
        let layer = layout.layer(index.layer);
        let specs = [&layer.k[index.head].spec, &layer.values(index.head).spec];
        let tail = specs.map(|spec| spec.tail_tiles).into_iter().max().unwrap_or(0);
        // The youngest tokens are in f16.
        let n_slots = SHADOW_TOKENS.saturating_add(tail.saturating_mul(TILE)).min(n_ctx);
        let [keys, values] = specs.map(|spec| Ring::new(spec.head_dim, n_slots));
        Self { index, tokens: 0..0, n_slots, keys, values, n_compared: 0 }
    }

    /// See [`Cache::shadow_mut`].
    fn row_mut(&mut self, position: usize) -> [&mut [f32]; 2] {
        // Positions between were not followed: a shared prefix, or rows that a long step replaced.
        if !(self.tokens.start..=self.tokens.end).contains(&position) {
            self.tokens = position..position;
        }
        let end = position + 1;
        self.tokens = self.tokens.start.max(end.saturating_sub(self.n_slots))..end;
        let slot = position % self.n_slots;
        [self.keys.row_mut(slot), self.values.row_mut(slot)]
    }
}

/// The queries of one token that share a KV head, after RoPE, `[queries, k_head_dim]`.
#[derive(Debug, Clone, Copy)]
pub struct GuardQueries<'a> {
    /// Their values.
    pub rows: &'a [f32],
    /// Position of the token.
    pub position: usize,
    /// Factor on scores.
    pub scale: f32,
    /// Soft cap of scores, if any.
    pub soft_cap: Option<f32>,
}

impl<P: Page> Cache<P> {
    /// Begins shadows of the guard's next head, unless the cache has some.
    pub fn follow(&mut self, guard: &KvGuard) {
        if self.shadow.is_none() {
            self.shadow = guard.next_shadow(self.layout(), self.n_ctx());
        }
    }

    /// Returns the KV head of `layer` that shadows follow, and how many of the youngest rows of a
    /// step they need.
    pub fn followed_head(&self, layer: usize) -> Option<(usize, usize)> {
        let shadow = self.shadow.as_ref().filter(|shadow| shadow.index.layer == layer)?;
        Some((shadow.index.head, shadow.n_slots))
    }

    /// Returns the key `[k_head_dim]` and the value `[v_head_dim]` of the shadow at `position`, to
    /// be overwritten by the rows that are appended there. Shadows of later positions are
    /// forgotten.
    ///
    /// # Panics
    /// When no head is followed.
    pub fn shadow_mut(&mut self, position: usize) -> [&mut [f32]; 2] {
        self.shadow.as_mut().expect("a followed head").row_mut(position)
    }

    /// Attends to the coded tokens among the shadows twice, and reports the difference to the
    /// guard. Returns whether it did: fewer than 64 tokens are not compared.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn compare<B: Backend<Page = P>>(
        &mut self,
        backend: &B,
        guard: &KvGuard,
        queries: GuardQueries<'_>,
    ) -> Result<bool, KvError> {
        let Some(shadow) = &self.shadow else { return Ok(false) };
        let HeadIndex { layer, head } = shadow.index;
        let types = self.layout().plan().types[layer][head];
        let tokens = self.coded_tokens(shadow, queries.position);
        if tokens.len() < MIN_TOKENS {
            return Ok(false);
        }
        let decoded = |side| self.decoded_tokens(backend, layer, head, side, tokens.clone());
        let [k, v] = [decoded(Side::K)?, decoded(Side::V)?];
        let comparison = Comparison { shadow, tokens: tokens.clone(), decoded: [&k, &v], queries };
        let promised_noise = guard.promised_noise(shadow.index, types.k, || comparison.lost_noise());
        let Difference { noise, error, promised_error } =
            comparison.measure(promised_noise, types.v.squared_error());
        guard.record(GuardSample {
            layer,
            head,
            k: types.k,
            v: types.v,
            tokens: tokens.len(),
            noise,
            promised_noise,
            error,
            promised_error,
        });
        let shadow = self.shadow.as_mut().expect("a followed head");
        shadow.n_compared += 1;
        self.shadow.take_if(|shadow| shadow.n_compared >= PER_HEAD);
        Ok(true)
    }

    /// Returns the tokens with shadows that a query at `position` reads as codes.
    fn coded_tokens(&self, shadow: &Shadow, position: usize) -> Range<usize> {
        let HeadIndex { layer, head } = shadow.index;
        let layer = self.layout().layer(layer);
        let specs = [&layer.k[head].spec, &layer.values(head).spec];
        let in_sink = specs.map(|spec| spec.sink_tiles * TILE).into_iter().max().unwrap_or(0);
        let start = shadow.tokens.start.max(in_sink).max(layer.window_start(position));
        let end = shadow.tokens.end.min(self.len()).min(self.coded().saturating_mul(TILE));
        start.max(end.saturating_sub(SHADOW_TOKENS))..end.max(start)
    }
}

/// A comparison of shadows with decoded rows.
struct Comparison<'a> {
    shadow: &'a Shadow,
    tokens: Range<usize>,
    /// Keys and values, `[tokens, head_dim]`.
    decoded: [&'a [f32]; 2],
    queries: GuardQueries<'a>,
}

/// What a comparison finds.
struct Difference {
    noise: f64,
    error: f64,
    promised_error: f64,
}

impl Comparison<'_> {
    fn keys(&self) -> impl Iterator<Item = &[f32]> {
        self.tokens.clone().map(|token| self.shadow.keys.row(token % self.shadow.n_slots))
    }

    fn values(&self) -> impl Iterator<Item = &[f32]> {
        self.tokens.clone().map(|token| self.shadow.values.row(token % self.shadow.n_slots))
    }

    fn queries(&self) -> impl Iterator<Item = &[f32]> {
        self.queries.rows.chunks_exact(self.shadow.keys.dim)
    }

    /// Returns the score variance of a code that loses the keys, around their mean, completely and
    /// evenly: `scale^2 |q|^2 |k|^2 / dim`.
    fn lost_noise(&self) -> f64 {
        let dim = self.shadow.keys.dim;
        let (mut sum, mut square, n) = (vec![0.0; dim], 0.0, self.tokens.len() as f64);
        for key in self.keys() {
            square += dot(key, key);
            sum.iter_mut().zip(key).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        let of_keys = square / n - sum.iter().map(|sum| (sum / n).powi(2)).sum::<f64>();
        let n_queries = self.queries().count().max(1) as f64;
        let of_queries = self.queries().map(|query| dot(query, query)).sum::<f64>() / n_queries;
        f64::from(self.queries.scale).powi(2) * of_keys * of_queries / dim as f64
    }

    /// Measures the noise of scores and the error of outputs, and what error `promised_noise` and
    /// values of relative squared error `value_error` would give.
    fn measure(&self, promised_noise: f64, value_error: f64) -> Difference {
        let [coded_keys, coded_values] = self.decoded;
        let (k_dim, v_dim) = (self.shadow.keys.dim, self.shadow.values.dim);
        let coded_keys = || coded_keys.chunks_exact(k_dim);
        let coded_values = || coded_values.chunks_exact(v_dim);
        let (n, n_queries) = (self.tokens.len() as f64, self.queries().count().max(1) as f64);
        let [mut noise, mut square, mut error, mut promised] = [0.0; 4];
        for query in self.queries() {
            let exact = self.scores(query, self.keys());
            let coded = self.scores(query, coded_keys());
            let differences: Vec<f64> = coded.iter().zip(&exact).map(|(c, s)| c - s).collect();
            let mean = differences.iter().sum::<f64>() / n;
            noise += differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / n / n_queries;
            let weights = self.weights(exact);
            let output = weighted_sum(&weights, self.values(), v_dim);
            let other = weighted_sum(&self.weights(coded), coded_values(), v_dim);
            square += output.iter().map(|x| x * x).sum::<f64>();
            error += output.iter().zip(other).map(|(x, y)| (y - x).powi(2)).sum::<f64>();
            for (weight, value) in weights.iter().zip(self.values()) {
                let apart: f64 = value.iter().zip(&output).map(|(&v, o)| (f64::from(v) - o).powi(2)).sum();
                promised +=
                    weight * weight * (promised_noise.exp_m1() * apart + value_error * dot(value, value));
            }
        }
        Difference { noise, error: (error / square).sqrt(), promised_error: (promised / square).sqrt() }
    }

    /// Returns the scores of a query before the soft cap.
    fn scores<'a>(&self, query: &[f32], keys: impl Iterator<Item = &'a [f32]>) -> Vec<f64> {
        keys.map(|key| f64::from(self.queries.scale) * dot(query, key)).collect()
    }

    /// Returns the softmax of scores.
    fn weights(&self, mut scores: Vec<f64>) -> Vec<f64> {
        if let Some(cap) = self.queries.soft_cap.map(f64::from) {
            scores.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh());
        }
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        scores.iter_mut().for_each(|s| *s = (*s - max).exp());
        let sum: f64 = scores.iter().sum();
        scores.iter_mut().for_each(|w| *w /= sum);
        scores
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn weighted_sum<'a>(weights: &[f64], rows: impl Iterator<Item = &'a [f32]>, dim: usize) -> Vec<f64> {
    let mut sum = vec![0.0; dim];
    for (weight, row) in weights.iter().zip(rows) {
        sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += weight * f64::from(x));
    }
    sum
}
