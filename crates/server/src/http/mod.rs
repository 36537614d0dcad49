//! HTTP API: routes, authentication and the path from a request to a [job](crate::worker::Job) and
//! from events to a response.

mod anthropic;
mod body;
mod chat;
mod completions;
mod constraints;
mod conversation;
mod embeddings;
mod error;
mod fields;
mod fim;
mod generation_request;
mod llama_cpp;
mod loras;
mod media;
mod ollama;
mod openai_envelope;
mod origin;
mod prompt;
mod request_id;
mod rerank;
mod response;
mod responses;
mod sampling;
mod status;
mod tokenize;
mod transfers;
mod unknown_blocks;
mod unsupported;

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use kvant::generate::conversation::AnswerConstraints;
use kvant::{EncodeOptions, Error, Model, SamplerParams, Special, Tokenizer, Turn};
use serde_json::Value;
use tokio::sync::mpsc::channel;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::CorsLayer;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::cache_key::{CacheKey, CacheSpec};
use crate::constraint_compiler::ConstraintCompilers;
use crate::metrics::Metrics;
use crate::models::ModelRegistry;
use crate::options::{Options, ServerSampling};
use crate::owner_limits::{Lanes, Owner};
use crate::priority::run_low_priority;
use crate::status::Status;
use crate::trace::Trace;
use crate::transfer::Transfers;
use crate::worker::{EVENTS_OF_ANSWER, Job};
pub(crate) use body::Bodies;
#[cfg(feature = "grpc")]
pub(crate) use body::MAX_BYTES as MAX_BODY;

use conversation::{ConversationRequest, ReasoningDefaults};
pub(crate) use error::ApiError;
#[cfg(feature = "grpc")]
pub(crate) use error::panic_error;
pub(crate) use fields::Fields;
pub(crate) use generation_request::GenerationRequest;
#[cfg(feature = "grpc")]
pub(crate) use generation_request::MAX_LOGPROBS;
use request_id::RequestId;
pub(crate) use request_id::cors;
#[cfg(feature = "grpc")]
pub(crate) use request_id::{is_sound as is_request_id, name as with_request_id};
pub(crate) use response::EventStream;
use response::{ApiFormat, ResponseStream};
use transfers::JobTransfer;

/// `system_fingerprint` of every response, in the format of llama.cpp's builds: clients expect a
/// leading `b`.
const FINGERPRINT: &str = concat!("b", env!("CARGO_PKG_VERSION"), "-kvant");
/// Events of a response that are buffered before its sequence is paused.
const EVENTS_AHEAD: usize = 64;
/// Maximum size of a text to tokenize, in bytes: more than any context holds.
const MAX_TEXT: usize = 6 << 20;
/// Texts of more bytes are tokenized one at a time. A tokenizer may need fifty times the size of
/// the text in memory.
const LONG_TEXT: usize = 1 << 20;

/// Served model.
pub(crate) struct ServedModel {
    pub name: String,
    pub model: Model,
    /// Maximum tokens of a conversation.
    pub n_ctx: usize,
    /// Cache options of requests that set none.
    pub defaults: Arc<CacheSpec>,
    /// The same for API keys that have changed their LoRA scales.
    pub defaults_of: Mutex<HashMap<Owner, Arc<CacheSpec>>>,
    /// Sampling parameters of requests that set none.
    pub sampling_defaults: ServerSampling,
    /// Value of the template's `enable_thinking` for requests that set none.
    pub enable_thinking: Option<bool>,
    /// Maximum reasoning tokens of requests that set none.
    pub thinking_budget: Option<usize>,
    pub grammars: Arc<ConstraintCompilers>,
    /// Serializes tokenization of long texts.
    pub long_texts: Arc<Lanes>,
    /// Maximum prompts of one API key in the queue.
    pub max_queued: usize,
    pub jobs: Sender<Job>,
    pub status: Arc<Mutex<Status>>,
    pub metrics: Arc<Metrics>,
    pub transfers: Arc<Transfers>,
}

/// State shared by all handlers.
pub(crate) struct Server {
    pub options: Options,
    pub pool: Arc<ModelRegistry>,
    /// Number of requests that were assigned a seed.
    pub n_requests: AtomicU64,
    /// Memory budget and limits that request bodies share.
    pub bodies: Bodies,
    /// The server is shutting down and accepts no more work.
    pub is_shutting_down: AtomicBool,
    /// Cloned by every response until it has been sent: the count is the work in progress.
    pub work: Arc<()>,
    /// Port of HTTP, once it is bound.
    pub http_port: AtomicU16,
}

/// Address of the server's end of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionAddress(pub SocketAddr);

impl Default for ConnectionAddress {
    fn default() -> Self {
        Self(SocketAddr::from(([127, 0, 0, 1], 0)))
    }
}

/// Accepted jobs of a request.
pub(crate) struct Submitted {
    pub events: EventStream,
    /// Notes on the parts of the request that were ignored.
    pub warnings: Vec<String>,
    /// `kv_transfer_params` for the decode worker, if the cache is kept for one.
    pub kv_transfer: Option<Value>,
}

/// Sender of a request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// API key, if the server requires one.
    pub owner: Owner,
    /// See [`Server::work`].
    pub work: Arc<()>,
    /// Request id.
    pub id: Arc<str>,
    /// Address of the server's HTTP, by the network of the request.
    pub server: SocketAddr,
    /// Size of the request body in bytes, once it has been received.
    n_bytes: Arc<AtomicUsize>,
}

/// Connection of a request whose work runs on another thread.
pub(crate) struct ClientAlive(Weak<()>);

impl ClientAlive {
    /// Fails once the client has disconnected: the remaining work has no receiver.
    fn check(&self) -> Result<(), ApiError> {
        if self.0.strong_count() > 0 { Ok(()) } else { Err(ApiError::invalid("the client has gone")) }
    }
}

/// Returns a unique id. The separator is the one clients expect: they match `chatcmpl-` and
/// `resp_`.
pub(crate) fn new_id(prefix: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let separator = if prefix.ends_with("cmpl") { '-' } else { '_' };
    format!("{prefix}{separator}{:016x}{n:08x}", RandomState::new().hash_one(n))
}

#[cfg(feature = "grpc")]
impl Caller {
    /// Identifies the sender of a gRPC call.
    ///
    /// # Errors
    /// A page of another site, or no API key where the server requires one.
    pub fn of(server: &Server, request: &Request) -> Result<Self, ApiError> {
        match origin::refusal(&server.options, request.method(), request.headers()) {
            Some(error) => Err(error),
            None => {
                let owner = owner(&server.options, request.headers())?;
                Ok(Self { owner, ..Self::anonymous(server, request) })
            }
        }
    }

    /// Returns the sender of a gRPC call that needs no API key.
    pub fn anonymous(server: &Server, request: &Request) -> Self {
        let (work, id, n_bytes) = (Arc::clone(&server.work), id(request), Arc::default());
        Self { owner: None, work, id, server: server.address_for(request), n_bytes }
    }
}

impl Server {
    /// Returns the sampling parameters of a request that sets none, with a seed of its own unless
    /// the seed is fixed.
    pub fn sampling_defaults(&self, hosted: &ServedModel) -> ServerSampling {
        let ServerSampling { usual, greedy } = hosted.sampling_defaults;
        if self.options.repeats_seed {
            return hosted.sampling_defaults;
        }
        let n = self.n_requests.fetch_add(1, Ordering::Relaxed);
        // Choices of one request use consecutive seeds, so the seeds of two requests must not be
        // consecutive. Clients may parse 31 bits.
        let own = |params: SamplerParams| {
            let seed = xxh3_64_with_seed(&n.to_le_bytes(), params.seed) >> 33;
            SamplerParams { seed, ..params }
        };
        ServerSampling { usual: own(usual), greedy: own(greedy) }
    }

    /// Returns the address of HTTP at which the sender of a request reaches this server.
    fn address_for(&self, request: &Request) -> SocketAddr {
        let ConnectionAddress(address) = request.extensions().get().copied().unwrap_or_default();
        SocketAddr::new(address.ip().to_canonical(), self.http_port.load(Ordering::Relaxed))
    }

    /// Returns the model that a request names.
    pub async fn hosted(&self, fields: &Fields) -> Result<Arc<ServedModel>, ApiError> {
        let name: Option<String> = fields.get("model", "a name")?;
        self.pool.get(name.as_deref()).await
    }
}

impl ServedModel {
    pub fn tokenizer(&self) -> &Tokenizer {
        self.model.tokenizer().expect("a model is only served with a tokenizer")
    }

    /// Returns the chat template as stored in the file.
    pub fn template_source(&self) -> Option<&str> {
        self.model.gguf().meta().find("tokenizer.chat_template").ok().flatten()
    }

    /// Returns the template for conversations with tools, if the file has a separate one.
    pub fn tools_template_source(&self) -> Option<&str> {
        self.model.gguf().meta().find("tokenizer.chat_template.tool_use").ok().flatten()
    }

    /// Reads the conversation of a request.
    pub fn conversation(&self, fields: &Fields) -> Result<ConversationRequest, ApiError> {
        let usual = ReasoningDefaults { enable_thinking: self.enable_thinking, budget: self.thinking_budget };
        ConversationRequest::read(fields, self.model.chat_template()?, usual)
    }

    pub fn status(&self) -> Status {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs tokenization of at most `n_bytes` bytes on a blocking thread without delaying other
    /// requests, and stops when the client disconnects.
    pub async fn tokenize<T: Send + 'static>(
        &self,
        n_bytes: usize,
        work: impl FnOnce(&Model, &ClientAlive) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if n_bytes > MAX_TEXT {
            return Err(body::too_large("bytes of text", MAX_TEXT, n_bytes));
        }
        let lane = if n_bytes > LONG_TEXT { Some(self.long_texts.enter(&None).await) } else { None };
        // Dropped with this future, which ends when the client disconnects.
        let is_here = Arc::new(());
        let (model, client) = (self.model.clone(), ClientAlive(Arc::downgrade(&is_here)));
        let done = match lane {
            None => tokio::task::spawn_blocking(move || work(&model, &client)).await.ok(),
            Some(lane) => {
                run_low_priority(move || {
                    let _lane = lane;
                    work(&model, &client)
                })
                .await
            }
        };
        done.ok_or_else(|| ApiError::internal("an internal error while the prompt was read"))?
    }

    /// Runs work of a text encoder on a blocking thread; it stops when the client disconnects.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Model, &ClientAlive) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.tokenize(0, work).await
    }

    /// Tokenizes a text that may contain special tokens.
    pub async fn text_tokens(&self, text: String) -> Result<Vec<u32>, ApiError> {
        self.tokenize(text.len(), move |model, _| Ok(model.text_prompt(&text, Special::Parse)?)).await
    }

    /// Tokenizes a text for an embedding.
    async fn embedding_tokens(&self, text: String) -> Result<Vec<u32>, ApiError> {
        self.tokenize(text.len(), move |model, _| Ok(model.embedding_tokens(&text)?)).await
    }

    /// Reads the request for the next turn of a conversation and renders its prompt.
    pub async fn open(
        &self,
        fields: &Fields,
        defaults: &ServerSampling,
        caller: &Caller,
    ) -> Result<(GenerationRequest, Turn), ApiError> {
        let mut request = GenerationRequest::read(fields, defaults, self)?;
        let conversation = self.conversation(fields)?;
        let mut turn = self.turn(conversation, caller).await?;
        request.apply(&mut turn.answer);
        request.media = std::mem::take(&mut turn.media);
        Ok((request, turn))
    }

    /// Renders the prompt of the next turn of a conversation.
    pub async fn turn(&self, conversation: ConversationRequest, caller: &Caller) -> Result<Turn, ApiError> {
        let (owner, n_ctx, n_bytes) = (caller.owner.clone(), self.n_ctx, conversation.n_bytes());
        let open = move |model: &Model, client: &ClientAlive| {
            conversation.open(model, n_ctx, |file, max_tokens| {
                let go_on = || client.check().is_ok();
                let options = EncodeOptions { owner: owner.as_deref(), max_tokens, go_on: &go_on };
                let encoded = model.encode_media(file.kind, &file.bytes, &options);
                client.check()?;
                match encoded {
                    Err(Error::PromptTooLong { tokens, .. }) => {
                        Err(ApiError::too_long(n_ctx - max_tokens + tokens, n_ctx))
                    }
                    encoded => Ok(encoded?),
                }
            })
        };
        self.tokenize(n_bytes, open).await
    }

    /// Rejects empty prompts and prompts that exceed the context.
    fn check(&self, prompts: &[Vec<u32>]) -> Result<(), ApiError> {
        if prompts.is_empty() {
            return Err(ApiError::field("prompt", "at least one prompt", "none"));
        }
        if let Some(prompt) = prompts.iter().find(|prompt| prompt.len() > self.n_ctx) {
            return Err(ApiError::too_long(prompt.len(), self.n_ctx));
        }
        if prompts.iter().any(Vec::is_empty) {
            return Err(ApiError::invalid("the prompt is empty: at least one token is needed"));
        }
        Ok(())
    }

    /// Submits a job per prompt and returns the response, streamed or whole.
    pub async fn answer<F: ApiFormat>(
        self: &Arc<Self>,
        prompts: Vec<Vec<u32>>,
        request: &GenerationRequest,
        caller: &Caller,
        mut format: F,
    ) -> Result<Response, ApiError> {
        let held = (Arc::clone(&caller.work), Arc::clone(self));
        let reports_progress = request.stream && (request.return_progress || F::REPORTS_PROGRESS);
        let n_answers = prompts.len() * request.n;
        let submitted = self.submit(prompts, request, caller, reports_progress).await?;
        let Submitted { events, warnings, kv_transfer } = submitted;
        format.warn(warnings);
        format.set_kv_transfer(kv_transfer);
        let listener = ResponseStream::new(events, n_answers, format, held);
        if request.stream { Ok(listener.stream()) } else { listener.whole().await }
    }

    /// Submits a job per prompt and waits until all are accepted.
    pub async fn submit(
        &self,
        prompts: Vec<Vec<u32>>,
        request: &GenerationRequest,
        caller: &Caller,
        reports_progress: bool,
    ) -> Result<Submitted, ApiError> {
        let n_answers = prompts.len() * request.n;
        let (events, received) = channel(EVENTS_AHEAD + EVENTS_OF_ANSWER * n_answers);
        let n_jobs = prompts.len();
        self.check(&prompts)?;
        let AnswerConstraints { constraints, warnings } = self.constraints(request, caller).await?;
        let spec = self.stored(&request.model_options, &caller.owner)?;
        let key = CacheKey { spec, owner: request.cache_owner(&caller.owner) };
        let JobTransfer { keeps, mut fetched } = self.begin_transfer(request, n_jobs, &key, caller).await?;
        for (index, prompt) in prompts.into_iter().enumerate() {
            let first = index * request.n;
            let job = Job {
                answer: request.answer_to(prompt.len(), self.n_ctx, first),
                media: request.media.clone(),
                prompt: prompt.into(),
                kind: key.clone(),
                owner: caller.owner.clone(),
                guides: constraints.fork(),
                n: request.n,
                first,
                n_answers,
                reports_progress,
                prompt_logprobs: request.prompt_logprobs,
                bypasses_prefix_cache: request.bypasses_prefix_cache,
                keeps: keeps.clone(),
                fetched: fetched.take().into(),
                pooled: None,
                id: Arc::clone(&caller.id),
                trace: Trace::here(&self.name, "text_completion"),
                events: events.clone(),
            };
            self.jobs.send(job).map_err(|_| ApiError::shutting_down())?;
        }
        drop(events);
        let kv_transfer = keeps.map(|kept| kept.params(caller.server));
        Ok(Submitted { events: EventStream::accepted(received, n_jobs).await?, warnings, kv_transfer })
    }
}

/// Returns the router with all routes.
pub(crate) fn router(server: Arc<Server>, cors: CorsLayer) -> Router {
    router_with(Router::new(), server, cors)
}

/// Returns the router with all routes added to `others`.
fn router_with(others: Router<Arc<Server>>, server: Arc<Server>, cors: CorsLayer) -> Router {
    others
        .route("/", get(status::page))
        .route("/health", get(status::health))
        .route("/v1/health", get(status::health))
        .route("/live", get(status::live))
        .route("/ready", get(status::health))
        .route("/metrics", get(status::metrics))
        .route("/props", get(status::props))
        .route("/slots", get(status::slots))
        .route("/kv", get(status::kv))
        .route("/kv/transfers/{id}", get(transfers::get).delete(transfers::release))
        .route("/models", get(status::models))
        .route("/v1/models", get(status::models))
        .route("/v1/models/{*id}", get(status::model))
        .route("/chat/completions", post(chat::chat))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/chat/completions/input_tokens", post(tokenize::count_tokens))
        .route("/v1/chat/completions/input_tokens", post(tokenize::count_tokens))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/embedding", post(embeddings::embedding))
        .route("/embeddings", post(embeddings::embedding))
        .route("/rerank", post(rerank::rerank))
        .route("/v1/rerank", post(rerank::rerank))
        .route("/reranking", post(rerank::rerank))
        .route("/v1/reranking", post(rerank::rerank))
        .route("/completion", post(llama_cpp::completion))
        .route("/completions", post(llama_cpp::completion))
        .route("/infill", post(llama_cpp::infill))
        .route("/responses", post(responses::responses))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/api/version", get(ollama::version))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running))
        .route("/api/show", post(ollama::show))
        .route("/api/pull", post(ollama::unchangeable))
        .route("/api/push", post(ollama::unchangeable))
        .route("/api/create", post(ollama::unchangeable))
        .route("/api/copy", post(ollama::unchangeable))
        .route("/api/delete", delete(ollama::unchangeable))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(ollama::embed))
        .route("/api/embeddings", post(ollama::embeddings))
        .route("/lora-adapters", get(loras::list).post(loras::set))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/tokenizer_info", get(tokenize::tokenizer_info))
        .route("/apply-template", post(tokenize::apply_template))
        .fallback(unknown)
        .method_not_allowed_fallback(not_so)
        .layer(from_fn_with_state(Arc::clone(&server), admit))
        .layer(CatchPanicLayer::custom(error::panicked))
        .layer(DefaultBodyLimit::max(body::MAX_BYTES))
        .layer(cors)
        .layer(from_fn(request_id::name))
        .with_state(server)
}

async fn unknown(request: Request) -> ApiError {
    let message = format!("there is no {} here", request.uri().path());
    ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
}

async fn not_so(method: Method, request: Request) -> ApiError {
    let message = format!("{} does not take {method}", request.uri().path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
}

/// Admits a request if its API key is valid, if its origin is allowed and, for new work, unless the
/// server is shutting down.
async fn admit(State(server): State<Arc<Server>>, mut request: Request, next: Next) -> Response {
    const OPEN: [&str; 7] = ["/", "/health", "/v1/health", "/live", "/ready", "/models", "/v1/models"];
    if let Some(error) = origin::refusal(&server.options, request.method(), request.headers()) {
        return error.into_response();
    }
    let is_open = OPEN.contains(&request.uri().path());
    let owner = match owner(&server.options, request.headers()) {
        Ok(owner) => owner,
        Err(_) if is_open => None,
        Err(error) => return error.into_response(),
    };
    // Counted as work before the shutdown flag is read, so that no request is admitted after the
    // last check.
    let work = Arc::clone(&server.work);
    if !is_open && request.method() == Method::POST && server.is_shutting_down.load(Ordering::Relaxed) {
        return ApiError::shutting_down().into_response();
    }
    let n_bytes = Arc::default();
    let id = id(&request);
    let address = server.address_for(&request);
    let caller = Caller { owner: owner.clone(), work, id, server: address, n_bytes: Arc::clone(&n_bytes) };
    request.extensions_mut().insert(caller);
    let response = next.run(request).await;
    if !response.status().is_success() {
        server.bodies.hold_refused(n_bytes.load(Ordering::Relaxed), &owner).await;
    }
    response
}

/// Returns the id of a request.
fn id(request: &Request) -> Arc<str> {
    request.extensions().get::<RequestId>().map_or_else(|| "".into(), |id| Arc::clone(&id.0))
}

/// Returns the API key of a request, if the server requires one.
///
/// # Errors
/// No key, or an unknown one.
fn owner(options: &Options, headers: &HeaderMap) -> Result<Owner, ApiError> {
    match key(headers) {
        _ if options.api_keys.is_empty() => Ok(None),
        Some(key) if options.api_keys.iter().any(|known| is_known(known, key)) => {
            Ok(Some(String::from_utf8_lossy(key).into()))
        }
        _ => {
            let message = "this server requires an API key, as a bearer token or in x-api-key";
            Err(ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message))
        }
    }
}

/// Reports whether `key` is the `known` one; whitespace around a key is lost in transit.
fn is_known(known: &str, key: &[u8]) -> bool {
    let known = known.trim_ascii().as_bytes();
    !known.is_empty() && is_same(known, key)
}

/// Returns the API key of a request as bytes, since headers need not be UTF-8.
fn key(headers: &HeaderMap) -> Option<&[u8]> {
    let bytes = |name: &str| headers.get(name).map(HeaderValue::as_bytes);
    let bearer = bytes("authorization").and_then(|value| {
        let (scheme, key) = value.split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key)
    });
    bearer.or_else(|| bytes("x-api-key")).map(<[u8]>::trim_ascii)
}

/// Compares two keys in constant time.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

#[cfg(test)]
mod tests;
