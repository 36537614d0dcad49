//! Stop texts and output formats.

use kvant::generate::constraint::OutputFormat;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::refused;

/// Argument `stop`: a text, or several.
#[derive(FromPyObject)]
pub(crate) enum Stop {
    #[pyo3(transparent, annotation = "str")]
    One(String),
    #[pyo3(transparent, annotation = "list of str")]
    Many(Vec<String>),
}

impl Stop {
    /// Returns the texts.
    pub fn texts(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// Argument `format`: `{"json_schema": ...}`, `{"regex": ...}`, `{"grammar": ...}` or
/// `{"choice": [...]}`.
pub(crate) struct Format(pub OutputFormat);

const EXPECTED: &str =
    "format: expected a dict with one of json_schema, regex, grammar (of Lark) and choice, and its value";

impl<'py> FromPyObject<'_, 'py> for Format {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let wrong = || PyTypeError::new_err(EXPECTED);
        let fields = given.cast::<PyDict>().map_err(|_| wrong())?;
        let mut fields = fields.iter();
        let (Some((name, value)), None) = (fields.next(), fields.next()) else { return Err(wrong()) };
        let format = match name.extract::<String>()?.as_str() {
            "json_schema" => {
                let json = given.py().import("json")?.call_method1("dumps", (value,))?.extract::<String>()?;
                OutputFormat::json_schema(&json).map_err(refused)?
            }
            "regex" => OutputFormat::Regex(value.extract()?),
            "grammar" => OutputFormat::Lark(value.extract()?),
            "choice" => OutputFormat::Choice(value.extract()?),
            _ => return Err(wrong()),
        };
        Ok(Self(format))
    }
}
