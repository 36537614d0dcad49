//! Normalizers: from `tokenizer.json` to a Kvant-specific key, as GGUF has none.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::MARK;
use crate::error::HfError;
use crate::folder::Object;

/// The metadata key. A file that has it also carries the properties of [added
/// tokens](super::added).
pub(super) const KEY: &str = "kvant.tokenizer.normalizer";

/// A parsed normalizer.
#[derive(Debug, Default)]
pub(super) struct Normalizer {
    /// The steps, each a name and its text arguments.
    pub words: Vec<String>,
    /// Whether a space mark is prepended.
    pub is_prefixed: bool,
    /// SentencePiece's character map, of the step `charsmap`.
    pub charsmap: Option<Vec<u8>>,
}

impl Normalizer {
    /// Reads the normalizer of a tokenizer. With `marks`, steps that mark spaces must come last;
    /// the kind of vocabulary already implies them.
    ///
    /// # Errors
    /// [`HfError::Unsupported`] with the unknown step.
    pub fn read(file: Object<'_>, marks: bool) -> Result<Self, HfError> {
        let mut normalizer = Self::default();
        let mut has_marked = false;
        for step in steps(file.value("normalizer")) {
            let is_mark = marks && is_mark(step);
            has_marked |= is_mark;
            normalizer.is_prefixed |= is_mark && step["type"] == "Prepend";
            if step["type"] == "Precompiled" {
                let charsmap =
                    step["precompiled_charsmap"].as_str().and_then(|text| STANDARD.decode(text).ok());
                normalizer.charsmap = Some(charsmap.ok_or_else(|| unsupported(file, step))?);
            }
            match words(step).filter(|_| !has_marked) {
                Some(words) => normalizer.words.extend(words.into_iter().map(str::to_owned)),
                None if is_mark => {}
                None => return Err(unsupported(file, step)),
            }
        }
        Ok(normalizer)
    }
}

fn unsupported(file: Object<'_>, step: &Value) -> HfError {
    let shown: String = step.to_string().chars().take(200).collect();
    HfError::Unsupported { path: file.path.to_owned(), what: format!("the normalizer {shown}") }
}

/// Returns a normalizer, or the steps of a sequence, in order.
fn steps(normalizer: Option<&Value>) -> Vec<&Value> {
    match normalizer {
        None => Vec::new(),
        Some(normalizer) => match normalizer.get("normalizers").and_then(Value::as_array) {
            Some(list) if normalizer["type"] == "Sequence" => {
                list.iter().flat_map(|step| steps(Some(step))).collect()
            }
            _ => vec![normalizer],
        },
    }
}

/// Whether a step marks spaces, or prepends a space mark.
fn is_mark(step: &Value) -> bool {
    let is_it = |text: &Value| text.as_str().is_some_and(|text| text.chars().eq([MARK]));
    match step["type"].as_str() {
        Some("Prepend") => is_it(&step["prepend"]),
        Some("Replace") => {
            step.pointer("/pattern/String").is_some_and(|text| text == " ") && is_it(&step["content"])
        }
        _ => false,
    }
}

/// Returns the words of a step; `None` if unsupported.
fn words(step: &Value) -> Option<Vec<&str>> {
    Some(match step["type"].as_str()? {
        "NFC" => vec!["nfc"],
        "NFD" => vec!["nfd"],
        "NFKC" => vec!["nfkc"],
        "NFKD" => vec!["nfkd"],
        "Lowercase" => vec!["lowercase"],
        "StripAccents" => vec!["strip_accents"],
        "Strip" => {
            let side = |side| Some(step[side].as_bool()?.then_some(side));
            [side("strip_left")?, side("strip_right")?].into_iter().flatten().collect()
        }
        "Precompiled" => vec!["charsmap"],
        // Other regular expressions differ between libraries. A space is marked later in any case.
        "Replace" if step.pointer("/pattern/Regex").is_some_and(|regex| regex == " {2,}") => {
            let is_space = |text: &str| text == " " || text.chars().eq([MARK]);
            step["content"].as_str().filter(|text| is_space(text))?;
            vec!["squeeze_spaces"]
        }
        "Replace" => {
            let from = step.pointer("/pattern/String")?.as_str().filter(|from| !from.is_empty())?;
            vec!["replace", from, step["content"].as_str()?]
        }
        "Prepend" => vec!["prepend", step["prepend"].as_str()?],
        _ => return None,
    })
}
