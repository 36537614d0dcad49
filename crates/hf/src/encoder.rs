//! Text encoders (BERT, RoBERTa, MPNet, Nomic, ModernBERT, EmbeddingGemma): their configuration,
//! tensors and pooling, under the names of llama.cpp's converter. GGUF has no architecture for
//! MPNet: `mpnet` is Kvant's own.

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufWriter};

use crate::error::{HfError, TensorFault};
use crate::folder::{Folder, Object, shown};
use crate::metadata::Keys;
use crate::recipe::{ConvertedTensor, Recipe, Values};
use crate::safetensors::{ElementKind, Shards, Stored};
use crate::tensor_names::TensorKey;
use crate::tensor_transform::View;
use crate::tensors::Tensors;
use crate::{pooling, tokenizer};

mod dense;
mod families;

use dense::Dense;
use families::{Base, FAMILIES, LocalLayers};

pub(crate) use families::EncoderFamily;

/// Kvant's key of the longest text, in tokens.
const MAX_TOKENS: &str = "kvant.encoder.max_tokens";
/// Kvant's key of the activation in the head that scores.
const HEAD_ACTIVATION: &str = "kvant.encoder.head_activation";
const POSITIONS: &str = "position_embd";
const RELATIVE: &str = "attn_rel_b";
/// Most layers, before tensors are counted.
const MAX_LAYERS: usize = 4096;
/// GGUF's pooling types.
const MEAN: u32 = 1;
const CLS: u32 = 2;
const RANK: u32 = 4;

/// Returns the names of all encoders.
pub(crate) fn classes() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|family| family.classes).copied()
}

/// An encoder in a folder.
struct EncoderFolder<'a> {
    family: &'static EncoderFamily,
    config: Object<'a>,
    /// Whether it has a head that scores.
    ranks: bool,
    n_embd: usize,
    n_layers: usize,
}

impl EncoderFamily {
    /// Returns the family of a configuration; `None` for another model.
    pub fn of(config: Object<'_>) -> Option<&'static Self> {
        let name = config.find_array("architectures").ok()??.first()?.as_str()?;
        FAMILIES.iter().find(|family| family.classes.contains(&name))
    }
}

/// Describes the encoder in a folder as a GGUF file.
///
/// # Errors
/// As [`crate::open`].
pub(crate) fn open(
    family: &'static EncoderFamily,
    config: Object<'_>,
    mut folder: Folder,
    name: &str,
) -> Result<Gguf, HfError> {
    if config.value("quantization_config").is_some() {
        let what = "quantized weights of a text encoder are not read: use it in bf16, f16 or f32".to_owned();
        return Err(HfError::Unsupported { path: config.path.to_owned(), what });
    }
    let mut shards = Shards::open(&mut folder)?;
    let class = config.find_array("architectures")?.and_then(|names| names.first()?.as_str());
    let size = |key| Ok::<_, HfError>(config.size(family.key(config, key))? as usize);
    let encoder = EncoderFolder {
        family,
        config,
        ranks: class.is_some_and(|class| class.ends_with("ForSequenceClassification")),
        n_embd: size("hidden_size")?,
        n_layers: size("num_hidden_layers")?,
    };
    if encoder.n_layers > MAX_LAYERS {
        return Err(config.bad(
            "num_hidden_layers",
            format!("1 to {MAX_LAYERS}"),
            encoder.n_layers.to_string(),
        ));
    }
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", family.arch)?;
    writer.set("general.type", "model")?;
    writer.set("general.name", name)?;
    encoder.write_sizes(&mut writer, &mut folder)?;
    let pooling = pooling::write(&mut writer, &mut folder, family.arch)?;
    let dense = dense::read(&mut folder, &mut shards)?;
    if encoder.ranks || !pooling {
        writer.set(&format!("{}.pooling_type", family.arch), if encoder.ranks { RANK } else { MEAN })?;
    }
    dense::write_sizes(&mut writer, family.arch, &dense)?;
    let tensors = encoder.tensors(&shards, &dense)?;
    tokenizer::write_of_encoder(&mut writer, &mut folder, tensors.n_vocab()?)?;
    tensors.declare(&mut writer)?;
    let path = folder.path().to_owned();
    let files = shards.stamps().chain(folder.take_stamps()).collect();
    Ok(Gguf::from_virtual(&writer, &path, files, Box::new(tensors.with(shards)))?)
}

impl EncoderFamily {
    /// Returns the name of a setting in a configuration.
    fn key(&self, config: Object<'_>, name: &'static str) -> &'static str {
        let older = self.older.iter().find(|(newer, older)| *newer == name && config.value(older).is_some());
        older.map_or(name, |(_, older)| older)
    }
}

impl EncoderFolder<'_> {
    /// Writes the hyper-parameters.
    fn write_sizes(&self, writer: &mut GgufWriter, folder: &mut Folder) -> Result<(), HfError> {
        let (family, config) = (self.family, self.config);
        let size = |name| config.size(family.key(config, name));
        self.check_fixed()?;
        let mut keys = Keys { writer, arch: family.arch };
        keys.set("block_count", size("num_hidden_layers")?)?;
        keys.set("embedding_length", size("hidden_size")?)?;
        keys.set("feed_forward_length", size("intermediate_size")?)?;
        self.write_heads(&mut keys)?;
        let eps = config.find_float(family.key(config, family.eps.theirs))?.unwrap_or(family.eps.default);
        keys.set(family.eps.ours, eps as f32)?;
        keys.set("attention.causal", false)?;
        for base in family.bases {
            keys.set(base.number.ours, self.rope_base(base)? as f32)?;
        }
        if let Some(local) = &family.windows {
            self.write_windows(&mut keys, local)?;
        }
        if let Some(key) = family.activation_key {
            keys.set(
                key,
                config.find_str(family.key(config, "hidden_act"))?.unwrap_or(family.activations[0]),
            )?;
        }
        self.write_head(&mut keys)?;
        let mut n_ctx = size("max_position_embeddings")?;
        match family.arch {
            "mpnet" => {
                let n_buckets = config.find_size("relative_attention_num_buckets")?.unwrap_or(32);
                keys.set("attention.relative_buckets_count", n_buckets)?;
            }
            "nomic-bert" => {
                // Beyond these, the model scales RoPE by the length of the text.
                n_ctx = n_ctx.min(config.find_size("max_trained_positions")?.unwrap_or(2048));
            }
            _ => {}
        }
        let n_ctx = n_ctx.saturating_sub(family.n_reserved as u32);
        if n_ctx < 2 {
            return Err(config.bad("max_position_embeddings", "positions for two tokens", n_ctx.to_string()));
        }
        keys.set("context_length", n_ctx)?;
        if let Some(n_types) = config.find_size("type_vocab_size")? {
            keys.writer.set("tokenizer.ggml.token_type_count", n_types)?;
        }
        let max_tokens = max_tokens(folder)?.unwrap_or(n_ctx).min(n_ctx);
        Ok(keys.writer.set(MAX_TOKENS, max_tokens)?)
    }

    fn write_heads(&self, keys: &mut Keys<'_>) -> Result<(), HfError> {
        let config = self.config;
        let key = self.family.key(config, "num_attention_heads");
        let n_heads = config.size(key)? as usize;
        keys.set("attention.head_count", n_heads as u32)?;
        let head_dim = config.find_size("head_dim")?;
        if !self.family.has_own_heads {
            return match head_dim.filter(|&dim| dim as usize * n_heads != self.n_embd) {
                Some(head_dim) => {
                    let expected = format!("{} / {n_heads}", self.n_embd);
                    Err(config.bad("head_dim", expected, head_dim.to_string()))
                }
                None => Ok(()),
            };
        }
        let head_dim = head_dim.unwrap_or((self.n_embd / n_heads) as u32);
        // Readers assume the scale of attention that it gives.
        if let Some(got) =
            config.find_float("query_pre_attn_scalar")?.filter(|got| *got != f64::from(head_dim))
        {
            return Err(config.bad("query_pre_attn_scalar", head_dim.to_string(), got.to_string()));
        }
        keys.set(
            "attention.head_count_kv",
            config.find_size("num_key_value_heads")?.unwrap_or(n_heads as u32),
        )?;
        keys.set("attention.key_length", head_dim)?;
        keys.set("attention.value_length", head_dim)
    }

    /// Returns a base of RoPE: by the kind of layers, for all, or of an older configuration.
    fn rope_base(&self, base: &Base) -> Result<f64, HfError> {
        let mut parameters = self.config.find_object("rope_parameters")?;
        if let (Some(layers), Some(all)) = (base.layers, parameters) {
            parameters = all.find_object(layers)?;
        }
        if let Some(parameters) = parameters {
            if let Some(kind) = parameters.find_str("rope_type")?.filter(|kind| *kind != "default") {
                return Err(parameters.bad("rope_type", "default", kind));
            }
            if let Some(base) = parameters.find_float("rope_theta")? {
                return Ok(base);
            }
        }
        Ok(self.config.find_float(base.number.theirs)?.unwrap_or(base.number.default))
    }

    /// Writes which layers are local: by period, or layer by layer.
    fn write_windows(&self, keys: &mut Keys<'_>, local: &LocalLayers) -> Result<(), HfError> {
        const PATTERN: &str = "attention.sliding_window_pattern";
        let (config, n_layers) = (self.config, self.n_layers);
        keys.set("attention.sliding_window", config.size(local.window)?)?;
        let named = local.periods.iter().find(|key| config.value(key).is_some());
        let period = named.map_or(Ok(local.default_period), |key| config.size(key))?;
        let global = if local.is_first_global { 0 } else { period as usize - 1 };
        let by_period = |layer: usize| layer % period as usize != global;
        let Some(kinds) = config.find_array("layer_types")? else { return keys.set(PATTERN, period) };
        if let Some(kind) =
            kinds.iter().find(|kind| **kind != "full_attention" && **kind != "sliding_attention")
        {
            return Err(config.bad("layer_types", "full_attention or sliding_attention", shown(kind)));
        }
        if kinds.len() != n_layers {
            return Err(config.bad("layer_types", format!("{n_layers} layers"), kinds.len().to_string()));
        }
        let is_local: Vec<bool> = kinds.iter().map(|kind| kind == "sliding_attention").collect();
        match is_local.iter().enumerate().all(|(layer, is_local)| *is_local == by_period(layer)) {
            true => keys.set(PATTERN, period),
            false => keys.set_array(PATTERN, is_local),
        }
    }

    /// Writes what the head that scores reads and computes.
    fn write_head(&self, keys: &mut Keys<'_>) -> Result<(), HfError> {
        const POOLING: &str = "classifier_pooling";
        if !self.ranks {
            return Ok(());
        }
        if let Some(activation) = self.family.head_activation {
            keys.writer.set(HEAD_ACTIVATION, activation)?;
        }
        let Some(default) = self.family.head_pooling else { return Ok(()) };
        match self.config.find_str(POOLING)?.unwrap_or(default) {
            "mean" => keys.set("classifier.pooling_type", MEAN),
            "cls" => keys.set("classifier.pooling_type", CLS),
            other => Err(self.config.bad(POOLING, "mean or cls", other)),
        }
    }

    fn check_fixed(&self) -> Result<(), HfError> {
        let (family, config) = (self.family, self.config);
        for flag in family.required_flags {
            if config.find_bool(flag)? != Some(true) {
                let got = config.value(flag).map_or_else(|| "nothing".to_owned(), shown);
                return Err(config.bad(flag, "true in a text encoder of this class", got));
            }
        }
        let key = family.key(config, "hidden_act");
        if let Some(got) = config.find_str(key)?.filter(|got| !family.activations.contains(got)) {
            return Err(config.bad(key, family.activations.join(" or "), got));
        }
        for (key, expected) in family.fixed {
            if let Some(got) = config.value(key).map(shown).filter(|got| is_other(got, expected)) {
                return Err(config.bad(key, *expected, got));
            }
        }
        Ok(())
    }

    /// Maps every tensor to GGUF.
    fn tensors(&self, shards: &Shards, dense: &[Dense]) -> Result<Tensors, HfError> {
        let mut all = Vec::new();
        for (dense, name) in dense.iter().zip(dense::NAMES) {
            let place = (0, format!("{name}.weight"));
            let recipe = self.recipe(dense::WEIGHT, &place, &dense.weight, shards)?;
            all.push((place, recipe));
        }
        for (name, stored) in shards.tensors() {
            let short = name.strip_prefix(self.family.prefix).unwrap_or(name);
            if self.family.unused.iter().any(|prefix| short.starts_with(prefix)) {
                continue;
            }
            let place = self.place(short);
            let place = place
                .ok_or_else(|| HfError::Unknown { name: name.to_owned(), family: self.family.classes[0] })?;
            if let Some(place) = place {
                let recipe = self.recipe(name, &place, stored, shards)?;
                all.push((place, recipe));
            }
        }
        Ok(Tensors::new(all))
    }

    /// Returns the place of a tensor in GGUF, if it has one; `None` for an unknown tensor.
    fn place(&self, name: &str) -> Option<Option<TensorKey>> {
        let (module, kind) = name.rsplit_once('.')?;
        // Names of the first releases.
        let kind = match kind {
            "gamma" => "weight",
            "beta" => "bias",
            "weight" | "bias" => kind,
            _ => return None,
        };
        let find = |all: &[(&str, &'static str)], module: &str| {
            all.iter().find(|(theirs, _)| *theirs == module).map(|(_, ours)| *ours)
        };
        if let Some(rest) = module.strip_prefix(self.family.layers) {
            let (layer, module) = rest.split_once('.')?;
            let layer: usize = layer.parse().ok().filter(|&layer| layer < self.n_layers)?;
            let ours = find(self.family.of_layer, module)?;
            return Some(Some((layer + 1, format!("{ours}.{kind}"))));
        }
        let ours = find(self.family.modules, module)?;
        // The pooler belongs to the head.
        let is_of_head = ours.starts_with("cls");
        Some((!is_of_head || self.ranks).then(|| (0, format!("{ours}.{kind}"))))
    }

    fn recipe(
        &self,
        name: &str,
        (_, ours): &TensorKey,
        stored: &Stored,
        shards: &Shards,
    ) -> Result<Recipe, HfError> {
        let ElementKind::Values(dtype) = stored.holds else {
            let what = TensorFault::Type { got: stored.holds.to_string() };
            let (path, name) = (shards.path(stored).to_owned(), name.to_owned());
            return Err(HfError::Tensor { path, name, what });
        };
        let wrong =
            |expected: String| HfError::Shape { name: name.to_owned(), expected, got: stored.shape.clone() };
        let module = ours.rsplit_once('.').map_or(ours.as_str(), |(module, _)| module);
        let (mut shape, mut views) = (stored.shape.clone(), Vec::new());
        if module == POSITIONS && self.family.n_reserved > 0 {
            let reserved = self.family.n_reserved;
            let &[rows, row] = &shape[..] else { return Err(wrong("a matrix".to_owned())) };
            let left = rows.checked_sub(reserved).filter(|&left| left > 0);
            let left = left.ok_or_else(|| wrong(format!("more than {reserved} rows")))?;
            views = vec![View { first: reserved * row, steps: vec![(left * row, 1)] }];
            shape[0] = left;
        }
        if !(1..=2).contains(&shape.len()) {
            return Err(wrong("a matrix or a vector".to_owned()));
        }
        if module == "cls.output" && shape[0] != 1 {
            return Err(wrong("one label: a model that ranks".to_owned()));
        }
        if module == "token_embd" && shape.last() != Some(&self.n_embd) {
            return Err(wrong(format!("rows of {} values", self.n_embd)));
        }
        shape.reverse();
        let values = if module.ends_with("_norm") { self.family.norms } else { Values::Kept };
        let is_kept = shape.len() == 1 || [POSITIONS, "token_types", RELATIVE].contains(&module);
        Ok(Recipe::Stored(ConvertedTensor {
            parts: vec![stored.clone()],
            views,
            scales: None,
            shape,
            dtype: if is_kept { DType::F32 } else { dtype },
            values,
        }))
    }
}

/// Whether a value differs from the expected one; numbers may be written in several ways.
fn is_other(got: &str, expected: &str) -> bool {
    match (got.parse::<f64>(), expected.parse::<f64>()) {
        (Ok(got), Ok(expected)) => got != expected,
        _ => got != expected,
    }
}

/// Returns the longest text that sentence-transformers reads: by its own configuration, or else by
/// that of the tokenizer.
fn max_tokens(folder: &mut Folder) -> Result<Option<u32>, HfError> {
    let settings =
        [("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")];
    for (file, key) in settings {
        let Some(json) = folder.json(file)? else { continue };
        let config = json.object()?;
        // Tokenizers without a limit have 1e30.
        let max = config.value(key).and_then(serde_json::Value::as_u64).and_then(|n| u32::try_from(n).ok());
        match max {
            Some(n) if n < 2 => return Err(config.bad(key, "a number from 2 on", n.to_string())),
            Some(n) => return Ok(Some(n)),
            None => {}
        }
    }
    Ok(None)
}
