//! A generation request of the page: a subset of the server's request fields, and its clock.

use kvant::{Error, GenerateOptions, KvOptions, Model, SamplerParams, SamplingDefaults};
use serde::Deserialize;
use serde_json::Value;

/// Default KV type.
const DEFAULT_KV_TYPE: &str = "turbo3";

/// A conversation with generation options. Missing sampling options have the model's
/// defaults; `kv_type` has turbo3, `seed` 0.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct GenerationRequest {
    /// Messages with a `role` and a `content`, as the chat template reads them.
    pub messages: Vec<Value>,
    /// KV-cache type: one for keys and values, or `K/V`.
    pub kv_type: Option<String>,
    /// Divides the logits before sampling; 0 is greedy sampling, which ignores the other sampling
    /// options.
    pub temperature: Option<f32>,
    /// Samples from the fewest tokens with this total probability.
    pub top_p: Option<f32>,
    /// Maximum of generated tokens.
    pub max_tokens: Option<usize>,
    /// Sampling seed.
    pub seed: Option<u64>,
    /// Local time for chat templates, in seconds since 1970.
    pub now: i64,
}

impl GenerationRequest {
    /// Returns the KV options.
    ///
    /// # Errors
    /// A name that is not a KV type.
    pub fn kv(&self) -> Result<KvOptions, Error> {
        self.kv_type.as_deref().unwrap_or(DEFAULT_KV_TYPE).parse()
    }

    /// Returns the generation options.
    ///
    /// # Errors
    /// Invalid numbers, here or in the model's file.
    pub fn options(&self, model: &Model) -> Result<GenerateOptions, Error> {
        let requested = SamplingDefaults {
            temperature: self.temperature,
            top_p: self.top_p,
            ..SamplingDefaults::default()
        };
        let mut sampler = defaults(model)?;
        if self.temperature == Some(0.0) {
            sampler = SamplerParams::default();
        }
        let sampler = SamplerParams { seed: self.seed.unwrap_or(0), ..requested.or(&sampler) };
        sampler.validate()?;
        // Without a clock, the benefit of draft tokens cannot be measured.
        Ok(GenerateOptions {
            max_tokens: self.max_tokens,
            sampler,
            draft_max: Some(0),
            ..GenerateOptions::default()
        })
    }
}

/// Returns the model's default sampling parameters.
pub(crate) fn defaults(model: &Model) -> Result<SamplerParams, Error> {
    Ok(model.recommended()?.or(&SamplerParams::default()))
}
