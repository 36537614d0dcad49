//! The numbers of xIELU, which folders have as tensors and GGUF as keys.

use kvant_gguf::GgufWriter;

use crate::error::HfError;
use crate::safetensors::{ElementKind, Shards};

/// The module of a layer that has them.
const MODULE: &str = ".mlp.act_fn.";

/// Writes the numbers of each layer, and removes their tensors.
///
/// # Errors
/// A number that is missing, or no number.
pub(crate) fn write(writer: &mut GgufWriter, shards: &mut Shards, n_layers: usize) -> Result<(), HfError> {
    for name in ["alpha_p", "alpha_n", "beta", "eps"] {
        let of_layer = |layer: usize| read(shards, format!("model.layers.{layer}{MODULE}{name}"));
        let of_layers = (0..n_layers).map(of_layer).collect::<Result<Vec<f32>, _>>()?;
        writer.set_array(&format!("xielu.{name}"), of_layers)?;
    }
    shards.retain(|name| !name.contains(MODULE));
    Ok(())
}

/// Reads a tensor of one value.
fn read(shards: &Shards, name: String) -> Result<f32, HfError> {
    let Some((_, stored)) = shards.tensors().find(|(known, _)| *known == name) else {
        return Err(HfError::Missing { name, of: None });
    };
    let mut value = [0.0];
    match stored.holds {
        ElementKind::Values(dtype)
            if stored.shape == [1]
                && kvant_codec::decode(dtype, &shards.data(stored), &mut value).is_ok() =>
        {
            Ok(value[0])
        }
        _ => Err(HfError::Shape { name, expected: "one number".to_owned(), got: stored.shape.clone() }),
    }
}
