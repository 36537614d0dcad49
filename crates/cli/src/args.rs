//! Flags shared by several commands, under the names that llama.cpp users know.

use std::collections::hash_map::RandomState;
use std::ffi::OsString;
use std::fs::File;
use std::hash::BuildHasher;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, ValueEnum};
use kvant::devices;
use kvant::gguf::printable_path;
use kvant::{
    DType, DeviceChoice, Error, GenerateOptions, Gguf, KvOptions, LoraFile, Model, OpenOptions, Policies,
    PrefillPrecision, Requirements, SamplerParams, SamplingDefaults, Session, SessionOptions,
};

use crate::failure::Failure;
use crate::lora::LoraArgs;
use crate::model_source::{self, ModelSourceArgs};
use crate::plan::{self, KvPlanArgs, with_policies};
use crate::vision::VisionOptions;
use crate::weight_type::weight_type;
use crate::{log, output, progress};

/// Selects the model to load and its device.
#[derive(Args, Debug, Clone)]
pub struct ModelArgs {
    #[command(flatten)]
    pub place: ModelSourceArgs,
    /// Number of threads [default: all cores]
    #[arg(short = 't', long, value_name = "N", env = "KVANT_THREADS", value_parser = positive)]
    pub threads: Option<usize>,
    /// Device: cpu, cuda:N (NVIDIA), wgpu:N (any GPU, through Vulkan, Metal or DX12), or auto: the
    /// first usable NVIDIA GPU, else the CPU
    #[arg(long, value_name = "DEVICE", env = "KVANT_DEVICE", default_value = "auto", value_parser = device)]
    pub device: DeviceChoice,
    /// Convert weights to this type on load (q8_0, q4_K, f16, ...); the file is unchanged. With
    /// f16, activations are not rounded, so that eval measures the cache alone
    #[arg(long, value_name = "TYPE", env = "KVANT_WEIGHTS", value_parser = weight_type)]
    pub weights: Option<DType>,
    /// Where MoE expert weights reside: ram, or mmap: they stay in the file and are repacked when
    /// the router selects them (CPU only; less memory, at least ten times slower)
    #[arg(long, value_name = "WHERE", env = "KVANT_EXPERTS", default_value = "ram")]
    pub experts: ExpertPlace,
    /// Arithmetic of prefill: exact (bit-identical to decode) or bf16 (needs a CPU with a bf16
    /// matrix unit; see kvant doctor)
    #[arg(
        long,
        alias = "prompt-math",
        value_name = "PRECISION",
        env = "KVANT_PROMPT_MATH",
        default_value = "exact"
    )]
    pub prefill_precision: PrefillPrecisionArg,
    /// Offload the last N layers to the GPU and run the rest on the CPU (-ngl); a number or all
    /// [default: all]. Without a usable GPU the CPU runs all layers and a note is printed
    #[arg(long, visible_alias = "gpu-layers", value_name = "N", env = "KVANT_N_GPU_LAYERS", value_parser = layers)]
    pub n_gpu_layers: Option<usize>,
    #[command(flatten)]
    pub lora: LoraArgs,
}

/// Holds what a command needs of a model besides its weights.
#[derive(Default)]
pub struct ModelRequirements<'a> {
    pub needs: Requirements,
    pub chat_template: Option<String>,
    /// Options of speculative decoding, for a command that generates.
    pub draft: Option<&'a DraftArgs>,
    /// Options of the vision encoder.
    pub vision: Option<VisionOptions<'a>>,
}

/// Selects where expert weights reside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExpertPlace {
    /// In memory, repacked for the kernels
    Ram,
    /// In the file
    Mmap,
}

/// Selects the arithmetic of prefill GEMMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrefillPrecisionArg {
    /// Same as decode
    Exact,
    /// Operands rounded to bf16
    Bf16,
}

/// Configures the KV cache: context size, types, policies.
#[derive(Args, Debug, Clone)]
pub struct CacheArgs {
    /// Context size in tokens; 0, the default, is the model's training context
    #[arg(short = 'c', long, value_name = "N", env = "KVANT_CTX_SIZE")]
    pub ctx_size: Option<usize>,
    /// KV cache type of K (-ctk): auto f32 f16 bf16 q8_0 q4_0 turbo4 turbo3 turbo2 turbo3t turbo2t
    /// [default: f16 if only -ctv is set, else the plan beside the model (kvant plan), or turbo4]
    #[arg(long, value_name = "TYPE", env = "KVANT_CACHE_TYPE_K", value_parser = kv_type_or_auto)]
    cache_type_k: Option<KvTypeArg>,
    /// KV cache type of V (-ctv) [default: as for -ctk]
    #[arg(long, value_name = "TYPE", env = "KVANT_CACHE_TYPE_V", value_parser = kv_type_or_auto)]
    cache_type_v: Option<KvTypeArg>,
    /// KV cache policies on top of the types: none, or a comma-separated list of auto-keys:NOISE,
    /// auto-asymmetric, boundary:FIRST,LAST, sink:N, recent:N, alpha:X
    #[arg(long, value_name = "RULES", env = "KVANT_KV_POLICY", default_value_t, value_parser = policies)]
    pub kv_policy: Policies,
    /// Table of KV types per layer, head and side; lines of 'LAYER HEAD K|V|KV TYPE', * for all
    #[arg(long, value_name = "FILE", env = "KVANT_KV_TYPES")]
    pub kv_types: Option<PathBuf>,
    #[command(flatten)]
    plan: KvPlanArgs,
}

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

/// Bounds the answer's length and configures speculative decoding.
#[derive(Args, Debug, Clone)]
pub struct DecodeArgs {
    /// Maximum number of tokens to generate; -1: until the model stops or the context is full
    #[arg(short = 'n', long, value_name = "N", env = "KVANT_PREDICT", default_value_t = -1, allow_negative_numbers = true)]
    predict: i64,
    #[command(flatten)]
    pub draft: DraftArgs,
}

/// Configures speculative decoding.
#[derive(Args, Debug, Clone)]
pub struct DraftArgs {
    /// Maximum number of draft tokens per step (speculative decoding). They come from earlier text
    /// (prompt lookup) and, where available, from the model's MTP layers or a draft model (-md); 0
    /// disables. The output is the same either way [default: adapts to the acceptance rate]
    #[arg(long, value_name = "N", env = "KVANT_DRAFT_MAX")]
    pub draft_max: Option<usize>,
    /// Draft model for speculative decoding (-md): a smaller model with the same vocabulary, given
    /// as for -m; CPU only. The output is the same with it
    #[arg(long, value_name = "MODEL", env = "KVANT_MODEL_DRAFT")]
    model_draft: Option<String>,
}

impl DecodeArgs {
    /// Returns the options of a generation that samples with `sampler`.
    pub fn options(&self, sampler: SamplerParams) -> Result<GenerateOptions, Failure> {
        let max_tokens = self.max_tokens()?;
        let draft_max = self.draft.draft_max;
        Ok(GenerateOptions { max_tokens, sampler, draft_max, ..GenerateOptions::default() })
    }

    /// Returns the maximum number of tokens to generate; `None` is unlimited. llama.cpp's -2 is the
    /// same as -1 here.
    fn max_tokens(&self) -> Result<Option<usize>, Failure> {
        match self.predict {
            -1 | -2 => Ok(None),
            n => usize::try_from(n)
                .map(Some)
                .map_err(|_| Failure::Usage(format!("-n: expected -1 or more, got {n}"))),
        }
    }
}

impl ModelArgs {
    /// Loads the model, with a progress bar on a terminal.
    pub fn open(&self, quiet: bool) -> Result<Model, Failure> {
        self.open_with(quiet, ModelRequirements::default())
    }

    /// Returns the same arguments with exact prefill arithmetic, for reference measurements.
    pub fn with_exact_prefill(&self) -> Self {
        Self { prefill_precision: PrefillPrecisionArg::Exact, ..self.clone() }
    }

    /// Loads another model to the same device, with the weight types of its file.
    pub fn load_other(&self, model: &str, quiet: bool) -> Result<Model, Failure> {
        let (place, lora) = (self.place.named(model), LoraArgs::default());
        let other = Self { place, weights: None, lora, ..self.clone() };
        other.open(quiet)
    }

    /// Loads the model as [`open`](Self::open) does and checks a command's further requirements
    /// before the weights are loaded.
    pub fn open_with(&self, quiet: bool, requirements: ModelRequirements<'_>) -> Result<Model, Failure> {
        let ModelRequirements { needs, chat_template, draft, vision } = requirements;
        let place = self.place.source()?;
        let gguf = Arc::new(place.open(&self.place, quiet)?);
        let draft_tokens = draft.filter(|draft| draft.draft_max != Some(0));
        let mtp = draft_tokens.is_some();
        let draft = draft_tokens.and_then(|draft| draft.model_draft.as_ref());
        let draft = draft.map(|name| self.open_file(name, quiet).map(Arc::new)).transpose()?;
        let loras = self.lora.open(self, &gguf, quiet)?;
        let mmproj = vision.map(|vision| vision.open(self, &gguf, quiet)).transpose()?.flatten();
        let started = Instant::now();
        let bar = progress::bar("loading", 100, quiet);
        let mut on_progress = |share: f32| bar.set_position((share * 100.0) as u64);
        let template = chat_template.clone();
        let options = self.options(loras.clone(), Some(&mut on_progress));
        let (draft_file, mmproj_file) = (draft.clone(), mmproj.clone());
        let options = OpenOptions {
            needs,
            chat_template: template,
            mtp,
            draft: draft_file,
            mmproj: mmproj_file,
            ..options
        };
        let model = match Model::from_gguf(gguf.clone(), options) {
            // GPU layers were requested, but no GPU may be present.
            Err(Error::Device(error))
                if self.gpu_is_optional() && devices::check(DeviceChoice::Cuda(0)).is_err() =>
            {
                log::note(format_args!("-ngl: {error}; all layers are on the CPU"));
                let (device, n_gpu_layers) = (DeviceChoice::Cpu, None);
                let options = self.options(loras, Some(&mut on_progress));
                let options = OpenOptions { needs, chat_template, mtp, draft, mmproj, ..options };
                let options = OpenOptions { device, n_gpu_layers, ..options };
                Model::from_gguf(gguf, options)
            }
            other => other,
        };
        bar.finish_and_clear();
        let model = model?;
        let (device, seconds) = (model.device(), started.elapsed().as_secs_f64());
        if self.device == DeviceChoice::Auto && self.n_gpu_layers.is_none() && device.name == "cpu" {
            note_unused_gpu();
        }
        if let Some(draft) = model.draft() {
            note_draft_context(draft.config().n_ctx_train, model.config().n_ctx_train);
        }
        let [mapped, read] = model.mapped_bytes();
        if mapped > 0 {
            log::note(format_args!(
                "{} of experts stay in the file, {} are in memory; decoding a token reads and repacks {} of them, which takes at least ten times as long as in memory",
                output::bytes(mapped),
                output::bytes(model.weight_bytes() - mapped),
                output::bytes(read),
            ));
        }
        tracing::info!(model = %place, device = %device.name, kernels = %device.kernels, seconds, "model loaded");
        Ok(model)
    }

    /// Opens the file of another model, given as for `-m`.
    pub fn open_file(&self, model: &str, quiet: bool) -> Result<Gguf, Failure> {
        let place = self.place.named(model);
        place.source()?.open(&place, quiet)
    }

    /// Returns whether GPU layers were requested without naming a device.
    fn gpu_is_optional(&self) -> bool {
        self.device == DeviceChoice::Auto && self.n_gpu_layers.is_some_and(|n| n > 0)
    }

    /// Returns the load options for the model with these adapters.
    pub fn options<'a>(
        &self,
        loras: Vec<LoraFile>,
        progress: Option<&'a mut dyn FnMut(f32)>,
    ) -> OpenOptions<'a> {
        OpenOptions {
            device: self.device,
            n_gpu_layers: self.n_gpu_layers,
            n_threads: self.threads,
            weights: self.weights,
            maps_experts: self.experts == ExpertPlace::Mmap,
            prefill_precision: match self.prefill_precision {
                PrefillPrecisionArg::Exact => PrefillPrecision::Exact,
                PrefillPrecisionArg::Bf16 => PrefillPrecision::Bf16,
            },
            loras,
            progress,
            ..Default::default()
        }
    }

    /// Returns the model's name for the summary, with its weight type and adapters.
    pub fn label(&self) -> String {
        let (name, adapters) = (self.name(), self.lora.label());
        let weights = self.weights.map(|dtype| format!(" as {dtype}")).unwrap_or_default();
        format!("{name}{weights}{adapters}")
    }

    /// Returns the model's name.
    pub fn name(&self) -> String {
        self.place.source().map_or_else(|_| String::new(), |place| place.name())
    }
}

/// Notes that the draft model has the shorter context.
fn note_draft_context(n_ctx: usize, of: usize) {
    if n_ctx < of {
        log::note(format_args!(
            "-md: drafts only the first {n_ctx} tokens of a conversation, the draft model's context"
        ));
    }
}

/// Notes a GPU that is present but unusable, with the reason.
fn note_unused_gpu() {
    if devices::cuda_count().is_ok_and(|n| n > 0)
        && let Err(error) = devices::check(DeviceChoice::Cuda(0))
    {
        log::note(format_args!("the GPU is not used: {error}"));
    }
}

impl CacheArgs {
    /// Returns the options of a session.
    pub fn session_options(&self) -> Result<SessionOptions, Failure> {
        Ok(SessionOptions { n_ctx: self.ctx_size.filter(|&n| n > 0), kv: self.kv_options()? })
    }

    /// Notes a context longer than the training context.
    pub fn note_length(&self, session: &Session) {
        let (n_ctx, trained) = (session.n_ctx(), session.model().config().n_ctx_train);
        if n_ctx > trained {
            log::note(format!(
                "-c {n_ctx}: this model was trained on {trained} tokens; its output beyond them may make no sense"
            ));
        }
    }

    /// Returns the K and V types that were named.
    fn types(&self) -> [Option<DType>; 2] {
        [self.cache_type_k, self.cache_type_v].map(|given| given.and_then(|KvTypeArg(named)| named))
    }

    /// Returns the options of the KV cache; reads the type table.
    pub fn kv_options(&self) -> Result<KvOptions, Failure> {
        let mut policies = self.kv_policy.clone();
        if let Some(path) = &self.kv_types {
            policies = with_type_table(policies, path)?;
        }
        let [k, v] = self.types().map(|named| named.unwrap_or(DType::F16));
        Ok(KvOptions { k, v, policies, ..Default::default() })
    }

    /// Returns `options` with the given plan for `model`, or with the plan beside the model where
    /// no type is named, or with the automatic choice where no plan exists.
    pub fn resolve(&self, mut options: SessionOptions, model: &Model) -> Result<ResolvedCache, Failure> {
        let has_types = self.types().iter().any(Option::is_some) || self.kv_types.is_some();
        let given = self.plan.open(model)?;
        let mut auto = None;
        options.kv = match (given, has_types) {
            (Some(plan), true) => KvOptions { balance: plan.balance, ..options.kv },
            (Some(plan), false) => with_policies(plan, &self.kv_policy),
            (None, true) => options.kv,
            (None, false) => match plan::beside(model) {
                Some((name, plan)) => {
                    auto = Some(format!("auto, {name}"));
                    with_policies(plan, &self.kv_policy)
                }
                None => {
                    auto = Some("auto, no plan".to_owned());
                    let defaults = KvOptions::default_for(&model.config().kv_shape());
                    let has_policies = self.kv_policy != Policies::default();
                    let policies = if has_policies { options.kv.policies } else { defaults.policies };
                    KvOptions { policies, ..defaults }
                }
            },
        };
        options.kv = self.plan.balanced(options.kv)?;
        Ok(ResolvedCache { options, auto })
    }
}

/// Holds a session's options and the reason for automatic types.
#[derive(Debug, Clone)]
pub struct ResolvedCache {
    pub options: SessionOptions,
    pub auto: Option<String>,
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

/// Returns `policies` followed by the type table in a file.
pub fn with_type_table(policies: Policies, path: &Path) -> Result<Policies, Failure> {
    let text = strip_bom(read_text(path)?);
    policies.with_table(&text).map_err(|error| Failure::work(printable_path(path), error))
}

/// Checks that the file at `path` can be written, before the work whose result it receives.
pub fn check_output_path(path: Option<&Path>) -> Result<(), Failure> {
    let Some(path) = path else { return Ok(()) };
    if model_source::is_model(path) {
        return Err(Failure::work(
            printable_path(path),
            "is a model, which would be replaced: choose another name",
        ));
    }
    check_writable(path)
}

fn check_writable(path: &Path) -> Result<(), Failure> {
    kvant::files::check_target(path).map_err(|error| Failure::work(printable_path(path), error))
}

/// Rejects an output path that is the source model at `from` or the weights of another folder.
pub fn check_model_output_path(path: &Path, from: Option<&Path>) -> Result<(), Failure> {
    let real = |path: &Path| path.canonicalize().ok();
    let is_same = from.is_some_and(|from| real(from).is_some_and(|from| real(path) == Some(from)));
    let refusal = |why: &str| Failure::work(printable_path(path), why);
    if is_same {
        return Err(refusal("is the source model: choose another name"));
    }
    if model_source::is_safetensors(path) {
        return Err(refusal("holds weights of a folder, which would be replaced: choose another name"));
    }
    check_writable(path)
}

/// Maximum size of a text file, in bytes; bounds endless inputs such as devices.
const MAX_TEXT: u64 = 256 << 20;

/// Reads a prompt from a file or stdin as llama.cpp does: strips the last line break and a leading
/// byte order mark, which editors write.
pub fn read_prompt(path: &Path) -> Result<String, Failure> {
    let mut text = strip_bom(read_text(path)?);
    if text.ends_with('\n') {
        text.truncate(text.len() - if text.ends_with("\r\n") { 2 } else { 1 });
    }
    Ok(text)
}

/// Returns `text` without its byte order mark.
pub fn strip_bom(text: String) -> String {
    text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text)
}

/// Reads a text file completely; `-` is stdin.
pub fn read_text(path: &Path) -> Result<String, Failure> {
    let read = |from: &mut dyn Read| {
        let mut bytes = Vec::new();
        from.take(MAX_TEXT + 1).read_to_end(&mut bytes).map(|_| bytes)
    };
    let bytes = match path == Path::new("-") {
        true => read(&mut std::io::stdin().lock()),
        // A pipe is accepted: shells pass process substitution as one.
        false => File::open(path).and_then(|mut file| read(&mut file)),
    };
    let bytes = bytes.map_err(|error| Failure::work(printable_path(path), error))?;
    if bytes.len() as u64 > MAX_TEXT {
        let message = format!("expected at most {} of text, got more", output::bytes(MAX_TEXT as usize));
        return Err(Failure::work(printable_path(path), message));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::work(printable_path(path), format!("expected UTF-8 text, got another byte at offset {at}"))
    })
}

/// Returns the value of an environment variable, unless it is empty. Used for flags that others
/// override: clap would take the variable even where an overriding flag is given.
///
/// # Errors
///
/// A value that is not UTF-8: continuing would use another model or prompt than intended.
pub fn from_env(name: &str) -> Result<Option<String>, Failure> {
    let Some(value) = std::env::var_os(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let refused = |value: OsString| {
        Failure::Usage(format!("{name}: expected UTF-8 text, got {}", printable_path(Path::new(&value))))
    };
    value.into_string().map(Some).map_err(refused)
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

pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a number from 1 up".to_owned()),
    }
}

/// A KV type; `None` leaves the choice to Kvant.
#[derive(Debug, Clone, Copy)]
struct KvTypeArg(Option<DType>);

/// Parses a KV type, or `auto`.
fn kv_type_or_auto(text: &str) -> Result<KvTypeArg, String> {
    let named = if text == "auto" { None } else { Some(kv_type(text)?) };
    Ok(KvTypeArg(named))
}

/// Parses a KV type.
pub fn kv_type(text: &str) -> Result<DType, String> {
    let names = || DType::KV.map(DType::name).join(" ");
    match text.parse::<DType>() {
        Ok(dtype) if dtype.is_kv() => Ok(dtype),
        _ => Err(format!("not a KV type; known: {}", names())),
    }
}

pub fn policies(text: &str) -> Result<Policies, String> {
    text.parse().map_err(|error: kvant::KvError| error.to_string())
}

/// Parses a number of layers; `all`, and llama.cpp's `auto` and -1, give more than any model has.
fn layers(text: &str) -> Result<usize, String> {
    if ["all", "auto", "-1"].contains(&text) {
        Ok(usize::MAX)
    } else {
        text.parse().map_err(|_| "expected a number or all".to_owned())
    }
}

/// Parses a device name.
pub fn device(text: &str) -> Result<DeviceChoice, String> {
    text.parse().map_err(|_| "expected auto, cpu, cuda:N or wgpu:N".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_layers_have_several_spellings() {
        for all in ["all", "auto", "-1"] {
            assert_eq!(layers(all), Ok(usize::MAX));
        }
        assert_eq!(layers("7"), Ok(7));
        assert!(layers("-2").is_err() && layers("").is_err());
    }
}
