//! RoPE base and scaling.

use std::f64::consts::TAU;

use kvant_gguf::GgufWriter;
use serde_json::Value;

use crate::error::HfError;
use crate::family::{Family, Layers};
use crate::folder::Object;
use crate::heads_by_layer;
use crate::metadata::{Keys, Sizes};
use crate::shared_kv;

/// Frequency divisors, `[n_rot / 2]`, with the name of their GGUF tensor.
pub(crate) type Divisors = (&'static str, Vec<f32>);

/// The name of divisors that apply to every context length.
const ALWAYS: &str = "rope_freqs.weight";

/// Writes the RoPE keys of a configuration. Returns the frequency divisors that are tensors in
/// GGUF.
///
/// # Errors
/// A scaling type that GGUF readers do not support, or that lacks a number.
pub(crate) fn write(
    writer: &mut GgufWriter,
    config: Object<'_>,
    family: &Family,
    sizes: &Sizes,
) -> Result<Vec<Divisors>, HfError> {
    let mut keys = Keys { writer, arch: family.arch };
    // Newer configurations have everything in one object, with one entry per attention type if
    // there are two.
    let all = config.find_object("rope_parameters")?;
    let of_kind = |kind| all.map(|all| all.find_object(kind)).transpose();
    let full = of_kind("full_attention")?.flatten().or(of_kind("indexed_attention")?.flatten());
    let windowed = of_kind("sliding_attention")?.flatten();
    let [of_tokens, of_pools] = match family.layers {
        Layers::SharedKv => shared_kv::rotations(config)?,
        _ => [None; 2],
    };
    let rope = full.or(of_pools).or(all);
    let within = |object: Option<Object<'_>>, key| object.map(|object| object.find_float(key)).transpose();
    let theta = within(of_tokens.or(rope), "rope_theta")?.flatten();
    let theta = theta.or(config.find_float("rope_theta")?).unwrap_or(10_000.0);
    let alpha = within(rope, "alpha")?.flatten().filter(|alpha| *alpha > 0.0);
    keys.set("rope.freq_base", alpha.map_or(theta, |alpha| ntk_base(theta, alpha, sizes.n_rot)) as f32)?;
    if let Some(base) =
        within(windowed, "rope_theta")?.flatten().or(config.find_float("rope_local_base_freq")?)
    {
        keys.set("rope.freq_base_swa", base as f32)?;
    }
    let halves_full = family.layers == Layers::HeadsByLayer { halves_full: true };
    if let Layers::HeadsByLayer { halves_full } = family.layers {
        heads_by_layer::write_rotations(&mut keys, windowed, sizes, halves_full)?;
    }
    if family.has_layer_bases {
        write_rope_pattern(&mut keys, config, theta, sizes)?;
    }
    let Some(rope) = rope.or(config.find_object("rope_scaling")?) else { return Ok(Vec::new()) };
    let kind = rope.find_str("rope_type")?.or(rope.find_str("type")?).unwrap_or("default");
    match kind {
        // Dynamic scaling changes nothing within the trained context.
        "default" | "dynamic" => {}
        "linear" => {
            keys.set("rope.scaling.type", "linear")?;
            keys.set("rope.scaling.factor", rope.float("factor")? as f32)?;
        }
        "longrope" | "su" | "llama3" if family.layers == Layers::SharedKv => {
            return Err(rope.bad("rope_type", "default, linear or yarn", kind));
        }
        "yarn" => write_yarn(&mut keys, rope, family, sizes)?,
        "longrope" | "su" => return write_longrope(&mut keys, config, rope, family, sizes),
        "llama3" => {
            let mut all = divisors(rope, theta, sizes.n_rot)?;
            // GGUF has one list for all layers, and readers use its start.
            if halves_full {
                all.resize(sizes.n_rot, 1.0);
            }
            return Ok(vec![(ALWAYS, all)]);
        }
        "proportional" if sizes.full.is_some() => {
            return Ok(vec![(ALWAYS, proportional_divisors(rope, sizes.n_rot)?)]);
        }
        other => return Err(rope.bad("rope_type", "default, linear, yarn, longrope or llama3", other)),
    }
    Ok(Vec::new())
}

/// Writes which layers have RoPE, if some have none. GGUF has one base for all of them.
fn write_rope_pattern(
    keys: &mut Keys<'_>,
    config: Object<'_>,
    base: f64,
    sizes: &Sizes,
) -> Result<(), HfError> {
    const BASES: &str = "layer_rope_theta";
    let Some(bases) = config.find_array(BASES)? else { return Ok(()) };
    let bases: Vec<Option<f64>> = bases.iter().map(Value::as_f64).collect();
    if bases.len() != sizes.n_layers || bases.iter().any(|of| *of != Some(base) && *of != Some(0.0)) {
        let got: Vec<String> = bases.iter().map(|base| base.unwrap_or(f64::NAN).to_string()).collect();
        return Err(config.bad(BASES, format!("{base} or 0 for {} layers", sizes.n_layers), got.join(", ")));
    }
    match bases.contains(&Some(0.0)) {
        true => keys.set_array("attention.rope_pattern", bases.iter().map(|of| u32::from(*of == Some(base)))),
        false => Ok(()),
    }
}

/// Returns the RoPE base that slows the slowest pair of a head by `alpha` (Hunyuan).
fn ntk_base(base: f64, alpha: f64, n_rot: usize) -> f64 {
    let dim = n_rot as f64;
    base * alpha.powf(dim / (dim - 2.0).max(1.0))
}

/// LongRoPE (arXiv 2402.13753): divisors for contexts beyond the original one and within it, and
/// one attention factor for both.
fn write_longrope(
    keys: &mut Keys<'_>,
    config: Object<'_>,
    rope: Object<'_>,
    family: &Family,
    sizes: &Sizes,
) -> Result<Vec<Divisors>, HfError> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    // Older configurations have it beside the lists, newer ones among them.
    let original = match rope.find_size(ORIGINAL)? {
        Some(_) => rope.size(ORIGINAL)?,
        None => config.size(ORIGINAL)?,
    };
    let ratio = f64::from(config.size("max_position_embeddings")?) / f64::from(original);
    let factor = rope.find_float("factor")?.unwrap_or(ratio);
    let usual = if factor > 1.0 { (1.0 + factor.ln() / f64::from(original).ln()).sqrt() } else { 1.0 };
    keys.set("rope.scaling.type", "longrope")?;
    keys.set("rope.scaling.original_context_length", original)?;
    let given = match family.arch {
        "phimoe" => read_magnitudes(rope)?,
        _ => rope.find_float("attention_factor")?,
    };
    keys.set("rope.scaling.attn_factor", given.unwrap_or(usual) as f32)?;
    let list = |key, name| Ok::<_, HfError>((name, list_of_divisors(rope, key, sizes.n_rot / 2)?));
    Ok(vec![
        list("long_factor", "rope_factors_long.weight")?,
        list("short_factor", "rope_factors_short.weight")?,
    ])
}

/// Reads the magnitude of Phi-3.5-MoE's RoPE, of which GGUF has one for contexts of any length.
fn read_magnitudes(rope: Object<'_>) -> Result<Option<f64>, HfError> {
    let (long, short) = (rope.find_float("long_mscale")?, rope.find_float("short_mscale")?);
    match long == short {
        true => Ok(long),
        false => {
            let shown = |x: Option<f64>| x.map_or_else(|| "nothing".to_owned(), |x| x.to_string());
            Err(rope.bad("long_mscale", format!("{}, as short_mscale", shown(short)), shown(long)))
        }
    }
}

fn list_of_divisors(rope: Object<'_>, key: &str, n: usize) -> Result<Vec<f32>, HfError> {
    let list = rope.find_array(key)?.unwrap_or_default();
    let positive = list.iter().filter_map(Value::as_f64).filter(|x| *x > 0.0).map(|x| x as f32);
    let divisors: Vec<f32> = positive.collect();
    if list.len() != n || divisors.len() != n {
        return Err(rope.bad(
            key,
            format!("{n} positive numbers"),
            format!("{} of {}", divisors.len(), list.len()),
        ));
    }
    Ok(divisors)
}

fn write_yarn(keys: &mut Keys<'_>, rope: Object<'_>, family: &Family, sizes: &Sizes) -> Result<(), HfError> {
    // gpt-oss does not round the bounds of the interpolation range, others do, and GGUF has no key
    // for it.
    if let Some(rounds) = rope.find_bool("truncate")?
        && rounds == family.has_mxfp4_experts
    {
        return Err(rope.bad("truncate", format!("{}, as GGUF readers assume", !rounds), rounds.to_string()));
    }
    write_magnitude(keys, rope, family)?;
    let factor = rope.float("factor")?;
    let original = rope.find_size("original_max_position_embeddings")?.unwrap_or(sizes.n_ctx);
    keys.set("rope.scaling.type", "yarn")?;
    keys.set("rope.scaling.factor", factor as f32)?;
    keys.set("rope.scaling.original_context_length", original)?;
    for (theirs, ours) in
        [("beta_fast", "rope.scaling.yarn_beta_fast"), ("beta_slow", "rope.scaling.yarn_beta_slow")]
    {
        if let Some(beta) = rope.find_float(theirs)? {
            keys.set(ours, beta as f32)?;
        }
    }
    match rope.find_float("attention_factor")? {
        // Pooled keys keep their magnitude.
        Some(1.0) if family.layers == Layers::SharedKv => Ok(()),
        Some(magnitude) if family.layers == Layers::SharedKv => {
            Err(rope.bad("attention_factor", "1, as GGUF readers assume", magnitude.to_string()))
        }
        // It replaces the default attention factor here, but multiplies it in GGUF.
        Some(magnitude) => {
            keys.set("rope.scaling.attn_factor", (magnitude / (1.0 + 0.1 * factor.ln())) as f32)
        }
        None => Ok(()),
    }
}

/// Families whose scores grow with the position; others ignore the number for it.
const GROWING: [&str; 2] = ["mistral3", "mistral4"];

/// Writes the correction of YaRN's attention factor, and the growth of attention scores with
/// position.
fn write_magnitude(keys: &mut Keys<'_>, rope: Object<'_>, family: &Family) -> Result<(), HfError> {
    let [one, all] = ["mscale", "mscale_all_dim"].map(|key| rope.find_float(key));
    let (one, all) = (one?, all?);
    match (family.yarn_mscale_factor, all) {
        (_, None) if one.is_none() => {}
        (Some(by), Some(all)) => {
            // GGUF has no key for `mscale`: with MLA it equals `mscale_all_dim`, else 1.
            let known = if scales_scores(family) { all } else { 1.0 };
            if one.is_some_and(|one| one != known) {
                let got = one.map_or_else(String::new, |one| one.to_string());
                return Err(rope.bad("mscale", format!("{known}, as GGUF readers assume"), got));
            }
            keys.set("rope.scaling.yarn_log_multiplier", (by * all) as f32)?;
        }
        _ => {
            let what = format!("'mscale' of YaRN in the family {}", keys.arch);
            return Err(HfError::Unsupported { path: rope.path.to_owned(), what });
        }
    }
    if let Some(beta) = rope.find_float("llama_4_scaling_beta")? {
        if !GROWING.contains(&family.arch) {
            let what = format!("'llama_4_scaling_beta' in the family {}", keys.arch);
            return Err(HfError::Unsupported { path: rope.path.to_owned(), what });
        }
        keys.set("attention.temperature_scale", beta as f32)?;
    }
    Ok(())
}

/// Whether YaRN's attention factor applies to scores instead of rotated values.
fn scales_scores(family: &Family) -> bool {
    family.layers.are_latent()
}

/// Returns divisors that stop all but a fraction of the pairs of a head. The others keep the
/// frequencies of full rotation.
fn proportional_divisors(rope: Object<'_>, head_dim: usize) -> Result<Vec<f32>, HfError> {
    let share = rope.find_float("partial_rotary_factor")?.unwrap_or(1.0);
    if !(share > 0.0 && share <= 1.0) {
        return Err(rope.bad("partial_rotary_factor", "a share", share.to_string()));
    }
    let n_rotating = (share * (head_dim / 2) as f64) as usize;
    Ok((0..head_dim / 2).map(|pair| if pair < n_rotating { 1.0 } else { 1e30 }).collect())
}

/// Returns the frequency divisors of Llama 3: the factor for low frequencies, 1 for high ones,
/// interpolated between.
fn divisors(rope: Object<'_>, theta: f64, n_rot: usize) -> Result<Vec<f32>, HfError> {
    let (factor, original) = (rope.float("factor")?, rope.float("original_max_position_embeddings")?);
    let (low, high) = (rope.float("low_freq_factor")?, rope.float("high_freq_factor")?);
    if !(factor > 0.0 && original > 0.0 && 0.0 < low && low < high) {
        return Err(rope.bad(
            "rope_type",
            "positive factors, low_freq_factor below high_freq_factor",
            "others",
        ));
    }
    let divisor = |pair: usize| {
        let wavelength = TAU * theta.powf(2.0 * pair as f64 / n_rot as f64);
        // Rotations within the original context: fewer than `low` is a low frequency, more than
        // `high` a high one.
        let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
    };
    Ok((0..n_rot / 2).map(divisor).collect())
}
