//! The service `vllm.Inference`: generation, whole or streamed.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::http::StatusCode;
use futures_util::stream::{BoxStream, StreamExt as _, TryStreamExt as _, unfold};
use serde_json::Map;

use super::State;
use super::json;
use super::messages::{GenerateRequest, GenerateResponse, Prompt, TokenIds};
use super::reply::{Reply, ReplyOptions, joined};
use super::request;
use super::running::RunningRequest;
use crate::http::{
    ApiError, Caller, EventStream, Fields, GenerationRequest, ServedModel, Submitted, is_request_id,
};
use crate::transfer::KvTransfer;

/// Answers a request with one response.
pub(super) async fn generate(
    state: Arc<State>,
    caller: Caller,
    request: GenerateRequest,
) -> Result<GenerateResponse, ApiError> {
    let n = request.sampling.map_or(0, |sampling| sampling.num_sequences);
    if n > 1 {
        return Err(ApiError::field("num_sequences", "at most 1 (GenerateStream returns several)", n));
    }
    let responses = generate_stream(state, caller, request).await?;
    Ok(joined(responses.try_collect().await?))
}

/// Answers a request with the prompt first, and then with tokens of all answers.
pub(super) async fn generate_stream(
    state: Arc<State>,
    mut caller: Caller,
    mut request: GenerateRequest,
) -> Result<BoxStream<'static, Result<GenerateResponse, ApiError>>, ApiError> {
    let id = std::mem::take(&mut request.request_id);
    if is_request_id(&id) {
        caller.id = id.as_str().into();
    }
    let running = state.running.enter(caller.owner.clone(), id);
    request::check_supported(&request)?;
    let hosted = model(&state, &request).await?;
    let generation = read(&state, &hosted, &request)?;
    let prompt = prompt(&hosted, request.prompt.take()).await?;
    let mut reply = Reply::new(
        ReplyOptions::from(&request.response.unwrap_or_default()),
        prompt.clone(),
        generation.n,
        generation.answer.stop.clone(),
        generation.answer.stop_tokens.clone(),
    );
    let submitted = hosted.submit(vec![prompt], &generation, &caller, false).await?;
    let Submitted { events, kv_transfer, .. } = submitted;
    reply.set_kv_transfer(kv_transfer.as_ref().and_then(json::encode));
    let responses = Responses::new(events, running, reply, (caller.work, hosted));
    let next = |mut responses: Responses| async { responses.next().await.map(|next| (next, responses)) };
    Ok(unfold(responses, next).boxed())
}

/// Returns the model of a request.
///
/// # Errors
/// An unknown model or adapter.
async fn model(state: &State, request: &GenerateRequest) -> Result<Arc<ServedModel>, ApiError> {
    let name = Some(request.model.as_str()).filter(|name| !name.is_empty());
    name.map(|name| state.server.pool.index(name)).transpose()?;
    let hosted = state.server.pool.get(name).await?;
    let adapter = &request.lora_name;
    if !adapter.is_empty() && hosted.adapter(adapter).is_none() {
        let message = format!("there is no adapter '{adapter}' here");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message));
    }
    Ok(hosted)
}

/// Reads the options of a request.
fn read(
    state: &State,
    hosted: &ServedModel,
    request: &GenerateRequest,
) -> Result<GenerationRequest, ApiError> {
    let fields = Fields::new(request::fields(request)?);
    let mut generation = GenerationRequest::read(&fields, &state.server.sampling_defaults(hosted), hosted)?;
    if let Some(response) = &request.response {
        generation.prompt_logprobs = request::prompt_logprobs(response)?;
    }
    if let Some(kv) = &request.kv {
        generation.cache_salt = Some(kv.cache_salt.clone()).filter(|salt| !salt.is_empty());
        generation.bypasses_prefix_cache = kv.bypass_prefix_cache;
        if let Some(params) = &kv.kv_transfer_params {
            let params = Map::from_iter([("kv_transfer_params".to_owned(), json::decode(params)?)]);
            generation.kv_transfer = KvTransfer::read(&Fields::new(params))?;
        }
    }
    Ok(generation)
}

/// Returns the tokens of a prompt.
async fn prompt(hosted: &ServedModel, prompt: Option<Prompt>) -> Result<Vec<u32>, ApiError> {
    match prompt {
        None => Err(ApiError::field("prompt", "text or token_ids", "nothing")),
        Some(Prompt::Text(text)) => hosted.text_tokens(text).await,
        Some(Prompt::TokenIds(TokenIds { ids })) => {
            match ids.iter().find(|&&id| id as usize >= hosted.model.n_vocab()) {
                Some(id) => Err(ApiError::field("token_ids", "numbers of tokens in the vocabulary", id)),
                None => Ok(ids),
            }
        }
    }
}

/// Responses to a request.
struct Responses {
    /// Dropped with the last response: then the worker ends the answers.
    events: Option<EventStream>,
    running: RunningRequest,
    reply: Reply,
    ready: VecDeque<GenerateResponse>,
    /// Resources in use until the last response has been sent.
    _held: Box<dyn Send>,
}

impl Responses {
    fn new(
        events: EventStream,
        running: RunningRequest,
        mut reply: Reply,
        held: impl Send + 'static,
    ) -> Self {
        let ready = reply.begin().into_iter().collect();
        Self { events: Some(events), running, reply, ready, _held: Box::new(held) }
    }

    /// Returns the next response; `None` after the last one.
    async fn next(&mut self) -> Option<Result<GenerateResponse, ApiError>> {
        loop {
            if let Some(response) = self.ready.pop_front() {
                return Some(Ok(response));
            }
            let events = self.events.as_mut()?;
            tokio::select! {
                biased;
                () = self.running.aborted() => {
                    self.events = None;
                    self.ready.extend(self.reply.abort());
                }
                event = events.next() => match self.reply.receive(event) {
                    Ok(response) => {
                        self.ready.extend(response);
                        if self.reply.has_ended() {
                            self.events = None;
                        }
                    }
                    Err(error) => {
                        self.events = None;
                        return Some(Err(error));
                    }
                }
            }
        }
    }
}
