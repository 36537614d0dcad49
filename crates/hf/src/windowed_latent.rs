//! MLA whose sizes differ in layers with a sliding window, as dots.3 note has it. Newer
//! configurations list the sizes of each layer, published ones those of all layers with a window.

use serde_json::{Map, Value, json};

use crate::error::HfError;
use crate::family::{Family, Layers};
use crate::folder::{Object, shown};
use crate::layers::{Mla, factor, of_layer};
use crate::metadata::{Keys, Sizes};

/// The layers with a window, and their sizes.
#[derive(Debug, Clone)]
pub(crate) struct WindowedMla {
    /// Whether each layer has a window.
    layers: Vec<bool>,
    n_heads: usize,
    mla: Mla,
}

/// Adds the keys that most families have to a published configuration. Faulty values stay, and the
/// readers of the keys report them.
pub(crate) fn add_usual_keys(all: &mut Map<String, Value>) {
    let number = |all: &Map<String, Value>, key: &str| all.get(key).filter(|value| !value.is_null()).cloned();
    let window = number(all, "sliding_window").or(number(all, "sliding_window_size")).unwrap_or(json!(512));
    all.insert("sliding_window".to_owned(), window);
    // One rotation for all layers, or that of layers with a window apart.
    let of_all = all.get("rope_parameters").and_then(|rope| rope.get("rope_theta")).cloned();
    let base = of_all.or(number(all, "swa_rope_theta")).unwrap_or(json!(50_000));
    all.insert("rope_local_base_freq".to_owned(), base);
    if let Some(Value::Array(has_experts)) = number(all, "moe_layer_freq") {
        let n_dense = number(all, "first_k_dense_replace").and_then(|n| n.as_u64()).unwrap_or(0);
        let kind = |(layer, has): (usize, &Value)| match layer as u64 >= n_dense && has != 0 {
            true => "sparse",
            false => "dense",
        };
        let kinds: Vec<_> = has_experts.iter().enumerate().map(kind).collect();
        all.entry("mlp_layer_types").or_insert(kinds.into());
        all.remove("moe_layer_freq");
    }
}

impl WindowedMla {
    /// Reads the sizes of families with such layers; `usual` are those of the others.
    pub fn of(config: Object<'_>, family: &Family, usual: Option<Mla>) -> Result<Option<Self>, HfError> {
        const KINDS: &str = "layer_types";
        let Some(usual) = usual.filter(|_| family.layers == Layers::WindowedLatent) else { return Ok(None) };
        let kinds = config.find_array(KINDS)?.unwrap_or_default();
        let is_windowed = |kind: &Value| match kind.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("indexed_attention" | "full_attention") => Ok(false),
            _ => {
                Err(config.bad(KINDS, "sliding_attention, indexed_attention or full_attention", shown(kind)))
            }
        };
        let layers = kinds.iter().map(is_windowed).collect::<Result<Vec<_>, _>>()?;
        let n_layers = config.size("num_hidden_layers")? as usize;
        if layers.len() != n_layers {
            return Err(config.bad(KINDS, format!("{n_layers} layers"), layers.len().to_string()));
        }
        let own = of_windowed(config, &layers)?;
        let size = |key: &str| match own {
            Some(own) if own.value(key).is_some() => factor(own, key),
            Some(_) => factor(config, key),
            None => factor(config, &format!("swa_{key}")),
        };
        let n_rot = size("qk_rope_head_dim")?;
        for (key, known) in
            [("qk_rope_head_dim", usual.n_rot), ("q_lora_rank", factor(config, "q_lora_rank")?)]
        {
            let got = size(key)?;
            if got != known {
                let expected = format!("{known}, as in layers without a window");
                return Err(config.bad(&format!("swa_{key}"), expected, got.to_string()));
            }
        }
        let (k_dim, v_dim) = (size("qk_nope_head_dim")?, size("v_head_dim")?);
        let of_layers = own.map(|own| own.find_size("head_dim")).transpose()?.flatten();
        if let Some(got) = of_layers.or(config.find_size("swa_head_dim")?)
            && got as usize != k_dim + n_rot
        {
            return Err(config.bad("swa_head_dim", (k_dim + n_rot).to_string(), got.to_string()));
        }
        let mla = Mla { rank: size("kv_lora_rank")?, n_rot, k_dim, v_dim };
        Ok(Some(Self { layers, n_heads: size("num_attention_heads")?, mla }))
    }

    /// Returns the heads of each layer.
    pub fn heads(&self, usual: usize) -> impl Iterator<Item = u32> {
        self.layers.iter().map(move |is| if *is { self.n_heads } else { usual } as u32)
    }
}

/// Returns the sizes that layers with a window have of their own, of which GGUF has one for all.
fn of_windowed<'a>(config: Object<'a>, layers: &[bool]) -> Result<Option<Object<'a>>, HfError> {
    const OWN: &str = "per_layer_config";
    let Some(all) = config.find_object(OWN)? else { return Ok(None) };
    let mut first = None;
    for (layer, is_windowed) in layers.iter().enumerate() {
        let own = of_layer(all, layer)?;
        let reference = if *is_windowed { *first.get_or_insert(own) } else { None };
        if own.map(|own| own.map) != reference.map(|reference| reference.map) {
            let expected = "sizes of layers with a window alone, alike in all";
            return Err(config.bad(OWN, expected, format!("others in layer {layer}")));
        }
    }
    Ok(first.flatten())
}

impl Sizes {
    /// Returns the sizes of a layer, counted from 1.
    pub fn of_layer(&self, layer: usize) -> Self {
        let sizes = Self { windowed: None, ..self.clone() };
        match &self.windowed {
            Some(windowed) if layer > 0 && windowed.layers.get(layer - 1) == Some(&true) => {
                Self { n_heads: windowed.n_heads, latent: Some(windowed.mla), ..sizes }
            }
            _ => sizes,
        }
    }
}

/// Writes the layers with a window, and that the others have an index.
pub(crate) fn write(keys: &mut Keys<'_>, config: Object<'_>, windowed: &WindowedMla) -> Result<(), HfError> {
    let Mla { rank, n_rot, k_dim, v_dim } = windowed.mla;
    for (key, size) in [
        ("attention.kv_lora_rank_swa", rank),
        ("attention.key_length_swa", rank + n_rot),
        ("attention.value_length_swa", rank),
        ("attention.key_length_mla_swa", k_dim + n_rot),
        ("attention.value_length_mla_swa", v_dim),
    ] {
        keys.set(key, size as u32)?;
    }
    keys.set_array("attention.indexer.types", windowed.layers.iter().map(|is| !is))?;
    check_words(config)?;
    check_rotations(config)?;
    check_shared_width(config)
}

/// Rejects variants, for which GGUF has no keys.
fn check_words(config: Object<'_>) -> Result<(), HfError> {
    for (key, known) in [
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("attention_gate_type", "headwise"),
        ("swa_attention_gate_type", "headwise"),
        ("normalization", "RMSNorm"),
        ("final_norm", "RMSNorm"),
    ] {
        if let Some(got) = config.find_str(key)?.filter(|got| *got != known) {
            return Err(config.bad(key, known, got));
        }
    }
    Ok(())
}

/// Rejects scaling of RoPE, which layers with a window lack in GGUF.
fn check_rotations(config: Object<'_>) -> Result<(), HfError> {
    let mut all = vec![config.find_object("rope_scaling")?, config.find_object("rope_parameters")?];
    if let Some(of_kinds) = all[1] {
        for kind in ["indexed_attention", "full_attention", "sliding_attention"] {
            all.push(of_kinds.find_object(kind)?);
        }
    }
    for rope in all.into_iter().flatten() {
        let kind = rope.find_str("rope_type")?.or(rope.find_str("type")?);
        if let Some(kind) = kind.filter(|kind| *kind != "default") {
            return Err(rope.bad("rope_type", "default", kind));
        }
    }
    Ok(())
}

/// Rejects shared experts of another width, which GGUF lacks.
fn check_shared_width(config: Object<'_>) -> Result<(), HfError> {
    let width = config.size("moe_intermediate_size")?;
    for key in ["shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"] {
        if let Some(got) = config.find_size(key)?.filter(|got| *got != width) {
            return Err(config.bad(key, format!("the {width} of other experts"), got.to_string()));
        }
    }
    Ok(())
}
