//! Tracing spans: one per request, with a child per answer that ends with its last token. Fields
//! have OpenTelemetry's names for servers and generative models.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request};
use tracing::Span;
use tracing::field::Empty;

use kvant::generate::decoding::Finish;

use crate::status::AnswerStats;

/// Creates the span of a request, as part of its sender's trace if the headers name one.
pub(crate) fn of_request(request: &Request, id: &str) -> Span {
    // The path itself would name every conversation separately.
    let route = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let span = tracing::info_span!(
        "request",
        otel.name = format!("{} {route}", request.method()).trim_end(),
        otel.kind = "server",
        otel.status_code = Empty,
        http.request.method = %request.method(),
        http.route = route,
        url.path = request.uri().path(),
        http.response.status_code = Empty,
        kvant.request.id = id,
    );
    #[cfg(feature = "otel")]
    join(&span, request.headers());
    span
}

/// Records the status of a response; for a stream, at its start.
pub(crate) fn answered(span: &Span, status: u16) {
    span.record("http.response.status_code", status);
    if status >= 500 {
        span.record("otel.status_code", "ERROR");
    }
}

/// Adds a span to the trace that the headers name (`traceparent`, W3C Trace Context).
#[cfg(feature = "otel")]
fn join(span: &Span, headers: &axum::http::HeaderMap) {
    use opentelemetry::propagation::TextMapPropagator;
    use opentelemetry_http::HeaderExtractor;
    use opentelemetry_sdk::propagation::TraceContextPropagator;
    use tracing_opentelemetry::OpenTelemetrySpanExt;

    // Fails if tracing is disabled.
    _ = span.set_parent(TraceContextPropagator::new().extract(&HeaderExtractor(headers)));
}

/// Trace of the answers to a request.
#[derive(Debug, Clone)]
pub(crate) struct Trace {
    request: Span,
    model: Arc<str>,
    operation: &'static str,
}

impl Trace {
    /// Returns the trace of the current request span; `operation` is OpenTelemetry's name.
    pub fn here(model: &str, operation: &'static str) -> Self {
        Self { request: Span::current(), model: model.into(), operation }
    }

    /// Creates the span of one answer. It lasts until it is dropped, and the request's span as
    /// long.
    pub fn answer(&self) -> Span {
        tracing::info_span!(
            parent: &self.request,
            "answer",
            otel.status_code = Empty,
            gen_ai.operation.name = self.operation,
            gen_ai.request.model = &*self.model,
            gen_ai.usage.input_tokens = Empty,
            gen_ai.usage.cache_read.input_tokens = Empty,
            gen_ai.usage.output_tokens = Empty,
            gen_ai.response.finish_reasons = Empty,
            gen_ai.server.time_to_first_token = Empty,
            kvant.kv_bytes = Empty,
        )
    }
}

/// Records the end of an answer, and the time to its first token in seconds.
pub(crate) fn ended(span: &Span, finish: Finish, times: &AnswerStats, first: Option<f64>) {
    span.record("gen_ai.usage.input_tokens", times.prompt.total);
    span.record("gen_ai.usage.cache_read.input_tokens", times.prompt.cached);
    span.record("gen_ai.usage.output_tokens", times.n_generated);
    span.record("gen_ai.response.finish_reasons", finish.name());
    span.record("kvant.kv_bytes", times.kv_bytes);
    if let Some(seconds) = first {
        span.record("gen_ai.server.time_to_first_token", seconds);
    }
}

/// Records a failed answer.
pub(crate) fn failed(span: &Span) {
    span.record("otel.status_code", "ERROR");
}
