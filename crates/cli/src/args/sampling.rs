//! Arguments of the sampler.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use clap::Args;
use kvant::{Model, SamplerParams, SamplingDefaults};

use crate::failure::Failure;

/// Configures sampling.
#[derive(Args, Debug, Clone)]
pub struct SamplingArgs {
    /// Random seed; -1 picks one and prints it in the summary
    #[arg(short = 's', long, value_name = "N", env = "KVANT_SEED", default_value = "-1", value_parser = seed)]
    pub seed: Seed,
    /// Temperature; 0 is greedy. Sampling options that are not set follow the model's
    /// recommendation, if it has one [default: 0.8]
    #[arg(long, value_name = "T", env = "KVANT_TEMP")]
    temp: Option<f32>,
    /// Top-k sampling: keep the K most probable tokens; 0 disables [default: 40]
    #[arg(long, value_name = "K", env = "KVANT_TOP_K")]
    top_k: Option<usize>,
    /// Top-p sampling: keep the most probable tokens with this cumulative probability [default:
    /// 0.95]
    #[arg(long, value_name = "P", env = "KVANT_TOP_P")]
    top_p: Option<f32>,
    /// Min-p sampling: keep tokens with at least this probability relative to the most probable one
    /// [default: 0.05]
    #[arg(long, value_name = "P", env = "KVANT_MIN_P")]
    min_p: Option<f32>,
    /// Penalize repeated tokens; 1 disables [default: 1]
    #[arg(long, value_name = "X", env = "KVANT_REPEAT_PENALTY")]
    repeat_penalty: Option<f32>,
    /// Number of last tokens to penalize [default: 64]
    #[arg(long, value_name = "N", env = "KVANT_REPEAT_LAST_N")]
    repeat_last_n: Option<usize>,
}

impl SamplingArgs {
    /// Returns the checked sampler settings, without the model's recommendations.
    pub fn params(&self) -> Result<SamplerParams, Failure> {
        let params = self.explicit().or(&SamplerParams { seed: self.seed.number, ..Default::default() });
        params.validate().map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(params)
    }

    /// Returns the checked sampler settings, with the model's recommendation for those not set, and
    /// the names of the recommended ones.
    pub fn params_for(&self, model: &Model) -> Result<(SamplerParams, Option<String>), Failure> {
        let params = self.params()?;
        if self.temp == Some(0.0) {
            // Greedy sampling ignores all other settings.
            return Ok((params, None));
        }
        let taken = model.recommended()?.without(&self.explicit());
        let params = taken.or(&params);
        params
            .validate()
            .map_err(|error| Failure::work("the model's recommended sampling settings", error))?;
        Ok((params, recommended(&taken)))
    }

    fn explicit(&self) -> SamplingDefaults {
        SamplingDefaults {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
        }
    }
}

/// Returns the settings that came from the model, for a summary; `None` if none did.
fn recommended(taken: &SamplingDefaults) -> Option<String> {
    let SamplingDefaults { temperature, top_k, top_p, min_p, repeat_penalty, repeat_last_n } = taken;
    let float = |name: &str, value: &Option<f32>| value.map(|value| format!("{name} {value}"));
    let whole = |name: &str, value: &Option<usize>| value.map(|value| format!("{name} {value}"));
    let all = [
        float("temp", temperature),
        whole("top-k", top_k),
        float("top-p", top_p),
        float("min-p", min_p),
        float("repeat-penalty", repeat_penalty),
        whole("repeat-last-n", repeat_last_n),
    ];
    let all: Vec<String> = all.into_iter().flatten().collect();
    (!all.is_empty()).then(|| format!("the model's {}", all.join(", ")))
}

/// Seed of the sampler.
#[derive(Debug, Clone, Copy)]
pub struct Seed {
    /// The seed.
    pub number: u64,
    /// Whether the user chose this seed.
    pub is_explicit: bool,
}

/// Parses a seed; -1 generates one that is short enough to be typed again.
fn seed(text: &str) -> Result<Seed, String> {
    let chosen = |number| Seed { number, is_explicit: true };
    match text {
        // Each `RandomState` has keys from the system's source of randomness.
        "-1" => {
            let number = RandomState::new().hash_one(()) & u64::from(u32::MAX);
            Ok(Seed { number, is_explicit: false })
        }
        _ => text
            .parse()
            .map(chosen)
            .map_err(|_| "expected a number from 0 up, or -1 for a random one".to_owned()),
    }
}
