//! Chat templates: the default one, and named ones such as for conversations with tools.

use std::collections::BTreeMap;

use kvant_gguf::GgufWriter;
use serde_json::Value;

use crate::error::HfError;
use crate::folder::{Folder, Object};

const KEY: &str = "tokenizer.chat_template";

/// Subfolder of named templates in newer folders, one file each.
const OTHERS: &str = "additional_chat_templates";

/// Writes the templates of a folder. Separate files override the tokenizer's settings.
///
/// # Errors
/// A file that cannot be read, or is not UTF-8.
pub(super) fn write(
    writer: &mut GgufWriter,
    folder: &mut Folder,
    settings: Option<Object<'_>>,
) -> Result<(), HfError> {
    let mut named = BTreeMap::new();
    match settings.and_then(|settings| settings.value("chat_template")) {
        Some(Value::String(template)) => drop(named.insert("default".to_owned(), template.clone())),
        Some(Value::Array(all)) => named.extend(all.iter().filter_map(named_template)),
        _ => {}
    }
    if let Some(template) = folder.text("chat_template.jinja")? {
        named.insert("default".to_owned(), template);
    }
    for file in folder.names(OTHERS, ".jinja")? {
        if let Some(template) = folder.text(&format!("{OTHERS}/{file}"))? {
            named.insert(file.trim_end_matches(".jinja").to_owned(), template);
        }
    }
    if let Some(template) = named.remove("default") {
        writer.set(KEY, template.as_str())?;
    }
    for (name, template) in &named {
        writer.set(&format!("{KEY}.{}", written(name)), template.as_str())?;
    }
    if !named.is_empty() {
        let names: Vec<String> = named.keys().map(|name| written(name)).collect();
        writer.set_array("tokenizer.chat_templates", names.iter().map(String::as_str))?;
    }
    Ok(())
}

fn named_template(template: &Value) -> Option<(String, String)> {
    let text = |key: &str| template.get(key)?.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    Some((text("name")?, text("template")?))
}

/// Converts a name to the form of other GGUF writers.
fn written(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}
