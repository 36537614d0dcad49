//! Sampling fields, by llama.cpp's names.

use kvant::{Dry, Dynatemp, Mirostat, MirostatVersion, SamplerParams, SequenceBreakers, Xtc};
use serde_json::{Map, Value, json};

use super::ServedModel;
use super::error::ApiError;
use super::fields::{Fields, short};
use crate::options::ServerSampling;

/// Maximum sequence breakers, and the maximum bytes of one.
const MAX_BREAKERS: usize = 64;
const MAX_BREAKER: usize = 256;

/// Reads the sampling parameters of a request, with `defaults` for missing fields.
pub(super) fn sampler(fields: &Fields, defaults: &ServerSampling) -> Result<SamplerParams, ApiError> {
    let number = |name| fields.get::<f32>(name, "a number");
    // Negative values mean all tokens, as in llama.cpp.
    let last = |name| {
        let n = fields.get::<i64>(name, "a whole number")?;
        Ok::<_, ApiError>(n.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
    };
    // Negative values mean 0, as in llama.cpp.
    let temperature = number("temperature")?.map(|temperature| temperature.max(0.0));
    let usual = if temperature == Some(0.0) { &defaults.greedy } else { &defaults.usual };
    let sampler = SamplerParams {
        temperature: temperature.unwrap_or(usual.temperature),
        dynatemp: Dynatemp {
            range: number("dynatemp_range")?.unwrap_or(usual.dynatemp.range),
            exponent: number("dynatemp_exponent")?.unwrap_or(usual.dynatemp.exponent),
        },
        top_k: fields.get::<i64>("top_k", "a whole number")?.map_or(usual.top_k, |k| k.max(0) as usize),
        top_p: number("top_p")?.unwrap_or(usual.top_p),
        min_p: number("min_p")?.unwrap_or(usual.min_p),
        typical_p: number("typical_p")?.unwrap_or(usual.typical_p),
        top_n_sigma: number("top_n_sigma")?.unwrap_or(usual.top_n_sigma),
        xtc: Xtc {
            probability: number("xtc_probability")?.unwrap_or(usual.xtc.probability),
            threshold: number("xtc_threshold")?.unwrap_or(usual.xtc.threshold),
        },
        repeat_penalty: fields
            .any(&["repeat_penalty", "repetition_penalty"], "a number")?
            .unwrap_or(usual.repeat_penalty),
        repeat_last_n: last("repeat_last_n")?.unwrap_or(usual.repeat_last_n),
        dry: Dry {
            multiplier: number("dry_multiplier")?.unwrap_or(usual.dry.multiplier),
            base: number("dry_base")?.unwrap_or(usual.dry.base),
            allowed_length: fields
                .get("dry_allowed_length", "a whole number from 0 up")?
                .unwrap_or(usual.dry.allowed_length),
            last_n: last("dry_penalty_last_n")?.unwrap_or(usual.dry.last_n),
        },
        mirostat: Mirostat {
            version: mirostat(fields)?.unwrap_or(usual.mirostat.version),
            tau: number("mirostat_tau")?.unwrap_or(usual.mirostat.tau),
            eta: number("mirostat_eta")?.unwrap_or(usual.mirostat.eta),
        },
        seed: seed(fields)?.unwrap_or(usual.seed),
    };
    sampler.validate().map_err(|error| ApiError::invalid(error.to_string()))?;
    Ok(sampler)
}

fn mirostat(fields: &Fields) -> Result<Option<MirostatVersion>, ApiError> {
    let Some(number) = fields.get::<i64>("mirostat", "0, 1 or 2")? else { return Ok(None) };
    let version = MirostatVersion::from_number(number);
    version.map(Some).ok_or_else(|| ApiError::field("mirostat", "0, 1 or 2", number))
}

/// Returns the seed of a request.
pub(super) fn seed(fields: &Fields) -> Result<Option<u64>, ApiError> {
    let seed = fields.get::<i64>("seed", "a whole number")?;
    // llama.cpp's clients send 2^32 - 1 for a random seed.
    Ok(seed.filter(|&seed| seed != i64::from(u32::MAX)).and_then(|seed| u64::try_from(seed).ok()))
}

/// Returns the DRY sequence breakers of a request, or the default ones.
pub(super) fn breakers(
    fields: &Fields,
    dry: Dry,
    hosted: &ServedModel,
) -> Result<SequenceBreakers, ApiError> {
    let name = "dry_sequence_breakers";
    let given: Option<Vec<String>> = fields.get(name, "a list of texts")?;
    let texts = given.unwrap_or_else(|| SequenceBreakers::DEFAULT.map(str::to_owned).to_vec());
    if texts.len() > MAX_BREAKERS {
        return Err(ApiError::field(name, "at most 64 texts", texts.len()));
    }
    if let Some(text) = texts.iter().find(|text| !(1..=MAX_BREAKER).contains(&text.len())) {
        return Err(ApiError::field(name, "texts of 1 to 256 bytes", short(&json!(text))));
    }
    if !dry.is_on() {
        return Ok(SequenceBreakers::default());
    }
    hosted.model.breakers(texts).map_err(|error| ApiError::invalid(error.to_string()))
}

/// Returns the field names, without the seed and vLLM's aliases.
pub(super) fn names() -> impl Iterator<Item = String> {
    let names = param_fields(&SamplerParams::default()).into_iter().map(|(name, _)| name);
    names.chain(["dry_sequence_breakers".to_owned()])
}

/// Returns the sampling parameters by the field names of requests.
pub(super) fn param_fields(sampler: &SamplerParams) -> Map<String, Value> {
    let SamplerParams { dynatemp, xtc, dry, mirostat, .. } = sampler;
    let fields = [
        ("temperature", json!(sampler.temperature)),
        ("dynatemp_range", json!(dynatemp.range)),
        ("dynatemp_exponent", json!(dynatemp.exponent)),
        ("top_k", json!(sampler.top_k)),
        ("top_p", json!(sampler.top_p)),
        ("min_p", json!(sampler.min_p)),
        ("typical_p", json!(sampler.typical_p)),
        ("top_n_sigma", json!(sampler.top_n_sigma)),
        ("xtc_probability", json!(xtc.probability)),
        ("xtc_threshold", json!(xtc.threshold)),
        ("repeat_penalty", json!(sampler.repeat_penalty)),
        ("repeat_last_n", last_n_json(sampler.repeat_last_n)),
        ("dry_multiplier", json!(dry.multiplier)),
        ("dry_base", json!(dry.base)),
        ("dry_allowed_length", json!(dry.allowed_length)),
        ("dry_penalty_last_n", last_n_json(dry.last_n)),
        ("mirostat", json!(mirostat.version.number())),
        ("mirostat_tau", json!(mirostat.tau)),
        ("mirostat_eta", json!(mirostat.eta)),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Returns a number of last tokens; -1 means all.
fn last_n_json(n: usize) -> Value {
    if n == usize::MAX { json!(-1) } else { json!(n) }
}
