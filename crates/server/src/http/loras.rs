//! LoRA scales: the defaults of an API key, and those of a request.

use std::sync::{Arc, PoisonError};

use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Extension, Json};
use kvant::KvOptions;
use kvant::gguf::printable_path;
use serde::Deserialize;
use serde_json::{Value, json};

use super::body::Body;
use super::error::ApiError;
use super::fields::Fields;
use super::origin::refuse_unless_json;
use super::{Caller, ServedModel, Server};
use crate::cache_key::CacheSpec;
use crate::owner_limits::Owner;

/// LoRA adapter by number, and its scale.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Scale {
    id: usize,
    scale: f32,
}

/// Maximum absolute scale: far beyond, logits are not finite.
const MAX_SCALE: f32 = 100.0;
const FORM: &str = "a list of {\"id\": number, \"scale\": number}";

/// Model options of a request.
#[derive(Debug, Clone)]
pub(crate) struct ModelOptions {
    /// KV cache type.
    kv: Option<KvOptions>,
    /// LoRA scales; adapters not listed get 0.
    scales: Option<Vec<Scale>>,
    /// Name of the model, or of the single adapter to apply at scale 1.
    model: Option<String>,
}

impl ModelOptions {
    pub fn read(fields: &Fields) -> Result<Self, ApiError> {
        let (scales, model) = (fields.get("lora", FORM)?, fields.get("model", "a name")?);
        Ok(Self { kv: kv_type(fields)?, scales, model })
    }
}

/// Reads `kv_type`: one type for keys and values, or `K/V`.
fn kv_type(fields: &Fields) -> Result<Option<KvOptions>, ApiError> {
    let Some(text) = fields.get::<String>("kv_type", "a KV type")? else { return Ok(None) };
    text.parse().map(Some).map_err(|_| ApiError::field("kv_type", "a KV type, or K/V", &text))
}

impl ServedModel {
    /// Returns the cache options of a request of `owner`.
    pub(super) fn stored(&self, options: &ModelOptions, owner: &Owner) -> Result<Arc<CacheSpec>, ApiError> {
        let ModelOptions { kv, scales, model } = options;
        let usual = self.usual(owner);
        let lora_scales = match (scales, model) {
            (Some(scales), _) => Some(self.resolve_scales(scales)?),
            (None, Some(model)) => self.alone(model),
            (None, None) => None,
        };
        // Requests whose scales equal the defaults share their cache.
        let lora_scales =
            lora_scales.filter(|lora_scales| lora_scales[..] != self.lora_scales_of(&usual)[..]);
        Ok(match (kv, lora_scales) {
            (None, None) => usual,
            (kv, lora_scales) => {
                let kv = kv.clone().unwrap_or_else(|| usual.options.clone());
                CacheSpec::new(kv, lora_scales.or_else(|| usual.lora_scales.clone()))
            }
        })
    }

    /// Returns the defaults of an owner, as set by requests with its key.
    pub(super) fn usual(&self, owner: &Owner) -> Arc<CacheSpec> {
        let set = self.defaults_of.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(set.get(owner).unwrap_or(&self.defaults))
    }

    /// Returns the adapter of this name; `name:latest` is `name`, as ollama's clients write it.
    pub fn adapter(&self, name: &str) -> Option<usize> {
        let name = name.strip_suffix(":latest").unwrap_or(name);
        let is_its_own = !name.is_empty() && name != self.name;
        self.model.loras().iter().position(|lora| is_its_own && lora.name == name)
    }

    /// Returns scale 1 for the adapter of this name and 0 for the others; `None` for an unknown
    /// name.
    fn alone(&self, name: &str) -> Option<Arc<[f32]>> {
        let id = self.adapter(name)?;
        let n = self.model.loras().len();
        Some((0..n).map(|other| if other == id { 1.0 } else { 0.0 }).collect())
    }

    /// Returns the scale of each adapter for these cache options.
    fn lora_scales_of(&self, stored: &CacheSpec) -> Arc<[f32]> {
        stored.lora_scales.clone().unwrap_or_else(|| self.model.lora_scales().into())
    }

    /// Returns the scale of each adapter from a list; adapters not listed get 0.
    fn resolve_scales(&self, scales: &[Scale]) -> Result<Arc<[f32]>, ApiError> {
        let mut lora_scales = vec![0.0; self.model.loras().len()];
        for Scale { id, scale } in scales {
            let n = lora_scales.len();
            let slot = lora_scales.get_mut(*id).filter(|_| scale.abs() <= MAX_SCALE);
            *slot.ok_or_else(|| {
                let got = format!("id {id}, scale {scale}");
                let expected =
                    format!("numbers from -{MAX_SCALE} to {MAX_SCALE} for some of the {n} adapters");
                ApiError::field("lora", &expected, got)
            })? = *scale;
        }
        Ok(lora_scales.into())
    }
}

/// Lists the adapters with their default scales.
pub(super) async fn list(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Value>, ApiError> {
    let hosted = server.pool.first()?;
    let lora_scales = hosted.lora_scales_of(&hosted.usual(&caller.owner));
    let adapters = hosted.model.loras().iter().zip(&lora_scales[..]).enumerate();
    let entries = adapters.map(|(id, (lora, scale))| {
        let path = lora.file.path().map_or_else(String::new, printable_path);
        json!({ "id": id, "name": lora.name, "path": path, "scale": scale })
    });
    Ok(Json(entries.collect()))
}

/// Sets the default scales of later requests with the same key; adapters not listed get 0.
pub(super) async fn set(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    Body(body, _held): Body,
) -> Result<Json<Value>, ApiError> {
    refuse_unless_json(&headers)?;
    let hosted = server.pool.first()?;
    let scales = Vec::<Scale>::deserialize(&body)
        .map_err(|_| ApiError::field("lora", FORM, super::fields::short(&body)))?;
    let lora_scales = hosted.resolve_scales(&scales)?;
    let stored = CacheSpec::new(hosted.defaults.options.clone(), Some(lora_scales));
    let mut set = hosted.defaults_of.lock().unwrap_or_else(PoisonError::into_inner);
    // Requests whose scales equal the defaults share their cache.
    if hosted.lora_scales_of(&stored) == hosted.lora_scales_of(&hosted.defaults) {
        set.remove(&caller.owner);
    } else {
        set.insert(caller.owner, stored);
    }
    Ok(Json(json!({ "success": true })))
}
