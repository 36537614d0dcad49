//! Text files of a folder, and typed access to JSON values.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kvant_gguf::SourceFile;
use serde_json::{Map, Value};

use crate::error::HfError;
use crate::family::Default;

/// Maximum size of a file that is read whole: the largest vocabularies take a tenth of it.
const MAX_TEXT: u64 = 256 << 20;

/// A folder, and which of its files were read.
pub(crate) struct Folder {
    path: PathBuf,
    read: Vec<SourceFile>,
}

/// The JSON of a file.
pub(crate) struct Json {
    path: PathBuf,
    value: Value,
}

impl Folder {
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), read: Vec::new() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn has(&self, name: &str) -> bool {
        self.path.join(name).exists()
    }

    /// Returns the sorted names in a subfolder that end in `end`; empty if the subfolder is absent.
    pub fn names(&self, within: &str, end: &str) -> Result<Vec<String>, HfError> {
        let path = self.path.join(within);
        let entries = match fs::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|source| HfError::File { path, source })?,
        };
        let name = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
        let mut names: Vec<String> = entries.filter_map(name).filter(|name| name.ends_with(end)).collect();
        names.sort();
        Ok(names)
    }

    /// Returns the text of a file; `None` if absent.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, HfError> {
        let path = self.path.join(name);
        let fail = |source| HfError::File { path: path.clone(), source };
        let about = match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            about => about.map_err(fail)?,
        };
        if about.len() > MAX_TEXT {
            return Err(HfError::TooLong { path, got: about.len(), max: MAX_TEXT });
        }
        let bytes = kvant_files::read(&path).map_err(fail)?;
        let text = String::from_utf8(bytes)
            .map_err(|error| fail(io::Error::new(io::ErrorKind::InvalidData, error.utf8_error())))?;
        self.read.push(SourceFile { path, n_bytes: text.len() as u64, modified: about.modified().ok() });
        Ok(Some(text))
    }

    /// Returns the JSON of a file; `None` if absent.
    pub fn json(&mut self, name: &str) -> Result<Option<Json>, HfError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let path = self.path.join(name);
        let again = |error| serde_json::from_str(&without_infinities(&text)).map_err(|_| error);
        match serde_json::from_str(&text).or_else(again) {
            Ok(value) => Ok(Some(Json { path, value })),
            Err(error) => Err(HfError::Json { path, why: error.to_string() }),
        }
    }

    /// Takes the list of files that were read.
    pub fn take_stamps(&mut self) -> Vec<SourceFile> {
        std::mem::take(&mut self.read)
    }
}

/// Replaces the numbers that Python writes and JSON lacks by null.
fn without_infinities(text: &str) -> String {
    const NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    let mut out = String::with_capacity(text.len());
    let (mut left, mut in_string) = (text, false);
    while let Some(first) = left.chars().next() {
        let number = NUMBERS.iter().find(|number| !in_string && left.starts_with(**number));
        let escaped = left[first.len_utf8()..].chars().next().filter(|_| first == '\\' && in_string);
        let n = number.map_or(first.len_utf8() + escaped.map_or(0, char::len_utf8), |number| number.len());
        out.push_str(if number.is_some() { "null" } else { &left[..n] });
        in_string ^= first == '"';
        left = &left[n..];
    }
    out
}

impl Json {
    /// Returns the top-level object.
    pub fn object(&self) -> Result<Object<'_>, HfError> {
        let map = self.value.as_object().ok_or_else(|| HfError::Value {
            path: self.path.clone(),
            key: "{}".to_owned(),
            expected: "an object".to_owned(),
            got: kind(&self.value),
        })?;
        Ok(Object { path: &self.path, map })
    }

    /// Returns the objects of the top-level list.
    pub fn list(&self) -> Result<Vec<Object<'_>>, HfError> {
        let bad = |got| HfError::Value {
            path: self.path.clone(),
            key: "[]".to_owned(),
            expected: "a list of objects".to_owned(),
            got,
        };
        let list = self.value.as_array().ok_or_else(|| bad(kind(&self.value)))?;
        list.iter()
            .map(|value| match value {
                Value::Object(map) => Ok(Object { path: &self.path, map }),
                other => Err(bad(kind(other))),
            })
            .collect()
    }
}

impl Json {
    /// Replaces values with those of the nested object `key`.
    pub fn with_nested(mut self, key: &str) -> Self {
        if let Value::Object(all) = &mut self.value
            && let Some(Value::Object(inner)) = all.get(key).cloned()
        {
            all.extend(inner);
        }
        self
    }

    /// Changes the top-level object.
    pub fn with(mut self, change: impl FnOnce(&mut Map<String, Value>)) -> Self {
        if let Value::Object(all) = &mut self.value {
            change(all);
        }
        self
    }

    /// Adds defaults for absent keys; explicit nulls stay.
    pub fn with_defaults(mut self, defaults: &[(&str, Default)]) -> Self {
        if let Value::Object(all) = &mut self.value {
            for (key, default) in defaults {
                all.entry(*key).or_insert_with(|| match *default {
                    Default::Size(size) => size.into(),
                    Default::Number(number) => number.into(),
                    Default::Flag(is) => is.into(),
                });
            }
        }
        self
    }
}

/// An object within a file. `null` counts as absent.
#[derive(Clone, Copy)]
pub(crate) struct Object<'a> {
    pub path: &'a Path,
    pub map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    pub fn value(self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Creates an error about `key`.
    pub fn bad(self, key: &str, expected: impl Into<String>, got: impl Into<String>) -> HfError {
        HfError::Value {
            path: self.path.to_owned(),
            key: key.to_owned(),
            expected: expected.into(),
            got: got.into(),
        }
    }

    fn find<T>(
        self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, HfError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.bad(key, expected, shown(value)))
    }

    fn required<T>(self, key: &str, expected: &str, found: Option<T>) -> Result<T, HfError> {
        found.ok_or_else(|| self.bad(key, expected, "nothing"))
    }

    /// Returns a number from 0 to 2³¹.
    pub fn find_size(self, key: &str) -> Result<Option<u32>, HfError> {
        let size =
            |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n <= 1 << 31);
        self.find(key, "a number from 0 to 2^31", size)
    }

    /// Returns a number from 1 to 2³¹.
    pub fn size(self, key: &str) -> Result<u32, HfError> {
        match self.required(key, "a number", self.find_size(key)?)? {
            0 => Err(self.bad(key, "a number from 1 on", "0")),
            size => Ok(size),
        }
    }

    pub fn find_float(self, key: &str) -> Result<Option<f64>, HfError> {
        self.find(key, "a number", Value::as_f64)
    }

    pub fn float(self, key: &str) -> Result<f64, HfError> {
        self.required(key, "a number", self.find_float(key)?)
    }

    pub fn find_bool(self, key: &str) -> Result<Option<bool>, HfError> {
        self.find(key, "true or false", Value::as_bool)
    }

    pub fn find_str(self, key: &str) -> Result<Option<&'a str>, HfError> {
        self.find(key, "a text", Value::as_str)
    }

    pub fn find_array(self, key: &str) -> Result<Option<&'a [Value]>, HfError> {
        self.find(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    pub fn find_object(self, key: &str) -> Result<Option<Object<'a>>, HfError> {
        let map = self.find(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Object { map, ..self }))
    }

    pub fn object(self, key: &str) -> Result<Object<'a>, HfError> {
        self.required(key, "an object", self.find_object(key)?)
    }
}

/// Describes a value briefly.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value),
        Value::String(text) => format!("\"{text}\""),
        value => value.to_string(),
    }
}

fn kind(value: &Value) -> String {
    let kind = match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    kind.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_python_alone_become_null() {
        for (text, want) in [
            (
                r#"{"a": [0.0, Infinity], "b": -Infinity, "c": NaN}"#,
                r#"{"a": [0.0, null], "b": null, "c": null}"#,
            ),
            (r#"{"NaN": "Infinity \" NaN", "é\\": NaN}"#, r#"{"NaN": "Infinity \" NaN", "é\\": null}"#),
            ("\"", "\""),
            ("\"\\", "\"\\"),
        ] {
            assert_eq!(without_infinities(text), want);
        }
    }
}
