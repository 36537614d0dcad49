//! What Python may call a prompt.

use std::collections::HashMap;

use kvant::{Message, Model, Special};
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
    Messages(Vec<HashMap<String, String>>),
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
                let messages = messages.iter().map(message).collect::<PyResult<Vec<_>>>()?;
                model.chat_prompt(&messages).map_err(refused)
            }
        }
    }
}

fn message(message: &HashMap<String, String>) -> PyResult<Message> {
    let part = |key: &str| {
        let missing = || PyKeyError::new_err(format!("a message has a role and a content; {key} is missing"));
        message.get(key).ok_or_else(missing)
    };
    Ok(Message::new(part("role")?, part("content")?))
}
