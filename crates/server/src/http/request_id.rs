//! Request ids, for logs and clients, and CORS.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use tracing::Instrument;

use super::new_id;
use crate::error::ServeError;
use crate::trace;

const NAME: HeaderName = HeaderName::from_static("x-request-id");
/// Maximum length of a client's request id.
const LONGEST: usize = 128;
/// Time that a browser may cache a preflight response.
const REMEMBERED: Duration = Duration::from_secs(600);

/// Id of a request.
#[derive(Debug, Clone)]
pub(super) struct RequestId(pub Arc<str>);

/// Reports whether a client's request id may appear in the log.
pub(crate) fn is_sound(id: &str) -> bool {
    (1..=LONGEST).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic())
}

/// Assigns an id to a request, the client's or a new one, for the log and the response header.
pub(crate) async fn name(mut request: Request, next: Next) -> Response {
    let given = request.headers().get(NAME).and_then(|value| value.to_str().ok());
    let id: Arc<str> = given.filter(|id| is_sound(id)).map_or_else(|| new_id("req"), str::to_owned).into();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    request.extensions_mut().insert(RequestId(Arc::clone(&id)));
    let started = Instant::now();
    let span = trace::of_request(&request, &id);
    let mut response = next.run(request).instrument(span.clone()).await;
    let (status, seconds) = (response.status().as_u16(), started.elapsed().as_secs_f64());
    trace::answered(&span, status);
    // For a streamed response, the time until it starts.
    tracing::info!(%id, %method, path, status, seconds, "request");
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(NAME, value);
    }
    response
}

/// Returns the CORS layer that allows these origins.
///
/// # Errors
/// [`ServeError::Origin`] for an invalid origin.
pub(crate) fn cors(origins: &[String]) -> Result<CorsLayer, ServeError> {
    if origins.is_empty() {
        return Ok(CorsLayer::new());
    }
    let origin = |text: &String| {
        let host = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://")).unwrap_or_default();
        let is_host = !host.is_empty() && !host.contains(['/', '*', ' ', ',']);
        let value = HeaderValue::from_str(text).ok().filter(|_| is_host);
        value.ok_or_else(|| ServeError::Origin(text.clone()))
    };
    let all = origins.iter().any(|origin| origin == "*");
    let some = origins.iter().filter(|text| *text != "*").map(origin).collect::<Result<Vec<_>, _>>()?;
    let allowed = if all { AllowOrigin::any() } else { AllowOrigin::list(some) };
    Ok(CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        // A wildcard would not cover the authorization header.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([NAME, header::RETRY_AFTER])
        .max_age(REMEMBERED))
}
