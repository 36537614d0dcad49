//! Sampling: selects the next token from the logits.
//!
//! The sampler chain and its defaults are llama.cpp's: repeat penalty, DRY, top-n-sigma, top-k,
//! typical, top-p, min-p, XTC, temperature, then one sample; each stage has a module. Top-p
//! (Holtzman et al., <https://arxiv.org/abs/1904.09751>) and min-p (Nguyen et al.,
//! <https://arxiv.org/abs/2407.01082>) apply to the distribution before the temperature. Mirostat
//! replaces all truncating stages and follows the temperature.
//!
//! The same seed and logits give the same tokens on every platform: the generator is fixed, ties
//! resolve to the lower id, and `exp` and the like are computed here from correctly rounded
//! operations, since platforms differ in the last bit.
//!
//! Besides the tokens so far, a sample depends only on the generator and Mirostat's `mu`. Both are
//! in the [`Sampler`] and change only when it samples, so preemption, repeated prefill and
//! speculative decoding do not change the output.

mod breakers;
mod dry;
mod dynatemp;
mod entropy;
mod math;
mod mirostat;
mod params;
#[cfg(test)]
mod reference;
mod rng;
#[cfg(test)]
mod stages;
#[cfg(test)]
mod tests;
mod top_n_sigma;
mod typical;
mod xtc;

use kvant_codec::candidate::Candidate;

pub use breakers::SequenceBreakers;
pub use dry::Dry;
pub use dynatemp::Dynatemp;
pub use mirostat::{Mirostat, MirostatVersion};
pub use params::{SampleError, SamplerParams};
pub use xtc::Xtc;

use math::exp;
use mirostat::Scale;
use rng::Xoshiro256;
use typical::Typicality;

/// Samples tokens. Its buffers grow to the vocabulary in the first call and are reused.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplerParams,
    breakers: SequenceBreakers,
    rng: Xoshiro256,
    /// The largest surprise, in bits, that Mirostat allows next.
    mu: f64,
    /// Candidates that remain.
    candidates: Vec<Candidate>,
    /// Weight of each sorted candidate relative to the first, for top-p or the final sample.
    weights: Vec<f64>,
    /// Distinct recent tokens.
    recent: Vec<u32>,
    repetitions: dry::Scratch,
    typicality: Vec<Typicality>,
}

impl Sampler {
    /// Creates a sampler at the start of its seed's sequence.
    pub fn new(params: SamplerParams) -> Self {
        Sampler {
            rng: Xoshiro256::new(params.seed),
            mu: params.mirostat.first_mu(),
            params,
            breakers: SequenceBreakers::default(),
            candidates: Vec::new(),
            weights: Vec::new(),
            recent: Vec::new(),
            repetitions: dry::Scratch::default(),
            typicality: Vec::new(),
        }
    }

    /// Sets the sequence breakers of DRY.
    #[must_use]
    pub fn with_breakers(self, breakers: SequenceBreakers) -> Self {
        Self { breakers, ..self }
    }

    /// Returns the settings.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// Returns how many of the likeliest tokens a sample needs after `n_recent` tokens; `None` for
    /// all.
    ///
    /// Penalties lower only recent tokens, so at most as many other tokens move up. A penalty below
    /// 1 may raise any token. Top-n-sigma and Mirostat measure the whole distribution.
    pub fn n_candidates(&self, n_recent: usize) -> Option<usize> {
        let SamplerParams { top_k, top_n_sigma, repeat_penalty, repeat_last_n, dry, mirostat, .. } =
            self.params;
        let is_greedy = self.params.is_greedy();
        let measures_all = top_n_sigma > 0.0 || mirostat.version != MirostatVersion::Off;
        if repeat_penalty < 1.0 || measures_all && !is_greedy {
            return None;
        }
        let kept = if is_greedy { 1 } else { top_k };
        let repeated = if repeat_penalty == 1.0 { 0 } else { repeat_last_n };
        let penalised = n_recent.min(repeated.max(if dry.is_on() { dry.last_n } else { 0 }));
        (kept > 0).then(|| kept.saturating_add(penalised))
    }

    /// Samples the next token from `logits` `[n_vocab]` and the tokens so far, oldest first. A
    /// logit of negative infinity excludes its token. Ids in `recent` without a logit are ignored.
    ///
    /// # Errors
    /// [`SampleError`] for settings out of range, a logit that is NaN or positive infinity, and if
    /// no token is possible.
    pub fn sample(&mut self, logits: &[f32], recent: &[u32]) -> Result<u32, SampleError> {
        self.candidates.clear();
        self.candidates
            .extend(logits.iter().enumerate().map(|(id, &logit)| Candidate { id: id as u32, logit }));
        self.choose(recent)
    }

    /// Works as [`Sampler::sample`], from the likeliest tokens alone: at least
    /// [`Sampler::n_candidates`] of them if the vocabulary has as many, in the order of
    /// [`Candidate::rank`]. Returns the same token.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub fn sample_likeliest(&mut self, likeliest: &[Candidate], recent: &[u32]) -> Result<u32, SampleError> {
        self.candidates.clear();
        self.candidates.extend_from_slice(likeliest);
        self.choose(recent)
    }

    /// Returns the candidates of the last sample, likeliest first, each with its probability.
    pub fn sampled_candidates(&self) -> impl ExactSizeIterator<Item = (u32, f64)> {
        let total: f64 = self.weights.iter().sum();
        self.candidates
            .iter()
            .zip(&self.weights)
            .map(move |(candidate, weight)| (candidate.id, weight / total))
    }

    fn choose(&mut self, recent: &[u32]) -> Result<u32, SampleError> {
        self.params.validate()?;
        if let Some(bad) = self.candidates.iter().find(|c| c.is_bad()) {
            return Err(SampleError::NotANumber { id: bad.id, got: bad.logit });
        }
        let n_vocab = self.candidates.len();
        self.apply_repeat_penalty(recent);
        if self.params.dry.is_on() {
            self.params.dry.apply(&self.breakers, recent, &mut self.candidates, &mut self.repetitions);
        }
        self.candidates.retain(|c| c.logit > f32::NEG_INFINITY);
        let best = self.best()?;
        if self.params.is_greedy() {
            return Ok(self.take(best));
        }
        if self.params.mirostat.version != MirostatVersion::Off {
            return Ok(self.sample_mirostat(best, n_vocab));
        }
        self.keep(best)?;
        let SamplerParams { temperature, dynatemp, .. } = self.params;
        Ok(self.draw(dynatemp.temperature(temperature, &self.candidates)))
    }

    /// Returns the likeliest candidate.
    fn best(&self) -> Result<Candidate, SampleError> {
        self.candidates.iter().min_by(|a, b| Candidate::rank(a, b)).copied().ok_or(SampleError::NoCandidate)
    }

    /// Selects the only possible token.
    fn take(&mut self, only: Candidate) -> u32 {
        self.candidates.clear();
        self.candidates.push(only);
        self.weights.clear();
        self.weights.push(1.0);
        only.id
    }

    /// Applies the truncating stages in order; `best` is the likeliest candidate.
    fn keep(&mut self, best: Candidate) -> Result<(), SampleError> {
        let SamplerParams { top_n_sigma, typical_p, xtc, .. } = self.params;
        if top_n_sigma > 0.0 {
            top_n_sigma::apply(top_n_sigma, &mut self.candidates);
        }
        self.keep_top_k();
        let mut best = best;
        if typical_p < 1.0 {
            typical::apply(typical_p, &mut self.candidates, &mut self.typicality);
            best = self.best()?;
        }
        self.keep_top_p_min_p(best.logit);
        if xtc.is_on() && self.candidates.len() > 1 && self.rng.unit() < f64::from(xtc.probability) {
            xtc.apply(&mut self.candidates);
        }
        Ok(())
    }

    /// Samples with Mirostat from a vocabulary of `n_vocab` tokens, and updates `mu`.
    fn sample_mirostat(&mut self, best: Candidate, n_vocab: usize) -> u32 {
        let SamplerParams { temperature, dynatemp, mirostat, .. } = self.params;
        let temperature = dynatemp.temperature(temperature, &self.candidates);
        if temperature == 0.0 {
            return self.take(best);
        }
        let scale = Scale { best: f64::from(best.logit), temperature };
        mirostat.apply(self.mu, scale, n_vocab, &mut self.candidates);
        let id = self.draw(temperature);
        let probability = self.sampled_candidates().find(|(of, _)| *of == id).map_or(1.0, |(_, p)| p);
        self.mu = mirostat.next_mu(self.mu, probability);
        id
    }

    /// Applies the repeat penalty to each recent token.
    fn apply_repeat_penalty(&mut self, recent: &[u32]) {
        let SamplerParams { repeat_penalty, repeat_last_n, .. } = self.params;
        if repeat_penalty == 1.0 {
            return;
        }
        self.recent.clear();
        self.recent.extend_from_slice(&recent[recent.len().saturating_sub(repeat_last_n)..]);
        self.recent.sort_unstable();
        self.recent.dedup();
        for c in &mut self.candidates {
            if c.logit > f32::NEG_INFINITY && self.recent.binary_search(&c.id).is_ok() {
                // Clamped: an extreme penalty must not turn a logit into an infinity.
                let scaled = if c.logit <= 0.0 { c.logit * repeat_penalty } else { c.logit / repeat_penalty };
                c.logit = scaled.clamp(f32::MIN, f32::MAX);
            }
        }
    }

    /// Keeps the likeliest `top_k`, in order.
    fn keep_top_k(&mut self) {
        let k = self.params.top_k;
        if k == 0 {
            return;
        }
        if k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, Candidate::rank);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(Candidate::rank);
    }

    /// Sorts, and applies top-p and min-p. Each keeps a prefix of the sorted candidates, so
    /// together they keep the shorter one, and candidates that min-p drops need no sorting. At
    /// least one remains.
    fn keep_top_p_min_p(&mut self, best: f32) {
        let SamplerParams { top_p, min_p, .. } = self.params;
        let weight = |c: &Candidate| exp(f64::from(c.logit) - f64::from(best));
        // Before min-p: the probabilities of top-p are those of all that top-k left.
        let total: f64 = if top_p < 1.0 { self.candidates.iter().map(weight).sum() } else { 0.0 };
        if min_p > 0.0 {
            self.candidates.retain(|c| weight(c) >= f64::from(min_p));
        }
        self.candidates.sort_unstable_by(Candidate::rank);
        if top_p < 1.0 {
            let enough = f64::from(top_p) * total;
            let mut sum = 0.0;
            let reached = self.candidates.iter().position(|c| {
                sum += weight(c);
                sum >= enough
            });
            self.candidates.truncate(reached.map_or(self.candidates.len(), |last| last + 1));
        }
    }

    /// Samples one of the sorted candidates at a temperature; at 0, takes the first.
    fn draw(&mut self, temperature: f64) -> u32 {
        let first = self.candidates[0];
        if temperature == 0.0 {
            return self.take(first);
        }
        self.weights.clear();
        let weight = |c: &Candidate| exp((f64::from(c.logit) - f64::from(first.logit)) / temperature);
        self.weights.extend(self.candidates.iter().map(weight));
        let mut left = self.rng.unit() * self.weights.iter().sum::<f64>();
        let drawn = self.weights.iter().position(|w| {
            left -= w;
            left < 0.0
        });
        // Rounding may leave a remainder after the last weight; the likeliest takes it.
        self.candidates[drawn.unwrap_or(0)].id
    }
}
