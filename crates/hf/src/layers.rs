//! State that layers keep of past tokens: KV heads, a latent vector, or a recurrent state.

use std::fmt;

use serde_json::Value as JsonValue;

use crate::attended_streams;
use crate::block_index;
use crate::connections;
use crate::error::HfError;
use crate::family::{Family, Layers};
use crate::folder::{Object, shown};
use crate::gated_streams;
use crate::metadata::{Keys, Sizes};
use crate::shared_kv;
use crate::streams;
use crate::windowed_latent;

/// Sizes of multi-head latent attention (MLA).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mla {
    /// Of the latent vector.
    pub rank: usize,
    /// Of the rotated part of a key.
    pub n_rot: usize,
    /// Of the unrotated part of a key.
    pub k_dim: usize,
    /// Of a value.
    pub v_dim: usize,
}

/// The KV heads of full-attention layers, if they differ from those of windowed layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FullHeads {
    pub n_kv_heads: usize,
    pub head_dim: usize,
}

/// Returns the entry of a layer by its number, which may have leading zeros for sorting.
pub(crate) fn of_layer(all: Object<'_>, layer: usize) -> Result<Option<Object<'_>>, HfError> {
    let is_layer = |key: &&String| key.bytes().all(|b| b.is_ascii_digit()) && key.parse() == Ok(layer);
    all.map.keys().find(is_layer).map_or(Ok(None), |key| all.find_object(key))
}

/// Sizes of gated-delta layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Delta {
    pub n_k_heads: usize,
    pub n_v_heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
}

/// Sizes of state-space layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Space {
    pub n_heads: usize,
    pub dim: usize,
    pub n_state: usize,
    pub n_groups: usize,
    pub n_taps: usize,
}

/// The type of a layer with a single sublayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sublayer {
    Space,
    Attention,
    FeedForward,
}

/// Reads the types of single-sublayer layers, from names or letters.
pub(crate) fn sublayers(config: Object<'_>) -> Result<Option<Vec<Sublayer>>, HfError> {
    const NAMES: &str = "layers_block_type";
    const LETTERS: &str = "hybrid_override_pattern";
    if let Some(kinds) = config.find_array(NAMES)? {
        let half = |kind: &JsonValue| match kind.as_str() {
            Some("mamba" | "linear_attention") => Ok(Sublayer::Space),
            Some("attention" | "full_attention") => Ok(Sublayer::Attention),
            Some("mlp" | "moe") => Ok(Sublayer::FeedForward),
            _ => Err(config.bad(NAMES, "linear_attention, full_attention, mlp or moe", shown(kind))),
        };
        return kinds.iter().map(half).collect::<Result<_, _>>().map(Some);
    }
    let Some(letters) = config.find_str(LETTERS)? else { return Ok(None) };
    let half = |letter: char| match letter {
        'M' => Ok(Sublayer::Space),
        '*' => Ok(Sublayer::Attention),
        '-' | 'E' => Ok(Sublayer::FeedForward),
        _ => Err(config.bad(LETTERS, "letters of M, *, - and E", letter.to_string())),
    };
    letters.chars().map(half).collect::<Result<_, _>>().map(Some)
}

/// Limit of sizes that are multiplied with each other: a thousand times that of any model.
const MAX_SIZE: u32 = 1 << 20;

/// Reads a size that is multiplied with others.
pub(crate) fn factor(config: Object<'_>, key: &str) -> Result<usize, HfError> {
    match config.size(key)? {
        size if size <= MAX_SIZE => Ok(size as usize),
        size => Err(config.bad(key, format!("1 to {MAX_SIZE}"), size.to_string())),
    }
}

impl Mla {
    /// Reads the sizes of families with MLA.
    pub fn of(config: Object<'_>, family: &Family) -> Result<Option<Self>, HfError> {
        if !family.layers.are_latent() {
            return Ok(None);
        }
        let size = |key| factor(config, key);
        let (rank, n_rot) = (size("kv_lora_rank")?, size("qk_rope_head_dim")?);
        let (k_dim, v_dim) = (size("qk_nope_head_dim")?, size("v_head_dim")?);
        Ok(Some(Self { rank, n_rot, k_dim, v_dim }))
    }
}

impl fmt::Display for FullHeads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} KV heads of {}", self.n_kv_heads, self.head_dim)
    }
}

impl FullHeads {
    /// Reads the KV heads of full-attention layers, for families in which they may differ from
    /// `windowed`. Newer configurations list deviating layers under their number.
    pub fn of(config: Object<'_>, family: &Family, windowed: Self) -> Result<Option<Self>, HfError> {
        if family.layers != Layers::OwnHeads {
            return Ok(None);
        }
        let of_layers = config.find_object("per_layer_config")?;
        let kinds = config.find_array("layer_types")?.unwrap_or_default();
        let mut full = None;
        for (layer, kind) in kinds.iter().enumerate() {
            let own = of_layers.map(|of| of_layer(of, layer)).transpose()?.flatten();
            let heads = windowed.overridden_by(own, ["num_key_value_heads", "head_dim"])?;
            let reference = if kind == "full_attention" { *full.get_or_insert(heads) } else { windowed };
            if heads != reference {
                let expected = format!("{reference}, as other layers of the kind {} have them", shown(kind));
                return Err(config.bad("per_layer_config", expected, format!("{heads} in layer {layer}")));
            }
        }
        let names = ["num_global_key_value_heads", "global_head_dim"];
        let full = full.unwrap_or(windowed).overridden_by(Some(config), names)?;
        if full.n_kv_heads == 0 || full.head_dim == 0 || !full.head_dim.is_multiple_of(2) {
            let expected = "KV heads of an even size in layers without a window";
            return Err(config.bad("global_head_dim", expected, full.to_string()));
        }
        Ok(Some(full))
    }

    /// Overrides these sizes with those under the given names.
    fn overridden_by(self, by: Option<Object<'_>>, [n, dim]: [&str; 2]) -> Result<Self, HfError> {
        let Some(by) = by else { return Ok(self) };
        let size = |key, usual: usize| by.find_size(key).map(|size| size.map_or(usual, |size| size as usize));
        Ok(Self { n_kv_heads: size(n, self.n_kv_heads)?, head_dim: size(dim, self.head_dim)? })
    }
}

impl Space {
    /// Reads the sizes of families with state-space layers.
    pub fn of(config: Object<'_>, family: &Family) -> Result<Option<Self>, HfError> {
        let names = match family.layers {
            Layers::Space => {
                ["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"]
            }
            Layers::Halved => {
                ["mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"]
            }
            Layers::StateSpaces => ["num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"],
            _ => return Ok(None),
        };
        let [n_heads, dim, n_state, n_groups, n_taps] = names.map(|key| factor(config, key));
        let space =
            Self { n_heads: n_heads?, dim: dim?, n_state: n_state?, n_groups: n_groups?, n_taps: n_taps? };
        Ok(Some(space))
    }

    /// Writes the sizes.
    fn write(self, keys: &mut Keys<'_>) -> Result<(), HfError> {
        for (key, size) in [
            ("ssm.conv_kernel", self.n_taps),
            ("ssm.state_size", self.n_state),
            ("ssm.group_count", self.n_groups),
            ("ssm.time_step_rank", self.n_heads),
            ("ssm.inner_size", self.n_heads.saturating_mul(self.dim)),
        ] {
            keys.set(key, u32::try_from(size).unwrap_or(u32::MAX))?;
        }
        Ok(())
    }
}

impl Delta {
    /// Reads the sizes of families with gated-delta layers.
    pub fn of(config: Object<'_>, family: &Family) -> Result<Option<Self>, HfError> {
        if !family.layers.are_delta() {
            return Ok(None);
        }
        let size = |key| factor(config, key);
        let delta = Self {
            n_k_heads: size("linear_num_key_heads")?,
            n_v_heads: size("linear_num_value_heads")?,
            k_dim: size("linear_key_head_dim")?,
            v_dim: size("linear_value_head_dim")?,
        };
        if !delta.n_v_heads.is_multiple_of(delta.n_k_heads) {
            let expected = format!("a multiple of the {} key heads", delta.n_k_heads);
            return Err(config.bad("linear_num_value_heads", expected, delta.n_v_heads.to_string()));
        }
        Ok(Some(delta))
    }

    /// Returns the number of value heads per key head.
    pub fn n_sharing(&self) -> usize {
        self.n_v_heads / self.n_k_heads
    }
}

/// Writes the FFN widths.
pub(crate) fn write_widths(keys: &mut Keys<'_>, config: Object<'_>, family: &Family) -> Result<(), HfError> {
    let key = family.width;
    if family.layers == Layers::StateSpaces {
        return keys.set("feed_forward_length", 0_u32);
    }
    if let Some(halves) = sublayers(config)?.filter(|_| family.layers == Layers::Halved) {
        let width = config.size(family.experts.and_then(|experts| experts.width).unwrap_or(key))?;
        let widths = halves.into_iter().map(|half| if half == Sublayer::FeedForward { width } else { 0 });
        return keys.set_array("feed_forward_length", widths);
    }
    // If all layers are MoE, a configuration may omit the dense width.
    if family.experts.is_some_and(|experts| experts.width.is_some()) && config.value(key).is_none() {
        return Ok(());
    }
    if let Some(JsonValue::Array(widths)) = config.value(key) {
        let width = |width: &JsonValue| width.as_u64().and_then(|n| u32::try_from(n).ok());
        let all: Option<Vec<u32>> = widths.iter().map(width).collect();
        let all = all.ok_or_else(|| config.bad(key, "a width, or one for each layer", "something else"))?;
        return keys.set_array("feed_forward_length", all);
    }
    let older = family.layers == Layers::Convolving && config.value(key).is_none();
    let width = config.size(if older { "block_ff_dim" } else { key })?;
    if config.find_bool("use_double_wide_mlp")? == Some(true) {
        let (n, shared) =
            (config.size("num_hidden_layers")?, config.find_size("num_kv_shared_layers")?.unwrap_or(0));
        // The number of layers has been validated.
        let widths = (0..n).map(|layer| if layer + shared < n { width } else { width.saturating_mul(2) });
        return keys.set_array("feed_forward_length", widths);
    }
    let adjusts = config.find_bool("block_auto_adjust_ff_dim")? == Some(true);
    keys.set("feed_forward_length", if adjusts { adjusted(config, width)? } else { width })
}

/// Returns the actual FFN width of LFM2: two thirds of the configured one, times a factor, rounded
/// up to a multiple.
fn adjusted(config: Object<'_>, width: u32) -> Result<u32, HfError> {
    let thirds = (2 * u64::from(width) / 3) as u32;
    let Some(by) = config.find_float("block_ffn_dim_multiplier")? else { return Ok(thirds) };
    let multiple = config.size("block_multiple_of")?;
    let scaled = (by * f64::from(thirds)) as u32;
    scaled
        .checked_next_multiple_of(multiple)
        .filter(|width| *width > 0)
        .ok_or_else(|| config.bad("block_ffn_dim_multiplier", "a factor on a width", by.to_string()))
}

/// Writes the state that the layers of a family keep of past tokens.
pub(crate) fn write(
    keys: &mut Keys<'_>,
    config: Object<'_>,
    family: &Family,
    sizes: &Sizes,
) -> Result<(), HfError> {
    if let Some(latent) = sizes.latent {
        write_latent(keys, config, latent)?;
        return match family.layers {
            Layers::Kimi => write_kimi(keys, config, sizes),
            Layers::KimiStreams => {
                attended_streams::write(keys, config)?;
                write_kimi(keys, config, sizes)
            }
            Layers::Selecting | Layers::Connected | Layers::WindowedLatent => {
                keys.set("attention.head_count_kv", 1_u32)?;
                if let Some(windowed) = &sizes.windowed {
                    windowed_latent::write(keys, config, windowed)?;
                }
                if family.layers == Layers::Connected {
                    connections::write(keys, config)?;
                }
                write_index(keys, config, sizes)
            }
            _ => keys.set("attention.head_count_kv", 1_u32),
        };
    }
    if let Some(full) = sizes.full {
        return write_own_heads(keys, config, sizes, full);
    }
    match family.layers {
        Layers::StateSpaces => return write_sizes_of_spaces(keys, config, sizes),
        Layers::Convolving => write_convolutions(keys, config, sizes)?,
        Layers::Space | Layers::Halved => write_spaces(keys, config, family, sizes)?,
        _ => keys.set("attention.head_count_kv", sizes.n_kv_heads as u32)?,
    }
    keys.set("attention.key_length", sizes.head_dim as u32)?;
    keys.set("attention.value_length", sizes.head_dim as u32)?;
    match sizes.delta {
        Some(delta) => {
            write_delta(keys, config, family, delta, sizes)?;
            match family.layers {
                Layers::DeltaStreams => {
                    gated_streams::write(keys, config, kinds(config, "linear_attention", sizes.n_layers)?)
                }
                _ => Ok(()),
            }
        }
        None if family.layers == Layers::Streams => streams::write(keys, config, sizes),
        None if family.layers == Layers::SelectingBlocks => block_index::write(keys, config),
        None if family.layers == Layers::SharedKv => shared_kv::write(keys, config, sizes),
        None => Ok(()),
    }
}

/// Writes MLA in absorbed form, in which the KV head is the latent vector and the rotated part.
fn write_latent(keys: &mut Keys<'_>, config: Object<'_>, latent: Mla) -> Result<(), HfError> {
    if let Some(rank) = config.find_size("q_lora_rank")? {
        keys.set("attention.q_lora_rank", rank)?;
    }
    let Mla { rank, n_rot, k_dim, v_dim } = latent;
    for (key, size) in [
        ("attention.kv_lora_rank", rank),
        ("attention.key_length", rank + n_rot),
        ("attention.value_length", rank),
        ("attention.key_length_mla", k_dim + n_rot),
        ("attention.value_length_mla", v_dim),
    ] {
        keys.set(key, size as u32)?;
    }
    Ok(())
}

/// The key of the period of attention layers.
const PERIOD: &str = "layer_group_size";

/// Writes Kimi's delta rules, whose layers have no KV heads. Published configurations of Kimi
/// Linear describe them in an object, with layers counted from 1; those of Ling name the period of
/// other layers.
fn write_kimi(keys: &mut Keys<'_>, config: Object<'_>, sizes: &Sizes) -> Result<(), HfError> {
    let nested = config.find_object("linear_attn_config")?;
    let of = nested.unwrap_or(config);
    let [n, dim, n_taps] = match (nested, config.value(PERIOD)) {
        (Some(_), _) => ["num_heads", "head_dim", "short_conv_kernel_size"],
        (None, Some(_)) => ["num_attention_heads", "head_dim", "short_conv_kernel_size"],
        (None, None) => ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"],
    };
    let n_heads = factor(of, n)?;
    if n_heads != sizes.n_heads {
        return Err(of.bad(n, format!("the {} heads of attention", sizes.n_heads), n_heads.to_string()));
    }
    keys.set("kda.head_dim", factor(of, dim)? as u32)?;
    keys.set("ssm.conv_kernel", factor(of, n_taps)? as u32)?;
    if let Some(bound) = config.find_float("kda_lower_bound")? {
        keys.set("kda.safe_gate", true)?;
        keys.set("kda.gate_lower_bound", bound as f32)?;
    }
    keys.set_array("attention.head_count_kv", sizes.attends.iter().map(|attends| u32::from(*attends)))
}

/// Reads which layers of families with Kimi's delta rules attend.
pub(crate) fn read_attending(
    config: Object<'_>,
    family: &Family,
    n_layers: usize,
) -> Result<Vec<bool>, HfError> {
    if !family.layers.are_kimi() {
        return Ok(Vec::new());
    }
    match config.find_object("linear_attn_config")? {
        Some(of) => {
            let attending = of.find_array("full_attn_layers")?.unwrap_or_default();
            let attends = |layer: u64| attending.iter().any(|at| at.as_u64() == Some(layer));
            Ok((1..=n_layers as u64).map(attends).collect())
        }
        None if config.value("layer_types").is_some() => kinds(config, "full_attention", n_layers),
        None => {
            let period = factor(config, PERIOD)?;
            // The last layers too, if they are no whole period.
            let n_whole = n_layers / period * period;
            Ok((0..n_layers).map(|layer| (layer + 1) % period == 0 || layer >= n_whole).collect())
        }
    }
}

/// Writes the index that selects tokens, and which layers have one of their own.
fn write_index(keys: &mut Keys<'_>, config: Object<'_>, sizes: &Sizes) -> Result<(), HfError> {
    for (theirs, ours) in [
        ("index_n_heads", "attention.indexer.head_count"),
        ("index_head_dim", "attention.indexer.key_length"),
        ("index_topk", "attention.indexer.top_k"),
    ] {
        keys.set(ours, factor(config, theirs)? as u32)?;
    }
    const KINDS: &str = "indexer_types";
    let Some(kinds) = config.find_array(KINDS)? else { return Ok(()) };
    let selects = |kind: &JsonValue| match kind.as_str() {
        Some("full") => Ok(true),
        Some("shared") => Ok(false),
        _ => Err(config.bad(KINDS, "full or shared".to_owned(), shown(kind))),
    };
    let selects = kinds.iter().map(selects).collect::<Result<Vec<_>, _>>()?;
    if selects.len() != sizes.n_layers {
        return Err(config.bad(KINDS, format!("{} layers", sizes.n_layers), selects.len().to_string()));
    }
    keys.set_array("attention.indexer.types", selects)
}

/// Writes the heads of windowed and full-attention layers, which layers share KV, and the per-layer
/// input size.
fn write_own_heads(
    keys: &mut Keys<'_>,
    config: Object<'_>,
    sizes: &Sizes,
    full: FullHeads,
) -> Result<(), HfError> {
    let windowed = kinds(config, "sliding_attention", sizes.n_layers)?;
    match full.n_kv_heads == sizes.n_kv_heads {
        true => keys.set("attention.head_count_kv", sizes.n_kv_heads as u32)?,
        false => {
            let n = |is: bool| if is { sizes.n_kv_heads } else { full.n_kv_heads } as u32;
            keys.set_array("attention.head_count_kv", windowed.into_iter().map(n))?;
        }
    }
    for (key, size) in [
        ("attention.key_length", full.head_dim),
        ("attention.value_length", full.head_dim),
        ("attention.key_length_swa", sizes.head_dim),
        ("attention.value_length_swa", sizes.head_dim),
        ("rope.dimension_count_swa", sizes.head_dim),
    ] {
        keys.set(key, size as u32)?;
    }
    for (theirs, ours) in [
        ("num_kv_shared_layers", "attention.shared_kv_layers"),
        ("hidden_size_per_layer_input", "embedding_length_per_layer_input"),
    ] {
        // Gemma 4 readers require this number, even if 0.
        keys.set(ours, config.find_size(theirs)?.unwrap_or(0))?;
    }
    Ok(())
}

/// Writes short convolutions, whose layers have no KV heads.
fn write_convolutions(keys: &mut Keys<'_>, config: Object<'_>, sizes: &Sizes) -> Result<(), HfError> {
    keys.set("shortconv.l_cache", config.size("conv_L_cache")?)?;
    let is_convolving = match config.find_array("layer_types")? {
        Some(_) => kinds(config, "conv", sizes.n_layers)?,
        None => {
            let attending = config.find_array("full_attn_idxs")?.unwrap_or_default();
            (0..sizes.n_layers as u64)
                .map(|layer| !attending.iter().any(|at| at.as_u64() == Some(layer)))
                .collect()
        }
    };
    let heads = is_convolving.into_iter().map(|is| if is { 0 } else { sizes.n_kv_heads as u32 });
    keys.set_array("attention.head_count_kv", heads)
}

/// Writes state-space layers, and which layers have KV heads.
fn write_spaces(
    keys: &mut Keys<'_>,
    config: Object<'_>,
    family: &Family,
    sizes: &Sizes,
) -> Result<(), HfError> {
    let attends: Vec<bool> = match family.layers {
        Layers::Halved => sublayers(config)?
            .unwrap_or_default()
            .into_iter()
            .map(|half| half == Sublayer::Attention)
            .collect(),
        _ => {
            let [newer, older] =
                ["full_attention", "attention"].map(|kind| kinds(config, kind, sizes.n_layers));
            newer?.into_iter().zip(older?).map(|(newer, older)| newer || older).collect()
        }
    };
    let heads = attends.into_iter().map(|attends| if attends { sizes.n_kv_heads as u32 } else { 0 });
    keys.set_array("attention.head_count_kv", heads)?;
    write_sizes_of_spaces(keys, config, sizes)?;
    keys.set("rope.scaling.finetuned", config.find_str("position_embedding_type")? == Some("rope"))
}

/// Writes the sizes of state-space layers.
fn write_sizes_of_spaces(keys: &mut Keys<'_>, config: Object<'_>, sizes: &Sizes) -> Result<(), HfError> {
    if let Some(space) = sizes.space {
        space.write(keys)?;
    }
    check_steps(config)
}

/// Rejects time-step bounds, which GGUF readers do not support.
fn check_steps(config: Object<'_>) -> Result<(), HfError> {
    const BOUNDS: &str = "time_step_limit";
    let bounds = config.find_array(BOUNDS)?.unwrap_or_default();
    let [low, high] = [0, 1].map(|i| bounds.get(i).and_then(JsonValue::as_f64));
    if low.is_some_and(|low| low > 0.0) || high.is_some() {
        let got = bounds.iter().map(shown).collect::<Vec<_>>().join(", ");
        return Err(config.bad(BOUNDS, "none: from 0 to infinity", got));
    }
    Ok(())
}

/// Writes gated-delta layers, under the keys of state-space models.
fn write_delta(
    keys: &mut Keys<'_>,
    config: Object<'_>,
    family: &Family,
    delta: Delta,
    sizes: &Sizes,
) -> Result<(), HfError> {
    let Delta { n_k_heads, n_v_heads, k_dim, v_dim } = delta;
    let n_taps = config.size("linear_conv_kernel_dim")? as usize;
    Space { n_heads: n_v_heads, dim: v_dim, n_state: k_dim, n_groups: n_k_heads, n_taps }.write(keys)?;
    write_sections(keys, config, family)?;
    let every = config.find_size("full_attention_interval")?.unwrap_or(4).max(1) as usize;
    if config.value("layer_types").is_none() {
        return keys.set("full_attention_interval", every as u32);
    }
    let is_recurrent = kinds(config, "linear_attention", sizes.n_layers)?;
    // Prefer the single interval if the pattern is regular.
    let interval = is_recurrent.iter().position(|is| !is).map_or(0, |first| first + 1);
    let is_regular =
        |(layer, is): (usize, &bool)| interval > 0 && *is != (layer + 1).is_multiple_of(interval);
    if is_recurrent.iter().enumerate().all(is_regular) {
        return keys.set("full_attention_interval", interval as u32);
    }
    keys.set_array("attention.recurrent_layers", is_recurrent)
}

/// Writes the mRoPE sections: pairs of a head per image position component. For text all components
/// are equal.
fn write_sections(keys: &mut Keys<'_>, config: Object<'_>, family: &Family) -> Result<(), HfError> {
    let rope = config.find_object("rope_parameters")?;
    let sections = rope.map(|rope| rope.find_array("mrope_section")).transpose()?.flatten();
    let mut sizes: Vec<i32> = match sections {
        Some(sections) => sections.iter().filter_map(|size| i32::try_from(size.as_i64()?).ok()).collect(),
        None if family.sections.is_empty() => return Ok(()),
        None => family.sections.to_vec(),
    };
    sizes.resize(4, 0);
    keys.set_array("rope.dimension_sections", sizes)
}

/// Returns which layers are of a kind.
fn kinds(config: Object<'_>, kind: &str, n_layers: usize) -> Result<Vec<bool>, HfError> {
    let kinds = config.find_array("layer_types")?.unwrap_or_default();
    if kinds.len() != n_layers {
        return Err(config.bad("layer_types", format!("{n_layers} layers"), kinds.len().to_string()));
    }
    Ok(kinds.iter().map(|of| of == kind).collect())
}
