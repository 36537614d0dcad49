//! Which folder tensors make up each GGUF tensor.

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
use crate::streams;
use crate::tensor_names::{
    EMBEDDING, OUTPUT, ROUTER, SHARED_ROUTER, Target, TensorKey, draft_tokens, full_name, is_encoder_tensor,
    output_norm, targets,
};
use crate::tensor_transform::{Transform, View};

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
/// The tensors of a model by GGUF name: global ones first, then layer by layer.
pub(crate) struct Tensors {
    all: BTreeMap<TensorKey, Recipe>,
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
