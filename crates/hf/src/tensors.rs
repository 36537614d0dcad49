//! Tensors: what they are called in either place, and which of a folder make which of GGUF.

use std::collections::{BTreeMap, BTreeSet};

use kvant_codec::DType;
use kvant_gguf::GgufWriter;

use crate::HfError;
use crate::family::Family;
use crate::metadata::Sizes;
use crate::recipe::{Made, Recipe, Weights};
use crate::safetensors::{Shards, Stored};

/// Modules of a layer by their names in GGUF. Experts have the same names in each of theirs.
const MODULES: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", ROUTER),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", SHARED_ROUTER),
    ("block_sparse_moe.gate", ROUTER),
];

/// Modules of an expert, by the folder that experts are in.
const EXPERTS: &[(&str, &str, &str)] = &[
    ("mlp.experts.", "gate_proj", "ffn_gate_exps"),
    ("mlp.experts.", "up_proj", "ffn_up_exps"),
    ("mlp.experts.", "down_proj", "ffn_down_exps"),
    ("block_sparse_moe.experts.", "w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.", "w3", "ffn_up_exps"),
    ("block_sparse_moe.experts.", "w2", "ffn_down_exps"),
];

/// What chooses among experts, kept in f32 as llama.cpp keeps it.
const ROUTER: &str = "ffn_gate_inp";
const SHARED_ROUTER: &str = "ffn_gate_inp_shexp";
const EMBEDDING: &str = "token_embd.weight";
const OUTPUT: &str = "output.weight";

/// The tensors of a model, by their names in GGUF: those of no layer first, then layer by layer.
pub(crate) struct Tensors {
    all: BTreeMap<Place, Recipe>,
}

/// The layer, counted from 1, and the name within it; what is in none has layer 0.
type Place = (usize, String);

/// What a tensor of the folder is in GGUF.
struct Target {
    place: Place,
    /// Which of the experts it is of.
    expert: Option<usize>,
}

/// Finds what every tensor of `shards` is in GGUF.
///
/// # Errors
/// A tensor that the family is not known to have, one that is missing, or one of another size than `sizes` say.
pub(crate) fn plan(shards: &Shards, family: &'static Family, sizes: &Sizes) -> Result<Tensors, HfError> {
    let mut found: BTreeMap<Place, BTreeMap<usize, (&str, &Stored)>> = BTreeMap::new();
    for (name, stored) in shards.tensors() {
        // Some files hold the embedding twice.
        if name.ends_with("lm_head.weight") && sizes.is_tied == Some(true) || family.sees && is_of_eyes(name)
        {
            continue;
        }
        let unknown = || HfError::Unknown { name: name.to_owned(), family: family.class };
        let target =
            target(name, family).filter(|target| target.place.0 <= sizes.n_layers).ok_or_else(unknown)?;
        let expert = target.expert.unwrap_or(0);
        // Two modules of one name in GGUF are of different families.
        if expert >= sizes.n_experts.max(1)
            || found.entry(target.place).or_default().insert(expert, (name, stored)).is_some()
        {
            return Err(unknown());
        }
    }
    check_complete(&found, sizes)?;
    let mut all = BTreeMap::new();
    for (place, parts) in found {
        let recipe = made(&place.1, parts.into_values().collect(), family, sizes)?;
        all.insert(place, Recipe::Stored(recipe));
    }
    Ok(Tensors { all })
}

/// Whether a tensor of a model that sees is none of its text model.
fn is_of_eyes(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    name.starts_with("vision_tower.") || name.starts_with("multi_modal_projector.")
}

/// What a tensor of this name is in GGUF; `None` where nobody knows.
fn target(name: &str, family: &Family) -> Option<Target> {
    let name = if family.sees { &*name.replacen("language_model.", "", 1) } else { name };
    let whole = |name: &str| Some(Target { place: (0, name.to_owned()), expert: None });
    let name = match name.strip_prefix("model.") {
        None if name == "lm_head.weight" => return whole(OUTPUT),
        None => return None,
        Some("embed_tokens.weight") => return whole(EMBEDDING),
        Some("norm.weight") => return whole("output_norm.weight"),
        Some(rest) => rest.strip_prefix("layers.")?,
    };
    let (layer, name) = name.split_once('.')?;
    let layer = number(layer)?;
    let (module, kind) = name.rsplit_once('.').filter(|(_, kind)| ["weight", "bias"].contains(kind))?;
    let place = |ours: &str| (layer + 1, format!("{ours}.{kind}"));
    if module == "post_attention_layernorm" {
        let ours = if family.norms_after { "post_attention_norm" } else { "ffn_norm" };
        return Some(Target { place: place(ours), expert: None });
    }
    if let Some((_, ours)) = MODULES.iter().find(|(theirs, _)| *theirs == module) {
        return Some(Target { place: place(ours), expert: None });
    }
    EXPERTS.iter().find_map(|(folder, theirs, ours)| {
        let (expert, module) = module.strip_prefix(folder)?.split_once('.')?;
        (module == *theirs).then_some(())?;
        Some(Target { place: place(ours), expert: Some(number(expert)?) })
    })
}

/// A number as a file would write it, small enough for one more.
fn number(text: &str) -> Option<usize> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number as usize)
}

type Found<'a> = BTreeMap<Place, BTreeMap<usize, (&'a str, &'a Stored)>>;

/// Refuses a model that lacks a layer, an expert, or in one layer what others of its kind have.
fn check_complete(found: &Found<'_>, sizes: &Sizes) -> Result<(), HfError> {
    let missing = |name: &str, of: Option<String>| HfError::Missing { name: name.to_owned(), of };
    for name in [EMBEDDING, "output_norm.weight"] {
        if !found.contains_key(&(0, name.to_owned())) {
            return Err(missing(name, None));
        }
    }
    if sizes.is_tied == Some(false) && !found.contains_key(&(0, OUTPUT.to_owned())) {
        return Err(missing(
            "lm_head.weight",
            Some("config.json says that it is not the embedding".to_owned()),
        ));
    }
    let mut layers: Vec<BTreeSet<&str>> = vec![BTreeSet::new(); sizes.n_layers];
    for ((layer, name), parts) in found.iter().filter(|((layer, _), _)| *layer > 0) {
        layers[layer - 1].insert(name);
        let wanted = if name.contains("_exps.") { sizes.n_experts } else { 1 };
        if let Some(expert) = (0..wanted).find(|expert| !parts.contains_key(expert)) {
            let of = format!("there is none for expert {expert} of {wanted}");
            return Err(missing(&format!("blk.{}.{name}", layer - 1), Some(of)));
        }
    }
    let router = format!("{ROUTER}.weight");
    for has_experts in [false, true] {
        let of_kind =
            || layers.iter().enumerate().filter(|(_, names)| names.contains(&*router) == has_experts);
        let wanted: BTreeMap<&str, usize> =
            of_kind().flat_map(|(layer, names)| names.iter().map(move |name| (*name, layer))).collect();
        for (layer, names) in of_kind() {
            if names.is_empty() {
                return Err(missing(&format!("model.layers.{layer}"), None));
            }
            if let Some((name, other)) = wanted.iter().find(|(name, _)| !names.contains(*name)) {
                let of = format!("layer {other} has its like");
                return Err(missing(&format!("blk.{layer}.{name}"), Some(of)));
            }
        }
    }
    Ok(())
}

/// How a tensor is made of its parts, each with its name in the folder.
fn made(name: &str, parts: Vec<(&str, &Stored)>, family: &Family, sizes: &Sizes) -> Result<Made, HfError> {
    let (first_name, first) = parts[0];
    let wrong = |name: &str, expected: String, got: &[usize]| HfError::Shape {
        name: name.to_owned(),
        expected,
        got: got.to_vec(),
    };
    if let Some((name, other)) =
        parts.iter().find(|(_, part)| (part.dtype, &part.shape) != (first.dtype, &first.shape))
    {
        return Err(wrong(
            name,
            format!("{:?} in {}, as {first_name}", first.shape, first.dtype),
            &other.shape,
        ));
    }
    let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
    let mut shape: Vec<usize> = first.shape.iter().rev().copied().collect();
    if shape.len() > 2 {
        return Err(wrong(first_name, "a matrix or a vector".to_owned(), &first.shape));
    }
    // One row that says how much the shared expert is wanted.
    if module == SHARED_ROUTER && shape.len() == 2 && shape[1] == 1 {
        shape.truncate(1);
    }
    let is_vector = shape.len() == 1;
    if module.ends_with("_exps") {
        shape.push(parts.len());
    }
    let heads = match module {
        "attn_q" => Some(sizes.n_heads),
        "attn_k" => Some(sizes.n_kv_heads),
        _ => None,
    };
    if let Some(heads) = heads
        && first.shape[0] != heads * sizes.head_dim
    {
        let expected = format!("{heads} heads of {} rows", sizes.head_dim);
        return Err(wrong(first_name, expected, &first.shape));
    }
    if name == EMBEDDING && shape.first() != Some(&sizes.n_embd) {
        return Err(wrong(first_name, format!("rows of {} values", sizes.n_embd), &first.shape));
    }
    let is_kept = is_vector || module == ROUTER;
    Ok(Made {
        dtype: if is_kept { DType::F32 } else { first.dtype },
        added: if family.norms_beyond_one && name.ends_with("norm.weight") { 1.0 } else { 0.0 },
        reordered_heads: heads.filter(|_| family.is_reordered),
        parts: parts.into_iter().map(|(_, stored)| stored.clone()).collect(),
        shape,
    })
}

impl Tensors {
    /// Adds a tensor of numbers that no file of the folder holds.
    pub fn add_constant(&mut self, name: &str, values: &[f32]) {
        self.all.insert((0, name.to_owned()), Recipe::constant(values));
    }

    /// Rows of the embedding.
    pub fn n_vocab(&self) -> Result<usize, HfError> {
        match self.all.get(&(0, EMBEDDING.to_owned())).map(Recipe::shape) {
            Some(&[_, n_vocab]) => Ok(n_vocab),
            _ => Err(HfError::Missing { name: EMBEDDING.to_owned(), of: None }),
        }
    }

    /// Declares them all, in their order.
    pub fn declare(&self, writer: &mut GgufWriter) -> Result<(), HfError> {
        for (place, recipe) in &self.all {
            writer.add_tensor(&full_name(place), recipe.shape(), recipe.dtype())?;
        }
        Ok(())
    }

    /// The same with the files that they are made of.
    pub fn with(self, shards: Shards) -> Weights {
        Weights::new(self.all.into_iter().map(|(place, recipe)| (full_name(&place), recipe)), shards)
    }
}

fn full_name((layer, name): &Place) -> String {
    match layer.checked_sub(1) {
        Some(layer) => format!("blk.{layer}.{name}"),
        None => name.clone(),
    }
}
