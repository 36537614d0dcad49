//! A loaded model: weights on a device, tokenizer and chat template.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread;

use kvant_backend::{DeviceInfo, KernelChoice};
use kvant_codec::DType;
use kvant_cpu::PromptMath;
use kvant_gguf::{Gguf, printable_path};
use kvant_kv::{BlockKey, Plan};
use kvant_model::{Config, Lora, Part};
use kvant_text::chat::{ChatTemplate, TemplateError};
use kvant_text::guess::MOST_GUESSES;
use kvant_text::recommended::Recommended;
use kvant_text::sampler::{Breakers, Sampler, SamplerParams};
use kvant_text::tokenizer::Tokenizer;
use xxhash_rust::xxh3::xxh3_128;

use crate::device::{self, DeviceChoice, Placement};
use crate::picture::Sight;
use crate::runtime::{Loaded, Sequence};
use crate::{Error, Session, SessionOptions, draft, fingerprint};

/// Our own small model, for the first minute and for tests.
pub(crate) static POCKET: &[u8] = include_bytes!("../assets/pocket-q8_0.gguf");

/// How to load a model.
#[derive(Default)]
pub struct OpenOptions<'a> {
    /// The device to run on.
    pub device: DeviceChoice,
    /// How many layers a GPU takes, the last ones, with the output matrix; the CPU takes those before. All of them
    /// when `None` or more than there are.
    pub n_gpu_layers: Option<usize>,
    /// Threads to work with; all cores when `None`.
    pub n_threads: Option<usize>,
    /// What weight matrices become while they are loaded (where rows are no whole blocks of it, the next best type); as the
    /// file has them when `None`.
    pub weights: Option<DType>,
    /// Experts stay in the mapped file and are laid out for each step that chooses them: memory for the rest of the model is enough,
    /// and a token of an answer takes ten times as long, or more. On the CPU, and not with another type for the weights.
    pub maps_experts: bool,
    /// What products of many rows are computed in. bf16 takes a CPU with a matrix unit, or with products of bf16 on 64-bit
    /// ARM, and all layers there.
    pub prompt_math: PromptMath,
    /// Loads the layer that predicts the token after the next (multi-token prediction), where the file has one: what it predicts is
    /// [guessed](crate::GenerateOptions::draft_max) where the text promises less. It takes memory, of the cache too, and a layer's time of a prompt. On the CPU.
    pub mtp: bool,
    /// The file of a smaller model of the same vocabulary (see [`open_file`]): what it says is [guessed](crate::GenerateOptions::draft_max)
    /// where the text promises less, and no layer predicts then. It has the device, its weights as they are, and a cache of its own beside each
    /// session's, in q8_0. On the CPU.
    pub draft: Option<Arc<Gguf>>,
    /// Adapters that change the model's matrices, all of them together.
    pub loras: Vec<LoraFile>,
    /// The file of the tower that makes tokens of pictures, `mmproj-*.gguf` of llama.cpp: see [`Model::look`]. It runs on the CPU.
    pub mmproj: Option<Arc<Gguf>>,
    /// A chat template to use instead of the file's own.
    pub chat_template: Option<String>,
    /// What the file must have besides its weights.
    pub needs: Needs,
    /// Told the fraction loaded, from 0 to 1.
    pub progress: Option<&'a mut dyn FnMut(f32)>,
}

/// A low-rank adapter (LoRA, arXiv 2106.09685): what training has added to some matrices of a model.
#[derive(Clone)]
pub struct LoraFile {
    /// What it is called.
    pub name: String,
    /// The file (see [`open_lora`]): GGUF as `convert_lora_to_gguf.py` writes it, or a folder of PEFT.
    pub file: Arc<Gguf>,
    /// How much of it is added: 1 is what it was trained to.
    pub strength: f32,
}

impl LoraFile {
    /// So much of the adapter in a file, called as that without `.gguf`, or as its folder; nothing where it is in memory.
    pub fn new(file: impl Into<Arc<Gguf>>, strength: f32) -> Self {
        let file = file.into();
        let is_gguf =
            |path: &Path| path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
        let name =
            file.path().and_then(|path| if is_gguf(path) { path.file_stem() } else { path.file_name() });
        let name = name.map_or_else(String::new, |name| printable_path(Path::new(name)));
        Self { name, file, strength }
    }
}

/// What a file must have besides weights; it is refused before they are loaded if it has not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Needs {
    /// Nothing: token numbers are enough.
    #[default]
    Nothing,
    /// A tokenizer.
    Tokenizer,
    /// A tokenizer, and no chat template that cannot be used.
    NoBadTemplate,
    /// A tokenizer and a chat template.
    ChatTemplate,
}

/// A model, ready to make sessions. Clones share the weights.
#[derive(Clone)]
pub struct Model {
    inner: Arc<Inner>,
}

struct Inner {
    loaded: Arc<dyn Loaded>,
    draft: Option<Model>,
    sight: Option<Sight>,
    gguf: Arc<Gguf>,
    /// The vocabulary and the template, or why the file has none that can be used: a model without them still
    /// runs on token numbers.
    tokenizer: Result<Arc<Tokenizer>, String>,
    template: Result<ChatTemplate, TemplateError>,
    weights: Option<DType>,
    loras: Vec<LoraFile>,
    maps_experts: bool,
    prompt_math: PromptMath,
    fingerprint: OnceLock<String>,
}

/// What a model is before its weights are loaded: a GGUF file (any shard of a split one), or a Hugging Face folder, described as one.
///
/// # Errors
/// A file that is not a sound GGUF, or a folder that is not converted.
pub fn open_file(path: impl AsRef<Path>) -> Result<Gguf, Error> {
    let path = path.as_ref();
    if path.is_dir() { Ok(kvant_hf::open(path)?) } else { Ok(Gguf::open(path)?) }
}

/// An adapter of the model in `base` before it is loaded: a GGUF file, or a folder as PEFT saves it, described as one.
///
/// # Errors
/// A file that is not a sound GGUF, or a folder that is not converted.
pub fn open_lora(path: impl AsRef<Path>, base: &Gguf) -> Result<Gguf, Error> {
    let path = path.as_ref();
    if path.is_dir() { Ok(kvant_hf::open_adapter(path, base)?) } else { Ok(Gguf::open(path)?) }
}

impl Model {
    /// Loads a GGUF file (any shard of a split one), or a Hugging Face folder, on all cores.
    ///
    /// # Errors
    /// A file that is not a sound GGUF, a folder that is not converted, an architecture or a type this engine does not run.
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

    /// The model that is built into this library.
    ///
    /// # Errors
    /// When the device cannot be opened.
    pub fn bundled(options: OpenOptions<'_>) -> Result<Self, Error> {
        Self::from_gguf(Self::bundled_file()?, options)
    }

    /// The file of the model that is built into this library.
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
        let mut config = Config::from_gguf(&gguf)?;
        let (statistics, text) = beside(
            || config.weight_statistics(&gguf).map(Arc::new),
            || text_side(&gguf, options.chat_template.as_deref(), options.needs),
        );
        config.statistics = statistics.as_ref().ok().cloned();
        let (tokenizer, template) = text?;
        let mut silent = |_| ();
        let progress = options.progress.unwrap_or(&mut silent);
        let weights = options.weights.map(weight_type).transpose()?;
        if options.maps_experts {
            check_mapped(&config, weights)?;
        }
        if let Some(draft) = &options.draft {
            draft::check_vocabulary(&gguf, draft)?;
        }
        let loras = options.loras.iter().map(|LoraFile { file, strength, .. }| {
            let name = || file.path().map_or_else(|| "(memory)".to_owned(), printable_path);
            let lora = Lora::new(Arc::clone(file), *strength, &gguf);
            lora.map_err(|source| Error::Lora { name: name(), source })
        });
        let placement = Placement {
            device: options.device,
            n_gpu_layers: options.n_gpu_layers,
            weights,
            maps_experts: options.maps_experts,
            mtp: options.mtp && options.draft.is_none(),
            prompt_math: options.prompt_math,
            loras: loras.collect::<Result<_, Error>>()?,
        };
        let bytes =
            [Some(&gguf), options.draft.as_ref()].map(|file| file.map_or(0, |file| file.file_bytes()));
        let share = bytes[0] as f32 / bytes.iter().sum::<u64>() as f32;
        let sight = options.mmproj.map(|file| Sight::load(&file, options.n_threads, &config)).transpose()?;
        let mut tell = |done: f32| progress(done * share);
        // Loading says better what is wrong with a tensor.
        let loaded = device::load(placement, options.n_threads, config, &gguf, &mut tell)?;
        statistics?;
        let mut tell = |done: f32| progress(share + done * (1.0 - share));
        let draft = match options.draft {
            Some(file) => Some(Self::drafting(draft::load(&*loaded, &file, &mut tell)?, file)),
            None => None,
        };
        Ok(Self {
            inner: Arc::new(Inner {
                loaded,
                draft,
                sight,
                gguf,
                tokenizer,
                template,
                weights,
                loras: options.loras,
                maps_experts: options.maps_experts,
                prompt_math: options.prompt_math,
                fingerprint: OnceLock::new(),
            }),
        })
    }

    /// A model that says numbers of tokens to another one.
    fn drafting(loaded: Arc<dyn Loaded>, gguf: Arc<Gguf>) -> Self {
        Self {
            inner: Arc::new(Inner {
                loaded,
                draft: None,
                sight: None,
                gguf,
                tokenizer: Err("none of a draft model".to_owned()),
                template: Err(TemplateError::Missing),
                weights: None,
                loras: Vec::new(),
                maps_experts: false,
                prompt_math: PromptMath::Exact,
                fingerprint: OnceLock::new(),
            }),
        }
    }

    /// A session with an empty cache.
    ///
    /// # Errors
    /// When the options make no sense for this model or memory runs out.
    pub fn session(&self, options: SessionOptions) -> Result<Session, Error> {
        Session::new(self.clone(), options)
    }

    /// The hyper-parameters.
    pub fn config(&self) -> &Config {
        self.inner.loaded.config()
    }

    /// The file's metadata and tensors.
    pub fn gguf(&self) -> &Gguf {
        &self.inner.gguf
    }

    /// How its makers would draw tokens, where the file says.
    ///
    /// # Errors
    /// A setting that is no number.
    pub fn recommended(&self) -> Result<Recommended, Error> {
        Ok(Recommended::from_gguf(&self.inner.gguf)?)
    }

    /// Size of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.inner.loaded.n_vocab()
    }

    /// Bytes of weights, in the file's types, those of a [draft model](OpenOptions::draft) and of a [tower](OpenOptions::mmproj) among them.
    pub fn weight_bytes(&self) -> usize {
        let beside = self.draft().map_or(0, Self::weight_bytes) + self.sight().map_or(0, Sight::weight_bytes);
        self.inner.loaded.weight_bytes() + beside
    }

    /// Bytes of those weights that stay in the mapped file, and of these, what one decoded token reads.
    pub fn mapped_bytes(&self) -> [usize; 2] {
        if !self.inner.maps_experts {
            return [0; 2];
        }
        Part::whole(self.config().layers.len()).expert_bytes(&self.inner.gguf, self.config())
    }

    /// A number that tells models apart, 32 hexadecimal digits: over every byte of every tensor, the hyper-parameters, the
    /// vocabulary and the chat template. The first call reads the whole model, unless the user's cache folder knows its
    /// files.
    pub fn fingerprint(&self) -> &str {
        let find = || fingerprint::find(&self.inner.gguf, kvant_files::cache_folder().as_deref());
        self.inner.fingerprint.get_or_init(find)
    }

    /// What weight matrices became while they were loaded; `None` where they are as the file has them.
    pub fn weights(&self) -> Option<DType> {
        self.inner.weights
    }

    /// As [`fingerprint`](Self::fingerprint), but another for each type that weights became while they were loaded, for other adapters, and
    /// for prompts in bf16: what was computed with ones is not what others give.
    pub fn computed_by(&self) -> String {
        let folder = kvant_files::cache_folder();
        let loras = self.inner.loras.iter().map(|LoraFile { file, strength, .. }| {
            format!(" and {strength} of {}", fingerprint::find(file, folder.as_deref()))
        });
        let weights = self.inner.weights.map(|dtype| format!(" as {dtype}"));
        let math = Some(self.inner.prompt_math).filter(|&math| math != PromptMath::Exact);
        let math = math.map(|math| format!(" with prompts in {math}"));
        let others: String = weights.into_iter().chain(loras).chain(math).collect();
        match self.fingerprint() {
            file if others.is_empty() => file.to_owned(),
            file => format!("{:032x}", xxh3_128(format!("{file}{others}").as_bytes())),
        }
    }

    /// The adapters that change its matrices.
    pub fn loras(&self) -> &[LoraFile] {
        &self.inner.loras
    }

    /// How much of each they are changed by where nobody says.
    pub fn lora_strengths(&self) -> Vec<f32> {
        self.loras().iter().map(|lora| lora.strength).collect()
    }

    /// What the first block of the cache of a sequence follows on. Blocks are found in the memory of one loaded model alone, so the plan, how
    /// keys are turned, how much of adapters they are made with and whose they are is all that tells them apart.
    pub(crate) fn block_root(&self, sequence: &Sequence, owner: Option<&str>) -> BlockKey {
        let plan = sequence.plan();
        // Thousands of factors in digits would take longer than the first token of a short prompt.
        let balance: Vec<u8> =
            plan.balance.iter().flat_map(|balance| balance.values()).flat_map(f32::to_le_bytes).collect();
        let stored = Plan { notes: Vec::new(), balance: None, ..plan.clone() };
        let turns_long = self.config().turns_long(sequence.n_ctx());
        let stored = format!("{stored:?}, turned long: {turns_long}, {:?}", sequence.strengths());
        let parts = [Some(stored.as_bytes()), Some(&balance[..]), owner.map(str::as_bytes)];
        BlockKey::root(&parts.into_iter().flatten().collect::<Vec<_>>())
    }

    /// Bytes that the caches of all sessions have allocated together; what several share is counted once.
    pub fn kv_bytes(&self) -> usize {
        self.inner.loaded.pool_bytes()
    }

    /// Bytes that the cache of a session of so many tokens with `plan` allocates: what [`Plan::n_bytes`] says and what a layer that
    /// predicts ([`OpenOptions::mtp`]) or a [draft model](OpenOptions::draft) keeps beside that.
    pub fn kv_bytes_for(&self, plan: &Plan, tokens: usize) -> usize {
        let drafts = self.draft().map_or(0, |draft| {
            let plan = draft::kv_options().plan(&draft.config().kv_shape()).expect("a plan for any model");
            draft.inner.loaded.bytes_for(&plan, tokens.min(draft.config().n_ctx_train))
        });
        self.inner.loaded.bytes_for(plan, tokens).saturating_add(drafts)
    }

    /// Refuses to allocate more than so many bytes for the caches of all sessions together.
    pub fn set_kv_budget(&self, bytes: usize) {
        self.inner.loaded.set_budget(bytes);
    }

    /// Number of parameters.
    pub fn n_params(&self) -> usize {
        self.inner.gguf.tensors().iter().map(|info| info.elements()).sum()
    }

    /// Bytes of weights that one decoded token reads.
    pub fn weight_bytes_per_token(&self) -> usize {
        self.inner.loaded.weight_bytes_per_token()
    }

    /// The device the model runs on and the kernels it uses.
    pub fn device(&self) -> DeviceInfo {
        self.inner.loaded.info()
    }

    /// The most tokens to guess ahead where nobody says: none, unless a row of a step gives the same bits in any company, so that guesses change
    /// nothing.
    pub fn most_guesses(&self) -> usize {
        if self.device().rows_are_independent { MOST_GUESSES } else { 0 }
    }

    /// Whether something says ahead what comes next: a layer of it ([`OpenOptions::mtp`]) or another model ([`OpenOptions::draft`]).
    pub fn predicts(&self) -> bool {
        self.inner.draft.is_some() || self.inner.loaded.predicts()
    }

    /// The model that says ahead what this one may say: see [`OpenOptions::draft`].
    pub fn draft(&self) -> Option<&Model> {
        self.inner.draft.as_ref()
    }

    /// The kernel for every op and type.
    pub fn kernel_choices(&self) -> Vec<KernelChoice> {
        self.inner.loaded.kernel_choices()
    }

    /// Whether every device of the model can keep a cache of this type.
    pub fn stores(&self, dtype: DType) -> bool {
        let choices = self.kernel_choices();
        let devices =
            |dtype| choices.iter().filter(|choice| choice.op == "attend" && choice.dtype == dtype).count();
        // Every device reads f16.
        devices(dtype) == devices(DType::F16)
    }

    /// The file's tokenizer.
    ///
    /// # Errors
    /// When the file has none that this engine can use.
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

    /// Texts that break the repetitions that DRY penalises, in what this model's tokens write.
    ///
    /// # Errors
    /// As [`Model::tokenizer`]; more text than can be looked for.
    pub fn breakers(&self, texts: Vec<String>) -> Result<Breakers, Error> {
        Ok(Breakers::new(texts, Arc::clone(self.shared_tokenizer()?))?)
    }

    /// A sampler with these settings and, where DRY is on, the usual breakers.
    ///
    /// # Errors
    /// As [`Model::breakers`].
    pub fn sampler(&self, params: SamplerParams) -> Result<Sampler, Error> {
        let sampler = Sampler::new(params);
        if !params.dry.is_on() {
            return Ok(sampler);
        }
        Ok(sampler.with_breakers(self.breakers(Breakers::USUAL.map(str::to_owned).to_vec())?))
    }

    /// The file's chat template.
    ///
    /// # Errors
    /// [`TemplateError::Missing`] when it has none, and what is wrong with one that cannot be used.
    pub fn chat_template(&self) -> Result<&ChatTemplate, Error> {
        self.inner.template.as_ref().map_err(|error| error.clone().into())
    }

    pub(crate) fn sight(&self) -> Option<&Sight> {
        self.inner.sight.as_ref()
    }

    pub(crate) fn loaded(&self) -> &Arc<dyn Loaded> {
        &self.inner.loaded
    }
}

/// A type that weights may become.
fn weight_type(dtype: DType) -> Result<DType, Error> {
    let error = || Error::Setting {
        name: "weights",
        expected: "a weight type that GGUF files hold".to_owned(),
        got: dtype.name().to_owned(),
    };
    dtype.ggml_id().map(|_| dtype).ok_or_else(error)
}

/// Whether experts can stay in the file.
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

type TextSide = (Result<Arc<Tokenizer>, String>, Result<ChatTemplate, TemplateError>);

/// The tokenizer and the chat template of a file, or why there is none; refused here if it is needed.
fn text_side(gguf: &Gguf, source: Option<&str>, needs: Needs) -> Result<TextSide, Error> {
    let tokenizer = match Tokenizer::from_gguf(gguf) {
        Ok(tokenizer) => Arc::new(tokenizer),
        Err(error) if needs != Needs::Nothing => return Err(error.into()),
        Err(error) => return Ok((Err(error.to_string()), Err(TemplateError::Missing))),
    };
    let template = match source {
        Some(source) => ChatTemplate::for_tokenizer(source, &tokenizer),
        None => ChatTemplate::from_gguf(gguf, &tokenizer),
    };
    match (&template, needs) {
        (Err(TemplateError::Missing), Needs::NoBadTemplate) => {}
        (Err(error), Needs::NoBadTemplate | Needs::ChatTemplate) => return Err(error.clone().into()),
        _ => {}
    }
    Ok((Ok(tokenizer), template))
}

/// Runs `first` on a thread beside `second`; one after the other where no thread can be had, as in a browser.
fn beside<A: Send, B>(first: impl Fn() -> A + Send + Sync, second: impl FnOnce() -> B) -> (A, B) {
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
