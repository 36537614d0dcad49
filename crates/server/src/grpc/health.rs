//! The standard service `grpc.health.v1.Health`, which routers await before anything else.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::StatusCode;
use futures_util::stream::{BoxStream, StreamExt as _, unfold};

use super::State;
use super::control_messages::{HealthCheckRequest, HealthCheckResponse, ServingStatus};
use crate::http::{ApiError, Caller};

/// Services with a status; the empty name is that of the server.
const SERVICES: [&str; 3] = ["", "vllm.Inference", "vllm.Control"];
/// Interval at which the status is checked for a watcher.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

fn status(state: &State, service: &str) -> ServingStatus {
    match SERVICES.contains(&service) {
        false => ServingStatus::ServiceUnknown,
        true if state.server.is_shutting_down.load(Ordering::Relaxed) => ServingStatus::NotServing,
        true => ServingStatus::Serving,
    }
}

pub(super) async fn check(
    state: Arc<State>,
    _: Caller,
    request: HealthCheckRequest,
) -> Result<HealthCheckResponse, ApiError> {
    match status(&state, &request.service) {
        ServingStatus::ServiceUnknown => {
            let message = format!("there is no service '{}' here", request.service);
            Err(ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message))
        }
        status => Ok(HealthCheckResponse { status: status.into() }),
    }
}

/// Sends the status now and whenever it changes, until the server shuts down.
pub(super) async fn watch(
    state: Arc<State>,
    _: Caller,
    request: HealthCheckRequest,
) -> Result<BoxStream<'static, Result<HealthCheckResponse, ApiError>>, ApiError> {
    let changes = unfold((state, None), move |(state, sent)| {
        let service = request.service.clone();
        async move {
            if sent == Some(ServingStatus::NotServing) {
                return None;
            }
            loop {
                let now = status(&state, &service);
                if sent != Some(now) {
                    return Some((Ok(HealthCheckResponse { status: now.into() }), (state, Some(now))));
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
    });
    Ok(changes.boxed())
}
