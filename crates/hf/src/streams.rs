//! Several residual streams (AltUp), and sparse feed-forward layers beside them (Gemma 3n).

use crate::error::HfError;
use crate::family::{Family, Layers};
use crate::folder::{Object, shown};
use crate::metadata::{Keys, Sizes};

/// Matrices of all streams but the first, each a tensor here and stacked in GGUF.
const STACKED: [(&str, &str); 2] = [
    ("model.altup_projections.", "altup_proj.weight"),
    ("model.altup_unembed_projections.", "altup_unembd_proj.weight"),
];

/// Returns the GGUF tensor that the matrix of a stream belongs to, and its index there.
pub(crate) fn stacked(name: &str) -> Option<(&'static str, usize)> {
    STACKED.iter().find_map(|(theirs, ours)| {
        let index = name.strip_prefix(theirs)?.strip_suffix(".weight")?;
        Some((*ours, index.parse().ok().filter(|_| index.bytes().all(|byte| byte.is_ascii_digit()))?))
    })
}

/// Whether a GGUF tensor is such a stack.
pub(crate) fn is_stack(name: &str) -> bool {
    STACKED.iter().any(|(_, ours)| *ours == name)
}

/// Reads the number of residual streams.
pub(crate) fn count(config: Object<'_>, family: &Family) -> Result<usize, HfError> {
    const COUNT: &str = "altup_num_inputs";
    if family.layers != Layers::Streams {
        return Ok(1);
    }
    match config.size(COUNT)? {
        n @ 2..=16 => Ok(n as usize),
        n => Err(config.bad(COUNT, "2 to 16", n.to_string())),
    }
}

/// Writes the keys of streams, of sparse layers, and of layers that share KV.
pub(crate) fn write(keys: &mut Keys<'_>, config: Object<'_>, sizes: &Sizes) -> Result<(), HfError> {
    keys.set("altup.num_inputs", sizes.n_streams as u32)?;
    for (theirs, ours) in [
        ("altup_active_idx", "altup.active_idx"),
        ("num_kv_shared_layers", "attention.shared_kv_layers"),
        ("hidden_size_per_layer_input", "embedding_length_per_layer_input"),
    ] {
        keys.set(ours, config.find_size(theirs)?.unwrap_or(0))?;
    }
    keys.set_array("activation_sparsity_scale", read_sparsity(config, sizes)?)
}

/// Reads by how many standard deviations a gate must exceed the mean to be among those that a
/// sparse layer uses, minus infinity for other layers.
fn read_sparsity(config: Object<'_>, sizes: &Sizes) -> Result<Vec<f32>, HfError> {
    const SHARES: &str = "activation_sparsity_pattern";
    let Some(shares) = config.find_array(SHARES)? else {
        // The first ten layers of larger models leave 95 % of the gates unused.
        let n_sparse = if sizes.n_layers > 10 { 10 } else { 0 };
        let of_layer = |layer| if layer < n_sparse { deviations(0.95) } else { f64::NEG_INFINITY };
        return Ok((0..sizes.n_layers).map(|layer| of_layer(layer) as f32).collect());
    };
    if shares.len() != sizes.n_layers {
        return Err(config.bad(SHARES, format!("{} layers", sizes.n_layers), shares.len().to_string()));
    }
    let of_layer = |share: &serde_json::Value| match share.as_f64() {
        Some(0.0) => Ok(f32::NEG_INFINITY),
        Some(share) if share > 0.0 && share < 1.0 => Ok(deviations(share) as f32),
        _ => Err(config.bad(SHARES, "shares from 0 to below 1", shown(share))),
    };
    shares.iter().map(of_layer).collect()
}

/// Returns the quantile of the normal distribution: the x below which `share` of it lies, by
/// halving an interval, with the distribution function as a series.
fn deviations(share: f64) -> f64 {
    let (mut low, mut high) = (-9.0, 9.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if distribution(middle) < share { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// Returns the normal distribution function of `x`:
/// `1/2 + exp(-x²/2) / √(2π) Σ x^(2k+1) / (2k+1)!!`.
fn distribution(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for k in 1..200 {
        term *= x * x / f64::from(2 * k + 1);
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_the_normal_distribution_are_exact() {
        // From tables.
        for (share, want) in
            [(0.95, 1.644_853_626_951), (0.5, 0.0), (0.975, 1.959_963_984_54), (0.01, -2.326_347_874_04)]
        {
            assert!((deviations(share) - want).abs() < 1e-9, "{share}: {}", deviations(share));
        }
    }

    #[test]
    fn only_matrices_of_streams_are_stacked() {
        assert_eq!(stacked("model.altup_projections.2.weight"), Some(("altup_proj.weight", 2)));
        assert_eq!(
            stacked("model.altup_unembed_projections.0.weight"),
            Some(("altup_unembd_proj.weight", 0))
        );
        for name in
            ["model.altup_projections.+1.weight", "model.altup_projections.0.bias", "model.norm.weight"]
        {
            assert_eq!(stacked(name), None, "{name}");
        }
    }
}
