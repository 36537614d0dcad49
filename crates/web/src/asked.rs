//! What the page asks: the fields of a request to the server that mean something without one.

use kvant::{Error, GenerateOptions, KvOptions, Model, Recommended, SamplerParams};
use serde::Deserialize;
use serde_json::Value;

/// The types of keys and values where nothing is said.
const KV_TYPE: &str = "turbo3";

/// A conversation, and how to answer it. What is left out is as the model recommends.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Asked {
    /// The messages, each with a `role` and a `content`, as the chat template reads them.
    pub messages: Vec<Value>,
    /// One type for keys and values, or `K/V`.
    pub kv_type: Option<String>,
    /// Divides the logits before the draw; 0 takes the likeliest token, and nothing else counts.
    pub temperature: Option<f32>,
    /// Draw from the fewest tokens that are this likely together.
    pub top_p: Option<f32>,
    /// Tokens to say at most.
    pub max_tokens: Option<usize>,
    /// Seed of the draws.
    pub seed: Option<u64>,
    /// The time for templates that tell it, as seconds since 1970 of the clock on the wall.
    pub now: i64,
}

impl Asked {
    /// What the cache is to store.
    ///
    /// # Errors
    /// A name that is no KV type.
    pub fn kv(&self) -> Result<KvOptions, Error> {
        self.kv_type.as_deref().unwrap_or(KV_TYPE).parse()
    }

    /// How to go on after the prompt.
    ///
    /// # Errors
    /// Numbers without a meaning, here or in the model's file.
    pub fn options(&self, model: &Model) -> Result<GenerateOptions, Error> {
        let said = Recommended { temperature: self.temperature, top_p: self.top_p, ..Recommended::default() };
        let mut sampler = defaults(model)?;
        if self.temperature == Some(0.0) {
            sampler = SamplerParams::default();
        }
        let sampler = SamplerParams { seed: self.seed.unwrap_or(0), ..said.or(&sampler) };
        sampler.validate()?;
        // Where there is no clock, nobody knows which guesses pay.
        Ok(GenerateOptions {
            max_tokens: self.max_tokens,
            sampler,
            draft_max: Some(0),
            ..GenerateOptions::default()
        })
    }
}

/// How tokens are drawn where nothing is said.
pub(crate) fn defaults(model: &Model) -> Result<SamplerParams, Error> {
    Ok(model.recommended()?.or(&SamplerParams::default()))
}
