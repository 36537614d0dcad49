//! Prompts from Python objects.

use std::collections::HashMap;

use kvant::{EncodedImage, Message, Model, Special};
use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::refused;

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
            Self::Text(text) => model.text_prompt(&text, Special::AsText).map_err(refused),
            Self::Messages(messages) => {
                let mut images = Vec::new();
                let messages = messages
                    .iter()
                    .map(|fields| message(model, fields, &mut images))
                    .collect::<PyResult<Vec<_>>>()?;
                model.chat_prompt_with_images(&messages, &images).map_err(refused)
            }
        }
    }
}

/// Converts a message and appends its images to `images`.
fn message(
    model: &Model,
    message: &HashMap<String, MessageValue>,
    images: &mut Vec<EncodedImage>,
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
                images.push(model.encode_image(file).map_err(refused)?);
            }
        }
        Some(MessageValue::Text(_)) => {
            return Err(PyTypeError::new_err("images of a message: expected a list of bytes"));
        }
        None => {}
    }
    Ok(Message::new(text_of("role")?, text_of("content")?).with_images(images.len() - before))
}
