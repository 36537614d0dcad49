//! A tiny model from tokens to logits on the emulator, held to the CPU.

use std::path::Path;
use std::sync::Arc;

use kvant_backend::Backend;
use kvant_codec::DType;
use kvant_cpu::{CpuDevice, Isa};
use kvant_gguf::Gguf;
use kvant_kv::{Cache, Plan, Policies};
use kvant_model::{Activations, Config, Decoder, Entry, Part, Want, Weights};

use crate::emulator;

/// Logits after each piece of the text, `[pieces][n_vocab]`.
fn logits<B: Backend>(device: &B, model: &str, kv: DType, pieces: &[&[u32]]) -> Vec<Vec<f32>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let gguf = Arc::new(Gguf::open(folder.join(model)).unwrap());
    let config = Config::from_gguf(&gguf).unwrap();
    let shape = config.kv_shape();
    let weights = Weights::load(&gguf, &config, &Part::whole(config.n_layers), device, &mut |_| ()).unwrap();
    let decoder = Decoder::new(config, weights);
    let plan = Plan::new(&shape, kv, kv, &Policies::default()).unwrap();
    let mut cache = Cache::new(device, &shape, plan, 128).unwrap();
    let mut act = decoder.activations(device, 64).unwrap();
    let after = |tokens: &&[u32]| {
        decoder.step(device, &mut cache, &mut act, Entry::Tokens(tokens), Want::Last).unwrap();
        let mut row = vec![f32::NAN; decoder.n_vocab()];
        decoder.logits(device, &act, 0, &mut row).unwrap();
        row
    };
    pieces.iter().map(after).collect()
}

/// Largest difference of the logits between the emulator and the CPU; `None` where there is no NVRTC.
fn largest_error(model: &str, kv: DType, pieces: &[&[u32]]) -> Option<f32> {
    let (cpu, device) = (CpuDevice::new(Isa::Scalar, 1), emulator::device(80)?);
    let (got, want) = (logits(&device, model, kv, pieces), logits(&cpu, model, kv, pieces));
    let differences = got.iter().flatten().zip(want.iter().flatten()).map(|(got, want)| (got - want).abs());
    // Unlike `f32::max`, this keeps a NaN.
    Some(differences.fold(0.0, |max, err| if err <= max { max } else { err }))
}

/// Logits after a text whose first layer ran on the CPU and the second on `device`.
fn logits_of_halves<B: Backend>(device: &B, model: &str, tokens: &[u32]) -> Vec<f32> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let gguf = Arc::new(Gguf::open(folder.join(model)).unwrap());
    let config = Config::from_gguf(&gguf).unwrap();
    let [first, second] = Part::split(config.n_layers, 1);
    let cpu = CpuDevice::new(Isa::Scalar, 1);
    let mut residual = vec![f32::NAN; tokens.len() * config.n_embd];
    let before = half(&cpu, &gguf, &first, Entry::Tokens(tokens), Want::Nothing);
    before.0.residual(&cpu, &before.1, &mut residual).unwrap();
    let after = half(device, &gguf, &second, Entry::Residual(&residual), Want::Last);
    let mut row = vec![f32::NAN; after.0.n_vocab()];
    after.0.logits(device, &after.1, 0, &mut row).unwrap();
    row
}

/// A part of a model, after one step.
fn half<B: Backend>(
    device: &B,
    gguf: &Arc<Gguf>,
    part: &Part,
    entry: Entry<'_>,
    want: Want,
) -> (Decoder<B>, Activations<B>) {
    let config = Config::from_gguf(gguf).unwrap();
    let weights = Weights::load(gguf, &config, part, device, &mut |_| ()).unwrap();
    let decoder = Decoder::new(config, weights);
    let shape = decoder.kv_shape();
    let plan = Plan::new(&shape, DType::F16, DType::F16, &Policies::default()).unwrap();
    let mut cache = Cache::new(device, &shape, plan, 128).unwrap();
    let mut act = decoder.activations(device, 64).unwrap();
    decoder.step(device, &mut cache, &mut act, entry, want).unwrap();
    (decoder, act)
}

#[test]
fn a_tiny_model_split_between_the_cpu_and_the_emulator_says_the_same() {
    let (model, text) = ("qwen2-h128-g1-yarn.gguf", tokens(20));
    let Some(device) = emulator::device(80) else { return };
    let got = logits_of_halves(&device, model, &text);
    let want = &logits(&CpuDevice::new(Isa::Scalar, 1), model, DType::F16, &[&text])[0];
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= HALVES, "{got} for {want}");
    }
}

fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| i * 29 % 64).collect()
}

/// Two layers, each with seven products and an attention one after the other, on logits of order 3, and everything that
/// tensor cores multiply rounded to 2^-11.
const HALVES: f32 = 2.0 * 8.0 * 3.0 / 2048.0;

/// A prompt at once, so that products run on tensor cores, and a token after it.
#[test]
fn a_tiny_model_with_an_f16_cache_says_the_same_on_the_emulator_as_on_the_cpu() {
    let text = tokens(21);
    for model in ["llama-h64-g8.gguf", "qwen2-h128-g1-yarn.gguf", "qwen3-h80-g2-linear.gguf"] {
        let Some(error) = largest_error(model, DType::F16, &[&text[..20], &text[20..]]) else { return };
        assert!(error <= HALVES, "{model}: {error}");
    }
}

/// Pieces so small that the products are in f32. A code at a boundary may still fall to the other side, once attention
/// has rounded to halves, and a code is a step of 2 to 60 % of the deviation: the caches themselves change these logits by
/// about 1, and a thirtieth of their codes would have to fall otherwise for 0.1.
#[test]
fn a_tiny_model_with_a_coded_cache_says_nearly_the_same_on_the_emulator_as_on_the_cpu() {
    let text = tokens(36);
    let pieces = [&text[..1], &text[1..17], &text[17..33], &text[33..34], &text[34..]];
    for (model, kv) in [
        ("qwen2-h128-g1-yarn.gguf", DType::Turbo3),
        ("qwen3-h80-g2-linear.gguf", DType::Q8_0),
        ("qwen3-h192-g3.gguf", DType::Turbo2),
    ] {
        let Some(error) = largest_error(model, kv, &pieces) else { return };
        assert!(error <= 0.1, "{model}, {}: {error}", kv.name());
    }
}
