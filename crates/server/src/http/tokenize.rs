//! `/tokenize`, `/detokenize`, `/tokenizer_info`, `/apply-template` and token counts.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use kvant::generate::decoding::token_text;
use kvant::{Special, Turn};
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::{Caller, Server};

pub(super) async fn tokenize(
    State(server): State<Arc<Server>>,
    fields: Fields,
) -> Result<Json<Value>, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let text: String = fields.any(&["content", "prompt"], "a text")?.unwrap_or_default();
    // `prompt` is vLLM's name, where special tokens are added by default.
    let adds = fields.any(&["add_special", "add_special_tokens"], "true or false")?;
    let adds = adds.unwrap_or(fields.value("prompt").is_some());
    let special = match fields.get("parse_special", "true or false")?.unwrap_or(true) {
        true => Special::Parse,
        false => Special::AsText,
    };
    let pieces = fields.flag("with_pieces")?;
    let tokens = hosted
        .tokenize(text.len(), move |model, _| {
            let tokens = model.tokenizer()?.encode(&text, special, adds);
            tokens.map_err(|error| ApiError::invalid(error.to_string()))
        })
        .await?;
    let piece = |&id: &u32| {
        let (text, bytes) = token_text(hosted.tokenizer(), id);
        let is_text = std::str::from_utf8(&bytes).is_ok();
        json!({ "id": id, "piece": if is_text { json!(text) } else { json!(bytes) } })
    };
    let count = tokens.len();
    let tokens = if pieces { tokens.iter().map(piece).collect() } else { json!(tokens) };
    Ok(Json(json!({ "tokens": tokens, "count": count, "max_model_len": hosted.n_ctx })))
}

pub(super) async fn detokenize(
    State(server): State<Arc<Server>>,
    fields: Fields,
) -> Result<Json<Value>, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let tokens: Vec<u32> = fields.need("tokens", "a list of token numbers")?;
    let tokenizer = hosted.tokenizer();
    if let Some(unknown) = tokens.iter().find(|&&token| token as usize >= tokenizer.n_vocab()) {
        return Err(ApiError::field("tokens", "numbers of tokens in the vocabulary", unknown));
    }
    // Includes special tokens like llama.cpp and vLLM, so that tokenized text is restored.
    let text = tokenizer.decode_all(&tokens);
    Ok(Json(json!({ "content": text, "prompt": text })))
}

/// Returns the vocabulary's properties in vLLM's format; clients such as lm-eval then need no
/// tokenizer of their own.
pub(super) async fn tokenizer_info(State(server): State<Arc<Server>>) -> Result<Json<Value>, ApiError> {
    let hosted = server.pool.first()?;
    let tokenizer = hosted.tokenizer();
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id));
    let special = tokenizer.special();
    Ok(Json(json!({
        "tokenizer_class": tokenizer.model().name(),
        "bos_token": text(special.bos),
        "eos_token": text(special.eos),
        "pad_token": text(special.pad),
        "unk_token": text(special.unk),
        "add_bos_token": tokenizer.adds_bos(),
        "add_eos_token": tokenizer.adds_eos(),
        "model_max_length": hosted.n_ctx,
        "chat_template": hosted.template_source(),
    })))
}

/// Returns the number of prompt tokens of a conversation.
pub(super) async fn count_tokens(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Json<Value>, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let conversation = hosted.conversation(&fields)?;
    let Turn { tokens, .. } = hosted.turn(conversation, &caller).await?;
    Ok(Json(json!({ "object": "response.input_tokens", "input_tokens": tokens.len() })))
}

pub(super) async fn apply_template(
    State(server): State<Arc<Server>>,
    fields: Fields,
) -> Result<Json<Value>, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let conversation = hosted.conversation(&fields)?;
    let text = hosted.tokenize(conversation.n_bytes(), move |model, _| conversation.text(model)).await?;
    Ok(Json(json!({ "prompt": text })))
}
