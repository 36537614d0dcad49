//! Fill-in-the-middle (FIM): prefix, suffix and the model's special tokens for them.

use kvant::Model;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::Fields;

/// FIM tokens of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FimTokens {
    /// Precedes the prefix.
    before: u32,
    /// Precedes the suffix.
    behind: u32,
    /// Precedes the middle to generate.
    middle: u32,
    /// Separates files.
    file: Option<u32>,
}

impl FimTokens {
    /// Returns the FIM tokens of a model: by the keys of newer files, of older files, or by the
    /// names of the best known models.
    pub fn of(model: &Model) -> Option<Self> {
        let (meta, tokenizer) = (model.gguf().meta(), model.tokenizer().ok()?);
        let named = |keys: [&str; 2], texts: &[&str]| {
            let by_key =
                |key: &&str| meta.find::<u32>(&format!("tokenizer.ggml.{key}_token_id")).ok().flatten();
            let id = keys.iter().find_map(by_key);
            let id = id.or_else(|| texts.iter().find_map(|text| tokenizer.token_id(text)));
            id.filter(|&id| (id as usize) < tokenizer.n_vocab())
        };
        Some(Self {
            before: named(
                ["fim_pre", "prefix"],
                &["<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>"],
            )?,
            behind: named(
                ["fim_suf", "suffix"],
                &["<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>"],
            )?,
            middle: named(
                ["fim_mid", "middle"],
                &["<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>"],
            )?,
            file: named(["fim_sep", "file_separator"], &["<|file_sep|>", "<|file_separator|>"]),
        })
    }
}

/// FIM request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FimRequest {
    before: String,
    behind: String,
    /// Name and text of further files.
    files: Vec<(String, String)>,
}

impl FimRequest {
    /// Returns the size of the longest text in bytes.
    pub fn n_bytes(&self) -> usize {
        let files = self.files.iter().map(|(name, text)| name.len() + text.len());
        files.chain([self.before.len(), self.behind.len()]).max().unwrap_or(0)
    }

    pub fn read(fields: &Fields) -> Result<Self, ApiError> {
        let text = |name| Ok::<_, ApiError>(fields.get::<String>(name, "a text")?.unwrap_or_default());
        let given: Vec<Map<String, Value>> =
            fields.get("input_extra", "a list of files")?.unwrap_or_default();
        let file = |file: Map<String, Value>| {
            let field = |name: &str| file.get(name).and_then(Value::as_str).map(str::to_owned);
            let error = || {
                ApiError::field(
                    "input_extra",
                    "files with text, and perhaps a filename",
                    Value::from(file.clone()),
                )
            };
            let is_named = file.get("filename").is_none_or(Value::is_string);
            let name = field("filename").unwrap_or_else(|| "tmp".to_owned());
            Ok((name, field("text").filter(|_| is_named).ok_or_else(error)?))
        };
        Ok(Self {
            before: text("input_prefix")? + &text("prompt")?,
            behind: text("input_suffix")?,
            files: given.into_iter().map(file).collect::<Result<_, ApiError>>()?,
        })
    }

    /// Returns the prompt. Files that do not fit are omitted, the first ones first, since the last
    /// one is the most recently edited; prefix and suffix are never truncated.
    pub fn prompt(
        &self,
        tokens: &FimTokens,
        bos: Option<u32>,
        n_ctx: usize,
        encode: impl Fn(&str) -> Result<Vec<u32>, ApiError>,
    ) -> Result<Vec<u32>, ApiError> {
        let mut around: Vec<u32> = vec![tokens.before];
        around.extend(encode(&self.before)?);
        around.push(tokens.behind);
        around.extend(encode(&self.behind)?);
        around.push(tokens.middle);
        let mut files: Vec<Vec<u32>> = Vec::new();
        let mut room = (n_ctx / 2).saturating_sub(around.len());
        for (name, text) in self.files.iter().rev() {
            let mut file: Vec<u32> = tokens.file.into_iter().collect();
            file.extend(encode(&format!("{name}\n{text}\n"))?);
            if file.len() > room {
                break;
            }
            room -= file.len();
            files.push(file);
        }
        let files = files.into_iter().rev().flatten();
        Ok(bos.into_iter().chain(files).chain(around).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn gap(fields: Value) -> Result<FimRequest, ApiError> {
        let Value::Object(map) = fields else { panic!("an object") };
        FimRequest::read(&Fields::new(map))
    }

    const TOKENS: FimTokens = FimTokens { before: 1001, behind: 1002, middle: 1003, file: Some(1004) };

    /// Encodes each byte as a token.
    fn bytes(text: &str) -> Result<Vec<u32>, ApiError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    #[test]
    fn prefix_and_suffix_are_never_truncated_and_last_files_stay() {
        let files = json!([{ "text": "0123456789" }, { "filename": "b", "text": "xy" }]);
        let gap =
            gap(json!({ "input_prefix": "f(", "prompt": "a", "input_suffix": ")", "input_extra": files }))
                .unwrap();
        let around = [1001, 102, 40, 97, 1002, 41, 1003];
        let all = gap.prompt(&TOKENS, Some(1), 100, bytes).unwrap();
        assert_eq!((all[0], &all[all.len() - 7..]), (1, &around[..]));
        assert_eq!(all.iter().filter(|&&token| token == 1004).count(), 2);
        // Room for seven and six tokens: the second file only.
        let some = gap.prompt(&TOKENS, None, 26, bytes).unwrap();
        assert_eq!(some, [&[1004, 98, 10, 120, 121, 10][..], &around].concat());
        assert_eq!(gap.prompt(&TOKENS, None, 2, bytes).unwrap(), around);
    }

    #[test]
    fn a_file_without_text_is_refused() {
        for file in [json!({}), json!({ "filename": "ok" }), json!({ "filename": 1, "text": "a" })] {
            assert!(gap(json!({ "input_extra": [file] })).is_err(), "{file}");
        }
    }
}
