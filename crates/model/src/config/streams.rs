//! Several residual streams (AltUp), and sparse feed-forward layers beside them (Gemma 3n).

use kvant_backend::Activation;

use super::{Keys, PER_LAYER};
use crate::ModelError;
use crate::family::Family;

/// Largest number of residual streams.
const MAX_STREAMS: usize = 16;

/// Reads the number of residual streams: one, unless the file has alternating updates.
pub(super) fn read(keys: &Keys) -> Result<usize, ModelError> {
    const COUNT: &str = "altup.num_inputs";
    if !keys.has(COUNT) {
        return Ok(1);
    }
    keys.refuse("altup.active_idx", "alternating updates of another stream than the first")?;
    let n = keys.size(COUNT)?;
    if !(2..=MAX_STREAMS).contains(&n) {
        return Err(keys.bad(COUNT, &format!("2 to {MAX_STREAMS} streams"), n));
    }
    keys.size(PER_LAYER)?;
    Ok(n)
}

/// Reads by how many standard deviations a value of each feed-forward layer's gate must exceed
/// their mean; `None` for layers that use all, which files call minus infinity.
pub(super) fn read_sparsity(
    keys: &Keys,
    family: &Family,
    n_layers: usize,
) -> Result<Vec<Option<f32>>, ModelError> {
    const SCALE: &str = "activation_sparsity_scale";
    let Some(all) = keys.gguf.meta().find::<Vec<f32>>(&keys.key(SCALE))? else {
        return Ok(vec![None; n_layers]);
    };
    if all.len() < n_layers {
        return Err(keys.bad(SCALE, &format!("{n_layers} layers"), all.len()));
    }
    if let Some(bad) = all.iter().find(|x| x.is_nan() || **x == f32::INFINITY) {
        return Err(keys.bad(SCALE, "finite numbers, or minus infinity", bad));
    }
    let sparse: Vec<_> = all.into_iter().take(n_layers).map(|x| Some(x).filter(|x| x.is_finite())).collect();
    if sparse.iter().any(Option::is_some) && (family.activation != Activation::Gelu || family.ungated) {
        let what = format!("sparse activations other than GELU ({})", keys.key(SCALE));
        return Err(ModelError::Unsupported { what });
    }
    Ok(sparse)
}
