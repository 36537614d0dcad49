//! xIELU, an activation whose numbers each layer has learned (Apertus).

use kvant_backend::Xielu;
use kvant_gguf::Value;

use super::Keys;
use crate::ModelError;
use crate::family::Family;

/// Reads the numbers of each layer, if the family has xIELU: the files have them as they are
/// trained, without the softplus that keeps them positive.
pub(super) fn read(keys: &Keys, family: &Family, n_layers: usize) -> Result<Option<Vec<Xielu>>, ModelError> {
    if !family.xielu {
        return Ok(None);
    }
    let of_layers = |key| read_numbers(keys, key, n_layers);
    let (positive, negative) = (of_layers("xielu.alpha_p")?, of_layers("xielu.alpha_n")?);
    let (slope, eps) = (of_layers("xielu.beta")?, of_layers("xielu.eps")?);
    let of_layer = |index: usize| Xielu {
        positive: softplus(positive[index]),
        negative: slope[index] + softplus(negative[index]),
        slope: slope[index],
        eps: eps[index],
    };
    Ok(Some((0..n_layers).map(of_layer).collect()))
}

fn softplus(x: f32) -> f32 {
    let x = f64::from(x);
    (x.max(0.0) + (-x.abs()).exp().ln_1p()) as f32
}

/// Reads a number per layer, or one for all layers. These keys have no prefix.
fn read_numbers(keys: &Keys, key: &str, n_layers: usize) -> Result<Vec<f32>, ModelError> {
    let bad = |expected: &str, got: String| ModelError::Value {
        key: key.to_owned(),
        expected: expected.to_owned(),
        got,
    };
    let meta = keys.gguf.meta();
    let numbers: Vec<f32> = match meta.value(key) {
        Some(Value::Array(_)) => meta.get(key)?,
        _ => vec![meta.get(key)?; n_layers],
    };
    if numbers.len() < n_layers {
        return Err(bad(&format!("{n_layers} layers"), numbers.len().to_string()));
    }
    match numbers.iter().find(|x| !x.is_finite()) {
        Some(x) => Err(bad("finite numbers", x.to_string())),
        None => Ok(numbers),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softplus_is_exact_at_both_ends() {
        for (x, want) in [(0.0, std::f32::consts::LN_2), (100.0, 100.0), (-100.0, (-100.0_f64).exp() as f32)]
        {
            assert_eq!(softplus(x), want);
        }
    }
}
