//! Flags that several commands share. They carry the names that llama.cpp users know.

use std::collections::hash_map::RandomState;
use std::ffi::OsString;
use std::fs::File;
use std::hash::BuildHasher;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, ValueEnum};
use kvant::gguf::printable_path;
use kvant::{
    DType, DeviceChoice, Error, GenerateOptions, Gguf, Gpu, KvOptions, LoraFile, Model, Needs, OpenOptions,
    Policies, PromptMath, Recommended, SamplerParams, Session, SessionOptions,
};

use crate::failure::Failure;
use crate::lora::LoraArgs;
use crate::place::{self, PlaceArgs};
use crate::plan::{self, KvPlanArgs, with_policies};
use crate::sight::Sight;
use crate::weight_type::weight_type;
use crate::{log, output, progress};

/// Which model to load, and onto what.
#[derive(Args, Debug, Clone)]
pub struct ModelArgs {
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Threads; all cores when not given
    #[arg(short = 't', long, value_name = "N", env = "KVANT_THREADS", value_parser = positive)]
    pub threads: Option<usize>,
    /// Device to run on: cpu, cuda:N (NVIDIA), wgpu:N (any GPU, through Vulkan, Metal or DX12), or auto: the first usable NVIDIA
    /// GPU, else the CPU
    #[arg(long, value_name = "DEVICE", env = "KVANT_DEVICE", default_value = "auto", value_parser = device)]
    pub device: DeviceChoice,
    /// Convert weights to this type on load (q8_0, q4_K, f16, ...); the file is unchanged. f16 avoids the rounding of activations, so
    /// that eval measures the cache alone
    #[arg(long, value_name = "TYPE", env = "KVANT_WEIGHTS", value_parser = weight_type)]
    pub weights: Option<DType>,
    /// Where experts live: ram, or mmap: they stay in the file and are laid out when a token chooses them (CPU only; less memory, at
    /// least ten times slower)
    #[arg(long, value_name = "WHERE", env = "KVANT_EXPERTS", default_value = "ram")]
    pub experts: ExpertPlace,
    /// Arithmetic of prompts: exact (matches decoding bit for bit) or bf16 (needs a CPU with a bf16 matrix unit; kvant doctor tells)
    #[arg(long, value_name = "MATH", env = "KVANT_PROMPT_MATH", default_value = "exact")]
    pub prompt_math: PromptMathArg,
    /// Run the last N layers on the GPU and the rest on the CPU (-ngl); a number or all [default: all]. Without a usable GPU a note
    /// says so and the CPU runs everything
    #[arg(long, visible_alias = "gpu-layers", value_name = "N", env = "KVANT_N_GPU_LAYERS", value_parser = layers)]
    pub n_gpu_layers: Option<usize>,
    #[command(flatten)]
    pub lora: LoraArgs,
}

/// What a command needs of a model besides its weights.
#[derive(Default)]
pub struct Wanted<'a> {
    pub needs: Needs,
    pub chat_template: Option<String>,
    /// What guesses ahead, for a command that answers.
    pub draft: Option<&'a DraftArgs>,
    /// What looks at pictures.
    pub sight: Option<Sight<'a>>,
}

/// Where experts are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExpertPlace {
    /// In memory, laid out for the kernels
    Ram,
    /// In the file
    Mmap,
}

/// What products of prompts are computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PromptMathArg {
    /// As those of single tokens
    Exact,
    /// Operands rounded to bf16
    Bf16,
}

/// What the KV cache stores.
#[derive(Args, Debug, Clone)]
pub struct CacheArgs {
    /// Tokens of context; 0, the default, is the model's own length
    #[arg(short = 'c', long, value_name = "N", env = "KVANT_CTX_SIZE")]
    pub ctx_size: Option<usize>,
    /// Type of the keys (-ctk): auto f32 f16 bf16 q8_0 q4_0 turbo4 turbo3 turbo2 turbo3t turbo2t [default: f16 if only -ctv is
    /// set, else the plan beside the model (kvant plan), or turbo4]
    #[arg(long, value_name = "TYPE", env = "KVANT_CACHE_TYPE_K", value_parser = kv_type_or_auto)]
    cache_type_k: Option<KvTypeArg>,
    /// Type of the values (-ctv) [default: as for -ctk]
    #[arg(long, value_name = "TYPE", env = "KVANT_CACHE_TYPE_V", value_parser = kv_type_or_auto)]
    cache_type_v: Option<KvTypeArg>,
    /// Rules on top of the types: none, or a comma list of auto-keys:NOISE, auto-asymmetric, boundary:FIRST,LAST, sink:N,
    /// recent:N, alpha:X
    #[arg(long, value_name = "RULES", env = "KVANT_KV_POLICY", default_value_t, value_parser = policies)]
    pub kv_policy: Policies,
    /// Table of types per layer, head and side; lines of 'LAYER HEAD K|V|KV TYPE', * for all
    #[arg(long, value_name = "FILE", env = "KVANT_KV_TYPES")]
    pub kv_types: Option<PathBuf>,
    #[command(flatten)]
    plan: KvPlanArgs,
}

/// How the next token is drawn.
#[derive(Args, Debug, Clone)]
pub struct SamplingArgs {
    /// Random seed; -1 picks one, which the summary names
    #[arg(short = 's', long, value_name = "N", env = "KVANT_SEED", default_value = "-1", value_parser = seed)]
    pub seed: Seed,
    /// Temperature; 0 is greedy. Sampling options that are not set follow the model's recommendation, if it has one [default: 0.8]
    #[arg(long, value_name = "T", env = "KVANT_TEMP")]
    temp: Option<f32>,
    /// Keep the K likeliest tokens; 0 keeps all [default: 40]
    #[arg(long, value_name = "K", env = "KVANT_TOP_K")]
    top_k: Option<usize>,
    /// Keep the likeliest tokens up to this probability together [default: 0.95]
    #[arg(long, value_name = "P", env = "KVANT_TOP_P")]
    top_p: Option<f32>,
    /// Keep tokens at least this likely relative to the likeliest [default: 0.05]
    #[arg(long, value_name = "P", env = "KVANT_MIN_P")]
    min_p: Option<f32>,
    /// Make recent tokens less likely; 1 does nothing [default: 1]
    #[arg(long, value_name = "X", env = "KVANT_REPEAT_PENALTY")]
    repeat_penalty: Option<f32>,
    /// How many of the last tokens count as recent [default: 64]
    #[arg(long, value_name = "N", env = "KVANT_REPEAT_LAST_N")]
    repeat_last_n: Option<usize>,
}

/// How long an answer may be, and how far ahead it is guessed.
#[derive(Args, Debug, Clone)]
pub struct DecodeArgs {
    /// Tokens to generate at most; -1: until the model stops or the context is full
    #[arg(short = 'n', long, value_name = "N", env = "KVANT_PREDICT", default_value_t = -1, allow_negative_numbers = true)]
    predict: i64,
    #[command(flatten)]
    pub draft: DraftArgs,
}

/// How far ahead an answer is guessed.
#[derive(Args, Debug, Clone)]
pub struct DraftArgs {
    /// Guess at most N tokens ahead, from what the text has said before and, where the model has layers for that (MTP) or another one
    /// drafts (-md), from what they predict (speculative decoding); 0 switches it off. The answer is the same either way [default: as
    /// many as pay]
    #[arg(long, value_name = "N", env = "KVANT_DRAFT_MAX")]
    pub draft_max: Option<usize>,
    /// Smaller model of the same vocabulary that says ahead what the model may say (-md), by what -m takes; on the CPU. The answer is
    /// the same with it
    #[arg(long, value_name = "MODEL", env = "KVANT_MODEL_DRAFT")]
    model_draft: Option<String>,
}

impl DecodeArgs {
    /// The options of a generation that draws by `sampler`.
    pub fn options(&self, sampler: SamplerParams) -> Result<GenerateOptions, Failure> {
        let max_tokens = self.max_tokens()?;
        Ok(GenerateOptions { max_tokens, sampler, draft_max: self.draft.draft_max, ignore_eos: false })
    }

    /// The most tokens to generate, if there is such a limit. llama.cpp's -2 is the same as -1 here.
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
    /// Loads the model, with a progress bar where someone watches.
    pub fn open(&self, quiet: bool) -> Result<Model, Failure> {
        self.open_for(quiet, Wanted::default())
    }

    /// The same with exact products of prompts, for what others are compared with.
    pub fn with_exact_prompts(&self) -> Self {
        Self { prompt_math: PromptMathArg::Exact, ..self.clone() }
    }

    /// Loads another model to the same device, as its file has it.
    pub fn open_other(&self, model: &str, quiet: bool) -> Result<Model, Failure> {
        let (place, lora) = (self.place.named(model), LoraArgs::default());
        let other = Self { place, weights: None, lora, ..self.clone() };
        other.open(quiet)
    }

    /// As [`open`](Self::open), for a command that needs more: what is missing is told before the weights are loaded.
    pub fn open_for(&self, quiet: bool, wanted: Wanted<'_>) -> Result<Model, Failure> {
        let Wanted { needs, chat_template, draft, sight } = wanted;
        let place = self.place.place()?;
        let gguf = Arc::new(place.open(&self.place, quiet)?);
        let guesses = draft.filter(|draft| draft.draft_max != Some(0));
        let mtp = guesses.is_some();
        let draft = guesses.and_then(|draft| draft.model_draft.as_ref());
        let draft = draft.map(|name| self.open_file(name, quiet).map(Arc::new)).transpose()?;
        let loras = self.lora.open(self, &gguf, quiet)?;
        let mmproj = sight.map(|sight| sight.open(self, &gguf, quiet)).transpose()?.flatten();
        let started = Instant::now();
        let bar = progress::bar("loading", 100, quiet);
        let mut tell = |share: f32| bar.set_position((share * 100.0) as u64);
        let template = chat_template.clone();
        let options = self.options(loras.clone(), Some(&mut tell));
        let (drafts, sees) = (draft.clone(), mmproj.clone());
        let options =
            OpenOptions { needs, chat_template: template, mtp, draft: drafts, mmproj: sees, ..options };
        let model = match Model::from_gguf(gguf.clone(), options) {
            // Layers were wanted on a GPU that may not be there.
            Err(Error::Device(error)) if self.may_do_without_gpu() && Gpu::open(0).is_err() => {
                log::note(format_args!("-ngl: {error}; all layers are on the CPU"));
                let (device, n_gpu_layers) = (DeviceChoice::Cpu, None);
                let options = self.options(loras, Some(&mut tell));
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
            note_short_draft(draft.config().n_ctx_train, model.config().n_ctx_train);
        }
        let [mapped, read] = model.mapped_bytes();
        if mapped > 0 {
            log::note(format_args!(
                "{} of experts stay in the file, {} are in memory; each token of an answer reads {} there and lays it out, which takes ten times as long as in memory, or more",
                output::bytes(mapped),
                output::bytes(model.weight_bytes() - mapped),
                output::bytes(read),
            ));
        }
        tracing::info!(model = %place, device = %device.name, kernels = %device.kernels, seconds, "model loaded");
        Ok(model)
    }

    /// The file of another model, by what `-m` takes.
    pub fn open_file(&self, model: &str, quiet: bool) -> Result<Gguf, Failure> {
        let place = self.place.named(model);
        place.place()?.open(&place, quiet)
    }

    /// Whether layers for a GPU were asked for, and no certain one.
    fn may_do_without_gpu(&self) -> bool {
        self.device == DeviceChoice::Auto && self.n_gpu_layers.is_some_and(|n| n > 0)
    }

    /// How to load the model, with these adapters.
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
            prompt_math: match self.prompt_math {
                PromptMathArg::Exact => PromptMath::Exact,
                PromptMathArg::Bf16 => PromptMath::Bf16,
            },
            loras,
            progress,
            ..Default::default()
        }
    }

    /// The model's name for a summary, with the type that its weights were given, and adapters.
    pub fn label(&self) -> String {
        let (name, adapters) = (self.name(), self.lora.label());
        let weights = self.weights.map(|dtype| format!(" as {dtype}")).unwrap_or_default();
        format!("{name}{weights}{adapters}")
    }

    /// The model's name.
    pub fn name(&self) -> String {
        self.place.place().map_or_else(|_| String::new(), |place| place.name())
    }
}

/// A draft model whose context is the shorter one is told of.
fn note_short_draft(n_ctx: usize, of: usize) {
    if n_ctx < of {
        log::note(format_args!(
            "-md: it drafts up to {n_ctx} tokens of a conversation, its context, and not beyond"
        ));
    }
}

/// A GPU that is there and cannot be used is told of, with what is missing.
fn note_unused_gpu() {
    if Gpu::count().is_ok_and(|n| n > 0)
        && let Err(error) = Gpu::open(0)
    {
        log::note(format_args!("the GPU is not used: {error}"));
    }
}

impl CacheArgs {
    /// The options of a session.
    pub fn session_options(&self) -> Result<SessionOptions, Failure> {
        Ok(SessionOptions { n_ctx: self.ctx_size.filter(|&n| n > 0), kv: self.kv_options()? })
    }

    /// Says so when the context is longer than what the model was trained on.
    pub fn note_length(&self, session: &Session) {
        let (n_ctx, trained) = (session.n_ctx(), session.model().config().n_ctx_train);
        if n_ctx > trained {
            log::note(format!(
                "-c {n_ctx}: this model was trained on {trained} tokens; what it says beyond may make no sense"
            ));
        }
    }

    /// The types of keys and of values, where they are named.
    fn types(&self) -> [Option<DType>; 2] {
        [self.cache_type_k, self.cache_type_v].map(|given| given.and_then(|KvTypeArg(named)| named))
    }

    /// What the cache stores; reads the type table.
    pub fn kv_options(&self) -> Result<KvOptions, Failure> {
        let mut policies = self.kv_policy.clone();
        if let Some(path) = &self.kv_types {
            policies = with_type_table(policies, path)?;
        }
        let [k, v] = self.types().map(|named| named.unwrap_or(DType::F16));
        Ok(KvOptions { k, v, policies, ..Default::default() })
    }

    /// These options with the plan for `model` that is given, or that lies beside it where no type is named; and where none is,
    /// what was chosen.
    pub fn resolve(&self, mut options: SessionOptions, model: &Model) -> Result<Resolved, Failure> {
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
                    let unnamed = KvOptions::unnamed(&model.config().kv_shape());
                    let asked = self.kv_policy != Policies::default();
                    let policies = if asked { options.kv.policies } else { unnamed.policies };
                    KvOptions { policies, ..unnamed }
                }
            },
        };
        options.kv = self.plan.balanced(options.kv)?;
        Ok(Resolved { options, auto })
    }
}

/// A session's options, and why they are so where nobody named types.
#[derive(Debug, Clone)]
pub struct Resolved {
    pub options: SessionOptions,
    pub auto: Option<String>,
}

impl SamplingArgs {
    /// The sampler's settings without a model's, checked.
    pub fn params(&self) -> Result<SamplerParams, Failure> {
        let params = self.said().or(&SamplerParams { seed: self.seed.number, ..Default::default() });
        params.validate().map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(params)
    }

    /// The sampler's settings, checked, with those that the model recommends where nothing is said: and which those are.
    pub fn params_for(&self, model: &Model) -> Result<(SamplerParams, Option<String>), Failure> {
        let params = self.params()?;
        if self.temp == Some(0.0) {
            // The likeliest token is asked for, and nothing besides.
            return Ok((params, None));
        }
        let taken = model.recommended()?.without(&self.said());
        let params = taken.or(&params);
        params
            .validate()
            .map_err(|error| Failure::work("what the model recommends for drawing tokens", error))?;
        Ok((params, recommended(&taken)))
    }

    fn said(&self) -> Recommended {
        Recommended {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
        }
    }
}

/// What came from a model, for a summary; `None` where nothing did.
fn recommended(taken: &Recommended) -> Option<String> {
    let Recommended { temperature, top_k, top_p, min_p, repeat_penalty, repeat_last_n } = taken;
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

/// Rules, and then the type table in a file.
pub fn with_type_table(policies: Policies, path: &Path) -> Result<Policies, Failure> {
    let text = without_mark(read_text(path)?);
    policies.with_table(&text).map_err(|error| Failure::work(printable_path(path), error))
}

/// Refuses a file that cannot be written, before the work whose result is to go there.
pub fn check_target(path: Option<&Path>) -> Result<(), Failure> {
    let Some(path) = path else { return Ok(()) };
    if place::is_model(path) {
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

/// Refuses what a model made from what lies at `from` cannot be written to: what it is made from, or weights of another folder.
pub fn check_model_target(path: &Path, from: Option<&Path>) -> Result<(), Failure> {
    let real = |path: &Path| path.canonicalize().ok();
    let is_same = from.is_some_and(|from| real(from).is_some_and(|from| real(path) == Some(from)));
    let refusal = |why: &str| Failure::work(printable_path(path), why);
    if is_same {
        return Err(refusal("is what the model would be made from: choose another name"));
    }
    if place::is_safetensors(path) {
        return Err(refusal("holds weights of a folder, which would be replaced: choose another name"));
    }
    check_writable(path)
}

/// The longest text that is read, in bytes: what goes on without end is no text.
const MAX_TEXT: u64 = 256 << 20;

/// A prompt in a file or at stdin, as llama.cpp reads it: without the line break that ends its last line, and without a mark of
/// the order of its bytes, which editors put in front of a text.
pub fn read_prompt(path: &Path) -> Result<String, Failure> {
    let mut text = without_mark(read_text(path)?);
    if text.ends_with('\n') {
        text.truncate(text.len() - if text.ends_with("\r\n") { 2 } else { 1 });
    }
    Ok(text)
}

/// A text without the mark of the order of its bytes.
pub fn without_mark(text: String) -> String {
    text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text)
}

/// A text file's content, every byte of it; `-` is stdin.
pub fn read_text(path: &Path) -> Result<String, Failure> {
    let read = |from: &mut dyn Read| {
        let mut bytes = Vec::new();
        from.take(MAX_TEXT + 1).read_to_end(&mut bytes).map(|_| bytes)
    };
    let bytes = match path == Path::new("-") {
        true => read(&mut std::io::stdin().lock()),
        // A pipe will do: shells hand over what a command writes as one.
        false => File::open(path).and_then(|mut file| read(&mut file)),
    };
    let bytes = bytes.map_err(|error| Failure::work(printable_path(path), error))?;
    if bytes.len() as u64 > MAX_TEXT {
        let most = format!("expected at most {} of text, got more", output::bytes(MAX_TEXT as usize));
        return Err(Failure::work(printable_path(path), most));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::work(printable_path(path), format!("expected UTF-8 text, got another byte at offset {at}"))
    })
}

/// The value of an environment variable, unless it is empty. For flags that others replace: clap takes a variable for a
/// flag that was given beside those.
///
/// # Errors
/// A value that is no UTF-8: another model or prompt than the one that is meant would answer.
pub fn from_env(name: &str) -> Result<Option<String>, Failure> {
    let Some(value) = std::env::var_os(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let refused = |value: OsString| {
        Failure::Usage(format!("{name}: expected UTF-8 text, got {}", printable_path(Path::new(&value))))
    };
    value.into_string().map(Some).map_err(refused)
}

/// The seed of the draws.
#[derive(Debug, Clone, Copy)]
pub struct Seed {
    /// The seed.
    pub number: u64,
    /// Somebody wants this one and no other.
    pub is_chosen: bool,
}

/// A seed; -1 draws one, short enough to be typed again.
fn seed(text: &str) -> Result<Seed, String> {
    let chosen = |number| Seed { number, is_chosen: true };
    match text {
        // Each such state has keys from the system's source of randomness.
        "-1" => {
            let number = RandomState::new().hash_one(()) & u64::from(u32::MAX);
            Ok(Seed { number, is_chosen: false })
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

/// A KV type; none where it is left to Kvant.
#[derive(Debug, Clone, Copy)]
struct KvTypeArg(Option<DType>);

/// Parses a KV type, or `auto`.
fn kv_type_or_auto(text: &str) -> Result<KvTypeArg, String> {
    let named = if text == "auto" { None } else { Some(kv_type(text)?) };
    Ok(KvTypeArg(named))
}

/// Parses a KV type.
pub fn kv_type(text: &str) -> Result<DType, String> {
    let known = || DType::KV.map(DType::name).join(" ");
    match text.parse::<DType>() {
        Ok(dtype) if dtype.is_kv() => Ok(dtype),
        _ => Err(format!("not a KV type; known: {}", known())),
    }
}

pub fn policies(text: &str) -> Result<Policies, String> {
    text.parse().map_err(|error: kvant::KvError| error.to_string())
}

/// A number of layers; `all` is more than any model has, and what llama.cpp writes as `auto` or -1 comes to the same.
fn layers(text: &str) -> Result<usize, String> {
    if ["all", "auto", "-1"].contains(&text) {
        Ok(usize::MAX)
    } else {
        text.parse().map_err(|_| "expected a number or all".to_owned())
    }
}

/// Reads a device by its name.
pub fn device(text: &str) -> Result<DeviceChoice, String> {
    text.parse().map_err(|_| "expected auto, cpu, cuda:N or wgpu:N".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_layers_go_by_several_names() {
        for all in ["all", "auto", "-1"] {
            assert_eq!(layers(all), Ok(usize::MAX));
        }
        assert_eq!(layers("7"), Ok(7));
        assert!(layers("-2").is_err() && layers("").is_err());
    }
}
