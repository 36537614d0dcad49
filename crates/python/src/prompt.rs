//! What Python may call a prompt.

use std::collections::HashMap;

use kvant::{Message, Model, Picture, Special};
use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::refused;

/// A text, token numbers, or a conversation.
#[derive(FromPyObject)]
pub(crate) enum Prompt {
    #[pyo3(transparent, annotation = "str")]
    Text(String),
    /// Bytes are numbers to Python, and no tokens.
    #[pyo3(transparent, annotation = "bytes")]
    Bytes(PyBackedBytes),
    #[pyo3(transparent, annotation = "a list of token numbers")]
    Tokens(Vec<u32>),
    #[pyo3(transparent, annotation = "a list of messages")]
    Messages(Vec<HashMap<String, Said>>),
}

/// What a message has under a name.
#[derive(FromPyObject)]
pub(crate) enum Said {
    #[pyo3(transparent, annotation = "str")]
    Text(String),
    #[pyo3(transparent, annotation = "a list of bytes")]
    Pictures(Vec<PyBackedBytes>),
}

impl Prompt {
    /// Its tokens.
    pub(crate) fn tokens(self, model: &Model) -> PyResult<Vec<u32>> {
        match self {
            Self::Bytes(bytes) => {
                let got = format!(
                    "expected str, a list of token numbers or of messages, got {} bytes",
                    bytes.len()
                );
                Err(PyTypeError::new_err(got))
            }
            Self::Tokens(tokens) => Ok(tokens),
            Self::Text(text) => model.text_prompt(&text, Special::AsText).map_err(refused),
            Self::Messages(messages) => {
                let mut pictures = Vec::new();
                let messages = messages
                    .iter()
                    .map(|said| message(model, said, &mut pictures))
                    .collect::<PyResult<Vec<_>>>()?;
                model.chat_prompt_with(&messages, &pictures).map_err(refused)
            }
        }
    }
}

/// A message, whose pictures join those of the ones before.
fn message(model: &Model, message: &HashMap<String, Said>, pictures: &mut Vec<Picture>) -> PyResult<Message> {
    let part = |key: &str| match message.get(key) {
        Some(Said::Text(text)) => Ok(text),
        Some(Said::Pictures(_)) => Err(PyTypeError::new_err(format!("{key} of a message: expected str"))),
        None => Err(PyKeyError::new_err(format!("a message has a role and a content; {key} is missing"))),
    };
    let before = pictures.len();
    match message.get("images") {
        Some(Said::Pictures(files)) => {
            for file in files {
                pictures.push(model.look(file).map_err(refused)?);
            }
        }
        Some(Said::Text(_)) => {
            return Err(PyTypeError::new_err("images of a message: expected a list of bytes"));
        }
        None => {}
    }
    Ok(Message::new(part("role")?, part("content")?).with_pictures(pictures.len() - before))
}
