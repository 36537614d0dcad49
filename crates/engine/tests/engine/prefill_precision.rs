//! Prefill in bf16: close to exact prefill, a different model for cache files, and rejected without
//! a matrix unit.
#![cfg(target_arch = "x86_64")]

use kvant::{DeviceChoice, Error, Model, OpenOptions, PrefillPrecision, SessionOptions};

use crate::isa_process::runs_on;

fn open(prefill_precision: PrefillPrecision) -> Result<Model, Error> {
    let device = DeviceChoice::Cpu.into();
    Model::bundled(OpenOptions { device, n_threads: Some(2), prefill_precision, ..Default::default() })
}

/// Returns the log-softmax after each of some tokens, fed in one step.
fn log_softmaxes(model: &Model, tokens: &[u32]) -> Vec<Vec<f64>> {
    let mut session = model.session(SessionOptions::default()).unwrap();
    let mut all = Vec::new();
    let mut visit = |_, logits: &[f32]| {
        let max = logits.iter().fold(f32::MIN, |max, &logit| max.max(logit));
        let total: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        all.push(logits.iter().map(|&logit| f64::from(logit - max) - total.ln()).collect());
    };
    session.feed_scored(tokens, 0, &mut visit).unwrap();
    all
}

/// The bound is that of products with rounded activations against exact ones, though both
/// precisions round here.
#[test]
fn bf16_prefill_is_close_to_exact_prefill() {
    // A matrix unit in software.
    if !is_x86_feature_detected!("avx2") {
        eprintln!("skipped: bf16_prefill_is_close_to_exact_prefill: this CPU has no avx2");
        return;
    }
    if !runs_on("soft", "prefill_precision::bf16_prefill_is_close_to_exact_prefill") {
        return;
    }
    let [exact, rounded] = [PrefillPrecision::Exact, PrefillPrecision::Bf16].map(|math| open(math).unwrap());
    assert_ne!(exact.compute_fingerprint(), rounded.compute_fingerprint());
    assert_eq!(exact.compute_fingerprint(), exact.fingerprint());
    let text = "The capital of France is Paris, and that of Italy is Rome. Small models know a few such things, and say them again \
                and again until somebody stops them. What they were told in the beginning they keep in mind for as long as it lies \
                in their cache, which is what all of this is about: how little of it is enough.";
    let tokens = exact.tokenizer().unwrap().encode(text, kvant::Special::AsText, false).unwrap();
    assert!(tokens.len() >= 64, "{} tokens are no prompt", tokens.len());
    let [want, got] = [&exact, &rounded].map(|model| log_softmaxes(model, &tokens));
    assert_eq!(want.len(), got.len());
    let kld = |(want, got): (&Vec<f64>, &Vec<f64>)| -> f64 {
        want.iter().zip(got).map(|(p, q)| p.exp() * (p - q)).sum()
    };
    let mean = want.iter().zip(&got).map(kld).sum::<f64>() / want.len() as f64;
    println!("mean KLD {mean:.2e} over {} tokens", want.len());
    assert!(mean > 0.0 && mean < 1e-3, "mean KLD {mean}");
}

#[test]
fn bf16_prefill_is_refused_without_a_matrix_unit() {
    if !runs_on("scalar", "prefill_precision::bf16_prefill_is_refused_without_a_matrix_unit") {
        return;
    }
    let error = open(PrefillPrecision::Bf16).err().unwrap();
    let message = error.to_string();
    assert!(matches!(error, Error::Setting { name: "prefill_precision", .. }), "{message}");
    assert!(message.contains("scalar has no matrix unit") && !message.contains('\n'), "{message}");
}
