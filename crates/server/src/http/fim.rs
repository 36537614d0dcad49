//! Fill-in-the-middle (FIM): reads the texts of `/infill`.

use kvant::generate::fim::{FimFile, FimText};
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::Fields;

/// Reads the texts around a gap.
pub(super) fn read(fields: &Fields) -> Result<FimText, ApiError> {
    let text = |name| Ok::<_, ApiError>(fields.get::<String>(name, "a text")?.unwrap_or_default());
    let files: Vec<Map<String, Value>> = fields.get("input_extra", "a list of files")?.unwrap_or_default();
    Ok(FimText {
        prefix: text("input_prefix")? + &text("prompt")?,
        suffix: text("input_suffix")?,
        files: files.into_iter().map(file).collect::<Result<_, ApiError>>()?,
    })
}

fn file(file: Map<String, Value>) -> Result<FimFile, ApiError> {
    let field = |name: &str| file.get(name).and_then(Value::as_str).map(str::to_owned);
    let is_named = file.get("filename").is_none_or(Value::is_string);
    let name = field("filename").unwrap_or_else(|| "tmp".to_owned());
    match field("text").filter(|_| is_named) {
        Some(text) => Ok(FimFile { name, text }),
        None => {
            let expected = "files with text, and perhaps a filename";
            Err(ApiError::field("input_extra", expected, Value::from(file)))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_without_text_is_refused() {
        for file in [json!({}), json!({ "filename": "ok" }), json!({ "filename": 1, "text": "a" })] {
            let Value::Object(map) = json!({ "input_extra": [file] }) else { panic!("an object") };
            assert!(read(&Fields::new(map)).is_err(), "{file}");
        }
    }
}
