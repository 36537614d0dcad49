//! Prompts from Python objects.

use std::collections::HashMap;

use kvant::{Conversation, EncodedMedia, Message, Model, Special, Turn, TurnOptions};
use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyDict, PyList, PyMapping};

use crate::error::to_py_err;
use crate::options::json;

/// A text, token ids, or a conversation.
#[derive(FromPyObject)]
pub(crate) enum Prompt {
    #[pyo3(transparent, annotation = "str")]
    Text(String),
    /// Bytes are a sequence of integers in Python, but are not token ids.
    #[pyo3(transparent, annotation = "bytes")]
    Bytes(PyBackedBytes),
    #[pyo3(transparent, annotation = "a list of token ids")]
    Tokens(Vec<u32>),
    #[pyo3(transparent, annotation = "a list of messages")]
    Messages(Vec<HashMap<String, MessageValue>>),
}

/// Value of a message's key.
#[derive(FromPyObject)]
pub(crate) enum MessageValue {
    #[pyo3(transparent, annotation = "str")]
    Text(String),
    #[pyo3(transparent, annotation = "a list of bytes")]
    Images(Vec<PyBackedBytes>),
}

impl Prompt {
    /// Returns the tokens of the prompt.
    pub(crate) fn tokens(self, model: &Model) -> PyResult<Vec<u32>> {
        match self {
            Self::Bytes(bytes) => {
                let got =
                    format!("expected str, a list of token ids or of messages, got {} bytes", bytes.len());
                Err(PyTypeError::new_err(got))
            }
            Self::Tokens(tokens) => Ok(tokens),
            Self::Text(text) => model.text_prompt(&text, Special::AsText).map_err(to_py_err),
            Self::Messages(messages) => {
                let mut images = Vec::new();
                let messages = messages
                    .iter()
                    .map(|fields| message(model, fields, &mut images))
                    .collect::<PyResult<Vec<_>>>()?;
                model.chat_prompt_with_media(&messages, &images).map_err(to_py_err)
            }
        }
    }
}

/// Converts a message and appends its images to `images`.
fn message(
    model: &Model,
    message: &HashMap<String, MessageValue>,
    images: &mut Vec<EncodedMedia>,
) -> PyResult<Message> {
    let text_of = |key: &str| match message.get(key) {
        Some(MessageValue::Text(text)) => Ok(text),
        Some(MessageValue::Images(_)) => {
            Err(PyTypeError::new_err(format!("{key} of a message: expected str")))
        }
        None => Err(PyKeyError::new_err(format!("a message has a role and a content; {key} is missing"))),
    };
    let before = images.len();
    match message.get("images") {
        Some(MessageValue::Images(files)) => {
            for file in files {
                images.push(model.encode_image(file).map_err(to_py_err)?);
            }
        }
        Some(MessageValue::Text(_)) => {
            return Err(PyTypeError::new_err("images of a message: expected a list of bytes"));
        }
        None => {}
    }
    Ok(Message::new(text_of("role")?, text_of("content")?).with_images(images.len() - before))
}

/// Prompt of an answer: a text, token ids, or a conversation with any fields that its template
/// reads.
pub(crate) enum TurnPrompt {
    Text(String),
    Tokens(Vec<u32>),
    Messages { json: String, images: Vec<PyBackedBytes> },
}

impl<'py> FromPyObject<'_, 'py> for TurnPrompt {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(text) = given.extract() {
            return Ok(Self::Text(text));
        }
        let is_bytes = given.extract::<PyBackedBytes>().is_ok();
        if let Some(tokens) = given.extract().ok().filter(|_| !is_bytes) {
            return Ok(Self::Tokens(tokens));
        }
        let (all, mut images) = (PyList::empty(given.py()), Vec::new());
        for message in given.try_iter()? {
            all.append(turn_message(&message?, &mut images)?)?;
        }
        Ok(Self::Messages { json: json(&all)?, images })
    }
}

impl TurnPrompt {
    /// Returns the turn with this prompt.
    pub(crate) fn turn(self, model: &Model, options: TurnOptions) -> PyResult<Turn> {
        let turn = match self {
            Self::Text(text) => Turn::from(model.text_prompt(&text, Special::AsText).map_err(to_py_err)?),
            Self::Tokens(tokens) => Turn::from(tokens),
            Self::Messages { json, images } => {
                let template = model.chat_template().map_err(to_py_err)?;
                let conversation = Conversation::from_json(&json, options, template).map_err(to_py_err)?;
                let images = images.iter().map(|file| model.encode_image(file));
                let images = images.collect::<Result<_, _>>().map_err(to_py_err)?;
                model.turn(&conversation, images).map_err(to_py_err)?
            }
        };
        Ok(turn)
    }
}

/// Converts a message: its images become content parts and are appended to `images`.
fn turn_message<'py>(
    message: &Bound<'py, PyAny>,
    images: &mut Vec<PyBackedBytes>,
) -> PyResult<Bound<'py, PyDict>> {
    let (py, fields) = (message.py(), PyDict::new(message.py()));
    fields.update(
        message
            .cast::<PyMapping>()
            .map_err(|_| PyTypeError::new_err("expected str, a list of token ids or of messages"))?,
    )?;
    let Some(files) = fields.get_item("images")? else { return Ok(fields) };
    fields.del_item("images")?;
    let files: Vec<PyBackedBytes> =
        files.extract().map_err(|_| PyTypeError::new_err("images of a message: expected a list of bytes"))?;
    let (parts, part) = (PyList::empty(py), |kind| {
        let part = PyDict::new(py);
        part.set_item("type", kind)?;
        Ok::<_, PyErr>(part)
    });
    for _ in &files {
        parts.append(part("image")?)?;
    }
    let text = part("text")?;
    text.set_item("text", fields.get_item("content")?)?;
    parts.append(text)?;
    fields.set_item("content", parts)?;
    images.extend(files);
    Ok(fields)
}
