//! How the server is, and what it serves.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse};
use serde_json::{Value, json};

use super::error::ApiError;
use super::{FINGERPRINT, Hosted, Server};

pub(super) async fn page() -> Html<&'static str> {
    Html(include_str!("../../assets/page.html"))
}

pub(super) async fn live() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Whether work is taken on.
pub(super) async fn health(State(server): State<Arc<Server>>) -> Result<Json<Value>, ApiError> {
    if server.is_leaving.load(Ordering::Relaxed) {
        return Err(ApiError::leaving());
    }
    Ok(Json(json!({ "status": "ok" })))
}

pub(super) async fn metrics(State(server): State<Arc<Server>>) -> impl IntoResponse {
    let hosted = &server.hosted;
    let text = hosted.metrics.text(&hosted.status());
    ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
}

pub(super) async fn models(State(server): State<Arc<Server>>) -> Json<Value> {
    let data = [card(&server.hosted)];
    Json(json!({ "object": "list", "data": data, "models": data }))
}

pub(super) async fn model(
    State(server): State<Arc<Server>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let hosted = &server.hosted;
    if id == hosted.name {
        return Ok(Json(card(hosted)));
    }
    let message = format!("there is no model '{id}' here, there is '{}'", hosted.name);
    Err(ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message))
}

fn card(hosted: &Hosted) -> Value {
    let (model, config) = (&hosted.model, hosted.model.config());
    json!({
        "id": hosted.name,
        "name": hosted.name,
        "model": hosted.name,
        "object": "model",
        "created": 0,
        "owned_by": "kvant",
        "max_model_len": hosted.n_ctx,
        "meta": {
            "n_vocab": model.n_vocab(),
            "n_ctx": hosted.n_ctx,
            "n_ctx_train": config.n_ctx_train,
            "n_embd": config.n_embd,
            "n_params": model.n_params(),
            "size": model.weight_bytes(),
        },
    })
}

pub(super) async fn props(State(server): State<Arc<Server>>) -> Json<Value> {
    let (hosted, sampler) = (&server.hosted, &server.options.sampler);
    let params = json!({
        "temperature": sampler.temperature,
        "top_k": sampler.top_k,
        "top_p": sampler.top_p,
        "min_p": sampler.min_p,
        "repeat_penalty": sampler.repeat_penalty,
        "repeat_last_n": sampler.repeat_last_n,
    });
    let template = hosted.model.gguf().meta().find::<&str>("tokenizer.chat_template").ok().flatten();
    Json(json!({
        "default_generation_settings": { "n_ctx": hosted.n_ctx, "params": params },
        "total_slots": server.options.n_running,
        "model_alias": hosted.name,
        "chat_template": template,
        "build_info": FINGERPRINT,
        "device": hosted.model.device().name,
        "kv_types": types(hosted),
    }))
}

/// What is going on, one entry for each place: a habit of llama.cpp's clients. Sequences have no places of their own here.
pub(super) async fn slots(State(server): State<Arc<Server>>) -> Json<Value> {
    let counts = server.hosted.status().counts;
    let busy = counts.reading + counts.speaking;
    let slot = |id: usize| json!({ "id": id, "n_ctx": server.hosted.n_ctx, "is_processing": id < busy });
    Json((0..server.options.n_running).map(slot).collect())
}

/// What caches take at this moment, in bytes and tokens.
pub(super) async fn kv(State(server): State<Arc<Server>>) -> Json<Value> {
    let status = server.hosted.status();
    let counts = status.counts;
    let several = status.running_bytes + status.idle_bytes;
    Json(json!({
        "bytes": status.kv_bytes,
        "shared_bytes": several.saturating_sub(status.kv_bytes),
        "running_bytes": status.running_bytes,
        "idle_bytes": status.idle_bytes,
        "running_bytes_f16": status.running_bytes_f16,
        "idle_bytes_f16": status.idle_bytes_f16,
        "budget": status.budget,
        "tokens": status.tokens,
        "types": types(&server.hosted),
        "running": counts.reading + counts.speaking,
        "waiting": counts.waiting,
        "parked": counts.parked,
        "idle": status.idle,
    }))
}

/// Names of the types of keys and values.
fn types(hosted: &Hosted) -> [&'static str; 2] {
    let kv = &hosted.kv.options;
    [kv.k.name(), kv.v.name()]
}
