//! A model on a Vulkan, Metal or DX12 adapter has the logits of the CPU. Without an adapter, the
//! test only reports that it was skipped.
#![cfg(feature = "wgpu")]

use crate::isa_process::runs_on;
use kvant::{DType, DeviceChoice, KvOptions, Model, OpenOptions, Session, SessionOptions};

const TEXT: &str = "The capital of France is Paris, and that of Italy is Rome. Small models know a few such things, and \
                    say them again and again until somebody stops them.";

fn session(device: DeviceChoice, weights: Option<DType>, k: &str, v: &str) -> Session {
    let options = OpenOptions { device: device.into(), weights, n_threads: Some(2), ..Default::default() };
    let model = Model::bundled(options).unwrap();
    let kv = KvOptions {
        k: k.parse().unwrap(),
        v: v.parse().unwrap(),
        ..KvOptions::symmetric(k.parse().unwrap())
    };
    model.session(SessionOptions { n_ctx: Some(256), kv }).unwrap()
}

/// Returns the log-softmax of logits.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().fold(f32::MIN, |max, &logit| max.max(logit));
    let total: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    logits.iter().map(|&logit| f64::from(logit - max) - total.ln()).collect()
}

/// Rounding activations to bytes costs more than all other differences of adapters, so the
/// reference is the CPU's kernel set without it, in a process with that environment. An adapter
/// rounds no activations for f16 weights; for other types the bound allows for rounding.
#[test]
fn an_adapter_gives_the_logits_of_the_cpu() {
    const NAME: &str = "adapter::an_adapter_gives_the_logits_of_the_cpu";
    if !runs_on("scalar", NAME) {
        return;
    }
    if kvant::devices::adapters().is_ok_and(|adapters| adapters.is_empty()) {
        assert!(std::env::var_os("KVANT_REQUIRE_WGPU").is_none(), "no adapter of Vulkan, Metal or DX12");
        eprintln!("skipped: {NAME}: no adapter of Vulkan, Metal or DX12");
        return;
    }
    let kv_types = [("turbo3", "turbo3"), ("q8_0", "turbo4"), ("f16", "q4_0"), ("turbo2", "f16")];
    let unrounded = kv_types.map(|(k, v)| (Some(DType::F16), k, v, 1e-6));
    for (weights, k, v, bound) in unrounded.into_iter().chain([(None, "f16", "f16", 1e-3)]) {
        let [mut want, mut got] =
            [DeviceChoice::Cpu, DeviceChoice::Wgpu(0)].map(|device| session(device, weights, k, v));
        let tokenizer = want.model().tokenizer().unwrap().clone();
        let tokens = tokenizer.encode(TEXT, kvant::Special::AsText, false).unwrap();
        // A prompt that crosses tiles, then tokens one by one.
        let (prompt, rest) = tokens.split_at(20);
        let steps = std::iter::once(prompt).chain(rest.chunks(1));
        for (step, tokens) in steps.enumerate() {
            let [want, got] = [&mut want, &mut got].map(|session| {
                session.feed(tokens, &mut |_| true).unwrap();
                log_softmax(session.logits().unwrap())
            });
            let kld: f64 = want.iter().zip(&got).map(|(p, q)| p.exp() * (p - q)).sum();
            assert!(kld <= bound, "{weights:?}, {k}/{v}, step {step}: KLD {kld:e}");
        }
    }
}
