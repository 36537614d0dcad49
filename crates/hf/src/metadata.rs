//! Hyper-parameters: from the keys of `config.json` to those of GGUF.

use kvant_gguf::{Element, GgufWriter, Value};
use serde_json::Value as JsonValue;

use crate::error::HfError;
use crate::family::{Experts, Family, Layers, RMS_EPS, Windows};
use crate::folder::{Object, shown};
use crate::heads_by_layer;
use crate::layers::{self, Delta, FullHeads, Mla, Space, sublayers};
use crate::ngrams;
use crate::shared_kv;
use crate::streams;
use crate::windowed_latent::WindowedMla;

/// Generous limit on layers: per-layer lists are allocated before tensors are validated.
pub(crate) const MAX_LAYERS: usize = 4096;

/// Families that have RMSNorms if their epsilon is there, else LayerNorms.
const EITHER_NORM: [&str; 1] = ["cohere2moe"];

/// Sizes that tensor shapes are checked against.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    pub n_layers: usize,
    /// Additional layers for multi-token prediction (MTP).
    pub n_mtp_layers: usize,
    pub n_embd: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// Rotated values of a head.
    pub n_rot: usize,
    /// 0 for dense models.
    pub n_experts: usize,
    /// Number of residual streams.
    pub n_streams: usize,
    /// Parts of a table of n-grams, or 1.
    pub n_table_parts: usize,
    pub n_ctx: u32,
    /// Whether embedding and output matrix are tied.
    pub is_tied: Option<bool>,
    /// Of MLA layers.
    pub latent: Option<Mla>,
    /// Of MLA layers with a window, if they differ.
    pub windowed: Option<WindowedMla>,
    /// Which layers attend, where others are Kimi's delta rules.
    pub attends: Vec<bool>,
    /// Size of a head of their index.
    pub index_dim: Option<usize>,
    /// Of gated-delta layers.
    pub delta: Option<Delta>,
    /// Of state-space layers.
    pub space: Option<Space>,
    /// Of full-attention layers, if they have KV heads of their own.
    pub full: Option<FullHeads>,
}

/// Writes keys prefixed with the architecture.
pub(crate) struct Keys<'a> {
    pub writer: &'a mut GgufWriter,
    pub arch: &'static str,
}

impl Keys<'_> {
    pub fn set<'v>(&mut self, key: &str, value: impl Into<Value<'v>>) -> Result<(), HfError> {
        Ok(self.writer.set(&format!("{}.{key}", self.arch), value)?)
    }

    pub fn set_array<'v, T: Element<'v>>(
        &mut self,
        key: &str,
        elements: impl IntoIterator<Item = T>,
    ) -> Result<(), HfError> {
        Ok(self.writer.set_array(&format!("{}.{key}", self.arch), elements)?)
    }
}

/// Writes the hyper-parameters of the model `name`, except RoPE scaling.
///
/// # Errors
/// A number that is missing or out of range, or a feature that is not supported for the family.
pub(crate) fn write(
    writer: &mut GgufWriter,
    config: Object<'_>,
    family: &Family,
    name: &str,
) -> Result<Sizes, HfError> {
    writer.set("general.architecture", family.arch)?;
    writer.set("general.type", "model")?;
    writer.set("general.name", name)?;
    check_activation(config, family)?;
    let sizes = read_sizes(config, family)?;
    let mut keys = Keys { writer, arch: family.arch };
    keys.set("block_count", sizes.n_layers as u32)?;
    keys.set("context_length", sizes.n_ctx)?;
    keys.set("embedding_length", sizes.n_embd as u32)?;
    let is_rms = EITHER_NORM.contains(&family.arch) && config.find_float(RMS_EPS.0)?.is_some();
    let (theirs, ours) = if is_rms { RMS_EPS } else { family.eps };
    keys.set(ours, config.float(theirs)? as f32)?;
    match (family.layers, &sizes.windowed) {
        (Layers::HeadsByLayer { .. }, _) => heads_by_layer::write(&mut keys, config, &sizes)?,
        (_, Some(windowed)) => keys.set_array("attention.head_count", windowed.heads(sizes.n_heads))?,
        _ => keys.set("attention.head_count", sizes.n_heads as u32)?,
    }
    layers::write_widths(&mut keys, config, family)?;
    layers::write(&mut keys, config, family, &sizes)?;
    if sizes.n_rot > 0 {
        let halves_full = family.layers == Layers::HeadsByLayer { halves_full: true };
        keys.set("rope.dimension_count", if halves_full { 2 * sizes.n_rot } else { sizes.n_rot } as u32)?;
    }
    for (theirs, ours) in family.factors {
        if let Some(factor) = config.find_float(theirs)? {
            keys.set(ours, factor as f32)?;
        }
    }
    write_windows(&mut keys, config, family, &sizes)?;
    if let Some(experts) = family.experts.filter(|_| sizes.n_experts > 0) {
        write_experts(&mut keys, config, experts, &sizes)?;
    }
    if let Some(n) = config.find_size("num_loops")? {
        keys.set("num_loops", n)?;
        keys.set("skip_loop_final_norm", config.find_bool("skip_loop_final_norm")?.unwrap_or(false))?;
    }
    check_scale(config, family, &sizes)?;
    check_no_rope_layers(config, family, &sizes)?;
    check_fixed(config, family)?;
    check_required_strings(config, family)?;
    Ok(sizes)
}

/// Sizes of attention heads; all 0 in models without attention.
#[derive(Default)]
struct Heads {
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    n_rot: usize,
    latent: Option<Mla>,
    full: Option<FullHeads>,
}

fn read_heads(config: Object<'_>, family: &Family, n_embd: usize) -> Result<Heads, HfError> {
    if family.layers == Layers::StateSpaces {
        return Ok(Heads::default());
    }
    let n_heads = config.size("num_attention_heads")? as usize;
    let n_kv_heads = config.find_size("num_key_value_heads")?.map_or(n_heads, |n| n as usize);
    let latent = Mla::of(config, family)?;
    let head_dim = match latent {
        Some(latent) => latent.k_dim + latent.n_rot,
        None => config.find_size("head_dim")?.map_or(n_embd / n_heads, |n| n as usize),
    };
    if n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) {
        return Err(config.bad(
            "num_key_value_heads",
            format!("a divisor of the {n_heads} heads"),
            n_kv_heads.to_string(),
        ));
    }
    if head_dim == 0 || head_dim % 2 != 0 {
        return Err(config.bad("head_dim", "an even number from 2 on", head_dim.to_string()));
    }
    let rope = config.find_object("rope_parameters")?;
    let full = rope.map(|rope| rope.find_object("full_attention")).transpose()?.flatten();
    let fraction = full.or(rope).map(|rope| rope.find_float("partial_rotary_factor")).transpose()?.flatten();
    let fraction = fraction.or(config.find_float("partial_rotary_factor")?).unwrap_or(family.rotary_fraction);
    let full = FullHeads::of(config, family, FullHeads { n_kv_heads, head_dim })?;
    let n_rot = match (latent, full) {
        (Some(latent), _) => latent.n_rot,
        _ if family.layers == Layers::SharedKv => shared_kv::n_rot(config, head_dim, fraction)?,
        // Partial rotation is expressed by frequency divisors.
        (_, Some(full)) => full.head_dim,
        _ => (fraction * head_dim as f64) as usize,
    };
    let head_size = full.map_or(head_dim, |full| full.head_dim);
    if n_rot == 0 || n_rot > head_size || !n_rot.is_multiple_of(2) {
        return Err(config.bad(
            "partial_rotary_factor",
            format!("a share of {head_size} that is an even number"),
            fraction.to_string(),
        ));
    }
    Ok(Heads { n_heads, n_kv_heads, head_dim, n_rot, latent, full })
}

fn read_sizes(config: Object<'_>, family: &Family) -> Result<Sizes, HfError> {
    let size = |key: &str| config.size(key).map(|size| size as usize);
    let n_embd = size("hidden_size")?;
    let Heads { n_heads, n_kv_heads, head_dim, n_rot, latent, full } = read_heads(config, family, n_embd)?;
    // A list of layers determines their number if no key does.
    let n_layers = match sublayers(config)?.filter(|_| family.layers == Layers::Halved) {
        Some(halves) => halves.len(),
        None => size("num_hidden_layers")?,
    };
    if n_layers > MAX_LAYERS {
        return Err(config.bad("num_hidden_layers", format!("1 to {MAX_LAYERS}"), n_layers.to_string()));
    }
    let n_experts = family.experts.map(|_| read_experts(config)).transpose()?.unwrap_or(0);
    Ok(Sizes {
        n_layers,
        n_mtp_layers: config
            .find_size("num_nextn_predict_layers")?
            .map_or(0, |n| (n as usize).min(MAX_LAYERS)),
        n_embd,
        n_heads,
        n_kv_heads,
        head_dim,
        n_rot,
        n_experts,
        n_streams: streams::count(config, family)?,
        n_table_parts: ngrams::n_parts(config, family)?,
        n_ctx: read_context(config, family)?,
        is_tied: config.find_bool("tie_word_embeddings")?.or(config.find_bool("tie_embedding")?),
        attends: layers::read_attending(config, family, n_layers)?,
        windowed: WindowedMla::of(config, family, latent)?,
        latent,
        index_dim: config
            .find_size("index_head_dim")?
            .or(config.find_size("indexer_head_dim")?)
            .map(|dim| dim as usize),
        delta: Delta::of(config, family)?,
        space: Space::of(config, family)?,
        full,
    })
}

/// Reads the number of experts, whose key varies even within families.
fn read_experts(config: Object<'_>) -> Result<usize, HfError> {
    if config.find_bool("enable_moe_block")? == Some(false) {
        return Ok(0);
    }
    let names = ["num_local_experts", "n_routed_experts", "moe_num_experts"];
    let key = names.into_iter().find(|name| config.value(name).is_some()).unwrap_or("num_experts");
    config.size(key).map(|n| n as usize)
}

/// Reads the context length. A model with windows that GGUF cannot express is limited to the
/// window.
fn read_context(config: Object<'_>, family: &Family) -> Result<u32, HfError> {
    let n_ctx = match config.find_size("model_max_length")? {
        Some(n_ctx) => n_ctx,
        None => config.size("max_position_embeddings")?,
    };
    let has_window =
        family.windows == Windows::None && config.find_bool("use_sliding_window")? != Some(false);
    let window = config.find_size("sliding_window")?.filter(|window| has_window && *window > 0);
    Ok(window.map_or(n_ctx, |window| window.min(n_ctx)))
}

fn check_activation(config: Object<'_>, family: &Family) -> Result<(), HfError> {
    for key in ["hidden_act", "hidden_activation"] {
        if let Some(name) = config.find_str(key)?
            && !family.activations.contains(&name)
        {
            return Err(config.bad(key, family.activations.join(" or "), name));
        }
    }
    Ok(())
}

/// Writes which layers have windows: those that the configuration names, or by period.
fn write_windows(
    keys: &mut Keys<'_>,
    config: Object<'_>,
    family: &Family,
    sizes: &Sizes,
) -> Result<(), HfError> {
    let period = match family.windows {
        Windows::None => return Ok(()),
        Windows::All | Windows::Named => 0,
        Windows::Every(period) => period,
    };
    // 0 disables windows.
    keys.set("attention.sliding_window", config.find_size("sliding_window")?.unwrap_or(0))?;
    let is_windowed = |layer: usize, period: usize| period == 0 || !(layer + 1).is_multiple_of(period);
    let usual: Vec<bool> = (0..sizes.n_layers).map(|layer| is_windowed(layer, period)).collect();
    let layers = match (config.find_array("layer_types")?, config.find_size("sliding_window_pattern")?) {
        (Some(kinds), _) => kinds.iter().map(|kind| kind == "sliding_attention").collect(),
        (None, None) if family.windows == Windows::Named && config.find_size("sliding_window")?.is_some() => {
            return Err(config.bad("layer_types", "the type of each layer", "nothing"));
        }
        (None, Some(period)) => {
            (0..sizes.n_layers).map(|layer| is_windowed(layer, period as usize)).collect()
        }
        (None, None) => usual.clone(),
    };
    if layers.len() != sizes.n_layers {
        return Err(config.bad(
            "layer_types",
            format!("{} layers", sizes.n_layers),
            layers.len().to_string(),
        ));
    }
    // Phi-3 lists one type for all layers, but `sliding_window` decides.
    if layers != usual && period != 0 || family.windows == Windows::Named {
        keys.set_array("attention.sliding_window_pattern", layers)?;
    }
    Ok(())
}

fn write_experts(
    keys: &mut Keys<'_>,
    config: Object<'_>,
    experts: Experts,
    sizes: &Sizes,
) -> Result<(), HfError> {
    keys.set("expert_count", sizes.n_experts as u32)?;
    let used =
        ["num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_k"];
    let used = used.into_iter().find(|key| config.value(key).is_some()).unwrap_or(used[0]);
    keys.set("expert_used_count", config.size(used)?)?;
    if let Some(width) = config.find_size("shared_intermediate_size")?.filter(|width| *width > 0) {
        keys.set("expert_shared_feed_forward_length", width)?;
    }
    let Some(width) = experts.width else { return Ok(()) };
    keys.set("expert_feed_forward_length", config.size(width)?)?;
    for (theirs, ours) in [
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ("moe_latent_size", "moe_latent_size"),
        ("n_shared_experts", "expert_shared_count"),
        ("moe_num_shared_experts", "expert_shared_count"),
        ("num_shared_experts", "expert_shared_count"),
    ] {
        if let Some(size) = config.find_size(theirs)? {
            keys.set(ours, size)?;
        }
    }
    if let Some(normalizes) = config.find_bool("norm_topk_prob")?.or(config.find_bool("moe_renormalize")?) {
        keys.set("expert_weights_norm", normalizes)?;
    }
    if let Some(factor) = config.find_float("routed_scaling_factor")? {
        keys.set("expert_weights_scale", factor as f32)?;
    }
    if experts.by_sigmoid {
        keys.set("expert_gating_func", 2_u32)?;
    }
    if let Some(step) = config.find_size("decoder_sparse_step")?.filter(|step| *step != 1) {
        keys.set("interleave_moe_layer_step", step)?;
    }
    write_groups(keys, config)?;
    write_dense(keys, config)
}

/// Writes the expert groups of the router.
fn write_groups(keys: &mut Keys<'_>, config: Object<'_>) -> Result<(), HfError> {
    let n = config.find_size("n_group")?.or(config.find_size("num_expert_group")?);
    let (Some(n), Some(used)) = (n, config.find_size("topk_group")?) else {
        return Ok(());
    };
    match config.find_str("topk_method")? {
        // All experts form one group.
        Some("greedy") => return Ok(()),
        None | Some("group_limited_greedy" | "noaux_tc") => {}
        Some(other) => {
            let known = "greedy, group_limited_greedy or noaux_tc";
            return Err(config.bad("topk_method", known, other));
        }
    }
    keys.set("expert_group_count", n)?;
    keys.set("expert_group_used_count", used)
}

/// Writes the number of leading dense layers; GGUF cannot express others.
fn write_dense(keys: &mut Keys<'_>, config: Object<'_>) -> Result<(), HfError> {
    let dense = config.find_array("mlp_only_layers")?.unwrap_or_default();
    if dense.iter().enumerate().any(|(index, layer)| layer.as_u64() != Some(index as u64)) {
        return Err(config.bad("mlp_only_layers", "none but the first layers", list(dense)));
    }
    let kinds = config.find_array("mlp_layer_types")?.unwrap_or_default();
    let n_dense = kinds.iter().filter(|kind| **kind == "dense").count();
    if kinds[..n_dense].iter().any(|kind| kind != "dense") {
        return Err(config.bad("mlp_layer_types", "dense ones before all others", list(kinds)));
    }
    let mut n = dense.len().max(n_dense) as u32;
    // A list of kinds decides, whatever its rule says.
    let rules = ["first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"];
    for key in if kinds.is_empty() { &rules[..] } else { &[] } {
        n = n.max(config.find_size(key)?.unwrap_or(0));
    }
    if n > 0 {
        keys.set("leading_dense_block_count", n)?;
    }
    Ok(())
}

/// Checks the attention scale, for which GGUF has no key in these families: readers assume it.
fn check_scale(config: Object<'_>, family: &Family, sizes: &Sizes) -> Result<(), HfError> {
    let Some(got) = config.find_float("query_pre_attn_scalar")? else { return Ok(()) };
    let is_by_width = sizes.n_layers == family.scaled_by_width as usize;
    let known = if is_by_width { sizes.n_embd / sizes.n_heads } else { sizes.head_dim };
    if got == known as f64 {
        return Ok(());
    }
    Err(config.bad("query_pre_attn_scalar", format!("{known}, as GGUF readers assume"), got.to_string()))
}

/// Checks the layers without RoPE, for which GGUF has no key either.
fn check_no_rope_layers(config: Object<'_>, family: &Family, sizes: &Sizes) -> Result<(), HfError> {
    let period = family.no_rope_period;
    let Some(uses_rope) = config.find_array("no_rope_layers")?.filter(|_| period > 0) else { return Ok(()) };
    let is_known =
        |(index, layer): (usize, &JsonValue)| layer.as_u64() == Some(u64::from((index + 1) % period != 0));
    if uses_rope.len() == sizes.n_layers && uses_rope.iter().enumerate().all(is_known) {
        return Ok(());
    }
    Err(config.bad(
        "no_rope_layers",
        format!("a 0 every {period} of {} layers", sizes.n_layers),
        list(uses_rope),
    ))
}

/// Checks other numbers that are constant within a family, for which GGUF has no key.
fn check_fixed(config: Object<'_>, family: &Family) -> Result<(), HfError> {
    for (key, known) in family.fixed {
        let Some(value) = config.value(key) else { continue };
        let got = value.as_f64().or(value.as_bool().map(|is| f64::from(u8::from(is))));
        if got != Some(*known) {
            let known = if value.is_boolean() { (*known == 1.0).to_string() } else { known.to_string() };
            return Err(config.bad(key, format!("{known}, as GGUF readers assume"), shown(value)));
        }
    }
    Ok(())
}

/// Checks string values that are constant within a family.
fn check_required_strings(config: Object<'_>, family: &Family) -> Result<(), HfError> {
    for (key, known) in family.words {
        let got = config.find_str(key)?;
        if got != Some(known) {
            return Err(config.bad(key, *known, got.unwrap_or("nothing")));
        }
    }
    Ok(())
}

/// Joins values for a message.
pub(crate) fn list(values: &[JsonValue]) -> String {
    values.iter().map(shown).collect::<Vec<_>>().join(", ")
}
