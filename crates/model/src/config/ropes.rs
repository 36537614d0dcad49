//! The rotary embeddings of a model: which layers use which, and their parameters.

use kvant_backend::Pairing;

use super::heads::WINDOW;
use super::{Keys, Latent, mla};
use crate::ModelError;
use crate::family::{Family, NoRope, WindowRope, Windows};
use crate::rope::{Rope, Scaling, Temperature};
use crate::weights::decode_vector;

const TEMPERATURE: &str = "attention.temperature_scale";
const ORIGINAL_CONTEXT: &str = "rope.scaling.original_context_length";
const SCALING: &str = "rope.scaling.type";
/// LongRoPE scaling: frequency divisors that depend on the context length.
const LONGROPE: &str = "longrope";

/// The rotary embeddings of a model; the first is that of full-attention layers.
pub(super) struct Ropes {
    pub all: Vec<Rope>,
    /// Index of the embedding of sliding-window layers.
    pub windowed: usize,
    /// Index of the embedding of layers without RoPE (NoPE).
    pub no_rope: usize,
    /// Offset from the index of a layer's keys to that of its queries.
    pub query_offset: usize,
}

impl Ropes {
    fn of(first: Rope) -> Self {
        Self::given(vec![first])
    }

    /// Returns these, of which layers name theirs.
    pub fn given(all: Vec<Rope>) -> Self {
        Self { all, windowed: 0, no_rope: 0, query_offset: 0 }
    }

    /// Returns the index of an embedding, which is added unless it is there.
    pub fn add(&mut self, rope: Rope) -> usize {
        self.all.iter().position(|known| *known == rope).unwrap_or_else(|| {
            self.all.push(rope);
            self.all.len() - 1
        })
    }
}

/// Reads the rotary embeddings for heads of `dims`, in MLA of these sizes: of full-attention
/// layers, and of sliding-window layers.
pub(super) fn read(
    keys: &Keys,
    family: &Family,
    dims: [usize; 2],
    latents: [Option<Latent>; 2],
    n_ctx_train: usize,
) -> Result<Ropes, ModelError> {
    const BASE: &str = "rope.freq_base_swa";
    const WINDOWED_DIM: &str = "rope.dimension_count_swa";
    let [head_dim, windowed_dim] = dims;
    let pairing = read_pairing(keys, family)?;
    let n_rot_given = read_n_rot(keys, "rope.dimension_count", head_dim)?;
    let first = read_rope(keys, family, pairing, n_rot_given, n_ctx_train)?;
    let first = match read_sections(keys)? {
        Some(sections) => first.with_axes(sections, INTERLEAVED.contains(&family.name)),
        None => first,
    };
    let (n_rot, mut ropes) = (first.params.n_rot, Ropes::of(first));
    let plain = |n_rot, base| {
        let rope = Rope::new(pairing, n_rot, base, &Scaling::None, None);
        rope.ok_or_else(|| keys.bad(BASE, "a positive base", base))
    };
    if let Some(windows) = family.windows
        && let Some(base) = keys.positive_or(BASE, default_window_base(keys, windows)?)?
    {
        ropes.windowed = ropes.all.len();
        ropes.all.push(plain(
            match windows.own_heads || keys.has(WINDOWED_DIM) {
                true => read_n_rot(keys, WINDOWED_DIM, windowed_dim)?,
                false => n_rot_given,
            },
            base,
        )?);
    }
    if family.no_rope != NoRope::None {
        ropes.no_rope = ropes.all.len();
        ropes.all.push(plain(0, 1.0)?);
    }
    if let Some(temperature) = read_temperature(keys, n_ctx_train)? {
        ropes.query_offset = ropes.all.len();
        if let [Some(full), Some(windowed)] = latents {
            // It multiplies both parts of the queries, those with RoPE and those without, after
            // the projection into the latent space.
            let of_queries = |rope: usize| {
                let Latent { rank, n_rot, .. } = if rope == ropes.windowed { windowed } else { full };
                Rope::without_rotation(pairing, rank + n_rot).growing(temperature)
            };
            let of_queries: Vec<Rope> = (0..ropes.query_offset).map(of_queries).collect();
            ropes.all.extend(of_queries);
            return Ok(ropes);
        }
        // The temperature is applied by RoPE's magnitude, so every layer must rotate whole query
        // heads.
        if family.no_rope != NoRope::None || n_rot != head_dim {
            let what = format!("{} with partial RoPE", keys.key(TEMPERATURE));
            return Err(ModelError::Unsupported { what });
        }
        ropes.all.extend_from_within(..);
        let queries = ropes.all.iter_mut().skip(ropes.query_offset);
        queries.for_each(|rope| *rope = rope.clone().growing(temperature));
    }
    Ok(ropes)
}

/// Returns an embedding of this base without context extension.
pub(super) fn plain(keys: &Keys, pairing: Pairing, n_rot: usize, base: f32) -> Result<Rope, ModelError> {
    let rope = Rope::new(pairing, n_rot, base, &Scaling::None, None);
    rope.ok_or_else(|| keys.bad("rope.freq_base", "a positive base", base))
}

/// Reads the embedding of layers with pooled keys: YaRN leaves its magnitude as it is.
pub(super) fn of_pools(
    keys: &Keys,
    family: &Family,
    n_rot: usize,
    n_ctx_train: usize,
) -> Result<Rope, ModelError> {
    const BASE: &str = "attention.compress_rope_freq_base";
    let base = keys.float_or(BASE, read_base(keys)?)?;
    let mut scaling = read_scaling(keys, family, keys.size_or(ORIGINAL_CONTEXT, n_ctx_train)?)?;
    if let Scaling::Yarn { log_multiplier, .. } = &mut scaling {
        *log_multiplier = 1.0;
    }
    let rope = Rope::new(family.pairing, n_rot, base, &scaling, None);
    rope.ok_or_else(|| keys.bad(BASE, "a positive base and scaling factor", base))
}

/// Reads which layers have RoPE, for families whose files may have a pattern: all without one.
pub(super) fn read_pattern(keys: &Keys, family: &Family, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    const PATTERN: &str = "attention.rope_pattern";
    let pattern = match family.no_rope {
        NoRope::FromPattern => keys.gguf.meta().find::<Vec<u32>>(&keys.key(PATTERN))?,
        _ => None,
    };
    let Some(pattern) = pattern else { return Ok(vec![true; n_layers]) };
    if pattern.len() < n_layers {
        return Err(keys.bad(PATTERN, &format!("{n_layers} layers"), pattern.len()));
    }
    Ok(pattern.into_iter().map(|has_rope| has_rope != 0).collect())
}

/// Returns the default base of sliding-window layers; `None` if they use that of all others.
fn default_window_base(keys: &Keys, windows: Windows) -> Result<Option<f32>, ModelError> {
    Ok(match windows.rope {
        WindowRope::Alike => None,
        // The model may have no window.
        WindowRope::Unscaled if keys.count(WINDOW)? == 0 => None,
        WindowRope::Unscaled => Some(read_base(keys)?),
        WindowRope::By(base) => Some(base),
    })
}

fn read_base(keys: &Keys) -> Result<f32, ModelError> {
    keys.float_or("rope.freq_base", 10_000.0)
}

/// Reads the attention temperature, if scores grow with the position.
fn read_temperature(keys: &Keys, n_ctx_train: usize) -> Result<Option<Temperature>, ModelError> {
    const LENGTH: &str = "attention.temperature_length";
    let Some(scale) = keys.positive(TEMPERATURE)? else { return Ok(None) };
    let length = match keys.has(LENGTH) {
        true => keys.size(LENGTH)?,
        false => keys.size_or(ORIGINAL_CONTEXT, n_ctx_train)?,
    };
    Ok(Some(Temperature { scale, length }))
}

/// Reads the number of rotated values of a head.
fn read_n_rot(keys: &Keys, key: &str, head_dim: usize) -> Result<usize, ModelError> {
    let n_rot = keys.size_or(key, head_dim)?;
    if n_rot % 2 != 0 || n_rot > head_dim {
        return Err(keys.bad(key, &format!("an even number up to {head_dim}"), n_rot));
    }
    Ok(n_rot)
}

/// Returns the pair order: halves, for every family, if the file has M-RoPE sections (GLM-4V). All
/// sections of a text token have the same position, but the files of such models have their rows in
/// the order of halves.
fn read_pairing(keys: &Keys, family: &Family) -> Result<Pairing, ModelError> {
    Ok(if read_sections(keys)?.is_some() { Pairing::Halves } else { family.pairing })
}

/// Families whose M-RoPE sections (time, height, width) are interleaved.
const INTERLEAVED: [&str; 5] = ["qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen4exp"];

/// Reads the M-RoPE sections: the number of pairs that rotate by time, height and width, if they
/// differ.
fn read_sections(keys: &Keys) -> Result<Option<[usize; 3]>, ModelError> {
    let sections: Vec<i32> = keys.gguf.meta().find(&keys.key("rope.dimension_sections"))?.unwrap_or_default();
    Ok(match sections[..] {
        [times, lines, ref rest @ ..] if times > 0 && lines > 0 => {
            let columns = rest.first().copied().unwrap_or(0);
            Some([times, lines, columns].map(|n| usize::try_from(n).unwrap_or(0)))
        }
        _ => None,
    })
}

fn read_rope(
    keys: &Keys,
    family: &Family,
    pairing: Pairing,
    n_rot_given: usize,
    n_ctx_train: usize,
) -> Result<Rope, ModelError> {
    let halves = family.windows.is_some_and(|windows| windows.halves_full);
    let n_rot = if halves { n_rot_given / 4 * 2 } else { n_rot_given };
    let theta = read_base(keys)?;
    let n_ctx_orig = keys.size_or(ORIGINAL_CONTEXT, n_ctx_train)?;
    let scaling = read_scaling(keys, family, n_ctx_orig)?;
    let rope = |divisors: Option<&[f32]>| {
        Rope::new(pairing, n_rot, theta, &scaling, divisors)
            .ok_or_else(|| keys.bad("rope.freq_base", "a positive base and scaling factor", theta))
    };
    let rope = match read_divisors(keys, family, n_rot_given / 2)? {
        FrequencyDivisors::None => rope(None)?,
        FrequencyDivisors::Always(divisors) => rope(Some(&divisors))?,
        FrequencyDivisors::ByContext { long, short } => {
            rope(Some(&long))?.beyond(n_ctx_orig, rope(Some(&short))?)
        }
    };
    Ok(rope.scaled(read_magnitude(keys, &scaling)?))
}

/// Reads the factor on the magnitude: that of a key, or one that YaRN has instead of its own.
fn read_magnitude(keys: &Keys, scaling: &Scaling) -> Result<f32, ModelError> {
    let by = keys.float_or("rope.scaling.attn_factor", 1.0)?;
    Ok(match (scaling, keys.positive("rope.scaling.yarn_attn_factor")?) {
        (Scaling::Yarn { factor, log_multiplier: 0.0, .. }, Some(instead)) => {
            by * (f64::from(instead) / (1.0 + 0.1 * f64::from(*factor).ln())) as f32
        }
        _ => by,
    })
}

fn read_scaling(keys: &Keys, family: &Family, n_ctx_orig: usize) -> Result<Scaling, ModelError> {
    let factor = match keys.float_or("rope.scaling.factor", 0.0)? {
        0.0 => keys.float_or("rope.scale_linear", 1.0)?,
        factor => factor,
    };
    // A factor without a type means linear scaling, as in other GGUF readers.
    let default = if factor == 1.0 { "none" } else { "linear" };
    match keys.str_or(SCALING, default)? {
        // LongRoPE consists of frequency divisors alone.
        "none" | LONGROPE => Ok(Scaling::None),
        "linear" => Ok(Scaling::Linear { factor }),
        "yarn" => Ok(Scaling::Yarn {
            factor,
            n_ctx_orig,
            beta_fast: keys.float_or("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: keys.float_or("rope.scaling.yarn_beta_slow", 1.0)?,
            // With attention scaling in the scores, RoPE's magnitude growth is undone completely.
            log_multiplier: match mla::read_rate(keys)? {
                rate if family.mla && rate > 0.0 => 1.0,
                rate => rate,
            },
            whole_pairs: family.whole_pairs,
        }),
        other => Err(ModelError::Unsupported {
            what: format!("RoPE scaling '{other}' (known: linear, yarn, longrope, llama3)"),
        }),
    }
}

/// Frequency divisors.
enum FrequencyDivisors {
    None,
    /// The same for every context.
    Always(Vec<f32>),
    /// For contexts longer than the original one, and for others.
    ByContext {
        long: Vec<f32>,
        short: Vec<f32>,
    },
}

/// Tensors of frequency divisors, `[n_rot / 2]` each: for every context, for long and for short
/// ones.
pub(crate) const DIVISORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

fn read_divisors(keys: &Keys, family: &Family, n: usize) -> Result<FrequencyDivisors, ModelError> {
    let [always, long, short] = DIVISORS;
    let has = |name: &str| keys.gguf.find_info(name).is_some();
    let read = |name| decode_vector(&keys.gguf.tensor(name)?, n);
    let by_context = has(long) || has(short) || keys.str_or(SCALING, "none")? == LONGROPE;
    match has(always) || family.windows.is_some_and(|windows| windows.own_heads) {
        true if by_context => {
            let what = format!("'{always}' beside divisors by the length of the context");
            Err(ModelError::Unsupported { what })
        }
        true => Ok(FrequencyDivisors::Always(read(always)?)),
        false if by_context => Ok(FrequencyDivisors::ByContext { long: read(long)?, short: read(short)? }),
        false => Ok(FrequencyDivisors::None),
    }
}
