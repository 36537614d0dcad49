//! The fields of a request, each read by its name, so that an error names it.

use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::Server;
use super::body::{Body, Held};
use super::error::ApiError;

/// A JSON object. A field that is null is one that is not there.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Given back with them.
    _held: Held,
}

/// A value as an error shows it.
pub(super) fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

/// A whole number that is written with a point, as languages without integers do.
fn whole(value: &Value) -> Option<Value> {
    let number = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 2f64.powi(53))?;
    Some((number as i64).into())
}

/// Bytes of all texts within a value.
pub(super) fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.values().map(text_bytes).sum(),
        _ => 0,
    }
}

impl Fields {
    pub fn new(map: Map<String, Value>) -> Self {
        Self { map, _held: None }
    }

    pub fn value(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// A field of a certain kind; `expected` says which, in words.
    pub fn get<T: DeserializeOwned>(
        &self,
        name: &'static str,
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let read = T::deserialize(value).or_else(|error| match whole(value) {
            Some(whole) => T::deserialize(whole),
            None => Err(error),
        });
        read.map(Some).map_err(|_| ApiError::field(name, expected, short(value)))
    }

    pub fn need<T: DeserializeOwned>(&self, name: &'static str, expected: &str) -> Result<T, ApiError> {
        self.get(name, expected)?.ok_or_else(|| ApiError::field(name, expected, "nothing"))
    }

    pub fn flag(&self, name: &'static str) -> Result<bool, ApiError> {
        Ok(self.get(name, "true or false")?.unwrap_or(false))
    }

    /// The first of several names that is there; all that are have to be of that kind.
    pub fn any<T: DeserializeOwned>(
        &self,
        names: &[&'static str],
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        let mut found = None;
        for name in names {
            let value = self.get(name, expected)?;
            found = found.or(value);
        }
        Ok(found)
    }

    /// A JSON schema: an object, a truth value, or either as a text.
    pub fn schema(&self, name: &'static str) -> Result<Option<Value>, ApiError> {
        let wrong = |got: &Value| ApiError::field(name, "a JSON schema", short(got));
        let Some(value) = self.value(name) else { return Ok(None) };
        let schema = match value {
            Value::String(text) => serde_json::from_str(text).map_err(|_| wrong(value))?,
            other => other.clone(),
        };
        if schema.is_object() || schema.is_boolean() { Ok(Some(schema)) } else { Err(wrong(&schema)) }
    }

    /// An object within.
    pub fn object(&self, name: &'static str) -> Result<Fields, ApiError> {
        Ok(self.get(name, "an object")?.map_or_else(Fields::default, Fields::new))
    }
}

impl FromRequest<Arc<Server>> for Fields {
    type Rejection = ApiError;

    async fn from_request(request: Request, server: &Arc<Server>) -> Result<Self, ApiError> {
        match Body::from_request(request, server).await? {
            Body(Value::Object(map), held) => Ok(Self { map, _held: held }),
            Body(other, _) => {
                Err(ApiError::invalid(format!("expected a JSON object, got {}", short(&other))))
            }
        }
    }
}
