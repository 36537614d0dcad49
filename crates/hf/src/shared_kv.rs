//! Attention with one KV head whose keys are pooled too, beside several residual streams, as
//! DeepSeek-V4 has it. Newer configurations name the kinds of layers, published ones the numbers.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::error::HfError;
use crate::folder::{Object, shown};
use crate::metadata::{Keys, Sizes, list};
use crate::safetensors::Shards;

/// Names outside layers, and those of most families.
const OUTSIDE: [(&str, &str); 6] = [
    ("embed.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("head.weight", "lm_head.weight"),
    ("hc_head_fn", "model.hc_head.hc_fn"),
    ("hc_head_base", "model.hc_head.hc_base"),
    ("hc_head_scale", "model.hc_head.hc_scale"),
];

/// Returns the name of a tensor with the parts outside layers that most families have.
pub(crate) fn usual_name(name: &str) -> String {
    match OUTSIDE.iter().find(|(theirs, _)| *theirs == name) {
        Some((_, usual)) => (*usual).to_owned(),
        None if name.starts_with("layers.") => format!("model.{name}"),
        None => name.to_owned(),
    }
}

/// Removes what only images need: their encoder, and the bias of their routers. Layers that have a
/// table of experts for text have a bias that nothing reads.
pub(crate) fn remove_images(shards: &mut Shards) {
    let of_tables: BTreeSet<String> = shards
        .tensors()
        .filter_map(|(name, _)| Some(format!("{}.bias", name.strip_suffix(".tid2eid")?)))
        .collect();
    let is_of_images = |name: &str| {
        ["vision.", "aligner.", "image_"].iter().any(|start| name.starts_with(start))
            || name.ends_with(".gate.bias_vl")
    };
    shards.retain(|name| !is_of_images(name) && !of_tables.contains(name));
}

/// Reads the rotated values of a head, of which GGUF has one number for both rotations.
pub(crate) fn n_rot(config: Object<'_>, head_dim: usize, fraction: f64) -> Result<usize, HfError> {
    const SHARE: &str = "partial_rotary_factor";
    let rotated = |share: f64| (share * head_dim as f64) as usize;
    let n_rot = config.find_size("qk_rope_head_dim")?.map_or(rotated(fraction), |n| n as usize);
    for of in rotations(config)?.into_iter().flatten().chain([config]) {
        if let Some(share) = of.find_float(SHARE)?.filter(|share| rotated(*share) != n_rot) {
            let expected = format!("{n_rot} of {head_dim} values, as qk_rope_head_dim");
            return Err(of.bad(SHARE, expected, share.to_string()));
        }
    }
    Ok(n_rot)
}

/// Returns the rotations of tokens and of pooled keys, where a configuration separates them.
pub(crate) fn rotations(config: Object<'_>) -> Result<[Option<Object<'_>>; 2], HfError> {
    const BOTH: &str = "rope_parameters";
    let Some(all) = config.find_object(BOTH)? else { return Ok([None; 2]) };
    let both = [all.find_object("main")?, all.find_object("compress")?];
    if both[0].is_some() != both[1].is_some() {
        return Err(config.bad(BOTH, "main and compress, or neither", "one of them"));
    }
    let kind = both[0].map(|main| main.find_str("rope_type")).transpose()?.flatten();
    match kind {
        None | Some("default") => Ok(both),
        Some(kind) => Err(config.bad(BOTH, "no scaling of 'main', as GGUF readers assume", kind)),
    }
}

/// Writes the layers, the index, the streams and the limits of the experts' gates.
pub(crate) fn write(keys: &mut Keys<'_>, config: Object<'_>, sizes: &Sizes) -> Result<(), HfError> {
    for (theirs, ours) in [
        ("q_lora_rank", "attention.q_lora_rank"),
        ("o_groups", "attention.output_group_count"),
        ("o_lora_rank", "attention.output_lora_rank"),
        ("index_n_heads", "attention.indexer.head_count"),
        ("index_head_dim", "attention.indexer.key_length"),
        ("index_topk", "attention.indexer.top_k"),
        ("hc_mult", "hyper_connection.count"),
        ("hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations"),
    ] {
        keys.set(ours, config.size(theirs)?)?;
    }
    keys.set("hyper_connection.epsilon", config.float("hc_eps")? as f32)?;
    keys.set_array("attention.compress_ratios", strides(config, sizes.n_layers)?)?;
    let [_, of_pools] = rotations(config)?;
    let base = of_pools.map(|of| of.find_float("rope_theta")).transpose()?.flatten();
    let base = base.map_or_else(|| config.float("compress_rope_theta"), Ok)?;
    keys.set("attention.compress_rope_freq_base", base as f32)?;
    let limit = config.float("swiglu_limit")?;
    if limit <= 0.0 {
        return Err(config.bad("swiglu_limit", "a number above 0", limit.to_string()));
    }
    for key in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
        keys.set_array(key, vec![limit as f32; sizes.n_layers])?;
    }
    // The root of softplus.
    keys.set("expert_gating_func", 4_u32)?;
    keys.set("hash_layer_count", n_hashed(config, sizes.n_layers)?)?;
    let n_streams = config.size("hc_mult")?;
    keys.set("embedding_length_out", (sizes.n_embd as u32).saturating_mul(n_streams))
}

/// Tokens per pooled key in layers with an index: readers take it for granted.
const INDEXED: i32 = 4;

/// Reads the tokens per pooled key of each layer; 0 where a layer has none.
fn strides(config: Object<'_>, n_layers: usize) -> Result<Vec<i32>, HfError> {
    const KINDS: &str = "layer_types";
    const STRIDES: &str = "compress_ratios";
    let Some(kinds) = config.find_array(KINDS)? else {
        let all = config.find_array(STRIDES)?.unwrap_or_default();
        let stride = |of: &Value| of.as_u64().and_then(|n| i32::try_from(n).ok());
        let strides: Option<Vec<i32>> = all.iter().take(n_layers).map(stride).collect();
        return match strides.filter(|strides| strides.len() == n_layers) {
            Some(strides) => Ok(strides),
            None => Err(config.bad(STRIDES, format!("numbers for {n_layers} layers"), list(all))),
        };
    };
    let [indexed, other] = strides_of_kinds(config)?;
    let stride = |kind: &Value| match kind.as_str() {
        Some("sliding_attention") => Ok(0),
        Some("compressed_sparse_attention") => Ok(indexed),
        Some("heavily_compressed_attention") => Ok(other),
        _ => {
            let expected = "sliding, compressed_sparse or heavily_compressed_attention";
            Err(config.bad(KINDS, expected, shown(kind)))
        }
    };
    kinds.iter().map(stride).collect()
}

/// Reads the tokens per pooled key of both kinds of layers: with an index and without.
fn strides_of_kinds(config: Object<'_>) -> Result<[i32; 2], HfError> {
    let all = config.find_object("compress_rates")?;
    let read = |[kind, older]: [&str; 2], usual: u32| {
        let of_kind = all.map(|all| all.find_size(kind)).transpose()?.flatten();
        let stride = config.find_size(older)?.or(of_kind).unwrap_or(usual);
        Ok::<_, HfError>(i32::try_from(stride).unwrap_or(i32::MAX))
    };
    let indexed = read(["compressed_sparse_attention", "compress_rate_csa"], 4)?;
    let other = read(["heavily_compressed_attention", "compress_rate_hca"], 128)?;
    if indexed != INDEXED || other == INDEXED {
        let expected = format!("{INDEXED} tokens in layers with an index alone, as GGUF readers assume");
        return Err(config.bad("compress_rates", expected, format!("{indexed}, and {other} in others")));
    }
    Ok([indexed, other])
}

/// Reads the number of layers with a table of experts, which are the first.
fn n_hashed(config: Object<'_>, n_layers: usize) -> Result<u32, HfError> {
    const KINDS: &str = "mlp_layer_types";
    let Some(kinds) = config.find_array(KINDS)? else {
        return Ok(config.size("num_hash_layers")?.min(n_layers as u32));
    };
    let n = kinds.iter().take_while(|kind| **kind == "hash_moe").count();
    if kinds.len() != n_layers || kinds[n..].iter().any(|kind| kind != "moe") {
        let expected = format!("hash_moe before moe for {n_layers} layers");
        return Err(config.bad(KINDS, expected, list(kinds)));
    }
    Ok(n as u32)
}
