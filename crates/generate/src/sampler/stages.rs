//! Each sampler stage on distributions that can be verified by hand.

use super::tests::{OFF, assert_distribution, logits};
use super::*;
use kvant_text::tokenizer::{Tokenizer, TokenizerModel, VocabData};

/// Returns the likeliest token after `tokens`.
fn likeliest(params: SamplerParams, logits: &[f32], tokens: &[u32]) -> u32 {
    Sampler::new(SamplerParams { temperature: 0.0, ..params }).sample(logits, tokens).unwrap()
}

/// 1.75 bits of entropy: the surprise of token 1, 2 bits, is nearest to it, then that of token 0, 1
/// bit.
#[test]
fn typical_keeps_tokens_of_mean_surprise() {
    let l = logits(&[0.5, 0.25, 0.125, 0.125]);
    let typical = |typical_p| SamplerParams { typical_p, ..OFF };
    assert_distribution(typical(0.0), &l, &[], &[0.0, 1.0, 0.0, 0.0]);
    assert_distribution(typical(0.24), &l, &[], &[0.0, 1.0, 0.0, 0.0]);
    assert_distribution(typical(0.26), &l, &[], &[2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
    assert_distribution(typical(0.8), &l, &[], &[4.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0, 0.0]);
    assert_distribution(typical(1.0), &l, &[], &[0.5, 0.25, 0.125, 0.125]);
    // Min-p is relative to the likeliest remaining token, which is also the greedy one.
    assert_distribution(SamplerParams { min_p: 0.9, ..typical(0.1) }, &l, &[], &[0.0, 1.0, 0.0, 0.0]);
    assert_eq!(likeliest(typical(0.1), &l, &[]), 1);
    // An excluded token, one with a very low logit, a single token.
    let far = [f32::NEG_INFINITY, 0.0, -1e30];
    assert_distribution(typical(0.5), &far, &[], &[0.0, 1.0, 0.0]);
    assert_distribution(typical(0.0), &[3.0], &[], &[1.0]);
}

#[test]
fn top_n_sigma_keeps_tokens_near_the_largest_logit() {
    let sigma = |top_n_sigma| SamplerParams { top_n_sigma, ..OFF };
    // Mean 2, standard deviation 1.63; excluded tokens do not count.
    let l = [0.0, 2.0, 4.0, f32::NEG_INFINITY];
    let weights = [1.0, 2f64.exp(), 4f64.exp()];
    assert_distribution(sigma(1.0), &l, &[], &[0.0, 0.0, 1.0, 0.0]);
    let two = weights[1] + weights[2];
    assert_distribution(sigma(1.3), &l, &[], &[0.0, weights[1] / two, weights[2] / two, 0.0]);
    let all = weights.iter().sum::<f64>();
    for off in [0.0, -1.0] {
        assert_distribution(sigma(off), &l, &[], &[1.0 / all, weights[1] / all, weights[2] / all, 0.0]);
    }
    assert_distribution(sigma(0.5), &[1.0, 1.0], &[], &[0.5, 0.5]);
    assert_distribution(sigma(0.5), &[1.0], &[], &[1.0]);
}

#[test]
fn xtc_removes_likely_tokens_but_the_last_at_its_rate() {
    let l = logits(&[0.4, 0.3, 0.2, 0.1]);
    let xtc = |probability, threshold| SamplerParams { xtc: Xtc { probability, threshold }, ..OFF };
    let (whole, cut) = ([0.4, 0.3, 0.2, 0.1], [0.0, 0.0, 2.0 / 3.0, 1.0 / 3.0]);
    assert_distribution(xtc(1.0, 0.15), &l, &[], &cut);
    assert_distribution(xtc(0.0, 0.15), &l, &[], &whole);
    let mixed: Vec<f64> = whole.iter().zip(cut).map(|(whole, cut)| 0.75 * whole + 0.25 * cut).collect();
    assert_distribution(xtc(0.25, 0.15), &l, &[], &mixed);
    // One likely token, none, and a threshold that no two tokens can reach.
    assert_distribution(xtc(1.0, 0.35), &l, &[], &whole);
    assert_distribution(xtc(1.0, 0.45), &l, &[], &whole);
    assert_distribution(xtc(1.0, 0.51), &l, &[], &whole);
    assert_distribution(xtc(1.0, 0.0), &l, &[], &[0.0, 0.0, 0.0, 1.0]);
    assert_distribution(xtc(1.0, 0.0), &[2.0, f32::NEG_INFINITY], &[], &[1.0, 0.0]);
    // XTC follows min-p and precedes the temperature.
    let behind = SamplerParams { min_p: 0.4, ..xtc(1.0, 0.0) };
    assert_distribution(behind, &l, &[], &[0.0, 0.0, 1.0, 0.0]);
    assert_eq!(likeliest(xtc(1.0, 0.15), &l, &[]), 2);
}

#[test]
fn the_dynamic_temperature_follows_the_entropy() {
    let dynamic = |range, exponent| SamplerParams { dynatemp: Dynatemp { range, exponent }, ..OFF };
    // The entropy is 0.7219 of the largest for two tokens, so the temperature is 1 - 0.5 + 0.7219.
    let l = logits(&[0.8, 0.2]);
    let at = |temperature: f64| {
        let weight = 0.25f64.powf(1.0 / temperature);
        [1.0 / (1.0 + weight), weight / (1.0 + weight)]
    };
    assert_distribution(dynamic(0.5, 1.0), &l, &[], &at(1.2219));
    assert_distribution(dynamic(0.5, 2.0), &l, &[], &at(0.5 + 0.7219 * 0.7219));
    assert_distribution(dynamic(0.5, 0.0), &l, &[], &at(1.5));
    assert_distribution(dynamic(0.0, 0.0), &l, &[], &at(1.0));
    // The lower end is clamped to 0. A range above 0 also varies a temperature of 0.
    assert_distribution(dynamic(3.0, 1.0), &l, &[], &at(4.0 * 0.7219));
    assert_distribution(SamplerParams { temperature: 0.0, ..dynamic(2.0, 1.0) }, &l, &[], &at(2.0 * 0.7219));
    // Zero entropy, a single token.
    assert_distribution(dynamic(2.0, 1.0), &[0.0, -1e30], &[], &[1.0, 0.0]);
    assert_distribution(dynamic(2.0, 1.0), &[0.0], &[], &[1.0]);
}

fn mirostat(version: MirostatVersion, tau: f32, eta: f32) -> SamplerParams {
    SamplerParams { mirostat: Mirostat { version, tau, eta }, ..OFF }
}

#[test]
fn mirostat_2_keeps_tokens_of_little_surprise_and_learns() {
    let v2 = |tau, eta| mirostat(MirostatVersion::V2, tau, eta);
    let l = logits(&[0.15, 0.3, 0.5, 0.05]);
    // At most 2 bits: 1.7 and 1, not 2.7.
    assert_distribution(v2(1.0, 0.0), &l, &[], &[0.0, 0.375, 0.625, 0.0]);
    // All truncating stages are disabled. The temperature applies first: 0.25, 0.09, 0.0225 and
    // 0.0025 of their sum, of which one has at most 2 bits, and two at most 2.2.
    let others =
        SamplerParams { top_k: 1, top_p: 0.1, min_p: 0.9, typical_p: 0.1, top_n_sigma: 0.1, ..v2(1.0, 0.0) };
    assert_distribution(others, &l, &[], &[0.0, 0.375, 0.625, 0.0]);
    let cold = |tau| SamplerParams { temperature: 0.5, ..v2(tau, 0.0) };
    assert_distribution(cold(1.0), &l, &[], &[0.0, 0.0, 1.0, 0.0]);
    assert_distribution(cold(1.1), &l, &[], &[0.0, 0.09 / 0.34, 0.25 / 0.34, 0.0]);
    // A threshold that excludes all tokens leaves the likeliest, or the lower id of equals.
    assert_distribution(v2(0.0, 0.0), &l, &[], &[0.0, 0.0, 1.0, 0.0]);
    assert_distribution(v2(0.0, 0.0), &[1.0, 1.0], &[], &[1.0, 0.0]);
    assert_distribution(v2(f32::MAX, 0.0), &logits(&[0.5, 0.5]), &[], &[0.5, 0.5]);
    assert_distribution(v2(3.0, 1.0), &[0.0], &[], &[1.0]);
    // From 1 bit on, which allows 0.5 alone, each token of 1 bit raises `mu` by half a bit: 0.3
    // enters with the third sample, at 2 bits.
    let mut sampler = Sampler::new(v2(0.5, 1.0));
    let mut kept = || {
        sampler.sample(&l, &[]).unwrap();
        sampler.sampled_candidates().count()
    };
    assert_eq!([kept(), kept(), kept()], [1, 1, 2]);
    assert_eq!(likeliest(v2(9.0, 0.1), &l, &[]), 2);
}

#[test]
fn mirostat_1_keeps_as_many_as_zipfs_law_predicts() {
    let kept = |tau, weights: &[f64]| {
        let mut sampler = Sampler::new(mirostat(MirostatVersion::V1, tau, 0.0));
        sampler.sample(&logits(weights), &[]).unwrap();
        sampler.sampled_candidates().count()
    };
    // s = 1, where k is 2^mu / ln n: 4 / 2.08 and 16 / 2.08.
    let zipf: Vec<f64> = (1..=8).map(|rank| 1.0 / f64::from(rank)).collect();
    assert_eq!((kept(1.0, &zipf), kept(2.0, &zipf)), (1, 7));
    // s = 2: the root of 16 / (1 - 1 / 8) is 4.3, and of 4 / (1 - 1 / 8) 2.1.
    let steep: Vec<f64> = zipf.iter().map(|weight| weight * weight).collect();
    assert_eq!((kept(1.0, &steep), kept(2.0, &steep)), (2, 4));
    // s = 0: 2^mu / 3 to an infinite power.
    assert_eq!((kept(1.0, &[0.25; 4]), kept(0.5, &[0.25; 4])), (4, 1));
    assert_eq!((kept(5.0, &[1.0]), kept(5.0, &[1.0, 0.0]), kept(f32::MAX, &zipf)), (1, 1, 8));
}

const DRY: Dry = Dry { multiplier: 0.2, base: 1.75, allowed_length: 2, last_n: 64 };

#[test]
fn dry_penalizes_tokens_that_extend_a_repetition() {
    let dry = |dry| SamplerParams { dry, ..OFF };
    // Token 3 falls below token 0, at 0.9, by 0.2 and below token 4, at 0.7, by 0.35.
    let l = [0.9, 0.0, 0.0, 1.0, 0.7];
    let after = |settings, tokens: &[u32]| likeliest(dry(settings), &l, tokens);
    assert_eq!(after(DRY, &[1, 2, 3, 1, 2]), 0);
    assert_eq!(after(Dry { multiplier: 0.0, ..DRY }, &[1, 2, 3, 1, 2]), 3);
    // A match that is too short, a window that is too short, another order, another token.
    assert_eq!(after(DRY, &[2, 3, 1, 2]), 3);
    assert_eq!(after(Dry { last_n: 4, ..DRY }, &[1, 2, 3, 1, 2]), 3);
    assert_eq!(after(Dry { last_n: 5, ..DRY }, &[1, 2, 3, 1, 2]), 0);
    assert_eq!(after(DRY, &[2, 1, 3, 1, 2]), 3);
    assert_eq!(after(DRY, &[1, 2, 4, 1, 2]), 3);
    for none in [&[][..], &[3], &[3, 3]] {
        assert_eq!(after(DRY, none), 3, "{none:?}");
    }
    assert_eq!(after(Dry { last_n: 0, ..DRY }, &[1, 2, 3, 1, 2]), 3);
    // 3 3 3 3: the last two and the last three tokens are repetitions.
    let lowered = |tokens: &[u32], settings| {
        let mut sampler = Sampler::new(dry(settings));
        sampler.sample(&[0.0, 0.0], tokens).unwrap();
        let chance = |of| sampler.sampled_candidates().find(|(id, _)| *id == of).unwrap().1;
        (chance(0) / chance(1)).ln()
    };
    let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-6, "{got} {want}");
    close(lowered(&[1, 1, 1], DRY), 0.2);
    close(lowered(&[1, 1, 1, 1], DRY), 0.2 * 1.75);
    close(lowered(&[1, 1, 1, 1, 1, 0], DRY), 0.0);
    // The longest repetition counts, not the last nor all of them: 5 6 7 1, 7 1, 5 6 7.
    close(lowered(&[5, 6, 7, 1, 6, 7, 1, 5, 6, 7], DRY), 0.2 * 1.75);
    close(lowered(&[1, 1, 1, 1], Dry { base: 1.0, ..DRY }), 0.2);
    close(lowered(&[0, 1], Dry { allowed_length: 0, ..DRY }), 0.2);
    // An unbounded penalty, and a token that is excluded or the only one.
    let max = Dry { multiplier: f32::MAX, base: f32::MAX, ..DRY };
    assert_eq!(after(max, &[1, 2, 3, 1, 2]), 0);
    assert_eq!(likeliest(dry(max), &[f32::NEG_INFINITY, f32::NEG_INFINITY, 1.0], &[2, 2, 2, 2, 2]), 2);
}

/// a, b, a line break, a line break after an a, half a two-byte character, its other half, "<",
/// "/>", ":".
fn breakers(texts: &[&str]) -> SequenceBreakers {
    let tokens = ["a", "b", "Ċ", "aĊ", "Ã", "©", "<", "/>", ":"];
    let mut data = VocabData::new(TokenizerModel::Gpt2, tokens.map(Into::into).to_vec());
    data.merges = Some(Vec::new());
    let texts = texts.iter().map(|&text| text.to_owned()).collect();
    SequenceBreakers::new(texts, Tokenizer::new(data).unwrap().into()).unwrap()
}

#[test]
fn breakers_end_repetitions_across_token_boundaries() {
    let l = [0.9, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    // Token 1 extends a repetition of three tokens.
    let after = |texts: &[&str], tokens: &[u32]| {
        let params = SamplerParams { temperature: 0.0, dry: DRY, ..OFF };
        Sampler::new(params).with_breakers(breakers(texts)).sample(&l, tokens).unwrap()
    };
    let with_break = |token| [0, token, 0, 1, 0, token, 0];
    assert_eq!(after(&[], &with_break(2)), 0);
    assert_eq!(after(&["\n"], &with_break(2)), 1);
    assert_eq!(after(&["\n"], &with_break(3)), 1);
    assert_eq!(after(&["a\n"], &with_break(2)), 1);
    assert_eq!(after(&[":", ""], &with_break(2)), 0);
    // After the breaker everything counts: two tokens.
    assert_eq!(after(&["\n"], &[2, 0, 0, 1, 2, 0, 0]), 0);
    // A breaker before the repetition, not within it.
    assert_eq!(after(&["\n"], &[4, 0, 1, 2, 4, 0]), 0);
    // Breakers of several tokens, of half characters, the last of several, nested ones.
    assert_eq!(after(&["</>"], &[0, 6, 7, 0, 1, 0, 6, 7, 0]), 1);
    assert_eq!(after(&["</>"], &[0, 6, 0, 7, 1, 0, 6, 0, 7]), 0);
    assert_eq!(after(&["é"], &[0, 4, 5, 0, 1, 0, 4, 5, 0]), 1);
    assert_eq!(after(&["</>", "<"], &[0, 6, 7, 0, 1, 0, 6, 7, 0]), 1);
    assert_eq!(after(&["a:", ":a"], &[0, 8, 0, 1, 0, 8, 0]), 1);
    // A token that contains a breaker is never penalized.
    let params = SamplerParams { temperature: 0.0, dry: DRY, ..OFF };
    let mut sampler = Sampler::new(params).with_breakers(breakers(&["\n"]));
    assert_eq!(sampler.sample(&[0.9, 0.0, 1.0], &[0, 0, 2, 0, 0]), Ok(2));
    assert_eq!(sampler.sample(&[0.9, 0.0, 0.0, 1.0], &[0, 0, 3, 0, 0]), Ok(3));
    assert_eq!(Sampler::new(params).sample(&[0.9, 0.0, 1.0], &[0, 0, 2, 0, 0]), Ok(0));
}

/// The state of sampling is in the sampler alone: a clone continues as its original, independent of
/// others.
#[test]
fn each_sampler_has_a_state_of_its_own() {
    let l: Vec<f32> = (0..50).map(|i| ((i * 37) % 53) as f32 / 9.0).collect();
    let params = SamplerParams {
        xtc: Xtc { probability: 0.5, threshold: 0.05 },
        dry: DRY,
        mirostat: Mirostat { version: MirostatVersion::V2, tau: 3.0, eta: 0.5 },
        ..OFF
    };
    for params in [params, SamplerParams { mirostat: Mirostat::default(), ..params }] {
        let sample = |sampler: &mut Sampler, tokens: &mut Vec<u32>, n: usize| {
            (0..n).for_each(|_| tokens.push(sampler.sample(&l, tokens).unwrap()));
        };
        let (mut whole, mut tokens) = (Sampler::new(params), vec![1]);
        sample(&mut whole, &mut tokens, 40);
        let (mut parts, mut in_parts) = (Sampler::new(params), vec![1]);
        sample(&mut parts, &mut in_parts, 15);
        let mut other = Sampler::new(params);
        sample(&mut other, &mut vec![2], 7);
        let mut copy = parts.clone();
        let mut again = in_parts.clone();
        sample(&mut parts, &mut in_parts, 25);
        sample(&mut copy, &mut again, 25);
        assert_eq!((&in_parts, &again), (&tokens, &tokens));
    }
}
