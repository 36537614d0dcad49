//! Sampler settings and their validation.

use super::dry::Dry;
use super::dynatemp::Dynatemp;
use super::mirostat::{Mirostat, MirostatVersion};
use super::xtc::Xtc;

/// Settings of a [`Sampler`](super::Sampler).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerParams {
    /// Divides the logits before sampling; 0 always takes the likeliest remaining token.
    pub temperature: f32,
    /// Varies the temperature with the entropy.
    pub dynatemp: Dynatemp,
    /// Keeps the `top_k` likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest likeliest tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens with at least this probability relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Keeps the fewest most typical tokens whose probabilities sum to more than this; 1 keeps all.
    pub typical_p: f32,
    /// Keeps tokens whose logit is at most this many standard deviations below the largest; 0 and
    /// below keep all.
    pub top_n_sigma: f32,
    /// Removes the likeliest tokens with a given probability.
    pub xtc: Xtc,
    /// Divides a positive logit and multiplies a negative one, once, if the token is a recent one;
    /// 1 disables it.
    pub repeat_penalty: f32,
    /// Number of last tokens that count as recent.
    pub repeat_last_n: usize,
    /// Penalizes tokens that would extend a repetition.
    pub dry: Dry,
    /// Replaces all truncating stages: top-n-sigma, top-k, typical, top-p, min-p and XTC.
    pub mirostat: Mirostat,
    /// Seed of the generator.
    pub seed: u64,
}

impl Default for SamplerParams {
    /// llama.cpp's defaults, and seed 0.
    fn default() -> Self {
        SamplerParams {
            temperature: 0.8,
            dynatemp: Dynatemp::default(),
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc: Xtc::default(),
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            dry: Dry::default(),
            mirostat: Mirostat::default(),
            seed: 0,
        }
    }
}

impl SamplerParams {
    /// Returns settings that always take the likeliest token.
    pub fn greedy() -> Self {
        SamplerParams { temperature: 0.0, ..Self::default() }
    }

    /// Checks that every setting is in its range. Ignores settings of disabled stages.
    ///
    /// # Errors
    /// [`SampleError::Param`] for the first setting out of range.
    pub fn validate(&self) -> Result<(), SampleError> {
        let Self { dry, xtc, dynatemp, mirostat, .. } = self;
        from_zero("temperature", self.temperature)?;
        share("top_p", self.top_p)?;
        share("min_p", self.min_p)?;
        share("typical_p", self.typical_p)?;
        check("top_n_sigma", "a number", self.top_n_sigma, self.top_n_sigma.is_finite())?;
        above_zero("repeat_penalty", self.repeat_penalty)?;
        share("xtc_probability", xtc.probability)?;
        if xtc.probability > 0.0 {
            share("xtc_threshold", xtc.threshold)?;
        }
        from_zero("dry_multiplier", dry.multiplier)?;
        if dry.is_on() {
            check("dry_base", "a number from 1 up", dry.base, (1.0..=f32::MAX).contains(&dry.base))?;
        }
        from_zero("dynatemp_range", dynatemp.range)?;
        if dynatemp.is_on() {
            from_zero("dynatemp_exponent", dynatemp.exponent)?;
        }
        if mirostat.version != MirostatVersion::Off {
            from_zero("mirostat_tau", mirostat.tau)?;
            from_zero("mirostat_eta", mirostat.eta)?;
        }
        Ok(())
    }

    /// Whether the likeliest token is taken regardless of the generator.
    pub(super) fn is_greedy(&self) -> bool {
        let removes_the_likeliest = self.typical_p < 1.0 || self.xtc.is_on();
        let takes_it = self.mirostat.version != MirostatVersion::Off || !removes_the_likeliest;
        self.temperature == 0.0 && !self.dynatemp.is_on() && takes_it
    }
}

fn check(name: &'static str, expected: &'static str, got: f32, ok: bool) -> Result<(), SampleError> {
    if ok { Ok(()) } else { Err(SampleError::Param { name, expected, got }) }
}

fn share(name: &'static str, got: f32) -> Result<(), SampleError> {
    check(name, "a number from 0 to 1", got, (0.0..=1.0).contains(&got))
}

fn from_zero(name: &'static str, got: f32) -> Result<(), SampleError> {
    check(name, "a number from 0 up", got, (0.0..=f32::MAX).contains(&got))
}

fn above_zero(name: &'static str, got: f32) -> Result<(), SampleError> {
    check(name, "a number above 0", got, got > 0.0 && got <= f32::MAX)
}

/// Sampling errors.
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
        /// The first such token.
        id: u32,
        /// Its logit.
        got: f32,
    },
    /// The logits are empty, or every one is negative infinity.
    #[error("no token is possible")]
    NoCandidate,
}
