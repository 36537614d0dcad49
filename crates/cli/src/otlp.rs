//! Exports request traces to an OpenTelemetry collector: OTLP over HTTP.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use clap::Args;
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use ureq::Agent;

use crate::failure::Failure;
use crate::log::{self, Spans};

/// Timeout of a collector's response.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum bytes of the response that are read.
const MAX_BYTES: u64 = 1 << 16;

/// Arguments of trace export.
#[derive(Args, Debug)]
pub struct CollectorArgs {
    /// OpenTelemetry collector that receives request traces, such as http://localhost:4318 (OTLP
    /// over HTTP)
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp_endpoint: Option<String>,
}

impl CollectorArgs {
    /// Returns the configured collector and its span layer; `None` if none is configured.
    pub fn open(&self) -> Result<Option<(Collector, Spans)>, Failure> {
        let Some(base) = &self.otlp_endpoint else { return Ok(None) };
        let url = format!("{}/v1/traces", base.trim_end_matches('/'));
        let is_http = url.starts_with("http://") || url.starts_with("https://");
        let wrong = |why: String| Failure::Usage(format!("--otlp-endpoint {base}: {why}"));
        if !is_http {
            return Err(wrong("expected http:// or https://".to_owned()));
        }
        let exporter = SpanExporter::builder()
            .with_http()
            .with_endpoint(&url)
            .with_http_client(Sender::new(url))
            .build()
            .map_err(|error| wrong(error.to_string()))?;
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource()).build();
        // Excludes spans of other crates.
        let kvant = Targets::new().with_target("kvant", tracing::Level::INFO);
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("kvant")).with_filter(kvant);
        Ok(Some((Collector(provider), layer.boxed())))
    }
}

/// Returns the resource: `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`, else the program's
/// name.
fn resource() -> Resource {
    let resource = Resource::builder();
    match std::env::var_os("OTEL_SERVICE_NAME") {
        Some(_) => resource.build(),
        None => resource.with_service_name("kvant").build(),
    }
}

/// Exports spans to a collector. Flushes the rest when dropped.
pub struct Collector(SdkTracerProvider);

impl Drop for Collector {
    fn drop(&mut self) {
        // The exporter has already noted any error.
        _ = self.0.shutdown();
    }
}

/// Sends batches of spans, on the batching thread.
#[derive(Debug)]
struct Sender {
    agent: Agent,
    url: String,
    /// The failure to reach the collector has been noted.
    is_alone: AtomicBool,
}

impl Sender {
    fn new(url: String) -> Self {
        let config =
            Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE)).build();
        Self { agent: config.into(), url, is_alone: AtomicBool::new(false) }
    }

    /// Notes an error once, until a request succeeds again.
    fn note(&self, wrong: Option<String>) {
        let was_alone = self.is_alone.swap(wrong.is_some(), Ordering::Relaxed);
        if let Some(wrong) = wrong.filter(|_| !was_alone) {
            log::note(format_args!("{}: {wrong}; traces are lost until it responds", self.url));
        }
    }
}

#[async_trait]
impl HttpClient for Sender {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let answer = self.agent.run(Request::from_parts(head, &body[..]));
        self.note(match &answer {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(format!("the collector answers {}", answer.status())),
            Err(error) => Some(error.to_string()),
        });
        let (head, body) = answer?.into_parts();
        let mut bytes = Vec::new();
        body.into_reader().take(MAX_BYTES).read_to_end(&mut bytes)?;
        Ok(Response::from_parts(head, bytes.into()))
    }
}
