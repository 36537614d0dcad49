//! Keyword arguments of generations and answers.

use std::collections::BTreeMap;

use kvant::generate::constraint::OutputFormat;
use kvant::generate::conversation::InvalidConversation;
use kvant::{GenerateOptions, ToolChoice, ToolSet, TurnOptions};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::error::to_py_err;

/// Keyword arguments of `generate`, and with `OfTurn` those of `chat` and `answers`.
#[derive(Default)]
pub(crate) struct Keywords {
    pub generate: GenerateOptions,
    pub turn: TurnOptions,
}

/// Functions with these keyword arguments.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Function {
    Generate,
    Chat,
    Answers,
}

impl Function {
    fn name(self) -> &'static str {
        match self {
            Self::Generate => "generate",
            Self::Chat => "chat",
            Self::Answers => "answers",
        }
    }
}

impl Keywords {
    /// Reads the keyword arguments of a function.
    pub fn read(function: Function, given: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut keywords = Self::default();
        let (mut tools, mut choice) = (None, ToolChoice::Auto);
        for (name, value) in given.into_iter().flatten() {
            let name: String = name.extract()?;
            let is_known = keywords.set(&name, &value).and_then(|is_known| match name.as_str() {
                _ if is_known => Ok(true),
                _ if function == Function::Generate => Ok(false),
                "tools" => {
                    tools = if value.is_none() { None } else { Some(json(&value)?) };
                    Ok(true)
                }
                "tool_choice" => {
                    choice = tool_choice(&value)?;
                    Ok(true)
                }
                name => keywords.set_turn(name, &value),
            });
            if !is_known.map_err(|error| of_argument(given, &name, error))? {
                let function = function.name();
                let error = format!("{function}() got an unexpected keyword argument '{name}'");
                return Err(PyTypeError::new_err(error));
            }
        }
        let tools = tools.as_deref().unwrap_or("[]");
        keywords.turn.tools = ToolSet::from_json(tools, &choice).map_err(to_py_err)?;
        Ok(keywords)
    }

    /// Sets an option of a generation. Returns whether there is one of this name.
    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let GenerateOptions { sampler, max_tokens, ignore_eos, stop, bias, format, .. } = &mut self.generate;
        match name {
            "max_tokens" => *max_tokens = value.extract()?,
            "temperature" => sampler.temperature = value.extract()?,
            "top_k" => sampler.top_k = value.extract()?,
            "top_p" => sampler.top_p = value.extract()?,
            "min_p" => sampler.min_p = value.extract()?,
            "repeat_penalty" => sampler.repeat_penalty = value.extract()?,
            "repeat_last_n" => sampler.repeat_last_n = value.extract()?,
            "seed" => sampler.seed = value.extract()?,
            "ignore_eos" => *ignore_eos = value.extract()?,
            "stop" => *stop = value.extract::<Option<Stop>>()?.map_or_else(Vec::new, Stop::texts),
            "logit_bias" => {
                let biases: Option<BTreeMap<u32, f32>> = value.extract()?;
                *bias = biases.into_iter().flatten().collect();
            }
            "format" => *format = value.extract::<Option<Format>>()?.map(|format| format.0),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Sets an option of a turn. Returns whether there is one of this name.
    fn set_turn(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let turn = &mut self.turn;
        match name {
            "parallel_tool_calls" => turn.parallel_tool_calls = value.extract()?,
            "enable_thinking" => turn.enable_thinking = value.extract()?,
            "reasoning_effort" => turn.reasoning_effort = value.extract()?,
            "reasoning_budget" => turn.reasoning_budget = value.extract()?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Names the argument in an error of its type.
fn of_argument(given: Option<&Bound<'_, PyDict>>, name: &str, error: PyErr) -> PyErr {
    match given.map(Bound::py) {
        Some(py) if error.is_instance_of::<PyTypeError>(py) => {
            PyTypeError::new_err(format!("argument '{name}': {}", error.value(py)))
        }
        _ => error,
    }
}

/// Returns the JSON text of a value.
pub(crate) fn json(value: &Bound<'_, PyAny>) -> PyResult<String> {
    value.py().import("json")?.call_method1("dumps", (value,))?.extract()
}

/// Argument `tool_choice`: none, auto, required, or a dict with the name of a tool.
fn tool_choice(value: &Bound<'_, PyAny>) -> PyResult<ToolChoice> {
    let choice = if value.is_instance_of::<PyString>() { value.extract()? } else { json(value)? };
    choice.parse().map_err(|error: InvalidConversation| to_py_err(error))
}

/// Argument `stop`: a text, or several.
#[derive(FromPyObject)]
enum Stop {
    #[pyo3(transparent, annotation = "str")]
    One(String),
    #[pyo3(transparent, annotation = "list of str")]
    Many(Vec<String>),
}

impl Stop {
    /// Returns the texts.
    fn texts(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// Argument `format`: `{"json_schema": ...}`, `{"regex": ...}`, `{"grammar": ...}` or
/// `{"choice": [...]}`.
struct Format(OutputFormat);

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
            "json_schema" => OutputFormat::json_schema(&json(&value)?).map_err(to_py_err)?,
            "regex" => OutputFormat::Regex(value.extract()?),
            "grammar" => OutputFormat::Lark(value.extract()?),
            "choice" => OutputFormat::Choice(value.extract()?),
            _ => return Err(wrong()),
        };
        Ok(Self(format))
    }
}
