//! API errors.

use std::any::Any;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use kvant::generate::constraint::ConstraintError;
use kvant::generate::conversation::{ConversationError, InvalidConversation};

use crate::scheduler::Refusal;

/// Error in the format of OpenAI's API and llama.cpp's server.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// Field at fault.
    param: Option<&'static str>,
    /// Additional fields.
    more: Option<Box<Value>>,
    retry_after: Option<u64>,
}

impl ApiError {
    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, more: None, retry_after: None }
    }

    /// Returns an error for an invalid request.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// Returns an error for an invalid field.
    pub fn field(name: &'static str, expected: &str, got: impl std::fmt::Display) -> Self {
        let got = shortened(&got.to_string());
        Self { param: Some(name), ..Self::invalid(format!("{name}: expected {expected}, got {got}")) }
    }

    /// Returns an error for an unknown model.
    pub fn unknown_model(name: &str, known: &[&str]) -> Self {
        let known: Vec<String> = known.iter().map(|known| format!("'{known}'")).collect();
        let message = format!("there is no model '{name}' here; there is {}", known.join(", "));
        Self { param: Some("model"), ..Self::new(StatusCode::NOT_FOUND, "not_found_error", message) }
    }

    /// Returns an error for a model that does not fit beside those in use.
    pub fn insufficient_memory(name: &str, needed: u64, there: u64, budget: u64) -> Self {
        let message = format!(
            "{name} takes {needed} bytes, models that are in use take {there}, all together may take {budget}"
        );
        Self::unavailable(message, 10)
    }

    /// Returns an error for a lack of resources, with the seconds until a retry is worthwhile.
    fn unavailable(message: impl Into<String>, retry_after: u64) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", message);
        Self { retry_after: Some(retry_after), ..error }
    }

    /// Returns an error for a body that does not fit beside the large bodies of other requests.
    pub fn busy(room: usize) -> Self {
        Self::unavailable(format!("bodies of other requests take all of {room} bytes: try again"), 5)
    }

    /// Returns an error for a body beyond the limit of concurrent uploads.
    pub fn too_many_uploads() -> Self {
        Self::unavailable("too many requests are on their way here: try again", 5)
    }

    /// Returns an internal error.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// Returns an error for a failed answer, of the request or internal.
    pub fn failed(why: String, is_of_request: bool) -> Self {
        if is_of_request { Self::invalid(why) } else { Self::internal(why) }
    }

    /// Returns an error for requests during shutdown.
    pub fn shutting_down() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", "the server is shutting down")
    }

    /// Returns an error for a prompt that exceeds the context.
    pub fn too_long(n_prompt: usize, n_ctx: usize) -> Self {
        let message = format!(
            "the prompt ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens): nothing was cut or read"
        );
        let more = json!({ "n_prompt_tokens": n_prompt, "n_ctx": n_ctx });
        Self {
            more: Some(Box::new(more)),
            ..Self::new(StatusCode::BAD_REQUEST, "exceed_context_size_error", message)
        }
    }

    /// Returns OpenAI's error code where clients check it, otherwise the HTTP status like
    /// llama.cpp.
    fn code(&self) -> Value {
        match (self.kind, self.param) {
            ("exceed_context_size_error", _) => "context_length_exceeded".into(),
            ("authentication_error", _) => "invalid_api_key".into(),
            ("not_found_error", Some("model")) => "model_not_found".into(),
            _ => self.status.as_u16().into(),
        }
    }

    /// Returns the `error` object of the body.
    pub fn object(&self) -> Value {
        let mut object = json!({
            "code": self.code(),
            "message": self.message,
            "type": self.kind,
            "param": self.param,
        });
        if let (Some(object), Some(Value::Object(more))) = (object.as_object_mut(), self.more.as_deref()) {
            object.extend(more.clone());
        }
        object
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::Full { retry_after, .. } => {
                let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
                Self { retry_after: Some(retry_after), ..error }
            }
            Refusal::TooLarge { .. } => {
                Self::new(StatusCode::BAD_REQUEST, "exceed_context_size_error", message)
            }
        }
    }
}

impl From<ConstraintError> for ApiError {
    fn from(error: ConstraintError) -> Self {
        Self::invalid(shortened(&error.to_string()))
    }
}

impl From<InvalidConversation> for ApiError {
    fn from(error: InvalidConversation) -> Self {
        Self::field(error.name, error.expected, error.got)
    }
}

impl From<ConversationError> for ApiError {
    fn from(error: ConversationError) -> Self {
        match error {
            ConversationError::Invalid(error) => error.into(),
            error => kvant::Error::from(error).into(),
        }
    }
}

impl From<kvant::Error> for ApiError {
    fn from(error: kvant::Error) -> Self {
        match error {
            kvant::Error::StateNotFinite { .. } => Self::internal(error.to_string()),
            error => Self::invalid(shortened(&error.to_string())),
        }
    }
}

impl ApiError {
    /// Returns the HTTP status.
    #[cfg(feature = "grpc")]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns the message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the response with this body.
    pub fn into_response_with(self, body: Value) -> Response {
        let mut response = (self.status, Json(body)).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// Truncates request text for an error message.
pub(crate) fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 300;
    match text.char_indices().nth(MAX_CHARS) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

/// Returns the response after a panic in a handler before the head was sent.
pub(super) fn panicked(fault: Box<dyn Any + Send>) -> Response {
    panic_error(fault).into_response()
}

/// Returns the error after a panic in a handler. The panic message goes only to the log.
pub(crate) fn panic_error(fault: Box<dyn Any + Send>) -> ApiError {
    let text = fault.downcast_ref::<&str>().copied();
    let text = text.or_else(|| fault.downcast_ref::<String>().map(String::as_str)).unwrap_or_default();
    tracing::error!(text, "an internal error ended a response");
    ApiError::internal("an internal error")
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = json!({ "type": "error", "error": self.object() });
        self.into_response_with(body)
    }
}
