//! `/v1/messages` of Anthropic's API. A request is translated to OpenAI's API; the response is
//! Anthropic's.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use axum::{Extension, Json};
use serde_json::{Map, Value, json};

use kvant::Turn;
use kvant::generate::conversation::AnswerFormat;
use kvant::generate::decoding::Finish;
use kvant::generate::output_parser::{Call, OutputParser, Part};

use super::error::ApiError;
use super::fields::Fields;
use super::response::{Accumulated, ApiFormat, Chunk, Delta, Framing};
use super::unknown_blocks;
use super::unsupported;
use super::{Caller, Server, new_id};
use crate::status::Progress;

/// Prefix of a system text block that a client changes with every request and that means nothing to
/// the model: it would prevent all prefix caching.
const BILLING: &str = "x-anthropic-billing-header";

pub(super) async fn messages(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Response, ApiError> {
    let hosted = server.hosted(&fields).await?;
    fields.need::<u64>("max_tokens", "a whole number")?;
    let model = fields.get("model", "a name")?.unwrap_or_else(|| hosted.name.clone());
    unsupported::check_all(&fields, &unsupported::OF_MESSAGES)?;
    let fields = to_openai(&fields)?;
    let (request, Turn { tokens, answer: AnswerFormat { parser, .. }, .. }) =
        hosted.open(&fields, &server.sampling_defaults(&hosted), &caller).await?;
    let (id, n_prompt) = (new_id("msg"), tokens.len());
    let format = Messages {
        id,
        model,
        n_prompt,
        has_begun: false,
        stop: request.answer.stop.clone(),
        whole: parser.clone(),
        parser,
        open: None,
        n_blocks: 0,
        calls: false,
    };
    hosted.answer(vec![tokens], &request, &caller, format).await
}

/// Returns the number of prompt tokens of a request.
pub(super) async fn count_tokens(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Json<Value>, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let conversation = hosted.conversation(&to_openai(&fields)?)?;
    let Turn { tokens, .. } = hosted.turn(conversation, &caller).await?;
    Ok(Json(json!({ "input_tokens": tokens.len() })))
}

/// Translates a request to OpenAI's API.
fn to_openai(fields: &Fields) -> Result<Fields, ApiError> {
    let mut into = Map::new();
    const SAME: [&str; 10] = [
        "max_tokens",
        "stop_sequences",
        "temperature",
        "top_p",
        "top_k",
        "stream",
        "seed",
        "kv_type",
        "lora",
        "model",
    ];
    for name in SAME {
        if let Some(value) = fields.value(name) {
            into.insert(name.to_owned(), value.clone());
        }
    }
    // Output format, under its current name and the previous one.
    let present =
        fields.object("output_config")?.value("format").map(|format| ("output_config", format.clone()));
    let format = present.or(fields.value("output_format").map(|format| ("output_format", format.clone())));
    if let Some((name, format)) = format {
        if format["type"] != "json_schema" {
            return Err(ApiError::field(name, "a format of type json_schema", format));
        }
        let described = json!({ "type": "json_schema", "json_schema": { "schema": format["schema"] } });
        into.insert("response_format".to_owned(), described);
    }
    let mut messages: Vec<Value> = fields.value("system").map(system).transpose()?.into_iter().collect();
    for given in fields.need::<Vec<Value>>("messages", "a list of messages")? {
        messages.extend(message(&given)?);
    }
    into.insert("messages".to_owned(), messages.into());
    if let Some(tools) = fields.get::<Vec<Value>>("tools", "a list of tools")? {
        let tool = |tool: &Value| {
            let (name, description) = (&tool["name"], &tool["description"]);
            let function =
                json!({ "name": name, "description": description, "parameters": tool["input_schema"] });
            json!({ "type": "function", "function": function })
        };
        into.insert("tools".to_owned(), tools.iter().map(tool).collect());
    }
    let choice = fields.object("tool_choice")?;
    match choice.get::<String>("type", "auto, any, tool or none")?.as_deref() {
        None => {}
        Some("tool") => {
            let name: String = choice.need("name", "a tool's name")?;
            into.insert("tool_choice".to_owned(), json!({ "function": { "name": name } }));
        }
        Some(other) => _ = into.insert("tool_choice".to_owned(), other.into()),
    }
    if choice.flag("disable_parallel_tool_use")? {
        into.insert("parallel_tool_calls".to_owned(), false.into());
    }
    let thinking = fields.object("thinking")?;
    if thinking.value("type").is_some_and(|kind| kind == "disabled") {
        into.insert("chat_template_kwargs".to_owned(), json!({ "enable_thinking": false }));
    }
    if let Some(budget) = thinking.get::<usize>("budget_tokens", "a whole number")? {
        into.insert("thinking_budget_tokens".to_owned(), budget.into());
    }
    Ok(Fields::new(into))
}

/// Converts the system message, given as a text or text blocks.
fn system(given: &Value) -> Result<Value, ApiError> {
    let text = match given {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => {
            let texts = blocks.iter().filter_map(|block| block["text"].as_str());
            texts.filter(|text| !text.starts_with(BILLING)).collect::<Vec<_>>().join("\n\n")
        }
        other => return Err(ApiError::field("system", "a text or blocks of text", other)),
    };
    Ok(json!({ "role": "system", "content": text }))
}

/// Converts a message, and the tool results it contains to messages of their own.
fn message(given: &Value) -> Result<Vec<Value>, ApiError> {
    let role = given["role"].as_str().unwrap_or_default();
    let blocks = match &given["content"] {
        Value::Array(blocks) => blocks.clone(),
        text => vec![json!({ "type": "text", "text": text })],
    };
    let (mut messages, mut text, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    let mut content: Vec<Value> = Vec::new();
    for block in &blocks {
        match (block["type"].as_str().unwrap_or_default(), block["text"].as_str()) {
            ("text", Some(block_text)) if content.is_empty() => text.push(block_text.to_owned()),
            ("text", Some(_)) => content.push(block.clone()),
            // Earlier text becomes a content part as well.
            ("image", _) => {
                let before = std::mem::take(&mut text).join("\n\n");
                content.extend((!before.is_empty()).then(|| json!({ "type": "text", "text": before })));
                content.push(block.clone());
            }
            ("thinking" | "redacted_thinking", _) => {}
            ("tool_use", _) => {
                let function = json!({ "name": block["name"], "arguments": block["input"].to_string() });
                calls.push(json!({ "id": block["id"], "type": "function", "function": function }));
            }
            ("tool_result", _) => messages.push(json!({
                "role": "tool",
                "tool_call_id": block["tool_use_id"],
                "content": block["content"],
            })),
            _ if content.is_empty() => text.push(unknown_blocks::as_text(block)?),
            _ => content.push(json!({ "type": "text", "text": unknown_blocks::as_text(block)? })),
        }
    }
    if !text.is_empty() || !content.is_empty() || !calls.is_empty() || messages.is_empty() {
        let content = if content.is_empty() { text.join("\n\n").into() } else { Value::Array(content) };
        let mut converted = json!({ "role": role, "content": content });
        if !calls.is_empty() {
            converted["tool_calls"] = calls.into();
        }
        messages.push(converted);
    }
    Ok(messages)
}

/// Type of a content block.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Text,
    Reasoning,
    Call,
}

struct Messages {
    id: String,
    model: String,
    n_prompt: usize,
    has_begun: bool,
    /// Stop strings.
    stop: Vec<String>,
    /// Output parser in its initial state.
    whole: OutputParser,
    parser: OutputParser,
    /// Content block in progress.
    open: Option<Kind>,
    n_blocks: usize,
    calls: bool,
}

fn stop_reason(finish: Finish, calls: bool) -> &'static str {
    match (finish, calls) {
        (Finish::Length, _) => "max_tokens",
        (_, true) => "tool_use",
        (Finish::Stop, false) => "end_turn",
        (Finish::Word(_), false) => "stop_sequence",
    }
}

impl Messages {
    fn message(&self, content: Value, usage: Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage,
        })
    }

    /// Returns the stop string that ended the answer.
    fn word(&self, finish: Finish) -> Option<&str> {
        match finish {
            Finish::Word(index) => self.stop.get(index).map(String::as_str),
            Finish::Stop | Finish::Length => None,
        }
    }

    /// Returns the usage: prompt tokens, of which `cached` came from the prefix cache, and
    /// generated tokens.
    fn usage(&self, cached: usize, n_generated: usize) -> Value {
        json!({
            "input_tokens": self.n_prompt - cached.min(self.n_prompt),
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": n_generated,
        })
    }

    fn close(&mut self, out: &mut VecDeque<Chunk>) {
        if self.open.take().is_some() {
            out.push_back(Chunk(json!({ "type": "content_block_stop", "index": self.n_blocks - 1 })));
        }
    }

    fn begin_block(&mut self, kind: Kind, block: Value, out: &mut VecDeque<Chunk>) {
        self.close(out);
        let index = self.n_blocks;
        out.push_back(Chunk(
            json!({ "type": "content_block_start", "index": index, "content_block": block }),
        ));
        (self.n_blocks, self.open) = (index + 1, Some(kind));
    }

    fn part(&mut self, part: &Part, out: &mut VecDeque<Chunk>) {
        let (kind, delta) = match part {
            Part::Text(text) => (Kind::Text, json!({ "type": "text_delta", "text": text })),
            Part::Reasoning(text) => (Kind::Reasoning, json!({ "type": "thinking_delta", "thinking": text })),
            Part::Arguments(text) => {
                (Kind::Call, json!({ "type": "input_json_delta", "partial_json": text }))
            }
            Part::Call(name) => {
                self.calls = true;
                let block = json!({ "type": "tool_use", "id": new_id("toolu"), "name": name, "input": {} });
                return self.begin_block(Kind::Call, block, out);
            }
        };
        match kind {
            _ if self.open == Some(kind) => {}
            Kind::Reasoning => {
                self.begin_block(kind, json!({ "type": "thinking", "thinking": "", "signature": "" }), out);
            }
            Kind::Text | Kind::Call => self.begin_block(kind, json!({ "type": "text", "text": "" }), out),
        }
        let index = self.n_blocks - 1;
        out.push_back(Chunk(json!({ "type": "content_block_delta", "index": index, "delta": delta })));
    }
}

impl ApiFormat for Messages {
    const FRAMING: Framing = Framing::Named;
    const REPORTS_PROGRESS: bool = true;

    /// Starts the message once the number of cached tokens is known.
    fn progress(&mut self, progress: Progress, out: &mut VecDeque<Chunk>) {
        if !std::mem::replace(&mut self.has_begun, true) {
            let message = self.message(json!([]), self.usage(progress.cached, 0));
            out.push_back(Chunk(json!({ "type": "message_start", "message": message })));
        }
    }

    fn delta(&mut self, piece: &Delta<'_>, out: &mut VecDeque<Chunk>) {
        let parts = self.parser.push_text(piece.text, piece.finish.is_some());
        parts.iter().for_each(|part| self.part(part, out));
        let Some(finish) = piece.finish else { return };
        self.close(out);
        let word = self.word(finish);
        let delta = json!({ "stop_reason": stop_reason(finish, self.calls), "stop_sequence": word });
        let times = &piece.answer.times;
        let usage = self.usage(times.prompt.cached, times.n_generated);
        out.push_back(Chunk(json!({ "type": "message_delta", "delta": delta, "usage": usage })));
    }

    fn end(&mut self, _answers: &[Accumulated], out: &mut VecDeque<Chunk>) {
        out.push_back(Chunk(json!({ "type": "message_stop" })));
    }

    fn broken(&mut self, error: &ApiError, out: &mut VecDeque<Chunk>) {
        out.push_back(Chunk(json!({ "type": "error", "error": error.object() })));
    }

    fn whole(&mut self, answers: &[Accumulated]) -> Value {
        let answer = &answers[0];
        let mut content = Vec::<Value>::new();
        let mut add = |kind: &str, field: &str, text: String| match content.last_mut() {
            Some(last) if last["type"] == kind => {
                last[field] = format!("{}{text}", last[field].as_str().unwrap_or_default()).into();
            }
            _ => content.push(json!({ "type": kind, field: text })),
        };
        let mut used: Vec<Call> = Vec::new();
        for part in self.whole.whole(&answer.text) {
            match part {
                Part::Text(text) => add("text", "text", text),
                Part::Reasoning(text) => add("thinking", "thinking", text),
                Part::Call(name) => used.push(Call::of(name)),
                Part::Arguments(text) => {
                    used.iter_mut().last().into_iter().for_each(|call| call.arguments += &text)
                }
            }
        }
        for block in content.iter_mut().filter(|block| block["type"] == "thinking") {
            block["signature"] = "".into();
        }
        let block = |call: &Call| json!({ "type": "tool_use", "id": new_id("toolu"), "name": call.name, "input": call.object() });
        content.extend(used.iter().map(block));
        let mut message =
            self.message(content.into(), self.usage(answer.times.prompt.cached, answer.times.n_generated));
        message["stop_reason"] = answer.finish.map(|finish| stop_reason(finish, !used.is_empty())).into();
        message["stop_sequence"] = answer.finish.and_then(|finish| self.word(finish)).into();
        message
    }
}
