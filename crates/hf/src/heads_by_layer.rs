//! Families whose layers differ in their number of query heads and in the values of a head that
//! RoPE rotates: Laguna, and Step 3.5 and 3.7.

use serde_json::{Map, Value, json};

use crate::error::HfError;
use crate::folder::{Object, shown};
use crate::metadata::{Keys, MAX_LAYERS, Sizes};

const HEADS: &str = "num_attention_heads_per_layer";
const KINDS: &str = "layer_types";
const ROPE: &str = "rope_parameters";
const FRACTION: &str = "partial_rotary_factor";

/// Names of Step 3.5, and those that most families have.
const RENAMED: [(&str, &str); 3] = [
    ("num_attention_groups", "num_key_value_heads"),
    ("moe_top_k", "num_experts_per_tok"),
    ("share_expert_dim", "shared_expert_intermediate_size"),
];
/// Lists with an entry for each layer of Step 3.5, and in older configurations for each MTP layer.
const LISTS: [&str; 6] = [
    KINDS,
    "mlp_layer_types",
    "swiglu_limits",
    "swiglu_limits_shared",
    "rope_theta",
    "partial_rotary_factors",
];

/// Adds the usual keys to a configuration of Step 3.5 of either generation. Faulty values stay, and
/// the readers of the keys report them.
pub(crate) fn add_usual_keys(all: &mut Map<String, Value>) {
    let size = |all: &Map<String, Value>, key: &str| all.get(key).and_then(Value::as_u64).unwrap_or(0);
    let (n, n_mtp) = (size(all, "num_hidden_layers"), size(all, "num_nextn_predict_layers"));
    if n > MAX_LAYERS as u64 {
        return;
    }
    for key in LISTS {
        if let Some(Value::Array(list)) = all.get_mut(key)
            && list.len() as u64 == n.saturating_add(n_mtp)
        {
            list.truncate(n as usize);
        }
    }
    for (theirs, usual) in RENAMED {
        if let Some(value) = all.get(theirs).filter(|value| !value.is_null()).cloned() {
            add(all, usual, value);
        }
    }
    let kinds = all.get(KINDS).and_then(Value::as_array).cloned().unwrap_or_default();
    add(all, HEADS, heads_of(all, &kinds));
    add(all, "mlp_layer_types", experts_of(all, n));
    let [full, windowed] = ["full_attention", "sliding_attention"].map(|kind| rope_of(all, &kinds, kind));
    add(all, ROPE, json!({"full_attention": full, "sliding_attention": windowed}));
    // Lists are in these objects now.
    ["rope_theta", "rope_scaling"].iter().for_each(|key| _ = all.remove(*key));
}

/// Returns the number of query heads of each layer: those with windows may have another.
fn heads_of(all: &Map<String, Value>, kinds: &[Value]) -> Value {
    let usual = all.get("num_attention_heads").cloned().unwrap_or_default();
    let others = all.get("attention_other_setting").and_then(|of| of.get("num_attention_heads"));
    let windowed = all.get("num_sliding_attention_heads").filter(|n| !n.is_null()).or(others);
    let windowed = windowed.unwrap_or(&usual);
    kinds.iter().map(|kind| if kind == "sliding_attention" { windowed } else { &usual }).cloned().collect()
}

/// Returns which of `n` layers have experts: those that are listed, or all from the fourth on.
fn experts_of(all: &Map<String, Value>, n: u64) -> Value {
    let sparse: Vec<u64> = match all.get("moe_layers_enum") {
        Some(Value::String(list)) => list.split(',').filter_map(|n| n.trim().parse().ok()).collect(),
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_u64).collect(),
        _ => (3..n).collect(),
    };
    (0..n).map(|layer| if sparse.contains(&layer) { "sparse" } else { "dense" }).collect()
}

/// Returns the RoPE of layers of this kind, from lists with an entry for each layer.
fn rope_of(all: &Map<String, Value>, kinds: &[Value], kind: &str) -> Map<String, Value> {
    let layer = kinds.iter().position(|of| of == kind);
    let mut rope = Map::new();
    for (theirs, key) in [("rope_theta", "rope_theta"), ("partial_rotary_factors", FRACTION)] {
        let value = match all.get(theirs) {
            Some(Value::Array(list)) => layer.and_then(|layer| list.get(layer)),
            other => other,
        };
        rope.extend(value.map(|value| (key.to_owned(), value.clone())));
    }
    if let (Some(Value::Object(scaling)), "full_attention") = (all.get("rope_scaling"), kind) {
        rope.extend(scaling.clone());
    }
    rope
}

/// Adds a value, unless the configuration has one.
fn add(all: &mut Map<String, Value>, key: &str, value: Value) {
    let entry = all.entry(key).or_insert(Value::Null);
    if entry.is_null() {
        *entry = value;
    }
}

/// Writes the number of query heads of each layer, and the limits of its activations.
pub(crate) fn write(keys: &mut Keys<'_>, config: Object<'_>, sizes: &Sizes) -> Result<(), HfError> {
    let usual = sizes.n_heads as u32;
    let count = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0);
    match config.find_array(HEADS)?.filter(|all| !all.is_empty()) {
        Some(all) => {
            let heads: Vec<u32> = all.iter().filter_map(count).collect();
            if heads.len() != sizes.n_layers || all.len() != sizes.n_layers {
                let expected = format!("a number of heads for each of {} layers", sizes.n_layers);
                return Err(config.bad(HEADS, expected, format!("{} of {}", heads.len(), all.len())));
            }
            keys.set_array("attention.head_count", heads)?;
        }
        None => keys.set("attention.head_count", usual)?,
    }
    if let Some(other) = config.find_object("attention_other_setting")? {
        for (key, known) in [("num_attention_groups", sizes.n_kv_heads), ("head_dim", sizes.head_dim)] {
            if let Some(got) = other.find_size(key)?.filter(|n| *n as usize != known) {
                return Err(other.bad(key, format!("{known}, as other layers have"), got.to_string()));
            }
        }
    }
    if let Some(name) = config.find_str("moe_router_activation")?.filter(|name| *name != "sigmoid") {
        return Err(config.bad("moe_router_activation", "sigmoid", name));
    }
    for (theirs, ours) in [
        ("swiglu_limits", "swiglu_clamp_exp"),
        ("swiglu_limits_shared", "swiglu_clamp_shexp"),
        ("expert_swiglu_limit_list", "swiglu_clamp_exp"),
        ("share_expert_swiglu_limit_list", "swiglu_clamp_shexp"),
    ] {
        let Some(all) = config.find_array(theirs)? else { continue };
        // MTP layers may have limits too.
        let n_all = sizes.n_layers + sizes.n_mtp_layers;
        let all = if all.len() == n_all { &all[..sizes.n_layers] } else { all };
        let limit = |value: &Value| value.as_f64().or(value.is_null().then_some(0.0));
        let limits: Vec<f32> = all.iter().filter_map(limit).map(|x| x as f32).collect();
        if limits.len() != sizes.n_layers || all.len() != sizes.n_layers {
            let expected = format!("a limit or null for each of {} layers", sizes.n_layers);
            return Err(config.bad(theirs, expected, format!("{} of {}", limits.len(), all.len())));
        }
        keys.set_array(ours, limits)?;
    }
    Ok(())
}

/// Writes how many values of a head RoPE rotates in layers with windows, where a reader does not
/// know it.
pub(crate) fn write_rotations(
    keys: &mut Keys<'_>,
    windowed: Option<Object<'_>>,
    sizes: &Sizes,
    halves_full: bool,
) -> Result<(), HfError> {
    let Some(windowed) = windowed else { return Ok(()) };
    let fraction = windowed.find_float(FRACTION)?.unwrap_or(1.0);
    let n_rot = (fraction * sizes.head_dim as f64) as usize;
    if n_rot == 0 || n_rot > sizes.head_dim || !n_rot.is_multiple_of(2) {
        let expected = format!("a share of {} that is an even number", sizes.head_dim);
        return Err(windowed.bad(FRACTION, expected, shown(&json!(fraction))));
    }
    if halves_full && 2 * sizes.n_rot != n_rot {
        let expected = format!("twice that of full attention, {} values", 2 * sizes.n_rot);
        return Err(windowed.bad(FRACTION, expected, n_rot.to_string()));
    }
    keys.set("rope.dimension_count_swa", n_rot as u32)
}
