//! Encoders: models that embed or rank texts and generate none.
//!
//! An encoder has no KV cache, so its [`LoadedModel`] refuses every sequence; the rest of a
//! [`Model`] (file, tokenizer, fingerprint) is that of any other.

use std::sync::{Arc, Mutex, PoisonError};

use kvant_backend::KernelTime;
use kvant_codec::Side;
use kvant_codec::random::Random;
use kvant_gguf::Gguf;
use kvant_kv::{CacheState, KvShape, Plan};
use kvant_model::encoder::{EncoderConfig, EncoderText};
use kvant_model::{Config, Entry, ModelError, OnQueries, SoftTokens};
use kvant_text::tokenizer::{Special, Tokenizer};

use crate::devices::DeviceChoice;
use crate::devices::encoders::{self, EncodesTexts};
use crate::embed::HiddenStatePool;
use crate::error::Error;
use crate::model::{Model, OpenOptions};
use crate::runtime::{
    BatchEntry, CacheOps, ContextSize, KvCaches, LoadedModel, Logits, Measure, ModelProperties, SequenceId,
    StageTime,
};

/// Rows per batch, unless one text has more: enough to occupy the products of all cores.
const MAX_ROWS: usize = 1024;

/// The encoder of a model, on one device.
pub(crate) struct TextEncoder {
    encoder: Box<dyn EncodesTexts>,
    properties: ModelProperties,
    /// Held while the encoder runs: batches share the threads.
    encoding: Mutex<()>,
    /// Whether a text has a mark before it, and one after it.
    has_marks: [bool; 2],
}

fn setting(name: &'static str, expected: &str, got: impl ToString) -> Error {
    Error::Setting { name, expected: expected.to_owned(), got: got.to_string() }
}

impl TextEncoder {
    /// Loads the encoder in a file.
    pub fn load(gguf: &Gguf, options: &OpenOptions<'_>) -> Result<Self, Error> {
        check_options(options)?;
        let (devices, precision) = (&options.device, options.prefill_precision);
        let device = encoders::open(devices, options.n_gpu_layers, options.n_threads, precision)?;
        let (info, kernel_choices) = (device.info(), device.kernel_choices());
        let encoder = device.load_texts(gguf, options.weights)?;
        let properties = ModelProperties {
            info,
            kernel_choices,
            config: Config::of_encoder(encoder.config()),
            kv_shape: KvShape { layers: Vec::new(), states: Vec::new(), statistics: None },
            n_vocab: encoder.n_vocab(),
            soft_tokens: Arc::new(SoftTokens::new(encoder.n_vocab(), encoder.config().n_embd)),
            weight_bytes: encoder.weight_bytes(),
            weight_bytes_per_token: encoder.weight_bytes(),
            has_draft_head: false,
        };
        let has_mark = |key: &str| Ok::<_, Error>(gguf.meta().find(key)? != Some(false));
        let has_marks =
            [has_mark("tokenizer.ggml.add_bos_token")?, has_mark("tokenizer.ggml.add_eos_token")?];
        Ok(Self { encoder, properties, encoding: Mutex::new(()), has_marks })
    }

    pub fn config(&self) -> &EncoderConfig {
        self.encoder.config()
    }

    pub fn has_classifier(&self) -> bool {
        self.encoder.has_classifier()
    }

    /// Returns the score of a hidden state `[n_embd]` of the first token.
    pub fn score(&self, state: &[f32]) -> Result<f32, Error> {
        let _encoding = self.encoding.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(self.encoder.score(state)?)
    }

    /// Returns the tokens of a text, or of a pair of texts, between the marks of the vocabulary; at
    /// most as many as the model reads. Of a pair, the longer text loses its last tokens.
    pub fn tokens(
        &self,
        tokenizer: &Tokenizer,
        texts: &[&str],
        special: Special<'_>,
    ) -> Result<Vec<u32>, Error> {
        let missing = || setting("tokenizer", "one with marks before and after a text", "none");
        let mark = |id: Option<u32>, is_there| match is_there {
            true => id.ok_or_else(missing).map(Some),
            false => Ok(None),
        };
        let [has_first, has_last] = self.has_marks;
        let (first, last) = (mark(tokenizer.bos(), has_first)?, mark(tokenizer.eos(), has_last)?);
        let n_between = if tokenizer.adds_separator() { 2 } else { 1 };
        let between = last.map_or_else(Vec::new, |last| vec![last; n_between]);
        let mut parts =
            texts.iter().map(|text| tokenizer.encode(text, special, false)).collect::<Result<Vec<_>, _>>()?;
        let n_marks = first.into_iter().chain(last).count() + between.len() * texts.len().saturating_sub(1);
        truncate(&mut parts, self.config().max_tokens.saturating_sub(n_marks));
        let mut tokens = Vec::from_iter(first);
        for (i, part) in parts.into_iter().enumerate() {
            tokens.extend(between.iter().take(if i > 0 { n_between } else { 0 }));
            tokens.extend(part);
        }
        tokens.extend(last);
        Ok(tokens)
    }

    /// Pools each text, from a copy of `empty`. Texts share batches.
    pub fn pooled(&self, texts: &[Vec<u32>], empty: &HiddenStatePool) -> Result<Vec<HiddenStatePool>, Error> {
        let mut all = Vec::with_capacity(texts.len());
        let mut left = texts;
        while !left.is_empty() {
            let mut rows = 0;
            let fits = |text: &&Vec<u32>| {
                rows += text.len();
                rows <= MAX_ROWS
            };
            let n = left.iter().take_while(fits).count().max(1);
            let (batch, rest) = left.split_at(n);
            all.extend(self.batch(batch, empty)?);
            left = rest;
        }
        Ok(all)
    }

    fn batch(&self, texts: &[Vec<u32>], empty: &HiddenStatePool) -> Result<Vec<HiddenStatePool>, Error> {
        // The second text of a pair begins behind the mark of the first.
        let n_first = |tokens: &[u32]| match empty.of_pairs {
            Some(mark) => tokens.iter().position(|&token| token == mark).map_or(tokens.len(), |at| at + 1),
            None => tokens.len(),
        };
        let inputs: Vec<_> =
            texts.iter().map(|tokens| EncoderText { tokens, n_first: n_first(tokens) }).collect();
        let _encoding = self.encoding.lock().unwrap_or_else(PoisonError::into_inner);
        let states = self.encoder.hidden_states(&inputs)?;
        let mut states = states.chunks_exact(self.config().n_embd);
        let pooled = texts.iter().map(|tokens| {
            let mut pooled = empty.clone();
            pooled.add_states(0, states.by_ref().take(tokens.len()));
            if self.encoder.projects_pooled() {
                pooled.map(|vector| Ok(self.encoder.project_pooled(vector)?))?;
            }
            Ok(pooled)
        });
        pooled.collect()
    }

    fn refuse<T>(&self) -> Result<T, Error> {
        Err(ModelError::TextEncoder { arch: self.config().arch().to_owned() }.into())
    }
}

/// Truncates one or two parts to `max` tokens together, as `longest_first` of Hugging Face's
/// tokenizers: the shorter of two keeps up to half of them.
fn truncate(parts: &mut [Vec<u32>], max: usize) {
    if parts.iter().map(Vec::len).sum::<usize>() <= max {
        return;
    }
    match parts {
        [one] => one.truncate(max),
        [first, second] => {
            // The first of equals counts as the shorter.
            let (short, long) = if first.len() > second.len() { (second, first) } else { (first, second) };
            short.truncate(max / 2);
            long.truncate(max - short.len());
        }
        _ => {}
    }
}

/// Rejects options of models that generate.
fn check_options(options: &OpenOptions<'_>) -> Result<(), Error> {
    const NONE: &str = "none for a text encoder";
    let devices = options.device.devices();
    if let Some(device) = devices.iter().find(|device| matches!(device, DeviceChoice::Wgpu(_))) {
        let expected = "cpu or cuda:N for a text encoder: adapters lack bidirectional attention";
        return Err(setting("device", expected, device));
    }
    if devices.len() > 1 {
        return Err(setting("device", "one device for a text encoder", &options.device));
    }
    if let Some(n) = options.n_gpu_layers.filter(|&n| n > 0) {
        return Err(setting("n_gpu_layers", "0 for a text encoder, which runs on one device", n));
    }
    if !options.loras.is_empty() {
        return Err(setting("lora", NONE, format!("{} adapters", options.loras.len())));
    }
    let others = [
        ("draft", options.draft.is_some()),
        ("mmproj", options.mmproj.is_some()),
        ("input_statistics", options.input_statistics.is_some()),
        ("maps_experts", options.maps_experts),
        ("kv_guard", options.kv_guard),
    ];
    match others.into_iter().find(|(_, is_given)| *is_given) {
        Some((name, _)) => Err(setting(name, NONE, "one")),
        None => Ok(()),
    }
}

impl Model {
    /// Whether the model is a text encoder, which embeds or ranks texts and has no sessions.
    pub fn is_encoder(&self) -> bool {
        self.encoder().is_some()
    }

    /// Returns an error for a [text encoder](Self::is_encoder).
    ///
    /// # Errors
    /// [`ModelError::TextEncoder`].
    pub fn check_generates(&self) -> Result<(), Error> {
        self.encoder().map_or(Ok(()), |encoder| encoder.refuse())
    }
}

impl KvCaches for TextEncoder {
    fn start(&self, _: SequenceId, _: Plan, _: ContextSize) -> Result<(usize, Plan), Error> {
        self.refuse()
    }

    fn restore(
        &self,
        _: SequenceId,
        _: Plan,
        _: usize,
        _: CacheState,
        _: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>,
    ) -> Result<(), Error> {
        self.refuse()
    }

    // No sequence has started that these could be about.
    fn fork(&self, _: SequenceId, _: SequenceId) {}

    fn release(&self, _: SequenceId) {}

    fn visit(&self, _: SequenceId, _: &mut dyn FnMut(&mut dyn CacheOps)) {}

    fn bytes_for(&self, _: &Plan, _: usize) -> usize {
        0
    }

    fn max_sequences(&self, _: &Plan, _: usize) -> Result<usize, Error> {
        self.refuse()
    }

    fn pool_bytes(&self) -> usize {
        0
    }

    fn set_budget(&self, _: usize) {}
}

impl Measure for TextEncoder {
    fn append_random(&self, _: SequenceId, _: usize, _: &mut Random) -> Result<(), Error> {
        self.refuse()
    }

    fn profile_attention(&self, _: SequenceId, _: usize) -> Result<Vec<StageTime>, Error> {
        self.refuse()
    }

    fn time_kernels(&self, _: bool) -> Result<bool, Error> {
        self.refuse()
    }

    fn kernel_times(&self) -> Result<Vec<KernelTime>, Error> {
        self.refuse()
    }

    fn kv_rows(&self, _: SequenceId, _: usize, _: usize, _: Side) -> Result<Vec<f32>, Error> {
        self.refuse()
    }
}

impl LoadedModel for TextEncoder {
    fn properties(&self) -> &ModelProperties {
        &self.properties
    }

    fn step(
        &self,
        _: &[BatchEntry],
        _: Entry<'_>,
        _: Option<&mut Vec<f32>>,
        _: OnQueries<'_>,
    ) -> Result<Option<Arc<dyn Logits>>, Error> {
        self.refuse()
    }

    fn load_beside(
        &self,
        _: Config,
        _: &Arc<Gguf>,
        _: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        self.refuse()
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(())
    }
}
