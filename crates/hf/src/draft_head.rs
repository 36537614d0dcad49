//! Draft heads: EAGLE-3 (arXiv 2503.01840) as SafeAILab, SpecForge, speculators and ModelOpt save
//! it, and DFlash (arXiv 2602.06036) as Z-Lab does, under the names of llama.cpp's converter.
//!
//! A head has no tokenizer: its tokens are those of its model.

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufWriter};

use crate::error::{HfError, TensorFault};
use crate::family::{Default, Family, LLAMA, QWEN2};
use crate::folder::{Folder, Json, Object, shown};
use crate::metadata::{self, Keys, Sizes};
use crate::recipe::{ConvertedTensor, Recipe, Values};
use crate::safetensors::{ElementKind, Shards, Stored};
use crate::scaling;
use crate::tensor_names::TensorKey;
use crate::tensor_transform::View;
use crate::tensors::Tensors;

/// Names of EAGLE-3 heads in `architectures`. SafeAILab's have that of a model.
const CLASSES: [&str; 4] =
    ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"];
/// Names of other draft heads.
const OTHERS: [&str; 3] = ["DFlashSpeculator", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"];

/// Kinds of heads.
struct Kind {
    /// The layers of a head.
    family: &'static Family,
    /// The name in messages.
    name: &'static str,
    /// Global modules here and in GGUF.
    modules: &'static [(&'static str, &'static str)],
    /// Modules of a layer here and in GGUF.
    of_layer: &'static [(&'static str, &'static str)],
    /// Whether heads of queries and keys are permuted, for RoPE on neighbours.
    interleaves: bool,
}

static EAGLE3: Kind = Kind {
    family: &EAGLE3_LAYER,
    name: "an EAGLE-3 draft head",
    modules: &[
        ("fc", "fc"),
        ("input_norm", "enc.output_norm"),
        ("norm", "output_norm"),
        ("lm_head", "output"),
        ("embed_tokens", "token_embd"),
    ],
    of_layer: &[
        ("input_layernorm", "attn_norm"),
        ("hidden_norm", "attn_norm_2"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ],
    interleaves: true,
};

static DFLASH: Kind = Kind {
    family: &DFLASH_LAYER,
    name: "a DFlash draft head",
    modules: &[
        ("fc", "fc"),
        ("hidden_norm", "enc.output_norm"),
        ("norm", "output_norm"),
        ("lm_head", "output"),
        ("embed_tokens", "token_embd"),
    ],
    of_layer: &[
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ],
    interleaves: false,
};

static DFLASH_LAYER: Family = Family { class: "DFlashDraftModel", arch: "dflash", ..QWEN2 };

/// The layer of an EAGLE-3 head.
static EAGLE3_LAYER: Family = Family {
    class: "LlamaForCausalLMEagle3",
    arch: "eagle3",
    defaults: &[("max_position_embeddings", Default::Size(2048))],
    fixed: &[
        ("num_hidden_layers", 1.0),
        ("attention_bias", 0.0),
        ("mlp_bias", 0.0),
        ("bias", 0.0),
        ("fc_norm", 0.0),
        ("norm_output", 0.0),
        ("parallel_drafting", 0.0),
    ],
    ..LLAMA
};

/// Flags of a nested object, and the values that readers assume.
const NESTED: &str = "eagle_config";
const NESTED_FLAGS: [(&str, bool); 4] = [
    ("use_aux_hidden_state", true),
    ("use_input_layernorm_in_first_layer", true),
    ("use_last_layernorm", true),
    ("use_mtp_layernorm", false),
];

/// Prefixes of layers, the first of which has no number.
const LAYER: [&str; 2] = ["midlayer.", "layers."];
/// Prefixes of tensors that only training needs.
const UNUSED: [&str; 4] = ["t2d", "verifier_norm.", "verifier_lm_head.", "rotary_emb."];
/// The model's token for each of the head's: differences here, tokens in GGUF.
const TARGET_IDS: &str = "d2t";

/// Whether a configuration describes a draft head.
pub(crate) fn is_head(config: Object<'_>) -> bool {
    match class(config) {
        // As llama.cpp's converter.
        Some("LlamaForCausalLM") => {
            config.value("draft_vocab_size").is_some()
                && config.value("num_hidden_layers").is_some_and(|n| *n == 1)
        }
        Some(class) => CLASSES.contains(&class) || class == DFLASH_LAYER.class || OTHERS.contains(&class),
        None => false,
    }
}

fn class(config: Object<'_>) -> Option<&str> {
    config.find_array("architectures").ok()??.first()?.as_str()
}

/// Describes the draft head in a folder as a GGUF file.
///
/// # Errors
/// As [`crate::open`].
pub(crate) fn open(config: Json, mut folder: Folder, name: &str) -> Result<Gguf, HfError> {
    let object = config.object()?;
    let unsupported = |what| Err(HfError::Unsupported { path: object.path.to_owned(), what });
    if let Some(other) = class(object).filter(|class| OTHERS.contains(class)) {
        return unsupported(format!("'{other}' is not supported: of draft heads only EAGLE-3 and DFlash"));
    }
    let kind = if class(object) == Some(DFLASH_LAYER.class) { &DFLASH } else { &EAGLE3 };
    if object.value("quantization_config").is_some() {
        let what = "quantized weights of a draft head are not read: use it in bf16, f16 or f32";
        return unsupported(what.to_owned());
    }
    let config = config.with_nested("transformer_layer_config").with_defaults(kind.family.defaults);
    let config = config.object()?;
    let shards = Shards::open(&mut folder)?;
    let mut writer = GgufWriter::new();
    let sizes = metadata::write(&mut writer, config, kind.family, name)?;
    match kind.family.arch {
        "dflash" => write_block_keys(&mut writer, config)?,
        _ => write_keys(&mut writer, config)?,
    }
    let mut tensors = tensors(&shards, config, kind, &sizes)?;
    for (name, divisors) in scaling::write(&mut writer, config, kind.family, &sizes)? {
        tensors.add_constant(name, &divisors);
    }
    tensors.declare(&mut writer)?;
    let path = folder.path().to_owned();
    let files = shards.stamps().chain(folder.take_stamps()).collect();
    Ok(Gguf::from_virtual(&writer, &path, files, Box::new(tensors.with(shards)))?)
}

/// Writes the keys that only DFlash heads have.
fn write_block_keys(writer: &mut GgufWriter, config: Object<'_>) -> Result<(), HfError> {
    const NESTED: &str = "dflash_config";
    const LAYERS: &str = "target_layer_ids";
    let nested = config.object(NESTED)?;
    for unknown in ["conv_kernel_size", "selector_rank", "attention_value_scale", "use_swa"] {
        if let Some(got) = nested.value(unknown).filter(|value| !value.is_null() && **value != false) {
            return Err(nested.bad(unknown, "nothing", shown(got)));
        }
    }
    writer.set("tokenizer.ggml.mask_token_id", nested.size("mask_token_id")?)?;
    let mut keys = Keys { writer, arch: DFLASH_LAYER.arch };
    let own = nested.find_size("block_size")?;
    keys.set("block_size", own.or(config.find_size("block_size")?).unwrap_or(16))?;
    // Numbers are those of layers whose output is read: the input of the next ones.
    let ids = nested.find_array(LAYERS)?.or(config.find_array(LAYERS)?).unwrap_or_default();
    let layer = |id: &serde_json::Value| {
        let layer = id.as_u64().and_then(|id| u32::try_from(id.saturating_add(1)).ok());
        layer.ok_or_else(|| nested.bad(LAYERS, "numbers of layers", shown(id)))
    };
    keys.set_array("target_layers", ids.iter().map(layer).collect::<Result<Vec<_>, _>>()?)?;
    match config.find_bool("is_causal")?.or(nested.find_bool("causal")?) {
        Some(is_causal) => keys.set("attention.causal", is_causal),
        None => Ok(()),
    }
}

/// Writes the keys that only EAGLE-3 heads have.
fn write_keys(writer: &mut GgufWriter, config: Object<'_>) -> Result<(), HfError> {
    const RESIDUAL: &str = "norm_before_residual";
    let kinds = config.find_array("layer_types")?.unwrap_or_default();
    if let Some(kind) = kinds.iter().find(|kind| **kind != "full_attention") {
        return Err(config.bad("layer_types", "full_attention", shown(kind)));
    }
    let mut keys = Keys { writer, arch: EAGLE3_LAYER.arch };
    let n_embd = config.size("hidden_size")?;
    keys.set("target_hidden_size", config.find_size("target_hidden_size")?.unwrap_or(n_embd))?;
    let layers = target_layers(config)?;
    if !layers.is_empty() {
        keys.set_array("target_layers", layers)?;
    }
    let is_required = config.value("speculators_model_type").is_some();
    match config.find_bool(RESIDUAL)? {
        // Readers of this format disagree about the default.
        None if is_required => return Err(config.bad(RESIDUAL, "true or false", "nothing")),
        is => keys.set(RESIDUAL, is.unwrap_or(false))?,
    }
    keys.set("norm_before_fc", config.find_bool("norm_before_fc")?.unwrap_or(false))
}

/// Returns the layers of the model whose input the head reads; empty if none are named.
fn target_layers(config: Object<'_>) -> Result<Vec<u32>, HfError> {
    const LAYERS: &str = "eagle_aux_hidden_state_layer_ids";
    let read = |of: Object<'_>, added: u64| {
        let ids = of.find_array(LAYERS)?.unwrap_or_default().iter();
        let layer = |id: &serde_json::Value| {
            let layer = id.as_u64().and_then(|id| u32::try_from(id.saturating_add(added)).ok());
            layer.ok_or_else(|| of.bad(LAYERS, "numbers of layers", shown(id)))
        };
        ids.map(layer).collect::<Result<Vec<u32>, HfError>>()
    };
    let Some(nested) = config.find_object(NESTED)? else { return read(config, 0) };
    for (flag, known) in NESTED_FLAGS {
        if let Some(got) = nested.find_bool(flag)?.filter(|got| *got != known) {
            return Err(nested.bad(flag, known.to_string(), got.to_string()));
        }
    }
    if let Some(n) = nested.find_size("parallel_draft_step")?.filter(|n| *n > 1) {
        return Err(nested.bad("parallel_draft_step", "1", n.to_string()));
    }
    // Nested numbers are those of layers whose output is read: the input of the next ones.
    let layers = read(config, 0)?;
    if layers.is_empty() { read(nested, 1) } else { Ok(layers) }
}

/// Maps every tensor to GGUF.
fn tensors(shards: &Shards, config: Object<'_>, kind: &Kind, sizes: &Sizes) -> Result<Tensors, HfError> {
    let mut all = Vec::new();
    for (name, stored) in shards.tensors() {
        let short = name.strip_prefix("model.").unwrap_or(name);
        if UNUSED.iter().any(|prefix| short.starts_with(prefix)) {
            continue;
        }
        if short == TARGET_IDS {
            all.push(((0, TARGET_IDS.to_owned()), Recipe::constant(&target_ids(name, stored, shards)?)));
            continue;
        }
        let unknown = || HfError::Unknown { name: name.to_owned(), family: kind.family.class };
        let place = place(short, kind).ok_or_else(unknown)?;
        let recipe = recipe(name, &place, stored, shards, kind, sizes)?;
        all.push((place, recipe));
    }
    let has = |all: &[(TensorKey, Recipe)], name: &str| all.iter().any(|((_, ours), _)| ours == name);
    if !has(&all, "fc.weight") {
        let of = Some(format!("config.json describes {}", kind.name));
        return Err(HfError::Missing { name: "fc.weight".to_owned(), of });
    }
    let mut embeddings = shards.tensors().filter(|(name, _)| name.ends_with("embed_tokens.weight"));
    if config.find_bool("tie_word_embeddings")? == Some(true)
        && !has(&all, "output.weight")
        && let Some((name, stored)) = embeddings.next()
    {
        let place = (0, "output.weight".to_owned());
        let recipe = recipe(name, &place, stored, shards, kind, sizes)?;
        all.push((place, recipe));
    }
    Ok(Tensors::new(all))
}

/// Returns the place of a tensor in GGUF; `None` for an unknown tensor.
fn place(name: &str, kind: &Kind) -> Option<TensorKey> {
    let find = |all: &[(&str, &'static str)], name: &str| {
        let module = name.strip_suffix(".weight")?;
        all.iter().find(|(theirs, _)| *theirs == module).map(|(_, ours)| format!("{ours}.weight"))
    };
    let Some(rest) = LAYER.iter().find_map(|prefix| name.strip_prefix(prefix)) else {
        return Some((0, find(kind.modules, name)?));
    };
    let (layer, module) = match rest.split_once('.') {
        Some((number, module)) if number.bytes().all(|b| b.is_ascii_digit()) => {
            (number.parse().ok()?, module)
        }
        _ => (0, rest),
    };
    Some((usize::checked_add(layer, 1)?, find(kind.of_layer, module)?))
}

fn recipe(
    name: &str,
    (_, ours): &TensorKey,
    stored: &Stored,
    shards: &Shards,
    kind: &Kind,
    sizes: &Sizes,
) -> Result<Recipe, HfError> {
    let ElementKind::Values(dtype) = stored.holds else { return Err(wrong_type(name, stored, shards)) };
    let wrong =
        |expected: String| HfError::Shape { name: name.to_owned(), expected, got: stored.shape.clone() };
    let mut shape = stored.shape.clone();
    if !(1..=2).contains(&shape.len()) {
        return Err(wrong("a matrix or a vector".to_owned()));
    }
    let heads = match &ours[..] {
        "attn_q.weight" => Some(sizes.n_heads),
        "attn_k.weight" => Some(sizes.n_kv_heads),
        _ => None,
    };
    let views = match (heads, &shape[..]) {
        (None, _) => Vec::new(),
        (Some(heads), &[rows, row]) if rows == heads * sizes.head_dim => {
            if kind.interleaves {
                vec![View::interleave_halves(heads, rows, row)]
            } else {
                Vec::new()
            }
        }
        (Some(heads), _) => return Err(wrong(format!("{heads} heads of {} rows", sizes.head_dim))),
    };
    shape.reverse();
    Ok(Recipe::Stored(ConvertedTensor {
        parts: vec![stored.clone()],
        views,
        scales: None,
        dtype: if shape.len() == 1 { DType::F32 } else { dtype },
        shape,
        values: Values::Kept,
    }))
}

/// Returns the model's token for each of the head's, which the model loader checks.
fn target_ids(name: &str, stored: &Stored, shards: &Shards) -> Result<Vec<f32>, HfError> {
    if stored.holds != ElementKind::I64 {
        return Err(wrong_type(name, stored, shards));
    }
    let bytes = shards.data(stored);
    let differences = bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
    Ok(differences.zip(0..).map(|(difference, own)| difference.saturating_add(own) as f32).collect())
}

fn wrong_type(name: &str, stored: &Stored, shards: &Shards) -> HfError {
    let what = TensorFault::Type { got: stored.holds.to_string() };
    HfError::Tensor { path: shards.path(stored).to_owned(), name: name.to_owned(), what }
}
