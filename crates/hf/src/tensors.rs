//! Tensor names in both formats, and which folder tensors make up each GGUF tensor.

use std::collections::{BTreeMap, BTreeSet};

use kvant_codec::DType;
use kvant_gguf::GgufWriter;

use crate::connections;
use crate::error::{HfError, TensorFault};
use crate::family::{Family, Layers};
use crate::metadata::Sizes;
use crate::ngrams;
use crate::recipe::{ConvertedTensor, Recipe, Values, Weights};
use crate::safetensors::{ElementKind, Shards, Stored};
use crate::shared_kv;
use crate::streams;
use crate::tensor_transform::{Transform, View};

/// GGUF names of the modules of a layer. Modules of experts have the same names in each expert.
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
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.indexer.wq_b", "indexer.attn_q_b"),
    ("self_attn.indexer.wk", "indexer.attn_k"),
    ("self_attn.indexer.k_norm", "indexer.k_norm"),
    ("self_attn.indexer.weights_proj", "indexer.proj"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.query_layernorm", "attn_q_norm"),
    ("self_attn.key_layernorm", "attn_k_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.w2", "ffn_down"),
    ("feed_forward.gate", ROUTER),
];

/// Modules of an expert, by the prefix of experts.
const EXPERTS: &[(&str, &str, &str)] = &[
    ("mlp.experts.", "gate_proj", "ffn_gate_exps"),
    ("mlp.experts.", "up_proj", "ffn_up_exps"),
    ("mlp.experts.", "down_proj", "ffn_down_exps"),
    ("ffn.experts.", "w1", "ffn_gate_exps"),
    ("ffn.experts.", "w3", "ffn_up_exps"),
    ("ffn.experts.", "w2", "ffn_down_exps"),
    ("block_sparse_moe.experts.", "w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.", "w3", "ffn_up_exps"),
    ("block_sparse_moe.experts.", "w2", "ffn_down_exps"),
    ("mixer.experts.", "up_proj", "ffn_up_exps"),
    ("mixer.experts.", "down_proj", "ffn_down_exps"),
    ("feed_forward.experts.", "w1", "ffn_gate_exps"),
    ("feed_forward.experts.", "w3", "ffn_up_exps"),
    ("feed_forward.experts.", "w2", "ffn_down_exps"),
];

/// The router, stored in f32 as in llama.cpp.
const ROUTER: &str = "ffn_gate_inp";
const SHARED_ROUTER: &str = "ffn_gate_inp_shexp";
/// Taps of convolutions, also stored in f32.
const TAPS: [&str; 6] =
    ["shortconv.conv", "ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "ple_conv1d"];
/// Tensors that distinguish layer types; layers of one type have the same tensors.
const LAYER_TYPE_MARKERS: [&str; 3] = ["ffn_gate_inp.weight", "shortconv.out_proj.weight", "ssm_out.weight"];
/// The same for single-sublayer layers.
const SUBLAYER_MARKERS: [&str; 3] = ["ffn_gate_inp.weight", "attn_q.weight", "ssm_out.weight"];
/// The same if layers may share KV or use keys as values; the model loader validates which ones do.
const PER_KIND_HEADS_MARKERS: [&str; 3] = ["ffn_gate_inp.weight", "attn_k.weight", "attn_v.weight"];
/// The same if layers may attend to the tokens that an earlier one selects.
const SELECTING_MARKERS: [&str; 3] = ["ffn_gate_inp.weight", "indexer.attn_k.weight", "ssm_out.weight"];
/// The same if layers are MLA or Kimi's delta rules.
const KIMI_MARKERS: [&str; 3] = ["ffn_gate_inp.weight", "attn_kv_a_mqa.weight", "ssm_a"];
/// The same if some layers select blocks of tokens.
const SELECTING_BLOCKS_MARKERS: [&str; 3] =
    ["ffn_gate_inp.weight", "indexer.k_proj.weight", "ssm_out.weight"];
/// The same if layers with attention have an index, and one has embeddings of n-grams.
const DELTA_STREAMS_MARKERS: [&str; 3] = ["ple_key.weight", "indexer.k_proj.weight", "ssm_out.weight"];
/// The same if layers pool tokens of a window, with an index or without, and if some have a table
/// of experts.
const SHARED_KV_MARKERS: [&str; 3] =
    ["attn_compressor_kv.weight", "indexer.attn_q_b.weight", "ffn_gate_tid2eid.weight"];
const EMBEDDING: &str = "token_embd.weight";
const OUTPUT: &str = "output.weight";

/// The tensors of a model by GGUF name: global ones first, then layer by layer.
pub(crate) struct Tensors {
    all: BTreeMap<TensorKey, Recipe>,
}

/// The layer, counted from 1, and the name within it; global tensors have layer 0.
pub(crate) type TensorKey = (usize, String);

/// The GGUF counterpart of a folder tensor.
pub(crate) struct Target {
    pub place: TensorKey,
    /// The expert index, or 1 for scales of blocks.
    pub part: usize,
    pub cut: Transform,
}

/// A folder tensor that makes up a GGUF tensor, or part of it.
#[derive(Clone, Copy)]
struct SourceTensor<'a> {
    name: &'a str,
    stored: &'a Stored,
    cut: Transform,
}

impl SourceTensor<'_> {
    /// Whether it stacks all experts.
    fn is_stacked(&self) -> bool {
        self.cut != Transform::Whole || self.stored.shape.len() > 2
    }

    /// Whether it is one of two factors.
    fn is_factor(&self) -> bool {
        matches!(self.cut, Transform::Factor { .. })
    }

    fn wrong(&self, expected: String) -> HfError {
        HfError::Shape { name: self.name.to_owned(), expected, got: self.stored.shape.clone() }
    }
}

/// Maps every tensor of `shards` to GGUF.
///
/// # Errors
/// A tensor that is unknown in the family, missing, or whose shape contradicts `sizes`.
pub(crate) fn plan(shards: &Shards, family: &'static Family, sizes: &Sizes) -> Result<Tensors, HfError> {
    let mut found = Found::new();
    for (name, stored) in shards.tensors() {
        // Some files store the tied embedding twice.
        let is_twice = name.ends_with("lm_head.weight") && sizes.is_tied == Some(true);
        if is_twice || family.is_multimodal && is_encoder_tensor(name) || draft_tokens(name, sizes) {
            continue;
        }
        let unknown = || HfError::Unknown { name: name.to_owned(), family: family.class };
        let targets = targets(name, family);
        if targets.is_empty() {
            return Err(unknown());
        }
        for Target { place, part, cut } in targets {
            if !cut.is_for(&stored.shape, place.0, sizes) {
                continue;
            }
            let max_parts = match cut {
                Transform::Scales { .. } | Transform::Factor { .. } => 2,
                _ if streams::is_stack(&place.1) => sizes.n_streams - 1,
                _ if place.1 == ngrams::TABLE => sizes.n_table_parts,
                _ => sizes.n_experts.max(1),
            };
            // Modules that share a GGUF name belong to different families.
            if place.0 > sizes.n_layers
                || part >= max_parts
                || found.entry(place).or_default().insert(part, SourceTensor { name, stored, cut }).is_some()
            {
                return Err(unknown());
            }
        }
    }
    check_complete(&found, family, sizes)?;
    let mut all = BTreeMap::new();
    for (place, parts) in found {
        let parts: Vec<SourceTensor<'_>> = parts.into_values().collect();
        check_types(&parts, shards)?;
        all.insert(
            place.clone(),
            Recipe::Stored(recipe_of(&place.1, &parts, family, &sizes.of_layer(place.0))?),
        );
    }
    Ok(Tensors { all })
}

/// Whether a tensor belongs to the multi-token prediction (MTP) layers, which are not converted.
fn draft_tokens(name: &str, sizes: &Sizes) -> bool {
    // ERNIE and K-EXAONE store them separately.
    if ["model.mtp_", "model.mtp.", "mtp."].iter().any(|start| name.starts_with(start)) {
        return true;
    }
    let layer = name.strip_prefix("model.layers.").and_then(|rest| number(rest.split_once('.')?.0));
    layer.is_some_and(|layer| (sizes.n_layers..sizes.n_layers + sizes.n_mtp_layers).contains(&layer))
}

/// Whether a tensor belongs to the vision or audio encoder of a multimodal model.
fn is_encoder_tensor(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    let prefixes = [
        "vision_tower.",
        "vision_model.",
        "vit_large_projector.",
        "patch_merge_mlp.",
        "multi_modal_projector.",
        "visual.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
        "mm_projector.",
        "vision_encoder.",
        "audio_encoder.",
    ];
    prefixes.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns the GGUF counterparts of a tensor; empty if unknown.
pub(crate) fn targets(name: &str, family: &Family) -> Vec<Target> {
    let name = match family.layers {
        Layers::Halved | Layers::StateSpaces => &*name.replacen("backbone.", "model.", 1),
        Layers::Connected => &*connections::usual_name(name),
        Layers::SharedKv => &*shared_kv::usual_name(name),
        _ if family.is_multimodal => &*name.replacen("language_model.", "", 1),
        // Models saved without an output head omit the prefix `model.`.
        _ if ["embed_tokens.", "layers.", "norm."].iter().any(|start| name.starts_with(start)) => {
            &*format!("model.{name}")
        }
        _ => name,
    };
    let of_layer = name.strip_prefix("model.layers.").and_then(|rest| {
        let (layer, name) = rest.split_once('.')?;
        Some((number(layer)? + 1, name))
    });
    let (layer, name) = of_layer.unwrap_or((0, name));
    if let Some(part) = ngrams::part_of_table(name).filter(|_| family.layers == Layers::DeltaStreams) {
        return vec![Target { place: (0, ngrams::TABLE.to_owned()), part, cut: Transform::Whole }];
    }
    let own = family.tensors.iter().filter(|(theirs, ..)| *theirs == name).map(|(_, ours, cut)| Target {
        place: (layer, (*ours).to_owned()),
        part: cut.part(),
        cut: *cut,
    });
    let own: Vec<Target> = own.filter(|_| layer > 0 || name.starts_with("model.")).collect();
    match layer {
        _ if !own.is_empty() => own,
        0 => whole(name, family).into_iter().collect(),
        _ => module(layer, name, family).into_iter().collect(),
    }
}

/// Maps a global tensor.
fn whole(name: &str, family: &Family) -> Option<Target> {
    if let Some((ours, part)) = streams::stacked(name) {
        return Some(Target { place: (0, ours.to_owned()), part, cut: Transform::Whole });
    }
    if let Some(ours) = connections::behind_layers(name) {
        return Some(Target { place: (0, ours.to_owned()), part: 0, cut: Transform::Whole });
    }
    let ours = match name {
        "lm_head.weight" => OUTPUT,
        "lm_head.bias" => "output.bias",
        "model.norm.bias" | "model.final_layernorm.bias" => "output_norm.bias",
        "model.final_layernorm.weight" => "output_norm.weight",
        "model.embed_tokens.weight" | "model.embeddings.weight" | "model.word_embeddings.weight" => EMBEDDING,
        "model.norm.weight" | "model.embedding_norm.weight" | "model.norm_f.weight" => output_norm(family),
        "model.embed_tokens_per_layer.weight" => ngrams::TABLE,
        "model.per_layer_model_projection.weight" => "per_layer_model_proj.weight",
        "model.per_layer_projection_norm.weight" => "per_layer_proj_norm.weight",
        _ => return None,
    };
    Some(Target { place: (0, ours.to_owned()), part: 0, cut: Transform::Whole })
}

/// Returns the name of the final norm.
fn output_norm(family: &Family) -> &'static str {
    match family.layers {
        Layers::Convolving => "token_embd_norm.weight",
        Layers::DeltaStreams => "output_hc_norm.weight",
        _ => "output_norm.weight",
    }
}

/// Maps a weight or bias of a layer that most families have.
fn module(layer: usize, name: &str, family: &Family) -> Option<Target> {
    let (module, kind) = name.rsplit_once('.').filter(|(_, kind)| ["weight", "bias"].contains(kind))?;
    let target =
        |ours: &str, part| Target { place: (layer, format!("{ours}.{kind}")), part, cut: Transform::Whole };
    if module == "post_attention_layernorm" {
        return Some(target(
            if family.has_post_attention_norm { "post_attention_norm" } else { "ffn_norm" },
            0,
        ));
    }
    if let Some((_, ours)) = MODULES.iter().find(|(theirs, _)| *theirs == module) {
        return Some(target(ours, 0));
    }
    EXPERTS.iter().find_map(|(folder, theirs, ours)| {
        let (expert, module) = module.strip_prefix(folder)?.split_once('.')?;
        (module == *theirs).then_some(target(ours, number(expert)?))
    })
}

/// Parses a number in canonical spelling, small enough to increment.
fn number(text: &str) -> Option<usize> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number as usize)
}

type Found<'a> = BTreeMap<TensorKey, BTreeMap<usize, SourceTensor<'a>>>;

/// Rejects a model that lacks a layer, an expert, or a tensor that other layers of its type have.
fn check_complete(found: &Found<'_>, family: &Family, sizes: &Sizes) -> Result<(), HfError> {
    let missing = |name: &str, of: Option<String>| HfError::Missing { name: name.to_owned(), of };
    for name in [EMBEDDING, output_norm(family)] {
        if !found.contains_key(&(0, name.to_owned())) {
            return Err(missing(name, None));
        }
    }
    if let Some(parts) = found.get(&(0, ngrams::TABLE.to_owned()))
        && let Some(part) = (0..sizes.n_table_parts).find(|part| !parts.contains_key(part))
    {
        return Err(missing(ngrams::TABLE, Some(format!("part {part} of {}", sizes.n_table_parts))));
    }
    if sizes.is_tied == Some(false) && !found.contains_key(&(0, OUTPUT.to_owned())) {
        return Err(missing("lm_head.weight", Some("config.json unties it from the embedding".to_owned())));
    }
    let mut layers: Vec<BTreeSet<&str>> = vec![BTreeSet::new(); sizes.n_layers];
    for ((layer, name), parts) in found.iter().filter(|((layer, _), _)| *layer > 0) {
        layers[layer - 1].insert(name);
        check_parts(name, parts, sizes)
            .map_err(|of| missing(&format!("blk.{}.{name}", layer - 1), Some(of)))?;
    }
    let marks = match family.layers {
        Layers::OwnHeads | Layers::Streams => PER_KIND_HEADS_MARKERS,
        Layers::Halved => SUBLAYER_MARKERS,
        Layers::Selecting | Layers::Connected | Layers::WindowedLatent => SELECTING_MARKERS,
        Layers::Kimi | Layers::KimiStreams => KIMI_MARKERS,
        Layers::SelectingBlocks => SELECTING_BLOCKS_MARKERS,
        Layers::SharedKv => SHARED_KV_MARKERS,
        Layers::DeltaStreams => DELTA_STREAMS_MARKERS,
        _ => LAYER_TYPE_MARKERS,
    };
    let kind = |names: &BTreeSet<&str>| marks.map(|mark| names.contains(mark));
    let mut names_by_kind: BTreeMap<[bool; 3], BTreeMap<&str, usize>> = BTreeMap::new();
    for (layer, names) in layers.iter().enumerate() {
        names_by_kind.entry(kind(names)).or_default().extend(names.iter().map(|name| (*name, layer)));
    }
    for (layer, names) in layers.iter().enumerate() {
        if names.is_empty() {
            return Err(missing(&format!("model.layers.{layer}"), None));
        }
        if let Some((name, other)) =
            names_by_kind[&kind(names)].iter().find(|(name, _)| !names.contains(*name))
        {
            let of = format!("layer {other} has it");
            return Err(missing(&format!("blk.{layer}.{name}"), Some(of)));
        }
    }
    Ok(())
}

/// Checks that a tensor with several parts is complete.
fn check_parts(name: &str, parts: &BTreeMap<usize, SourceTensor<'_>>, sizes: &Sizes) -> Result<(), String> {
    let is_packed =
        |part: &SourceTensor<'_>| matches!(part.cut, Transform::Blocks { .. } | Transform::Scales { .. });
    if parts.values().any(is_packed) {
        let what = ["blocks", "scales"];
        let missing = (0..2).find(|part| !parts.get(part).is_some_and(is_packed));
        return missing.map_or(Ok(()), |part| Err(format!("its {} are absent", what[part])));
    }
    // The recipe has both factors.
    if parts.values().any(SourceTensor::is_factor) {
        return Ok(());
    }
    let is_whole = parts.get(&0).is_some_and(SourceTensor::is_stacked);
    let is_each = name.contains("_exps.") && !name.ends_with(".scale");
    let n_expected = if is_each && !is_whole { sizes.n_experts } else { 1 };
    match (0..n_expected).find(|expert| !parts.contains_key(expert)) {
        Some(expert) => Err(format!("expert {expert} of {n_expected}")),
        None => Ok(()),
    }
}

/// Checks that codes and scales of MXFP4 are bytes, tables of experts integers and everything else
/// values.
fn check_types(parts: &[SourceTensor<'_>], shards: &Shards) -> Result<(), HfError> {
    for SourceTensor { name, stored, cut } in parts {
        let wants_bytes = matches!(cut, Transform::Blocks { .. } | Transform::Scales { .. });
        let wants_integers = *cut == Transform::Integers;
        let is_expected = match stored.holds {
            ElementKind::Bytes => wants_bytes,
            ElementKind::I32 | ElementKind::I64 => wants_integers,
            ElementKind::Values(_) => !wants_bytes && !wants_integers,
            _ => false,
        };
        if !is_expected {
            let got = stored.holds.to_string();
            let what = match wants_integers {
                true => TensorFault::Part { expected: "I32 or I64", got },
                false if wants_bytes => TensorFault::Codes { got },
                false => TensorFault::Type { got },
            };
            let (path, name) = (shards.path(stored).to_owned(), (*name).to_owned());
            return Err(HfError::Tensor { path, name, what });
        }
    }
    Ok(())
}

/// Returns the recipe of a tensor from its parts.
fn recipe_of(
    name: &str,
    parts: &[SourceTensor<'_>],
    family: &Family,
    sizes: &Sizes,
) -> Result<ConvertedTensor, HfError> {
    let first = parts[0];
    let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
    let (mut shape, mut views) =
        first.cut.of(&first.stored.shape, sizes).map_err(|expected| first.wrong(expected))?;
    let of_experts = module.ends_with("_exps") && !name.ends_with(".scale");
    if shape.len() > 2 && first.cut == Transform::Whole && !(of_experts && shape.len() == 3) {
        return Err(first.wrong("a matrix or a vector".to_owned()));
    }
    if of_experts && first.is_stacked() && shape[0] != sizes.n_experts {
        return Err(first.wrong(format!("{} experts", sizes.n_experts)));
    }
    shape.reverse();
    // The gate of the shared expert is a single row.
    if module == SHARED_ROUTER && shape.len() == 2 && shape[1] == 1 {
        shape.truncate(1);
    }
    let scales = match first.stored.holds {
        ElementKind::Bytes => Some(made_scales(&parts[1], &shape, sizes)?),
        _ if first.is_factor() => {
            check_factors(name, parts, &shape, sizes)?;
            None
        }
        _ if name == ngrams::TABLE => {
            shape[1] = rows_of_parts(parts)?;
            None
        }
        _ => {
            check_alike(parts)?;
            None
        }
    };
    let is_kept = shape.len() == 1
        || [ROUTER, "ssm_norm"].contains(&module)
        || TAPS.contains(&module)
        || connections::is_projection(module)
        || !name.ends_with(".weight");
    if of_experts && !first.is_stacked() || streams::is_stack(name) {
        shape.push(parts.len());
    }
    if let Some(heads) = heads(module, &first, sizes, family)?.filter(|_| family.is_reordered) {
        let (rows, row) = (first.stored.shape[0], first.stored.shape[1..].iter().product());
        views = vec![View::interleave_halves(heads, rows, row)];
    }
    if name == EMBEDDING && shape.first() != Some(&sizes.n_embd) {
        return Err(first.wrong(format!("rows of {} values", sizes.n_embd)));
    }
    let parts = if scales.is_some() { &parts[..1] } else { parts };
    let Selection { parts, views } = Selection::of(parts, views);
    let dtype = match parts[0].holds {
        ElementKind::Values(dtype) => dtype,
        // Integers are numbers of kernels as f32.
        ElementKind::I32 | ElementKind::I64 => DType::F32,
        _ => DType::MXFP4,
    };
    Ok(ConvertedTensor {
        dtype: if is_kept { DType::F32 } else { dtype },
        values: match name {
            _ if first.cut == Transform::Integers => Values::Integers,
            _ if first.is_factor() => Values::Product,
            "ssm_a" if first.cut == Transform::ExponentialColumn => Values::Exponential,
            "ssm_a" => Values::Decay,
            "ssm_norm.weight" => Values::Kept,
            name if family.norms_minus_one && is_norm(name) => Values::BeyondOne,
            "attn_q_a_norm.weight" | "attn_kv_a_norm.weight" if family.layers == Layers::WindowedLatent => {
                Values::Times((sizes.n_embd as f64 / shape[0] as f64).sqrt() as f32)
            }
            _ => Values::Kept,
        },
        parts,
        views,
        scales,
        shape,
    })
}

/// Whether a tensor is the weight of a norm.
fn is_norm(name: &str) -> bool {
    name.ends_with("norm.weight") || name.starts_with("ple_norm_")
}

/// Parts of a tensor, and views in units of their blocks.
struct Selection {
    parts: Vec<Stored>,
    views: Vec<View>,
}

impl Selection {
    /// Parts of different types, or whose blocks a view divides, become values.
    fn of(parts: &[SourceTensor<'_>], views: Vec<View>) -> Self {
        let first = parts[0].stored.holds;
        let in_blocks = views.iter().map(|view| view.in_blocks(first.block_len())).collect();
        let is_alike = parts.iter().all(|part| part.stored.holds == first);
        let stored = parts.iter().map(|part| part.stored);
        match in_blocks {
            _ if first.block_len() == 1 && is_alike => Self { parts: stored.cloned().collect(), views },
            Some(views) if is_alike => Self { parts: stored.cloned().collect(), views },
            _ => Self { parts: stored.map(Stored::dense).collect(), views },
        }
    }
}

/// Returns the scales of the blocks of a tensor with this shape, the row length first.
fn made_scales(
    scales: &SourceTensor<'_>,
    shape: &[usize],
    sizes: &Sizes,
) -> Result<(Stored, Vec<View>), HfError> {
    match scales.cut.of(&scales.stored.shape, sizes) {
        Ok((of, views)) if of.iter().rev().eq(shape) => Ok((scales.stored.clone(), views)),
        _ => Err(scales.wrong("one for each block of 16 bytes".to_owned())),
    }
}

/// Rejects a vector that lacks a factor, or whose factors differ in length.
fn check_factors(
    name: &str,
    parts: &[SourceTensor<'_>],
    shape: &[usize],
    sizes: &Sizes,
) -> Result<(), HfError> {
    let [_, second] = parts else {
        let of = Some(format!("the other factor beside '{}'", parts[0].name));
        return Err(HfError::Missing { name: name.to_owned(), of });
    };
    match second.cut.of(&second.stored.shape, sizes) {
        Ok((of_second, _)) if of_second == shape => Ok(()),
        _ => Err(second.wrong(format!("{} values, as {}", shape[0], parts[0].name))),
    }
}

/// Returns the rows of the parts of a table, whose numbers of rows may differ.
fn rows_of_parts(parts: &[SourceTensor<'_>]) -> Result<usize, HfError> {
    let row = |part: &SourceTensor<'_>| (part.stored.holds, part.stored.shape[1..].to_vec());
    let first = row(&parts[0]);
    match parts.iter().find(|part| part.stored.shape.len() != 2 || row(part) != first) {
        Some(other) => {
            Err(other.wrong(format!("rows of {:?} in {}, as {}", first.1, first.0, parts[0].name)))
        }
        None => Ok(parts.iter().map(|part| part.stored.shape[0]).sum()),
    }
}

/// Rejects experts of different types or shapes.
fn check_alike(parts: &[SourceTensor<'_>]) -> Result<(), HfError> {
    let first = parts[0];
    let is_alike = |part: &SourceTensor<'_>| {
        (part.stored.dense_kind(), &part.stored.shape) == (first.stored.dense_kind(), &first.stored.shape)
    };
    match parts.iter().find(|part| !is_alike(part)) {
        Some(other) => {
            let (shape, holds) = (&first.stored.shape, first.stored.holds);
            Err(other.wrong(format!("{shape:?} in {holds}, as {}", first.name)))
        }
        None => Ok(()),
    }
}

/// Returns the number of heads in the rows of a Q or K tensor.
fn heads(
    module: &str,
    part: &SourceTensor<'_>,
    sizes: &Sizes,
    family: &Family,
) -> Result<Option<usize>, HfError> {
    // The model loader validates the heads of each layer.
    if matches!(family.layers, Layers::OwnHeads | Layers::HeadsByLayer { .. }) || family.layers.are_kimi() {
        return Ok(None);
    }
    // The rows of each query are followed by as many of its gate.
    let per_head = if family.layers.are_delta() { 2 } else { 1 };
    let (heads, rows) = match module {
        "attn_q" => (sizes.n_heads, per_head * sizes.head_dim),
        "attn_k" => (sizes.n_kv_heads, sizes.head_dim),
        _ => return Ok(None),
    };
    if part.stored.shape[0] != heads * rows {
        return Err(part.wrong(format!("{heads} heads of {rows} rows")));
    }
    Ok(Some(heads))
}

impl Tensors {
    /// Collects tensors by their names.
    pub fn new(all: Vec<(TensorKey, Recipe)>) -> Self {
        Self { all: all.into_iter().collect() }
    }

    /// Adds a constant tensor that is not stored in the folder.
    pub fn add_constant(&mut self, name: &str, values: &[f32]) {
        self.all.insert((0, name.to_owned()), Recipe::constant(values));
    }

    /// Returns the vocabulary size: rows of the embedding.
    pub fn n_vocab(&self) -> Result<usize, HfError> {
        match self.all.get(&(0, EMBEDDING.to_owned())).map(Recipe::shape) {
            Some(&[_, n_vocab]) => Ok(n_vocab),
            _ => Err(HfError::Missing { name: EMBEDDING.to_owned(), of: None }),
        }
    }

    /// Declares all tensors, in order.
    pub fn declare(&self, writer: &mut GgufWriter) -> Result<(), HfError> {
        for (place, recipe) in &self.all {
            recipe.declare(&full_name(place), writer)?;
        }
        Ok(())
    }

    /// Attaches the files of the tensors.
    pub fn with(self, shards: Shards) -> Weights {
        Weights::new(self.all.into_iter().map(|(place, recipe)| (full_name(&place), recipe)), shards)
    }
}

pub(crate) fn full_name((layer, name): &TensorKey) -> String {
    match layer.checked_sub(1) {
        Some(layer) => format!("blk.{layer}.{name}"),
        None => name.clone(),
    }
}
