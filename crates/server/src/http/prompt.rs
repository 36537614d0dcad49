//! Prompts: texts, token ids, mixed lists of both, and lists of those.

use kvant::{Model, Special};
use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, text_bytes};
use super::{ClientAlive, ServedModel};

const EXPECTED: &str = "a text, a list of token numbers and texts, or a list of those";
/// Maximum prompts of a request, as in OpenAI's API.
pub(super) const MAX_PROMPTS: usize = 2048;

/// Prompt of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Prompt {
    /// Text as sent, or decoded from the tokens.
    pub text: String,
    pub tokens: Vec<u32>,
}

/// Use of tokenized texts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Purpose {
    /// The text is continued: no token is appended.
    Continue,
    /// The text is embedded, with the end-of-text token of the vocabulary, if any.
    Embed,
}

/// Returns the prompts of a generation request, at most as many as fit in the queue.
pub(super) async fn prompts(hosted: &ServedModel, fields: &Fields) -> Result<Vec<Prompt>, ApiError> {
    if let Some(Value::Array(items)) = fields.value("prompt")
        && items.len() > hosted.max_queued
        && !items.iter().any(Value::is_number)
    {
        let expected = format!("at most {} texts (as many as may wait: --queue)", hosted.max_queued);
        return Err(ApiError::field("prompt", &expected, items.len()));
    }
    texts(hosted, fields, "prompt", Purpose::Continue).await
}

/// Tokenizes the texts in the field `name`.
pub(super) async fn texts(
    hosted: &ServedModel,
    fields: &Fields,
    name: &'static str,
    purpose: Purpose,
) -> Result<Vec<Prompt>, ApiError> {
    let given = fields.value(name).cloned();
    let given = given.ok_or_else(|| ApiError::field(name, EXPECTED, "nothing"))?;
    let longest = match &given {
        Value::Array(items) => items.iter().map(text_bytes).max().unwrap_or(0),
        other => text_bytes(other),
    };
    hosted.tokenize(longest, move |model, client| Texts { model, name, purpose }.all(client, &given)).await
}

/// Tokenization of the texts in a field.
struct Texts<'a> {
    model: &'a Model,
    name: &'static str,
    purpose: Purpose,
}

impl Texts<'_> {
    /// Reads a list of numbers, or of numbers and texts, as one prompt; any other list as several.
    fn all(&self, client: &ClientAlive, given: &Value) -> Result<Vec<Prompt>, ApiError> {
        match given {
            Value::Array(items) if !items.iter().any(Value::is_number) && !items.is_empty() => {
                if items.len() > MAX_PROMPTS {
                    return Err(ApiError::field(self.name, "at most 2048 texts", items.len()));
                }
                items.iter().map(|item| client.check().and_then(|()| self.prompt(item))).collect()
            }
            other => Ok(vec![self.prompt(other)?]),
        }
    }

    fn prompt(&self, given: &Value) -> Result<Prompt, ApiError> {
        match given {
            Value::String(text) => {
                let tokens = match self.purpose {
                    Purpose::Continue => self.model.text_prompt(text, Special::Parse)?,
                    Purpose::Embed => self.model.embedding_tokens(text)?,
                };
                Ok(Prompt { text: text.clone(), tokens })
            }
            Value::Array(parts) => self.row(parts),
            // llama.cpp's format, which may contain images.
            Value::Object(object)
                if object.get("multimodal_data").is_some_and(|data| *data != Value::Null) =>
            {
                Err(ApiError::field("multimodal_data", "nothing (this server reads text only)", "a value"))
            }
            Value::Object(object) => match (object.get("prompt_string"), object.get("content")) {
                (Some(text @ Value::String(_)), _) => self.prompt(text),
                // llama.cpp's format for multimodal models.
                (None, Some(Value::Array(parts))) => self.prompt(&text_of(parts, self.name)?.into()),
                _ => Err(ApiError::field(self.name, EXPECTED, given)),
            },
            other => Err(ApiError::field(self.name, EXPECTED, other)),
        }
    }

    /// Reads a list of token ids and texts. Only a text at the beginning gets the beginning-of-text
    /// token, only one at the end the end-of-text token.
    fn row(&self, parts: &[Value]) -> Result<Prompt, ApiError> {
        let Self { model, name, purpose } = *self;
        let (tokenizer, mut tokens) = (model.tokenizer()?, Vec::new());
        for part in parts {
            match part {
                Value::String(text) => {
                    let more = match tokens.is_empty() {
                        true => tokenizer.encode_prompt(text, Special::Parse),
                        false => tokenizer.encode(text, Special::Parse, false),
                    };
                    tokens.extend(more.map_err(|error| ApiError::invalid(error.to_string()))?);
                }
                Value::Number(number) => {
                    let id = number.as_u64().and_then(|id| u32::try_from(id).ok());
                    let id = id.ok_or_else(|| ApiError::field(name, EXPECTED, number))?;
                    if id as usize >= model.n_vocab() {
                        return Err(ApiError::field(name, "numbers of tokens in the vocabulary", id));
                    }
                    tokens.push(id);
                }
                other => return Err(ApiError::field(name, EXPECTED, other)),
            }
        }
        let ends =
            purpose == Purpose::Embed && tokenizer.adds_eos() && parts.last().is_some_and(Value::is_string);
        tokens.extend(tokenizer.eos().filter(|_| ends));
        Ok(Prompt { text: tokenizer.decode(&tokens), tokens })
    }
}

/// Returns the text of message parts.
fn text_of(parts: &[Value], name: &'static str) -> Result<String, ApiError> {
    let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        (kind, _) => Err(ApiError::field(name, "parts of text", kind.unwrap_or("a part without a type"))),
    };
    parts.iter().map(text).collect()
}
