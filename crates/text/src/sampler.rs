//! Choosing the next token from the logits.
//!
//! The chain and its defaults are llama.cpp's: repeat penalty, top-k, top-p, min-p, temperature, then
//! one draw. Top-p (Holtzman et al., <https://arxiv.org/abs/1904.09751>) and min-p (Nguyen et al.,
//! <https://arxiv.org/abs/2407.01082>) look at the distribution before the temperature changes it.
//!
//! The same seed and logits give the same tokens on every platform: the generator is fixed, ties go
//! to the lower id, and `exp` is computed here from correctly rounded operations, as platforms' own
//! differ in the last bit.

use kvant_codec::candidate::Candidate;

/// Settings of a [`Sampler`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerParams {
    /// Divides the logits before the draw; 0 always takes the likeliest token.
    pub temperature: f32,
    /// Keep the `top_k` likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the fewest likeliest tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides a positive logit and multiplies a negative one, once, if the token is a recent one;
    /// 1 does nothing.
    pub repeat_penalty: f32,
    /// How many of the last tokens are recent.
    pub repeat_last_n: usize,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for SamplerParams {
    /// llama.cpp's defaults, and seed 0.
    fn default() -> Self {
        SamplerParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            seed: 0,
        }
    }
}

impl SamplerParams {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        SamplerParams { temperature: 0.0, ..Self::default() }
    }

    /// Checks that every setting has a meaning.
    ///
    /// # Errors
    /// [`SampleError::Param`] for the first one that has none.
    pub fn validate(&self) -> Result<(), SampleError> {
        let check = |ok: bool, name, expected, got| {
            if ok { Ok(()) } else { Err(SampleError::Param { name, expected, got }) }
        };
        let finite = f32::MAX;
        check(
            (0.0..=finite).contains(&self.temperature),
            "temperature",
            "a number from 0 up",
            self.temperature,
        )?;
        check((0.0..=1.0).contains(&self.top_p), "top_p", "a number from 0 to 1", self.top_p)?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", "a number from 0 to 1", self.min_p)?;
        let penalty = self.repeat_penalty;
        check(penalty > 0.0 && penalty <= finite, "repeat_penalty", "a number above 0", penalty)
    }
}

/// Why no token could be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A setting is out of its range.
    #[error("{name} should be {expected}, but is {got}")]
    Param {
        /// The setting.
        name: &'static str,
        /// Its range, in words.
        expected: &'static str,
        /// Its value.
        got: f32,
    },
    /// A logit is NaN or positive infinity: the model's output is broken.
    #[error("the logit of token {id} is {got}")]
    NotANumber {
        /// The first token at fault.
        id: u32,
        /// Its logit.
        got: f32,
    },
    /// There is no logit, or every one is negative infinity.
    #[error("no token is possible")]
    NoCandidate,
}

/// Draws tokens. Its buffers grow to the vocabulary in the first call and are kept.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplerParams,
    rng: Xoshiro256,
    /// Candidates left in the race.
    candidates: Vec<Candidate>,
    /// Weight of each sorted candidate relative to the first, for top-p or the draw.
    weights: Vec<f64>,
    /// Distinct recent tokens.
    recent: Vec<u32>,
}

impl Sampler {
    /// A sampler at the start of its seed's sequence.
    pub fn new(params: SamplerParams) -> Self {
        Sampler {
            rng: Xoshiro256::new(params.seed),
            params,
            candidates: Vec::new(),
            weights: Vec::new(),
            recent: Vec::new(),
        }
    }

    /// The settings.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// How many of the likeliest tokens a draw needs to see after `n_recent` tokens; all when `None`.
    ///
    /// A penalty on recent tokens lowers them and nothing else, so that at most as many others move up; a penalty below 1
    /// may lift any token.
    pub fn n_candidates(&self, n_recent: usize) -> Option<usize> {
        let SamplerParams { temperature, top_k, repeat_penalty, repeat_last_n, .. } = self.params;
        let kept = if temperature == 0.0 { 1 } else { top_k };
        let penalised = if repeat_penalty == 1.0 { 0 } else { n_recent.min(repeat_last_n) };
        (kept > 0 && repeat_penalty >= 1.0).then(|| kept.saturating_add(penalised))
    }

    /// The next token, given `logits` `[n_vocab]` and the tokens so far, oldest first. A logit of
    /// negative infinity rules its token out. Ids in `recent` without a logit are ignored.
    ///
    /// # Errors
    /// [`SampleError`] for senseless settings, a logit that is NaN or positive infinity, and where no
    /// token is possible.
    pub fn sample(&mut self, logits: &[f32], recent: &[u32]) -> Result<u32, SampleError> {
        self.candidates.clear();
        self.candidates
            .extend(logits.iter().enumerate().map(|(id, &logit)| Candidate { id: id as u32, logit }));
        self.choose(recent)
    }

    /// As [`Sampler::sample`], from the likeliest tokens alone, at least [`Sampler::n_candidates`] of them where there are as
    /// many, in the order of [`Candidate::rank`]: the same token.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub fn sample_likeliest(&mut self, likeliest: &[Candidate], recent: &[u32]) -> Result<u32, SampleError> {
        self.candidates.clear();
        self.candidates.extend_from_slice(likeliest);
        self.choose(recent)
    }

    /// The tokens that the last draw was among, likeliest first, each with the probability that it had.
    pub fn drawn_among(&self) -> impl ExactSizeIterator<Item = (u32, f64)> {
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
        self.penalise(recent);
        self.candidates.retain(|c| c.logit > f32::NEG_INFINITY);
        let best =
            *self.candidates.iter().min_by(|a, b| Candidate::rank(a, b)).ok_or(SampleError::NoCandidate)?;
        if self.params.temperature == 0.0 {
            self.candidates.clear();
            self.candidates.push(best);
            self.weights.clear();
            self.weights.push(1.0);
            return Ok(best.id);
        }
        self.keep_top_k();
        self.keep_top_p_min_p(best.logit);
        Ok(self.draw(best.logit))
    }

    /// Makes each recent token less likely.
    fn penalise(&mut self, recent: &[u32]) {
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
                // Clamped: an extreme penalty must not make an infinity of a logit.
                let scaled = if c.logit <= 0.0 { c.logit * repeat_penalty } else { c.logit / repeat_penalty };
                c.logit = scaled.clamp(f32::MIN, f32::MAX);
            }
        }
    }

    /// Keeps the likeliest `top_k`, in their order.
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

    /// Sorts, and applies top-p and min-p. Each keeps a prefix of the sorted candidates, so together
    /// they keep the shorter one, and what min-p drops need not be sorted. At least one stays.
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

    /// Draws one of the sorted candidates at the temperature.
    fn draw(&mut self, best: f32) -> u32 {
        let temperature = f64::from(self.params.temperature);
        self.weights.clear();
        let weight = |c: &Candidate| exp((f64::from(c.logit) - f64::from(best)) / temperature);
        self.weights.extend(self.candidates.iter().map(weight));
        let mut left = self.rng.unit() * self.weights.iter().sum::<f64>();
        let drawn = self.weights.iter().position(|w| {
            left -= w;
            left < 0.0
        });
        // Rounding may leave a crumb behind the last weight; the likeliest takes it.
        self.candidates[drawn.unwrap_or(0)].id
    }
}

/// e to the `x`, for x ≤ 0, within 2 units in the last place: x = k ln 2 + r with |r| ≤ ln 2 / 2, and
/// the Taylor series of e to the r up to the 13th power, whose rest is below 2^-57.
fn exp(x: f64) -> f64 {
    // ln 2 in two parts, the first with zeros at its end so that its product with k is exact.
    const LN2_HI: f64 = 6.931_471_803_691_238e-1;
    const LN2_LO: f64 = 1.908_214_929_270_587_7e-10;
    if x < -700.0 {
        return 0.0; // below 1e-304: nothing beside the likeliest token's 1
    }
    let k = (x * std::f64::consts::LOG2_E).round();
    let r = (x - k * LN2_HI) - k * LN2_LO;
    let series = (1..=13).rev().fold(1.0, |sum, n| 1.0 + sum * r / f64::from(n));
    // k is in [-1010, 0], so the exponent is that of a normal number.
    series * f64::from_bits(((1023 + k as i64) as u64) << 52)
}

/// xoshiro256++ (Blackman and Vigna, <https://prng.di.unimi.it>), seeded through SplitMix64.
#[derive(Debug, Clone)]
struct Xoshiro256([u64; 4]);

impl Xoshiro256 {
    fn new(seed: u64) -> Self {
        let mut x = seed;
        Xoshiro256(std::array::from_fn(|_| {
            x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        }))
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Uniform on [0, 1) in steps of 2^-53.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use kvant_codec::candidate;
    use kvant_codec::random::Random;

    use super::*;

    const OFF: SamplerParams = SamplerParams {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repeat_penalty: 1.0,
        repeat_last_n: 64,
        seed: 7,
    };

    /// The logits of a distribution.
    fn logits(p: &[f64]) -> Vec<f32> {
        p.iter().map(|p| p.ln() as f32).collect()
    }

    /// How often each token comes in `n` draws, as frequencies.
    fn frequencies(params: SamplerParams, logits: &[f32], recent: &[u32], n: usize) -> Vec<f64> {
        let mut sampler = Sampler::new(params);
        let mut counts = vec![0u32; logits.len()];
        for _ in 0..n {
            counts[sampler.sample(logits, recent).unwrap() as usize] += 1;
        }
        counts.into_iter().map(|c| f64::from(c) / n as f64).collect()
    }

    /// Each frequency within 5 standard deviations of its probability; impossible tokens never.
    fn assert_law(params: SamplerParams, logits: &[f32], recent: &[u32], want: &[f64]) {
        let n = 20_000;
        let got = frequencies(params, logits, recent, n);
        for (g, w) in got.iter().zip(want) {
            let tol = 5.0 * (w * (1.0 - w) / n as f64).sqrt();
            assert!((g - w).abs() <= tol, "{params:?}: got {got:?}, want {want:?}");
        }
    }

    #[test]
    fn without_filters_draws_follow_the_softmax() {
        assert_law(OFF, &logits(&[0.5, 0.2, 0.25, 0.05]), &[], &[0.5, 0.2, 0.25, 0.05]);
        let shifted: Vec<f32> = logits(&[0.5, 0.5]).iter().map(|l| l + 1e4).collect();
        assert_law(OFF, &shifted, &[], &[0.5, 0.5]);
    }

    #[test]
    fn each_filter_keeps_what_its_definition_says() {
        let l = logits(&[0.1, 0.4, 0.2, 0.3]);
        assert_law(SamplerParams { top_k: 2, ..OFF }, &l, &[], &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        // 0.4 + 0.3 reaches 0.6; 0.4 alone does not.
        assert_law(SamplerParams { top_p: 0.6, ..OFF }, &l, &[], &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        assert_law(SamplerParams { top_p: 0.0, ..OFF }, &l, &[], &[0.0, 1.0, 0.0, 0.0]);
        // 0.4 of 0.4 is 0.16, so 0.2 stays and 0.1 goes.
        assert_law(SamplerParams { min_p: 0.4, ..OFF }, &l, &[], &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
        // top-p sees the probabilities that top-k left: 4/9 + 3/9 reaches 0.75.
        let both = SamplerParams { top_k: 3, top_p: 0.75, ..OFF };
        assert_law(both, &l, &[], &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        // min-p must not change what top-p calls a probability: 0.4 + 0.3 < 0.75 of all four.
        let both = SamplerParams { top_p: 0.75, min_p: 0.4, ..OFF };
        assert_law(both, &l, &[], &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
    }

    #[test]
    fn temperature_comes_after_the_filters() {
        let l = logits(&[0.64, 0.36]);
        // Square roots: 0.8 and 0.6.
        assert_law(SamplerParams { temperature: 2.0, ..OFF }, &l, &[], &[8.0 / 14.0, 6.0 / 14.0]);
        let hot = SamplerParams { temperature: 1e30, top_p: 0.6, ..OFF };
        assert_law(hot, &l, &[], &[1.0, 0.0]);
        let cold = SamplerParams { temperature: 1e-30, ..OFF };
        assert_law(cold, &l, &[], &[1.0, 0.0]);
    }

    #[test]
    fn what_a_draw_was_among_has_the_probabilities_of_its_law() {
        let logits = logits(&[0.5, 0.1, 0.3, 0.1]);
        let params = SamplerParams { temperature: 0.5, top_k: 2, ..SamplerParams::default() };
        let mut sampler = Sampler::new(params);
        let drawn = sampler.sample(&logits, &[]).unwrap();
        let among: Vec<(u32, f64)> = sampler.drawn_among().collect();
        assert_eq!(among.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 2]);
        assert!(
            (among[0].1 - 0.25 / 0.34).abs() < 1e-6 && (among[1].1 - 0.09 / 0.34).abs() < 1e-6,
            "{among:?}"
        );
        assert!(among.iter().any(|(id, _)| *id == drawn));
        let mut greedy = Sampler::new(SamplerParams::greedy());
        greedy.sample(&logits, &[]).unwrap();
        assert_eq!(greedy.drawn_among().collect::<Vec<_>>(), [(0, 1.0)]);
    }

    #[test]
    fn greedy_takes_the_likeliest_and_the_lower_id_of_equals() {
        let mut s = Sampler::new(SamplerParams::greedy());
        assert_eq!(s.sample(&[0.0, 3.0, -1.0, 3.0], &[]), Ok(1));
        assert_eq!(s.sample(&[-0.0, 0.0], &[]), Ok(0));
        assert_eq!(s.sample(&[f32::NEG_INFINITY, f32::MIN], &[]), Ok(1));
    }

    #[test]
    fn repeat_penalty_lowers_recent_tokens_once_and_only_in_its_window() {
        let params = SamplerParams { temperature: 0.0, repeat_penalty: 2.0, repeat_last_n: 2, ..OFF };
        let mut s = Sampler::new(params);
        // 4 / 2 < 3, though it came twice 4 / 4 would be below 1.5.
        assert_eq!(s.sample(&[4.0, 3.0, 1.5], &[0, 0]), Ok(1));
        assert_eq!(s.sample(&[4.0, 1.0, 1.5], &[0, 0]), Ok(0));
        assert_eq!(s.sample(&[4.0, 3.0], &[0, 1, 1]), Ok(0));
        assert_eq!(s.sample(&[-2.0, -3.0], &[0]), Ok(1));
        // A token without a logit, and an extreme penalty.
        assert_eq!(s.sample(&[1.0], &[99, u32::MAX]), Ok(0));
        let mut s = Sampler::new(SamplerParams { repeat_penalty: f32::MIN_POSITIVE, ..params });
        assert_eq!(s.sample(&[1e30, 1e30], &[1]), Ok(1));
        assert_eq!(s.sample(&[f32::NEG_INFINITY, 1.0], &[0]), Ok(1));
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens_and_the_sequence_is_pinned() {
        let l: Vec<f32> = (0..100).map(|i| ((i * 37) % 101) as f32 / 20.0).collect();
        let run = |seed| {
            let mut s = Sampler::new(SamplerParams { seed, ..SamplerParams::default() });
            (0..8).map(|_| s.sample(&l, &[]).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        // First outputs of xoshiro256++ after SplitMix64 of 0.
        let mut rng = Xoshiro256::new(0);
        assert_eq!(rng.0[0], 0xE220_A839_7B1D_CDAF);
        assert_eq!(rng.next(), 0x5317_5D61_490B_23DF);
    }

    #[test]
    fn broken_logits_and_settings_are_errors() {
        let mut s = Sampler::new(OFF);
        assert!(matches!(s.sample(&[0.0, f32::NAN], &[]), Err(SampleError::NotANumber { id: 1, .. })));
        let inf = [0.0, 0.0, f32::INFINITY];
        assert!(matches!(s.sample(&inf, &[]), Err(SampleError::NotANumber { id: 2, .. })));
        let none = [f32::NEG_INFINITY; 3];
        assert_eq!(s.sample(&none, &[]), Err(SampleError::NoCandidate));
        assert_eq!(s.sample(&[], &[]), Err(SampleError::NoCandidate));
        for bad in [
            SamplerParams { temperature: -1.0, ..OFF },
            SamplerParams { temperature: f32::NAN, ..OFF },
            SamplerParams { top_p: 1.5, ..OFF },
            SamplerParams { min_p: f32::NAN, ..OFF },
            SamplerParams { repeat_penalty: 0.0, ..OFF },
            SamplerParams { repeat_penalty: f32::INFINITY, ..OFF },
        ] {
            let got = Sampler::new(bad).sample(&[0.0], &[]);
            assert!(matches!(got, Err(SampleError::Param { .. })), "{bad:?}: {got:?}");
        }
    }

    #[test]
    fn buffers_are_allocated_once() {
        let l: Vec<f32> = (0..5000).map(|i| (i % 17) as f32).collect();
        let params = SamplerParams { top_k: 0, repeat_penalty: 1.1, ..OFF };
        let mut s = Sampler::new(params);
        let recent: Vec<u32> = (0..200).collect();
        s.sample(&l, &recent).unwrap();
        let before = (s.candidates.as_ptr(), s.weights.as_ptr(), s.recent.as_ptr());
        for _ in 0..50 {
            s.sample(&l, &recent).unwrap();
        }
        assert_eq!(before, (s.candidates.as_ptr(), s.weights.as_ptr(), s.recent.as_ptr()));
    }

    #[test]
    fn exp_is_exact_to_two_units_in_the_last_place() {
        for i in 0..=70_000 {
            let x = -f64::from(i) / 100.0;
            let (got, want) = (exp(x), x.exp());
            // The platform's own is within one unit; ours within two.
            assert!((got - want).abs() <= 3.0 * f64::EPSILON * want, "{x}: {got} {want}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
    }

    /// Ties, recent tokens among the likeliest, more candidates asked for than there are.
    #[test]
    fn the_likeliest_tokens_are_enough_for_the_same_draws() {
        let mut random = Random::new(3);
        let mut logits = vec![0.0; 300];
        let recent: Vec<u32> = (0..90).map(|i| i * 7 % 301).collect();
        let mut likeliest = Vec::new();
        for (temperature, top_k, repeat_penalty, repeat_last_n) in [
            (0.0, 40, 1.0, 64),
            (0.0, 0, 1.5, 64),
            (0.8, 40, 1.0, 64),
            (0.8, 5, 3.0, 64),
            (1.0, 1, 1.1, 1000),
            (1.0, 400, 1.1, 10),
        ] {
            let params = SamplerParams {
                temperature,
                top_k,
                repeat_penalty,
                repeat_last_n,
                ..SamplerParams::default()
            };
            let (mut all, mut few) = (Sampler::new(params), Sampler::new(params));
            for _ in 0..200 {
                random.fill_gaussian(&mut logits, 2.0);
                logits.iter_mut().for_each(|logit| *logit = (*logit * 4.0).round() / 4.0);
                let k = few.n_candidates(recent.len()).unwrap();
                candidate::top_k(&logits, k, &mut likeliest);
                let want = all.sample(&logits, &recent).unwrap();
                assert_eq!(few.sample_likeliest(&likeliest, &recent), Ok(want), "{params:?}");
            }
        }
        for params in [
            SamplerParams { top_k: 0, ..SamplerParams::default() },
            SamplerParams { repeat_penalty: 0.9, ..SamplerParams::default() },
        ] {
            assert_eq!(Sampler::new(params).n_candidates(5), None, "{params:?}");
        }
    }
}
