//! Embeddings of n-grams: a table in many tensors, and the numbers of its hashes, which folders
//! have as tensors and GGUF as keys.

use kvant_gguf::GgufWriter;
use serde_json::Value;

use crate::error::{HfError, TensorFault};
use crate::family::{Family, Layers};
use crate::folder::{Object, shown};
use crate::metadata::Keys;
use crate::safetensors::{ElementKind, Shards, Stored};

/// The table, in GGUF.
pub(crate) const TABLE: &str = "per_layer_token_embd.weight";
/// The module of a layer.
const MODULE: &str = "ple.ple_embedding.";

/// Returns which part of the table a tensor of a layer is.
pub(crate) fn part_of_table(name: &str) -> Option<usize> {
    let part = name.strip_prefix(MODULE)?.strip_prefix("ngram_embedding.shard_")?.strip_suffix(".weight")?;
    let index: u32 = part.parse().ok()?;
    (index.to_string() == part).then_some(index as usize)
}

/// Reads the number of parts of the table.
pub(crate) fn n_parts(config: Object<'_>, family: &Family) -> Result<usize, HfError> {
    match family.layers {
        Layers::DeltaStreams => Ok(config.find_size("split_ngram_parts")?.unwrap_or(512) as usize),
        _ => Ok(1),
    }
}

/// Writes the embeddings of a model that has some, and removes the tensors of their numbers.
///
/// # Errors
/// A number that is missing, or several layers with embeddings, of which GGUF readers know one.
pub(crate) fn write(
    writer: &mut GgufWriter,
    config: Object<'_>,
    family: &Family,
    shards: &mut Shards,
) -> Result<(), HfError> {
    const LAYERS: &str = "ple_layer_ids";
    let layer = match config.find_array(LAYERS)?.unwrap_or_default() {
        [] => return Ok(()),
        // Counted from 1.
        [layer] => layer.as_u64().and_then(|layer| i32::try_from(layer.checked_sub(1)?).ok()),
        _ => None,
    };
    let layer = layer
        .ok_or_else(|| config.bad(LAYERS, "one layer, as GGUF readers assume", shown(&config.map[LAYERS])))?;
    let mut keys = Keys { writer, arch: family.arch };
    keys.set_array("ple.layers", [layer])?;
    for (theirs, ours) in [
        ("ngram_size", "ple.ngram_size"),
        ("heads_per_ngram", "ple.heads_per_ngram"),
        ("ple_conv_kernel_size", "ple.conv_kernel"),
    ] {
        keys.set(ours, config.size(theirs)?)?;
    }
    keys.set("ple.eos_token_id", end_token(config)?)?;
    if let Some(image) = config.find_size("image_token_id")? {
        keys.set("ple.image_token_id", image)?;
    }
    let numbers = format!("layers.{layer}.{MODULE}");
    for (theirs, ours) in [
        ("layer_multipliers", "ple.layer_multipliers"),
        ("ngram_heads_offsets", "ple.head_offsets"),
        ("ngram_heads_vocab_sizes", "ple.head_vocab_sizes"),
    ] {
        let (name, stored) = find(shards, &format!("{numbers}{theirs}"))?;
        keys.set_array(ours, integers(name, stored, shards)?)?;
    }
    let (name, first) = find(shards, &format!("{numbers}ngram_embedding.shard_0.weight"))?;
    match first.shape[..] {
        [_, dim] => keys.set("embedding_length_per_layer_input", u32::try_from(dim).unwrap_or(u32::MAX))?,
        _ => {
            let (name, got) = (name.to_owned(), first.shape.clone());
            return Err(HfError::Shape { name, expected: "a matrix".to_owned(), got });
        }
    }
    shards.retain(|name| !name.contains(&numbers) || name.ends_with(".weight"));
    Ok(())
}

/// Reads the token that ends a text: the first of several, as in `transformers`.
fn end_token(config: Object<'_>) -> Result<u32, HfError> {
    const END: &str = "eos_token_id";
    let end = match config.value(END) {
        Some(Value::Array(all)) => all.first(),
        end => end,
    };
    end.and_then(Value::as_u64)
        .and_then(|end| u32::try_from(end).ok())
        .ok_or_else(|| config.bad(END, "a token", end.map_or("nothing".to_owned(), shown)))
}

/// Returns the tensor whose name ends so, whatever model it is nested in.
fn find<'a>(shards: &'a Shards, end: &str) -> Result<(&'a str, &'a Stored), HfError> {
    let is_it =
        |name: &str| name.strip_suffix(end).is_some_and(|front| front.is_empty() || front.ends_with('.'));
    let missing = || HfError::Missing { name: end.to_owned(), of: None };
    shards.tensors().find(|(name, _)| is_it(name)).ok_or_else(missing)
}

/// Reads a list of integers.
fn integers(name: &str, stored: &Stored, shards: &Shards) -> Result<Vec<u64>, HfError> {
    if stored.holds != ElementKind::I64 {
        let what = TensorFault::Part { expected: "I64", got: stored.holds.to_string() };
        return Err(HfError::Tensor { path: shards.path(stored).to_owned(), name: name.to_owned(), what });
    }
    Ok(shards.data(stored).as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_table_have_canonical_numbers() {
        let of =
            |number: &str| part_of_table(&format!("ple.ple_embedding.ngram_embedding.shard_{number}.weight"));
        assert_eq!((of("0"), of("511")), (Some(0), Some(511)));
        for other in ["", "01", "+1", "-1", "1.0", "99999999999"] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(part_of_table("ple.ple_embedding.ngram_embedding.weight"), None);
    }
}
