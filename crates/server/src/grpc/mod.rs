//! gRPC: vLLM's services for routers, over the models, limits and scheduler of the HTTP API.
//!
//! A request becomes the fields of an HTTP request ([`request`]), from which the same job is made,
//! and its events become messages ([`reply`]). The services are routes by hand: the build needs no
//! protoc.

mod control;
mod control_messages;
mod health;
mod inference;
mod json;
mod messages;
mod reply;
mod request;
mod running;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, Request, State as Shared};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodRouter, post};
use futures_util::stream::{BoxStream, StreamExt as _};
use tonic::server::{Grpc, ServerStreamingService, UnaryService};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;
use tower_http::catch_panic::CatchPanicLayer;

use crate::http::{self, ApiError, Caller, MAX_BODY, Server};
use running::RunningRequests;

/// Prefix of the calls that need no API key.
const OPEN: &str = "/grpc.health.v1.Health/";
/// Prefix of the calls that are refused during shutdown.
const WORK: &str = "/vllm.Inference/";

/// State shared by all calls.
pub(super) struct State {
    server: Arc<Server>,
    running: Arc<RunningRequests>,
    /// Name of this process for routers.
    instance: String,
}

/// Returns the router with all calls.
pub(crate) fn router(server: Arc<Server>) -> Router {
    let state = Arc::new(State { server, running: Arc::default(), instance: http::new_id("kvant") });
    let missing = |router: Router<Arc<State>>, name: &'static str| {
        let refuse =
            async move || Status::unimplemented(format!("{name} is not implemented")).into_http::<Body>();
        router.route(&format!("/vllm.Control/{name}"), post(refuse))
    };
    let calls = Router::new()
        .route("/vllm.Inference/Generate", unary(inference::generate))
        .route("/vllm.Inference/GenerateStream", streaming(inference::generate_stream))
        .route("/vllm.Control/GetServerInfo", unary(control::server_info))
        .route("/vllm.Control/GetModelInfo", unary(control::model_info))
        .route("/vllm.Control/Abort", unary(control::abort))
        .route("/vllm.Control/LoadLora", unary(control::load_lora))
        .route("/vllm.Control/UnloadLora", unary(control::unload_lora))
        .route("/vllm.Control/ListLoras", unary(control::list_loras))
        .route("/vllm.Control/GetKvEventSources", unary(control::kv_event_sources))
        .route("/grpc.health.v1.Health/Check", unary(health::check))
        .route("/grpc.health.v1.Health/Watch", streaming(health::watch));
    control::MISSING
        .into_iter()
        .fold(calls, missing)
        .fallback(unknown)
        .layer(from_fn_with_state(Arc::clone(&state), admit))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn(http::with_request_id))
        .with_state(state)
}

async fn unknown(request: Request) -> Response {
    Status::unimplemented(format!("there is no call {} here", request.uri().path())).into_http()
}

fn panicked(fault: Box<dyn Any + Send>) -> Response {
    status(&http::panic_error(fault)).into_http()
}

/// Returns an error as the status of a call.
fn status(error: &ApiError) -> Status {
    let code = match error.status() {
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::NOT_FOUND => Code::NotFound,
        StatusCode::REQUEST_TIMEOUT => Code::DeadlineExceeded,
        StatusCode::CONFLICT => Code::AlreadyExists,
        StatusCode::PAYLOAD_TOO_LARGE | StatusCode::TOO_MANY_REQUESTS => Code::ResourceExhausted,
        StatusCode::NOT_IMPLEMENTED => Code::Unimplemented,
        StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
        other if other.is_client_error() => Code::InvalidArgument,
        _ => Code::Internal,
    };
    Status::new(code, error.message())
}

/// Admits a call if its API key is valid and, for new work, unless the server is shutting down.
async fn admit(Shared(state): Shared<Arc<State>>, mut request: Request, next: Next) -> Response {
    let server = &state.server;
    // Counted as work before the shutdown flag is read, so that no request is admitted after the
    // last check.
    let caller = Caller::of(server, &request);
    let path = request.uri().path();
    let is_leaving = path.starts_with(WORK) && server.is_shutting_down.load(Ordering::Relaxed);
    let caller = match caller {
        _ if is_leaving => return status(&ApiError::shutting_down()).into_http(),
        Err(_) if path.starts_with(OPEN) => Caller::anonymous(server, &request),
        Err(error) => return status(&error).into_http(),
        Ok(caller) => caller,
    };
    request.extensions_mut().insert(caller);
    next.run(request).await
}

/// Routes a call with one response.
fn unary<Q, A, F, R>(call: F) -> MethodRouter<Arc<State>>
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + 'static,
    F: Fn(Arc<State>, Caller, Q) -> R + Copy + Send + Sync + 'static,
    R: Future<Output = Result<A, ApiError>> + Send + 'static,
{
    let answer = move |mut grpc: Codec<A, Q>, state: Arc<State>, caller: Caller, request: Request| async move {
        let service = Call(move |request: Q| {
            let answer = call(Arc::clone(&state), caller.clone(), request);
            async { answer.await.map(tonic::Response::new).map_err(|error| status(&error)) }
        });
        grpc.unary(service, request).await.map(Body::new)
    };
    post(move |state: Shared<Arc<State>>, caller: Extension<Caller>, request: Request| {
        respond(state.0, caller.0, request, answer)
    })
}

/// Routes a call with a stream of responses.
fn streaming<Q, A, F, R>(call: F) -> MethodRouter<Arc<State>>
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + 'static,
    F: Fn(Arc<State>, Caller, Q) -> R + Copy + Send + Sync + 'static,
    R: Future<Output = Result<BoxStream<'static, Result<A, ApiError>>, ApiError>> + Send + 'static,
{
    let answer = move |mut grpc: Codec<A, Q>, state: Arc<State>, caller: Caller, request: Request| async move {
        let service = Call(move |request: Q| statuses(call(Arc::clone(&state), caller.clone(), request)));
        grpc.server_streaming(service, request).await.map(Body::new)
    };
    post(move |state: Shared<Arc<State>>, caller: Extension<Caller>, request: Request| {
        respond(state.0, caller.0, request, answer)
    })
}

/// Stream of responses, as `tonic` sends it.
type Responses<A> = BoxStream<'static, Result<A, Status>>;

/// Returns the stream of a call with the errors as statuses.
async fn statuses<A: 'static>(
    answers: impl Future<Output = Result<BoxStream<'static, Result<A, ApiError>>, ApiError>>,
) -> Result<tonic::Response<Responses<A>>, Status> {
    let answers = answers.await.map_err(|error| status(&error))?;
    Ok(tonic::Response::new(answers.map(|answer| answer.map_err(|error| status(&error))).boxed()))
}

type Codec<A, Q> = Grpc<ProstCodec<A, Q>>;

/// Responds to a call within the limits of HTTP bodies, which also delay the refusal of a large
/// request.
async fn respond<Q, A, F, R>(state: Arc<State>, caller: Caller, request: Request, answer: F) -> Response
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + 'static,
    F: FnOnce(Codec<A, Q>, Arc<State>, Caller, Request) -> R,
    R: Future<Output = Response>,
{
    let (head, body) = request.into_parts();
    // The budget of the body is held until the request has been accepted.
    let (bytes, _held) = match state.server.bodies.receive(body).await {
        Ok(received) => received,
        Err(error) => return status(&error).into_http(),
    };
    let (n_bytes, owner) = (bytes.len(), caller.owner.clone());
    let request = Request::from_parts(head, Body::from(bytes));
    let grpc = Grpc::new(ProstCodec::default()).max_decoding_message_size(MAX_BODY);
    let response = answer(grpc, Arc::clone(&state), caller, request).await;
    if response.headers().get("grpc-status").is_some_and(|status| status != "0") {
        state.server.bodies.hold_refused(n_bytes, &owner).await;
    }
    response
}

/// Function as a service of `tonic`.
struct Call<F>(F);

impl<Q, A, F, R> UnaryService<Q> for Call<F>
where
    F: FnMut(Q) -> R,
    R: Future<Output = Result<tonic::Response<A>, Status>>,
{
    type Response = A;
    type Future = R;

    fn call(&mut self, request: tonic::Request<Q>) -> R {
        (self.0)(request.into_inner())
    }
}

impl<Q, A, F, R> ServerStreamingService<Q> for Call<F>
where
    F: FnMut(Q) -> R,
    R: Future<Output = Result<tonic::Response<Responses<A>>, Status>>,
{
    type Response = A;
    type ResponseStream = Responses<A>;
    type Future = R;

    fn call(&mut self, request: tonic::Request<Q>) -> R {
        (self.0)(request.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_code_of_its_kind() {
        for (error, code) in [
            (ApiError::invalid("x"), Code::InvalidArgument),
            (ApiError::too_long(9, 8), Code::InvalidArgument),
            (ApiError::unknown_model("x", &["y"]), Code::NotFound),
            (ApiError::busy(1), Code::Unavailable),
            (ApiError::shutting_down(), Code::Unavailable),
            (ApiError::internal("x"), Code::Internal),
            (request::unimplemented("x", "y"), Code::Unimplemented),
            (ApiError::new(StatusCode::TOO_MANY_REQUESTS, "", "x"), Code::ResourceExhausted),
            (ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "", "x"), Code::ResourceExhausted),
            (ApiError::new(StatusCode::UNAUTHORIZED, "", "x"), Code::Unauthenticated),
        ] {
            let status = status(&error);
            assert_eq!((status.code(), status.message()), (code, error.message()));
        }
    }
}
