//! Health, metrics, models and cache statistics.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, header};
use axum::response::{Html, IntoResponse};
use kvant::generate::decoding::token_text;
use kvant::gguf::printable_path;
use serde_json::{Value, json};

use super::error::ApiError;
use super::{FINGERPRINT, ServedModel, Server, sampling};
use crate::metrics::to_prometheus_text;

/// Chat page in one file that loads nothing else. Its parts are shared with the serverless page in
/// crates/web.
const PAGE: &str = concat!(
    include_str!("../../assets/page/head.html"),
    "<style>\n",
    include_str!("../../assets/page/page.css"),
    "</style>\n",
    include_str!("../../assets/page/body.html"),
    "<script type=\"module\">\n",
    include_str!("../../assets/page/parts.js"),
    include_str!("../../assets/page/highlight.js"),
    include_str!("../../assets/page/math.js"),
    include_str!("../../assets/page/markdown.js"),
    include_str!("../../assets/page/conversations.js"),
    include_str!("../../assets/page/store.js"),
    include_str!("../../assets/page/server.js"),
    include_str!("../../assets/page/attach.js"),
    include_str!("../../assets/page/list.js"),
    include_str!("../../assets/page/meter.js"),
    include_str!("../../assets/page/answers.js"),
    include_str!("../../assets/page/thread.js"),
    include_str!("../../assets/page/page.js"),
    "</script>\n</body>\n</html>\n",
);

pub(super) async fn page() -> Html<&'static str> {
    Html(PAGE)
}

pub(super) async fn live() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Reports whether work is accepted.
pub(super) async fn health(State(server): State<Arc<Server>>) -> Result<Json<Value>, ApiError> {
    if server.is_shutting_down.load(Ordering::Relaxed) {
        return Err(ApiError::shutting_down());
    }
    Ok(Json(json!({ "status": "ok" })))
}

/// Serves metrics as OpenMetrics if the scraper accepts it, otherwise in the older Prometheus text
/// format.
pub(super) async fn metrics(State(server): State<Arc<Server>>, headers: HeaderMap) -> impl IntoResponse {
    const NEW: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    const OLD: &str = "text/plain; version=0.0.4; charset=utf-8";
    let accepted = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let is_new = accepted.contains("openmetrics");
    let text = server.pool.metrics.text(&server.pool.status());
    let text = if is_new { text } else { to_prometheus_text(&text) };
    ([(header::CONTENT_TYPE, if is_new { NEW } else { OLD })], text)
}

pub(super) async fn models(State(server): State<Arc<Server>>) -> Json<Value> {
    let models = server.pool.models();
    let of_model = |(name, hosted): &(&str, Option<Arc<ServedModel>>)| card(name, hosted.as_deref());
    let adapters = models.iter().filter_map(|(_, hosted)| hosted.as_deref()).flat_map(adapter_cards);
    let data: Vec<Value> = models.iter().map(of_model).chain(adapters).collect();
    Json(json!({ "object": "list", "data": data, "models": data }))
}

pub(super) async fn model(
    State(server): State<Arc<Server>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id.map_err(|error| ApiError::invalid(error.body_text()))?;
    let index = server.pool.index(&id)?;
    let models = server.pool.models();
    let (name, hosted) = models.get(index).ok_or_else(ApiError::shutting_down)?;
    let adapter = hosted.as_deref().and_then(|hosted| adapter_cards(hosted).nth(hosted.adapter(&id)?));
    Ok(Json(adapter.unwrap_or_else(|| card(name, hosted.as_deref()))))
}

/// Returns the model cards of the adapters of a model, which are addressed by name.
fn adapter_cards(hosted: &ServedModel) -> impl Iterator<Item = Value> {
    hosted.model.loras().iter().map(|lora| {
        let mut card = named(&lora.name, true);
        card["parent"] = json!(hosted.name);
        // Without its folder: this endpoint requires no key.
        let file = lora.file.path().and_then(|path| path.file_name());
        card["root"] = json!(file.map(|name| printable_path(name.as_ref())));
        card
    })
}

/// Returns the common fields of a model card.
fn named(name: &str, is_loaded: bool) -> Value {
    json!({
        "id": name,
        "name": name,
        "model": name,
        "object": "model",
        "created": 0,
        "owned_by": "kvant",
        "status": { "value": if is_loaded { "loaded" } else { "unloaded" } },
    })
}

/// Returns the card of a model; one that is not loaded has only the common fields.
fn card(name: &str, hosted: Option<&ServedModel>) -> Value {
    let mut card = named(name, hosted.is_some());
    if let Some(ServedModel { model, n_ctx, .. }) = hosted {
        let config = model.config();
        card["max_model_len"] = json!(n_ctx);
        card["meta"] = json!({
            "n_vocab": model.n_vocab(),
            "n_ctx": n_ctx,
            "n_ctx_train": config.n_ctx_train,
            "n_embd": config.n_embd,
            "n_params": model.n_params(),
            "size": model.weight_bytes(),
        });
    }
    card
}

pub(super) async fn props(State(server): State<Arc<Server>>) -> Result<Json<Value>, ApiError> {
    let hosted = server.pool.first()?;
    let sampler = &hosted.sampling_defaults.usual;
    let mut params = sampling::param_fields(sampler);
    params.extend(
        [("n_predict", json!(-1)), ("seed", json!(sampler.seed))]
            .map(|(name, value)| (name.to_owned(), value)),
    );
    let tokenizer = hosted.tokenizer();
    let text = |id: Option<u32>| id.map(|id| token_text(tokenizer, id).0).unwrap_or_default();
    let mut props = json!({
        "default_generation_settings": { "n_ctx": hosted.n_ctx, "params": params },
        "total_slots": server.options.n_running,
        "model_alias": hosted.name,
        "chat_template": hosted.template_source(),
        "bos_token": text(tokenizer.bos()),
        "eos_token": text(tokenizer.eos()),
        "modalities": { "vision": hosted.model.supports_images(), "audio": hosted.model.supports_audio() },
        "build_info": FINGERPRINT,
        "device": hosted.model.device().name,
        "kv_types": types(&hosted),
    });
    if let Some(template) = hosted.tools_template_source() {
        props["chat_template_tool_use"] = template.into();
    }
    Ok(Json(props))
}

/// Returns one entry per running slot, for llama.cpp's clients. Sequences are not bound to slots
/// here.
pub(super) async fn slots(State(server): State<Arc<Server>>) -> Result<Json<Value>, ApiError> {
    let counts = server.pool.status().counts;
    let (busy, n_ctx) = (counts.prefill + counts.decode, server.pool.first()?.n_ctx);
    let slot = |id: usize| json!({ "id": id, "n_ctx": n_ctx, "is_processing": id < busy });
    Ok(Json((0..server.options.n_running).map(slot).collect()))
}

/// Returns the current size of caches in bytes and tokens.
pub(super) async fn kv(State(server): State<Arc<Server>>) -> Result<Json<Value>, ApiError> {
    let status = server.pool.status();
    let counts = status.counts;
    let several = status.running_bytes + status.idle_bytes;
    Ok(Json(json!({
        "bytes": status.kv_bytes,
        "shared_bytes": several.saturating_sub(status.kv_bytes),
        "running_bytes": status.running_bytes,
        "idle_bytes": status.idle_bytes,
        "running_bytes_f16": status.running_bytes_f16,
        "idle_bytes_f16": status.idle_bytes_f16,
        "budget": status.budget,
        "ram_bytes": status.store.ram,
        "ram_budget": status.store.ram_budget,
        "disk_bytes": status.store.disk,
        "disk_budget": status.store.disk_budget,
        "transfer_bytes": server.pool.transfers.kept.bytes(),
        "tokens": status.tokens,
        "types": types(&*server.pool.first()?),
        "running": counts.prefill + counts.decode,
        "waiting": counts.waiting,
        "parked": counts.preempted,
        "idle": status.idle,
    })))
}

/// Returns the names of the key and value types: `mixed` if they differ by layer or head.
fn types(hosted: &ServedModel) -> [&'static str; 2] {
    let kv = &hosted.defaults.options;
    let (k, v) = kv
        .plan(&hosted.model.config().kv_shape())
        .map_or((kv.k.name(), kv.v.name()), |plan| plan.type_names());
    [k, v]
}
