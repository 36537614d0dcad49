//! A plain, slow reference implementation of the sampler chain, compared with the fast one.

use kvant_codec::random::Random;

use super::rng::Xoshiro256;
use super::*;

/// Tokens with their logits, likeliest first.
type Distribution = Vec<(u32, f64)>;

fn probabilities(law: &Distribution, temperature: f64) -> Vec<f64> {
    let best = law.iter().map(|(_, logit)| *logit).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = law.iter().map(|(_, logit)| ((logit - best) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// Returns the length of the longest suffix of `tokens` that `next` followed before; an empty one
/// requires a preceding token.
fn longest_repeat(tokens: &[u32], next: u32) -> Option<usize> {
    if !tokens.contains(&next) {
        return None;
    }
    let is_repeated = |length: &usize| {
        let end = &tokens[tokens.len() - length..];
        let mut places = (0..tokens.len() - length).filter(|at| at + length > 0);
        places.any(|at| tokens[at..at + length] == *end && tokens[at + length] == next)
    };
    (0..tokens.len()).rev().find(is_repeated)
}

fn penalised(params: &SamplerParams, logits: &[f32], tokens: &[u32]) -> Distribution {
    let recent = &tokens[tokens.len().saturating_sub(params.repeat_last_n)..];
    let window = &tokens[tokens.len().saturating_sub(params.dry.last_n)..];
    let mut law: Distribution = Vec::new();
    for (id, &logit) in logits.iter().enumerate().filter(|(_, logit)| **logit > f32::NEG_INFINITY) {
        let (id, mut logit, penalty) = (id as u32, f64::from(logit), f64::from(params.repeat_penalty));
        if recent.contains(&id) {
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        let repeated = longest_repeat(window, id).filter(|length| *length >= params.dry.allowed_length);
        if let Some(length) = repeated {
            let beyond = (length - params.dry.allowed_length) as f64;
            logit -= f64::from(params.dry.multiplier) * f64::from(params.dry.base).powf(beyond);
        }
        law.push((id, logit));
    }
    law.sort_by(|a, b| b.1.total_cmp(&a.1));
    law
}

fn without_outliers(law: Distribution, n: f64) -> Distribution {
    let mean = law.iter().map(|(_, logit)| logit).sum::<f64>() / law.len() as f64;
    let variance = law.iter().map(|(_, logit)| (logit - mean).powi(2)).sum::<f64>() / law.len() as f64;
    let best = law[0].1;
    law.into_iter().filter(|(_, logit)| best - logit <= n * variance.sqrt()).collect()
}

fn typical(law: Distribution, p: f64) -> Distribution {
    let chances = probabilities(&law, 1.0);
    let entropy: f64 = chances.iter().map(|p| if *p > 0.0 { -p * p.ln() } else { 0.0 }).sum();
    let mut order: Vec<usize> = (0..law.len()).collect();
    let distance = |i: usize| (-chances[i].ln() - entropy).abs();
    order.sort_by(|a, b| distance(*a).total_cmp(&distance(*b)));
    let (mut kept, mut sum) = (Vec::new(), 0.0);
    for i in order {
        if sum > p {
            break;
        }
        sum += chances[i];
        kept.push(law[i]);
    }
    kept.sort_by(|a, b| b.1.total_cmp(&a.1));
    kept
}

fn top_p(law: Distribution, p: f64) -> Distribution {
    let chances = probabilities(&law, 1.0);
    let before = |i: usize| chances[..i].iter().sum::<f64>();
    (0..law.len()).filter(|&i| i == 0 || before(i) < p).map(|i| law[i]).collect()
}

fn dynamic(params: &SamplerParams, law: &Distribution) -> f64 {
    let (usual, range) = (f64::from(params.temperature), f64::from(params.dynatemp.range));
    if range == 0.0 || law.len() < 2 {
        return usual;
    }
    let entropy: f64 = probabilities(law, 1.0).iter().map(|p| if *p > 0.0 { -p * p.ln() } else { 0.0 }).sum();
    let share = (entropy / (law.len() as f64).ln()).powf(f64::from(params.dynatemp.exponent));
    let low = (usual - range).max(0.0);
    low + (usual + range - low) * share
}

fn truncated(params: &SamplerParams, mut law: Distribution, chance: f64) -> Distribution {
    if params.top_n_sigma > 0.0 {
        law = without_outliers(law, f64::from(params.top_n_sigma));
    }
    if params.top_k > 0 {
        law.truncate(params.top_k);
    }
    if params.typical_p < 1.0 {
        law = typical(law, f64::from(params.typical_p));
    }
    // Min-p is relative to the likeliest token, which top-p never drops.
    law = if params.top_p < 1.0 { top_p(law, f64::from(params.top_p)) } else { law };
    let best = law[0].1;
    law.retain(|(_, logit)| (logit - best).exp() >= f64::from(params.min_p));
    let Xtc { probability, threshold } = params.xtc;
    if chance < f64::from(probability) && law.len() > 1 && threshold <= 0.5 {
        let chances = probabilities(&law, 1.0);
        let likely = chances.iter().filter(|p| **p >= f64::from(threshold)).count();
        law = law.split_off(likely.saturating_sub(1));
    }
    law
}

/// Keeps the likeliest tokens that Mirostat allows for a vocabulary of `n` tokens.
fn targeted(params: &SamplerParams, law: Distribution, temperature: f64, mu: f64, n: usize) -> Distribution {
    let chances = probabilities(&law, temperature);
    let kept = match params.mirostat.version {
        MirostatVersion::Off => law.len(),
        MirostatVersion::V1 => {
            let (mut both, mut squares) = (0.0, 0.0);
            for i in 0..law.len().min(100) - 1 {
                let t = ((i + 2) as f64 / (i + 1) as f64).ln();
                both += t * (chances[i] / chances[i + 1]).ln();
                squares += t * t;
            }
            let s = both / squares;
            let epsilon = s - 1.0;
            ((epsilon * 2f64.powf(mu)) / (1.0 - (n as f64).powf(-epsilon))).powf(1.0 / s) as usize
        }
        MirostatVersion::V2 => chances.iter().filter(|p| -p.log2() <= mu).count(),
    };
    law.into_iter().take(kept.max(1)).collect()
}

/// Settings of every stage, alone and combined.
fn all_settings() -> Vec<SamplerParams> {
    let off = SamplerParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..Default::default() };
    let dry = Dry { multiplier: 0.8, ..Dry::default() };
    let xtc = Xtc { probability: 0.5, threshold: 0.05 };
    let mirostat = |version| Mirostat { version, tau: 2.0, eta: 0.2 };
    let dynatemp = Dynatemp { range: 0.7, exponent: 1.5 };
    vec![
        SamplerParams::default(),
        off,
        SamplerParams { typical_p: 0.5, ..off },
        SamplerParams { typical_p: 0.9, top_k: 20, ..off },
        SamplerParams { top_n_sigma: 1.0, ..off },
        SamplerParams { top_n_sigma: 0.3, top_p: 0.7, ..off },
        SamplerParams { xtc, ..off },
        SamplerParams { xtc: Xtc { threshold: 0.0, probability: 1.0 }, top_k: 9, ..off },
        SamplerParams { xtc: Xtc { threshold: 0.51, probability: 1.0 }, ..off },
        SamplerParams { dry, ..off },
        SamplerParams { dry: Dry { allowed_length: 0, last_n: 9, ..dry }, repeat_penalty: 1.3, ..off },
        SamplerParams { dry: Dry { base: 1.0, allowed_length: 1, last_n: usize::MAX, ..dry }, ..off },
        SamplerParams { dynatemp, ..off },
        SamplerParams { dynatemp: Dynatemp { exponent: 0.0, ..dynatemp }, temperature: 0.0, top_k: 5, ..off },
        SamplerParams { mirostat: mirostat(MirostatVersion::V1), ..off },
        SamplerParams { mirostat: mirostat(MirostatVersion::V2), temperature: 0.7, ..off },
        SamplerParams { mirostat: mirostat(MirostatVersion::V2), dry, dynatemp, ..off },
        SamplerParams {
            dry,
            dynatemp,
            xtc,
            top_n_sigma: 2.5,
            typical_p: 0.95,
            repeat_penalty: 1.1,
            ..SamplerParams::default()
        },
    ]
}

#[test]
fn every_sample_matches_the_reference_chain() {
    let mut random = Random::new(11);
    let mut logits = vec![0.0; 120];
    for params in all_settings() {
        let (mut sampler, mut rng) = (Sampler::new(params), Xoshiro256::new(params.seed));
        let mut mu = 2.0 * f64::from(params.mirostat.tau);
        // Ten distinct tokens, so that repetitions are frequent.
        let mut tokens: Vec<u32> = (0..30).map(|i| i * i % 10).collect();
        for step in 0..60 {
            random.fill_gaussian(&mut logits, 3.0);
            logits.iter_mut().skip(step % 7).step_by(7).for_each(|logit| *logit = f32::NEG_INFINITY);
            let mut law = penalised(&params, &logits, &tokens);
            let temperature = if params.mirostat.version == MirostatVersion::Off {
                let draws_chance = params.xtc.probability > 0.0 && params.xtc.threshold <= 0.5;
                // The candidates left before XTC: a single one consumes no random number.
                let n_left = truncated(&params, law.clone(), 1.0).len();
                let chance = if draws_chance && n_left > 1 { rng.unit() } else { 1.0 };
                law = truncated(&params, law, chance);
                dynamic(&params, &law)
            } else {
                let temperature = dynamic(&params, &law);
                law = targeted(&params, law, temperature, mu, logits.len());
                temperature
            };
            let want = probabilities(&law, temperature);
            let drawn = sampler.sample(&logits, &tokens).unwrap();
            let got: Vec<(u32, f64)> = sampler.sampled_candidates().collect();
            let ids = |law: &[(u32, f64)]| law.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            assert_eq!(ids(&got), ids(&law), "{params:?}, step {step}");
            for ((id, got), want) in got.iter().zip(&want) {
                assert!((got - want).abs() <= 1e-6, "{params:?}, step {step}: {id} has {got}, not {want}");
            }
            // Inverse-CDF sampling with the next random number.
            let (mut place, mut index) = (rng.unit(), 0);
            while index + 1 < want.len() && place >= want[index] {
                place -= want[index];
                index += 1;
            }
            assert_eq!(drawn, law[index].0, "{params:?}, step {step}");
            let Mirostat { tau, eta, .. } = params.mirostat;
            mu -= f64::from(eta) * (-want[index].log2() - f64::from(tau));
            tokens.push(drawn % 10);
        }
    }
}
