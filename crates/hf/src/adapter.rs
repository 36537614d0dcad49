//! Low-rank adapters as PEFT saves them (LoRA, arXiv 2106.09685), described as the GGUF files of
//! `convert_lora_to_gguf.py`.
//!
//! `A` and `B` of a module are stored under its name, `base_model.model.NAME.lora_A.weight`. The
//! family of the base model maps modules to GGUF names. Rows that GGUF reorders are reordered in
//! `B`.

use std::collections::BTreeMap;
use std::path::Path;

use kvant_gguf::{Gguf, GgufWriter};
use serde_json::Value;

use crate::error::HfError;
use crate::family::Family;
use crate::folder::{Folder, Object, shown};
use crate::recipe::{ConvertedTensor, Recipe, Values, Weights};
use crate::safetensors::{ElementKind, Shards, Stored};
use crate::tensor_names::{Target, full_name, targets};
use crate::tensor_transform::{Transform, View};

/// The files of an adapter: its configuration and its weights.
pub const ADAPTER_FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];
const CONFIG: &str = ADAPTER_FILES[0];
const WEIGHTS: &str = ADAPTER_FILES[1];
const ARCHITECTURE: &str = "general.architecture";
/// Suffixes of `A` and `B` in PEFT and GGUF. Older versions include the adapter's name.
const SIDES: [(&str, &str); 4] = [
    (".lora_A.weight", "lora_a"),
    (".lora_B.weight", "lora_b"),
    (".lora_A.default.weight", "lora_a"),
    (".lora_B.default.weight", "lora_b"),
];

/// Adapter features that are not supported.
const UNSUPPORTED_KEYS: [&str; 11] = [
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
];

/// Whether `path` is a folder with a PEFT adapter.
pub fn is_adapter(path: &Path) -> bool {
    path.join(CONFIG).is_file()
}

/// Describes the adapter in a folder as a GGUF file, for the model in `base`.
///
/// Its files must not be overwritten or truncated by another program while it is open.
///
/// # Errors
/// [`HfError`] with the first fault: a missing or invalid file, an adapter with features other than
/// low-rank products, an unsupported family, or a module that the family does not have or that GGUF
/// splits.
pub fn open_adapter(path: impl AsRef<Path>, base: &Gguf) -> Result<Gguf, HfError> {
    let path = path.as_ref();
    let mut folder = Folder::new(path);
    let why = "has no adapter_config.json: neither a GGUF file nor a PEFT adapter";
    let config = folder.json(CONFIG)?.ok_or_else(|| HfError::Folder { path: path.to_owned(), why })?;
    let config = config.object()?;
    reject_unsupported(config)?;
    let architecture: &str = base.meta().get(ARCHITECTURE)?;
    let family = Family::in_gguf(architecture)?;
    let shards = Shards::open_file(&folder, WEIGHTS)?;
    let mut recipes = BTreeMap::new();
    let mut max_rank = 0;
    for (name, stored) in shards.tensors() {
        let (name, made) = tensor(name, stored, family, base)?;
        if name.ends_with("a") {
            max_rank = made.shape[1].max(max_rank);
        }
        recipes.insert(name, Recipe::Stored(made));
    }
    let mut writer = GgufWriter::new();
    writer.set("general.type", "adapter")?;
    writer.set("adapter.type", "lora")?;
    writer.set(ARCHITECTURE, architecture)?;
    writer.set("adapter.lora.alpha", alpha(config, max_rank)?)?;
    for (name, recipe) in &recipes {
        writer.add_tensor(name, recipe.shape(), recipe.dtype())?;
    }
    let files = shards.stamps().chain(folder.take_stamps()).collect();
    let weights = Weights::new(recipes.into_iter(), shards);
    Ok(Gguf::from_virtual(&writer, path, files, Box::new(weights))?)
}

/// Rejects adapters that change a model by other means than low-rank products.
fn reject_unsupported(config: Object<'_>) -> Result<(), HfError> {
    match config.find_str("peft_type")? {
        Some("LORA") => {}
        got => return Err(config.bad("peft_type", "LORA", got.unwrap_or("nothing"))),
    }
    match config.find_str("bias")? {
        None | Some("none") => {}
        Some(got) => return Err(config.bad("bias", "none", got)),
    }
    let is_empty = |value: &Value| match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        value => *value == Value::Bool(false),
    };
    for key in UNSUPPORTED_KEYS {
        if let Some(value) = config.value(key).filter(|value| !is_empty(value)) {
            return Err(config.bad(key, "nothing", shown(value)));
        }
    }
    Ok(())
}

/// Returns the LoRA alpha: the scale of the products times their rank, whose maximum is `max_rank`.
fn alpha(config: Object<'_>, max_rank: usize) -> Result<f32, HfError> {
    let alpha = config.float("lora_alpha")?;
    if config.find_bool("use_rslora")? != Some(true) {
        return Ok(alpha as f32);
    }
    // Divided by the root of the rank (arXiv 2312.03732), which must then be the same for all
    // modules.
    match config.find_object("rank_pattern")? {
        Some(ranks) if !ranks.map.is_empty() => {
            Err(config.bad("rank_pattern", "nothing beside use_rslora", "some"))
        }
        _ => Ok((alpha * (max_rank as f64).sqrt()) as f32),
    }
}

/// Returns the GGUF name of a tensor and its recipe.
fn tensor(
    name: &str,
    stored: &Stored,
    family: &Family,
    base: &Gguf,
) -> Result<(String, ConvertedTensor), HfError> {
    let unknown = || HfError::Unknown { name: name.to_owned(), family: family.class };
    let wrong = |expected: &str| HfError::Shape {
        name: name.to_owned(),
        expected: expected.to_owned(),
        got: stored.shape.clone(),
    };
    let side = SIDES.iter().find_map(|(theirs, ours)| Some((name.strip_suffix(theirs)?, *ours)));
    let (module, side) = side.ok_or_else(unknown)?;
    let module = module.strip_prefix("base_model.model.").unwrap_or(module);
    let module = module.replacen("language_model.", "", 1);
    let found = targets(&format!("{module}.weight"), family);
    let [Target { place, part: 0, cut: Transform::Whole }] = &found[..] else { return Err(unknown()) };
    let (&[rows, row], ElementKind::Values(dtype)) = (&stored.shape[..], stored.holds) else {
        return Err(wrong("a matrix"));
    };
    let mut views = Vec::new();
    if side == "lora_b" && family.is_reordered {
        let heads = match place.1.as_str() {
            "attn_q.weight" => Some("attention.head_count"),
            "attn_k.weight" => Some("attention.head_count_kv"),
            _ => None,
        };
        if let Some(key) = heads {
            let heads: u32 = base.meta().get(&format!("{}.{key}", family.arch))?;
            if heads == 0 || !rows.is_multiple_of(2 * heads as usize) {
                return Err(wrong(&format!("rows of {heads} heads")));
            }
            views = vec![View::interleave_halves(heads as usize, rows, row)];
        }
    }
    let made = ConvertedTensor {
        parts: vec![stored.clone()],
        views,
        scales: None,
        shape: vec![row, rows],
        dtype,
        values: Values::Kept,
    };
    Ok((format!("{}.{side}", full_name(place)), made))
}
