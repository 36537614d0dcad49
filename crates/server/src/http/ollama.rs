//! Ollama's API: `/api/chat`, `/api/generate`, `/api/embed` and model information. A request is
//! translated to OpenAI's API; the response is JSON lines.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use kvant::chat::ReasoningParser;
use kvant::generate::conversation::AnswerFormat;
use kvant::generate::decoding::Finish;
use kvant::generate::output_parser::{Call, OutputParser, ParsedAnswer, Part};
use kvant::{Model, Turn};
use serde::Serialize;
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::error::ApiError;
use super::fields::Fields;
use super::generation_request::GenerationRequest;
use super::response::{Accumulated, ApiFormat, Chunk, Delta, Framing};
use super::{Caller, ServedModel, Server, sampling, unsupported};
use crate::status::AnswerStats;

/// Error in ollama's format.
pub(super) struct OllamaError(ApiError);

impl From<ApiError> for OllamaError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for OllamaError {
    fn into_response(self) -> Response {
        let message = self.0.message().to_owned();
        self.0.into_response_with(json!({ "error": message }))
    }
}

/// Latest ollama release whose requests are supported: clients query it before anything else.
const VERSION: &str = "0.12.0";

pub(super) async fn version() -> Json<Value> {
    Json(json!({ "version": VERSION }))
}

pub(super) async fn tags(State(server): State<Arc<Server>>) -> Json<Value> {
    let tag = |(name, hosted): &(&str, Option<Arc<ServedModel>>)| {
        let bytes = hosted.as_ref().map_or(0, |hosted| hosted.model.weight_bytes());
        json!({
            "name": name,
            "model": name,
            "modified_at": timestamp(),
            "size": bytes,
            "digest": digest(name),
            "details": details(hosted.as_deref()),
        })
    };
    let models: Vec<Value> = server.pool.models().iter().map(tag).collect();
    Json(json!({ "models": models }))
}

/// Lists the models in memory.
pub(super) async fn running(State(server): State<Arc<Server>>) -> Json<Value> {
    let running = |(name, hosted): &(&str, Option<Arc<ServedModel>>)| {
        let hosted = hosted.as_ref()?;
        let bytes = hosted.model.weight_bytes();
        let on_gpu = if hosted.model.device().name == "cpu" { 0 } else { bytes };
        Some(json!({
            "name": name,
            "model": name,
            "size": bytes,
            "size_vram": on_gpu,
            "digest": digest(name),
            "details": details(Some(hosted)),
            "context_length": hosted.n_ctx,
            // A model stays until its memory is needed.
            "expires_at": "9999-12-31T23:59:59Z",
        }))
    };
    let models: Vec<Value> = server.pool.models().iter().filter_map(running).collect();
    Json(json!({ "models": models }))
}

/// Rejects changes of models: they are fixed when the server starts.
pub(super) async fn unchangeable() -> OllamaError {
    let message = "models are those that kvant serve was started with: -m, -hf or --also names them";
    OllamaError(ApiError::new(StatusCode::NOT_IMPLEMENTED, "not_supported_error", message))
}

/// Returns 64 hexadecimal digits: clients truncate them to twelve without a check.
fn digest(name: &str) -> String {
    format!("{:064x}", xxh3_128(name.as_bytes()))
}

fn details(hosted: Option<&ServedModel>) -> Value {
    let family = hosted.and_then(|hosted| {
        hosted.model.gguf().meta().find::<&str>("general.architecture").ok().flatten().map(str::to_owned)
    });
    let size = hosted.map(|hosted| format!("{:.1}M", hosted.model.n_params() as f64 / 1e6));
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": family.iter().collect::<Vec<_>>(),
        "parameter_size": size,
        "quantization_level": "",
    })
}

pub(super) async fn show(
    State(server): State<Arc<Server>>,
    fields: Result<Fields, ApiError>,
) -> Result<Json<Value>, OllamaError> {
    let hosted = hosted(&server, &fields?).await?;
    let meta = hosted.model.gguf().meta();
    let text = |key: &str| meta.find::<&str>(key).ok().flatten().unwrap_or_default().to_owned();
    let (config, architecture) = (hosted.model.config(), text("general.architecture"));
    let mut info = Map::new();
    info.insert("general.architecture".to_owned(), architecture.as_str().into());
    info.insert("general.parameter_count".to_owned(), hosted.model.n_params().into());
    info.insert(format!("{architecture}.context_length"), hosted.n_ctx.into());
    info.insert(format!("{architecture}.embedding_length"), config.n_embd.into());
    Ok(Json(json!({
        "modelfile": "",
        "parameters": "",
        "template": text("tokenizer.chat_template"),
        "details": details(Some(&hosted)),
        "model_info": info,
        "capabilities": capabilities(&hosted.model),
    })))
}

/// Returns the capabilities of a model by ollama's names.
fn capabilities(model: &Model) -> Vec<&'static str> {
    let template = model.chat_template().map(|template| template.source().to_owned()).unwrap_or_default();
    let embeds = model.is_encoder();
    [
        ("completion", !embeds),
        ("embedding", embeds),
        ("tools", !template.is_empty()),
        ("thinking", ReasoningParser::of(&template, "") != ReasoningParser::none()),
        ("vision", model.supports_images()),
        ("audio", model.supports_audio()),
        ("insert", model.fim_tokens().is_some()),
    ]
    .into_iter()
    .filter_map(|(name, can)| can.then_some(name))
    .collect()
}

/// Returns the model of a request; `name:latest` is `name`.
async fn hosted(server: &Arc<Server>, fields: &Fields) -> Result<Arc<ServedModel>, ApiError> {
    let name: Option<String> = fields.any(&["model", "name"], "a model's name")?;
    let name = name.as_deref().map(|name| name.strip_suffix(":latest").unwrap_or(name));
    server.pool.get(name).await
}

pub(super) async fn chat(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Result<Fields, ApiError>,
) -> Result<Response, OllamaError> {
    let fields = fields?;
    let hosted = hosted(&server, &fields).await?;
    let messages: Vec<Value> = fields.get("messages", "a list of messages")?.unwrap_or_default();
    if messages.is_empty() {
        return Ok(loaded(&hosted, json!({ "message": { "role": "assistant", "content": "" } })));
    }
    let mut into = to_openai(&fields)?;
    let messages = messages.into_iter().map(message).collect::<Result<Vec<_>, _>>()?;
    into.insert("messages".to_owned(), messages.into());
    if let Some(tools) = fields.value("tools") {
        into.insert("tools".to_owned(), tools.clone());
    }
    let (request, Turn { tokens, answer: AnswerFormat { parser, .. }, .. }) =
        hosted.open(&Fields::new(into), &server.sampling_defaults(&hosted), &caller).await?;
    let format = Ollama::new(&hosted, parser, true);
    Ok(hosted.answer(vec![tokens], &request, &caller, format).await?)
}

pub(super) async fn generate(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Result<Fields, ApiError>,
) -> Result<Response, OllamaError> {
    let fields = fields?;
    let hosted = hosted(&server, &fields).await?;
    for name in ["suffix", "template", "context"] {
        if fields.value(name).is_some_and(|value| !matches!(value.as_str(), Some("")) && *value != json!([]))
        {
            return Err(ApiError::field(name, "nothing: this server does not take it", "a value").into());
        }
    }
    let prompt: String = fields.get("prompt", "a text")?.unwrap_or_default();
    if prompt.is_empty() {
        return Ok(loaded(&hosted, json!({ "response": "" })));
    }
    let mut into = to_openai(&fields)?;
    let (request, tokens, parser) = if fields.flag("raw")? {
        let request =
            GenerationRequest::read(&Fields::new(into), &server.sampling_defaults(&hosted), &hosted)?;
        let tokens = hosted.text_tokens(prompt).await?;
        (request, tokens, AnswerFormat::default().parser)
    } else {
        let system: Option<String> = fields.get("system", "a text")?;
        let system = system.map(|text| json!({ "role": "system", "content": text }));
        let images: Vec<Value> = fields.get("images", "a list of images")?.unwrap_or_default();
        let question = message(json!({ "role": "user", "content": prompt, "images": images }))?;
        let messages: Vec<Value> = system.into_iter().chain([question]).collect();
        into.insert("messages".to_owned(), messages.into());
        let (request, Turn { tokens, answer: AnswerFormat { parser, .. }, .. }) =
            hosted.open(&Fields::new(into), &server.sampling_defaults(&hosted), &caller).await?;
        (request, tokens, parser)
    };
    let format = Ollama::new(&hosted, parser, false);
    Ok(hosted.answer(vec![tokens], &request, &caller, format).await?)
}

/// Response of [`embed`].
#[derive(Serialize)]
struct Embeddings {
    model: String,
    embeddings: Vec<Vec<f32>>,
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

pub(super) async fn embed(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Result<Fields, ApiError>,
) -> Result<Response, OllamaError> {
    let (fields, started) = (fields?, Instant::now());
    let hosted = hosted(&server, &fields).await?;
    let embedded = server.embed_all(&hosted, "input", &fields, &caller).await?;
    Ok(Json(Embeddings {
        model: hosted.name.clone(),
        embeddings: embedded.vectors()?,
        total_duration: started.elapsed().as_nanos() as u64,
        load_duration: 0,
        prompt_eval_count: embedded.n_tokens,
    })
    .into_response())
}

/// Response of [`embeddings`], the predecessor of [`embed`] for one text.
#[derive(Serialize)]
struct Embedding {
    embedding: Vec<f32>,
}

pub(super) async fn embeddings(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Result<Fields, ApiError>,
) -> Result<Response, OllamaError> {
    let fields = fields?;
    let hosted = hosted(&server, &fields).await?;
    let text: String = fields.need("prompt", "a text")?;
    let text = hosted.embedding_tokens(text).await?;
    let embedded = server.embed(&hosted, vec![text], &fields, &caller).await?;
    Ok(Json(Embedding { embedding: embedded.vectors()?.remove(0) }).into_response())
}

/// Returns the response to an empty request: clients preload models with it.
fn loaded(hosted: &ServedModel, mut response: Value) -> Response {
    let more =
        json!({ "model": hosted.name, "created_at": timestamp(), "done": true, "done_reason": "load" });
    if let (Some(response), Value::Object(more)) = (response.as_object_mut(), more) {
        response.extend(more);
    }
    Json(response).into_response()
}

/// Translates the options of a request to OpenAI's API, without messages and prompt.
fn to_openai(fields: &Fields) -> Result<Map<String, Value>, ApiError> {
    // Options with equal names in both APIs.
    const NAMES: [&str; 5] = ["seed", "stop", "presence_penalty", "frequency_penalty", "num_predict"];
    unsupported::check_all(fields, &unsupported::OF_OLLAMA)?;
    let (options, mut into) = (fields.object("options")?, Map::new());
    let missing = unsupported::SAMPLERS.map(|(name, _)| name);
    for name in NAMES.into_iter().chain(missing).map(str::to_owned).chain(sampling::names()) {
        if let Some(value) = options.value(&name) {
            into.insert(name, value.clone());
        }
    }
    // Ollama streams by default.
    into.insert("stream".to_owned(), fields.get("stream", "true or false")?.unwrap_or(true).into());
    match fields.value("format") {
        None => {}
        Some(Value::String(name)) if name.is_empty() => {}
        Some(Value::String(name)) if name == "json" => {
            into.insert("response_format".to_owned(), json!({ "type": "json_object" }));
        }
        Some(schema @ Value::Object(_)) => _ = into.insert("json_schema".to_owned(), schema.clone()),
        Some(other) => return Err(ApiError::field("format", "json or a JSON schema", other)),
    }
    match fields.value("think") {
        None => {}
        Some(Value::Bool(thinks)) => {
            into.insert("chat_template_kwargs".to_owned(), json!({ "enable_thinking": thinks }));
        }
        Some(Value::String(effort)) => {
            into.insert("chat_template_kwargs".to_owned(), json!({ "reasoning_effort": effort }));
        }
        Some(other) => return Err(ApiError::field("think", "true, false or an effort", other)),
    }
    for (name, was) in [("kv_type", "kv_type"), ("lora", "lora"), ("model", "name"), ("model", "model")] {
        if let Some(value) = fields.value(was) {
            into.insert(name.to_owned(), value.clone());
        }
    }
    Ok(into)
}

/// Converts a message: the arguments of calls become text, calls get ids, and images become content
/// parts.
fn message(mut message: Value) -> Result<Value, ApiError> {
    if let Some(Value::Array(images)) = message.as_object_mut().and_then(|message| message.remove("images"))
        && !images.is_empty()
    {
        let images = images.iter().map(|data| json!({ "type": "image", "source": { "data": data } }));
        let text = json!({ "type": "text", "text": message["content"].as_str().unwrap_or_default() });
        message["content"] = images.chain([text]).collect();
    }
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        // A call that is not an object is rejected where messages are read.
        for (index, call) in
            calls.iter_mut().enumerate().filter_map(|(i, call)| Some((i, call.as_object_mut()?)))
        {
            let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
            if let Some(arguments) = arguments.filter(|arguments| arguments.is_object()) {
                *arguments = arguments.to_string().into();
            }
            call.insert("type".to_owned(), "function".into());
            if call.get("id").is_none_or(Value::is_null) {
                call.insert("id".to_owned(), format!("call_{index}").into());
            }
        }
    }
    Ok(message)
}

struct Ollama {
    model: String,
    /// Output parser in its initial state.
    whole: OutputParser,
    parser: OutputParser,
    /// Output received and not yet sent.
    output: ParsedAnswer,
    /// Tool call in progress: ollama sends calls whole.
    call: Option<Call>,
    is_chat: bool,
}

impl Ollama {
    fn new(hosted: &ServedModel, parser: OutputParser, is_chat: bool) -> Self {
        let (model, whole) = (hosted.name.clone(), parser.clone());
        Self { model, whole, parser, output: ParsedAnswer::default(), call: None, is_chat }
    }

    fn push(&mut self, text: &str, is_last: bool) {
        for part in self.parser.push_text(text, is_last) {
            match (part, &mut self.call) {
                (Part::Arguments(text), Some(call)) => call.arguments += &text,
                (part, call) => {
                    self.output.calls.extend(call.take());
                    match part {
                        Part::Call(name) => *call = Some(Call::of(name)),
                        part => self.output.extend([part]),
                    }
                }
            }
        }
        if is_last {
            self.output.calls.extend(self.call.take());
        }
    }

    /// Takes the output received since the last line.
    fn take(&mut self) -> Map<String, Value> {
        let ParsedAnswer { text: content, reasoning, calls } = std::mem::take(&mut self.output);
        let mut line = Map::new();
        line.insert("model".to_owned(), self.model.as_str().into());
        line.insert("created_at".to_owned(), timestamp().into());
        if !self.is_chat {
            line.insert("response".to_owned(), content.into());
            if !reasoning.is_empty() {
                line.insert("thinking".to_owned(), reasoning.into());
            }
            return line;
        }
        let mut message = json!({ "role": "assistant", "content": content });
        if !reasoning.is_empty() {
            message["thinking"] = reasoning.into();
        }
        if !calls.is_empty() {
            let call = |call: Call| json!({ "function": { "name": call.name, "arguments": call.object() } });
            message["tool_calls"] = calls.into_iter().map(call).collect();
        }
        line.insert("message".to_owned(), message);
        line
    }

    /// Returns the last line of a stream, or the only one.
    fn last(&mut self, answer: &Accumulated) -> Value {
        let mut line = self.take();
        line.insert("done".to_owned(), true.into());
        let reason = if answer.finish == Some(Finish::Length) { "length" } else { "stop" };
        line.insert("done_reason".to_owned(), reason.into());
        line.extend(durations(&answer.times));
        line.into()
    }
}

/// Returns token counts and their durations in nanoseconds.
fn durations(times: &AnswerStats) -> Map<String, Value> {
    let nanoseconds = |time: Duration| time.as_nanos() as u64;
    let fields = [
        ("total_duration", nanoseconds(times.prompt.took + times.decode_time)),
        ("load_duration", 0),
        ("prompt_eval_count", times.prompt.total as u64),
        ("prompt_eval_duration", nanoseconds(times.prompt.took)),
        ("eval_count", times.n_generated as u64),
        ("eval_duration", nanoseconds(times.decode_time)),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect()
}

impl ApiFormat for Ollama {
    const FRAMING: Framing = Framing::Lines;

    fn delta(&mut self, piece: &Delta<'_>, out: &mut VecDeque<Chunk>) {
        self.push(piece.text, piece.finish.is_some());
        if self.output != ParsedAnswer::default() {
            let mut line = self.take();
            line.insert("done".to_owned(), false.into());
            out.push_back(Chunk(line.into()));
        }
        if piece.finish.is_some() {
            let last = self.last(piece.answer);
            out.push_back(Chunk(last));
        }
    }

    fn end(&mut self, _answers: &[Accumulated], _out: &mut VecDeque<Chunk>) {}

    fn broken(&mut self, error: &ApiError, out: &mut VecDeque<Chunk>) {
        out.push_back(Chunk(json!({ "error": error.message() })));
    }

    fn whole(&mut self, answers: &[Accumulated]) -> Value {
        self.parser = self.whole.clone();
        self.take();
        self.push(&answers[0].text, true);
        self.last(&answers[0])
    }
}

/// Returns the current time in ollama's format: RFC 3339 in UTC.
fn timestamp() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_rfc_3339_in_utc() {
        let written = timestamp();
        let read: jiff::Timestamp = written.parse().unwrap();
        assert!((written.len(), &written[10..11], &written[26..]) == (27, "T", "Z"), "{written}");
        assert!(jiff::Timestamp::now().duration_since(read).abs() < jiff::SignedDuration::from_hours(1));
    }
}
