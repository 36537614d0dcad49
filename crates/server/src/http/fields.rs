//! The fields of a request, each read by its name, so that an error names it.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::{BODY, MOST_BYTES};

/// The most bytes of a body that is too large which are taken before it is refused.
const MOST_TAKEN: usize = 8 * MOST_BYTES;

/// A JSON object. A field that is null is one that is not there.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fields(Map<String, Value>);

/// A value as an error shows it.
pub(super) fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

impl Fields {
    pub fn new(map: Map<String, Value>) -> Self {
        Self(map)
    }

    pub fn value(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A field of a certain kind; `expected` says which, in words.
    pub fn get<T: DeserializeOwned>(
        &self,
        name: &'static str,
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        T::deserialize(value).map(Some).map_err(|_| ApiError::field(name, expected, short(value)))
    }

    pub fn need<T: DeserializeOwned>(&self, name: &'static str, expected: &str) -> Result<T, ApiError> {
        self.get(name, expected)?.ok_or_else(|| ApiError::field(name, expected, "nothing"))
    }

    pub fn flag(&self, name: &'static str) -> Result<bool, ApiError> {
        Ok(self.get(name, "true or false")?.unwrap_or(false))
    }

    /// The first of several names that is there.
    pub fn any<T: DeserializeOwned>(
        &self,
        names: &[&'static str],
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        let name = names.iter().find(|name| self.value(name).is_some());
        name.map_or(Ok(None), |name| self.get(name, expected))
    }

    /// An object within.
    pub fn object(&self, name: &'static str) -> Result<Fields, ApiError> {
        Ok(self.get(name, "an object")?.map_or_else(Fields::default, Fields))
    }
}

/// Refuses a body that says itself that it is too large. Most of those who send one listen only when they have sent it whole, so
/// it is taken for a while, and let go of.
async fn refuse_if_large(request: Request) -> Result<Request, ApiError> {
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    let length = length.and_then(|length| length.parse::<usize>().ok());
    let Some(length) = length.filter(|&length| length > MOST_BYTES) else { return Ok(request) };
    if length <= MOST_TAKEN && !request.headers().contains_key(header::EXPECT) {
        let mut body = request.into_body().into_data_stream();
        _ = tokio::time::timeout(BODY, async { while body.next().await.is_some_and(|part| part.is_ok()) {} })
            .await;
    }
    let message = format!("the body has {length} bytes, at most {MOST_BYTES} are read");
    Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message))
}

/// A body of any JSON.
pub(crate) struct Body(pub Value);

impl<S: Send + Sync> FromRequest<S> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let request = refuse_if_large(request).await?;
        let bytes = tokio::time::timeout(BODY, Bytes::from_request(request, state)).await;
        let late =
            |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "the body did not come");
        let bytes = bytes
            .map_err(late)?
            .map_err(|error| ApiError::new(error.status(), "invalid_request_error", error.body_text()))?;
        let body = serde_json::from_slice(&bytes);
        body.map(Self).map_err(|error| ApiError::invalid(format!("the body is no JSON: {error}")))
    }
}

impl<S: Send + Sync> FromRequest<S> for Fields {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        match Body::from_request(request, state).await? {
            Body(Value::Object(map)) => Ok(Self(map)),
            Body(other) => Err(ApiError::invalid(format!("expected a JSON object, got {}", short(&other)))),
        }
    }
}
