//! Statistical and exact tests of the sampler.

use kvant_codec::candidate;
use kvant_codec::random::Random;

use super::*;

pub(super) const OFF: SamplerParams = SamplerParams {
    temperature: 1.0,
    dynatemp: Dynatemp { range: 0.0, exponent: 1.0 },
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    typical_p: 1.0,
    top_n_sigma: -1.0,
    xtc: Xtc { probability: 0.0, threshold: 0.1 },
    repeat_penalty: 1.0,
    repeat_last_n: 64,
    dry: Dry { multiplier: 0.0, base: 1.75, allowed_length: 2, last_n: 64 },
    mirostat: Mirostat { version: MirostatVersion::Off, tau: 5.0, eta: 0.1 },
    seed: 7,
};

/// Returns the logits of a distribution.
pub(super) fn logits(p: &[f64]) -> Vec<f32> {
    p.iter().map(|p| p.ln() as f32).collect()
}

/// Returns the relative frequency of each token in `n` samples.
fn frequencies(params: SamplerParams, logits: &[f32], recent: &[u32], n: usize) -> Vec<f64> {
    let mut sampler = Sampler::new(params);
    let mut counts = vec![0u32; logits.len()];
    for _ in 0..n {
        counts[sampler.sample(logits, recent).unwrap() as usize] += 1;
    }
    counts.into_iter().map(|c| f64::from(c) / n as f64).collect()
}

/// Each frequency is within 5 standard deviations of its probability; impossible tokens never
/// occur.
pub(super) fn assert_distribution(params: SamplerParams, logits: &[f32], recent: &[u32], want: &[f64]) {
    let n = 20_000;
    let got = frequencies(params, logits, recent, n);
    for (g, w) in got.iter().zip(want) {
        let tol = 5.0 * (w * (1.0 - w) / n as f64).sqrt();
        assert!((g - w).abs() <= tol, "{params:?}: got {got:?}, want {want:?}");
    }
}

#[test]
fn without_filters_samples_follow_the_softmax() {
    assert_distribution(OFF, &logits(&[0.5, 0.2, 0.25, 0.05]), &[], &[0.5, 0.2, 0.25, 0.05]);
    let shifted: Vec<f32> = logits(&[0.5, 0.5]).iter().map(|l| l + 1e4).collect();
    assert_distribution(OFF, &shifted, &[], &[0.5, 0.5]);
}

#[test]
fn each_filter_keeps_the_tokens_of_its_definition() {
    let l = logits(&[0.1, 0.4, 0.2, 0.3]);
    assert_distribution(SamplerParams { top_k: 2, ..OFF }, &l, &[], &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
    // 0.4 + 0.3 reaches 0.6; 0.4 alone does not.
    assert_distribution(SamplerParams { top_p: 0.6, ..OFF }, &l, &[], &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
    assert_distribution(SamplerParams { top_p: 0.0, ..OFF }, &l, &[], &[0.0, 1.0, 0.0, 0.0]);
    // 0.4 of 0.4 is 0.16, so 0.2 stays and 0.1 is removed.
    assert_distribution(
        SamplerParams { min_p: 0.4, ..OFF },
        &l,
        &[],
        &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0],
    );
    // Top-p uses the probabilities that top-k left: 4/9 + 3/9 reaches 0.75.
    let both = SamplerParams { top_k: 3, top_p: 0.75, ..OFF };
    assert_distribution(both, &l, &[], &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
    // Min-p must not change the probabilities of top-p: 0.4 + 0.3 < 0.75 of all four.
    let both = SamplerParams { top_p: 0.75, min_p: 0.4, ..OFF };
    assert_distribution(both, &l, &[], &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
}

#[test]
fn temperature_comes_after_the_filters() {
    let l = logits(&[0.64, 0.36]);
    // Square roots: 0.8 and 0.6.
    assert_distribution(SamplerParams { temperature: 2.0, ..OFF }, &l, &[], &[8.0 / 14.0, 6.0 / 14.0]);
    let hot = SamplerParams { temperature: 1e30, top_p: 0.6, ..OFF };
    assert_distribution(hot, &l, &[], &[1.0, 0.0]);
    let cold = SamplerParams { temperature: 1e-30, ..OFF };
    assert_distribution(cold, &l, &[], &[1.0, 0.0]);
}

#[test]
fn candidates_of_a_sample_have_their_probabilities() {
    let logits = logits(&[0.5, 0.1, 0.3, 0.1]);
    let params = SamplerParams { temperature: 0.5, top_k: 2, ..SamplerParams::default() };
    let mut sampler = Sampler::new(params);
    let drawn = sampler.sample(&logits, &[]).unwrap();
    let among: Vec<(u32, f64)> = sampler.sampled_candidates().collect();
    assert_eq!(among.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 2]);
    assert!((among[0].1 - 0.25 / 0.34).abs() < 1e-6 && (among[1].1 - 0.09 / 0.34).abs() < 1e-6, "{among:?}");
    assert!(among.iter().any(|(id, _)| *id == drawn));
    let mut greedy = Sampler::new(SamplerParams::greedy());
    greedy.sample(&logits, &[]).unwrap();
    assert_eq!(greedy.sampled_candidates().collect::<Vec<_>>(), [(0, 1.0)]);
}

#[test]
fn greedy_takes_the_likeliest_and_the_lower_id_of_equals() {
    let mut s = Sampler::new(SamplerParams::greedy());
    assert_eq!(s.sample(&[0.0, 3.0, -1.0, 3.0], &[]), Ok(1));
    assert_eq!(s.sample(&[-0.0, 0.0], &[]), Ok(0));
    assert_eq!(s.sample(&[f32::NEG_INFINITY, f32::MIN], &[]), Ok(1));
}

#[test]
fn repeat_penalty_lowers_each_token_of_its_window_once() {
    let params = SamplerParams { temperature: 0.0, repeat_penalty: 2.0, repeat_last_n: 2, ..OFF };
    let mut s = Sampler::new(params);
    // 4 / 2 < 3. The penalty applies once although the token occurred twice: 4 / 4 would be below
    // 1.5.
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
fn the_same_seed_samples_the_same_tokens() {
    let l: Vec<f32> = (0..100).map(|i| ((i * 37) % 101) as f32 / 20.0).collect();
    let run = |seed| {
        let mut s = Sampler::new(SamplerParams { seed, ..SamplerParams::default() });
        (0..8).map(|_| s.sample(&l, &[]).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
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
        SamplerParams { typical_p: 1.01, ..OFF },
        SamplerParams { typical_p: f32::NAN, ..OFF },
        SamplerParams { top_n_sigma: f32::NAN, ..OFF },
        SamplerParams { top_n_sigma: f32::INFINITY, ..OFF },
        SamplerParams { xtc: Xtc { probability: -0.1, ..OFF.xtc }, ..OFF },
        SamplerParams { xtc: Xtc { probability: 1.0, threshold: f32::NAN }, ..OFF },
        SamplerParams { dry: Dry { multiplier: f32::NAN, ..OFF.dry }, ..OFF },
        SamplerParams { dry: Dry { multiplier: 1.0, base: 0.5, ..OFF.dry }, ..OFF },
        SamplerParams { dynatemp: Dynatemp { range: -1.0, ..OFF.dynatemp }, ..OFF },
        SamplerParams { dynatemp: Dynatemp { range: 1.0, exponent: -1.0 }, ..OFF },
        SamplerParams {
            mirostat: Mirostat { tau: -1.0, version: MirostatVersion::V1, ..OFF.mirostat },
            ..OFF
        },
        SamplerParams {
            mirostat: Mirostat { eta: f32::NAN, version: MirostatVersion::V2, ..OFF.mirostat },
            ..OFF
        },
    ] {
        let got = Sampler::new(bad).sample(&[0.0], &[]);
        assert!(matches!(got, Err(SampleError::Param { .. })), "{bad:?}: {got:?}");
    }
    // Settings of disabled stages are ignored.
    let off = SamplerParams {
        dry: Dry { base: 0.0, ..OFF.dry },
        xtc: Xtc { threshold: 7.0, ..OFF.xtc },
        dynatemp: Dynatemp { exponent: -1.0, ..OFF.dynatemp },
        mirostat: Mirostat { tau: -1.0, ..OFF.mirostat },
        top_n_sigma: -1.0,
        ..OFF
    };
    assert_eq!(Sampler::new(off).sample(&[0.0], &[]), Ok(0));
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

/// Covers ties, recent tokens among the likeliest, and requests for more candidates than exist.
#[test]
fn the_likeliest_tokens_suffice_for_the_same_samples() {
    let mut random = Random::new(3);
    let mut logits = vec![0.0; 300];
    let recent: Vec<u32> = (0..90).map(|i| i * 7 % 301).collect();
    let mut likeliest = Vec::new();
    let usual = SamplerParams { temperature: 0.8, top_k: 40, ..SamplerParams::default() };
    let greedy = SamplerParams::greedy();
    let dry = Dry { multiplier: 3.0, allowed_length: 0, ..Dry::default() };
    let xtc = Xtc { probability: 0.5, threshold: 0.01 };
    for params in [
        greedy,
        SamplerParams { top_k: 0, repeat_penalty: 1.5, ..greedy },
        SamplerParams { dry, ..greedy },
        SamplerParams { xtc, ..greedy },
        SamplerParams { typical_p: 0.1, ..greedy },
        // These stages never remove the likeliest token.
        SamplerParams { top_n_sigma: 1.0, ..greedy },
        usual,
        SamplerParams { top_k: 5, repeat_penalty: 3.0, ..usual },
        SamplerParams { top_k: 1, repeat_penalty: 1.1, repeat_last_n: 1000, ..usual },
        SamplerParams { top_k: 400, repeat_penalty: 1.1, repeat_last_n: 10, ..usual },
        SamplerParams { dry, repeat_penalty: 1.1, repeat_last_n: 10, ..usual },
        SamplerParams { xtc, typical_p: 0.9, ..usual },
        SamplerParams { dynatemp: Dynatemp { range: 0.5, exponent: 1.0 }, ..usual },
    ] {
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
        SamplerParams { top_k: 0, ..usual },
        SamplerParams { repeat_penalty: 0.9, ..usual },
        SamplerParams { top_n_sigma: 1.0, ..usual },
        SamplerParams { mirostat: Mirostat { version: MirostatVersion::V2, ..Mirostat::default() }, ..usual },
    ] {
        assert_eq!(Sampler::new(params).n_candidates(5), None, "{params:?}");
    }
}
