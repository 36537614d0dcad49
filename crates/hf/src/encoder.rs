//! Text encoders (BERT, RoBERTa, MPNet, Nomic): their configuration, tensors and pooling, under
//! the names of llama.cpp's converter. GGUF has no architecture for MPNet: `mpnet` is Kvant's own.

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufWriter};

use crate::error::{HfError, TensorFault};
use crate::folder::{Folder, Object, shown};
use crate::metadata::Keys;
use crate::recipe::{ConvertedTensor, Recipe, Values};
use crate::safetensors::{ElementKind, Shards, Stored};
use crate::tensor_transform::View;
use crate::tensors::{TensorKey, Tensors};
use crate::{pooling, tokenizer};

/// Kvant's key of the longest text, in tokens.
const MAX_TOKENS: &str = "kvant.encoder.max_tokens";
/// GGUF's pooling types.
const MEAN: u32 = 1;
const RANK: u32 = 4;

/// A family of encoders.
#[derive(Debug, PartialEq)]
pub(crate) struct EncoderFamily {
    /// Names in `architectures`; those of classifiers have a head that scores.
    classes: &'static [&'static str],
    /// The architecture name in GGUF.
    arch: &'static str,
    /// Prefix of names in models with a head.
    prefix: &'static str,
    /// Prefix of layers.
    layers: &'static str,
    /// Global modules here and in GGUF.
    modules: &'static [(&'static str, &'static str)],
    /// Modules of a layer here and in GGUF.
    of_layer: &'static [(&'static str, &'static str)],
    /// Prefixes of tensors that an embedding does not depend on.
    unused: &'static [&'static str],
    /// Positions before the first one that a text uses.
    n_reserved: usize,
    /// Other names of settings.
    older: &'static [(&'static str, &'static str)],
    /// The activation of the feed-forward layer, and its other name.
    activations: &'static [&'static str],
    /// Settings that readers take for granted, where a configuration has them.
    fixed: &'static [(&'static str, &'static str)],
}

const EMBEDDINGS: [(&str, &str); 4] = [
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", POSITIONS),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
];
const BERT_LAYER: [(&str, &str); 8] = [
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
];
const POSITIONS: &str = "position_embd";
const RELATIVE: &str = "attn_rel_b";

static FAMILIES: [EncoderFamily; 5] = [
    EncoderFamily {
        classes: &["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"],
        arch: "bert",
        prefix: "bert.",
        layers: "encoder.layer.",
        modules: &[
            EMBEDDINGS[0],
            EMBEDDINGS[1],
            EMBEDDINGS[2],
            EMBEDDINGS[3],
            ("pooler.dense", "cls"),
            ("classifier", "cls.output"),
        ],
        of_layer: &BERT_LAYER,
        unused: &["embeddings.position_ids", "embeddings.token_type_ids", "cls."],
        n_reserved: 0,
        older: &[],
        activations: &["gelu"],
        fixed: &[
            ("position_embedding_type", "\"absolute\""),
            ("is_decoder", "false"),
            ("add_cross_attention", "false"),
        ],
    },
    EncoderFamily {
        classes: &[
            "RobertaModel",
            "RobertaForMaskedLM",
            "RobertaForSequenceClassification",
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "XLMRobertaForSequenceClassification",
        ],
        arch: "bert",
        prefix: "roberta.",
        layers: "encoder.layer.",
        modules: &[
            EMBEDDINGS[0],
            EMBEDDINGS[1],
            EMBEDDINGS[2],
            EMBEDDINGS[3],
            ("classifier.dense", "cls"),
            ("classifier.out_proj", "cls.output"),
        ],
        of_layer: &BERT_LAYER,
        unused: &["embeddings.position_ids", "embeddings.token_type_ids", "lm_head.", "pooler."],
        // Positions count from behind the id of padding, which is 1.
        n_reserved: 2,
        older: &[],
        activations: &["gelu"],
        fixed: &[
            ("position_embedding_type", "\"absolute\""),
            ("is_decoder", "false"),
            ("add_cross_attention", "false"),
            ("pad_token_id", "1"),
        ],
    },
    EncoderFamily {
        classes: &["DistilBertModel", "DistilBertForMaskedLM"],
        arch: "bert",
        prefix: "distilbert.",
        layers: "transformer.layer.",
        modules: &[EMBEDDINGS[0], EMBEDDINGS[1], EMBEDDINGS[3]],
        of_layer: &[
            ("attention.q_lin", "attn_q"),
            ("attention.k_lin", "attn_k"),
            ("attention.v_lin", "attn_v"),
            ("attention.out_lin", "attn_output"),
            ("sa_layer_norm", "attn_output_norm"),
            ("ffn.lin1", "ffn_up"),
            ("ffn.lin2", "ffn_down"),
            ("output_layer_norm", "layer_output_norm"),
        ],
        unused: &["vocab_transform.", "vocab_layer_norm.", "vocab_projector."],
        n_reserved: 0,
        older: &[
            ("hidden_size", "dim"),
            ("num_hidden_layers", "n_layers"),
            ("num_attention_heads", "n_heads"),
            ("intermediate_size", "hidden_dim"),
            ("hidden_act", "activation"),
        ],
        activations: &["gelu"],
        fixed: &[],
    },
    EncoderFamily {
        classes: &["MPNetModel", "MPNetForMaskedLM"],
        arch: "mpnet",
        prefix: "mpnet.",
        layers: "encoder.layer.",
        modules: &[
            EMBEDDINGS[0],
            EMBEDDINGS[1],
            EMBEDDINGS[3],
            ("encoder.relative_attention_bias", RELATIVE),
            ("pooler.dense", "cls"),
        ],
        of_layer: &[
            ("attention.attn.q", "attn_q"),
            ("attention.attn.k", "attn_k"),
            ("attention.attn.v", "attn_v"),
            ("attention.attn.o", "attn_output"),
            ("attention.LayerNorm", "attn_output_norm"),
            ("intermediate.dense", "ffn_up"),
            ("output.dense", "ffn_down"),
            ("output.LayerNorm", "layer_output_norm"),
        ],
        unused: &["embeddings.position_ids", "lm_head."],
        // Positions count from behind the id of padding, which is 1.
        n_reserved: 2,
        older: &[],
        activations: &["gelu"],
        fixed: &[],
    },
    EncoderFamily {
        classes: &["NomicBertModel", "NomicBertForPreTraining", "NomicBertForMaskedLM"],
        arch: "nomic-bert",
        prefix: "nomic_bert.",
        layers: "encoder.layers.",
        modules: &[EMBEDDINGS[0], EMBEDDINGS[2], ("emb_ln", "token_embd_norm"), ("pooler.dense", "cls")],
        of_layer: &[
            ("attn.Wqkv", "attn_qkv"),
            ("attn.out_proj", "attn_output"),
            ("norm1", "attn_output_norm"),
            ("mlp.fc11", "ffn_up"),
            ("mlp.fc12", "ffn_gate"),
            ("mlp.fc2", "ffn_down"),
            ("norm2", "layer_output_norm"),
        ],
        unused: &["cls."],
        n_reserved: 0,
        older: &[
            ("hidden_size", "n_embd"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("intermediate_size", "n_inner"),
            ("max_position_embeddings", "n_positions"),
            ("layer_norm_eps", "layer_norm_epsilon"),
            ("hidden_act", "activation_function"),
        ],
        activations: &["silu", "swiglu"],
        fixed: &[
            ("prenorm", "false"),
            ("causal", "false"),
            ("parallel_block", "false"),
            ("use_rms_norm", "false"),
            ("rotary_emb_interleaved", "false"),
            ("rotary_emb_fraction", "1.0"),
            ("scale_attn_by_inverse_layer_idx", "false"),
            ("scale_attn_weights", "true"),
            ("use_xpos", "false"),
            ("num_experts", "0"),
        ],
    },
];

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
    let shards = Shards::open(&mut folder)?;
    let class = config.find_array("architectures")?.and_then(|names| names.first()?.as_str());
    let size = |key| Ok::<_, HfError>(config.size(family.key(config, key))? as usize);
    let encoder = EncoderFolder {
        family,
        config,
        ranks: class.is_some_and(|class| class.ends_with("ForSequenceClassification")),
        n_embd: size("hidden_size")?,
        n_layers: size("num_hidden_layers")?,
    };
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", family.arch)?;
    writer.set("general.type", "model")?;
    writer.set("general.name", name)?;
    encoder.write_sizes(&mut writer, &mut folder)?;
    let pooling = pooling::write(&mut writer, &mut folder, family.arch)?;
    pooling::check_modules(&mut folder)?;
    if encoder.ranks || !pooling {
        writer.set(&format!("{}.pooling_type", family.arch), if encoder.ranks { RANK } else { MEAN })?;
    }
    let tensors = encoder.tensors(&shards)?;
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
        keys.set("attention.head_count", size("num_attention_heads")?)?;
        let eps = config.find_float(family.key(config, "layer_norm_eps"))?.unwrap_or(1e-12);
        keys.set("attention.layer_norm_epsilon", eps as f32)?;
        keys.set("attention.causal", false)?;
        let mut n_ctx = size("max_position_embeddings")?;
        match family.arch {
            "mpnet" => {
                let n_buckets = config.find_size("relative_attention_num_buckets")?.unwrap_or(32);
                keys.set("attention.relative_buckets_count", n_buckets)?;
            }
            "nomic-bert" => {
                keys.set("rope.freq_base", self.rope_base()? as f32)?;
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

    fn rope_base(&self) -> Result<f64, HfError> {
        let parameters = self.config.find_object("rope_parameters")?;
        if let Some(parameters) = parameters {
            if let Some(kind) = parameters.find_str("rope_type")?.filter(|kind| *kind != "default") {
                return Err(parameters.bad("rope_type", "default", kind));
            }
            if let Some(base) = parameters.find_float("rope_theta")? {
                return Ok(base);
            }
        }
        Ok(self.config.find_float("rotary_emb_base")?.unwrap_or(1000.0))
    }

    fn check_fixed(&self) -> Result<(), HfError> {
        let (family, config) = (self.family, self.config);
        let key = family.key(config, "hidden_act");
        if let Some(got) = config.find_str(key)?.filter(|got| !family.activations.contains(got)) {
            return Err(config.bad(key, family.activations.join(" or "), got));
        }
        for (key, expected) in family.fixed {
            if let Some(got) = config.value(key).map(shown).filter(|got| is_other(got, expected)) {
                return Err(config.bad(key, *expected, got));
            }
        }
        let head_dim = config.find_size("head_dim")?;
        let n_heads = config.size(family.key(config, "num_attention_heads"))? as usize;
        if let Some(head_dim) = head_dim.filter(|&dim| dim as usize * n_heads != self.n_embd) {
            let expected = format!("{} / {n_heads}", self.n_embd);
            return Err(config.bad("head_dim", expected, head_dim.to_string()));
        }
        Ok(())
    }

    /// Maps every tensor to GGUF.
    fn tensors(&self, shards: &Shards) -> Result<Tensors, HfError> {
        let mut all = Vec::new();
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
        let is_kept = shape.len() == 1 || [POSITIONS, "token_types", RELATIVE].contains(&module);
        Ok(Recipe::Stored(ConvertedTensor {
            parts: vec![stored.clone()],
            views,
            scales: None,
            shape,
            dtype: if is_kept { DType::F32 } else { dtype },
            values: Values::Kept,
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
