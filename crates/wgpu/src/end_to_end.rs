//! Tiny models from tokens to logits on the first adapter, compared with the CPU.

use std::path::Path;
use std::sync::Arc;

use kvant_backend::{Backend, BackendError};
use kvant_codec::DType;
use kvant_cpu::{CpuDevice, Isa};
use kvant_gguf::Gguf;
use kvant_kv::{BlockPool, Cache, KvError, Layout, Plan, Policies};
use kvant_model::{
    Activations, BatchSequence, Config, Decoder, Entry, LayerRange, LogitsFor, Lora, ModelError, Outputs,
    StepError, Weights,
};

use crate::{Traffic, WgpuDevice, tests};

/// A model and sequences on a device.
struct Running<'a, B: Backend> {
    device: &'a B,
    decoder: Decoder<B>,
    pool: BlockPool<B::Page>,
    caches: Vec<Cache<B::Page>>,
    act: Activations<B>,
    /// LoRA scale of each sequence, if the model has a LoRA.
    lora_scales: Vec<Option<[f32; 1]>>,
}

fn fixture(name: &str) -> Gguf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Gguf::open(folder.join(name)).unwrap()
}

impl<'a, B: Backend> Running<'a, B> {
    /// Creates `n` sequences of the model.
    fn new(device: &'a B, model: &str, kv: DType, n: usize) -> Self {
        Self::with_loras(device, model, kv, n, &[])
    }

    /// As [`Running::new`], with LoRAs.
    fn with_loras(device: &'a B, model: &str, kv: DType, n: usize, loras: &[Lora]) -> Self {
        let gguf = Arc::new(fixture(model));
        let config = Config::from_gguf(&gguf).unwrap();
        let whole = LayerRange::whole(config.layers.len()).with_loras(loras.to_vec());
        let weights = Weights::load(&gguf, &config, &whole, device, &mut |_| ()).unwrap();
        let decoder = Decoder::new(config, weights);
        let shape = decoder.kv_shape();
        let plan = Plan::new(&shape, kv, kv, &Policies::default()).unwrap();
        let layout = Arc::new(Layout::new(&shape, plan));
        let act = decoder.activations(device, 64).unwrap();
        let caches = (0..n).map(|_| Cache::new(Arc::clone(&layout), 128)).collect();
        Self { device, decoder, pool: BlockPool::default(), caches, act, lora_scales: vec![None; n] }
    }

    /// Runs a step in which sequence i has the first `ns[i]` of the remaining tokens, and is left
    /// out without any; returns the last logits of each.
    fn step(&mut self, ns: &[usize], tokens: &[u32]) -> Vec<f32> {
        self.try_step(ns, tokens).unwrap()
    }

    fn try_step(&mut self, ns: &[usize], tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        let Self { device, decoder, pool, caches, act, lora_scales } = self;
        let mut parts = Vec::new();
        for ((cache, &n), lora_scales) in caches.iter_mut().zip(ns).zip(lora_scales) {
            if n > 0 {
                let lora_scales = lora_scales.as_ref().map(|lora_scales| &lora_scales[..]);
                parts.push(BatchSequence {
                    cache,
                    n,
                    logits_for: LogitsFor::Last,
                    lora_scales,
                    places: None,
                    tokens_before: &[],
                });
            }
        }
        let mut rows = vec![f32::NAN; parts.len() * decoder.n_vocab()];
        let mut logits = device.buffer(rows.len())?;
        let outputs = Outputs::logits(Some(&mut logits));
        let done = decoder.step(device, pool, &mut parts, act, Entry::Tokens(tokens), outputs);
        done.map_err(|(StepError::Refused(error) | StepError::Broken(error))| error)?;
        device.read(&logits, 0, &mut rows)?;
        Ok(rows)
    }

    /// Returns the final hidden states of these tokens of the first sequence.
    fn hidden_states(&mut self, tokens: &[u32]) -> Vec<f32> {
        let Self { device, decoder, pool, caches, act, .. } = self;
        let parts = &mut [BatchSequence {
            cache: &mut caches[0],
            n: tokens.len(),
            logits_for: LogitsFor::None,
            lora_scales: None,
            places: None,
            tokens_before: &[],
        }];
        decoder.step(device, pool, parts, act, Entry::Tokens(tokens), Outputs::logits(None)).unwrap();
        let mut hidden_states = vec![f32::NAN; tokens.len() * decoder.config().n_embd];
        decoder.hidden_states(device, act, tokens.len(), &mut hidden_states).unwrap();
        hidden_states
    }
}

/// Opens the adapter again.
fn open_again() -> WgpuDevice {
    WgpuDevice::open(0).expect("an adapter that was there a moment ago")
}

fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| i * 29 % 64).collect()
}

/// Returns the largest difference; NaN if one is NaN.
fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let errors = got.iter().zip(want).map(|(got, want)| (got - want).abs());
    errors.fold(0.0, |worst, error| if error > worst || error.is_nan() { error } else { worst })
}

/// Error bound on logits of order 3. Sums in f32 are added in another order, layer after layer: a
/// thousand roundings. With f16 caches, a few values round to the other side there.
fn bound(kv: DType) -> f32 {
    let halves = if kv == DType::F32 { 0.0 } else { 1.0 / 2048.0 };
    3.0 * (1000.0 / (1 << 24) as f32 + halves)
}

/// Tests each model of a list on one device, so that kernels are compiled once.
fn assert_models_match_cpu(models: &[(&str, DType)]) {
    let Some(device) = tests::device() else { return };
    models.iter().for_each(|&(model, kv)| assert_matches_cpu(&device, model, kv));
}

/// Prefill of two sequences, alone and in one batch, and tokens after it: every step gives the
/// logits of the CPU. Rounding changes neither the router's choice nor any code on these texts.
fn assert_matches_cpu(device: &WgpuDevice, model: &str, kv: DType) {
    let cpu_device = CpuDevice::new(Isa::Scalar, 1).unwrap();
    let mut cpu = Running::new(&cpu_device, model, kv, 2);
    let mut gpu = Running::new(device, model, kv, 2);
    let text = tokens(64);
    let mut rest = &text[..];
    for ns in [[1, 0], [15, 19], [20, 1], [1, 1], [1, 5]] {
        let (step, after) = rest.split_at(ns[0] + ns[1]);
        rest = after;
        let error = distance(&gpu.step(&ns, step), &cpu.step(&ns, step));
        let tol = bound(kv);
        assert!(error <= tol, "{model}, {kv}, {ns:?} rows: {error:e} of {tol:e}");
    }
}

/// With RMS normalization before the logits, and with LayerNorm.
#[test]
fn hidden_states_match_the_cpu() {
    let (Some(device), text) = (tests::device(), tokens(21)) else { return };
    let cpu_device = CpuDevice::new(Isa::Scalar, 1).unwrap();
    for model in ["llama-h64-g8.gguf", "commandr-h64-g2.gguf"] {
        let mut cpu = Running::new(&cpu_device, model, DType::F32, 1);
        let mut gpu = Running::new(&device, model, DType::F32, 1);
        for tokens in [&text[..20], &text[20..]] {
            let (got, want) = (gpu.hidden_states(tokens), cpu.hidden_states(tokens));
            let largest = want.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            // The bound of logits, which are of order 3.
            let (error, tol) = (distance(&got, &want), bound(DType::F32) / 3.0 * largest);
            assert!(error <= tol, "{model}: {error:e} of {tol:e}");
        }
    }
}

/// At the loaded LoRA scale, and at others in one batch; with a separate gate, and ungated.
#[test]
fn models_with_adapters() {
    let (Some(device), text) = (tests::device(), tokens(64)) else { return };
    let cpu_device = CpuDevice::new(Isa::Scalar, 1).unwrap();
    for model in ["llama-h64-g8.gguf", "arcee-h64-g2-yarn.gguf"] {
        let adapter = Arc::new(fixture(&format!("adapters/{model}")));
        let loras = [Lora::new(adapter, 0.5, &fixture(model)).unwrap()];
        let mut cpu = Running::with_loras(&cpu_device, model, DType::F32, 2, &loras);
        let mut gpu = Running::with_loras(&device, model, DType::F32, 2, &loras);
        let mut plain = Running::new(&cpu_device, model, DType::F32, 2);
        let mut rest = &text[..];
        for (ns, second_scale) in
            [([1, 0], None), ([15, 19], Some([1.0])), ([20, 1], Some([1.0])), ([1, 1], None)]
        {
            (cpu.lora_scales[1], gpu.lora_scales[1]) = (second_scale, second_scale);
            let (step, after) = rest.split_at(ns[0] + ns[1]);
            rest = after;
            let (got, want) = (gpu.step(&ns, step), cpu.step(&ns, step));
            // Each layer has as many additional products.
            let (error, tol) = (distance(&got, &want), 2.0 * bound(DType::F32));
            assert!(error <= tol, "{model}, {ns:?} rows: {error:e} of {tol:e}");
            assert!(distance(&plain.step(&ns, step), &want) > 0.1, "{model}: the adapter changes nothing");
        }
    }
}

#[test]
fn models_of_experts() {
    assert_models_match_cpu(&[
        ("mixtral-h64-g2.gguf", DType::F32),
        ("qwen2moe-h64-g1-shared.gguf", DType::F32),
        ("qwen3moe-h64-g2-dense1.gguf", DType::F32),
        ("gptoss-h64-g4-window24-sinks.gguf", DType::Q8_0),
        ("phimoe-h64-g2-longrope-short.gguf", DType::F32),
        ("laguna-h64-g2-g3-window20-yarn.gguf", DType::F32),
        ("step35-h64-g2-g3-window20-llama3.gguf", DType::F32),
    ]);
}

#[test]
fn models_with_states() {
    assert_models_match_cpu(&[
        ("lfm2-h64-g2-conv3.gguf", DType::F32),
        ("lfm2moe-h64-g2-conv3-dense1.gguf", DType::F32),
        ("qwen35-h64-g2-delta.gguf", DType::F32),
        ("graniteh-h64-g2-space-experts.gguf", DType::F32),
        ("nemotronhmoe-h64-g2-space-latent.gguf", DType::F32),
        ("nemotronh-h64-g2-space.gguf", DType::F32),
        ("falconh1-h64-g2-beside.gguf", DType::F32),
        ("mamba2-space.gguf", DType::F32),
        ("qwen3next-h64-g2-delta-experts.gguf", DType::F32),
        ("kimilinear-latent128-kda.gguf", DType::F32),
        ("bailingmoe3-latent128-kda-bound.gguf", DType::F32),
    ]);
}

#[test]
fn models_with_trellis_caches() {
    assert_models_match_cpu(&[
        ("qwen3-h192-g3.gguf", DType::Turbo3T),
        ("llama-h96-g2-bias.gguf", DType::Turbo2T),
    ]);
}

#[test]
fn models_with_mla() {
    assert_models_match_cpu(&[
        ("deepseek2-latent512-lite.gguf", DType::F32),
        ("glm4moelite-latent128.gguf", DType::F32),
        ("deepseek3-latent192-yarn.gguf", DType::Turbo3),
    ]);
}

#[test]
fn device_loss_is_an_error_and_saved_sessions_resume() {
    let Some(device) = tests::device() else { return };
    let (model, kv) = ("qwen3-h192-g3.gguf", DType::Turbo3);
    let mut lost = Running::new(&device, model, kv, 1);
    let text = tokens(64);
    lost.step(&[40], &text[..40]);
    let cache = &lost.caches[0];
    let (state, pages) = (cache.state(), cache.pages(&device).collect::<Result<Vec<_>, _>>().unwrap());
    let want = lost.step(&[24], &text[40..]);
    device.gpu().destroy();
    let error = lost.try_step(&[1], &[7]).unwrap_err();
    assert!(matches!(&error, ModelError::Device(BackendError::Failed { device: "wgpu", .. })), "{error:?}");
    // A lost device stays lost.
    let error = device.finish().unwrap_err().to_string();
    assert!(error.contains("the device is lost"), "{error}");

    let other = open_again();
    let mut resumed = Running::new(&other, model, kv, 1);
    let layout = Arc::clone(resumed.caches[0].layout());
    let mut next = |index: usize| Ok::<_, KvError>(pages[index].clone());
    resumed.caches[0] = Cache::from_pages(&other, &resumed.pool, layout, 128, state, &mut next).unwrap();
    assert_eq!(resumed.step(&[24], &text[40..]), want);
}

#[test]
fn a_token_is_one_submission_and_reuses_bind_groups() {
    let Some(device) = tests::device() else { return };
    let mut gpu = Running::new(&device, "qwen3-h192-g3.gguf", DType::Turbo3, 1);
    let text = tokens(60);
    gpu.step(&[20], &text[..20]);
    gpu.step(&[1], &[text[20]]);
    let mut n_new = 0;
    for token in &text[21..] {
        let before = device.traffic();
        gpu.step(&[1], &[*token]);
        let after = device.traffic();
        assert_eq!(after.submissions - before.submissions, 1);
        // The logits, for which this test allocates a buffer.
        assert_eq!(after.allocations - before.allocations, 1);
        assert_eq!(after.from_device - before.from_device, 64 * size_of::<f32>() as u64);
        n_new += usize::from(after.groups - before.groups > 1);
    }
    // The step that encodes a block of tokens, and the one after it.
    assert!(n_new <= 2, "{n_new} steps had other bindings than the last one");
}

/// Literals: the work of a token in a model of two Llama layers, which a change of launches changes
/// visibly. The weights are floats: quantized ones add two roundings of activations to a layer.
#[test]
fn a_token_of_a_llama_takes_this_much_work() {
    let Some(device) = tests::device() else { return };
    let mut gpu = Running::new(&device, "llama-h128-g2-llama3.gguf", DType::Turbo3, 1);
    let text = tokens(33);
    gpu.step(&[30], &text[..30]);
    gpu.step(&[1], &[text[30]]);
    gpu.step(&[1], &[text[31]]);
    let before = device.traffic();
    gpu.step(&[1], &[text[32]]);
    let Traffic { submissions, passes, launches, kernel_switches, groups, to_device, .. } =
        device.traffic().since(before);
    // A layer: norm, queries, keys, values, two rotations, append, three of attention, the output;
    // norm, gate and up, down. The end: norm, logits.
    assert_eq!((submissions, launches), (1, 2 * 14 + 2));
    // The rows with logits are all rows, which are not copied; a kernel is set once for products of
    // the same rows, and for both rotations.
    assert_eq!([passes, kernel_switches], [1, 24]);
    // That of the logits, for which this test allocates a buffer.
    assert_eq!(groups, 1);
    // 3,720 where bindings are aligned to 16 bytes: the launches of an attention share their list.
    assert!((3_000..=30 * 256 + 3_720).contains(&to_device), "{to_device} bytes");
}
