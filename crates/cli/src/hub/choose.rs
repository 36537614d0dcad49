//! Selects the files of a model or an adapter in a repository.

use kvant::hf::ADAPTER_FILES;

use super::id::Id;
use super::remote::Problem;
use crate::files::is_mmproj_name;

/// Default quantization, as in llama.cpp.
const DEFAULT: &str = "Q4_K_M";

/// Returns the files of the model that `id` selects among `names`, the first part of a split one
/// first; without GGUF files, those of an [adapter](ADAPTER_FILES).
///
/// # Errors
///
/// No such file, with those available.
pub fn files(names: &[String], id: &Id) -> Result<Vec<String>, Problem> {
    let mut models: Vec<&String> =
        names.iter().filter(|name| name.to_ascii_lowercase().ends_with(".gguf")).collect();
    models.sort();
    let exists = |file: &&str| names.iter().any(|name| name == file);
    if models.is_empty() && ADAPTER_FILES.iter().all(exists) {
        return Ok(ADAPTER_FILES.map(str::to_owned).to_vec());
    }
    let text = models.iter().copied().filter(|name| !is_mmproj_name(name));
    let of = |quant: &str| text.clone().find(|name| names_type(name, quant));
    let chosen = match (&id.file, &id.quant) {
        (Some(file), _) => models.iter().copied().find(|name| *name == file),
        (None, Some(quant)) => of(quant),
        (None, None) => of(DEFAULT).or_else(|| text.clone().next()),
    };
    let chosen = chosen.ok_or_else(|| {
        let available: Vec<&str> = models.iter().map(|name| name.as_str()).take(12).collect();
        let available = if available.is_empty() { "no GGUF file".to_owned() } else { available.join(", ") };
        Problem::Failed(format!("no such file; there is {available}"))
    })?;
    let Some((stem, count)) = split(chosen) else { return Ok(vec![chosen.clone()]) };
    let parts: Vec<String> = (1..=count).map(|i| format!("{stem}-{i:05}-of-{count:05}.gguf")).collect();
    match parts.iter().find(|part| !names.contains(part)) {
        Some(part) => Err(Problem::Failed(format!("a part is missing: {part}"))),
        None => Ok(parts),
    }
}

/// Returns the vision encoder file among `names`, if any: of several the one in the type nearest to
/// the encoder's training precision.
pub fn mmproj(names: &[String]) -> Vec<String> {
    const TYPES: [&str; 4] = ["f16", "bf16", "q8_0", "f32"];
    let mut encoders: Vec<_> = names.iter().filter(|name| is_mmproj_name(name)).collect();
    encoders
        .sort_by_key(|name| (TYPES.iter().position(|of| names_type(name, of)).unwrap_or(TYPES.len()), *name));
    encoders.into_iter().take(1).cloned().collect()
}

/// Returns whether a name contains a type's name as a whole word, case-insensitively.
fn names_type(name: &str, quant: &str) -> bool {
    let (name, quant) = (name.to_ascii_lowercase(), quant.to_ascii_lowercase());
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.match_indices(&quant).any(|(at, _)| {
        let (before, after) = (name[..at].chars().next_back(), name[at + quant.len()..].chars().next());
        !before.is_some_and(|c| c.is_ascii_alphanumeric()) && !after.is_some_and(is_word)
    })
}

/// Returns the stem and the number of parts of a part's name, `STEM-00001-of-00003.gguf`.
fn split(name: &str) -> Option<(&str, usize)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, index) = rest.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let n: usize = count.parse().ok().filter(|_| is_number(count) && is_number(index))?;
    (n > 0).then_some((stem, n))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str], id: &str) -> Result<Vec<String>, String> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        files(&names, &Id::parse(id).unwrap()).map_err(|problem| problem.to_string())
    }

    #[test]
    fn a_part_of_zero_parts_is_a_single_file() {
        assert_eq!(chosen(&["m-00001-of-00000.gguf"], "a/b").unwrap(), ["m-00001-of-00000.gguf"]);
    }

    #[test]
    fn a_type_is_a_whole_word_and_q4_k_m_comes_first() {
        let names =
            ["README.md", "m-IQ4_XS.gguf", "m-Q4_K_M.gguf", "m-Q4_K.gguf", "m.q8_0.gguf", "mmproj-f16.gguf"];
        for (id, want) in [
            ("a/b", "m-Q4_K_M.gguf"),
            ("a/b:q4_k", "m-Q4_K.gguf"),
            ("a/b:Q8_0", "m.q8_0.gguf"),
            ("a/b:iq4_xs", "m-IQ4_XS.gguf"),
        ] {
            assert_eq!(chosen(&names, id).unwrap(), [want], "{id}");
        }
        let line = chosen(&names, "a/b:q2_k").unwrap_err();
        assert!(line.contains("no such file") && line.contains("m-Q4_K.gguf"), "{line}");
        assert_eq!(chosen(&["mmproj-x.gguf", "x-f16.gguf"], "a/b").unwrap(), ["x-f16.gguf"]);
        assert!(chosen(&["model.safetensors"], "a/b").unwrap_err().contains("no GGUF file"));
    }

    #[test]
    fn half_precision_vision_encoders_are_preferred() {
        let chosen =
            |names: &[&str]| mmproj(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(
            chosen(&["m-F16.gguf", "mmproj-m-F32.gguf", "mmproj-m-BF16.gguf"]),
            ["mmproj-m-BF16.gguf"]
        );
        assert_eq!(chosen(&["mmproj-m-Q8_0.gguf", "mmproj-m-f16.gguf"]), ["mmproj-m-f16.gguf"]);
        assert!(chosen(&["m.gguf", "mmproj.json"]).is_empty());
    }

    #[test]
    fn a_split_model_needs_all_parts() {
        let names = ["q/m-Q4_K_M-00002-of-00002.gguf", "q/m-Q4_K_M-00001-of-00002.gguf"];
        assert_eq!(chosen(&names, "a/b").unwrap(), [names[1], names[0]]);
        assert!(chosen(&names[..1], "a/b").unwrap_err().contains("00001-of-00002"));
    }
}
