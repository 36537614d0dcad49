//! Typed access to the fields of a request; an error names the field.

use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::Server;
use super::body::{Body, BodyPermit};
use super::error::ApiError;

/// JSON object. A null field counts as absent.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Memory budget of the body, released with the fields.
    _held: BodyPermit,
}

/// Truncates a value for an error message.
pub(super) fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

/// Converts an integral float to an integer: languages without integers send those.
fn whole(value: &Value) -> Option<Value> {
    let number = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 2f64.powi(53))?;
    Some((number as i64).into())
}

/// Returns the size of all strings within a value in bytes.
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

    /// Returns a field of type `T`; `expected` describes the type in an error.
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

    /// Returns the first of several aliases that is present; all that are present must have the
    /// type.
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

    /// Returns a JSON schema: an object, a boolean, or either as a string.
    pub fn schema(&self, name: &'static str) -> Result<Option<Value>, ApiError> {
        let error = |got: &Value| ApiError::field(name, "a JSON schema", short(got));
        let Some(value) = self.value(name) else { return Ok(None) };
        let schema = match value {
            Value::String(text) => serde_json::from_str(text).map_err(|_| error(value))?,
            other => other.clone(),
        };
        if schema.is_object() || schema.is_boolean() { Ok(Some(schema)) } else { Err(error(&schema)) }
    }

    /// Returns a nested object.
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
