//! A loaded model: weights on a device, tokenizer and chat template.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread;

use kvant_backend::{DeviceInfo, KernelChoice};
use kvant_codec::DType;
use kvant_cpu::PrefillPrecision;
use kvant_generate::constraint::ConstraintCompiler;
use kvant_generate::sampler::{Sampler, SamplerParams, SequenceBreakers};
use kvant_generate::sampling_defaults::SamplingDefaults;
use kvant_generate::speculative::MAX_DRAFT_TOKENS;
use kvant_gguf::{Gguf, printable_path};
use kvant_kv::{BlockKey, KvGuard, Plan};
use kvant_model::encoder::EncoderConfig;
use kvant_model::{Config, DraftHeadConfig, InputStatistics, LayerRange, Lora, ModelError};
use kvant_text::chat::{ChatTemplate, TemplateError};
use kvant_text::tokenizer::Tokenizer;
use xxhash_rust::xxh3::xxh3_128;

use crate::bundled::POCKET;
use crate::devices::{self, DeviceList, Placement};
use crate::encoder::TextEncoder;
use crate::error::Error;
use crate::lora_file::LoraFile;
use crate::media::MediaModel;
use crate::runtime::{LoadedModel, Sequence};
use crate::session::{KvOptions, Session, SessionOptions};
use crate::{draft, fingerprint, kv_guard};

mod memory;

/// How to load a model.
#[derive(Default)]
pub struct OpenOptions<'a> {
    /// The device; or several, each with the weights and caches of its layers, in their order.
    pub device: DeviceList,
    /// Layers on the GPU, counted from the last, with the output matrix; the CPU computes the
    /// layers before them. All layers when `None` or larger than the layer count. Several GPUs
    /// share them.
    pub n_gpu_layers: Option<usize>,
    /// Share of the layers for each device, above 0; each gets at least one layer. Empty: in
    /// proportion to the free memory.
    pub layer_split: Vec<f32>,
    /// Worker threads, which several CPU devices share; all cores when `None`.
    pub n_threads: Option<usize>,
    /// Type to which weight matrices are converted on load (the next best type where rows are not
    /// whole blocks of it); the file's types when `None`.
    pub weights: Option<DType>,
    /// Keeps experts in the mapped file and repacks them in each step that routes to them. Memory
    /// for the rest of the model suffices, but a decoded token takes at least ten times as long.
    /// CPU only, and not together with `weights`.
    pub maps_experts: bool,
    /// Arithmetic of prefill GEMMs. bf16 needs a CPU with a matrix unit, or bf16 products on 64-bit
    /// ARM, and all layers on that CPU.
    pub prefill_precision: PrefillPrecision,
    /// Loads the multi-token prediction (MTP) layer where the file has one. It
    /// [drafts](crate::GenerateOptions::draft_max) tokens where prompt lookup expects fewer. It
    /// takes memory, also in the KV cache, and the time of one layer in prefill. On the CPU and
    /// CUDA.
    pub mtp: bool,
    /// The file of a smaller model with the same vocabulary, or of an EAGLE-3 draft head of this
    /// model (see [`open_file`]). It [drafts](crate::GenerateOptions::draft_max) tokens where
    /// prompt lookup expects fewer, and replaces the MTP layer. It runs on the same device, with
    /// its weights in the file's types and its own KV cache beside that of each session: q8_0, for
    /// a head f16. On the CPU and CUDA.
    pub draft: Option<Arc<Gguf>>,
    /// LoRA adapters, applied together.
    pub loras: Vec<LoraFile>,
    /// Receives the inputs of the model's matrices while it runs, to compute an importance matrix
    /// from. CPU only.
    pub input_statistics: Option<Arc<InputStatistics>>,
    /// Compares, while the model runs, attention over the codes of its caches with attention over
    /// the rows that they code: one KV head in one step of 32 ([`Model::kv_guard`]). A sequence
    /// takes memory for some 300 rows of a head, in f32. One CPU only.
    pub kv_guard: bool,
    /// The file of the vision or audio encoder, llama.cpp's `mmproj-*.gguf`: see
    /// [`Model::encode_image`] and [`Model::encode_audio`]. It runs on the CPU.
    pub mmproj: Option<Arc<Gguf>>,
    /// A chat template to use instead of the file's own.
    pub chat_template: Option<String>,
    /// What the file must contain besides weights.
    pub needs: Requirements,
    /// Receives the fraction loaded, from 0 to 1.
    pub progress: Option<&'a mut dyn FnMut(f32)>,
}

/// What a file must contain besides weights. A file that lacks it is rejected before its weights
/// are loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Requirements {
    /// Nothing: the caller uses token ids.
    #[default]
    Nothing,
    /// A tokenizer.
    Tokenizer,
    /// A tokenizer; a chat template is optional, but must be usable.
    NoBadTemplate,
    /// A tokenizer and a chat template.
    ChatTemplate,
}

/// A loaded model, which creates sessions. Clones share the weights.
#[derive(Clone)]
pub struct Model {
    inner: Arc<Inner>,
}

struct Inner {
    loaded: Arc<dyn LoadedModel>,
    draft: Option<Model>,
    media: Option<MediaModel>,
    guard: Option<Arc<KvGuard>>,
    /// The model itself where it is a text encoder.
    encoder: Option<Arc<TextEncoder>>,
    gguf: Arc<Gguf>,
    /// The tokenizer and the chat template, or why the file has no usable one: such a model still
    /// runs on token ids.
    tokenizer: Result<Arc<Tokenizer>, String>,
    template: Result<ChatTemplate, TemplateError>,
    weights: Option<DType>,
    loras: Vec<LoraFile>,
    maps_experts: bool,
    prefill_precision: PrefillPrecision,
    fingerprint: OnceLock<String>,
    /// Compiler of constraints, created at first use.
    compiler: OnceLock<ConstraintCompiler>,
}

/// Opens a model without loading its weights: a GGUF file (any shard of a split one), or a Hugging
/// Face folder, presented as GGUF.
///
/// # Errors
/// A malformed GGUF file, or a folder that cannot be converted.
pub fn open_file(path: impl AsRef<Path>) -> Result<Gguf, Error> {
    let path = path.as_ref();
    if path.is_dir() { Ok(kvant_hf::open(path)?) } else { Ok(Gguf::open(path)?) }
}

impl Model {
    /// Loads a GGUF file (any shard of a split one), or a Hugging Face folder, on all cores.
    ///
    /// # Errors
    /// A malformed GGUF file, a folder that cannot be converted, an unsupported architecture or
    /// type.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_with(path, OpenOptions::default())
    }

    /// Loads a GGUF file, or a Hugging Face folder.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_with(path: impl AsRef<Path>, options: OpenOptions<'_>) -> Result<Self, Error> {
        Self::from_gguf(open_file(path)?, options)
    }

    /// Loads the model that is built into this library.
    ///
    /// # Errors
    /// When the device cannot be opened.
    pub fn bundled(options: OpenOptions<'_>) -> Result<Self, Error> {
        Self::from_gguf(Self::bundled_file()?, options)
    }

    /// Returns the file of the model that is built into this library.
    ///
    /// # Errors
    /// Never, unless the library itself is damaged.
    pub fn bundled_file() -> Result<Gguf, Error> {
        Ok(Gguf::from_bytes(POCKET)?)
    }

    /// Loads a model from a parsed file.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn from_gguf(gguf: impl Into<Arc<Gguf>>, options: OpenOptions<'_>) -> Result<Self, Error> {
        let gguf = gguf.into();
        if EncoderConfig::is_encoder(&gguf) {
            return Self::open_encoder(gguf, options);
        }
        let mut config = Config::from_gguf(&gguf)?;
        let (statistics, text) = join(
            || config.weight_statistics(&gguf).map(Arc::new),
            || load_text(&gguf, options.chat_template.as_deref(), options.needs),
        );
        config.statistics = statistics.as_ref().ok().cloned();
        let (tokenizer, template) = text?;
        let mut ignore = |_| ();
        let progress = options.progress.unwrap_or(&mut ignore);
        let weights = options.weights.map(weight_type).transpose()?;
        if options.maps_experts {
            check_mapped(&config, weights)?;
        }
        if let Some(draft) = &options.draft {
            draft::check_vocabulary(&gguf, draft)?;
        }
        let has_draft = options.draft.is_some();
        let (draft_head, draft) = match options.draft {
            Some(file) if DraftHeadConfig::is_head(&file) => (Some(file), None),
            draft => (None, draft),
        };
        let has_draft_head = draft_head.is_some();
        let loras = options.loras.iter().map(|LoraFile { file, strength, .. }| {
            let name = || file.path().map_or_else(|| "(memory)".to_owned(), printable_path);
            let lora = Lora::new(Arc::clone(file), *strength, &gguf);
            lora.map_err(|source| Error::Lora { name: name(), source })
        });
        let guard = if options.kv_guard { Some(kv_guard::new(&config)?) } else { None };
        let placement = Placement {
            devices: options.device,
            n_gpu_layers: options.n_gpu_layers,
            layer_split: options.layer_split,
            weights,
            maps_experts: options.maps_experts,
            mtp: options.mtp && !has_draft,
            prefill_precision: options.prefill_precision,
            loras: loras.collect::<Result<_, Error>>()?,
            input_statistics: options.input_statistics,
            draft_head,
            kv_guard: guard.clone(),
        };
        let bytes = [Some(&gguf), draft.as_ref()].map(|file| file.map_or(0, |file| file.file_bytes()));
        let share = bytes[0] as f32 / bytes.iter().sum::<u64>() as f32;
        let load_media = |file: Arc<Gguf>| {
            let (devices, n_gpu_layers) = (&placement.devices, placement.n_gpu_layers);
            let exact = PrefillPrecision::Exact;
            let device = devices::encoders::open(devices, n_gpu_layers, options.n_threads, exact)?;
            MediaModel::load(&file, &*device, &config)
        };
        let media = options.mmproj.map(load_media).transpose()?;
        let mut on_progress = |done: f32| progress(done * share);
        // Errors of loading come first: they name the faulty tensor.
        let loaded = devices::load(placement, options.n_threads, config, &gguf, &mut on_progress)?;
        statistics?;
        if has_draft_head {
            draft::check_device(&loaded.properties().info)?;
        }
        let mut on_progress = |done: f32| progress(share + done * (1.0 - share));
        let draft = match draft {
            Some(file) => Some(Self::as_draft(draft::load(&*loaded, &file, &mut on_progress)?, file)),
            None => None,
        };
        Ok(Self {
            inner: Arc::new(Inner {
                loaded,
                draft,
                media,
                guard,
                encoder: None,
                gguf,
                tokenizer,
                template,
                weights,
                loras: options.loras,
                maps_experts: options.maps_experts,
                prefill_precision: options.prefill_precision,
                fingerprint: OnceLock::new(),
                compiler: OnceLock::new(),
            }),
        })
    }

    /// Loads a text encoder.
    fn open_encoder(gguf: Arc<Gguf>, options: OpenOptions<'_>) -> Result<Self, Error> {
        if options.needs == Requirements::ChatTemplate {
            let arch = gguf.meta().get::<&str>("general.architecture")?.to_owned();
            return Err(ModelError::TextEncoder { arch }.into());
        }
        let (tokenizer, template) = load_text(&gguf, options.chat_template.as_deref(), options.needs)?;
        let weights = options.weights.map(weight_type).transpose()?;
        let encoder = Arc::new(TextEncoder::load(&gguf, &options)?);
        if let Some(progress) = options.progress {
            progress(1.0);
        }
        Ok(Self {
            inner: Arc::new(Inner {
                loaded: Arc::clone(&encoder) as Arc<dyn LoadedModel>,
                draft: None,
                media: None,
                guard: None,
                encoder: Some(encoder),
                gguf,
                tokenizer,
                template,
                weights,
                loras: Vec::new(),
                maps_experts: false,
                prefill_precision: options.prefill_precision,
                fingerprint: OnceLock::new(),
                compiler: OnceLock::new(),
            }),
        })
    }

    /// Wraps a draft model, which only proposes token ids.
    fn as_draft(loaded: Arc<dyn LoadedModel>, gguf: Arc<Gguf>) -> Self {
        Self {
            inner: Arc::new(Inner {
                loaded,
                draft: None,
                media: None,
                guard: None,
                encoder: None,
                gguf,
                tokenizer: Err("none: a draft model shares that of its target".to_owned()),
                template: Err(TemplateError::Missing),
                weights: None,
                loras: Vec::new(),
                maps_experts: false,
                prefill_precision: PrefillPrecision::Exact,
                fingerprint: OnceLock::new(),
                compiler: OnceLock::new(),
            }),
        }
    }

    /// Loads the kernels of sessions with caches of `kv`, on all cores, where the device would load
    /// each at its first use (CUDA). Returns how many there are: 0 on other devices.
    ///
    /// # Errors
    /// When `kv` does not fit this model, or a kernel cannot be loaded.
    pub fn warm_up(&self, kv: &KvOptions) -> Result<usize, Error> {
        if self.inner.encoder.is_some() {
            return Ok(0);
        }
        self.inner.loaded.warm_up(&kv.plan(&self.config().kv_shape())?)
    }

    /// Creates a session with an empty cache.
    ///
    /// # Errors
    /// When the options do not fit this model or memory runs out.
    pub fn session(&self, options: SessionOptions) -> Result<Session, Error> {
        Session::new(self.clone(), options)
    }

    /// Returns the guard of the caches, if [requested](OpenOptions::kv_guard).
    pub fn kv_guard(&self) -> Option<&KvGuard> {
        self.inner.guard.as_deref()
    }

    /// Returns the hyper-parameters.
    pub fn config(&self) -> &Config {
        &self.inner.loaded.properties().config
    }

    /// Returns the file's metadata and tensors.
    pub fn gguf(&self) -> &Gguf {
        &self.inner.gguf
    }

    /// Returns the sampling defaults of the model's authors, as far as the file has them.
    ///
    /// # Errors
    /// A setting that is not a number.
    pub fn recommended(&self) -> Result<SamplingDefaults, Error> {
        Ok(SamplingDefaults::from_gguf(&self.inner.gguf)?)
    }

    /// Returns the vocabulary size.
    pub fn n_vocab(&self) -> usize {
        self.inner.loaded.properties().n_vocab
    }

    /// Returns the bytes of weights in the file's types, including a [draft
    /// model](OpenOptions::draft) and a [vision or audio encoder](OpenOptions::mmproj).
    pub fn weight_bytes(&self) -> usize {
        let beside =
            self.draft().map_or(0, Self::weight_bytes) + self.media().map_or(0, MediaModel::weight_bytes);
        self.inner.loaded.properties().weight_bytes + beside
    }

    /// Returns the bytes of weights that stay in the mapped file, and how many of them one decoded
    /// token reads.
    pub fn mapped_bytes(&self) -> [usize; 2] {
        if !self.inner.maps_experts {
            return [0; 2];
        }
        LayerRange::whole(self.config().layers.len()).expert_bytes(&self.inner.gguf, self.config())
    }

    /// Returns the model's fingerprint, 32 hexadecimal digits: a hash of every byte of every
    /// tensor, the hyper-parameters, the vocabulary and the chat template. The first call reads the
    /// whole model, unless the user's cache folder has the fingerprint of its files.
    pub fn fingerprint(&self) -> &str {
        let find = || fingerprint::find(&self.inner.gguf, kvant_files::cache_folder().as_deref());
        self.inner.fingerprint.get_or_init(find)
    }

    /// Returns the type to which weight matrices were converted on load; `None` for the file's
    /// types.
    pub fn weights(&self) -> Option<DType> {
        self.inner.weights
    }

    /// Returns a [`fingerprint`](Self::fingerprint) that also covers the converted weight type, the
    /// LoRA adapters and bf16 prefill: results are interchangeable only where it is equal.
    pub fn compute_fingerprint(&self) -> String {
        let folder = kvant_files::cache_folder();
        let loras = self.inner.loras.iter().map(|LoraFile { file, strength, .. }| {
            format!(" and {strength} of {}", fingerprint::find(file, folder.as_deref()))
        });
        let weights = self.inner.weights.map(|dtype| format!(" as {dtype}"));
        let math = Some(self.inner.prefill_precision).filter(|&math| math != PrefillPrecision::Exact);
        let math = math.map(|math| format!(" with prompts in {math}"));
        let others: String = weights.into_iter().chain(loras).chain(math).collect();
        match self.fingerprint() {
            file if others.is_empty() => file.to_owned(),
            file => format!("{:032x}", xxh3_128(format!("{file}{others}").as_bytes())),
        }
    }

    /// Returns the model's LoRA adapters.
    pub fn loras(&self) -> &[LoraFile] {
        &self.inner.loras
    }

    /// Returns the default LoRA scale of each adapter.
    pub fn lora_scales(&self) -> Vec<f32> {
        self.loras().iter().map(|lora| lora.strength).collect()
    }

    /// Returns the key that precedes the first cache block of a sequence. Blocks are only looked up
    /// within one loaded model, so the plan, the RoPE variant, the LoRA scales and the owner are
    /// all that distinguishes them.
    pub(crate) fn prefix_root(&self, sequence: &Sequence, owner: Option<&str>) -> BlockKey {
        let plan = sequence.plan();
        // Formatting thousands of factors as digits would take longer than the TTFT of a short
        // prompt.
        let balance: Vec<u8> = plan
            .channel_scales
            .iter()
            .flat_map(|balance| balance.values())
            .flat_map(f32::to_le_bytes)
            .collect();
        let stored = Plan { notes: Vec::new(), channel_scales: None, ..plan.clone() };
        let uses_long_rope = self.config().uses_long_rope(sequence.n_ctx());
        let stored = format!("{stored:?}, turned long: {uses_long_rope}, {:?}", sequence.lora_scales());
        let parts = [Some(stored.as_bytes()), Some(&balance[..]), owner.map(str::as_bytes)];
        BlockKey::root(&parts.into_iter().flatten().collect::<Vec<_>>())
    }

    /// Returns the number of parameters.
    pub fn n_params(&self) -> usize {
        self.inner.gguf.tensors().iter().map(|info| info.elements()).sum()
    }

    /// Returns the bytes of weights that one decoded token reads.
    pub fn weight_bytes_per_token(&self) -> usize {
        self.inner.loaded.properties().weight_bytes_per_token
    }

    /// Returns the device the model runs on and the kernels it uses.
    pub fn device(&self) -> DeviceInfo {
        self.inner.loaded.properties().info.clone()
    }

    /// Returns the default maximum of draft tokens: as many as the device verifies in a
    /// batch-invariant step, so that speculation does not change the output.
    pub fn max_draft_tokens(&self) -> usize {
        MAX_DRAFT_TOKENS.min(self.batch_invariant_rows().saturating_sub(1))
    }

    /// Returns the maximum number of rows of a step with draft tokens. Where no step is
    /// batch-invariant, speculation was requested all the same and has no other limit.
    pub(crate) fn max_verify_rows(&self) -> usize {
        match self.max_draft_tokens() {
            0 => 1 + MAX_DRAFT_TOKENS,
            drafts => 1 + drafts,
        }
    }

    fn batch_invariant_rows(&self) -> usize {
        self.inner.loaded.properties().info.batch_invariant_rows
    }

    /// Returns whether a drafter besides prompt lookup is loaded: an MTP layer
    /// ([`OpenOptions::mtp`]), a draft model or a draft head ([`OpenOptions::draft`]).
    pub fn has_drafter(&self) -> bool {
        self.inner.draft.is_some() || self.inner.loaded.properties().has_draft_head
    }

    /// Returns the draft model: see [`OpenOptions::draft`].
    pub fn draft(&self) -> Option<&Model> {
        self.inner.draft.as_ref()
    }

    /// Returns the kernel of every op and type.
    pub fn kernel_choices(&self) -> Vec<KernelChoice> {
        self.inner.loaded.properties().kernel_choices.clone()
    }

    /// Returns whether every device of the model supports a cache of this type.
    pub fn supports_kv_type(&self, dtype: DType) -> bool {
        let choices = self.kernel_choices();
        let devices =
            |dtype| choices.iter().filter(|choice| choice.op == "attend" && choice.dtype == dtype).count();
        // Every device supports f16.
        devices(dtype) == devices(DType::F16)
    }

    /// Returns the file's tokenizer.
    ///
    /// # Errors
    /// When the file has no tokenizer that this engine supports.
    pub fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.shared_tokenizer().map(AsRef::as_ref)
    }

    fn shared_tokenizer(&self) -> Result<&Arc<Tokenizer>, Error> {
        self.inner.tokenizer.as_ref().map_err(|why| Error::Setting {
            name: "tokenizer",
            expected: "one that this engine can use".to_owned(),
            got: why.clone(),
        })
    }

    /// Compiles DRY sequence breakers for this model's vocabulary.
    ///
    /// # Errors
    /// As [`Model::tokenizer`]; more text than the matcher supports.
    pub fn breakers(&self, texts: Vec<String>) -> Result<SequenceBreakers, Error> {
        Ok(SequenceBreakers::new(texts, Arc::clone(self.shared_tokenizer()?))?)
    }

    /// Creates a sampler with these settings and, where DRY is on, the usual breakers.
    ///
    /// # Errors
    /// As [`Model::breakers`].
    pub fn sampler(&self, params: SamplerParams) -> Result<Sampler, Error> {
        let sampler = Sampler::new(params);
        if !params.dry.is_on() {
            return Ok(sampler);
        }
        Ok(sampler.with_breakers(self.default_breakers()?))
    }

    pub(crate) fn default_breakers(&self) -> Result<SequenceBreakers, Error> {
        self.breakers(SequenceBreakers::DEFAULT.map(str::to_owned).to_vec())
    }

    /// Returns the file's chat template.
    ///
    /// # Errors
    /// [`TemplateError::Missing`] when the file has no template, or why its template is unusable.
    pub fn chat_template(&self) -> Result<&ChatTemplate, Error> {
        self.inner.template.as_ref().map_err(|error| error.clone().into())
    }

    pub(crate) fn media(&self) -> Option<&MediaModel> {
        self.inner.media.as_ref()
    }

    pub(crate) fn encoder(&self) -> Option<&TextEncoder> {
        self.inner.encoder.as_deref()
    }

    pub(crate) fn loaded(&self) -> &Arc<dyn LoadedModel> {
        &self.inner.loaded
    }

    pub(crate) fn compiler(&self) -> &OnceLock<ConstraintCompiler> {
        &self.inner.compiler
    }
}

/// Checks that weights can be converted to this type.
fn weight_type(dtype: DType) -> Result<DType, Error> {
    let error = || Error::Setting {
        name: "weights",
        expected: "a weight type that GGUF files hold".to_owned(),
        got: dtype.name().to_owned(),
    };
    dtype.ggml_id().map(|_| dtype).ok_or_else(error)
}

/// Checks that experts can stay in the file.
fn check_mapped(config: &Config, weights: Option<DType>) -> Result<(), Error> {
    let error = |expected: &str, got: String| {
        Err(Error::Setting { name: "maps_experts", expected: expected.to_owned(), got })
    };
    if config.layers.iter().all(|layer| layer.experts.is_none()) {
        return error("a model with experts", config.family.name.to_owned());
    }
    match weights {
        Some(dtype) => error("weights as the file has them", format!("weights that become {dtype}")),
        None => Ok(()),
    }
}

type TextParts = (Result<Arc<Tokenizer>, String>, Result<ChatTemplate, TemplateError>);

/// Returns the tokenizer and the chat template of a file, or why they are missing; an error where
/// they are needed.
fn load_text(gguf: &Gguf, source: Option<&str>, needs: Requirements) -> Result<TextParts, Error> {
    let tokenizer = match Tokenizer::from_gguf(gguf) {
        Ok(tokenizer) => Arc::new(tokenizer),
        Err(error) if needs != Requirements::Nothing => return Err(error.into()),
        Err(error) => return Ok((Err(error.to_string()), Err(TemplateError::Missing))),
    };
    let template = match source {
        Some(source) => ChatTemplate::for_tokenizer(source, &tokenizer),
        None => ChatTemplate::from_gguf(gguf, &tokenizer),
    };
    match (&template, needs) {
        (Err(TemplateError::Missing), Requirements::NoBadTemplate) => {}
        (Err(error), Requirements::NoBadTemplate | Requirements::ChatTemplate) => {
            return Err(error.clone().into());
        }
        _ => {}
    }
    Ok((Ok(tokenizer), template))
}

/// Runs `first` on a thread beside `second`; sequentially where threads are unavailable, as in a
/// browser.
fn join<A: Send, B>(first: impl Fn() -> A + Send + Sync, second: impl FnOnce() -> B) -> (A, B) {
    thread::scope(|scope| {
        let spawned = thread::Builder::new().spawn_scoped(scope, &first);
        let b = second();
        let a = match spawned {
            Ok(spawned) => spawned.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(_) => first(),
        };
        (a, b)
    })
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("config", self.config()).field("device", &self.device()).finish()
    }
}
