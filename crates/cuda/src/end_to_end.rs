//! Tiny models from tokens to logits on the emulator, compared with the CPU.

use std::path::Path;
use std::sync::Arc;

use kvant_backend::Backend;
use kvant_codec::{DType, Side};
use kvant_cpu::{CpuDevice, Isa};
use kvant_gguf::Gguf;
use kvant_kv::{BlockPool, Cache, KvError, Layout, Plan, Policies};
use kvant_model::{
    Activations, BatchSequence, Config, Decoder, Entry, LayerRange, LogitsFor, Lora, Outputs, Weights,
};

use crate::emulator::Emulator;
use crate::{Context, CudaDevice, Gpu, emulator};

/// A model, or a range of its layers, and sequences on a device.
struct Running<B: Backend> {
    device: B,
    decoder: Decoder<B>,
    layout: Arc<Layout>,
    pool: BlockPool<B::Page>,
    caches: Vec<Cache<B::Page>>,
    act: Activations<B>,
    /// LoRA scale of a sequence.
    lora_scales: Option<[f32; 1]>,
}

fn fixture(name: &str) -> Gguf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Gguf::open(folder.join(name)).unwrap()
}

fn open(model: &str) -> (Arc<Gguf>, Config) {
    let gguf = Arc::new(fixture(model));
    let config = Config::from_gguf(&gguf).unwrap();
    (gguf, config)
}

impl<B: Backend> Running<B> {
    fn new(device: B, model: &str, layers: Option<&LayerRange>, kv: DType) -> Self {
        let (gguf, config) = open(model);
        let all_layers = LayerRange::whole(config.layers.len());
        let weights =
            Weights::load(&gguf, &config, layers.unwrap_or(&all_layers), &device, &mut |_| ()).unwrap();
        Self::with(device, Decoder::new(config, weights), kv)
    }

    fn with(device: B, decoder: Decoder<B>, kv: DType) -> Self {
        let shape = decoder.kv_shape();
        let plan = Plan::new(&shape, kv, kv, &Policies::default()).unwrap();
        let layout = Arc::new(Layout::new(&shape, plan));
        let act = decoder.activations(&device, 64).unwrap();
        let caches = vec![Cache::new(Arc::clone(&layout), 128)];
        Self { device, decoder, layout, pool: BlockPool::default(), caches, act, lora_scales: None }
    }

    /// Runs a step of the first `ns.len()` sequences, `ns[i]` tokens of sequence i; returns the
    /// requested logits.
    fn step_batch(&mut self, ns: &[usize], entry: Entry<'_>, want: LogitsFor) -> Vec<f32> {
        let Self { device, decoder, pool, caches, act, lora_scales, .. } = self;
        let lora_scales = lora_scales.as_ref().map(|lora_scales| &lora_scales[..]);
        let sequences = caches.iter_mut().zip(ns).map(|(cache, &n)| BatchSequence {
            cache,
            n,
            logits_for: want,
            lora_scales,
            places: None,
            tokens_before: &[],
        });
        let mut sequences: Vec<_> = sequences.collect();
        let n_requested: usize = ns.iter().map(|&n| want.count(n)).sum();
        let mut row = vec![f32::NAN; n_requested * decoder.n_vocab()];
        let mut logits = device.buffer(row.len()).unwrap();
        let on_logits = (n_requested > 0).then_some(&mut logits);
        decoder.step(device, pool, &mut sequences, act, entry, Outputs::logits(on_logits)).unwrap();
        device.read(&logits, 0, &mut row).unwrap();
        row
    }

    fn step(&mut self, n: usize, entry: Entry<'_>, want: LogitsFor) -> Vec<f32> {
        self.step_batch(&[n], entry, want)
    }

    /// Returns the logits after some more tokens.
    fn logits(&mut self, tokens: &[u32]) -> Vec<f32> {
        self.step(tokens.len(), Entry::Tokens(tokens), LogitsFor::Last)
    }

    /// Returns the final hidden states of these tokens.
    fn hidden_states(&mut self, tokens: &[u32]) -> Vec<f32> {
        self.step(tokens.len(), Entry::Tokens(tokens), LogitsFor::None);
        let mut hidden_states = vec![f32::NAN; tokens.len() * self.decoder.config().n_embd];
        self.decoder.hidden_states(&self.device, &mut self.act, tokens.len(), &mut hidden_states).unwrap();
        hidden_states
    }

    fn rows(&self, layer: usize, side: Side) -> Vec<f32> {
        self.caches[0].decoded_rows(&self.device, layer, 0, side).unwrap()
    }
}

/// Returns the model on the CPU and on the emulator; `None` without NVRTC.
fn on_cpu_and_emulator(model: &str, kv: DType) -> Option<(Running<CpuDevice>, Running<CudaDevice>)> {
    let device = emulator::device(80)?;
    Some((Running::new(cpu(), model, None, kv), Running::new(device, model, None, kv)))
}

fn cpu() -> CpuDevice {
    CpuDevice::new(Isa::Scalar, 1).unwrap()
}

/// Returns the largest of some errors; NaN if one is NaN, wherever it stands.
fn largest(errors: impl IntoIterator<Item = f32>) -> f32 {
    errors.into_iter().fold(0.0, |worst, error| if error > worst || error.is_nan() { error } else { worst })
}

/// Returns the largest difference; NaN if one is NaN.
fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    largest(got.iter().zip(want).map(|(got, want)| (got - want).abs()))
}

#[test]
fn a_bad_number_among_errors_is_not_forgotten() {
    assert_eq!(largest([0.5, 2.0, 1.0]), 2.0);
    for errors in [[f32::NAN, 0.0, 1.0], [1e9, f32::NAN, 0.0], [0.0, 1.0, f32::NAN]] {
        assert!(largest(errors).is_nan(), "{errors:?}");
    }
    assert!(distance(&[f32::INFINITY, 0.0], &[f32::INFINITY, 0.0]).is_nan());
}

/// Returns the largest difference of the logits after each chunk of tokens.
fn largest_error(model: &str, kv: DType, pieces: &[&[u32]]) -> Option<f32> {
    let (mut cpu, mut gpu) = on_cpu_and_emulator(model, kv)?;
    Some(largest(pieces.iter().map(|&tokens| distance(&gpu.logits(tokens), &cpu.logits(tokens)))))
}

fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| i * 29 % 64).collect()
}

/// Error bound with f16 operands: two layers, each with seven matrix products and an attention in
/// sequence, on logits of order 3, and every tensor-core operand rounded to 2^-11.
const HALVES: f32 = 2.0 * 8.0 * 3.0 / 2048.0;

/// Error bound where both caches hold the same codes: f16 operands, and the byte codebooks of the
/// kernels ([`ByteBook`]). The byte codebooks err in the same way as quantization itself, only
/// less, and so move the logits by proportionally less: by the ratio of the deviations.
///
/// [`ByteBook`]: kvant_codec::ByteBook
fn byte_codebook_bound(model: &str, kv: DType, pieces: &[&[u32]]) -> f32 {
    // Squared errors for a variance of 1, of the bytes and of the codec (`ByteBook::of`).
    let (of_bytes, of_codec): (f32, f32) = match kv {
        DType::Turbo2 => (1e-7, 0.117),
        DType::Turbo3 => (4e-6, 0.035),
        DType::Turbo4 => (3.1e-5, 0.0095),
        _ => return HALVES,
    };
    let [mut plain, mut coded] = [DType::F16, kv].map(|kv| Running::new(cpu(), model, None, kv));
    let moved = largest(pieces.iter().map(|&tokens| distance(&coded.logits(tokens), &plain.logits(tokens))));
    HALVES + moved * (of_bytes / of_codec).sqrt()
}

/// A prefill, so that the GEMMs run on tensor cores, and a decoded token after it.
#[test]
fn f16_cache_logits_match_the_cpu() {
    let text = tokens(21);
    for model in ["llama-h64-g8.gguf", "qwen2-h128-g1-yarn.gguf", "qwen3-h80-g2-linear.gguf"] {
        let Some(error) = largest_error(model, DType::F16, &[&text[..20], &text[20..]]) else { return };
        assert!(error <= HALVES, "{model}: {error}");
    }
}

/// With RMS normalization before the logits, and with LayerNorm.
#[test]
fn hidden_states_match_the_cpu() {
    let text = tokens(21);
    for model in ["llama-h64-g8.gguf", "commandr-h64-g2.gguf"] {
        let Some((mut cpu, mut gpu)) = on_cpu_and_emulator(model, DType::F16) else { return };
        for tokens in [&text[..20], &text[20..]] {
            let (got, want) = (gpu.hidden_states(tokens), cpu.hidden_states(tokens));
            // The bound of logits, which are of order 3.
            let tol = HALVES / 3.0 * largest(want.iter().map(|value| value.abs()));
            let error = distance(&got, &want);
            assert!(error <= tol, "{model}: {error} of {tol}");
        }
    }
}

/// At the loaded LoRA scale, and at another; with a separate gate, and ungated.
#[test]
fn lora_logits_match_the_cpu() {
    let text = tokens(37);
    for model in ["llama-h64-g8.gguf", "arcee-h64-g2-yarn.gguf"] {
        let (gguf, config) = open(model);
        let adapter = Arc::new(fixture(&format!("adapters/{model}")));
        let lora = Lora::new(adapter, 0.5, &gguf).unwrap();
        let layers = LayerRange::whole(config.layers.len()).with_loras(vec![lora]);
        let Some(device) = emulator::device(80) else { return };
        let mut cpu = Running::new(cpu(), model, Some(&layers), DType::F16);
        let mut gpu = Running::new(device, model, Some(&layers), DType::F16);
        let mut plain = Running::new(self::cpu(), model, None, DType::F16);
        for (tokens, lora_scales) in
            [(&text[..20], None), (&text[20..36], Some([0.3])), (&text[36..], Some([1.0]))]
        {
            (cpu.lora_scales, gpu.lora_scales) = (lora_scales, lora_scales);
            let want = cpu.logits(tokens);
            let error = distance(&gpu.logits(tokens), &want);
            // Each layer has as many additional products.
            assert!(error <= 2.0 * HALVES, "{model}, {lora_scales:?}: {error}");
            assert!(
                distance(&plain.logits(tokens), &want) > 4.0 * HALVES,
                "{model}: the adapter changes nothing"
            );
        }
    }
}

/// Products of few rows, in f32, and of many, on tensor cores. Rounding does not change the
/// router's choice on these texts: where two experts nearly tie, either would be correct.
#[test]
fn moe_logits_match_the_cpu() {
    let text = tokens(37);
    let pieces = [&text[..1], &text[1..16], &text[16..36], &text[36..]];
    for model in ["mixtral-h64-g2.gguf", "qwen2moe-h64-g1-shared.gguf", "qwen3moe-h64-g2-dense1.gguf"] {
        let Some(error) = largest_error(model, DType::F16, &pieces) else { return };
        assert!(error <= HALVES, "{model}: {error}");
    }
}

/// More than two layers, and proportionally more roundings.
#[test]
fn sink_and_recurrent_logits_match_the_cpu() {
    let text = tokens(37);
    let pieces = [&text[..1], &text[1..16], &text[16..36], &text[36..]];
    for model in [
        "gptoss-h64-g4-window24-sinks.gguf",
        "lfm2-h64-g2-conv3.gguf",
        "lfm2moe-h64-g2-conv3-dense1.gguf",
        "qwen35-h64-g2-delta.gguf",
        "graniteh-h64-g2-space-experts.gguf",
        "nemotronhmoe-h64-g2-space-latent.gguf",
        "nemotronh-h64-g2-space.gguf",
        "falconh1-h64-g2-beside.gguf",
        "mamba2-space.gguf",
        "qwen3next-h64-g2-delta-experts.gguf",
        "kimilinear-latent128-kda.gguf",
        "bailingmoe3-latent128-kda-bound.gguf",
    ] {
        let Some(error) = largest_error(model, DType::F16, &pieces) else { return };
        let tol = HALVES * open(model).1.layers.len() as f32 / 2.0;
        assert!(error <= tol, "{model}: {error} of {tol}");
    }
}

/// Token by token, beyond the window, with products in f32. Rounding changes no router's choice on
/// these texts, of which each has its stride; on others two experts of these models nearly tie.
#[test]
fn logits_of_narrow_choices_match_the_cpu() {
    for (model, stride) in
        [("laguna-h64-g2-g3-window20-yarn.gguf", 29), ("step35-h64-g2-g3-window20-llama3.gguf", 7)]
    {
        let text: Vec<u32> = (0..22).map(|i| i * stride % 64).collect();
        let pieces: Vec<&[u32]> = text.chunks(1).collect();
        let Some(error) = largest_error(model, DType::F16, &pieces) else { return };
        assert!(error <= HALVES, "{model}: {error}");
    }
}

/// MLA heads on one latent vector, in 16 bit and quantized: one token and several, in full and
/// partial tiles.
#[test]
fn mla_logits_match_the_cpu() {
    let text = tokens(37);
    let pieces = [&text[..1], &text[1..16], &text[16..36], &text[36..]];
    for (model, kv) in
        [("deepseek2-latent512-lite.gguf", DType::F16), ("glm4moelite-latent128.gguf", DType::Turbo3)]
    {
        let Some(error) = largest_error(model, kv, &pieces) else { return };
        let layers = open(model).1.layers.len() as f32 / 2.0;
        let tol = HALVES * (layers - 1.0) + byte_codebook_bound(model, kv, &pieces);
        assert!(error <= tol, "{model}, {}: {error} of {tol}", kv.name());
    }
}

/// The first layers run on the CPU or on a GPU of their own.
#[test]
fn pipeline_split_logits_match_the_cpu() {
    let (model, text) = ("qwen2-h128-g1-yarn.gguf", tokens(20));
    let [first, second] = LayerRange::split(open(model).1.layers.len(), 1);
    let want = Running::new(cpu(), model, None, DType::F16).logits(&text);
    let emulators = [(); 3].map(|()| emulator::device(80));
    let [Some(own), Some(after_cpu), Some(after_gpu)] = emulators else { return };
    let residuals = [
        Running::new(cpu(), model, Some(&first), DType::F16).hidden_states(&text),
        Running::new(own, model, Some(&first), DType::F16).hidden_states(&text),
    ];
    for (residual, device) in residuals.iter().zip([after_cpu, after_gpu]) {
        let mut after = Running::new(device, model, Some(&second), DType::F16);
        let got = after.step(text.len(), Entry::Residual(residual), LogitsFor::Last);
        let error = distance(&got, &want);
        assert!(error <= HALVES, "{error}");
    }
}

/// Prefill of three sequences in one batch, then a token for each of them, repeatedly: matrix
/// products of several rows, and each sequence in its own cache.
#[test]
fn batched_sequences_match_each_alone() {
    for model in ["qwen3-h80-g2-linear.gguf", "qwen35-h64-g2-delta.gguf"] {
        runs_together(model);
    }
}

fn runs_together(model: &str) {
    let text = tokens(64);
    let Some(device) = emulator::device(80) else { return };
    let tol = HALVES * open(model).1.layers.len() as f32 / 2.0;
    let mut gpu = Running::new(device, model, None, DType::F16);
    let lengths = [20, 1, 27];
    gpu.caches = lengths.map(|_| Cache::new(Arc::clone(&gpu.layout), 128)).into();
    let prompts: Vec<_> = lengths.iter().flat_map(|&length| &text[..length]).copied().collect();
    gpu.step_batch(&lengths, Entry::Tokens(&prompts), LogitsFor::None);
    let mut alone = lengths.map(|length| {
        let mut alone = Running::new(cpu(), model, None, DType::F16);
        alone.logits(&text[..length]);
        alone
    });
    for step in [5, 11, 3] {
        let next = [step, step + 1, step + 2];
        let got = gpu.step_batch(&[1; 3], Entry::Tokens(&next), LogitsFor::Last);
        let got = got.chunks_exact(gpu.decoder.n_vocab());
        for ((got, alone), token) in got.zip(&mut alone).zip(next) {
            let error = distance(got, &alone.logits(&[token]));
            assert!(error <= tol, "{model}, token {token}: {error}");
        }
    }
}

/// A step that verifies draft tokens gives each row the bits that it has alone: in dense layers,
/// experts, recurrent layers and on latent vectors, across a tile of tokens.
#[test]
fn rows_of_a_step_have_the_bits_they_have_alone() {
    let text = tokens(37);
    for (model, kv) in [
        ("qwen2-h128-g1-yarn.gguf", DType::Turbo3),
        ("gptoss-h64-g4-window24-sinks.gguf", DType::Q8_0),
        ("qwen35-h64-g2-delta.gguf", DType::F16),
        ("deepseek2-latent512-lite.gguf", DType::Turbo3),
    ] {
        let devices = [(); 2].map(|()| emulator::device(80));
        let [Some(together), Some(alone)] = devices else { return };
        let [mut together, mut alone] = [together, alone].map(|device| Running::new(device, model, None, kv));
        for gpu in [&mut together, &mut alone] {
            gpu.logits(&text[..29]);
        }
        let rows = together.device.info().batch_invariant_rows;
        assert_eq!(rows, text.len() - 29, "of {model}");
        let got = together.step(rows, Entry::Tokens(&text[29..]), LogitsFor::From(0));
        let want: Vec<f32> = text[29..].iter().flat_map(|&token| alone.logits(&[token])).collect();
        let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&want), "{model}");
    }
}

/// The layer that drafts: tokens, each with the hidden state of the token before it.
#[test]
fn logits_of_an_mtp_layer_match_the_cpu() {
    let file = "../engine/tests/predictions/glm4moe-h64-g2-dense1.gguf";
    let gguf = Arc::new(Gguf::open(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap());
    let Some(device) = emulator::device(80) else { return };
    let (mut cpu, mut gpu) = (mtp_layer(cpu(), &gguf), mtp_layer(device, &gguf));
    let text = tokens(7);
    let states: Vec<f32> = (0..text.len() * cpu.decoder.config().n_embd).map(|i| (i as f32).sin()).collect();
    for piece in [0..5, 5..6, 6..7] {
        let width = states.len() / text.len();
        let states = &states[piece.start * width..piece.end * width];
        let entry = Entry::Pairs(&text[piece.clone()], states);
        let want = cpu.step(piece.len(), entry, LogitsFor::Last);
        let error = distance(&gpu.step(piece.len(), entry, LogitsFor::Last), &want);
        assert!(error <= HALVES, "{piece:?}: {error}");
    }
}

fn mtp_layer<B: Backend>(device: B, gguf: &Arc<Gguf>) -> Running<B> {
    let config = Config::from_gguf(gguf).unwrap();
    let layers = LayerRange::whole(config.layers.len()).with_mtp(true);
    let model = Weights::load(gguf, &config, &layers, &device, &mut |_| ()).unwrap();
    let weights = model.load_mtp(gguf, &config, &device).unwrap().unwrap();
    Running::with(device, Decoder::new(config.of_mtp().unwrap(), weights), DType::F16)
}

/// Chunks so small that the products are in f32. A value at a quantization boundary may still round
/// to the other side, after attention has rounded to f16; they are so few that the slack of
/// [`HALVES`], a bound on the sum of all roundings, covers them.
#[test]
fn quantized_cache_logits_are_close_to_the_cpu() {
    let text = tokens(36);
    let pieces = [&text[..1], &text[1..17], &text[17..33], &text[33..34], &text[34..]];
    for (model, kv) in [
        ("qwen2-h128-g1-yarn.gguf", DType::Turbo3),
        ("qwen3-h80-g2-linear.gguf", DType::Q8_0),
        ("qwen3-h192-g3.gguf", DType::Turbo2),
        ("llama-h64-g8.gguf", DType::Turbo3),
    ] {
        let Some(error) = largest_error(model, kv, &pieces) else { return };
        let tol = byte_codebook_bound(model, kv, &pieces);
        assert!(error <= tol, "{model}, {}: {error} of {tol}", kv.name());
    }
}

/// One prefill: keys and values that differ by about 2^-11 move some codes across a quantization
/// boundary, on the CPU's vector kernels too. No more than that differs in the first layer, which
/// no attention precedes; and from the emulator's cache the CPU continues as the emulator does.
///
/// With a boundary every 0.3 deviations or less, 2^-10 / 0.3 of the codes differ, by about half a
/// deviation: 3 %.
#[test]
fn a_prompt_leaves_the_same_codes_but_for_those_at_a_boundary() {
    let text = tokens(51);
    for (model, kv) in [
        ("qwen2-h128-g1-yarn.gguf", DType::Turbo3),
        ("qwen3-h192-g3.gguf", DType::Turbo2),
        ("llama-h128-g2-llama3.gguf", DType::Turbo4),
    ] {
        let Some((mut cpu, mut gpu)) = on_cpu_and_emulator(model, kv) else { return };
        gpu.step(50, Entry::Tokens(&text[..50]), LogitsFor::None);
        cpu.step(50, Entry::Tokens(&text[..50]), LogitsFor::None);
        for side in [Side::K, Side::V] {
            let (got, want) = (gpu.rows(0, side), cpu.rows(0, side));
            let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
            let error_norm = norm(&mut got.iter().zip(&want).map(|(got, want)| got - want));
            let relative_error = error_norm / norm(&mut want.iter().copied());
            assert!(relative_error <= 0.03, "{model}, {}, {side:?}: {relative_error}", kv.name());
        }
        let pages: Vec<_> = gpu.caches[0].pages(&gpu.device).map(|page| page.unwrap()).collect();
        let (layout, state) = (Arc::clone(&cpu.layout), gpu.caches[0].state());
        let mut next = |index: usize| Ok::<_, KvError>(pages[index].clone());
        let cache = Cache::from_pages(&cpu.device, &cpu.pool, layout, 128, state, &mut next).unwrap();
        cpu.caches = vec![cache];
        let error = distance(&gpu.logits(&text[50..]), &cpu.logits(&text[50..]));
        let tol = byte_codebook_bound(model, kv, &[&text[..50], &text[50..]]);
        assert!(error <= tol, "{model}, {}: {error} of {tol}", kv.name());
    }
}

/// Returns a device on an emulator, and the emulator; `None` without NVRTC.
fn watched(arch: u32) -> Option<(CudaDevice, Arc<Emulator>)> {
    let watched = Emulator::new(arch);
    let cx = emulator::or_skip(Context::emulated(Arc::clone(&watched) as Arc<dyn Gpu>))?;
    Some((CudaDevice::on(cx, "emulator".to_owned(), true), watched))
}

/// Modules are compiled as they are loaded, and neither can be recorded.
#[test]
fn a_step_that_loads_a_kernel_is_not_recorded() {
    let Some((device, emulator)) = watched(80) else { return };
    let mut gpu = Running::new(device, "llama-h64-g8.gguf", None, DType::F16);
    gpu.logits(&[1]);
    assert_eq!(emulator.recorded_launches(), 0, "the first step loads its first kernel");
    let loaded = emulator.n_modules();
    gpu.logits(&[2]);
    let recorded = emulator.recorded_launches();
    assert!(recorded > 0 && emulator.n_modules() == loaded, "the second one loads none");
    // Two sequences of a token each: the decode step of another shape.
    gpu.caches = vec![Cache::new(Arc::clone(&gpu.layout), 128); 2];
    gpu.step_batch(&[1; 2], Entry::Tokens(&[3, 4]), LogitsFor::Last);
    assert!(emulator.n_modules() > loaded, "it loads kernels, which a recording refuses");
}

#[test]
fn after_a_rehearsal_no_step_loads_a_kernel() {
    for (model, kv) in [
        ("qwen2-h128-g1-yarn.gguf", DType::Turbo3),
        ("qwen3moe-h64-g2-dense1.gguf", DType::Q8_0),
        ("qwen35-h64-g2-delta.gguf", DType::F16),
    ] {
        let Some((device, emulator)) = watched(80) else { return };
        let mut gpu = Running::new(device, model, None, kv);
        let rehearsal = gpu.device.rehearsal().unwrap();
        gpu.decoder.rehearse(&rehearsal, gpu.layout.plan(), 64).unwrap();
        let kernels = gpu.device.load_kernels(&rehearsal).unwrap();
        let loaded = emulator.n_modules();
        assert!(0 < loaded && loaded <= kernels, "{model}: {kernels} kernels of {loaded} modules");
        let text = tokens(58);
        for piece in [&text[..40], &text[40..41], &text[41..46], &text[46..]] {
            gpu.logits(piece);
        }
        assert_eq!(emulator.n_modules(), loaded, "{model}");
    }
}
