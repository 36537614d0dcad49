//! Pooling of embedding models (sentence-transformers): `modules.json` names the folder of the
//! pooling module's configuration.

use std::path::{Component, Path};

use kvant_gguf::GgufWriter;

use crate::error::HfError;
use crate::folder::{Folder, Object};

const MODULES: &str = "modules.json";

/// Pooling modes: flag, name and GGUF's number.
const POOLING_MODES: [(&str, &str, u32); 3] = [
    ("pooling_mode_mean_tokens", "mean", 1),
    ("pooling_mode_cls_token", "cls", 2),
    ("pooling_mode_lasttoken", "lasttoken", 3),
];

/// Writes the pooling type of a model of `arch`; no key if the folder has no pooling module.
/// Returns whether it has one.
///
/// # Errors
/// An unknown pooling mode, or a path outside of the folder.
pub(crate) fn write(writer: &mut GgufWriter, folder: &mut Folder, arch: &str) -> Result<bool, HfError> {
    let Some(modules) = folder.json(MODULES)? else { return Ok(false) };
    for module in modules.list()? {
        if module.find_str("type")?.is_some_and(|kind| kind.ends_with("Pooling")) {
            let path = path_within(module)?;
            let Some(config) = folder.json(&format!("{path}/config.json"))? else { continue };
            writer.set(&format!("{arch}.pooling_type"), pooling_type(config.object()?)?)?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the folders of the products behind pooling, in order. Rejects modules of an encoder that
/// its embeddings would lack. Normalization is always applied.
///
/// # Errors
/// A module that is none of the model, pooling, products behind it, and normalization.
pub(crate) fn dense_modules(folder: &mut Folder) -> Result<Vec<String>, HfError> {
    const KNOWN: [&str; 4] = ["Transformer", "Pooling", "Normalize", "Dense"];
    let Some(modules) = folder.json(MODULES)? else { return Ok(Vec::new()) };
    let (mut is_pooled, mut dense) = (false, Vec::new());
    for module in modules.list()? {
        let kind = module.find_str("type")?.unwrap_or_default();
        if !KNOWN.iter().any(|known| kind.ends_with(known)) {
            return Err(module.bad("type", KNOWN.join(", "), format!("\"{kind}\"")));
        }
        is_pooled |= kind.ends_with("Pooling");
        if kind.ends_with("Dense") {
            if !is_pooled {
                return Err(module.bad("type", "Pooling before Dense", format!("\"{kind}\"")));
            }
            dense.push(path_within(module)?.to_owned());
        }
    }
    Ok(dense)
}

/// Returns the folder of a module within that of the model.
fn path_within(module: Object<'_>) -> Result<&str, HfError> {
    let path = module.find_str("path")?.unwrap_or_default();
    let is_within = |part| matches!(part, Component::Normal(_));
    if path.is_empty() || !Path::new(path).components().all(is_within) {
        return Err(module.bad("path", "a folder in this one", format!("\"{path}\"")));
    }
    Ok(path)
}

/// Returns the pooling mode of a module's configuration.
fn pooling_type(config: Object<'_>) -> Result<u32, HfError> {
    let named = config.find_str("pooling_mode")?;
    let is_on =
        |(key, value): (&String, &serde_json::Value)| key.starts_with("pooling_mode_") && value == true;
    if config.map.iter().filter(|flag| is_on(*flag)).count() > 1 {
        return Err(config.bad("pooling_mode", "one mode", "several, whose vectors would be joined"));
    }
    for (flag, name, number) in POOLING_MODES {
        if config.find_bool(flag)?.unwrap_or(named == Some(name)) {
            return Ok(number);
        }
    }
    Err(config.bad("pooling_mode", "mean, cls or lasttoken", "another one"))
}
