//! `/tokenize`, `/detokenize`, `/apply-template`: what becomes of a text.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use kvant::Special;
use serde_json::{Value, json};

use super::Server;
use super::conversation::Opening;
use super::error::ApiError;
use super::fields::Fields;
use crate::answer::token_text;

pub(super) async fn tokenize(
    State(server): State<Arc<Server>>,
    fields: Fields,
) -> Result<Json<Value>, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let text: String = fields.any(&["content", "prompt"], "a text")?.unwrap_or_default();
    let adds = fields.flag("add_special")?;
    let special = match fields.get("parse_special", "true or false")?.unwrap_or(true) {
        true => Special::Parse,
        false => Special::AsText,
    };
    let pieces = fields.flag("with_pieces")?;
    let tokens = hosted
        .tokens(move |model| {
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
        return Err(ApiError::field("tokens", "numbers of tokens that there are", unknown));
    }
    let text = tokenizer.decode(&tokens);
    Ok(Json(json!({ "content": text, "prompt": text })))
}

/// How many tokens the prompt of a conversation has.
pub(super) async fn count_tokens(
    State(server): State<Arc<Server>>,
    fields: Fields,
) -> Result<Json<Value>, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let conversation = hosted.conversation(&fields)?;
    let Opening { tokens, .. } = hosted.tokens(move |model| conversation.open(model)).await?;
    Ok(Json(json!({ "object": "response.input_tokens", "input_tokens": tokens.len() })))
}

pub(super) async fn apply_template(
    State(server): State<Arc<Server>>,
    fields: Fields,
) -> Result<Json<Value>, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let conversation = hosted.conversation(&fields)?;
    let text = hosted.tokens(move |model| conversation.text(model)).await?;
    Ok(Json(json!({ "prompt": text })))
}
